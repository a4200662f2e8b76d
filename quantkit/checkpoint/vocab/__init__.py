"""Vocabularies: the tokenizer of a checkpoint as tokenizer.* keys.

Each kind is a function of a ``tokenizer.Vocabulary`` that sets keys, in the order of the class of
convert_hf_to_gguf.py (b11434) that it is named after: ``bpe`` (WordPiece, too), ``sentencepiece``,
``unigram``, ``tiktoken``, ``tekken``. A row of a model names its function (``Architecture.vocab``); what only one
family needs is in its module (``models``).
"""
