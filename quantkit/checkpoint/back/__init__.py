"""The way back: a GGUF file as the checkpoint of Hugging Face that it may come from.

``open_export`` reads a GGUF file's header and returns an ``Exported``: a source of the pipeline whose tensors have
the names and shapes of a checkpoint, made while they are read, with config.json and the files of the tokenizer beside
them. It follows the same rows as the way here (``architectures.ROWS``), backwards, and then the way here once more over
what it made: names, shapes and keys that would not come back are an error, not a model that is slightly different.

* ``encoded``: a tensor of a file as values. ``rules``: what rules did, undone. ``classes``: how classes of transformers
  spell what a file of their architecture says. ``config``: metadata to config.json. ``tokenizer``, ``pre_tokenizers``:
  the vocabulary.
"""

from __future__ import annotations

from quantkit.checkpoint.back.exported import Exported, open_export

__all__ = ["Exported", "open_export"]
