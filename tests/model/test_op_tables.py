"""Every operation has a row in every table, and what has none, or does not fit, does not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from refusals import refuses

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model import check, ops
from quantkit.model.backends import reference
from quantkit.model.backends.cpu import ops as cpu
from quantkit.model.backends.cuda import fuse
from quantkit.model.backends.cuda import ops as cuda
from quantkit.model.engine import load
from quantkit.model.fusion import Fusion
from quantkit.model.ops import Graph, Op, OpTable

Zoo = Callable[[str], Path]


def descendants(kind: type[Op]) -> set[type[Op]]:
    return {kind}.union(*map(descendants, kind.__subclasses__()))


OPS = {kind for kind in descendants(Op) if kind.__module__ == ops.__name__ and not kind.__name__.startswith("_")} - {
    Op,
    ops.Map,
}
FUSED = {kind for kind in descendants(Op) if kind.__module__.startswith(f"{fuse.__name__}.")}


@pytest.mark.parametrize("kind", sorted(OPS | FUSED, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_outputs_of_operations_are_fields(kind: type[Op]) -> None:
    """Values that are named here, and are none of its fields, would not be kept for other segments."""
    assert set(kind.WRITES) <= {f.name for f in fields(kind)}


@pytest.mark.parametrize(
    ("table", "expected"),
    [(check.CHECK, OPS | FUSED), (reference.RUN, OPS), (cpu.LOWER, OPS), (cuda.LOWER, OPS | FUSED)],
    ids=["check", "reference", "cpu", "cuda"],
)
def test_every_operation_has_a_row(table: OpTable, expected: set[type[Op]]) -> None:
    assert len(OPS) > 30
    assert len(FUSED) > 7
    assert table.keys() == expected


class Strange(Op):
    """An operation that nobody knows."""


def test_an_unknown_operation_does_not_run(zoo: Zoo) -> None:
    with refuses(TypeNotSupported, "QK-E306 check.py"):
        load(zoo("llama-dense"), rewrite=lambda graph: replace(graph, ops=(*graph.ops, Strange())))


@pytest.mark.parametrize("fusion", [Fusion(), Fusion.none()], ids=["fused", "not"])
def test_an_observer_with_wrong_shapes_is_refused(zoo: Zoo, fusion: Fusion) -> None:
    """The graph fitted when it was built."""

    def break_graph(graph: Graph) -> Graph:
        return replace(
            graph, ops=tuple(replace(op, n_head=1 << 20) if isinstance(op, ops.Attention) else op for op in graph.ops)
        )

    with refuses(FormatError, "QK-E106 256 64"):
        load(zoo("llama-dense"), rewrite=break_graph, fusion=fusion)


def test_fused_operations_are_checked(zoo: Zoo) -> None:
    with load(zoo("qwen3moe-moe")) as model:
        fused, _ = fuse.fuse(model.graph.ops, [model.graph.logits], Fusion(), "f16")
    check.check_ops(fused)
    for op in fused:
        if isinstance(op, fuse.per_head.PerHead):
            (target, chain), *remainder = op.chains
            wrong = replace(op, chains=((target, replace(chain, columns=chain.columns.relocate(1, 0))), *remainder))
        elif isinstance(op, fuse.row_epilogue.RowEpilogue):
            wrong = replace(op, gate=op.x)
        else:
            continue
        with refuses(FormatError, f"QK-E106 {type(op).__name__}"):
            check.check_ops([wrong])
