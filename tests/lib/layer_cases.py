"""Norms, rotary positions and routing: results in double, and the cases for the CPU and for CUDA devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.parameters import RopeConfig, Routing


def normed(x: Any, kind: str, group: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Return the norm of groups of a row; weight and bias are repeated along it."""
    g = x.reshape(len(x), -1, group).astype(np.float64)
    if kind == "layer":
        g = g - g.mean(-1, keepdims=True)
    square = np.square(g).sum(-1, keepdims=True) / (1 if kind == "l2" else group)
    y = (g / np.sqrt(square + eps)).reshape(x.shape)
    for vector, combine in ((weight, np.multiply), (bias, np.add)):
        if vector is not None:
            y = combine(y, np.tile(vector, x.shape[1] // len(vector)))
    return y


ROPES = {
    "plain": RopeConfig(n_rot=128, kind="neox", freq_base=1e6),
    "odd": RopeConfig(n_rot=20, kind="normal", freq_base=1e4, freq_scale=0.25),
    "yarn": RopeConfig(
        n_rot=64, kind="neox", freq_base=150000.0, freq_scale=1 / 32, ext_factor=1.0, attn_factor=0.9, n_ctx_orig=4096
    ),
    "mrope": RopeConfig(n_rot=64, kind="neox", freq_base=1e6, sections=(8, 8, 8, 8)),
    "imrope": RopeConfig(n_rot=128, kind="neox", freq_base=5e6, sections=(24, 20, 20, 0), interleaved=True),
    "imrope4": RopeConfig(n_rot=64, kind="neox", freq_base=1e7, sections=(10, 8, 6, 8), interleaved=True),
}
#: Rows, heads, values of a head; the first rotated one, and their number.
TURNS = [(1, 32, 128, 0, 128), (40, 4, 96, 0, 32), (3, 3, 24, 4, 20), (9, 2, 192, 128, 64), (2, 1, 6, 0, 6)]


def turn(kind: str, rows: int, heads: int, head: int, start: int, n_rot: int) -> tuple[Any, Any, Any]:
    """Return rows, a table of angles, and the rotated rows: every pair as a complex number times e^(i angle)."""
    rng = np.random.default_rng(6)
    x = rng.normal(0, 1, (rows, heads * head)).astype(np.float32)
    angles = rng.uniform(-3, 3, (rows, n_rot // 2))
    want = x.reshape(rows, heads, head).astype(np.float64)
    part = want[..., start : start + n_rot].copy()
    a, b = (part[..., 0::2], part[..., 1::2]) if kind == "normal" else np.split(part, 2, -1)
    y = (a + 1j * b) * np.exp(1j * angles)[:, None, :]
    pair = np.stack([y.real, y.imag], -1 if kind == "normal" else -2)
    want[..., start : start + n_rot] = pair.reshape(rows, heads, n_rot)
    return x, np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32), want.reshape(x.shape)


ROUTINGS = [
    Routing(128, 8, norm=True),
    Routing(8, 2),
    Routing(60, 4, norm=False, scale=2.5),
    Routing(5, 5, "sigmoid", norm=True),
    Routing(16, 1, "sigmoid"),
    Routing(256, 8, "sigmoid", norm=True, scale=2.5, n_group=8, n_group_used=4),
    Routing(64, 6, "softmax", n_group=8, n_group_used=3, scale=0),
    Routing(12, 3, "sigmoid", n_group=12, n_group_used=5),
    Routing(80, 6, "sigmoid", n_group=40, n_group_used=7),
    Routing(32, 4, "softmax_weight"),
    Routing(1000, 37, "softmax_weight", norm=True),
    Routing(1024, 8, "sigmoid"),
    Routing(64, 8, norm=True, share=2),
    Routing(40, 6, "sqrt_softplus", norm=True, scale=1.5),
]


def route_inputs(r: Routing, rows: int, with_bias: bool) -> tuple[Any, Any]:
    """Return logits, and biases or None."""
    rng = np.random.default_rng(r.n_expert)
    logits = rng.standard_normal((rows, r.n_expert)).astype(np.float32) * 2
    return logits, rng.standard_normal(r.n_expert).astype(np.float32) * 0.1 if with_bias else None


def route_expected(r: Routing, logits: Any, bias: Any = None, experts: Any = None) -> tuple[Any, Any]:
    """Return ids, and weights in double; experts are chosen by probabilities in float32, or given."""
    x = logits.astype(np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    probs = {
        **{"softmax": e / e.sum(axis=1, keepdims=True), "sigmoid": 1 / (1 + np.exp(-x)), "softmax_weight": x},
        "sqrt_softplus": np.sqrt(np.logaddexp(0, x)),
    }[r.gating].astype(np.float32)
    choice = probs if bias is None else probs + bias
    if r.n_group > 1:
        groups = choice.reshape(len(x), r.n_group, -1)
        scores = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        best_groups = np.argsort(-scores, axis=1, kind="stable")[:, : r.n_group_used]
        masked = np.full_like(groups, -np.inf)
        np.put_along_axis(masked, best_groups[:, :, None], np.take_along_axis(groups, best_groups[:, :, None], 1), 1)
        choice = masked.reshape(choice.shape)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : r.n_used] // r.share if experts is None else experts
    weights = np.take_along_axis(probs, ids, 1).astype(np.float64)
    if r.gating == "softmax_weight":
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
    if r.norm:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), r.sum_floor)
    return ids.astype(np.int32), weights * (r.scale or 1)


def check_chosen(routed: Any) -> None:
    """Check the weights of given experts."""
    r = Routing(24, 3, "sqrt_softplus", norm=True)
    logits, experts = route_inputs(r, 5, False)[0], np.array([[4, 23, 0], [1, 2, 3]] * 2 + [[9, 8, 7]], np.int32)
    ids, weights = routed(r, logits, experts=experts)
    want = route_expected(r, logits, experts=experts)
    np.testing.assert_array_equal(ids, experts)
    np.testing.assert_allclose(weights, want[1], rtol=3e-6)


def check_ties(routed: Any, gating: str) -> None:
    """Check that the lower number wins a tie. routed: returns ids and weights for a routing and logits."""
    logits = np.zeros((3, 80), np.float32)
    logits[0, ::2] = -0.0
    logits[1, [39, 71, 33]] = 1
    logits[2, 40:] = -np.inf if gating != "softmax_weight" else -1
    r = Routing(80, 5, gating, norm=True)
    ids, weights = routed(r, logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [33, 39, 71, 0, 1], [0, 1, 2, 3, 4]]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(weights, route_expected(r, logits)[1], rtol=3e-6)


def check_nans(routed: Any) -> None:
    """Check that no expert is chosen twice because of a NaN."""
    logits = np.full((3, 24), np.nan, np.float32)
    logits[1, 5] = 3
    logits[2] = -np.inf
    logits[2, 3] = np.nan
    ids, _ = routed(Routing(24, 6, "sigmoid"), logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [5, 0, 1, 2, 3, 4], [0, 1, 2, 4, 5, 6]]


def check_floor(routed: Any) -> None:
    """Check that a sum of weights near zero is replaced by the floor."""
    r = Routing(8, 2, "sigmoid", norm=True)
    _, weights = routed(r, np.full((1, 8), -30, np.float32))
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(30)) / r.sum_floor, rtol=3e-6)
