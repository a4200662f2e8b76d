"""Time kernels on a GPU, as shares of its peak, then a whole MoE; run by scripts/gpu_check."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from make_moe import Model as Shapes

from gpu import cases
from quantkit.errors import ResourceError
from quantkit.formats.gguf import Field, TensorInfo, write_gguf
from quantkit.kernels.cuda.attention import attention
from quantkit.kernels.cuda.core import peak
from quantkit.kernels.cuda.core.device import Launch, open_device
from quantkit.kernels.cuda.core.kernel import Shape
from quantkit.kernels.cuda.layer import glu
from quantkit.kernels.cuda.matmul import activations, mat_mat, mat_vec, moe
from quantkit.kernels.cuda.unpack import dequantize
from quantkit.kernels.formats import activation_format
from quantkit.kernels.parameters import Activation
from quantkit.model.backends.cuda.cublas import ExpertCounts, ExpertProducts
from quantkit.model.cost import token_cost
from quantkit.model.engine import Session, load
from quantkit.model.fusion import Fusion
from quantkit.model.ops import Matrix
from quantkit.types import BY_NAME, TensorType
from quantkit.units import format_size

if TYPE_CHECKING:
    from gpu.run import Run

SILU = Activation("silu")


@dataclass
class Sizes:
    """What is measured; tests of this script make it small.

    matrix_bytes: of a matrix, several of which are read in turns: far more than caches hold. in_graph: launches that
    are timed as one graph, so that what it costs to launch it does not count. repetitions, of_products, of_model: how
    often launches, products and a whole model are timed.
    """

    matrix_bytes: int = 64 << 20
    in_turn: int = 4
    in_graph: int = 12
    token_counts: tuple[int, ...] = (1, 2, 4, 8)
    n_in: int = 4096
    dense: int = 4096
    wide: int = 11008
    tokens: int = 2048
    experts: int = 128
    used: int = 8
    expert_in: int = 2048
    expert_out: int = 768
    heads: int = 32
    vocab: int = 151936
    gates: tuple[int, ...] = (1, 4, 64, 512, 2048)
    depths: tuple[int, ...] = (4096, 32768)
    latent_heads: int = 128
    layers: int = 48
    single: int = 128
    repetitions: int = 15
    of_products: int = 7
    of_model: int = 5
    types: tuple[str, ...] = cases.TYPES
    caches: tuple[str, ...] = ("f16", "q8_0", "f32")


SIZES = Sizes()

#: Bytes of a model on the GPU, and of what runs it, that its layers do not take.
_NOT_LAYERS = 6 << 30

#: Types that fused and unfused products are timed for.
GATED_TYPES = ("Q4_K", "Q8_0", "IQ4_XS", "Q6_K")

#: ik_llama.cpp's gains (pull requests 229, 741, 864, 1139, 896; facts of several GPUs and models).
IKS = {
    "MoE up+gate, prompt": "+26 %",
    "MoE up+gate, 1 token": "+7 %",
    "up+gate, 1 token": "+1 % to +3 %",
    "merged, prompt": "+7 % to +10 %",
    "router Q8_0, 1 token": "+1 %",
    "early launches, 1 token": "has none",
    "fused launches, 1 token": "by pairs: norms, sums",
}


@dataclass
class Card:
    """The GPU, and what it does at most a second."""

    device: Any
    copy_gb_s: float
    gemm_tflops: float


_GPU: list[Card] = []


def the_gpu() -> Card:
    """Return the GPU, measured once."""
    if not _GPU:
        device: Any = open_device("CUDA0")
        _GPU.append(Card(device, peak.copy_gb_s(device), _gemm_tflops(device)))
    return _GPU[0]


def _gemm_tflops(device: Any) -> float:
    """Return the rate of cuBLAS's bf16 GEMM; nan where there is none, so that shares of it are not known."""
    try:
        return peak.gemm_gops(device) / 1e3
    except ResourceError:
        return math.nan


def has_cublas() -> bool:
    """Return whether there is anything to compare products with."""
    return not math.isnan(the_gpu().gemm_tflops)


def card(run: Run) -> None:
    """The GPU's name, and its copy bandwidth and bf16 GEMM rate."""
    run.for_each("card", ["card"], lambda name: _print_gpu(run))


def _print_gpu(run: Run) -> None:
    c = the_gpu()
    cupy = c.device.cupy
    versions = f"CuPy {cupy.__version__}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}"
    run.say(f"card: {c.device.card}, {c.device.multiprocessors} multiprocessors, sm_{c.device.capability}, {versions}")
    run.say(f"copy {c.copy_gb_s:.0f} GB/s (read and written), bf16 GEMM {c.gemm_tflops:.0f} TFLOP/s; measured now")


