"""Routing, repeating and combining on the device, against the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from layer_cases import ROUTINGS, check_chosen, check_floor, check_nans, check_ties, route_expected, route_inputs
from reference_op import meaning

from quantkit.kernels.cuda.layer.route import combine, repeat, route
from quantkit.kernels.parameters import MAX_EXPERTS
from quantkit.model.ops import Combine, Repeat, Routing, Value


def routed(memory: Memory, r: Routing, logits: Any, bias: Any = None, experts: Any = None) -> tuple[Any, Any]:
    n = len(logits)
    ids, weights = memory.allocate((n + 1, r.n_used), np.int32), memory.allocate((n + 1, r.n_used))
    memory.run(
        route(r, n),
        ids=ids,
        weights=weights,
        logits=memory.put(logits),
        bias=0 if bias is None else memory.put(bias),
        chosen=0 if experts is None else memory.put(experts),
        rows=n,
        **r.slots(),
    )
    actual = memory.get(ids, (n + 1, r.n_used), np.int32), memory.get(weights, (n + 1, r.n_used))
    assert (actual[0][-1] == -1).all()
    assert np.isnan(actual[1][-1]).all()
    return actual[0][:-1], actual[1][:-1]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("r", [*ROUTINGS, Routing(1500, 4, norm=True)], ids=str)
def test_route(memory: Memory, r: Routing, with_bias: bool) -> None:
    logits, bias = route_inputs(r, 7, with_bias)
    ids, weights = routed(memory, r, logits, bias)
    want_ids, want_weights = route_expected(r, logits, bias)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)


def test_given_experts_keep_their_weights(memory: Memory) -> None:
    check_chosen(partial(routed, memory))


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight"])
def test_the_lower_number_wins_a_tie(memory: Memory, gating: str) -> None:
    check_ties(partial(routed, memory), gating)


def test_the_first_of_equal_groups_wins(memory: Memory) -> None:
    r = Routing(48, 6, "sigmoid", n_group=6, n_group_used=3)
    logits = np.zeros((2, 48), np.float32)
    logits[1, 40:42] = logits[1, 17:19] = 2
    ids, _ = routed(memory, r, logits)
    np.testing.assert_array_equal(ids, route_expected(r, logits)[0])
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [17, 18, 40, 41, 0, 1]]


def test_a_nan_does_not_duplicate_an_expert(memory: Memory) -> None:
    check_nans(partial(routed, memory))


def test_vanishing_weights_are_divided_by_the_floor(memory: Memory) -> None:
    check_floor(partial(routed, memory))


def test_the_maximum_of_experts_fits_shared_memory() -> None:
    assert route(Routing(MAX_EXPERTS, MAX_EXPERTS), 3).shared <= 48 << 10
    assert route(Routing(1024, 1024), 3).shared <= 48 << 10


@pytest.mark.parametrize("width", [1, 16, 1025, 1100])
@pytest.mark.parametrize("weighted", [True, False])
def test_repeat_and_combine(memory: Memory, width: int, weighted: bool) -> None:
    rng = np.random.default_rng(width)
    n, n_used = 3, 4
    x = rng.standard_normal((n, width)).astype(np.float32)
    parts = rng.standard_normal((n * n_used, width)).astype(np.float32)
    weights = rng.standard_normal((n, n_used)).astype(np.float32)
    v, p, w = Value("x", width), Value("parts", width, per=n_used), Value("w", n_used)
    values = {v: x, p: parts, w: weights}
    slots = {"weights": memory.put(weights) if weighted else 0, "width": width, "n_used": n_used, "rows": n}
    out = memory.allocate((n + 1, width))
    memory.run(combine(width, n), x=memory.put(parts), out=out, **slots)
    want = meaning(Combine(out=Value("out", width), x=p, weights=w if weighted else None), values, rows=n)
    actual = memory.get(out, (n + 1, width))
    np.testing.assert_array_equal(actual[:-1], want)
    assert np.isnan(actual[-1]).all()
    if weighted:
        out = memory.allocate((n * n_used + 1, width))
        memory.run(repeat(width, n_used, n), x=memory.put(x), out=out, **slots)
        want = meaning(Repeat(out=Value("out", width, per=n_used), x=v, weights=w), values, rows=n)
        actual = memory.get(out, (n * n_used + 1, width))
        np.testing.assert_array_equal(actual[:-1], want)
        assert np.isnan(actual[-1]).all()
