"""Attention and the cache on the device: against float64 written from the operations' docstrings (model/ops.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import attention_cases
import numpy as np
import pytest
from attention_cases import nmse
from device_memory import Memory

from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cuda.attention import cache
from quantkit.kernels.cuda.attention.attention import TENSOR, TILE, VECTOR, AttentionLayer, attention, combine_to
from quantkit.kernels.cuda.core.kernel import Shape, shared_of_block
from quantkit.kernels.cuda.matmul import activations
from quantkit.kernels.parameters import MASKS
from quantkit.types import BY_NAME


@pytest.mark.parametrize("kind", cache.TYPES)
def test_cache_bytes_equal_ggmls(memory: Memory, kind: str) -> None:
    n_ctx, n, widths = 16, 12, (288, 64)
    rng = np.random.default_rng(3)
    k, v = (rng.normal(0, 1.5, (n, w)).astype(np.float32) for w in widths)
    k[3], k[4], k[5, :32], k[6] = 0, -7, 1e-42, k[6] * 1e4
    k[7], v[8, 5], v[9] = -0.0, 6e4, np.round(v[9]) / 2
    positions, sequences = rng.permutation(n_ctx)[:n], rng.integers(0, 3, n)
    caches = [memory.allocate((3 * n_ctx, cache.row_bytes(kind, w)), np.uint8) for w in widths]
    memory.run(
        cache.cache_write(kind, n, *widths),
        batch=memory.batch(np.zeros(n), positions, sequences, n_ctx=n_ctx),
        **dict(zip(("k", "v", "k_cache", "v_cache"), (memory.put(k), memory.put(v), *caches), strict=True)),
        k_width=widths[0],
        v_width=widths[1],
    )
    cells = sequences * n_ctx + positions
    for address, x in zip(caches, (k, v), strict=True):
        actual = memory.get(address, (3 * n_ctx, cache.row_bytes(kind, x.shape[1])), np.uint8)
        np.testing.assert_array_equal(actual[cells], encode(x, kind)[0])
        assert (np.delete(actual, cells, axis=0) == 255).all()


def test_rows_of_odd_widths_and_without_values(memory: Memory) -> None:
    x = np.random.default_rng(1).normal(0, 1, (3, 60)).astype(np.float32)
    address = memory.allocate((8, 60), np.float16)
    memory.run(
        cache.cache_write("f16", 3, 60, 0),
        batch=memory.batch(np.zeros(3), [5, 0, 2], n_ctx=8),
        k=memory.put(x),
        v=0,
        k_cache=address,
        v_cache=0,
        k_width=60,
        v_width=0,
    )
    actual = memory.get(address, (8, 60), np.float16)
    np.testing.assert_array_equal(actual[[5, 0, 2]], x.astype(np.float16))
    assert np.isnan(actual[[1, 3, 4, 6, 7]]).all()


def encode(x: Any, kind: str) -> tuple[Any, Any]:
    """Return rows as a cache keeps them, and the values they stand for."""
    if kind == "f32":
        return x.view(np.uint8), x
    data = quantize(x, BY_NAME[kind.upper()])
    return data, dequantize(data, BY_NAME[kind.upper()], x.shape[1])


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Case(attention_cases.Case):
    """An attention operation over a cache of a type."""

    kind: str = "f32"
    grows: float = 0.0  # how much larger keys get from position to position


class Model:
    """A cache whose sequences have so many tokens; what was never written is NaN."""

    def __init__(self, memory: Memory, case: Case, lengths: Sequence[int], n_ctx: int) -> None:
        self.memory, self.case, self.n_ctx = memory, case, n_ctx
        rng = np.random.default_rng(len(lengths) + n_ctx)
        self.cells, self.caches = [], []
        for head in (case.head_k, case.head_v):
            x = rng.normal(0, 1.5, (len(lengths) * n_ctx, case.n_head_kv * head)).astype(np.float32)
            x[:, : case.head_k // 2] += np.float32(case.grows) * np.tile(np.arange(n_ctx), len(lengths))[:, None]
            data, values = encode(x, case.kind)
            data = data.copy()
            for s, n in enumerate(lengths):
                data[s * n_ctx + n : (s + 1) * n_ctx] = 255
            self.cells.append(values.reshape(len(values), case.n_head_kv, head).astype(np.float64))
            self.caches.append(memory.put(data))
        self.sinks = rng.normal(0, 2, case.n_head).astype(np.float32)
        if case.mla:
            self.caches[1], self.cells[1] = 0, self.cells[0][:, :, : case.head_v]

    def run(
        self, q: Any, positions: Any, sequences: Any, algorithm: int | None = None, splits: int | None = None
    ) -> Any:
        case, n, memory = self.case, len(q), self.memory
        sizes = (case.n_head, case.n_head_kv, case.head_k, case.head_v)
        capability = memory.device.capability
        layer = AttentionLayer(case.kind, *sizes, self.n_ctx, case.mla, case.selected, case.biased)
        plan = attention(layer, n, capability=capability, algorithm=algorithm, splits=splits)
        out = memory.allocate((n, case.n_head * case.head_v))
        sinks = memory.put(self.sinks) if case.sinks else 0
        scratch = memory.allocate((plan.scratch,), np.uint8) if plan.scratch else 0
        shared = {"out": out, "sinks": sinks, "splits": plan.splits, "scratch": scratch}
        memory.run(
            plan.attend,
            batch=memory.batch(np.zeros(n), positions, sequences, n_ctx=self.n_ctx),
            rows=n,
            q=memory.put(q),
            k_cache=self.caches[0],
            v_cache=self.caches[1],
            n_head=case.n_head,
            n_head_kv=case.n_head_kv,
            scale=case.scale,
            softcap=case.softcap,
            mask=MASKS.index(case.mask),
            window=case.window,
            alibi=case.alibi,
            biases=memory.put(case.bias_table(self.n_ctx)) if case.biased else 0,
            selected=memory.put(case.selection(positions)) if case.selected else 0,
            n_selected=case.selected,
            ratio=0,
            **shared,
        )
        if plan.combine is not None:
            shared |= {"rows": n * case.n_head, "n_head": case.n_head, "head_v": case.head_v}
            memory.run(plan.combine, **shared)
            combined = combine_to(plan, case.head_v)
            if combined is not None:
                self.check_format(combined, out, n, shared)
        return memory.get(out, (n, case.n_head * case.head_v))

    def check_format(self, combined: Shape, out: int, n: int, slots: dict[str, Any]) -> None:
        """What brings its result to a format, rows of all heads or of one, gives the bits that two kernels give."""
        memory, width = self.memory, self.case.n_head * self.case.head_v
        for q_width, form in ((width, "q8_k"), (self.case.head_v, "q8_0"), (width, "f16")):
            rows, units = n * width // q_width, -(-q_width // 256)
            size = rows, activations.row_bytes(form, q_width)
            want, actual, rerun = (
                memory.allocate(size, np.uint8),
                memory.allocate(size, np.uint8),
                memory.allocate((n, width)),
            )
            counters = memory.put(np.zeros(rows * units, np.int32))
            of_rows = {"rows": rows, "x": out, "x_stride": 4 * q_width, "n": q_width, "out": want}
            memory.run(activations.quantize(form, q_width, rows), **of_rows)
            format_slots = {"format": activations.KINDS.index(form), "quantized": actual, "counters": counters}
            memory.run(combined, **{**slots, **format_slots, "q_width": q_width, "out": rerun})
            assert np.array_equal(memory.get(actual, size, np.uint8), memory.get(want, size, np.uint8))
            assert np.array_equal(memory.get(rerun, (n, width)), memory.get(out, (n, width)))
            assert not memory.get(counters, (rows * units,), np.int32).any()

    def expected(self, q: Any, positions: Any, sequences: Any) -> Any:
        rows = zip(q, positions, np.broadcast_to(sequences, len(q)), strict=True)
        return np.array([self._row(x, int(p), int(s)) for x, p, s in rows])

    def _row(self, q: Any, position: int, sequence: int) -> Any:
        k, v = (part[sequence * self.n_ctx + self.case.visible(position)] for part in self.cells)
        return self.case.attend(q, position, k, v, self.sinks)

    def check(self, positions: Any, sequences: Any = 0, error: float = 1e-12, **choice: int | None) -> None:
        rng = np.random.default_rng(len(positions))
        q = rng.normal(0, 1.5, (len(positions), self.case.n_head * self.case.head_k)).astype(np.float32)
        actual, want = self.run(q, positions, sequences, **choice), self.expected(q, positions, sequences)
        assert np.isfinite(actual).all(), (self.case, choice)
        assert nmse(actual, want) < error, (self.case, choice, nmse(actual, want))


FEATURES = {name: Case(**settings) for name, settings in attention_cases.FEATURES.items()}
WAYS_AND_KINDS = [(VECTOR, "f32"), (TILE, "f32"), (TENSOR, "f16"), (TENSOR, "q8_0")]
ALGORITHMS = pytest.mark.parametrize(("algorithm", "kind"), WAYS_AND_KINDS)


#: What combines features meets every way; each of them alone, which then tells where a mistake is, one way.
EVERY_WAY = ("plain", "one", "all", "chunked_all", "selected")
WITH_FEATURES = [(name, algorithm, kind) for name in EVERY_WAY for algorithm, kind in WAYS_AND_KINDS]
WITH_FEATURES += [
    ("sliding", VECTOR, "f32"),
    ("alibi", VECTOR, "f32"),
    ("chunked", TILE, "f32"),
    ("softcap", TENSOR, "f16"),
    ("sinks", TENSOR, "q8_0"),
]


@pytest.mark.parametrize(("name", "algorithm", "kind"), WITH_FEATURES)
def test_features(memory: Memory, name: str, algorithm: int, kind: str) -> None:
    model = Model(memory, replace(FEATURES[name], kind=kind), (5, 130), 140)
    model.check([129], 1, algorithm=algorithm, splits=1)
    model.check([63, 64, 65, 127, 128], 1, algorithm=algorithm, splits=3)
    if algorithm != VECTOR:
        model.check(np.arange(111, 130), 1, algorithm=algorithm, splits=1)


@pytest.mark.parametrize("name", attention_cases.BOTH_DIRECTIONS)
@ALGORITHMS
def test_whole_sequences(memory: Memory, name: str, algorithm: int, kind: str) -> None:
    """Tokens also see later ones of their sequence; of two, alternately."""
    case, n = Case(kind=kind, end=69, **attention_cases.BOTH_DIRECTIONS[name]), 70
    model = Model(memory, case, (n, n), 80)
    sequences, positions = np.arange(2 * n) % 2, np.arange(2 * n) // 2
    model.check(positions, sequences, algorithm=algorithm, splits=1)
    model.check(positions, sequences, algorithm=algorithm, splits=2)


SHAPES = {
    "80": (Case(4, 4, 80, 80), (VECTOR, TENSOR)),
    "128": (Case(8, 1, 128, 128), (TILE, TENSOR)),
    "192_128": (Case(2, 2, 192, 128), (TENSOR,)),
    "256": (Case(4, 2, 256, 256), (TENSOR,)),
    "group_of_17": (Case(17, 1, 64, 64), (VECTOR, TILE, TENSOR)),
    "40_24": (Case(4, 2, 40, 24), (TILE, TENSOR)),
    "6_3": (Case(2, 1, 6, 3), (VECTOR, TILE)),
    "mla": (Case(16, 1, 576, 512, mla=True, sinks=True), (VECTOR, TILE, TENSOR)),
    "mla_72": (Case(70, 1, 72, 64, mla=True), (TENSOR,)),
    "selected_72": (Case(20, 1, 72, 64, mla=True, selected=33), (VECTOR, TILE, TENSOR)),
}


def skip_without_room(memory: Memory, head_k: int) -> None:
    if head_k > 512 and shared_of_block(memory.device.capability) < 128 << 10:
        pytest.skip("this device has too little shared memory for long heads on tensor cores")


@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, algorithm) for name, (_, algorithms) in SHAPES.items() for algorithm in algorithms]
)
def test_shapes(memory: Memory, name: str, algorithm: int) -> None:
    if algorithm == TENSOR:
        skip_without_room(memory, SHAPES[name][0].head_k)
    model = Model(memory, replace(SHAPES[name][0], kind="f16" if algorithm == TENSOR else "f32"), (70,), 70)
    model.check([68, 3, 40], algorithm=algorithm, splits=2)


@pytest.mark.parametrize(
    "case",
    [Case(17, 1, 96, 96), Case(4, 2, 192, 128), Case(4, 2, 256, 256), Case(16, 1, 576, 512, mla=True, sinks=True)],
    ids=lambda case: f"{case.head_k}_{case.head_v}",
)
def test_shapes_with_quantized_caches(memory: Memory, case: Case) -> None:
    """Heads of an odd number of blocks begin anywhere in pieces of 16 bytes."""
    skip_without_room(memory, case.head_k)
    Model(memory, replace(case, kind="q8_0"), (70,), 70).check([68, 3, 40], algorithm=TENSOR, splits=2)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("latent", [False, True])
def test_warp_layouts(memory: Memory, rows: int, latent: bool, kind: str) -> None:
    """Rows of 16, 32 and 64, with the columns of the values shared by 4, 2 and 1 warps."""
    model = Model(memory, Case(8, 1, 96 if latent else 64, 64, mla=latent, kind=kind), (150,), 150)
    model.check(np.arange(149, 149 - rows, -1), algorithm=TENSOR, splits=1)


def test_scales_of_any_size(memory: Memory) -> None:
    """Scales of keys and values from the smallest half to large ones, side by side; and one that is 0."""
    model = Model(memory, Case(4, 2, 64, 64, kind="q8_0"), (90,), 90)
    rng = np.random.default_rng(1)
    for side, head in enumerate((64, 64)):
        x = rng.normal(0, 1, (90, 2, head // 32, 32))
        x[:, :, 1] *= 1e-5 if side else 1e-3
        x[3, 0, 0], x[7] = 0, x[7] * (1e5 if side else 3)
        x[rng.permutation(90)[:30], 1] *= 1e-4
        data, values = encode(x.reshape(90, 2 * head).astype(np.float32), "q8_0")
        model.caches[side] = memory.put(data)
        model.cells[side] = values.reshape(90, 2, head).astype(np.float64)
    q = rng.normal(0, 1.5, (5, 256)).astype(np.float32)
    actual, want = (
        f(q, [85, 20, 6, 89, 2], [0] * 5)
        for f in (lambda *x: model.run(*x, algorithm=TENSOR, splits=1), model.expected)
    )
    for block in range(8):
        assert nmse(actual[:, 32 * block :][:, :32], want[:, 32 * block :][:, :32]) < 1e-11


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("algorithm", [VECTOR, TILE])
def test_cache_types(memory: Memory, kind: str, algorithm: int) -> None:
    """The reference uses the rounded values of the cache, because rounding is not an error of attention."""
    Model(memory, replace(FEATURES["all"], kind=kind), (100,), 100).check([70, 71, 72, 99], algorithm=algorithm)


@pytest.mark.parametrize(("kind", "algorithm"), [("f16", VECTOR), ("q8_0", TILE)])
def test_values_that_are_part_of_the_keys(memory: Memory, kind: str, algorithm: int) -> None:
    Model(memory, Case(12, 1, 96, 64, mla=True, kind=kind), (100,), 100).check([70, 99], algorithm=algorithm)


@ALGORITHMS
def test_sequences_in_one_batch(memory: Memory, algorithm: int, kind: str) -> None:
    """Interleaved, in runs, in any order, and many of one token each; none sees another."""
    lengths = (90, 40, 1, 90)
    model = Model(memory, Case(4, 2, kind=kind, mask="sliding", window=40, sinks=True), lengths, 96)
    tokens = [(p, s) for s in range(4) for p in range(lengths[s])]
    shuffled = [tokens[i] for i in np.random.default_rng(3).permutation(len(tokens))[:40]]
    runs = [(p, s) for s in (3, 0, 1) for p in range(20, 34)]
    for rows in (shuffled, runs, [(89, 0), (39, 1), (0, 2), (89, 3)], [(5, 1), (4, 1), (0, 2), (80, 0)]):
        positions, sequences = np.array(rows).T
        model.check(positions, sequences, algorithm=algorithm, splits=1 + len(rows) % 3)


@ALGORITHMS
@pytest.mark.parametrize("splits", [1, 5, 128])
def test_long_contexts_in_parts(memory: Memory, algorithm: int, kind: str, splits: int) -> None:
    """The same number of parts at any depth: most are empty at the beginning."""
    model = Model(memory, Case(4, 2, sinks=True, kind=kind), (1500,), 1500)
    for position in (0, 31, 64, 1499) if splits > 1 else (1499,):
        model.check([position], algorithm=algorithm, splits=splits)
    if splits != 5:
        return
    windowed = Model(memory, Case(4, 2, mask="sliding", window=1000, kind=kind), (1500,), 1500)
    windowed.check([1400, 1401], algorithm=algorithm, splits=splits)


@ALGORITHMS
@pytest.mark.parametrize("grows", [0.05, -0.05])
def test_key_splits_with_very_different_scores(memory: Memory, algorithm: int, kind: str, grows: float) -> None:
    """Parts are merged relative to the largest score of all, first part or last: no overflow, nothing lost."""
    model = Model(memory, Case(2, 1, sinks=True, kind=kind, grows=grows), (600,), 600)
    q = np.ones((1, 128), np.float32)
    want = model.expected(q, [599], [0])
    for splits in (1, 6):
        assert (
            nmse(model.run(q, [599], 0, algorithm=algorithm, splits=splits), want) < 1e-9
        )  # scores of 100 and more as float32


@ALGORITHMS
def test_rows_of_any_size(memory: Memory, algorithm: int, kind: str) -> None:
    """Scores of 1e4, rows of nothing, and so small that halves would not hold them."""
    model = Model(memory, Case(2, 1, sinks=True, kind=kind), (90,), 90)
    q = np.random.default_rng(5).normal(0, 1.5, (6, 128)).astype(np.float32)
    q *= np.array([[1000], [0], [1e-30], [1e-42], [1], [30]], np.float32)
    q[4, ::2] *= 1e-6
    positions = np.arange(80, 86)
    actual, want = model.run(q, positions, 0, algorithm=algorithm, splits=1), model.expected(q, positions, 0)
    assert np.isfinite(actual).all()
    for i in range(6):
        assert nmse(actual[i], want[i]) < (1e-7 if i == 0 else 1e-11), i


def test_the_variant_depends_on_the_number_of_rows() -> None:
    def chosen_algorithm(kind: str, rows: int, group: int = 8, head: int = 128, **options: int) -> int:
        plan = attention(AttentionLayer(kind, 4 * group, 4, head, head, 4096), rows, **options)
        assert (plan.combine is None) == (plan.splits == 1)
        return int(dict(plan.attend.kernel.defines)["WAY"])

    assert [chosen_algorithm("f16", rows, 2) for rows in (1, 2, 512)] == [VECTOR, TENSOR, TENSOR]
    assert [chosen_algorithm("q8_0", rows, 2) for rows in (1, 2, 512)] == [VECTOR, TENSOR, TENSOR]
    assert [chosen_algorithm("f32", rows) for rows in (1, 2, 3, 512)] == [VECTOR, VECTOR, TILE, TILE]
    assert chosen_algorithm("f16", 512, head=20) == TILE
    assert [chosen_algorithm("f16", 512, head=256, capability=c) for c in (75, 80, 86, 90)] == [
        TENSOR,
        TENSOR,
        TENSOR,
        TENSOR,
    ]
    layer = AttentionLayer("f16", 128, 1, 576, 512, 4096, mla=True)
    assert attention(layer, 512, capability=75).attend.shared <= 64 << 10


def test_turing_uses_smaller_instructions(device: Any) -> None:
    if device.name != "CUDA0" or not hasattr(device, "order"):
        pytest.skip("the host runs any capability")
    device.capability = 75
    memory = Memory(device)
    Model(memory, Case(4, 2, kind="f16"), (70,), 70).check([69, 3, 40], algorithm=TENSOR, splits=1)
    memory.close()
