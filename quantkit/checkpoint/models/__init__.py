"""Models: one module a family, which ``registry`` finds.

A module has ``ARCHITECTURES``: model class -> how its checkpoints become a GGUF file (rules of tensors and rows of
keys, each with its inverse; vocabulary), and ``CLASSES``: model class -> how transformers has it, of each that
`quantkit export` writes. Facts of llama.cpp b11434, conversion/*.py, and of transformers 4.57.6.
"""
