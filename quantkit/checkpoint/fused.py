"""Tensors that are made one on request: gate and up of experts, or queries, keys and values.

As --fuse-gate-up-exps and --fuse-qkv of convert_hf_to_gguf.py (llama.cpp b11434, ModelBase.modify_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.expressions import Expression, Joined, joined, taken
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Tensor
from quantkit.errors import TypeNotSupported

_Named = tuple[str, Tensor]
_IN_FILE = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class _Fusion:
    """Tensors of ``kinds``, of one layer, become one of the kind ``into``."""

    kinds: tuple[str, ...]
    into: str


_GATE_UP = _Fusion(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps")
_QKV = _Fusion(("attn_q", "attn_k", "attn_v"), "attn_qkv")


def fused(named: Iterable[_Named], names: TensorNames, *, gate_up: bool, qkv: bool) -> list[_Named]:
    """Return the tensors of a file with those that are wanted made one, where the last of them was.

    Blocks that were quantized already stay apart: they have scales of their own.

    Args:
        named: names in the file, tensors.
        names: of the architecture.
        gate_up: gate and up of experts, one behind the other for each expert.
        qkv: queries, keys and values, where a layer has all of them, and all or none of their biases.

    Raises:
        TypeNotSupported: the architecture cannot have gate and up in one.
    """
    tensors = list(named)
    if gate_up:
        found = _groups(tensors, _GATE_UP)
        if found and f"*{_GATE_UP.into}" not in names.kinds:
            raise TypeNotSupported(
                "--fuse-gate-up-exps: llama.cpp does not run this architecture with gate and up of experts in one"
            )
        tensors = _fused(tensors, _GATE_UP, found)
    if qkv and f"*{_QKV.into}" in names.kinds:
        found = _groups(tensors, _QKV)
        some = {layer for name, _ in tensors if (layer := _partial_bias(name, found)) is not None}
        tensors = _fused(tensors, _QKV, {key: at for key, at in found.items() if key[0] not in some})
    return tensors


def _partial_bias(name: str, found: dict[tuple[str, str], list[int]]) -> str | None:
    """Return the layer of a bias that is not of a whole set."""
    match = _IN_FILE.fullmatch(name)
    if match is None or match[2] not in _QKV.kinds or match[3] != "bias" or (match[1], "bias") in found:
        return None
    return match[1]


def _groups(tensors: list[_Named], fusion: _Fusion) -> dict[tuple[str, str], list[int]]:
    """Return where the tensors of a fusion are, in the order of its kinds, by layer and suffix; whole sets alone."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for i, (name, tensor) in enumerate(tensors):
        match = _IN_FILE.fullmatch(name)
        if match is not None and match[2] in fusion.kinds and tensor.x.type.block == 1:
            found.setdefault((match[1], match[3]), {})[match[2]] = i
    return {key: [at[kind] for kind in fusion.kinds] for key, at in found.items() if len(at) == len(fusion.kinds)}


def _fused(tensors: list[_Named], fusion: _Fusion, groups: dict[tuple[str, str], list[int]]) -> list[_Named]:
    made: dict[int, _Named | None] = {}
    for (layer, suffix), at in groups.items():
        parts = [tensors[i][1] for i in at]
        join = _by_expert if fusion is _GATE_UP and len(parts[0].x.shape) == 3 else joined
        made |= dict.fromkeys(at)
        made[max(at)] = (f"blk.{layer}.{fusion.into}.{suffix}", replace(parts[0], x=join([part.x for part in parts])))
    result = [made.get(i, each) for i, each in enumerate(tensors)]
    return [each for each in result if each is not None]


def _by_expert(xs: list[Expression]) -> Expression:
    """Return the matrices of every expert one below the other."""
    experts = xs[0].shape[0]
    slices = tuple(taken(x, 0, range(i, i + 1)) for i in range(experts) for x in xs)
    return Joined(slices, (experts, sum(x.shape[1] for x in xs), xs[0].shape[2]))
