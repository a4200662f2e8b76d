"""Routing, repeating and combining against numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from layer_cases import ROUTINGS, route_inputs

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.route import combine, repeat, route
from quantkit.kernels.parameters import MAX_EXPERTS
from quantkit.model.ops import Routing

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
TEAMS = {n: Team(n) for n in (1, 2, 3)}


def run(operation, tokens: int, threads: int = 2, **slots: float) -> None:
    batch = Batch(TEAMS[threads], max(tokens, 1))
    batch.set(np.zeros(tokens, np.int32))
    Tape(TEAMS[threads], batch, [(operation, operation.block(batch=batch.address, rows_of=0, **slots))]).run()


def routed(r: Routing, logits: F32, bias: F32 | None = None, threads: int = 2) -> tuple[I32, F32]:
    tokens = len(logits)
    ids = np.full((tokens + 1, r.n_used), -7, np.int32)
    weights = np.full((tokens + 1, r.n_used), -7, np.float32)
    run(
        route, tokens, threads, ids=address_of(ids), weights=address_of(weights), logits=address_of(logits),
        bias=0 if bias is None else address_of(bias), **r.slots(),
    )  # fmt: skip
    assert (ids[tokens] == -7).all()
    assert (weights[tokens] == -7).all()
    return ids[:tokens], weights[:tokens]


def expected(r: Routing, logits: F32, bias: F32 | None = None) -> tuple[I32, npt.NDArray[np.float64]]:
    x = logits.astype(np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    probs = {"softmax": e / e.sum(axis=1, keepdims=True), "sigmoid": 1 / (1 + np.exp(-x)), "softmax_weight": x}[
        r.gating
    ].astype(np.float32)
    choice = probs if bias is None else probs + bias
    if r.n_group > 1:
        groups = choice.reshape(len(x), r.n_group, -1)
        scores = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-scores, axis=1, kind="stable")[:, : r.n_group_used]
        masked = np.full_like(groups, -np.inf)
        np.put_along_axis(masked, kept[:, :, None], np.take_along_axis(groups, kept[:, :, None], 1), 1)
        choice = masked.reshape(choice.shape)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : r.n_used]
    weights = np.take_along_axis(probs, ids, 1).astype(np.float64)
    if r.gating == "softmax_weight":
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
    if r.norm:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), r.sum_floor)
    return ids.astype(np.int32), weights * (r.scale or 1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("r", ROUTINGS, ids=str)
def test_route(r: Routing, with_bias: bool) -> None:
    logits, bias = route_inputs(r, 37, with_bias)
    ids, weights = routed(r, logits, bias)
    want_ids, want_weights = expected(r, logits, bias)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=3e-6)
    for threads in (1, 3):
        again = routed(r, logits, bias, threads)
        assert again[0].tobytes() == ids.tobytes()
        assert again[1].tobytes() == weights.tobytes()


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight"])
def test_the_lower_number_wins_a_tie(gating: str) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[0, ::2] = -0.0
    logits[1, [39, 17, 33]] = 1
    logits[2, 20:] = -np.inf if gating != "softmax_weight" else -1
    ids, weights = routed(Routing(40, 5, gating, norm=True), logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [17, 33, 39, 0, 1], [0, 1, 2, 3, 4]]
    np.testing.assert_allclose(weights[0], 0.2, rtol=1e-6)


def test_a_nan_never_makes_an_expert_come_twice() -> None:
    logits = np.full((2, 24), np.nan, np.float32)
    logits[1, 5] = 3
    ids, _ = routed(Routing(24, 6, "sigmoid"), logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [5, 0, 1, 2, 3, 4]]


def test_weights_that_vanish_are_divided_by_the_floor() -> None:
    r = Routing(8, 2, "sigmoid", norm=True)
    _, weights = routed(r, np.full((1, 8), -30, np.float32))
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(30)) / r.sum_floor, rtol=3e-6)


def test_more_experts_than_there_is_room_for() -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_EXPERTS}"):
        Routing(MAX_EXPERTS + 1, 2).slots()


@pytest.mark.parametrize("width", [1, 16, 40, 1025])
@pytest.mark.parametrize("tokens", [1, 5])
def test_repeat(tokens: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weights = rng.standard_normal((tokens, width), np.float32), rng.standard_normal((tokens, 3), np.float32)
    out = np.full((tokens * 3 + 1, width), 7, np.float32)
    run(repeat, tokens, 2, out=address_of(out), x=address_of(x), weights=address_of(weights), width=width, n_used=3)
    np.testing.assert_array_equal(out[:-1], (x[:, None] * weights[:, :, None]).reshape(-1, width))
    assert (out[-1] == 7).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [1, 16, 40, 1025])
@pytest.mark.parametrize("tokens", [1, 5])
def test_combine(tokens: int, width: int, weighted: bool) -> None:
    rng = np.random.default_rng(width)
    x, weights = rng.standard_normal((tokens, 3, width), np.float32), rng.standard_normal((tokens, 3), np.float32)
    out = np.full((tokens + 1, width), 7, np.float32)
    address = address_of(weights) if weighted else 0
    run(combine, tokens, 2, out=address_of(out), x=address_of(x), weights=address, width=width, n_used=3)
    parts = x * weights[:, :, None] if weighted else x
    np.testing.assert_array_equal(out[:-1], parts[:, 0] + parts[:, 1] + parts[:, 2])
    assert (out[-1] == 7).all()
