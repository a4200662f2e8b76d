"""The vision and audio encoders of a checkpoint: their row, their configuration, and the stored tensors they own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.mmproj import CLIP, Mmproj, MmprojConfig
from quantkit.checkpoint.registry import find_mmproj, read_model
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, apply_rules
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.remote import locate


@dataclass(frozen=True)
class Encoders:
    """The encoders of a checkpoint, and the context of their rules."""

    row: Mmproj
    config: MmprojConfig
    context: Context

    def tensors(self, name: str, x: Expression) -> Iterator[tuple[str, Expression]]:
        """Yield the tensors of the encoders that a stored tensor is, by their names there; none of the text model's."""
        yield from _own_tensors(name, x, self.row, self.context)


def _own_tensors(name: str, x: Expression, row: Mmproj, context: Context) -> Iterator[tuple[str, Expression]]:
    for tensor in apply_rules(row.stored, Tensor(name, x, None), context):
        if "language_model." not in tensor.name and re.search(row.tensors, tensor.name):
            yield tensor.name, tensor.x


def encoder_tensors(pairs: Iterable[tuple[str, Expression]], row: Mmproj, context: Context) -> dict[str, Expression]:
    """Return those of a checkpoint's tensors that belong to the encoders. Raises FormatError for two of one name."""
    stored: dict[str, Expression] = {}
    for name, x in pairs:
        for text, tensor in _own_tensors(name, x, row, context):
            if text in stored:
                raise context.fail(Tensor(name, x, None), f"two tensors are named {short(text)}", "QK-E107")
            stored[text] = tensor
    if not stored:
        raise FormatError(
            f"{context.config.path.parent}: its files have no tensors of the encoders that config.json describes",
            "QK-E105",
        )
    return stored


def open_encoders(path: Path, mistral_format: bool = False, base: Path | None = None) -> Encoders:
    """Return the encoders of the checkpoint in a directory, from its configuration, or that of Mistral's format.

    Raises:
        FormatError: the configuration is damaged.
        TypeNotSupported: a class without encoders, or whose encoders are not converted.
    """
    model = read_model(path, mistral_format, None if base is None else locate(base))
    row = find_mmproj(model)
    config = MmprojConfig(model, row)
    row.patch_config(config)
    return Encoders(row, config, Context(config, TensorNames(CLIP, row.layers(config))))
