"""A Hugging Face checkpoint as the GGUF file it converts to.

``open_checkpoint`` reads configuration, tokenizer and the headers of all files, and returns a ``Checkpoint``: a source
of the pipeline like a GGUF file, with the metadata and the tensors, in their order, that convert_hf_to_gguf.py (b11434)
would write. No weight is read before it is requested; rows are then computed from only the bytes they need.

* ``config``: config.json with the defaults of transformers' classes (``class_defaults``).
* ``models``: one module a model family, with the rows (``row``) of its classes; ``registry`` finds them.
* ``tensors``, ``rules``: the rules rows are made of, with their inverses; ``tensor_names``: the map of names;
  ``expressions``: what tensors are made of; ``fusions``: tensors made one on request.
* ``keys``, ``general``, ``vocab``: metadata. ``policy``: types. ``quantized``: weights that are already quantized.
* ``export``: a GGUF file as a checkpoint, by the same rows.
"""

from __future__ import annotations

from quantkit.checkpoint.checkpoint import Checkpoint
from quantkit.checkpoint.open import OpenOptions, open_checkpoint

__all__ = ["Checkpoint", "OpenOptions", "open_checkpoint"]
