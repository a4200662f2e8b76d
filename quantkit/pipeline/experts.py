"""Merged up and gate experts: names, which layers can be merged or split, and which runtimes load the result.

``blk.N.ffn_gate_up_exps.weight`` has ne = {n_embd, 2 * n_ff, n_expert}: per expert the gate rows, then the up rows;
``ffn_gate_up_exps.bias`` has ne = {2 * n_ff, n_expert} in the same order. Blocks lie within rows, so merging two
tensors of the same type copies bytes, including row headers and interleaved groups of rows.

Source: llama.cpp b11434 src/llama-graph.cpp (build_moe_ffn) and src/llama-model.cpp (create_tensor_gate_up_exps),
ik_llama.cpp 8337e4cd3 src/llama-load-tensors.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.formats.experts import GATE, MERGED, UP, UP_FIRST, geometry, is_deep, merge_obstacle
from quantkit.formats.gguf import TensorInfo
from quantkit.pipeline.plan import OutputTensor
from quantkit.pipeline.row_slices import RowSlice
from quantkit.types import TensorType

#: Architectures whose loader accepts merged experts.
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
    """Return for each runtime whether it loads merged experts of an architecture."""
    return {"llama.cpp b11434": arch in MAINLINE, "ik_llama.cpp 8337e4cd3": arch in IK}


@dataclass(frozen=True, slots=True)
class Layer:
    """The decision about one layer's experts: ``tensors`` of the source become ``outputs``, or the reason why they do
    not.
    """

    prefix: str
    tensors: tuple[str, ...]
    outputs: tuple[OutputTensor, ...] = ()
    refusal: str = ""


def merge_layer(
    prefix: str, tensors: Mapping[str, TensorInfo], reencode: TensorType | None = None, *, any_types: bool = False
) -> Layer | None:
    """Decide how to merge one layer; None if its experts are already merged.

    Halves of different types get the type ``reencode``. With ``any_types`` they are merged unchanged, for a caller that
    re-encodes everything: the result then has the gate's type, and each part its own.
    """
    names = tuple(tensor.name for tensor in tensors.values())
    up_first = tensors.get(f"{UP_FIRST}.weight")
    if up_first is not None:
        return _reorder_layer(prefix, names, tensors)
    gate, up = tensors.get(f"{GATE}.weight"), tensors.get(f"{UP}.weight")
    if gate is None and up is None:
        return None
    remedy = "; --reencode TYPE gives both one type"
    reason = merge_obstacle(tensors, any_types=any_types or reencode is not None, remedy=remedy)
    if reason or gate is None or up is None:
        return Layer(prefix, names, refusal=reason)
    outputs = [
        _join(f"{prefix}{MERGED}.weight", gate, up, gate.type if gate.type is up.type else reencode or gate.type)
    ]
    gate_bias, up_bias = tensors.get(f"{GATE}.bias"), tensors.get(f"{UP}.bias")
    if gate_bias is not None and up_bias is not None:
        outputs.append(_join(f"{prefix}{MERGED}.bias", gate_bias, up_bias, gate_bias.type))
    return Layer(prefix, names, tuple(outputs))


def _with_rows(name: str, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    values, _, n = geometry(name, shape)
    return (rows, n) if name.endswith(".bias") else (values, rows, n)


def _part(source: TensorInfo, rows: int, source_row: int, target_row: int, target_rows: int) -> RowSlice:
    values, source_rows, experts = geometry(source.name, source.shape)
    return RowSlice(source, None, values, experts, rows, source_rows, target_rows, source_row, target_row)


def _join(name: str, gate: TensorInfo, up: TensorInfo, t: TensorType) -> OutputTensor:
    """Put the up rows after the gate rows, expert by expert."""
    n = geometry(name, gate.shape)[1]
    parts = (_part(gate, n, 0, 0, 2 * n), _part(up, n, 0, n, 2 * n))
    reason = "merged" if gate.type is up.type else f"merged from {gate.type} and {up.type}"
    return OutputTensor(name, _with_rows(name, gate.shape, 2 * n), t, reason, parts)


def _reorder_layer(prefix: str, names: tuple[str, ...], tensors: Mapping[str, TensorInfo]) -> Layer:
    """Reorder and rename experts that have the up rows first."""
    outputs = []
    for key, tensor in tensors.items():
        field, _, suffix = key.partition(".")
        rows = geometry(tensor.name, tensor.shape)[1]
        n = rows // 2
        wrong = field != UP_FIRST or suffix not in ("weight", "bias") or is_deep(tensor)
        if wrong or rows % 2 or n % tensor.type.interleave:
            return Layer(prefix, names, refusal=f"{tensor.name} cannot be reordered")
        parts = (_part(tensor, n, n, 0, rows), _part(tensor, n, 0, n, rows))
        outputs.append(
            OutputTensor(f"{prefix}{MERGED}.{suffix}", tensor.shape, tensor.type, "gate moved before up", parts)
        )
    return Layer(prefix, names, tuple(outputs))


def split_layer(prefix: str, tensors: Mapping[str, TensorInfo]) -> Layer | None:
    """Decide how to split one layer; None if it is not merged."""
    merged = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{MERGED}.")}
    if not merged:
        return None
    names = tuple(tensor.name for tensor in tensors.values())
    if len(merged) != len(tensors):
        return Layer(prefix, names, refusal=f"it has {MERGED} as well as its halves")
    outputs = []
    for key, tensor in merged.items():
        suffix = key.partition(".")[2]
        rows = geometry(tensor.name, tensor.shape)[1]
        if is_deep(tensor):
            return Layer(prefix, names, refusal=f"{tensor.name} has too many dimensions for experts")
        if suffix not in ("weight", "bias") or rows % 2 or rows // 2 % tensor.type.interleave:
            return Layer(prefix, names, refusal=f"{tensor.name}: {rows} rows of {tensor.type} cannot be halved")
        for field, first in ((GATE, 0), (UP, rows // 2)):
            part = _part(tensor, rows // 2, first, 0, rows // 2)
            shape = _with_rows(tensor.name, tensor.shape, rows // 2)
            outputs.append(OutputTensor(f"{prefix}{field}.{suffix}", shape, tensor.type, "split", (part,)))
    return Layer(prefix, names, tuple(outputs))
