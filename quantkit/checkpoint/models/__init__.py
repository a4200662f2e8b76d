"""Models: one module a family, which ``registry`` finds.

A module has ``ARCHITECTURES``, a row for each of its model classes that says how their checkpoints become a GGUF file
(rules of tensors with their inverses, keys, vocabulary), and ``CLASSES``, a row for each class that `quantkit export`
writes. Facts of llama.cpp b11434, conversion/*.py, and of transformers 4.57.6.
"""
