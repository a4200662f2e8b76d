"""Error feedback (GPTQ, LDLQ) on a GPU: bytes and losses of kernels/cpu/feedback, in the same files."""
