"""Layers that predict more tokens (NextN, MTP) behind the others of a model: with them, without them, only them.

The options --no-nextn and --mtp of convert_hf_to_gguf.py (b11434), for the architectures whose row says ``nextn``.
"""

from __future__ import annotations

import re

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.row import Architecture
from quantkit.errors import RecipeError

WITH, WITHOUT, ONLY = "with", "without", "only"
#: What a file of the layers that predict has of the rest of the model.
_SHARED = {
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    *("embed_tokens.weight", "norm.weight", "model.word_embeddings.weight"),
    *("backbone.embeddings.weight", "backbone.norm_f.weight"),
}
_LAYER, _APART = re.compile(r"model\.layers\.(\d{1,9})\."), re.compile(r"(?:model\.)?mtp\.")
_OPTION = {WITHOUT: "--no-nextn", ONLY: "--mtp"}


def check_nextn(wanted: str, row: Architecture, config: Config) -> None:
    """Raise RecipeError for a choice that means nothing for this architecture."""
    if wanted != WITH and not row.nextn:
        raise RecipeError(
            f"{config.path}: {config.architecture} has no layers that predict more tokens, or none that are "
            f"converted: leave {_OPTION[wanted]} away"
        )


def predicts(name: str, config: Config) -> bool:
    """Tell whether a stored tensor, by its name in the text model, is of a layer that predicts more tokens."""
    layer = _LAYER.match(name)
    return _APART.match(name) is not None or (layer is not None and int(layer[1]) >= config.layers)


def is_taken(name: str, wanted: str, config: Config) -> bool:
    """Tell whether a stored tensor belongs to what is wanted."""
    if wanted == WITH:
        return True
    return not predicts(name, config) if wanted == WITHOUT else predicts(name, config) or name in _SHARED
