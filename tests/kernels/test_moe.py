"""Products by expert against numpy: every type, both paths, merged halves, skewed routing, any number of threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from cpu_products import TEAMS, Rows, aligned
from matmul_cases import draw_weights, products_by_expert, routed

from quantkit.kernels import quantize
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.layer.glu import glu, limits
from quantkit.kernels.cpu.matmul.moe import (
    MIN_PANEL,
    bucket,
    mul_mat_id,
    plan_bytes,
    products_of,
    scratch_bytes,
    share,
    up_gate_id,
)
from quantkit.kernels.formats import FORMATS, has_encoder
from quantkit.model.ops import Activation
from quantkit.types import BY_NAME, TensorType

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
SILU = Activation("silu")


@dataclass
class Experts:
    """Weights uint8 [n_expert, n_out, row_bytes] of a type."""

    type: TensorType
    n_in: int
    data: U8

    @classmethod
    def random(cls, name: str, n_expert: int, n_out: int, n_in: int, seed: int = 1) -> Experts:
        t = BY_NAME[name]
        if not has_encoder(t):
            rng = np.random.default_rng(seed)
            return cls(t, n_in, draw_weights(t, (n_expert, n_out, n_in), rng, scale=(0.02, 0.04)))
        w = np.random.default_rng(seed).standard_normal((n_expert * n_out, n_in)).astype(np.float32)
        data = quantize(w, t, np.ones(n_in, np.float32))
        return cls(t, n_in, np.ascontiguousarray(data).reshape(n_expert, n_out, -1))

    @property
    def n_out(self) -> int:
        return self.data.shape[1]

    def slots(self, prefix: str = "") -> dict[str, int]:
        name = f"{prefix}_expert_bytes" if prefix else "expert_bytes"
        return {prefix or "w": address_of(self.data), name: self.data.strides[0]}


@dataclass
class Layer:
    """A tape that sorts the pairs; ``run`` adds an operation on the quantized x."""

    type: TensorType
    x: F32
    ids: I32
    n_expert: int
    threads: int = 2

    def __post_init__(self) -> None:
        self.tokens, self.n_used = self.ids.shape
        self.n_in = self.x.shape[1]
        self.per = len(self.x) // self.tokens
        self.team = TEAMS[self.threads]
        self.batch = Batch(self.team, self.tokens)
        self.batch.set(np.zeros(self.tokens, np.int32))
        self.plan = aligned(plan_bytes(self.n_expert, self.n_used, self.tokens))
        self.scratch_bytes = scratch_bytes(self.type, self.n_in)
        self.scratch = aligned(self.threads * self.scratch_bytes)
        self.rows = Rows(self.type, self.x, self.threads, self.per)
        block = bucket.block(
            plan=address_of(self.plan), ids=address_of(self.ids), n_expert=self.n_expert, n_used=self.n_used,
            batch=self.batch.address, rows_of=0,
        )  # fmt: skip
        self.entries = [(bucket, block)]

    def run(self, op, n_out: int, twice: bool = False, **slots: float) -> F32:
        out = np.full((self.tokens * self.n_used + 1, n_out), 7, np.float32)
        block = op.block(
            batch=self.batch.address, out=address_of(out), x=address_of(self.rows.bytes), x_stride=self.rows.stride,
            x_per=self.n_used // self.per, plan=address_of(self.plan), n_expert=self.n_expert, n_used=self.n_used,
            n_in=self.n_in, n_out=n_out, products=products_of(self.type),
            scratch=address_of(self.scratch), scratch_bytes=self.scratch_bytes, **slots,
        )  # fmt: skip
        Tape(self.team, self.batch, [*self.entries, (op, block), *([(op, block)] if twice else [])]).run()
        assert (out[-1] == 7).all()
        assert self.batch.words[8] == 0
        return out[:-1]

    def mul_mat(self, w: Experts, bias: F32 | None = None, scale: F32 | None = None, twice: bool = False) -> F32:
        return self.run(
            mul_mat_id, w.n_out, twice, row_bytes=w.data.strides[1], **w.slots(),
            bias=0 if bias is None else address_of(bias), bias_stride=4 * w.n_out,
            scale=0 if scale is None else address_of(scale),
        )  # fmt: skip

    def up_gate(self, up: Experts, gate: Experts, a: Activation = SILU, **slots: int) -> F32:
        unused_slots = dict.fromkeys(
            ("up_bias", "gate_bias", "up_bias_stride", "gate_bias_stride", "up_scale", "gate_scale"), 0
        )
        return self.run(
            up_gate_id(a), up.n_out, row_bytes=up.data.strides[1], **up.slots("up"), **gate.slots("gate"),
            **{**unused_slots, **slots}, **limits(a),
        )  # fmt: skip

    def expected(self, w: Experts) -> npt.NDArray[np.float64]:
        """Every pair's product with its expert, float64 [pairs, n_out]."""
        return products_by_expert(w.data, w.type, *self.rows.values(), self.ids)


