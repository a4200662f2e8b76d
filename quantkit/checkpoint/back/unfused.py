"""Tensors that a file holds in one, taken apart for a class that has them in several: ``fused`` backwards."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, taken
from quantkit.checkpoint.fused import FUSIONS, Fusion
from quantkit.checkpoint.tensor_names import file_name
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def unfused(
    parts: Mapping[str, Expression], kinds: Mapping[str, str], kept: str, config: Config
) -> tuple[dict[str, Expression], list[str]]:
    """Return a file's tensors with fused ones in parts, and the options by which they become one again.

    Args:
        parts: tensors by their names in the file.
        kinds: what kinds of tensor the architecture has are called in a checkpoint.
        kept: names in a checkpoint of those that the class has in one, too.
        config: of the checkpoint.
    """
    found: dict[str, Expression] = {}
    options = []
    apart = [f for f in FUSIONS if f.whole in kinds and kinds[f.whole] not in kept.split()]
    for name, x in parts.items():
        stem, dot, suffix = name.rpartition(".")
        match = re.match(r"blk\.(\d+)\.", name)
        layer = int(match[1]) if match else -1
        fusion = next((f for f in apart if match and stem == file_name(f.whole, layer)), None)
        if fusion is None:
            found[name] = x
            continue
        options.append(fusion.option)
        at = 0
        for kind, size in zip(fusion.parts, _sizes(fusion, name, x, config), strict=True):
            found[f"{file_name(kind, layer)}{dot}{suffix}"] = taken(x, fusion.axis, range(at, at + size))
            at += size
    return found, list(dict.fromkeys(options))


def _sizes(fusion: Fusion, name: str, x: Expression, config: Config) -> list[int]:
    have = x.shape[fusion.axis] if len(x.shape) > fusion.axis else 0
    n = len(fusion.parts)
    sizes = [have // n] * n
    if fusion.option == "--fuse-qkv":
        heads = (config.number("num_attention_heads"), *[config.number("num_key_value_heads")] * 2)
        sizes = [each * config.head_dim for each in heads]
    if sum(sizes) != have or not have:
        raise FormatError(f"{config.path.parent}: tensor {short(name)}: {list(x.shape)} cannot be split into {sizes}")
    return sizes
