"""Compare the bytes and losses of error feedback on GPU and CPU, then time it; run by scripts/gpu_check.

    rounding    rows of every type, by the same metric: bytes and losses, and Gweights/s of rounding alone
    metrics     covariances, factored and packed there: every bit of the CPU's, and seconds of both

Needs numba beside numpy and CuPy, as the CPU rounds the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpu import cases
from gpu.speed import the_gpu
from quantkit.cpus import available_cpus
from quantkit.kernels.cuda.core import peak
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.types import BY_NAME

if TYPE_CHECKING:
    from gpu.run import Run
    from quantkit.kernels.cpu.feedback.rounding import Rounded
    from quantkit.kernels.levels import Grouping

Floats = npt.NDArray[np.float32]


@dataclass
class Sizes:
    """Rows and columns that are compared, and those that are timed, as often as is said; tests make them small."""

    rows: int = 200
    n: int = 512
    timed_rows: int = 8192
    timed_n: int = 2048
    repetitions: int = 3


SIZES = Sizes()


@cache
def _metric(n: int, grouping: Grouping | None) -> Any:
    from quantkit.kernels.cpu.feedback.metric import metric

    rng = np.random.default_rng(n)
    inputs = rng.standard_normal((2 * n, n)) * np.exp(0.5 * rng.standard_normal(n))
    return metric(inputs.T @ inputs, 0.02, grouping=grouping)


def _rounded(name: str, x: Floats, rows_out: npt.NDArray[np.uint8], repetitions: int = 0) -> tuple[Rounded, float]:
    """Return a GPU's error feedback on the reference's bytes of rows, and the seconds, if they are measured."""
    from quantkit.kernels.cpu.feedback import Rounding
    from quantkit.kernels.cpu.feedback.rounding import Rounded
    from quantkit.kernels.cuda.feedback.metric import upload
    from quantkit.kernels.cuda.feedback.rounding import round_rows, working_bytes
    from quantkit.kernels.cuda.feedback.rows import RowAddresses
    from quantkit.kernels.levels import levels_of

    device, t, (rows, n) = the_gpu().device, BY_NAME[name], x.shape
    device_metric = upload(device, _metric(n, levels_of(t).grouping))
    sizes = (x.nbytes, rows_out.nbytes, 8 * rows, 8 * rows, working_bytes(t, rows, n))
    addresses = [device.allocate(size) for size in sizes]
    out = Rounded(rows_out.copy(), np.empty(rows), np.empty(rows))
    try:
        device.upload(addresses[0], x)

        def work() -> None:
            round_rows(
                device,
                t,
                RowAddresses(rows, addresses[0], addresses[1], addresses[1], addresses[2], addresses[3]),
                device_metric,
                Rounding(),
                addresses[4],
            )

        device.upload(addresses[1], rows_out)
        work()
        for address, array in zip(addresses[1:4], (out.rows, out.before, out.after), strict=True):
            device.download(address, array)
        seconds = peak.median_seconds(device, work, repetitions, 1) if repetitions else 0.0
    finally:
        device_metric.close()
        for address in addresses:
            device.free(address)
    return out, seconds


def _prepare(names: Sequence[str]) -> None:
    """Compile what rounds rows of types, several kernels at once."""
    from quantkit.kernels.cpu.feedback import Rounding
    from quantkit.kernels.cuda.encode.pipeline import RowConversion
    from quantkit.kernels.cuda.feedback.pipeline import FeedbackConversion

    kernels = dict[Kernel, None]()
    for t in map(BY_NAME.__getitem__, names):
        n = max(SIZES.n, t.block)
        form = FeedbackConversion(RowConversion(BY_NAME["F32"], t, n), n, False, Rounding())
        kernels |= dict.fromkeys(form.kernels([t.imatrix == "required"]))
    the_gpu().device.prepare(list(kernels))


def rounding(run: Run) -> None:
    """Error feedback on the GPU, beside the CPU's bytes and losses; then how fast it is."""
    if run.lacks_numba("rounding"):
        return
    from quantkit.kernels.cpu.feedback import Rounding
    from quantkit.kernels.cpu.feedback.rounding import round_rows
    from quantkit.kernels.cuda.feedback.rounding import can_round
    from quantkit.kernels.levels import all_levels, levels_of

    capability = the_gpu().device.capability
    names = [name for name in all_levels() if name in run.types and can_round(BY_NAME[name], capability)]
    right: list[str] = []

    def random_rows(name: str, rows: int, n: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
        t = BY_NAME[name]
        x = np.random.default_rng(t.id).standard_normal((rows, max(n, t.block))).astype(np.float32)
        importance = np.ones(x.shape[1], np.float32) if t.imatrix == "required" else None
        return x, cases.encode(the_gpu().device, t, x, importance).reshape(rows, -1)

    def of_type(name: str) -> None:
        x, reference = random_rows(name, SIZES.rows, SIZES.n)
        actual, _ = _rounded(name, x, reference)

        def encode(rows: Floats, out: npt.NDArray[np.uint8]) -> None:
            out[:] = reference

        metric_of_x = _metric(x.shape[1], levels_of(BY_NAME[name]).grouping)
        expected = round_rows(BY_NAME[name], x, encode, metric_of_x, Rounding())
        wrong = int((actual.rows != expected.rows).sum())
        off = int((actual.before != expected.before).sum() + (actual.after != expected.after).sum())
        is_same = run.check(f"rounding: {name}, bytes that differ from the CPU's", wrong, 0)
        if run.check(f"rounding: {name}, losses that differ from the CPU's", off, 0) and is_same:
            right.append(name)
        if SIZES.repetitions:
            x, reference = random_rows(name, SIZES.timed_rows, SIZES.timed_n)
            seconds = _rounded(name, x, reference, SIZES.repetitions)[1]
            run.say(f"rounding {len(x)} x {x.shape[1]} as {name}: {x.size / seconds / 1e9:.2f} Gweights/s")

    todo = run.todo("rounding", names)
    _prepare(todo)
    run.for_each("rounding", todo, of_type)
    if right:
        run.say(f"error feedback: {SIZES.rows} rows of {len(right)} types have the CPU's bytes and losses")


def metrics(run: Run) -> None:
    """Metrics made on the GPU, beside the CPU's: numbers that differ; then how long both take."""
    if run.lacks_numba("metrics"):
        return
    from quantkit.kernels.cpu.feedback.metric import metric
    from quantkit.kernels.cuda.feedback.metric import metric as metric_on_device
    from quantkit.kernels.cuda.feedback.pinned_transfer import PinnedTransfer

    def of_size(name: str) -> None:
        n = getattr(SIZES, name)
        x = np.random.default_rng(n).standard_normal((n + 64, n)) * np.exp(0.5 * np.arange(n) % 3)
        h, device = x.T @ x, the_gpu().device
        carrier = PinnedTransfer(device.new_stream())
        metric(h, 0.02)  # what is compiled at first use
        began = time.perf_counter()
        expected = metric(h, 0.02, available_cpus())
        on_cpu, began = time.perf_counter() - began, time.perf_counter()
        actual = metric_on_device(carrier, h, 0.02)
        seconds, wrong = time.perf_counter() - began, 0
        for field in ("columns", "u", "pivots", "h", "per_diagonal"):
            array = getattr(expected, field)
            copy = np.empty_like(array)
            device.download(getattr(actual, field), copy)
            wrong += int((copy != array).sum())
        actual.close()
        run.check(f"metrics: {n} columns, numbers that differ from the CPU's", wrong, 0)
        run.say(f"a metric of {n} columns: {1e3 * seconds:.1f} ms, {available_cpus()} CPUs {1e3 * on_cpu:.1f} ms")

    run.for_each("metrics", run.todo("metrics", ["n", "timed_n"]), of_size)
