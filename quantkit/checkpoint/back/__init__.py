"""The way back: a GGUF file as the checkpoint of Hugging Face that it may come from.

``open_export`` reads a GGUF file's header and returns an ``Exported``: a source of the pipeline whose tensors have
the names and shapes of a checkpoint, made while they are read, with config.json and the files of the tokenizer beside
them. It follows the same rows as the way here (``architectures.ROWS``), backwards, and then the way here once more over
what it made: names, shapes and keys that would not come back are an error, not a model that is slightly different.

* ``said``: what a file says of its model. ``classes``, ``named``, ``hybrids``, ``mixtures``, ``seeing``, ``older``,
  ``rwkv``, ``encoders``: how classes of transformers spell that, a row (``spelling``) for each; some also undo the
  rules of their families.
* ``encoded``: a tensor of a file as values. ``unfused``: those that a file has in one, in parts. ``rules``,
  ``families``: what rules did, undone.
* ``config``, ``derived``: metadata to config.json. ``tokenizer``: the vocabulary, ``vocabularies`` those of single
  families; ``tokens``, ``pre_tokenizers``, ``pieces``: what they are made of.
"""

from __future__ import annotations

from quantkit.checkpoint.back.exported import Exported, open_export

__all__ = ["Exported", "open_export"]
