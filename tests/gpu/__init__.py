"""Run by scripts/gpu_check on a GPU: the cases of the CPU, checked first, then timed."""