def inputs(rows: int, n: int, seed: int = 9) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


def assert_close(actual: F32, want: npt.NDArray[np.float64]) -> None:
    scale = np.sqrt(np.mean(want**2))
    np.testing.assert_allclose(actual, want, rtol=0, atol=1.6e-5 * scale)


@pytest.mark.parametrize("name", FORMATS)
def test_every_type_on_both_paths(name: str) -> None:
    n_in = 512 if BY_NAME[name].block == 256 else 384
    w = Experts.random(name, 3, 40, n_in)
    ids = routed(13, 2, 3)
    ids[:10, 0], ids[:10, 1] = 0, 2  # many for experts 0 and 2, few for 1
    ids[10:] = [[1, 0], [1, 2], [2, 1]]
    layer = Layer(w.type, inputs(13, n_in), ids, 3)
    counts = np.bincount(ids.reshape(-1))
    assert counts[0] >= MIN_PANEL > counts[1] > 0
    actual = layer.mul_mat(w)
    assert_close(actual, layer.expected(w))
    gate = Experts.random(name, 3, 40, n_in, seed=2)
    fused = layer.up_gate(w, gate)
    assert_close(fused, silu(layer.expected(gate)) * layer.expected(w))


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):  # e^-x is infinite where the result is 0
        return x / (1 + np.exp(-x))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 200])
def test_numbers_of_tokens(tokens: int, threads: int) -> None:
    w = Experts.random("Q4_K", 16, 72, 512)
    ids, x = routed(tokens, 4, 16), inputs(tokens, 512)
    layer = Layer(w.type, x, ids, 16)
    actual = layer.mul_mat(w)
    assert_close(actual, layer.expected(w))
    rerun = Layer(w.type, x, ids, 16, threads).mul_mat(w, twice=True)
    assert rerun.tobytes() == actual.tobytes()


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_one_row_of_x_per_pair(tokens: int) -> None:
    w = Experts.random("Q6_K", 8, 33, 256)
    layer = Layer(w.type, inputs(tokens * 3, 256), routed(tokens, 3, 8), 8)
    assert_close(layer.mul_mat(w), layer.expected(w))


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_NL"])
def test_skewed_routing(name: str) -> None:
    w = Experts.random(name, 64, 48, 256)
    for ids in (np.full((130, 1), 63), np.full((3, 1), 0), np.array([[5, 60]] * 70)):
        layer = Layer(w.type, inputs(len(ids), 256), ids.astype(np.int32), 64, 3)
        assert_close(layer.mul_mat(w), layer.expected(w))


@pytest.mark.parametrize("tokens", [1, 6, 50])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS"])
def test_merged_halves_equal_separate_ones_exactly(name: str, tokens: int) -> None:
    gate, up = Experts.random(name, 6, 56, 512, seed=1), Experts.random(name, 6, 56, 512, seed=2)
    merged = Experts(gate.type, 512, np.concatenate([gate.data, up.data], axis=1))
    layer = Layer(gate.type, inputs(tokens, 512), routed(tokens, 3, 6), 6)
    separate = layer.up_gate(up, gate)
    halves = layer.run(
        up_gate_id(SILU), 56, row_bytes=merged.data.strides[1],
        gate=address_of(merged.data), up=address_of(merged.data) + 56 * merged.data.strides[1],
        up_expert_bytes=merged.data.strides[0], gate_expert_bytes=merged.data.strides[0],
        up_bias=0, gate_bias=0, up_bias_stride=0, gate_bias_stride=0, up_scale=0, gate_scale=0, **limits(SILU),
    )  # fmt: skip
    assert halves.tobytes() == separate.tobytes()
    # Unfused: the same products, then glu over the halves of rows twice as wide.
    both = layer.mul_mat(merged)
    out = np.empty_like(separate)
    op = glu(SILU)
    block = op.block(
        batch=layer.batch.address, out=address_of(out), gate=address_of(both), up=0, width=56, gate_width=56,
        rows_of=0, per=3, **limits(SILU),
    )  # fmt: skip
    Tape(layer.team, layer.batch, [(op, block)]).run()
    assert out.tobytes() == separate.tobytes()


