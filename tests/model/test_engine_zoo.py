"""Every zoo model's logits are llama.cpp's; and whatever is changed in the computation, the same test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libllama import nmse
from quantkit.formats.gguf import GGUFFile, open_gguf
from quantkit.model.backends import Limits
from quantkit.model.backends.reference import Reference
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.engine import load
from quantkit.model.fusion import Fusion
from quantkit.model.graph import build_graph
from quantkit.model.ops import (
    Activate,
    Activation,
    Attention,
    Bonus,
    Clamp,
    ColumnScan,
    Convolve,
    DeltaNet,
    Embed,
    Exceed,
    Glu,
    Graph,
    Lerp,
    Lookup,
    Mix,
    MulMat,
    MulMatId,
    MultiplyBy,
    Norm,
    Op,
    Previous,
    Rope,
    Scale,
    Shift,
    SsmScan,
    Take,
    ToLength,
    Value,
    Wkv,
)
from quantkit.model.placement import Placement
from quantkit.quantize import QuantizeOptions, quantize
from zoo import NAMES
from zoo import expected as tokens_and_logits

BOUND = 1e-8
TOKENS = tokens_and_logits(NAMES[0])[0]
DEVICES = ("REFERENCE", "CPU")


def expected(name: str) -> Floats:
    return tokens_and_logits(name)[1]


def placed(device: str) -> Placement:
    return Placement(gpu_layers=99, rules=((".*", device),), accelerators=(device,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fusion", [Fusion(), Fusion.none()], ids=["fused", "unfused"])
def test_logits_equal_llama_cpps(zoo: Callable[[str], Path], name: str, device: str, fusion: Fusion) -> None:
    with load(zoo(name), kv_type="f32", fusion=fusion, placement=placed(device), threads=2) as model:
        assert nmse(model.forward(TOKENS), expected(name)) <= BOUND


def test_a_second_output_does_not_change_logits(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """That of quantize --extra-output-tensor; ik_llama.cpp uses it to draft tokens."""
    quantize(zoo("qwen35moe-moe"), tmp_path / "m.gguf", "COPY", QuantizeOptions(extra_output_tensor="q8_0"))
    with load(tmp_path / "m.gguf", kv_type="f32", placement=placed("CPU")) as model:
        assert nmse(model.forward(TOKENS), expected("qwen35moe-moe")) <= BOUND


@pytest.mark.parametrize("layers", range(1, 6))
def test_a_segment_keeps_its_cache(zoo: Callable[[str], Path], layers: int) -> None:
    """The last layers, which may share caches with layers elsewhere, on another device."""
    placement = Placement(gpu_layers=layers, accelerators=("REFERENCE",))
    with load(zoo("gemma4-dense"), kv_type="f32", placement=placement) as model:
        assert [segment.device for segment in model.segments] == ["CPU", "REFERENCE"]
        session = model.session(40)
        parts = [session.decode(part) for part in (TOKENS[:9], TOKENS[9:10], TOKENS[10:40])]
        assert nmse(np.concatenate(parts), expected("gemma4-dense")[:40]) <= BOUND


# ---------------------------------------------------------------- mutants


class Changed:
    """A model whose metadata say something else."""

    def __init__(self, source: GGUFFile, **changed: Any) -> None:
        self.source, self.changed = source, changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def get(self, key: str, default: Any = None) -> Any:
        short = key.partition(".")[2]
        return (
            self.changed[short](self.source.get(key, default))
            if short in self.changed
            else self.source.get(key, default)
        )


#: As many as windows, of 32, do not hide from; and where there are none.
LONG_TOKENS, SHORT_TOKENS = TOKENS[:40], TOKENS[:12]


def tokens_for(graph: Graph) -> Ints:
    """Return few tokens; more where there are windows, all of them if they see those after them."""
    masks = {(op.mask, op.window) for op in graph.ops if isinstance(op, Attention)}
    if any(mask == "whole" for mask, _ in masks):
        return TOKENS
    return (
        LONG_TOKENS if any(mask != "causal" and window < len(LONG_TOKENS) for mask, window in masks) else SHORT_TOKENS
    )


def logits(reference: Reference, graph: Graph, tokens: Ints) -> Floats:
    rows = np.arange(len(tokens), dtype=np.int32)
    program = reference.compile(graph.ops, Limits(len(tokens)))
    program.run(Batch(tokens, rows, np.zeros_like(rows), rows))
    result: Floats = program.read(graph.logits)
    return result


def rewritten(graph: Graph, change: Callable[[Op], list[Op] | None]) -> Graph | None:
    """Return the graph with every operation that ``change`` answers for replaced; None if it is none."""
    ops, changed = [], False
    for op in graph.ops:
        new = change(op)
        changed |= new is not None
        ops += [op] if new is None else new
    return replace(graph, ops=tuple(ops)) if changed else None


def copy_op(op: Op, x: Value, out: Value) -> list[Op]:
    return [Scale(layer=op.layer, out=out, x=x, factor=1.0)]


def no_rope(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Rope) else None


def other_rope(op: Op) -> list[Op] | None:
    if not isinstance(op, Rope):
        return None
    return [replace(op, config=replace(op.config, kind="neox" if op.config.kind == "normal" else "normal"))]


def gate_and_up_swapped(op: Op) -> list[Op] | None:
    if not isinstance(op, Glu) or op.gate.width == 1 or op.activation.kind == "linear":
        return None
    if op.up is not None:
        return [replace(op, gate=op.up, up=op.gate)] if op.up.width == op.gate.width else None
    half = op.gate.width // 2
    gate, up = Value("gate", half, op.gate.per, op.gate.outputs), Value("up", half, op.gate.per, op.gate.outputs)
    takes: list[Op] = [
        Take(out=gate, x=op.gate, start=half, period=2 * half),
        Take(out=up, x=op.gate, start=0, period=2 * half),
    ]
    return [*takes, replace(op, gate=gate, up=up)]


def other_activation(op: Op) -> list[Op] | None:
    if not isinstance(op, Glu | Activate):
        return None
    replacements = {"silu": "gelu", "gelu": "silu", "swiglu_oai": "silu", "relu": "silu", "sigmoid": "relu"}
    kind = replacements.get(op.activation.kind)
    return None if kind is None else [replace(op, activation=replace(op.activation, kind=kind))]


def no_limits(op: Op) -> list[Op] | None:
    # No value of the zoo reaches that of swiglu_oai, 7.
    if not isinstance(op, Glu) or op.activation.kind == "swiglu_oai" or not op.activation.up_limit:
        return None
    return [replace(op, activation=Activation(op.activation.kind))]


def no_shift(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Shift) else None


def no_head_norm(op: Op) -> list[Op] | None:
    is_head_norm = isinstance(op, Norm) and op.weight is not None and ("_q_norm" in op.weight.tensor.name)
    return copy_op(op, op.x, op.out) if isinstance(op, Norm) and is_head_norm else None


def no_window(op: Op) -> list[Op] | None:
    # Windows wider than the tokens here cannot be missed.
    if not isinstance(op, Attention) or op.mask in ("causal", "whole") or op.window >= len(LONG_TOKENS):
        return None
    return [replace(op, mask="causal")]


def only_tokens_before(op: Op) -> list[Op] | None:
    return [replace(op, mask="causal")] if isinstance(op, Attention) and op.mask == "whole" else None


def no_sinks(op: Op) -> list[Op] | None:
    return [replace(op, sinks=None)] if isinstance(op, Attention) and op.sinks is not None else None


def no_alibi(op: Op) -> list[Op] | None:
    return [replace(op, alibi=0.0)] if isinstance(op, Attention) and op.alibi else None


def other_factor(op: Op) -> list[Op] | None:
    return [replace(op, factor=op.factor / 2)] if isinstance(op, Exceed) else None


def own_length(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, ToLength) else None


def no_offset(op: Op) -> list[Op] | None:
    return [replace(op, offset=0.0)] if isinstance(op, Mix) and op.offset else None


def other_mixture(op: Op) -> list[Op] | None:
    return copy_op(op, op.base, op.out) if isinstance(op, Mix) and op.n > 1 else None


def no_bias(op: Op) -> list[Op] | None:
    return [replace(op, bias=None)] if isinstance(op, MulMat | MulMatId) and op.bias is not None else None


def no_scale(op: Op) -> list[Op] | None:
    return [replace(op, scale=None)] if isinstance(op, MulMat | MulMatId) and op.scale is not None else None


def other_norm(op: Op) -> list[Op] | None:
    kind = {"rms": "layer", "layer": "rms"}.get(op.kind) if isinstance(op, Norm) else None
    return None if kind is None else [replace(op, kind=kind)]


def no_clamp(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Clamp) else None


def no_vector(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, MultiplyBy) else None


def positions_of_tokens(op: Op) -> list[Op] | None:
    return [replace(op, by_position=False)] if isinstance(op, Embed) and op.by_position else None


def other_layers_input(op: Op) -> list[Op] | None:
    if not isinstance(op, Take) or "layer_input" not in op.out.name:
        return None
    return [replace(op, start=op.x.width - op.out.width - op.start)]


def no_token_before(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Previous | Bonus) else None


def all_of_it(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Lerp) and op.out.width == op.x.width else None


def nothing_removed(op: Op) -> list[Op] | None:
    return [replace(op, removed=None, rate=None)] if isinstance(op, Wkv) and op.removed is not None else None


def other_decays(op: Op) -> list[Op] | None:
    return [replace(op, earlier=not op.earlier, complement=False)] if isinstance(op, Wkv) else None


def no_convolution(op: Op) -> list[Op] | None:
    return copy_op(op, op.x, op.out) if isinstance(op, Convolve) else None


def other_reads(op: Op) -> list[Op] | None:
    """Swap stored and requested positions."""
    if isinstance(op, DeltaNet):
        return [replace(op, q=op.k, k=op.q)]
    if isinstance(op, Wkv):
        return [replace(op, k=op.v, v=op.k)]
    return [replace(op, b=op.c, c=op.b)] if isinstance(op, SsmScan | ColumnScan) else None


REWRITES = (
    no_rope,
    other_rope,
    gate_and_up_swapped,
    other_activation,
    no_limits,
    no_shift,
    no_head_norm,
    no_window,
    only_tokens_before,
    no_sinks,
    no_alibi,
    other_factor,
    own_length,
    no_offset,
    other_mixture,
    no_bias,
    no_scale,
    other_norm,
    no_clamp,
    no_vector,
    positions_of_tokens,
    other_layers_input,
    no_token_before,
    all_of_it,
    nothing_removed,
    other_decays,
    no_convolution,
    other_reads,
)


def mutants(source: GGUFFile) -> Iterator[tuple[str, Graph]]:
    graph = build_graph(source)
    for rewrite in REWRITES:
        mutant = rewritten(graph, rewrite)
        if mutant is not None:
            yield rewrite.__name__, mutant
    arch = source.get("general.architecture")
    hashed = any(isinstance(op, Lookup) for op in graph.ops)  # its tables say how many experts a token has
    if source.get(f"{arch}.expert_count") and not hashed:
        changed = Changed(source, expert_used_count=lambda n: n + 1)
        yield "one_expert_more", build_graph(changed)  # type: ignore[arg-type]
    if not any(isinstance(op, Rope) for op in graph.ops):
        return
    base = Changed(
        source, **{"rope.freq_base": lambda n: 3 * (n or 1e4), "rope.freq_base_swa": lambda n: 3 * (n or 1e4)}
    )
    yield "rope_base_x3", build_graph(base)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_misses_the_bound_by_far(zoo: Callable[[str], Path], name: str) -> None:
    with open_gguf(zoo(name)) as source:
        tokens = tokens_for(build_graph(source))
        expected_logits = expected(name)[: len(tokens)]
        reference = Reference(source)  # decodes each weight once
        missed = {mutant: nmse(logits(reference, graph, tokens), expected_logits) for mutant, graph in mutants(source)}
    assert len(missed) >= 4
    assert {mutant: error for mutant, error in missed.items() if not error > 100 * BOUND} == {}
