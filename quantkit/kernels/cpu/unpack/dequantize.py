"""Dequantize rows of any type with an unpacker to float32, in one loop for all types.

``decode_rows`` below is the loop, specialized for each type (jit.specialize): its unpacker is bound to the global name
``unpack``, and so on. A partial unit of 256 values at the end of a row is decoded from a zero-padded copy.

Kernels take addresses, so one compiled version serves read-only, unaligned and strided rows of a mapped file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from quantkit.kernels.cpu.core.jit import kernel, specialize
from quantkit.kernels.cpu.core.simd import (
    VecType,
    _address,
    _shuffle,
    convert,
    emits,
    f16_to_f32,
    f32x16,
    load,
    load_f16,
    store,
    u16x16,
    u32x16,
)
from quantkit.kernels.cpu.core.tape import address_of
from quantkit.kernels.cpu.interleave import deinterleave_rows
from quantkit.kernels.cpu.unpack import unpacker
from quantkit.kernels.formats import UNIT, format_of
from quantkit.kernels.interleave import base_of, is_interleaved
from quantkit.types import TensorType

#: Bytes of interleaved rows that are deinterleaved at a time.
_CHUNK_BYTES = 1 << 18

Kernel = Callable[[int, int, int, int, int, int, int], None]


def _of_levels(out: Any, byte: Any, *arguments: Any) -> Any:
    return types.void(out, types.intp, *arguments)


@emits(_of_levels)
def write_values(b, sig, out, byte, l0, l1, l2, l3, scales, mins):
    """write_values(out, byte, l0, l1, l2, l3, scales, mins): 256 f32, 16 at a time; mins may be None."""
    start = _address(b, out, byte)
    for k in range(16):
        part = _shuffle(b, (l0, l1, l2, l3)[k // 4], None, range(16 * (k % 4), 16 * (k % 4) + 16))
        value = b.fmul(_shuffle(b, scales, None, [k] * 16), b.sitofp(part, f32x16.ll))
        if isinstance(sig.args[7], VecType):
            value = b.fsub(value, _shuffle(b, mins, None, [k] * 16))
        b.store(value, b.bitcast(b.gep(start, [ir.IntType(64)(64 * k)]), f32x16.ll.as_pointer()), align=1)


#: Bindings of ``decode_rows``: a type's unpacker, and ``Unpacker.row``.
unpack: Any = None
row_scale: Any = None
scaled: Any = None
unit_bytes = header_bytes = 0


def decode_rows(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Unpack ``rows`` rows of ``n`` values; strides in bytes; scratch: one unit, zeroed, and 1024 bytes."""
    n_tail = n % 256
    units = (n + 255) // 256
    for row in range(rows):
        source, target = data + row * stride + header_bytes, out + row * out_stride
        of_row = row_scale(data + row * stride)
        for unit in range(units):
            block, values = source + unit * unit_bytes, target + unit * 1024
            partial = n_tail > 0 and unit == units - 1
            if partial:
                for i in range(n_tail * unit_bytes // 256):
                    store(scratch, i, load(types.uint8, block, i))
                block, values = scratch, scratch + unit_bytes
            l0, l1, l2, l3, scales, mins = unpack(block, 0)
            write_values(values, 0, l0, l1, l2, l3, scaled(scales, of_row), mins)
            if partial:
                for i in range(n_tail):
                    store(target, unit * 1024 + 4 * i, load(types.float32, values, 4 * i))


def decode_rows_f16(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Widen half floats."""
    for row in range(rows):
        source, target = data + row * stride, out + row * out_stride
        for i in range(0, n - 15, 16):
            store(target, 4 * i, load_f16(f32x16, source, 2 * i))
        for i in range(n // 16 * 16, n):
            store(target, 4 * i, f16_to_f32(load(types.uint16, source, 2 * i)))


def decode_rows_bf16(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Widen bfloat16: the upper half of a float32."""
    for row in range(rows):
        source, target = data + row * stride, out + row * out_stride
        for i in range(0, n - 15, 16):
            store(target, 4 * i, convert(u32x16, load(u16x16, source, 2 * i)) << 16)
        for i in range(n // 16 * 16, n):
            store(target, 4 * i, types.uint32(load(types.uint16, source, 2 * i) << 16))


DIRECT: dict[str, Kernel] = {"F16": decode_rows_f16, "BF16": decode_rows_bf16}


@cache
def rows_decoder(t: TensorType, compiled: Callable[..., Any] = kernel) -> Kernel:
    """Return ``decode_rows`` of type ``t``, any but F32, compiled on its first call; raise TypeNotSupported."""
    if t.name in DIRECT:
        return compiled(DIRECT[t.name])  # type: ignore[no-any-return]
    unpack = unpacker(t)
    return specialize(decode_rows, t.name.lower(), compiled, unpack=unpack.function, **unpack.row)  # type: ignore[no-any-return]


def dequantize_rows(t: TensorType, data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Decode ``data`` uint8 [rows, row_bytes] of type ``t`` into ``out`` float32 [rows, n], without the GIL.

    Each row must be contiguous; data may be read-only, unaligned and a slice of a mapped file. Of an interleaved type
    rows come in whole groups. Raises TypeNotSupported without a decoder or if n is not a multiple of the block,
    ValueError if shapes disagree.
    """
    if is_interleaved(t):
        _dequantize_interleaved(t, data, out)
        return
    format_of(t)
    rows, n = out.shape
    row_bytes = t.row_bytes(n)
    if data.shape != (rows, row_bytes) or data.dtype != np.uint8 or out.dtype != np.float32:
        raise ValueError(
            f"{t.name}: {rows} rows of {n} values are uint8 [{rows}, {row_bytes}] decoded into float32 [{rows}, {n}]; "
            f"got {data.dtype} {list(data.shape)} into {out.dtype}"
        )
    if not rows or not n:
        return
    if data.strides[1] != 1 or out.strides[1] != 4 or not out.flags.writeable:
        raise ValueError(f"{t.name}: the bytes and values of a row must be contiguous, and the output writeable")
    if t.name == "F32":
        out.view(np.uint8)[...] = data
        return
    run = rows_decoder(t)
    scratch = np.zeros(t.row_bytes(UNIT) + 4 * UNIT if n % UNIT else 0, np.uint8)
    run(address_of(data), data.strides[0], address_of(out), out.strides[0], rows, n, address_of(scratch))


def _dequantize_interleaved(t: TensorType, data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Decode interleaved rows: deinterleave some groups at a time, and decode these."""
    base, (rows, n) = base_of(t), out.shape
    step = t.interleave * max(1, _CHUNK_BYTES // (t.interleave * max(1, base.row_bytes(n))))
    plain = np.empty((min(step, rows), base.row_bytes(n)), np.uint8)
    for row in range(0, rows, step):
        part = plain[: min(step, rows - row)]
        deinterleave_rows(t, np.ascontiguousarray(data[row : row + step]), part)
        dequantize_rows(base, part, out[row : row + step])
