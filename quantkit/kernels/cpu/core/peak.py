"""Peak rates of this machine: bytes read and 8-bit multiplications per second, the bounds of mat-vec and mat-mat.

Threads run the kernels below at once, without the GIL; the best of several rounds counts, since other load only slows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numba.core import types

from quantkit.kernels.cpu.core.jit import kernel
from quantkit.kernels.cpu.core.simd import dot4, hsum, i8x64, i32x16, load, prefetch, splat, store, u8x64, u32x16

#: Larger than the caches of most machines; each thread reads its own part.
_BYTES = 384 << 20
_ROUNDS = 7


@kernel
def read_stream(data: int, size: int, out: int) -> None:
    """Read ``size`` bytes, a multiple of 256, in order."""
    a = splat(u32x16, types.uint32(0))
    b = a
    c = a
    d = a
    for offset in range(0, size, 256):
        prefetch(data, offset + 4096)
        prefetch(data, offset + 4160)
        prefetch(data, offset + 4224)
        prefetch(data, offset + 4288)
        a = a | load(u32x16, data, offset)
        b = b | load(u32x16, data, offset + 64)
        c = c | load(u32x16, data, offset + 128)
        d = d | load(u32x16, data, offset + 192)
    store(out, 0, (a | b) | (c | d))


@kernel
def read_while_writing(data: int, size: int, out: int, of_four: int) -> None:
    """Read ``size`` bytes, a multiple of 256, in order, and write 1 or 2 for every 4 of them."""
    for offset in range(0, size, 256):
        for line in range(4):
            prefetch(data, offset + 4096 + 64 * line)
        a = load(u32x16, data, offset) | load(u32x16, data, offset + 64)
        b = load(u32x16, data, offset + 128) | load(u32x16, data, offset + 192)
        if of_four == 1:
            store(out, offset // 4, a | b)
        else:
            store(out, offset // 2, a)
            store(out, offset // 2 + 64, b)


@kernel
def dot_peak(rounds: int, out: int) -> None:
    """Run ``rounds`` times 12 independent chains of 64-byte products: 768 multiply-adds a round."""
    x = load(u8x64, out, 0)
    a = splat(i32x16, types.int32(0))
    b = a
    c = a
    d = a
    e = a
    f = a
    g = a
    h = a
    i = a
    j = a
    k = a
    m = a
    for r in range(rounds):
        y = load(i8x64, out, 64 * (r & 31))  # keeps the compiler from hoisting a round
        a = dot4(a, x, y)
        b = dot4(b, x, y)
        c = dot4(c, x, y)
        d = dot4(d, x, y)
        e = dot4(e, x, y)
        f = dot4(f, x, y)
        g = dot4(g, x, y)
        h = dot4(h, x, y)
        i = dot4(i, x, y)
        j = dot4(j, x, y)
        k = dot4(k, x, y)
        m = dot4(m, x, y)
    total = ((a + b) + (c + d)) + ((e + f) + (g + h)) + ((i + j) + (k + m))
    store(out, 0, hsum(total))


def read_gb_s(threads: int) -> float:
    """Return the gigabytes (10^9) a second that ``threads`` threads read from memory."""
    data = np.ones(_BYTES, np.uint8)
    part = _BYTES // threads // 256 * 256
    out = np.zeros((threads, 64), np.uint8)
    seconds = _best(threads, lambda i: read_stream(data.ctypes.data + i * part, part, out[i].ctypes.data))
    return part * threads / seconds / 1e9


def int8_gops(threads: int) -> float:
    """Return the 10^9 int8 operations a second of ``threads`` threads (a multiply-add is two)."""
    rounds = 200_000
    out = np.random.default_rng(1).integers(0, 127, (threads, 4096)).astype(np.uint8)
    seconds = _best(threads, lambda i: dot_peak(rounds, out[i].ctypes.data))
    return threads * rounds * 12 * 64 * 2 / seconds / 1e9


def _best(threads: int, work: Callable[[int], None]) -> float:
    """Return the seconds of the fastest of several rounds with all threads at work.

    Each worker reads the clock itself: the waiting thread may be preempted at the wrong moment.
    """
    work(0)
    gate = threading.Barrier(threads)
    times = np.zeros((_ROUNDS, threads, 2))

    def run(i: int) -> None:
        for r in range(_ROUNDS):
            gate.wait()
            times[r, i, 0] = time.perf_counter()
            work(i)
            times[r, i, 1] = time.perf_counter()

    team = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return float((times[:, :, 1].max(1) - times[:, :, 0].min(1)).min())
