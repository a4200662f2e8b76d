"""Merged up/gate experts: names, which layers can be merged or taken apart, and who loads the result.

``blk.N.ffn_gate_up_exps.weight`` has ne = {n_embd, 2 * n_ff, n_expert}: per expert the gate rows, then the up rows;
``ffn_gate_up_exps.bias`` has ne = {2 * n_ff, n_expert} in the same order. Blocks lie within rows, so merging two
tensors of one type copies bytes, row headers and woven groups of rows included.

Source: llama.cpp b11434 src/llama-graph.cpp (build_moe_ffn) and src/llama-model.cpp (create_tensor_gate_up_exps),
ik_llama.cpp 8337e4cd3 src/llama-load-tensors.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.formats.gguf import TensorInfo
from quantkit.pipeline.facts import GATE, MERGED, UP
from quantkit.pipeline.work import Part
from quantkit.types import TensorType

#: ik_llama.cpp's name before March 2026, up rows first; only ever used in memory.
UP_FIRST = "ffn_up_gate_exps"
_NAME = re.compile(rf"(.*?)({GATE}|{UP}|{MERGED}|{UP_FIRST})\.(\w+)$")

#: Architectures whose loader takes merged experts from a file.
# fmt: off
MAINLINE = frozenset({
    "cohere2moe", "deepseek2", "deepseek2-ocr", "gemma4", "granite_swa", "hy_v3", "mistral4", "qwen35moe", "qwen3next",
    "qwen4exp",
})
IK = frozenset({
    "bailingmoe2", "bailingmoe3", "cohere2_moe", "dbrx", "deepseek2", "deepseek4", "dots1", "gemma4", "glm4moe",
    "gpt-oss", "hunyuan-moe", "laguna", "llama4", "mimo2", "minimax-m2", "mistral4", "qwen2moe", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vlmoe", "step35",
})
# fmt: on


def runtimes(arch: str) -> dict[str, bool]:
    """Return which runtimes load merged experts of an architecture from a file."""
    return {"llama.cpp b11434": arch in MAINLINE, "ik_llama.cpp 8337e4cd3": arch in IK}


@dataclass(frozen=True, slots=True)
class Joined:
    """One tensor of the output made of rows of one or two source tensors."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    reason: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """What is to become of the experts of one layer: ``tensors`` of the source become ``made``, or a reason why not."""

    prefix: str
    tensors: tuple[str, ...]
    made: tuple[Joined, ...] = ()
    refusal: str = ""


def find_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Return per prefix ("blk.3.") the expert tensors, by what follows it ("ffn_up_exps.weight")."""
    layers: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found:
            layers.setdefault(found[1], {})[f"{found[2]}.{found[3]}"] = tensor
    return layers


def merge_layer(
    prefix: str, has: Mapping[str, TensorInfo], reencode: TensorType | None = None, *, any_types: bool = False
) -> Layer | None:
    """Decide how one layer is merged; None if its experts are merged already.

    Halves of different types get the type ``reencode``. With ``any_types`` they are merged as they are, for a caller
    that gives all of it another type: what is made then names the gate's type, and its parts have each their own.
    """
    names = tuple(tensor.name for tensor in has.values())
    old = has.get(f"{UP_FIRST}.weight")
    if old is not None:
        return _turn_around(prefix, names, has)
    gate, up = has.get(f"{GATE}.weight"), has.get(f"{UP}.weight")
    if gate is None and up is None:
        return None
    why = _why_not(has, gate, up, any_types or reencode is not None)
    if why or gate is None or up is None:
        return Layer(prefix, names, refusal=why)
    made = [_join(f"{prefix}{MERGED}.weight", gate, up, gate.type if gate.type is up.type else reencode or gate.type)]
    gate_bias, up_bias = has.get(f"{GATE}.bias"), has.get(f"{UP}.bias")
    if gate_bias is not None and up_bias is not None:
        made.append(_join(f"{prefix}{MERGED}.bias", gate_bias, up_bias, gate_bias.type))
    return Layer(prefix, names, tuple(made))


