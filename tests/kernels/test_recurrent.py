"""Recurrent layers: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
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

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.recurrent import column_scan, convolve, delta_net, delta_net_by_row, ssm_scan, wkv

Array = npt.NDArray[np.float32]
batches = pytest.mark.parametrize("batches", [alone(9, 1, 1, 49), MIXED], ids=["alone", "mixed"])
N_MAX = 64
OPERATIONS = {Convolution: convolve, DeltaRule: delta_net, Scan: ssm_scan, Columns: column_scan, Wkv: wkv}


class Layer:
    """An operation with its inputs, output and state."""

    def __init__(self, case: Case, threads: int) -> None:
        self.team, self.case = Team(threads), case
        self.batch = Batch(self.team, N_MAX)
        self.inputs = {name: np.zeros((N_MAX, w), np.float32) for name, w in case.widths.items()}
        self.out = np.zeros((N_MAX, case.n_out), np.float32)
        self.state = np.full((N_SEQ, case.empty.size), np.nan, np.float32)
        arrays = {**self.inputs, **case.weights, "out": self.out, "state": self.state}
        operation = OPERATIONS[type(case)]
        if isinstance(case, DeltaRule) and case.by_row:
            operation = delta_net_by_row
        addresses = {name: address_of(a) for name, a in arrays.items()}
        block = operation.block(batch=self.batch.address, **addresses, **case.slots)
        self.tape = Tape(self.team, self.batch, [(operation, block)])

    def run(self, tokens: Tokens, values: Arrays) -> Array:
        n = len(tokens)
        self.batch.set(np.zeros(n), [p for _, p in tokens], [s for s, _ in tokens])
        for name, x in values.items():
            self.inputs[name][:n] = x
        self.out[:] = np.nan
        self.tape.run()
        assert np.isnan(self.out[n:]).all()
        return self.out[:n].copy()

    def read_state(self) -> Array:
        return self.state


@pytest.mark.parametrize("threads", [1, 3])
@batches
@pytest.mark.parametrize(("width", "taps"), [(64, 4), (200, 4), (5, 3), (1000, 2), (70, 16), (33, 1)])
def test_convolve(width: int, taps: int, batches: list[Tokens], threads: int) -> None:
    case = Convolution(width, taps, biased=threads > 1)
    check(Layer(case, threads), case, batches, 1e-13, of_state=0)


@batches
@pytest.mark.parametrize(
    "case",
    [
        DeltaRule((2, 4), 128, 128),
        DeltaRule((2, 4), 128, 128, tiled=True),
        DeltaRule((2, 2), 64, 64),
        DeltaRule((1, 3), 32, 80, tiled=True),
        DeltaRule((3, 6), 20, 23),
        DeltaRule((2, 2), 128, 128, by_row=True),
        DeltaRule((1, 2), 256, 64, by_row=True),
        DeltaRule((2, 2), 20, 70, by_row=True),
    ],
    ids=str,
)
def test_delta_net(case: DeltaRule, batches: list[Tokens]) -> None:
    check(Layer(case, 2), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize(
    "case",
    [Scan((1, 4), 64, 128), Scan((2, 6), 80, 16), Scan((3, 3), 23, 9), Scan((2, 2), 80, 32, plain=True)],
    ids=str,
)
def test_ssm_scan(case: Scan, batches: list[Tokens]) -> None:
    check(Layer(case, 2), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize("case", [Columns(512, 16), Columns(70, 16), Columns(23, 5)], ids=str)
def test_column_scan(case: Columns, batches: list[Tokens]) -> None:
    check(Layer(case, 2), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize(
    "case", [Wkv((2, 2), 64), Wkv((4, 2), 80, "q"), Wkv((2, 2), 64, "7"), Wkv((3, 3), 23, "7")], ids=str
)
def test_wkv(case: Wkv, batches: list[Tokens]) -> None:
    check(Layer(case, 2), case, batches, 1e-12, of_state=1e-12)


@pytest.mark.parametrize("case", [Scan((1, 2), 96, 32), Columns(200, 16), Wkv((2, 2), 80, "7")], ids=str)
def test_batch_sizes_of_a_scan_do_not_change_bits(case: Case) -> None:
    values = case.draw(np.random.default_rng(0), 40)
    outs = []
    for size in (40, 1, 7):
        layer, parts = Layer(case, 2), range(0, 40, size)
        batches = [(i, {name: x[i : i + size] for name, x in values.items()}) for i in parts]
        outs.append(
            np.vstack([layer.run([(0, i + j) for j in range(len(next(iter(x.values()))))], x) for i, x in batches])
        )
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def run_all(threads: int, size: int) -> Array:
    """Outputs of 40 tokens, in batches of ``size``."""
    cases: list[Case] = [DeltaRule((2, 4), 64, 128), Convolution(512, 4), Scan((2, 8), 64, 64), Columns(200, 16)]
    cases.append(DeltaRule((2, 2), 64, 128, by_row=True))
    cases += [Wkv((4, 2), 64, "q"), Wkv((3, 3), 64, "7")]
    inputs = [case.draw(np.random.default_rng(i), 40) for i, case in enumerate(cases)]
    layers, outs = [Layer(case, threads) for case in cases], []
    for i in range(0, 40, size):
        tokens = [(0, p) for p in range(i, min(40, i + size))]
        parts = [{name: x[i : i + size] for name, x in values.items()} for values in inputs]
        outs.append(np.hstack([layer.run(tokens, part) for layer, part in zip(layers, parts, strict=True)]))
    return np.concatenate(outs)


def test_every_thread_count_gives_the_same_bits() -> None:
    first = run_all(1, 40)
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(first, run_all(threads, 40))


def test_batches_of_one_and_of_many_agree() -> None:
    first = run_all(1, 40)
    for size in (1, 7, 16):
        assert nmse(run_all(1, size), first.astype(np.float64)) < 1e-13
