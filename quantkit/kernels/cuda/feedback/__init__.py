"""Rows rounded with error feedback on a card: the bytes and losses of kernels/cpu/feedback, in the same files."""
