"""Products with F32, F16 and BF16 weights: mat-vec and tiles as in dots.py and panel.py, in f32 FMA.

Activations for F16 and BF16 weights are rounded as in llama.cpp (activations.py) but kept as f32, so the three types
differ only in how 16 weights are loaded. A panel is 32 transposed rows of weights, f32 [n][2][16 rows].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    _muladd,
    cast,
    convert,
    emits,
    f32x16,
    hsum,
    load,
    load_f16,
    muladd,
    prefetch,
    prefetch_l2,
    splat,
    stack_bytes,
    store,
    u16x16,
    u32x16,
)
from quantkit.kernels.cpu.matmul.matmul_tiles import broadcast, no_sums, store_tile, turn, vector_at
from quantkit.kernels.cpu.unpack.lanes import widen_f16

# ---------------------------------------------------------------- 16 weights


@inline
def load_16_f32(row: int, offset: int) -> Any:
    """Load 16 weights from number ``offset`` on."""
    return load(f32x16, row, 4 * offset)


@inline
def load_16_f16(row: int, offset: int) -> Any:
    """Load and widen 16 weights."""
    return load_f16(f32x16, row, 2 * offset)


@inline
def load_16_bf16(row: int, offset: int) -> Any:
    """Load and widen 16 weights: bfloat16 is the upper half of f32."""
    return cast(f32x16, convert(u32x16, load(u16x16, row, 2 * offset)) << 16)


@inline
def load_few_f32(row: int, offset: int, n: int) -> Any:
    """Load n weights, zero-padded."""
    return load_part(f32x16, row, 4 * offset, n)


@inline
def load_few_f16(row: int, offset: int, n: int) -> Any:
    """Load and widen n weights, zero-padded."""
    return widen_f16(load_part(u16x16, row, 2 * offset, n))


@inline
def load_few_bf16(row: int, offset: int, n: int) -> Any:
    """Load and widen n weights, zero-padded."""
    return cast(f32x16, convert(u32x16, load_part(u16x16, row, 2 * offset, n)) << 16)


#: Prefetch distance in bytes; the bindings of a type.
PREFETCH = 4096
load_16: Any = None
load_few: Any = None
weight_bytes = 4

# ---------------------------------------------------------------- a row


def dot_float_row(w: int, act: int, n: int, distance: int) -> Any:
    """Return the dot product, float32, of n weights at ``w`` and n f32 at ``act``."""
    a = b = c = d = splat(f32x16, 0)
    vector_end = n // 64 * 64
    for i in range(0, vector_end, 64):
        for line in range(weight_bytes):
            prefetch(w, weight_bytes * i + distance + 64 * line)
        a = muladd(load_16(w, i), load(f32x16, act, 4 * i), a)
        b = muladd(load_16(w, i + 16), load(f32x16, act, 4 * i + 64), b)
        c = muladd(load_16(w, i + 32), load(f32x16, act, 4 * i + 128), c)
        d = muladd(load_16(w, i + 48), load(f32x16, act, 4 * i + 192), d)
    for i in range(vector_end, n, 16):
        n_tail = min(16, n - i)
        a = muladd(load_few(w, i, n_tail), load_part(f32x16, act, 4 * i, n_tail), a)
    return hsum((a + b) + (c + d))


def dot_float_row_by_4(w: int, y0: int, y1: int, y2: int, y3: int, n: int) -> Any:
    """Return four dot products, float32, of n weights at ``w`` and n f32 each at y0 ... y3."""
    a = b = c = d = splat(f32x16, 0)
    vector_end = n // 16 * 16
    for i in range(0, vector_end, 16):
        prefetch(w, weight_bytes * i + PREFETCH)
        x = load_16(w, i)
        a, b = muladd(x, load(f32x16, y0, 4 * i), a), muladd(x, load(f32x16, y1, 4 * i), b)
        c, d = muladd(x, load(f32x16, y2, 4 * i), c), muladd(x, load(f32x16, y3, 4 * i), d)
    if vector_end < n:
        n_tail = n - vector_end
        x = load_few(w, vector_end, n_tail)
        a = muladd(x, load_part(f32x16, y0, 4 * vector_end, n_tail), a)
        b = muladd(x, load_part(f32x16, y1, 4 * vector_end, n_tail), b)
        c = muladd(x, load_part(f32x16, y2, 4 * vector_end, n_tail), c)
        d = muladd(x, load_part(f32x16, y3, 4 * vector_end, n_tail), d)
    return hsum(a), hsum(b), hsum(c), hsum(d)


# ---------------------------------------------------------------- a panel


def unpack_float_panel(w: int, row_bytes: int, rows: int, n: int, panel: int) -> None:
    """Transpose ``rows`` (1 to 32) rows of n weights; the last one is repeated up to 32."""
    block = stack_bytes(1024)
    for i in range(0, n, 16):
        count = min(16, n - i)
        for half in range(2):
            for r in range(16):
                row = w + min(16 * half + r, rows - 1) * row_bytes
                store(block, 64 * r, load_16(row, i) if count == 16 else load_few(row, i, count))
            turn(block, 64, panel + 128 * i + 64 * half, 128, 16)


def _type_steps(sums: Any, panel: Any, tokens: Any, offset: Any, steps: Any) -> Any:
    is_literal = isinstance(steps, types.IntegerLiteral)
    return sums(sums, types.int64, tokens, types.int64, steps) if is_literal else None


@emits(_type_steps)
def multiply_steps(b, sig, sums, panel, tokens, offset, steps):
    """Add the products of ``steps`` columns of a panel with the tokens' f32 from byte ``offset`` on."""
    n = len(tokens)
    for step in range(sig.args[4].literal_value):
        w = [vector_at(b, panel, 128 * step + 64 * r, f32x16.ll) for r in range(2)]
        for c, y in enumerate(tokens):
            x = broadcast(b, y, b.add(offset, ir.IntType(64)(4 * step)), ir.FloatType())
            for r in range(2):
                sums[r * n + c] = _muladd(b, w[r], x, sums[r * n + c])
    return sums


def tile_float(panel: int, n: int, tokens: Any, out: int, next_rows: int, step: int) -> None:
    """Multiply a panel by rows of f32."""
    sums = no_sums(tokens)
    for begin in range(0, n, 256):
        for byte in range(0, step, 64):
            prefetch_l2(next_rows, byte)
        next_rows += step
        end = min(n, begin + 256)
        vector_end = end // 4 * 4
        for i in range(begin, vector_end, 4):
            sums = multiply_steps(sums, panel + 128 * i, tokens, 4 * i, 4)
        for i in range(vector_end, end):
            sums = multiply_steps(sums, panel + 128 * i, tokens, 4 * i, 1)
    store_tile(sums, out)


LOADS: dict[str, dict[str, Any]] = {
    "F32": {"load_16": load_16_f32, "load_few": load_few_f32, "weight_bytes": 4},
    "F16": {"load_16": load_16_f16, "load_few": load_few_f16, "weight_bytes": 2},
    "BF16": {"load_16": load_16_bf16, "load_few": load_few_bf16, "weight_bytes": 2},
}