def _why_not(has: Mapping[str, TensorInfo], gate: TensorInfo | None, up: TensorInfo | None, any_types: bool) -> str:
    """Return why a layer cannot be merged, or nothing."""
    if f"{MERGED}.weight" in has:
        return f"it has {MERGED} beside the halves"
    if gate is None or up is None:
        return f"there is no {UP if up is None else GATE}.weight to go with the other half"
    if gate.shape != up.shape:
        return f"gate has the shape {list(gate.shape)}, up {list(up.shape)}"
    if deep := [t.name for t in has.values() if _is_deep(t)]:
        return f"{deep[0]} has more dimensions than experts have"
    if gate.type is not up.type and not any_types:
        return f"gate is {gate.type}, up {up.type}; --reencode TYPE gives both one type"
    rows = _geometry(gate.name, gate.shape)[1]
    if gate.type is up.type and rows % gate.type.interleave:
        return f"{gate.type} weaves {gate.type.interleave} rows, and {rows} rows an expert do not divide"
    others = {key: t.name for key, t in has.items() if not key.endswith((".weight", ".bias"))}
    if scales := sorted(name for key, name in others.items() if key.endswith("scale")):
        return f"{', '.join(scales)}: no runtime has a name for the scales of merged experts"
    if others:
        return f"{', '.join(sorted(others.values()))}: merged experts have no such tensor"
    if (f"{GATE}.bias" in has) != (f"{UP}.bias" in has):
        return "only one half has a bias"
    gate_bias, up_bias = has.get(f"{GATE}.bias"), has.get(f"{UP}.bias")
    if gate_bias is not None and up_bias is not None and _kind(gate_bias) != _kind(up_bias):
        return "the biases differ in shape or type"
    return ""


def _kind(tensor: TensorInfo) -> tuple[tuple[int, ...], TensorType]:
    return tensor.shape, tensor.type


def _geometry(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return values per row, rows per expert and experts; of a bias every value is a row.

    Files do not store trailing dimensions of 1, so a shape may be shorter than it means.
    """
    a, b, c = (*shape, 1, 1)[:3]
    return (1, a, b) if name.endswith(".bias") else (a, b, c)


def _is_deep(tensor: TensorInfo) -> bool:
    return math.prod(_geometry(tensor.name, tensor.shape)) != math.prod(tensor.shape)


def _with_rows(name: str, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    values, _, n = _geometry(name, shape)
    return (rows, n) if name.endswith(".bias") else (values, rows, n)


def _part(source: TensorInfo, rows: int, source_row: int, target_row: int, target_rows: int) -> Part:
    values, source_rows, experts = _geometry(source.name, source.shape)
    return Part(source, None, values, experts, rows, source_rows, target_rows, source_row, target_row)


def _join(name: str, gate: TensorInfo, up: TensorInfo, t: TensorType) -> Joined:
    """Lay the rows of gate and up behind one another, expert by expert."""
    n = _geometry(name, gate.shape)[1]
    parts = (_part(gate, n, 0, 0, 2 * n), _part(up, n, 0, n, 2 * n))
    reason = "merged" if gate.type is up.type else f"merged from {gate.type} and {up.type}"
    return Joined(name, _with_rows(name, gate.shape, 2 * n), t, reason, parts)


def _turn_around(prefix: str, names: tuple[str, ...], has: Mapping[str, TensorInfo]) -> Layer:
    """Bring up-first experts into the order and under the name of today."""
    made = []
    for key, tensor in has.items():
        field, _, suffix = key.partition(".")
        rows = _geometry(tensor.name, tensor.shape)[1]
        n = rows // 2
        wrong = field != UP_FIRST or suffix not in ("weight", "bias") or _is_deep(tensor)
        if wrong or rows % 2 or n % tensor.type.interleave:
            return Layer(prefix, names, refusal=f"{tensor.name} cannot be turned around")
        parts = (_part(tensor, n, n, 0, rows), _part(tensor, n, 0, n, rows))
        made.append(Joined(f"{prefix}{MERGED}.{suffix}", tensor.shape, tensor.type, "gate moved before up", parts))
    return Layer(prefix, names, tuple(made))


def split_layer(prefix: str, has: Mapping[str, TensorInfo]) -> Layer | None:
    """Decide how one layer is taken apart; None if it is not merged."""
    merged = {key: tensor for key, tensor in has.items() if key.startswith(f"{MERGED}.")}
    if not merged:
        return None
    names = tuple(tensor.name for tensor in has.values())
    if len(merged) != len(has):
        return Layer(prefix, names, refusal=f"it has {MERGED} beside the halves")
    made = []
    for key, tensor in merged.items():
        suffix = key.partition(".")[2]
        rows = _geometry(tensor.name, tensor.shape)[1]
        if _is_deep(tensor):
            return Layer(prefix, names, refusal=f"{tensor.name} has more dimensions than experts have")
        if suffix not in ("weight", "bias") or rows % 2 or rows // 2 % tensor.type.interleave:
            return Layer(prefix, names, refusal=f"{tensor.name}: {rows} rows of {tensor.type} cannot be halved")
        for field, first in ((GATE, 0), (UP, rows // 2)):
            part = _part(tensor, rows // 2, first, 0, rows // 2)
            shape = _with_rows(tensor.name, tensor.shape, rows // 2)
            made.append(Joined(f"{prefix}{field}.{suffix}", shape, tensor.type, "taken apart", (part,)))
    return Layer(prefix, names, tuple(made))
