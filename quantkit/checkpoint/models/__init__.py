"""Models: one module per family, found by ``registry``.

A module has ``ARCHITECTURES``: model class -> how its checkpoints become a GGUF file (rules of tensors and rows of
keys, each with its inverse; vocabulary), and ``CLASSES``: model class -> its form in transformers, for each class that
`quantkit export` writes. Facts of llama.cpp b11434, conversion/*.py, and of transformers 4.57.6.
"""
