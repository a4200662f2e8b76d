"""Interleave and deinterleave rows: the layouts of kernels/interleave.py as SIMD code.

A layout is a table of the source of each bit; ``_moves`` turns it into straight-line code for a unit. Source bytes are
loaded into vectors of 64; for each vector of the output, the bytes that contribute to it by the same rotation are
shuffled together, rotated, masked and joined. A layout of nibbles thus takes two shuffles, two shifts and two masks for
64 bytes, regardless of its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.core.jit import kernel, specialize
from quantkit.kernels.cpu.core.simd import _pointer, _shuffle, emits, load, store
from quantkit.kernels.cpu.core.tape import address_of
from quantkit.kernels.interleave import Layout, layout_of
from quantkit.types import TensorType

U8 = npt.NDArray[np.uint8]

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VECTOR = ir.VectorType(_I8, 64)


class _Region:
    """Pieces of memory of one size, some of which lie a stride apart, as vectors of 64 bytes.

    Small pieces share a vector. A piece is covered by parts of ``width`` bytes; the last one may overlap that before.
    """

    def __init__(self, pieces: int, size: int) -> None:
        self.width = min(64, 1 << (size.bit_length() - 1))
        starts = [*range(0, size - self.width + 1, self.width)]
        if starts[-1] + self.width < size:
            starts.append(size - self.width)
        #: Piece and byte of each part, so that the same parts of all pieces are neighbours.
        self.parts = [(piece, start) for start in starts for piece in range(pieces)]
        self.per_vector = 64 // self.width
        # Position of a byte among the parts: the last part that covers it.
        place = np.zeros((pieces, size), np.int64)
        for i, (piece, start) in enumerate(self.parts):
            place[piece, start : start + self.width] = i * self.width + np.arange(self.width)
        self.place = place.reshape(-1)

    @property
    def bytes(self) -> list[list[tuple[int, int]]]:
        """Return the parts of each vector."""
        return [self.parts[i : i + self.per_vector] for i in range(0, len(self.parts), self.per_vector)]

    def order(self, size: int) -> npt.NDArray[np.int64]:
        """Return the byte that each lane of the vectors holds, pieces one after another; -1 for unused lanes."""
        out = np.full(64 * len(self.bytes), -1)
        for i, (piece, start) in enumerate(self.parts):
            out[i * self.width : (i + 1) * self.width] = piece * size + start + np.arange(self.width)
        return out

    def load(self, b: Any, address: Any, stride: Any) -> list[Any]:
        t = ir.VectorType(_I8, self.width)
        return [self._join(b, [b.load(_part(b, address, stride, p, t), align=1) for p in ps]) for ps in self.bytes]

    def _join(self, b: Any, parts: list[Any]) -> Any:
        while len(parts) > 1 or parts[0].type.count < 64:
            parts += [ir.Constant(parts[0].type, ir.Undefined)] * (len(parts) % 2)
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [_shuffle(b, x, y, range(2 * x.type.count)) for x, y in pairs]
        return parts[0]

    def store(self, b: Any, address: Any, stride: Any, number: int, vector: Any) -> None:
        t = ir.VectorType(_I8, self.width)
        for i, part in enumerate(self.bytes[number]):
            lanes = range(i * self.width, (i + 1) * self.width)
            b.store(_shuffle(b, vector, None, lanes), _part(b, address, stride, part, t), align=1)


def _part(b: Any, address: Any, stride: Any, part: tuple[int, int], t: ir.Type) -> Any:
    piece, start = part
    return _pointer(b, address, b.add(b.mul(stride, _I64(piece)), _I64(start)), t)


def _constant(values: npt.ArrayLike) -> ir.Constant:
    return ir.Constant(_VECTOR, [int(v) for v in np.asarray(values)])


def _gather(b: Any, vectors: list[Any], lanes: npt.NDArray[np.int64]) -> Any:
    """Return a vector of the bytes ``lanes`` of all vectors one after another; anything where a lane is negative."""
    result = ir.Constant(_VECTOR, ir.Undefined)
    for v in sorted({int(lane) // 64 for lane in lanes if lane >= 0}):
        of_vector = (lanes >= 0) & (lanes // 64 == v)
        result = _shuffle(b, result, vectors[v], [int(x) for x in np.where(of_vector, 64 + lanes % 64, np.arange(64))])
    return result


def _terms(
    order: npt.NDArray[np.int64], place: npt.NDArray[np.int64]
) -> dict[tuple[int, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Group the bits of a vector, [64, 8] numbers of source bits, by rotation.

    Returns for each (rotation, number) the source lanes, -1 where there is none, and the masks after the rotation.
    """
    terms: dict[tuple[int, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    for lane, bits in enumerate(order):
        for target_bit, bit in enumerate(bits):
            if bit < 0:
                continue
            source, number = place[bit // 8], 0
            while True:
                lanes, masks = terms.setdefault(
                    (target_bit - bit % 8, number), (np.full(64, -1), np.zeros(64, np.int64))
                )
                if lanes[lane] in (-1, source):
                    break
                number += 1
            lanes[lane] = source
            masks[lane] |= 1 << target_bit
    return terms


def _rotate(b: Any, v: Any, shift: int) -> Any:
    if shift == 0:
        return v
    return b.shl(v, _constant([shift] * 64)) if shift > 0 else b.lshr(v, _constant([-shift] * 64))


def _parities(b: Any, v: Any, positions: npt.NDArray[np.bool_]) -> Any:
    """Replace each of bits 1 .. 7 of some bytes by the parity of those up to it."""
    for shift, mask in ((1, 0x7E), (2, 0x3E), (4, 0x0E)):
        v = b.xor(v, b.shl(b.and_(v, _constant(positions * mask)), _constant([shift] * 64)))
    return v


def _no_parities(b: Any, v: Any, positions: npt.NDArray[np.bool_]) -> Any:
    """The inverse: each bit is the change of parity from the one before it."""
    return b.xor(v, b.shl(b.and_(v, _constant(positions * 0x7E)), _constant([1] * 64)))


def _moves(name: str, order: Any, pieces: tuple[int, int], signs: Any, flipped: Any, to_interleaved: bool) -> Any:
    """Return an intrinsic ``move(source, source_stride, target, target_stride)`` that rearranges one unit.

    order: for each bit of the target, the bit of the source; pieces: into how many pieces, a stride apart, the bytes
    of source and target fall; signs, flipped: of the bytes of the interleaved one,
    the target if ``to_interleaved``.
    """

    def typing(*args: Any) -> Any:
        return types.void(types.intp, types.intp, types.intp, types.intp)

    def emit(b, sig, address, stride, out_address, to_stride):
        n_source, n_target = int(order.max()) // 8 + 1 if to_interleaved else len(signs), len(order) // 8
        source, target = (_Region(p, n // p) for p, n in zip(pieces, (n_source, n_target), strict=True))
        bits = np.concatenate([order.reshape(-1, 8), np.full((1, 8), -1)])  # the last for unused lanes
        vectors = source.load(b, address, stride)
        if not to_interleaved:
            lanes = source.order(n_source // pieces[0]).reshape(-1, 64)
            vectors = [_emit_rows(b, v, signs[i], flipped[i]) for v, i in zip(vectors, lanes, strict=True)]
        for number, lanes in enumerate(target.order(n_target // pieces[1]).reshape(-1, 64)):
            out = None
            for (rotation, _), (lane, masks) in sorted(_terms(bits[lanes], source.place).items()):
                v = _rotate(b, _gather(b, vectors, lane), rotation)
                used = masks[lanes >= 0]
                if (used != 0xFF).any():
                    v = b.and_(v, _constant(masks))
                out = v if out is None else b.or_(out, v)
            if to_interleaved:
                out = _emit_interleaved(b, out, signs[lanes], flipped[lanes])
            target.store(b, out_address, to_stride, number, out)

    return emits(typing, name)(emit)


def _emit_interleaved(b: Any, v: Any, signs: Any, flipped: Any) -> Any:
    v = _parities(b, v, signs) if signs.any() else v
    return b.xor(v, _constant(flipped)) if flipped.any() else v


def _emit_rows(b: Any, v: Any, signs: Any, flipped: Any) -> Any:
    v = b.xor(v, _constant(flipped)) if flipped.any() else v
    return _no_parities(b, v, signs) if signs.any() else v


# --- kernels -------------------------------------------------------------------------------------------------------

#: Bindings: ``_moves`` of a layout; rows of a group; bytes of a unit of one row and of a row header, plain and
#: interleaved; whether a row's scale is copied to its blocks.
move: Any = None
group = unit_bytes = interleaved_bytes = header_bytes = interleaved_header = 0
spreads = False


def interleave_groups(
    rows: int, row_bytes: int, interleaved: int, interleaved_row: int, groups: int, units: int
) -> None:
    """Interleave ``groups`` groups of rows of ``units`` units; addresses, and the bytes of a row of either kind."""
    for g in range(groups):
        source, target = rows + g * group * row_bytes, interleaved + g * group * interleaved_row
        for k in range(group):
            for i in range(0, interleaved_header, 2):
                store(target, k * interleaved_header + i, load(types.uint16, source, k * row_bytes + i))
        source, target = source + header_bytes, target + group * interleaved_header
        for u in range(units):
            move(source + u * unit_bytes, row_bytes, target + u * group * interleaved_bytes, 0)


def deinterleave_groups(
    rows: int, row_bytes: int, interleaved: int, interleaved_row: int, groups: int, units: int
) -> None:
    """Deinterleave ``groups`` groups; arguments as of ``interleave_groups``."""
    for g in range(groups):
        head, target = interleaved + g * group * interleaved_row, rows + g * group * row_bytes
        for k in range(group):
            for i in range(0, min(interleaved_header, header_bytes), 2):
                store(target, k * row_bytes + i, load(types.uint16, head, k * interleaved_header + i))
        source, target = head + group * interleaved_header, target + header_bytes
        for u in range(units):
            group_target = target + u * unit_bytes
            move(source + u * group * interleaved_bytes, 0, group_target, row_bytes)
            if spreads:
                for k in range(group):
                    store(group_target, k * row_bytes, load(types.uint16, head, 2 * k))


def _specialize(function: Callable[..., Any], move: Any, layout: Layout, compiled: Callable[..., Any]) -> Any:
    t, base = layout.type, layout.base
    sizes = {
        "group": layout.rows,
        "unit_bytes": layout.values * base.block_bytes // base.block,
        "interleaved_bytes": layout.values * t.block_bytes // t.block,
        "header_bytes": base.row_header,
        "interleaved_header": t.row_header,
        "spreads": layout.repeats_row_scale,
    }
    return specialize(function, f"{t.name.lower()}_{layout.values}", compiled, move=move, **sizes)


@cache
def interleave_kernel(layout: Layout, compiled: Callable[..., Any] = kernel) -> Any:
    """Return ``interleave_groups`` of a layout, compiled on its first call; TypeNotSupported if rows can only be
    deinterleaved."""
    if layout.source_bits is None:
        t, base = layout.type, layout.base
        raise TypeNotSupported(f"{base} lacks data of {t}: its rows cannot be interleaved as {t}")
    pieces, name = (layout.rows, 1), f"interleave_{layout.type.name.lower()}_{layout.values}"
    move = _moves(name, layout.source_bits.astype(np.int64), pieces, layout.signs, layout.xor, True)
    return _specialize(interleave_groups, move, layout, compiled)


@cache
def deinterleave_kernel(layout: Layout, compiled: Callable[..., Any] = kernel) -> Any:
    """Return ``unravel_rows`` of a layout, compiled on its first call."""
    pieces, name = (1, layout.rows), f"unravel_{layout.type.name.lower()}_{layout.values}"
    move = _moves(name, layout.target_bits.astype(np.int64), pieces, layout.signs, layout.xor, False)
    return _specialize(deinterleave_groups, move, layout, compiled)


def interleave_rows(t: TensorType, rows: U8, out: U8) -> None:
    """Interleave rows of a base type as the interleaved type ``t``, without the GIL.

    rows: uint8 [n, row bytes of base_of(t)]; out: uint8 [n, row bytes of t]; both C-contiguous, n a multiple of
    ``t.interleave``. Raises TypeNotSupported if the base type lacks data of ``t``, ValueError for other shapes.
    """
    layout, units = _checked_layout(t, rows, out)
    interleave_kernel(layout)(
        address_of(rows), rows.shape[1], address_of(out), out.shape[1], len(rows) // t.interleave, units
    )


def deinterleave_rows(t: TensorType, interleaved: U8, out: U8, row_type: TensorType | None = None) -> None:
    """Deinterleave rows of type ``t`` into ``out``: the inverse of ``interleave_rows``.

    ``row_type``: the type of single rows, if it is not the base type (``interleave.plain_of``).
    """
    layout, units = _checked_layout(t, out, interleaved, row_type)
    deinterleave_kernel(layout)(
        address_of(out), out.shape[1], address_of(interleaved), interleaved.shape[1], len(out) // t.interleave, units
    )
    if layout.base.name == "Q8_KV":
        out[:, 4:8] = out[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)[:, None].view(np.uint8)


def _checked_layout(t: TensorType, rows: U8, interleaved: U8, row_type: TensorType | None = None) -> tuple[Layout, int]:
    """Return the layout of rows, and their units; ValueError if shapes disagree."""
    n = (interleaved.shape[1] - t.row_header) // t.block_bytes * t.block
    layout = layout_of(t, n, row_type)
    base, count = layout.base, len(rows)
    if n % layout.values:
        raise TypeNotSupported(
            f"{t}: rows of {n} values cannot be deinterleaved: they are not a multiple of {layout.values}", "QK-E303"
        )
    if rows.shape != (count, base.row_bytes(n)) or interleaved.shape != (count, t.row_bytes(n)):
        raise ValueError(f"{t}: rows are uint8 [{list(rows.shape)}] as {base}, [{list(interleaved.shape)}] interleaved")
    if count % layout.rows or not (rows.flags.c_contiguous and interleaved.flags.c_contiguous):
        raise ValueError(f"{t}: {count} rows must be contiguous and a multiple of {layout.rows}")
    return layout, n // layout.values
