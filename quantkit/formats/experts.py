"""The tensors of a layer's experts by name, and whether up and gate can be merged: for files and for loaded models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from quantkit.formats.gguf import TensorInfo
from quantkit.types import TensorType

GATE = "ffn_gate_exps"
UP = "ffn_up_exps"
MERGED = "ffn_gate_up_exps"

#: ik_llama.cpp's name until March 2026, with the up rows first; used in memory only.
UP_FIRST = "ffn_up_gate_exps"
#: Tensors with experts in their last dimension, and their layer.
BY_EXPERT = re.compile(
    rf"blk\.(\d{{1,9}})\.(?:(?:{GATE}|{UP}|{MERGED}|{UP_FIRST}|ffn_down_exps)\.\w+|ffn_gate_inp\.(?:weight|bias)|"
    r"exp_probs_b(?:_vl)?(?:\.bias)?)"
)
#: Tensors of models whose experts cannot be pruned, and the reasons.
UNPRUNABLE = (
    (re.compile(r"blk\.\d+\.ffn_gate_tid2eid\b.*"), "the layer selects experts by a table over tokens, not by scores"),
    (re.compile(r"blk\.\d+\.ffn_\w+_chexps\..*"), "groups of experts share a chunk expert"),
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\..*"), "experts are separate tensors: convert the model again"),
)
_NAME = re.compile(rf"(.*?)({GATE}|{UP}|{MERGED}|{UP_FIRST})\.(\w+)$")


def find_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Return, by prefix ("blk.3."), the expert tensors by the rest of their names ("ffn_up_exps.weight")."""
    layers: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match:
            layers.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = tensor
    return layers


def merge_obstacle(has: Mapping[str, TensorInfo], *, any_types: bool = False, remedy: str = "") -> str:
    """Return why the experts of a layer cannot be merged, "" if they can; remedy: appended if types differ."""
    gate, up = has.get(f"{GATE}.weight"), has.get(f"{UP}.weight")
    if f"{MERGED}.weight" in has:
        return f"it has {MERGED} as well as its halves"
    if gate is None or up is None:
        return f"it has no {UP if up is None else GATE}.weight"
    if gate.shape != up.shape:
        return f"gate has shape {list(gate.shape)}, up {list(up.shape)}"
    if deep := [t.name for t in has.values() if is_deep(t)]:
        return f"{deep[0]} has too many dimensions for experts"
    if gate.type is not up.type and not any_types:
        return f"gate is {gate.type}, up is {up.type}{remedy}"
    rows = geometry(gate.name, gate.shape)[1]
    if gate.type is up.type and rows % gate.type.interleave:
        return (
            f"{gate.type} interleaves {gate.type.interleave} rows, which is not a divisor of the {rows} rows per expert"
        )
    unmergeable = {key: t.name for key, t in has.items() if not key.endswith((".weight", ".bias"))}
    if scales := sorted(name for key, name in unmergeable.items() if key.endswith("scale")):
        return f"{', '.join(scales)}: no runtime has a name for the scales of merged experts"
    if unmergeable:
        return f"{', '.join(sorted(unmergeable.values()))}: merged experts have no such tensor"
    if (f"{GATE}.bias" in has) != (f"{UP}.bias" in has):
        return "only one half has a bias"
    gate_bias, up_bias = has.get(f"{GATE}.bias"), has.get(f"{UP}.bias")
    if gate_bias is not None and up_bias is not None and _kind(gate_bias) != _kind(up_bias):
        return "the biases differ in shape or type"
    return ""


def _kind(tensor: TensorInfo) -> tuple[tuple[int, ...], TensorType]:
    return tensor.shape, tensor.type


def geometry(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return values per row, rows per expert and experts; every value of a bias is a row.

    Files do not store trailing dimensions of 1, so a shape may lack them.
    """
    a, b, c = (*shape, 1, 1)[:3]
    return (1, a, b) if name.endswith(".bias") else (a, b, c)


def is_deep(tensor: TensorInfo) -> bool:
    """Return whether a tensor has too many dimensions for experts."""
    return math.prod(geometry(tensor.name, tensor.shape)) != math.prod(tensor.shape)