@pytest.mark.parametrize("tokens", [1, 6, 50])
def test_biases_and_scales(tokens: int) -> None:
    gate, up = Experts.random("MXFP4", 5, 40, 256, seed=1), Experts.random("MXFP4", 5, 40, 256, seed=2)
    rng = np.random.default_rng(3)
    biases = rng.standard_normal((5, 80)).astype(np.float32) * 10  # merged: gate's, then up's
    scales = rng.uniform(0.1, 0.4, (2, 5)).astype(np.float32)
    a = Activation("swiglu_oai", gate_limit=7.0, up_limit=7.0)
    layer = Layer(up.type, inputs(tokens, 256), routed(tokens, 2, 5), 5)
    actual = layer.up_gate(
        up, gate, a, gate_bias=address_of(biases), up_bias=address_of(biases) + 160, gate_bias_stride=320,
        up_bias_stride=320, gate_scale=address_of(scales), up_scale=address_of(scales) + 20,
    )  # fmt: skip
    e = layer.ids.reshape(-1)
    g = layer.expected(gate) * scales[0][e, None] + biases[e, :40]
    u = layer.expected(up) * scales[1][e, None] + biases[e, 40:]
    g = np.minimum(g, 7)
    assert_close(actual, g / (1 + np.exp(-1.702 * g)) * (np.clip(u, -7, 7) + 1))
    own_biases = np.ascontiguousarray(biases[:, :40])
    actual = layer.mul_mat(gate, own_biases, scales[0])
    assert_close(actual, layer.expected(gate) * scales[0][e, None] + own_biases[e])


@pytest.mark.parametrize("kind", ["gelu", "relu", "relu_sqr", "gelu_quick"])
def test_other_activations(kind: str) -> None:
    gate, up = Experts.random("Q8_0", 4, 32, 64, seed=1), Experts.random("Q8_0", 4, 32, 64, seed=2)
    a = Activation(kind)
    layer = Layer(up.type, inputs(9, 64), routed(9, 2, 4), 4)
    actual = layer.up_gate(up, gate, a)
    g, u = layer.mul_mat(gate), layer.mul_mat(up)
    op, out = glu(a), np.empty_like(g)
    block = op.block(
        batch=layer.batch.address, out=address_of(out), gate=address_of(g), up=address_of(u), width=32, gate_width=32,
        rows_of=0, per=2, **limits(a),
    )  # fmt: skip
    Tape(layer.team, layer.batch, [(op, block)]).run()
    assert out.tobytes() == actual.tobytes()


@pytest.mark.parametrize("tokens", [1, 100])
def test_bucket(tokens: int) -> None:
    ids = routed(tokens, 6, 20, seed=tokens)
    ids[ids == 3] = 19
    team = TEAMS[2]
    batch = Batch(team, tokens)
    batch.set(np.zeros(tokens, np.int32))
    plan = np.full(plan_bytes(20, 6, tokens) // 4, -7, np.int32)
    block = bucket.block(
        batch=batch.address, plan=address_of(plan), ids=address_of(ids), n_expert=20, n_used=6, rows_of=0
    )
    Tape(team, batch, [(bucket, block)] * 2).run()
    flat = ids.reshape(-1)
    counts = np.bincount(flat, minlength=20)
    used = np.flatnonzero(counts)
    assert plan[:3].tolist() == [len(used), 6 * tokens, counts.max()]
    assert plan[16:37].tolist() == [0, *np.cumsum(counts)]
    assert plan[38 : 38 + len(used)].tolist() == used.tolist()
    assert plan[58 : 58 + 6 * tokens].tolist() == np.argsort(flat, kind="stable").tolist()


@pytest.mark.parametrize("long_runs", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 192, 1000])
def test_shares_cover_everything_once(n: int, nth: int, long_runs: bool) -> None:
    tickets = share.py_func(0, n, nth, long_runs)[2]
    shares = [share.py_func(k, n, nth, long_runs) for k in range(tickets + nth)]
    assert {s[2] for s in shares} == {tickets}
    covered = [unit for first, last, _ in shares for unit in range(first, last)]
    assert covered == list(range(n))
    assert all((first < last) == (k < tickets) for k, (first, last, _) in enumerate(shares))
