"""Prediction layers (NextN, MTP) after the other layers of a model: with them, without them, only them.

The options --no-nextn and --mtp of convert_hf_to_gguf.py (b11434), for the architectures with ``nextn`` in their row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import Copied, KeyNames
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.tensors import InverseContext, Rule, Tensor
from quantkit.errors import FormatError, RecipeError

WITH = "with"
WITHOUT = "without"
ONLY = "only"
#: Tensors of the main model that a file of prediction layers contains.
_SHARED = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    "norm.weight",
    "model.word_embeddings.weight",
    "backbone.embeddings.weight",
    "backbone.norm_f.weight",
}
_LAYER, _MTP = re.compile(r"model\.layers\.(\d{1,9})\."), re.compile(r"(?:model\.)?mtp\.")
#: The maximum number of layers that llama.cpp loads.
_MAX_NEXTN = 512
#: Tensors stored beside the prediction layers -> their names in each of them (Qwen3-Next and EXAONE).
MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_OPTION = {WITHOUT: "--no-nextn", ONLY: "--mtp"}


def check_nextn(choice: str, row: Architecture, config: Config) -> None:
    """Raise RecipeError for an MTP option that the architecture does not support."""
    if choice != WITH and not row.nextn:
        raise RecipeError(
            f"{config.path}: {config.architecture} has no prediction layers (MTP) to convert: omit {_OPTION[choice]}",
            "QK-E206",
        )


def is_nextn_tensor(name: str, config: Config) -> bool:
    """Return whether a stored tensor, by its name in the text model, belongs to a prediction layer (MTP)."""
    layer = _LAYER.match(name)
    return _MTP.match(name) is not None or (layer is not None and int(layer[1]) >= config.layers)


def is_selected(name: str, choice: str, config: Config) -> bool:
    """Return whether a stored tensor belongs to the choice."""
    if choice == WITH:
        return True
    return not is_nextn_tensor(name, config) if choice == WITHOUT else is_nextn_tensor(name, config) or name in _SHARED


def nextn_layers(config: Config) -> int:
    """Return the number of MTP layers, which follow the others."""
    n = config.number("num_nextn_predict_layers") if config.get("num_nextn_predict_layers") is not None else 0
    if n > _MAX_NEXTN:  # one stored layer may serve as all of them
        raise FormatError(f"{config.path}: num_nextn_predict_layers is {n}", "QK-E112")
    return n


def layers_with_nextn(config: Config) -> int:
    """Return the number of layers, including prediction layers (MTP)."""
    return config.layers + nextn_layers(config)


def subtract_nextn_layers(meta: ModelMetadata, config: Json) -> None:
    """Subtract the MTP layers from num_hidden_layers."""
    config["num_hidden_layers"] -= meta.get(".nextn_predict_layers") or 0


@dataclass(frozen=True)
class NextnCount(Copied):
    """The number of MTP layers, which num_hidden_layers does not count."""

    key: str = ".nextn_predict_layers"
    names: str = "num_nextn_predict_layers"

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        super().invert(meta, config, names)
        subtract_nextn_layers(meta, config)


NEXTN_KEY = NextnCount()
NEXTN_IF_ANY = NextnCount(unless_zero=True)


class MtpRule(Rule):
    """A rule for layers stored as mtp.* that follow the others in a file, with a common inverse."""

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor.name)
        number = -1 if match is None else int(match[1]) - context.config.layers
        if match is None or number < 0:
            return None
        stems = {stem: name for name, stem in MTP_NAMES.items()}
        stem, _, suffix = match[2].rpartition(".")
        if stem in stems and number > 0:
            return ()  # all prediction layers share it
        name = f"mtp.{stems[stem]}.{suffix}" if stem in stems else f"mtp.layers.{number}.{match[2]}"
        return (replace(tensor, name=name),)
