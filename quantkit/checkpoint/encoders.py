"""The vision and audio encoders of a checkpoint: their row, their configuration, and the stored tensors they own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.config import Config, read_config
from quantkit.checkpoint.expressions import Expression
from quantkit.checkpoint.mmproj import CLIP, Mmproj, MmprojConfig
from quantkit.checkpoint.registry import find_mmproj
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, apply_rules
from quantkit.formats.safetensors import read_checkpoint


@dataclass(frozen=True)
class Encoders:
    """The encoders of a checkpoint, and the context of their rules."""

    row: Mmproj
    config: MmprojConfig
    context: Context

    def tensors(self, name: str, x: Expression) -> Iterator[tuple[str, Expression]]:
        """Yield the tensors of the encoders that a stored tensor is, by their names there; none of the text model's."""
        for renamed in apply_rules(self.row.stored, Tensor(name, x, None), self.context):
            if "language_model." not in renamed.name and re.search(self.row.tensors, renamed.name):
                yield renamed.name, renamed.x


def open_encoders(path: Path) -> Encoders:
    """Return the encoders of the checkpoint in a directory, from its configuration.

    Raises:
        FormatError: the configuration is damaged.
        TypeNotSupported: a class without encoders, or whose encoders are not converted.
    """
    model = _read_model(path)
    row = find_mmproj(model)
    config = MmprojConfig(model, row)
    row.patch_config(config)
    return Encoders(row, config, Context(config, TensorNames(CLIP, row.layers(config))))


def _read_model(path: Path) -> Config:
    """Return the configuration of a checkpoint; Pocket TTS has none, and is known by a tensor."""
    if (path / "config.json").exists() or not path.is_dir() or not list(path.glob("model*.safetensors")):
        return read_config(path)
    if not any("flow_lm.bos_emb" in shard for shard in read_checkpoint(path, allow_incomplete=True)):
        return read_config(path)
    return Config(path / "config.json", {"architectures": ["PocketTTSModel"]})
