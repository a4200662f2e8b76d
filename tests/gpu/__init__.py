"""What scripts/gpu_check runs on a card: the same cases as on the CPU, checked first, then timed."""
