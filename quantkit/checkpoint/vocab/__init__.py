"""Vocabularies: the tokenizer of a checkpoint as tokenizer.* keys.

Each kind is a function of a ``tokenizer.Vocabulary`` that sets keys, in the order of the class of convert_hf_to_gguf.py
(b11434) that it is named after: ``bpe`` (also WordPiece), ``sentencepiece``, ``unigram``, ``tiktoken``, ``tekken``. A
row of a model names its function (``Architecture.vocab``); functions of only one family are in its module (``models``).
"""