class Bench:
    """Device memory for a measurement, given back at its end."""

    def __init__(self) -> None:
        self.device = the_gpu().device
        self._addresses: list[int] = []

    def allocate(self, nbytes: int, fill: np.ndarray[Any, Any] | None = None) -> int:
        """Return new memory, filled with a pattern repeated, or zeros."""
        address = int(self.device.allocate(nbytes))
        self._addresses.append(address)
        if fill is None:
            self.device.zero(address, nbytes)
        else:
            data = np.resize(fill.view(np.uint8).reshape(-1), nbytes)
            self.device.upload(address, data)
        return address

    def weights(self, t: TensorType, n_in: int, n_out: int) -> int:
        """Return a matrix of reasonable blocks, with reasonable scales of rows."""
        row_bytes = t.row_bytes(n_in)
        return self.allocate(n_out * row_bytes, _rows(t, n_in, max(1, min(n_out, (1 << 20) // row_bytes))))

    def activations(self, t: TensorType, n_in: int, rows: int) -> tuple[int, int]:
        """Return rows of activations in the format of a type, and their stride."""
        x = self.allocate(4 * n_in * rows, np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32))
        kind = activation_format(t)
        if kind == "f32":
            return x, 4 * n_in
        stride = activations.row_bytes(kind, n_in)
        out = self.allocate(stride * rows)
        self.device.run(
            [launch(activations.quantize(kind, n_in, rows), rows=rows, x=x, x_stride=4 * n_in, n=n_in, out=out)]
        )
        return out, stride

    def seconds(self, *lists: Sequence[Launch], repetitions: int | None = None) -> float:
        """Return the median time of a list of launches; of several, which read other memory, in turns.

        They are timed as one graph, again and again those that take less than a millisecond.
        """
        for launches in lists:
            self.device.run(launches)
        once = self.device.seconds(lambda: self.device.run(lists[0]))
        rounds = 1 if once > 1e-3 else -(-SIZES.in_graph // len(lists))
        replay = self.device.record([one for _ in range(rounds) for launches in lists for one in launches])
        return peak.median_seconds(self.device, replay, repetitions or SIZES.of_products) / (rounds * len(lists))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.device.synchronize()
        for address in self._addresses:
            self.device.free(address)


@lru_cache(4)
def _rows(t: TensorType, n_in: int, count: int) -> np.ndarray[Any, Any]:
    """Draw rows of a type, once for all its matrices."""
    return np.frombuffer(cases.tensor(t, (n_in, count), 1), np.uint8)


def launch(shape: Shape, **slots: int | float) -> Launch:
    """Return a launch with its slots packed; those the kernel does not have are left out."""
    names = shape.kernel.slots
    arguments = {name: value for name, value in slots.items() if name in names}
    return Launch(shape.kernel, shape.grid, shape.kernel.block(**arguments), shape.shared)


LIMITS = {"alpha": 1.702, "gate_limit": 0.0, "act_limit": 0.0, "up_limit": 0.0}
NO_BIAS = {
    **dict.fromkeys(("bias", "scale", "bias_stride", "up_bias", "up_scale", "up_bias_stride"), 0),
    **dict.fromkeys(("gate_bias", "gate_scale", "gate_bias_stride"), 0),
}


# ---------------------------------------------------------------- products


def vec_shapes(t: TensorType) -> list[Shape]:
    """Return the shapes of large products, by tokens, and of small ones, alone and as up and gate."""
    n_in, n_out = SIZES.n_in, SIZES.matrix_bytes // t.row_bytes(SIZES.n_in)
    large = [mat_vec.mul_mat(t, n_in, n_out, rows) for rows in SIZES.token_counts]
    return [*large, mat_vec.mul_mat(t, n_in, SIZES.dense), mat_vec.up_gate(t, SILU, n_in, SIZES.dense)]


def mat_vec_speed(run: Run) -> None:
    """Every type: one token (and a few) times matrices of 64 MB, one times small ones, as a share of copying.

    Other tokens and sizes have other kernels: those of one type are held to each other.
    """
    c, s = the_gpu(), SIZES
    n_in, counts, todo = s.n_in, s.token_counts, run.todo("mat-vec", s.types)
    if not todo:
        return

    c.device.prepare([shape.kernel for t in map(BY_NAME.__getitem__, todo) for shape in vec_shapes(t)])
    title = f"mat-vec: GB/s of weights read (share of copy), {n_in} columns"
    run.say(f"\n{title}, {format_size(s.matrix_bytes)}, by tokens; one token, {s.dense} rows\n")
    run.say(f"| type | {' | '.join(map(str, counts))} | {s.dense} rows | up+gate |\n|---|{'---|' * (len(counts) + 2)}")

    def of_type(name: str) -> None:
        t = BY_NAME[name]
        row_bytes = t.row_bytes(n_in)
        n_out, cells, outputs = s.matrix_bytes // row_bytes, list[str](), list[np.ndarray[Any, Any]]()
        fitting = n_out // s.dense
        with Bench() as b:
            large = [{"w": b.weights(t, n_in, n_out)} for _ in range(s.in_turn)]
            small = [{"w": slots["w"] + i * s.dense * row_bytes} for slots in large for i in range(fitting)]
            pairs = [{"up": up["w"], "gate": slots["w"]} for up, slots in zip(small[::2], small[1::2], strict=True)]
            x, stride = b.activations(t, n_in, max(counts))
            out = b.allocate(4 * max(counts) * n_out)
            sizes = [*((rows, n_out, large) for rows in counts), (1, s.dense, small), (1, s.dense, pairs)]
            for shape, (rows, count, matrices) in zip(vec_shapes(t), sizes, strict=True):
                lists = [
                    [
                        launch(
                            shape, **slots, rows=rows, x=x, x_stride=stride, row_bytes=row_bytes, n_in=n_in,
                            n_out=count, out=out, out_stride=4 * count, **LIMITS, **NO_BIAS,
                        )
                    ]
                    for slots in matrices
                ]  # fmt: skip
                gb_s = len(matrices[0]) * count * row_bytes / b.seconds(*lists) / 1e9
                cells.append(f"{gb_s:.0f} ({gb_s / c.copy_gb_s:.0%})")
                outputs.append(np.empty(count, np.float32))
                b.device.download(out, outputs[-1])
        # All large matrices are the same, and the last small ones are the end of one.
        up, gate = (outputs[0][i * s.dense :][: s.dense].astype(np.float64) for i in (max(fitting - 2, 0), fitting - 1))
        with np.errstate(over="ignore"):
            expected = [*outputs[:1] * len(counts), gate, up * gate / (1 + np.exp(-gate))]
        for label, one, second in zip((*counts, "few rows", "up+gate"), outputs, expected, strict=True):
            run.check(f"mat-vec: {name}, {label}, beside one token", cases.nmse(one, second), cases.BOUND)
        run.say(f"| {name} | {' | '.join(cells)} |")

    run.for_each("mat-vec", SIZES.types, of_type, needs=20)


def mat_mat_speed(run: Run) -> None:
    """Every type: a prompt times a square matrix, and by expert, as a share of the bf16 GEMM."""
    c = the_gpu()
    s = SIZES
    todo = run.todo("mat-mat", s.types)
    if not todo:
        return
    run.say(
        f"\nmat-mat: TFLOP/s (share of the bf16 GEMM), {s.tokens} tokens; experts: {s.experts} of {s.expert_in} x "
        f"{s.expert_out}, {s.used} used\n"
    )
    cublas = "the same by bf16 and cuBLAS"
    run.say(f"| type | {s.dense} x {s.dense} | {cublas} | experts | {cublas} | experts up+gate |")
    run.say("|---|---|---|---|---|---|")
    by_expert = s.expert_in, s.expert_out, s.tokens, s.used, s.experts, c.device.capability
    c.device.prepare(
        [
            shape.kernel
            for t in map(BY_NAME.__getitem__, todo)
            for shape in (
                mat_mat.mul_mat(t, s.dense, s.dense, s.tokens, c.device.capability),
                mat_mat.mul_mat_id(t, *by_expert),
                mat_mat.up_gate_id(t, SILU, *by_expert),
            )
        ]
    )

    def of_type(name: str) -> None:
        t = BY_NAME[name]
        cells = [*_dense(run, t, s.tokens, s.dense, s.dense), *_experts(run, t, s.tokens), _gated_experts(t, s.tokens)]
        run.say(f"| {name} | {' | '.join(map(_of_gemm, cells))} |")

    run.for_each("mat-mat", s.types, of_type, needs=20)


def _of_gemm(tflops: float) -> str:
    """Print a rate, and its share of the GEMM's."""
    if math.isnan(tflops):
        return "no cuBLAS"
    return f"{tflops:.0f} ({tflops / the_gpu().gemm_tflops:.0%})" if has_cublas() else f"{tflops:.0f}"


def _dense(run: Run, t: TensorType, rows: int, n_in: int, n_out: int) -> tuple[float, float]:
    """Return the rate of the product, and of unpacking to bf16 and cuBLAS instead, which it is held to, too."""
    with Bench() as b:
        x, stride = b.activations(t, n_in, rows)
        w, out = b.weights(t, n_in, n_out), b.allocate(4 * rows * n_out)
        one = launch(
            mat_mat.mul_mat(t, n_in, n_out, rows, b.device.capability), rows=rows, x=x, x_stride=stride, w=w,
            row_bytes=t.row_bytes(n_in), n_in=n_in, n_out=n_out, out=out, out_stride=4 * n_out, **NO_BIAS,
        )  # fmt: skip
        flops = 2 * rows * n_in * n_out
        rate = flops / b.seconds([one]) / 1e12
        if not has_cublas():
            return rate, math.nan
        cublas = _by_cublas(b, t, w, rows, n_in, n_out)
        outputs, expected = (np.empty((rows, n_out), np.float32) for _ in range(2))
        b.device.download(out, outputs)
        b.device.download(cublas[0], expected)
        run.check(f"mat-mat: {t.name} beside bf16 and cuBLAS", cases.nmse(outputs, expected), 1e-3)
        return rate, flops / cublas[1] / 1e12


def _by_cublas(b: Bench, t: TensorType, w: int, rows: int, n_in: int, n_out: int) -> tuple[int, float]:
    """Unpack weights to bf16 and multiply; return where the result is, and the seconds of both."""
    plain = b.activations(BY_NAME["F32"], n_in, rows)[0]  # the same values, not quantized
    x, unpacked_weights, out = (b.allocate(size) for size in (2 * rows * n_in, 2 * n_out * n_in, 4 * rows * n_out))
    output_kind = dequantize.OUTPUTS.index("bf16")

    def unpacking(kind: TensorType, source: int, target: int, count: int) -> Launch:
        return launch(
            dequantize.dequantize(kind, n_in, count, for_product=True), w=source, out=target,
            row_bytes=kind.row_bytes(n_in), rows=count, n=n_in, out_stride=2 * n_in, to=output_kind,
        )  # fmt: skip

    b.device.run([unpacking(BY_NAME["F32"], plain, x, rows)])

    def work() -> None:
        b.device.run([unpacking(t, w, unpacked_weights, n_out)])
        b.device.gemm_bf16(rows, n_out, n_in, x, unpacked_weights, out)

    return out, peak.median_seconds(b.device, work, SIZES.of_products)


def _expert_slots(b: Bench, t: TensorType, rows: int) -> dict[str, int]:
    """Return the slots of products by expert of so many tokens: up and gate, and their results (out and other)."""
    n_in, n_out, n_expert, n_used = SIZES.expert_in, SIZES.expert_out, SIZES.experts, SIZES.used
    expert_bytes = n_out * t.row_bytes(n_in)
    x, stride = b.activations(t, n_in, rows)
    plan = b.allocate(moe.plan_bytes(n_expert, n_used, rows))
    up, gate = (b.weights(t, n_in, n_expert * n_out) for _ in range(2))
    slots = {
        "rows": rows, "x": x, "x_stride": stride, "x_per": n_used,
        "ids": b.allocate(4 * rows * n_used, _random_ids(rows)),
        "plan": plan, "n_expert": n_expert, "n_used": n_used, "row_bytes": t.row_bytes(n_in), "n_in": n_in,
        "n_out": n_out, "up": up, "gate": gate, "w": up, "expert_bytes": expert_bytes, "up_expert_bytes": expert_bytes,
        "gate_expert_bytes": expert_bytes, "runs": moe.bucket_runs(n_expert, b.device.capability),
    }  # fmt: skip
    return {**slots, **{name: b.allocate(4 * rows * n_used * n_out) for name in ("out", "other")}}


def _random_ids(rows: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Draw the experts of each token."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(SIZES.experts)[: SIZES.used] for _ in range(rows)]).astype(np.int32)


def _expert_launches(b: Bench, t: TensorType, rows: int, fused: bool) -> list[list[Launch]]:
    """Return up and gate of all experts for so many tokens; of few, several times, with other experts."""
    slots, ids = _expert_slots(b, t, rows), 4 * rows * SIZES.used
    id_lists = [
        slots["ids"],
        *(b.allocate(ids, _random_ids(rows, seed)) for seed in range(2, 1 + _turns(rows, SIZES.in_graph))),
    ]
    return [
        _of_experts(b, {**slots, **LIMITS, **NO_BIAS, "ids": launch_ids}, t, rows, fused) for launch_ids in id_lists
    ]


def _turns(rows: int, turns: int) -> int:
    """Return the number of copies of the data that tokens read, to exceed the caches: one for many tokens."""
    return turns if rows <= 8 else 1


def _of_experts(b: Bench, slots: dict[str, Any], t: TensorType, rows: int, fused: bool) -> list[Launch]:
    n_in, n_out, n_expert, n_used = SIZES.expert_in, SIZES.expert_out, SIZES.experts, SIZES.used
    is_few = rows <= 8
    first = [] if is_few else [launch(moe.bucket(n_expert, b.device.capability), **slots)]
    if fused:
        shape = (
            mat_vec.up_gate_id(t, SILU, n_in, n_out, rows, n_used)
            if is_few
            else mat_mat.up_gate_id(t, SILU, n_in, n_out, rows, n_used, n_expert, b.device.capability)
        )
        return [*first, launch(shape, **slots)]
    shape = (
        mat_vec.mul_mat_id(t, n_in, n_out, rows, n_used)
        if is_few
        else mat_mat.mul_mat_id(t, n_in, n_out, rows, n_used, n_expert, b.device.capability)
    )
    products = [launch(shape, **slots), launch(shape, **{**slots, "w": slots["gate"], "out": slots["other"]})]
    pairs = {"rows": rows * n_used, "gate": slots["other"], "up": slots["out"], "out": slots["out"]}
    act = launch(glu.glu(SILU, n_out, rows * n_used), width=n_out, gate_width=n_out, **pairs, **LIMITS)
    return [*first, *products, act]


def _gated_experts(t: TensorType, rows: int) -> float:
    with Bench() as b:
        flops = 4 * rows * SIZES.used * SIZES.expert_in * SIZES.expert_out
        return flops / b.seconds(*_expert_launches(b, t, rows, True)) / 1e12


def _experts(run: Run, t: TensorType, rows: int) -> tuple[float, float]:
    """Return the rate of a product by expert, and of every expert unpacked to bf16 and cuBLAS instead."""
    s, sizes = SIZES, (SIZES.expert_in, SIZES.expert_out)
    pairs, flops = rows * s.used, 2 * rows * s.used * s.expert_in * s.expert_out
    with Bench() as b:
        slots = {**_expert_slots(b, t, rows), **NO_BIAS}
        shape = mat_mat.mul_mat_id(t, *sizes, rows, s.used, s.experts, b.device.capability)
        launches = [launch(moe.bucket(s.experts, b.device.capability), **slots), launch(shape, **slots)]
        rate = flops / b.seconds(launches) / 1e12
        if not has_cublas():
            return rate, math.nan
        info = TensorInfo("experts", (*sizes, s.experts), t, t.tensor_bytes((*sizes, s.experts)), 0, 0)
        counts = ExpertCounts()
        counts.per_expert = np.bincount(_random_ids(rows).ravel(), minlength=s.experts).tolist()
        plan_slots = {
            "x": b.allocate(2 * pairs * s.expert_in), "w": slots["w"], "out": b.allocate(4 * pairs * s.expert_out),
            "unpacked": b.allocate(2 * s.expert_in * s.expert_out),
        }  # fmt: skip
        x = {"x": b.activations(BY_NAME["F32"], s.expert_in, rows)[0], "x_per": s.used, "width": s.expert_in}
        gather = launch(moe.gather(pairs), **{**slots, **x, "rows": pairs, "out": plan_slots["x"]})
        ending = {"x": plan_slots["out"], "out": slots["other"], "rows": pairs, "width": s.expert_out}
        scatter = launch(moe.scatter(pairs), **{**slots, **ending})
        experts = ExpertProducts(b.device, Matrix(info), counts)

        def work() -> None:
            b.device.run([launches[0], gather])
            experts(rows, plan_slots)
            b.device.run([scatter])

        cublas = flops / peak.median_seconds(b.device, work, SIZES.of_products) / 1e12
        outputs, expected = (np.empty((pairs, s.expert_out), np.float32) for _ in range(2))
        b.device.download(slots["out"], outputs)
        b.device.download(slots["other"], expected)
        run.check(f"mat-mat: {t.name} by expert beside bf16 and cuBLAS", cases.nmse(outputs, expected), 1e-3)
        return rate, cublas


def _dense_gates(b: Bench, t: TensorType, rows: int, fused: bool) -> list[list[Launch]]:
    return [_dense_gate(b, t, rows, fused) for _ in range(_turns(rows, SIZES.in_turn))]


def _dense_gate(b: Bench, t: TensorType, rows: int, fused: bool) -> list[Launch]:
    n_in, n_out = SIZES.n_in, SIZES.wide
    x, stride = b.activations(t, n_in, rows)
    up, gate = (b.weights(t, n_in, n_out) for _ in range(2))
    outs = [b.allocate(4 * rows * n_out) for _ in range(3)]
    common = {
        "rows": rows, "x": x, "x_stride": stride, "row_bytes": t.row_bytes(n_in), "n_in": n_in, "n_out": n_out,
        "out_stride": 4 * n_out, **LIMITS, **NO_BIAS,
    }  # fmt: skip
    is_few, card_is = rows <= 8, b.device.capability
    if fused:
        shape = (
            mat_vec.up_gate(t, SILU, n_in, n_out, rows)
            if is_few
            else mat_mat.up_gate(t, SILU, n_in, n_out, rows, card_is)
        )
        return [launch(shape, **common, up=up, gate=gate, out=outs[0])]
    shape = mat_vec.mul_mat(t, n_in, n_out, rows) if is_few else mat_mat.mul_mat(t, n_in, n_out, rows, card_is)
    products = [launch(shape, **common, w=w, out=out) for w, out in zip((up, gate), outs[:2], strict=True)]
    act = launch(
        glu.glu(SILU, n_out, rows), rows=rows, gate=outs[1], up=outs[0], out=outs[2], width=n_out, gate_width=n_out,
        **LIMITS,
    )  # fmt: skip
    return [*products, act]


def fused_speed(run: Run) -> None:
    """Fused up+gate+activation beside two products and a gate, dense and by expert, few tokens and many."""
    parts = [f"{name}, {kind}" for name in GATED_TYPES for kind in ("dense", "experts")]
    if not run.todo("fused", parts):
        return
    run.say("\nfused up+gate beside up, gate and activation: unfused time / fused time\n")
    run.say(f"| what, by tokens | {' | '.join(map(str, SIZES.gates))} |\n|---|{'---|' * len(SIZES.gates)}")
    makers = {"dense": _dense_gates, "experts": _expert_launches}

    def of_type(label: str) -> None:
        name, _, kind = label.partition(", ")
        cells = []
        for rows in SIZES.gates:
            times = []
            for fused in (False, True):
                with Bench() as b:
                    launches = makers[kind](b, BY_NAME[name], rows, fused)
                    times.append(b.seconds(*launches, repetitions=SIZES.repetitions))
            cells.append(f"{times[0] / times[1]:.2f}")
        run.say(f"| {label} | {' | '.join(cells)} |")

    run.for_each("fused", parts, of_type, needs=20)


@dataclass(frozen=True)
class Heads:
    """Query heads, those of keys and values, their lengths; latent: values are the first columns of the keys."""

    n: int
    kv: int
    k: int
    v: int
    latent: bool = False


def attention_speed(run: Run) -> None:
    """Decoding at depth as a share of copying, several caches in turn; a prompt as a rate."""
    _attention_speed(run, Heads(32, 4, 128, 128), SIZES.caches)
    _attention_speed(run, Heads(32, 32, 128, 128), SIZES.caches[:2])
    _attention_speed(run, Heads(SIZES.latent_heads, 1, 576, 512, latent=True), SIZES.caches[:2])


def _attention_speed(run: Run, h: Heads, kinds: tuple[str, ...]) -> None:
    c, step = the_gpu(), f"attention, {h.n} heads over {h.kv}"
    if not run.todo(step, kinds):
        return
    run.say(f"\nattention, {h.n} heads of {h.k} over {h.kv} key-value heads\n")

    def of_kind(kind: str) -> None:
        row_bytes = h.kv * (BY_NAME[kind.upper()].row_bytes(h.k + (0 if h.latent else h.v)))
        for depth in SIZES.depths:
            seconds = _attend(kind, h, 1, depth)
            gb_s = depth * row_bytes / seconds / 1e9
            share = f"{gb_s:.0f} GB/s ({gb_s / c.copy_gb_s:.0%} of copy)"
            run.say(f"- {kind}, 1 token at {depth}: {1e6 * seconds:.1f} us, {share}")
        seconds = _attend(kind, h, SIZES.tokens, SIZES.tokens)
        rate = SIZES.tokens**2 * h.n * (h.k + h.v) / seconds / 1e12
        run.say(f"- {kind}, prompt of {SIZES.tokens}: {1e3 * seconds:.2f} ms, {rate:.0f} TFLOP/s")

    run.for_each(step, kinds, of_kind, needs=20)


def _attend(kind: str, h: Heads, rows: int, n_ctx: int) -> float:
    sizes = h.n, h.kv, h.k, h.v
    layer = attention.AttentionLayer(kind, *sizes, n_ctx, h.latent)
    plan = attention.attention(layer, rows, capability=the_gpu().device.capability)
    with Bench() as b:
        positions = np.arange(n_ctx - rows, n_ctx, dtype=np.int32)
        arrays = [
            b.allocate(4 * rows, positions * 0),
            b.allocate(4 * rows, positions),
            b.allocate(4 * rows, positions * 0),
        ]
        batch = b.allocate(56, np.array([rows, 0, *arrays, 0, n_ctx], np.int64))
        noise = np.random.default_rng(1).standard_normal(1 << 16)
        stored: dict[str, np.ndarray[Any, Any]] = {
            "f16": noise.astype(np.float16),
            "f32": noise.astype(np.float32),
            "q8_0": cases.blocks(BY_NAME["Q8_0"], 4096, 1, largest=4),
        }
        fill = stored[kind]
        t = BY_NAME[kind.upper()]
        nbytes = [n_ctx * t.row_bytes(h.kv * n) for n in (h.k, 0 if h.latent else h.v)]
        turns = max(1, min(_turns(rows, SIZES.in_graph), SIZES.in_turn * SIZES.matrix_bytes // sum(nbytes)))
        caches = [[b.allocate(n, fill) if n else 0 for n in nbytes] for _ in range(turns)]
        slots = {
            "batch": batch, "rows": rows, "q": b.allocate(4 * rows * h.n * h.k, noise.astype(np.float32)),
            "out": b.allocate(4 * rows * h.n * h.v), "n_head": h.n, "n_head_kv": h.kv, "head_v": h.v,
            "scale": h.k**-0.5, "softcap": 0.0, "sinks": 0, "mask": 0, "window": 0, "alibi": 0.0, "biases": 0,
            "splits": plan.splits, "scratch": b.allocate(max(256, plan.scratch)), "selected": 0, "n_selected": 0,
            "ratio": 0,
        }  # fmt: skip
        lists = []
        for keys, values in caches:
            lists.append([launch(plan.attend, **slots, k_cache=keys, v_cache=values)])
            if plan.combine is not None:
                lists[-1].append(launch(plan.combine, **{**slots, "rows": rows * h.n}))
        return b.seconds(*lists, repetitions=SIZES.repetitions)


# ---------------------------------------------------------------- a whole model


def write_moe(path: Path, matrix: str, router: str) -> Path:
    """Write a MoE with the shapes of Qwen3-30B-A3B and random blocks; tensors of one type and size are the same."""
    s = SIZES
    moe = {"experts": s.experts, "used": s.used, "embd": s.expert_in, "ff": s.expert_out}
    shapes = Shapes(layers=_layers(path.parent), heads=s.heads, vocab=s.vocab, **moe)
    t, r, f32 = BY_NAME[matrix], BY_NAME[router], BY_NAME["F32"]
    tensors = []
    for name, shape in shapes.tensors().items():
        kind = f32 if len(shape) == 1 else r if ".ffn_gate_inp." in name else t
        data = _ones(shape[0]) if len(shape) == 1 else _random_weights(kind, int(np.prod(shape)))
        tensors.append((name, shape, kind, data))
    write_gguf(path, [*shapes.fields(15), Field.of("tokenizer.ggml.model", "no_vocab")], tensors)
    return path


@cache
def _layers(folder: Path) -> int:
    """Return the number of layers that fit the GPU and the folder."""
    room: int = min(the_gpu().device.bytes_free(), shutil.disk_usage(folder).free)
    of_layer = 3 * SIZES.experts * SIZES.expert_in * SIZES.expert_out * 5 // 8
    return max(1, min(SIZES.layers, (room - _NOT_LAYERS) // of_layer))


@cache
def _ones(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


@cache
def _random_weights(t: TensorType, count: int) -> np.ndarray[Any, Any]:
    """Return the data of a tensor with so many small values, a few blocks again and again."""
    blocks = cases.blocks(t, min(count // t.block, 4096), 1, 0.1)
    if not t.is_quantized:
        blocks = (blocks.view(np.float32) * 0.02).view(np.uint8)
    return np.resize(blocks.reshape(-1), count // t.block * t.block_bytes)


def _rate(session: Session, n: int, one_by_one: bool) -> float:
    """Return the tokens a second of a prompt, or of single tokens after it; the median."""
    tokens = np.random.default_rng(1).integers(0, session.model.n_vocab, n).astype(np.int32)
    last = np.arange(n) == n - 1
    rates = []
    for _ in range(SIZES.of_model + 1):
        session.clear()
        if one_by_one:
            session.decode(tokens[:16], outputs=last[:16])
        began = time.perf_counter()
        if one_by_one:
            for token in tokens:
                session.decode(token[None])
        else:
            session.decode(tokens, outputs=last)
        rates.append(n / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def _write_model(run: Run, router: str) -> Path:
    """Return the model with a router of this type, written once; there is room for one."""
    path = run.folder / f"moe-{router}.gguf"
    if not path.exists():
        for old_path in run.folder.glob("moe-*"):
            old_path.unlink()
        part = path.with_suffix(".part")
        with run.growing(part):
            write_moe(part, "Q4_K", router).rename(path)
    return path


#: How the model is run.
SETTINGS: dict[str, dict[str, Any]] = {
    "all fused": {},
    "no fused MoE": {"fusion": Fusion(moe=False)},
    "nothing fused": {"fusion": Fusion.none()},
    "merged": {"merge_up_gate": True},
    "all fused, early launches": {},
    "no fused launches": {"fusion": Fusion(launches=False)},
    "router Q8_0": {},
}


def model_speed(run: Run) -> None:
    """A MoE of Qwen3-30B-A3B's shapes: prompts and generation with every switch on and off."""
    if not run.todo("model", SETTINGS):
        return
    c, n = the_gpu(), SIZES.tokens
    run.say(
        f"\nMoE, shapes of Qwen3-30B-A3B, {_layers(run.folder)} layers, vocabulary {SIZES.vocab}, Q4_K, router F32\n"
    )
    run.say(f"| switches | prompt {n} t/s | of the GEMM rate | generation t/s | of copy |\n|---|---|---|---|---|")
    rates: dict[str, tuple[float, float]] = {}

    def with_setting(label: str) -> None:
        router = "Q8_0" if label == "router Q8_0" else "F32"
        with load(_write_model(run, router), n_ubatch=n, placement=cases.on_gpu(), **SETTINGS[label]) as model:
            session = model.session(n + SIZES.single + 16)
            with cases.launched_early() if "early" in label else nullcontext():
                rates[label] = _rate(session, n, False), _rate(session, SIZES.single, True)
            cost = token_cost(model.graph, "f16", 80)
            prompt, single = rates[label]
            of_gemm = 2 * cost.mul_adds * prompt / 1e12 / c.gemm_tflops
            of_copy = cost.bytes * single / 1e9 / c.copy_gb_s
            share = f"{of_gemm:.1%}" if has_cublas() else "no cuBLAS"
            run.say(f"| {label} | {prompt:.0f} | {share} | {single:.0f} | {of_copy:.1%} |")

    run.for_each("model", SETTINGS, with_setting, needs=40)
    _gains(run, rates)


def _gains(run: Run, rates: dict[str, tuple[float, float]]) -> None:
    """Print ratios beside those that ik_llama.cpp's changes brought there."""
    run.say()
    for title, with_it, without, unit in (
        ("MoE up+gate, prompt", "all fused", "no fused MoE", 0),
        ("MoE up+gate, 1 token", "all fused", "no fused MoE", 1),
        ("merged, prompt", "merged", "all fused", 0),
        ("router Q8_0, 1 token", "router Q8_0", "all fused", 1),
        ("early launches, 1 token", "all fused, early launches", "all fused", 1),
        ("fused launches, 1 token", "all fused", "no fused launches", 1),
    ):
        if with_it in rates and without in rates:
            gain = rates[with_it][unit] / rates[without][unit] - 1
            run.say(f"- {title}: {gain:+.1%} (ik_llama.cpp: {IKS[title]})")


STEPS: dict[str, Callable[[Run], None]] = {
    "model": model_speed,
    "fused": fused_speed,
    "attention": attention_speed,
    "mat-vec": mat_vec_speed,
    "mat-mat": mat_mat_speed,
}
