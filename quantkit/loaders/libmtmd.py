"""The tensors that libmtmd requires of an mmproj file, and those that a file lacks.

Facts of llama.cpp b11434: scripts/make_encoder_tensors.py asks its library for files without each tensor in turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

#: Keys of the projectors in a file: one for all encoders, or one each.
PROJECTORS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
#: Projectors whose encoders have layers of several kinds, and those whose number of layers is not that of the key.
_UNEVEN, _UNCOUNTED = frozenset({"dots3note_v", "gemma3nv"}), frozenset({"gemma3nv", "qwen3tts_spkenc"})
#: Kinds of tensors that the reference does not write for some models: [IMG_BREAK]'s row of a text model in
#: language_model, the biases of projectors that have none, a norm that it gives another name.
_UNWRITTEN = {
    "pixtral": ("v.token_embd.img_break",),
    "lfm2": ("mm.1.bias", "mm.2.bias"),
    "granite_speech": ("a.blk.*.conv_norm.bias", "a.blk.*.conv_norm.weight"),
}
#: More layers than any encoder has: a number beyond is that of a damaged file.
_MOST_LAYERS = 1 << 12
#: Prefix of the tensors of an encoder's layers, and the key of their number.
_LAYERS = {"v.blk": "clip.vision.block_count", "a.blk": "clip.audio.block_count"}


def kind_of(name: str) -> str:
    """Return a tensor's name with ``*`` for the number of its layer."""
    return re.sub(r"(\bblk)\.\d+\.", r"\1.*.", name, count=1)


@cache
def _required_kinds() -> dict[str, list[list[str]]]:
    """Return the kinds of required tensors by projectors: lists, of which a file needs all of one."""
    text = resources.files(__package__).joinpath("libmtmd.json").read_text(encoding="utf-8")
    return {projectors: [row.split() for row in rows] for projectors, rows in json.loads(text).items()}


def missing_tensors(metadata: Mapping[str, Any], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the tensors that an mmproj file lacks, a layer without any as ``v.blk.2.*``, and those that the reference
    does not write.

    Both are tensors that libmtmd requires; the first also kinds of tensors that other layers of the encoder have.

    Args:
        metadata: keys and values of the file. names: its tensors.
    """
    projectors = {str(metadata[key]) for key in PROJECTORS if metadata.get(key)}
    layers = _layers(metadata, names, projectors)
    empty = [f"{prefix}.{i}.*" for prefix, rows in layers.items() for i, kinds in rows.items() if not kinds]
    if empty:
        return empty, []
    required = _required_kinds().get(" ".join(sorted(projectors)), [])
    lacking = min(
        ([name for name in _names(row, layers) if name not in names] for row in required), key=len, default=[]
    )
    uneven = (
        kind.replace(".*.", f".{i}.", 1)
        for prefix, rows in layers.items()
        if prefix in _LAYERS and not projectors & _UNEVEN
        for i, kinds in rows.items()
        for kind in sorted(set().union(*rows.values()) - kinds)
    )
    missing = list(dict.fromkeys([*lacking, *uneven]))
    unwritten = [name for name in missing if any(kind_of(name) in _UNWRITTEN.get(x, ()) for x in projectors)]
    return [name for name in missing if name not in unwritten], unwritten


def _layers(
    metadata: Mapping[str, Any], names: Collection[str], projectors: set[str]
) -> dict[str, dict[int, set[str]]]:
    """Return the kinds of tensors of every layer, by prefix and number."""
    layers: dict[str, dict[int, set[str]]] = {}
    for prefix, key in _LAYERS.items():
        count = metadata.get(key)
        if isinstance(count, int) and not projectors & _UNCOUNTED:
            layers[prefix] = {i: set() for i in range(min(count, _MOST_LAYERS))}
    for name in names:
        if match := re.match(r"(.*?\bblk)\.(\d{1,9})\.", name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(kind_of(name))
    return layers


def _names(row: Iterable[str], layers: Mapping[str, Collection[int]]) -> Iterator[str]:
    """Yield the names of tensors of some kinds."""
    for kind in row:
        prefix, star, _ = kind.partition(".*.")
        for layer in layers.get(prefix, [0]) if star else [0]:
            yield kind.replace(".*.", f".{layer}.", 1)
