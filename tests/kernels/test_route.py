"""Routing, repeating and combining against numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from layer_cases import ROUTINGS, check_chosen, check_floor, check_nans, check_ties, route_expected, route_inputs
from reference_op import matrix, meaning

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer.route import combine, repeat, route
from quantkit.kernels.parameters import MAX_EXPERTS
from quantkit.model.ops import Route, Routing, Value

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
TEAMS = {n: Team(n) for n in (1, 2, 3)}


def run(operation, tokens: int, threads: int = 2, **slots: float) -> None:
    batch = Batch(TEAMS[threads], max(tokens, 1))
    batch.set(np.zeros(tokens, np.int32))
    Tape(TEAMS[threads], batch, [(operation, operation.block(batch=batch.address, rows_of=0, **slots))]).run()


def routed(
    r: Routing, logits: F32, bias: F32 | None = None, threads: int = 2, experts: I32 | None = None
) -> tuple[I32, F32]:
    tokens = len(logits)
    ids = np.full((tokens + 1, r.n_used), -7, np.int32)
    weights = np.full((tokens + 1, r.n_used), -7, np.float32)
    run(
        route, tokens, threads, ids=address_of(ids), weights=address_of(weights), logits=address_of(logits),
        bias=0 if bias is None else address_of(bias), chosen=0 if experts is None else address_of(experts), **r.slots(),
    )  # fmt: skip
    assert (ids[tokens] == -7).all()
    assert (weights[tokens] == -7).all()
    return ids[:tokens], weights[:tokens]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("r", ROUTINGS, ids=str)
def test_route(r: Routing, with_bias: bool) -> None:
    logits, bias = route_inputs(r, 37, with_bias)
    ids, weights = routed(r, logits, bias)
    v, m = Value("logits", r.n_expert), None if bias is None else matrix(bias)
    op = Route(
        ids=Value("ids", r.n_used, integer=True), weights=Value("weights", r.n_used), logits=v, bias=m, routing=r
    )
    want_ids, want_weights = route_expected(r, logits, bias)
    for actual in ((ids, weights), meaning(op, {v: logits}, rows=len(logits), weights={m: bias} if m else {})):
        np.testing.assert_array_equal(actual[0], want_ids)
        np.testing.assert_allclose(actual[1], want_weights, rtol=3e-6)
    for threads in (1, 3):
        rerun = routed(r, logits, bias, threads)
        assert rerun[0].tobytes() == ids.tobytes()
        assert rerun[1].tobytes() == weights.tobytes()


def test_given_experts_keep_their_weights() -> None:
    check_chosen(routed)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight"])
def test_the_lower_number_wins_a_tie(gating: str) -> None:
    check_ties(routed, gating)


def test_a_nan_does_not_duplicate_an_expert() -> None:
    check_nans(routed)


def test_vanishing_weights_are_divided_by_the_floor() -> None:
    check_floor(routed)


def test_more_experts_than_fit() -> None:
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
