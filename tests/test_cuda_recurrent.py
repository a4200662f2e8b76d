"""Recurrent layers on the device: against float64, sequences in pieces, mixed and restarted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from meaning import batch_of, matrix, program
from recurrent_cases import MIXED, N_SEQ, Arrays, Case, Convolution, DeltaRule, Scan, Tokens, alone, check, nmse

from quantkit.kernels.cuda.layer.recurrent import HEADS, TAPS, convolve, delta_net, ssm_scan
from quantkit.model.ops import Convolve, DeltaNet, SsmScan, State, Value

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
        else:
            self.shape = delta_net(case.heads[1], case.head_k, case.head_v)
        self.state = memory.room((N_SEQ, case.empty.size))

    def run(self, tokens: Tokens, values: Arrays) -> Any:
        n = len(tokens)
        out = self.memory.room((n + 1, self.case.n_out))
        self.memory.run(
            self.shape,
            batch=self.memory.batch(np.zeros(n), [p for _, p in tokens], [s for s, _ in tokens]),
            out=out,
            state=self.state,
            rows=n,
            **{name: self.memory.put(x) for name, x in values.items()},
            **self.slots,
        )
        got = self.memory.get(out, (n + 1, self.case.n_out))
        assert np.isnan(got[-1]).all()
        return got[:-1]

    def kept(self) -> Any:
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
    ],
    ids=str,
)
def test_delta_net(memory: Memory, case: DeltaRule, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


@batches
@pytest.mark.parametrize(
    "case",
    [Scan((1, 2), 64, 128), Scan((1, 1), 3, 256), Scan((2, 4), 40, 64), Scan((2, 2), 33, 22), Scan((1, 3), 8, 16)],
    ids=str,
)
def test_ssm_scan(memory: Memory, case: Scan, batches: list[Tokens]) -> None:
    check(Layer(memory, case), case, batches, 1e-12, of_state=1e-12)


def test_as_the_reference_does(memory: Memory) -> None:
    delta, scan, rng = DeltaRule((2, 4), 16, 8), Scan((2, 4), 8, 16), np.random.default_rng(3)
    conv = Convolution(delta.n_out, 4, biased=True)
    value: dict[str, Any] = {name: Value(name, width) for name, width in (delta.widths | scan.widths).items()}
    weights: dict[str, Any] = {name: matrix(x, name) for case in (conv, scan) for name, x in case.weights.items()}
    arrays = {weights[name]: x for case in (conv, scan) for name, x in case.weights.items()}
    out = Value("out", delta.n_out)
    ops = (
        DeltaNet(
            out=out, **{name: value[name] for name in delta.widths}, state=State("s", delta.empty.size),
            n_k_head=delta.heads[0], n_v_head=delta.heads[1], scale=delta.head_k**-0.5,
        ),
        Convolve(
            out=out, x=value["v"], weight=weights["weight"], bias=weights["bias"], state=State("c", conv.empty.size)
        ),
        SsmScan(
            out=out, **{name: value[name] for name in scan.widths}, **{name: weights[name] for name in scan.weights},
            state=State("h", scan.empty.size), n_head=scan.groups[1], n_group=scan.groups[0],
        ),
    )  # fmt: skip
    layers = Layer(memory, delta), Layer(memory, conv), Layer(memory, scan)
    programs = [program(op, arrays) for op in ops]
    for tokens in MIXED[:4]:
        x, of_scan = delta.draw(rng, len(tokens)), scan.draw(rng, len(tokens))
        for p, layer, inputs in zip(programs, layers, (x, {"x": x["v"]}, of_scan), strict=True):
            p.values.update({value[name]: array for name, array in (x | of_scan).items()})
            p.run(batch_of([at for _, at in tokens], [s for s, _ in tokens]))
            assert nmse(layer.run(tokens, inputs), p.values[out]) < 1e-12


def test_what_there_is_no_room_for() -> None:
    with pytest.raises(ValueError, match=f"1 to {TAPS}"):
        convolve(TAPS + 1, 8)
    with pytest.raises(ValueError, match=f"1 to {HEADS[-1]}"):
        delta_net(2, HEADS[-1] + 1, 8)
    with pytest.raises(ValueError, match=f"1 to {HEADS[-1]}"):
        ssm_scan(2, 8, HEADS[-1] + 1)
