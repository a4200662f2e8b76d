"""What scripts/gpu_check runs on a GPU: the same cases as on the CPU, checked first, then timed."""
