"""Dequantize: rows of any type with an unpacker to float32, by one loop written once.

``decode_rows`` below is the loop. Every type's kernel is the same code object with that type's unpacker bound to the
global name ``unpack``; bound as a global, not as a closure cell, because numba's disk cache never hits on cells that
hold compiled functions. Rows that end within a unit of 256 values go through a zero-padded copy of one unit.

Kernels take addresses: read-only, unaligned and strided rows of a mapped file all run the one compiled version.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.jit import kernel
from quantkit.kernels.cpu.simd import (
    VecType,
    _address,
    _shuffle,
    convert,
    f16_to_f32,
    f32x16,
    load,
    load_f16,
    store,
    u16x16,
    u32x16,
)
from quantkit.kernels.cpu.unpack import UNIT, has_unpacker, unpacker
from quantkit.types import TensorType

Kernel = Callable[[int, int, int, int, int, int, int], None]


@intrinsic
def write_values(tyctx: Any, out: Any, byte: Any, l0: Any, l1: Any, l2: Any, l3: Any, scales: Any, mins: Any) -> Any:
    """write_values(out, byte, l0, l1, l2, l3, scales, mins): 256 f32, 16 at a time; mins may be None."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        start = _address(cgctx, b, sig.args[0], args[0], args[1])
        for k in range(16):
            part = _shuffle(b, args[2 + k // 4], None, range(16 * (k % 4), 16 * (k % 4) + 16))
            value = b.fmul(_shuffle(b, args[6], None, [k] * 16), b.sitofp(part, f32x16.ll))
            if isinstance(mins, VecType):
                value = b.fsub(value, _shuffle(b, args[7], None, [k] * 16))
            b.store(value, b.bitcast(b.gep(start, [ir.IntType(64)(64 * k)]), f32x16.ll.as_pointer()), align=1)
        return cgctx.get_dummy_value()

    return types.void(out, types.intp, l0, l1, l2, l3, scales, mins), cg


#: What ``decode_rows`` needs of a type; bound anew for each by ``_kernel_of``.
unpack: Any = None
unit_bytes = 0


def decode_rows(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Unpack ``rows`` rows of ``n`` values; strides in bytes; scratch: one unit, zeroed, and 1024 bytes."""
    rest = n % 256
    units = (n + 255) // 256
    for row in range(rows):
        source, target = data + row * stride, out + row * out_stride
        for unit in range(units):
            at, to = source + unit * unit_bytes, target + unit * 1024
            partial = rest > 0 and unit == units - 1
            if partial:
                for i in range(rest * unit_bytes // 256):
                    store(scratch, i, load(types.uint8, at, i))
                at, to = scratch, scratch + unit_bytes
            l0, l1, l2, l3, scales, mins = unpack(at, 0)
            write_values(to, 0, l0, l1, l2, l3, scales, mins)
            if partial:
                for i in range(rest):
                    store(target, unit * 1024 + 4 * i, load(types.float32, to, 4 * i))


@cache
def _kernel_of(t: TensorType) -> Kernel:
    """Return ``decode_rows`` with the unpacker of type ``t``, compiled on its first call."""
    made = unpacker(t)
    bound = {**globals(), "unpack": made.function, "unit_bytes": made.unit_bytes}
    function = python_types.FunctionType(decode_rows.__code__, bound, f"decode_rows_{t.name.lower()}")
    function.__qualname__ = function.__name__  # names the file of numba's cache
    return kernel(function)


@kernel
def decode_rows_f16(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Widen half floats."""
    for row in range(rows):
        source, target = data + row * stride, out + row * out_stride
        for i in range(0, n - 15, 16):
            store(target, 4 * i, load_f16(f32x16, source, 2 * i))
        for i in range(n // 16 * 16, n):
            store(target, 4 * i, f16_to_f32(load(types.uint16, source, 2 * i)))


@kernel
def decode_rows_bf16(data: int, stride: int, out: int, out_stride: int, rows: int, n: int, scratch: int) -> None:
    """Widen bfloat16: the upper half of a float32."""
    for row in range(rows):
        source, target = data + row * stride, out + row * out_stride
        for i in range(0, n - 15, 16):
            store(target, 4 * i, convert(u32x16, load(u16x16, source, 2 * i)) << 16)
        for i in range(n // 16 * 16, n):
            store(target, 4 * i, types.uint32(load(types.uint16, source, 2 * i) << 16))


DIRECT: dict[str, Kernel] = {"F16": decode_rows_f16, "BF16": decode_rows_bf16}


def has_decoder(t: TensorType) -> bool:
    """Tell whether rows of type ``t`` can be decoded."""
    return t.name == "F32" or t.name in DIRECT or has_unpacker(t)


def dequantize_rows(t: TensorType, data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Decode ``data`` uint8 [rows, row_bytes] of type ``t`` into ``out`` float32 [rows, n], without the GIL.

    Rows must be contiguous within themselves; data may be read-only, unaligned and a slice of a mapped file. Raises
    TypeNotSupported if there is no decoder or n is no multiple of the block, ValueError if shapes do not agree.
    """
    if not has_decoder(t):
        raise TypeNotSupported(f"there is no decoder for {t.name} in this version; `quantkit types` shows which exist")
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
    run = DIRECT.get(t.name) or _kernel_of(t)
    scratch = np.zeros(t.row_bytes(UNIT) + 4 * UNIT if n % UNIT else 0, np.uint8)
    run(_address_of(data), data.strides[0], _address_of(out), out.strides[0], rows, n, _address_of(scratch))


def _address_of(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
