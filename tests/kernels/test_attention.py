"""Attention and the cache: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import attention_cases
import numpy as np
import numpy.typing as npt
import pytest
from attention_cases import nmse

from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.attention.attention import attention, scratch_bytes
from quantkit.kernels.cpu.attention.cache import cache_write
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.parameters import MASKS
from quantkit.types import BY_NAME

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case(attention_cases.Case):
    """An attention operation over a cache of two types."""

    k_type: str = "F32"
    v_type: str = "F32"


class Model:
    """One layer: a cache in the operation's form, and the keys and values that were written, exact."""

    def __init__(self, case: Case, n_seq: int = 1, n_ctx: int = 512, threads: int = 2, n_max: int = 512) -> None:
        self.case, self.n_ctx = case, n_ctx
        self.team = Team(threads)
        self.batch = Batch(self.team, n_max, n_ctx)
        k_width, v_width = case.n_head_kv * case.head_k, case.n_head_kv * case.head_v
        self.k_type, self.v_type = BY_NAME[case.k_type], BY_NAME[case.v_type]
        # What was never written must never matter: NaN.
        self.k_cache = np.full((n_seq * n_ctx, self.k_type.row_bytes(k_width)), 255, np.uint8)
        self.v_cache = np.full((n_seq * n_ctx, self.v_type.row_bytes(v_width)), 255, np.uint8)
        self.k, self.v = (np.zeros((n_max, w), np.float32) for w in (k_width, v_width))
        self.q = np.zeros((n_max, case.n_head * case.head_k), np.float32)
        self.out = np.zeros((n_max, case.n_head * case.head_v), np.float32)
        self.sinks = np.random.default_rng(7).normal(0, 2, case.n_head).astype(np.float32)
        self.scratch = np.full(scratch_bytes(case.head_k, case.head_v, threads, case.selected > 0) + 64, 255, np.uint8)
        self.selected = np.zeros((n_max, case.selected), np.int32)
        self.biases = case.bias_table(n_ctx)
        caches = {"k_cache": address_of(self.k_cache), "k_type": self.k_type.id, "v_type": self.v_type.id}
        v_cache = 0 if case.mla else address_of(self.v_cache)
        shared = {"batch": self.batch.address, **caches, "v_cache": v_cache}
        write = cache_write.block(
            **shared,
            k=address_of(self.k),
            v=address_of(self.v),
            k_width=k_width,
            v_width=0 if case.mla else v_width,
        )
        attend = attention.block(
            **shared,
            q=address_of(self.q),
            out=address_of(self.out),
            n_head=case.n_head,
            n_head_kv=case.n_head_kv,
            head_k=case.head_k,
            head_v=case.head_v,
            scale=case.scale,
            softcap=case.softcap,
            sinks=address_of(self.sinks) if case.sinks else 0,
            mask=MASKS.index(case.mask),
            window=case.window,
            alibi=case.alibi,
            biases=address_of(self.biases) if case.biased else 0,
            selected=address_of(self.selected) if case.selected else 0,
            n_selected=case.selected,
            ratio=0,
            scratch=-(-address_of(self.scratch) // 64) * 64,
        )
        self.tape = Tape(self.team, self.batch, [(cache_write, write), (attention, attend)])
        self.keep = Tape(self.team, self.batch, [(cache_write, write)])

    def fill(self, k: Array, v: Array, positions: npt.ArrayLike, sequences: npt.ArrayLike = 0) -> None:
        """Write keys and values only."""
        self.k[: len(k)], self.v[: len(v)] = k, v
        self.batch.set(np.zeros(len(k)), positions, sequences)
        self.keep.run()

    def run(self, q: Array, k: Array, v: Array, positions: npt.ArrayLike, sequences: npt.ArrayLike = 0) -> Array:
        n = len(q)
        self.q[:n], self.k[:n], self.v[:n] = q, k, v
        self.batch.set(np.zeros(n), positions, sequences)
        self.selected[:n] = self.case.selection(np.broadcast_to(positions, n))
        self.out[:] = np.nan
        self.tape.run()
        assert not self.batch.words[8:].any()
        assert np.isnan(self.out[n:]).all()
        return self.out[:n].copy()

    def cells(self, part: str, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the decoded cells of a cache, float64 [cells, n_head_kv, head]."""
        case = self.case
        data, t = (self.k_cache, self.k_type) if part == "k" else (self.v_cache, self.v_type)
        head = case.head_k if part == "k" else case.head_v
        rows = np.ascontiguousarray(data[cells])
        n = case.n_head_kv * head
        values = rows.view(np.float32) if t.name == "F32" else dequantize(rows, t, n)
        return values.reshape(len(cells), case.n_head_kv, head).astype(np.float64)

    def expected(self, q: Array, positions: npt.ArrayLike, sequences: npt.ArrayLike = 0) -> npt.NDArray[np.float64]:
        n = len(q)
        positions, sequences = np.broadcast_to(positions, n), np.broadcast_to(sequences, n)
        rows = [self._row(q[i], int(positions[i]), int(sequences[i])) for i in range(n)]
        return np.array(rows)

    def _row(self, q: Array, position: int, sequence: int) -> npt.NDArray[np.float64]:
        cells = sequence * self.n_ctx + self.case.visible(position)
        k = self.cells("k", cells)
        v = k[:, :, : self.case.head_v] if self.case.mla else self.cells("v", cells)
        return self.case.attend(q, position, k, v, self.sinks)


def draw(case: Case, n: int, seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    widths = (case.n_head * case.head_k, case.n_head_kv * case.head_k, case.n_head_kv * case.head_v)
    q, k, v = (rng.normal(0, 1.5, (n, w)).astype(np.float32) for w in widths)
    return q, k, v


def check(case: Case, batches: tuple[int, ...], n_ctx: int = 512, threads: int = 2) -> None:
    """Feed one sequence in batches and compare every output."""
    model, n_done = Model(case, 2, n_ctx, threads), 0
    for i, n in enumerate(batches):
        q, k, v = draw(case, n, i)
        positions = np.arange(n_done, n_done + n)
        actual = model.run(q, k, v, positions, 1)
        assert nmse(actual, model.expected(q, positions, 1)) < 1e-12, (case, n)
        n_done += n


FEATURES = {name: Case(**settings) for name, settings in attention_cases.FEATURES.items()}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    check(FEATURES[name], (1, 3, 17, 90, 1, 1, 130, 2))


SHAPES = {
    "64": Case(9, 3),
    "80": Case(4, 4, 80, 80),
    "96": Case(8, 2, 96, 96),
    "128": Case(8, 1, 128, 128),
    "192_128": Case(4, 4, 192, 128),
    "256": Case(4, 2, 256, 256),
    "group_of_5": Case(5, 1, 64, 128),
    "group_of_17": Case(17, 1, 64, 64),
    "20": Case(3, 3, 20, 20),
    "40_24": Case(4, 2, 40, 24),
    "8": Case(2, 1, 8, 8),
    "mla": Case(16, 1, 576, 512, mla=True),
    "mla_sinks": Case(16, 1, 576, 512, mla=True, sinks=True),
    "mla_70": Case(70, 1, 80, 64, mla=True),
    "selected_few": Case(3, 1, 72, 64, mla=True, selected=17),
    "selected_70": Case(70, 1, 80, 64, mla=True, selected=64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    check(SHAPES[name], (1, 2, 5, 80, 1))


#: Rows of Q8_0 consist of blocks of 32, so an odd width has other types.
CACHES = [(n, t) for n in ("features", "mla") for t in ("F16 F16", "Q8_0 Q8_0", "F16 Q8_0", "Q8_0 F32")]
CACHES += [(n, t) for n in ("selected", "selected_few") for t in ("F16 F16", "Q8_0 Q8_0")]


@pytest.mark.parametrize(("name", "types"), [*CACHES, ("odd", "F16 F16")])
def test_cache_types(name: str, types: str) -> None:
    """The reference uses the rounded values of the cache, because rounding is not an error of attention."""
    case = {
        "features": replace(FEATURES["all"], head_k=96),
        "mla": Case(16, 1, 96, 64, mla=True),
        "selected": Case(20, 1, 96, 64, mla=True, selected=20),
        "selected_few": Case(8, 1, 96, 64, mla=True, selected=20),
        "odd": Case(4, 2, 40, 24),
    }
    k_type, v_type = types.split()
    if name == "mla":
        v_type = k_type
    check(replace(case[name], k_type=k_type, v_type=v_type), (1, 2, 70, 1))


def test_f16_cache_of_odd_width() -> None:
    check(Case(3, 3, 20, 12, k_type="F16", v_type="F16"), (1, 30, 1))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_cache_bytes_equal_ggmls(kind: str, threads: int) -> None:
    case = Case(2, 2, 96, 32, k_type=kind, v_type=kind)
    model = Model(case, 3, 64, threads)
    rng = np.random.default_rng(3)
    q, k, v = draw(case, 40, 5)
    k[3], k[4], k[5, :32], k[6] = 0, -7, 1e-42, k[6] * 1e4
    k[7], v[8, 5], v[9] = -0.0, 6e4, np.round(v[9]) / 2
    positions, sequences = rng.permutation(64)[:40], rng.integers(0, 3, 40)
    model.run(q, k, v, positions, sequences)
    cells = sequences * 64 + positions
    for cache, x in ((model.k_cache, k), (model.v_cache, v)):
        want = x.view(np.uint8) if kind == "F32" else quantize(x, BY_NAME[kind])
        np.testing.assert_array_equal(cache[cells], want)
        untouched = np.setdiff1d(np.arange(len(cache)), cells)
        assert (cache[untouched] == 255).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_sequences_in_one_batch(kind: str) -> None:
    """Interleaved, in runs, and many of one token each; none sees another."""
    case = Case(8, 2, k_type=kind, v_type=kind, mask="sliding", window=40)
    model = Model(case, 4, 128)
    next_positions = np.zeros(4, int)
    orders = [np.arange(60) % 2, np.repeat([3, 0, 2], 25), np.arange(4), np.arange(4), np.array([1, 1, 2, 0, 0, 1])]
    for i, sequences in enumerate(orders):
        positions = np.empty(len(sequences), int)
        for j, s in enumerate(sequences):
            positions[j], next_positions[s] = next_positions[s], next_positions[s] + 1
        q, k, v = draw(case, len(sequences), i)
        actual = model.run(q, k, v, positions, sequences)
        assert nmse(actual, model.expected(q, positions, sequences)) < 1e-12


@pytest.mark.parametrize("name", attention_cases.BOTH_DIRECTIONS)
@pytest.mark.parametrize("n", [3, 40, 128])
def test_whole_sequences(n: int, name: str) -> None:
    """Tokens also see later ones of their sequence; of two, alternately."""
    case = Case(end=n - 1, **attention_cases.BOTH_DIRECTIONS[name])
    model = Model(case, 2, 128)
    sequences, positions = np.arange(2 * n) % 2, np.arange(2 * n) // 2
    q, k, v = draw(case, 2 * n, n)
    actual = model.run(q, k, v, positions, sequences)
    assert nmse(actual, model.expected(q, positions, sequences)) < 1e-12


DEEP = {
    "gqa": Case(8, 2, 64, 64, sinks=True),
    "window": Case(8, 2, 64, 64, mask="sliding", window=1000, k_type="F16", v_type="F16"),
    "mla": Case(16, 1, 96, 64, mla=True, k_type="F16", v_type="F16"),
    "selected": Case(16, 1, 96, 64, mla=True, selected=1100, k_type="F16", v_type="F16"),
}


@pytest.mark.parametrize("name", DEEP)
def test_depths_at_key_splits(name: str) -> None:
    """From 512 keys on there are parts, at 8192 more than 512 keys a part; every thread count gives the same bits."""
    case, n_ctx, outputs = DEEP[name], 9000, []
    for threads in (1, 2, 5):
        model, outs = Model(case, 2, n_ctx, threads), []
        for start in range(0, n_ctx - 512, 512):
            _, k, v = draw(case, 512, start)
            model.fill(k, v, start + np.arange(512), 1)
        for n, depth in ((1, 500), (1, 513), (3, 1100), (20, 4090), (1, 8200), (5, 8600)):
            q, k, v = draw(case, n, depth)
            positions = np.arange(depth, depth + n)
            outs.append(model.run(q, k, v, positions, 1))
            if threads == 1:
                assert nmse(outs[-1], model.expected(q, positions, 1)) < 1e-12, depth
        outputs.append(np.concatenate(outs))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("name", ["plain", "all", "chunked_all", "selected"])
def test_every_thread_count_gives_the_same_bits(name: str) -> None:
    outputs = []
    for threads in (1, 2, 3, 7):
        model, outs = Model(FEATURES[name], 2, 256, threads), []
        for i, (start, n) in enumerate(((0, 100), (100, 1), (101, 33))):
            outs.append(model.run(*draw(FEATURES[name], n, i), start + np.arange(n), 1))
        outputs.append(np.concatenate(outs))
    for output in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], output)


@pytest.mark.parametrize("name", ["plain", "all", "selected"])
def test_batches_of_one_and_of_many_agree(name: str) -> None:
    case = FEATURES[name]
    q, k, v = draw(case, 128, 1)
    outs = []
    for size in (1, 7, 64, 128):
        model = Model(case, 1, 128)
        parts = [
            model.run(q[i : i + size], k[i : i + size], v[i : i + size], np.arange(i, min(i + size, 128)))
            for i in range(0, 128, size)
        ]
        outs.append(np.concatenate(parts).astype(np.float64))
    for output in outs[1:]:
        assert nmse(output, outs[0]) < 2e-13


def test_large_scores_do_not_overflow() -> None:
    case = Case(sinks=True)
    model = Model(case, 1, 128)
    q, k, v = draw(case, 100, 2)
    q *= 100
    k *= 100
    actual = model.run(q, k, v, np.arange(100))
    assert np.isfinite(actual).all()
    assert nmse(actual, model.expected(q, np.arange(100))) < 1e-9  # scores of 1e5 as float32


@pytest.mark.parametrize("grows", [1, -1])
def test_key_splits_with_very_different_scores(grows: int) -> None:
    """Parts are merged relative to the largest score of all, first part or last: no overflow, nothing lost."""
    case, n = Case(2, 1, 64, 64, sinks=True), 1600
    model = Model(case, 1, n)
    q = np.ones((1, 128), np.float32)
    for start in range(0, n, 400):
        _, k, v = draw(case, 400, start)
        steps = np.arange(start, start + 400) if grows > 0 else n - np.arange(start, start + 400)
        model.fill(k * 0.1 + steps[:, None].astype(np.float32) / 40, v, start + np.arange(400))
    _, k, v = draw(case, 1, 1)
    actual = model.run(q, k, v, [n - 1])
    assert nmse(actual, model.expected(q, [n - 1])) < 1e-9  # scores of 300 as float32


def test_tokens_of_a_batch_may_come_in_any_order() -> None:
    model = Model(Case(), 1, 128)
    q, k, v = draw(Case(), 90, 2)
    positions = np.random.default_rng(0).permutation(90)
    actual = model.run(q, k, v, positions)
    assert nmse(actual, model.expected(q, positions)) < 1e-12


def test_scratch_does_not_grow_with_the_context() -> None:
    assert scratch_bytes(128, 128, 2) < 8 << 20
