"""Recurrent layers on the device: against float64, sequences in pieces, mixed and restarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from recurrent_cases import (
    MIXED,
    N_SEQ,
    Arrays,
    Case,
    Columns,
    Convolution,
    DeltaRule,
    Scan,
    Tokens,
    Wkv,
    alone,
    check,
    nmse,
)
from reference_op import batch_of, matrix, program
from refusals import refuses

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer.recurrent import (
    COLUMN_STATES,
    HEADS,
    TAPS,
    column_scan,
    convolve,
    delta_net,
    ssm_scan,
    wkv,
)
from quantkit.model import ops
from quantkit.model.ops import ColumnScan, Convolve, DeltaNet, Op, SsmScan, State, Value

batches = pytest.mark.parametrize("batches", [alone(37, 1, 1, 6), MIXED], ids=["alone", "mixed"])


class Layer:
    """An operation, its state on the device."""

    def __init__(self, memory: Memory, case: Case) -> None:
        self.memory, self.case, self.slots = memory, case, dict(case.slots)
        self.slots |= {name: memory.put(weight) for name, weight in case.weights.items()}
        if isinstance(case, Convolution):
            self.shape = convolve(case.taps, case.width)
        elif isinstance(case, Scan):
            self.shape = ssm_scan(case.groups[1], case.head, case.d_state)
        elif isinstance(case, Columns):
            self.shape = column_scan(case.width, case.d_state)
        elif isinstance(case, Wkv):
            self.shape = wkv(case.heads[0], case.head)
        else:
            self.shape = delta_net(case.heads[1], case.head_k, case.head_v, by_row=case.by_row)
        self.state = memory.allocate((N_SEQ, case.empty.size))

    def run(self, tokens: Tokens, values: Arrays) -> Any:
        n = len(tokens)
        out = self.memory.allocate((n + 1, self.case.n_out))
        self.memory.run(
            self.shape,
            batch=self.memory.batch(np.zeros(n), [p for _, p in tokens], [s for s, _ in tokens]),
            out=out,
            state=self.state,
            rows=n,
            **{name: self.memory.put(x) for name, x in values.items()},
            **self.slots,
        )
        actual = self.memory.get(out, (n + 1, self.case.n_out))
        assert np.isnan(actual[-1]).all()
        return actual[:-1]

    def read_state(self) -> Any:
        return self.memory.get(self.state, (N_SEQ, self.case.empty.size))


@batches
@pytest.mark.parametrize(("width", "taps"), [(64, 4), (5, 3), (70, 2), (40, TAPS), (33, 1)])
def test_convolve(memory: Memory, width: int, taps: int, batches: list[Tokens]) -> None:
    case = Convolution(width, taps, biased=taps != 4)
    check(Layer(memory, case), case, batches, 1e-13, of_state=0)


@batches
@pytest.mark.parametrize(
    "case",
    [
        DeltaRule((2, 4), 128, 40, tiled=True),
        DeltaRule((1, 2), 64, 64),
        DeltaRule((1, 1), 256, 3),
        DeltaRule((1, 3), 32, 33, tiled=True),
        DeltaRule((3, 6), 22, 23),
        DeltaRule((2, 2), 16, 8),
        DeltaRule((2, 2), 128, 33, by_row=True),
        DeltaRule((1, 2), 64, 8, by_row=True),
        DeltaRule((1, 2), 22, 23, tiled=True, by_row=True),
        DeltaRule((1, 1), 256, 3, by_row=True),
    ],
    ids=str,
)
def test_delta_net(memory: Memory, case: DeltaRule, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize(
    "case",
    [
        *(Scan((1, 2), 64, 128), Scan((1, 1), 3, 256), Scan((2, 4), 40, 64), Scan((2, 2), 33, 22)),
        *(Scan((1, 3), 8, 16), Scan((2, 2), 33, 16, plain=True)),
    ],
    ids=str,
)
def test_ssm_scan(memory: Memory, case: Scan, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize("case", [Columns(70, 16), Columns(33, 22), Columns(5, 64)], ids=str)
def test_column_scan(memory: Memory, case: Columns, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize(
    "case", [Wkv((2, 1), 40, "q"), Wkv((1, 1), 64), Wkv((2, 2), 64, "7"), Wkv((2, 2), 22, "7")], ids=str
)
def test_wkv(memory: Memory, case: Wkv, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


def operation(case: Case, settings: dict[str, Any], out: Value) -> Op:
    """Return the operation of a case; settings: its values and weights."""
    slots: dict[str, Any] = settings | {"out": out, "state": State("s", case.empty.size)}
    if isinstance(case, Convolution):
        return Convolve(**slots)
    if isinstance(case, Columns):
        return ColumnScan(**slots)
    if isinstance(case, Scan):
        return SsmScan(**slots, n_head=case.groups[1], n_group=case.groups[0])
    if isinstance(case, Wkv):
        return ops.Wkv(**slots, n_head=case.heads[0], **case.flags)
    return DeltaNet(**slots, n_k_head=case.heads[0], n_v_head=case.heads[1], scale=case.head_k**-0.5)


@pytest.mark.parametrize(
    "case",
    [
        *(DeltaRule((2, 4), 16, 8), DeltaRule((2, 4), 16, 8, by_row=True), Convolution(32, 4, biased=True)),
        *(Scan((2, 4), 8, 16), Columns(40, 16), Wkv((4, 2), 16, "q"), Wkv((2, 2), 16, "7"), Wkv((2, 2), 16)),
    ],
    ids=str,
)
def test_results_equal_the_references(memory: Memory, case: Case) -> None:
    values = {name: Value(name, width) for name, width in case.widths.items()}
    # In a file the rates of a column lie side by side.
    stored = {name: x.T.copy() if x.ndim == 2 and name == "a" else x for name, x in case.weights.items()}
    weights: dict[str, Any] = {name: matrix(x, name) for name, x in stored.items()}
    out, rng = Value("out", case.n_out), np.random.default_rng(3)
    layer = Layer(memory, case)
    reference = program(operation(case, values | weights, out), {weights[name]: x for name, x in stored.items()})
    for tokens in MIXED[:4]:
        inputs = case.draw(rng, len(tokens))
        reference.values.update({values[name]: x for name, x in inputs.items()})
        reference.run(batch_of([position for _, position in tokens], [s for s, _ in tokens]))
        assert nmse(layer.run(tokens, inputs), reference.values[out]) < 1e-12


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: convolve(n, 8), TAPS),
        (lambda n: delta_net(2, n, 8), HEADS[-1]),
        (lambda n: delta_net(2, n, 8, by_row=True), HEADS[-1]),
        (lambda n: ssm_scan(2, 8, n), HEADS[-1]),
        (lambda n: wkv(2, n), HEADS[-1]),
        (lambda n: column_scan(8, n), COLUMN_STATES[-1]),
    ],
    ids=["convolve", "delta_net", "delta_net_by_row", "ssm_scan", "wkv", "column_scan"],
)
def test_states_without_kernel_memory_are_refused(make: Callable[[int], Shape], most: int) -> None:
    """It is refused with what to do; whole models are so (test_a_state_too_large_for_cuda_is_refused)."""
    assert make(most)
    for n in (0, most + 1):
        with refuses(TypeNotSupported, "QK-E306 1 --gpu-layers 0", n, most):
            make(n)
