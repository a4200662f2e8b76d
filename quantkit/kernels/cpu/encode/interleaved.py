"""Encoders of row-interleaved types: their base type's, then rows are interleaved.

By ik_llama.cpp's search, the default, a tensor encoded as Q4_K_R4 is one encoded as Q4_K by that search
(``Format.ik_encoder``) and repacked; by llama.cpp's, one that llama.cpp encodes. ik's differ from the base type in a
few things, all of ik 8337e4cd3 (iqk_quantize.cpp):

* IQ2, IQ3 and Q6_0 check the importance again, row by row: in sub-blocks where the importances, the values or their
  products are almost 0, the importances become 1e-9 (QHelper::row_weights).
* Q2_K_R4 without importance writes rows of three values, as ternary models have, exactly (quantize_row_q2_K_ref; ik's
  Q2_K does so, too, over as many rows as a thread happens to take).
* Halves of zeros in blocks of IQ1_M_R4 repeat the shift, which 0 multiplies, of the half before, within a group of rows
  (quantize_iq1_m_r4; there also that of the group before, in every thread).
* BF16_R16 cuts values off instead of rounding them (repack_f32_bf16_r16); from BF16 nothing is lost.

Q8_K_R8 and Q8_K_R16 have no base type that a file could hold: rows are encoded as activations are, Q8_K.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.core.jit import inline, kernel
from quantkit.kernels.cpu.core.simd import any_lane, f32_to_f16, f32x16, load, splat, vabs
from quantkit.kernels.cpu.encode import Encoder, encoder
from quantkit.kernels.cpu.encode.floats import cut_bf16_r16
from quantkit.kernels.cpu.encode.grid_rows import NOTHING
from quantkit.kernels.cpu.encode.q8_k import encode_interleaved_q8_k, encode_interleaved_q8_kv
from quantkit.kernels.cpu.interleave import interleave_rows
from quantkit.kernels.formats import has_encoder
from quantkit.kernels.interleave import base_of
from quantkit.types import BY_NAME, TensorType

F = np.float32
TINY = F(1e-9)
TINY2 = F(TINY * TINY)

#: Number of values of the sub-blocks in which ik checks importances a second time.
GUARDED = {"IQ2_XXS_R4": 32, "IQ2_XS_R4": 16, "IQ2_S_R4": 16, "IQ3_XXS_R4": 32, "IQ3_S_R4": 16, "Q6_0_R4": 32}


def interleaved_encoder(t: TensorType, variant: str) -> Encoder:
    """Return the encoder of an interleaved type, which takes whole groups of rows; raise TypeNotSupported without one.

    ``variant``: whose, "mainline" or "ik" (``formats.encoder_for``).
    """
    if not has_encoder(t):
        raise TypeNotSupported(f"no encoder for {t.name} in this version; see `quantkit types`", "QK-E302")
    if t.name.startswith("Q8_K_R"):
        return partial(_encode_q8_k, t.interleave)
    if t.name == "Q8_KV_R8":
        return _encode_q8_kv
    if t.name == "BF16_R16" and variant == "ik":
        return _cut_off
    encode = encoder(base_of(t), variant)
    return partial(_encode_and_interleave, t, _as_ik(t, encode) if variant == "ik" else encode)


def _encode_q8_k(rows: int, x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
    encode_interleaved_q8_k(x, out, row0, row1, rows, np.uint32(0x80808080 if rows == 16 else 0))


def _encode_q8_kv(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
    encode_interleaved_q8_kv(x, out, row0, row1)


def _encode_and_interleave(
    t: TensorType, encode: Encoder, x: Any, weights: Any, out: Any, row0: int, row1: int
) -> None:
    plain = np.empty((row1 - row0, base_of(t).row_bytes(x.shape[1])), np.uint8)
    encode(x[row0:row1], weights, plain, 0, row1 - row0)
    interleave_rows(t, plain, out[row0:row1])


def _as_ik(t: TensorType, encode: Encoder) -> Encoder:
    """Return the encoder of a base type with the changes that ik makes when it interleaves rows."""
    if t.name in CHANGED:
        return partial(_encode_and_change, encode, *CHANGED[t.name])
    return partial(_encode_guarded, encode, GUARDED[t.name]) if t.name in GUARDED else encode


def _cut_off(x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
    """Keep the upper half of each float, of BF16_R16."""
    if x.shape[1] % 32 == 0:
        cut_bf16_r16(x, out, row0, row1)
        return
    plain = (x[row0:row1].view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    interleave_rows(BY_NAME["BF16_R16"], plain, out[row0:row1])


# ---------------------------------------------------------------- importance


def _encode_guarded(encode: Encoder, block: int, x: Any, weights: Any, out: Any, row0: int, row1: int) -> None:
    """Encode rows with importances that hold for all of them, and again the few that need their own."""
    if not weights.size:
        encode(x, weights, out, row0, row1)
        return
    common = np.where(_none(weights * weights, block), TINY, weights)
    encode(x, common, out, row0, row1)
    row = row0
    while (row := first_odd_row(x[:row1], weights, row, block)) >= 0:
        row_weights = weights.copy()
        if guard(x[row], weights, row_weights, block) and not np.array_equal(row_weights, common):
            encode(x, row_weights, out, row, row + 1)
        row += 1


def _none(squares: npt.NDArray[np.float32], block: int) -> npt.NDArray[np.bool_]:
    """Return where the squares of a sub-block add up to almost 0, one by one as the reference adds."""
    sums = np.zeros(squares.size // block, F)
    for column in squares.reshape(-1, block).T:
        sums = sums + column
    return np.repeat(~(sums > F(block) * TINY2), block)


@kernel
def first_odd_row(x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], first: int, block: int) -> int:
    """Return the first row, from ``first`` on, with a sub-block whose sums may be almost 0, or -1.

    A sum of numbers that are not negative is at least the largest of them, regardless of rounding.
    """
    n = x.shape[1]
    limit = splat(f32x16, np.float32(block) * TINY2)
    for row in range(first, x.shape[0]):
        for begin in range(0, n, block):
            exceeds, weighted = False, False
            for i in range(begin, begin + block, 16):
                v, w = load(f32x16, x, 4 * (row * n + i)), load(f32x16, weights, 4 * i)
                exceeds |= any_lane(v * v > limit)
                weighted |= any_lane(w * vabs(v) > limit)
            if not exceeds or not weighted:
                return row
    return -1


@kernel
def guard(
    x: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], out: npt.NDArray[np.float32], block: int
) -> bool:
    """Set the importances of sub-blocks to 1e-9 where they, the values or their products are almost 0."""
    changed, limit = False, np.float32(block) * TINY2
    for begin in range(0, x.size, block):
        squares = np.float32(0)
        values = np.float32(0)
        products = np.float32(0)
        for i in range(begin, begin + block):
            squares += weights[i] * weights[i]
            values += x[i] * x[i]
            products += weights[i] * abs(x[i])
        if not (squares > limit and values > limit and products > limit):
            out[begin : begin + block] = TINY
            changed = True
    return changed


# ---------------------------------------------------------------- ternary rows


@inline
def _level(value: Any, half: Any) -> Any:
    if value < -half:
        return 0
    return 1 if value < half else 2


@kernel
def write_ternary(x: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> None:
    """Encode rows whose values are almost all -max, 0 or max, as Q2_K: scale and minimum are max. Others stay."""
    for row in range(x.shape[0]):
        top = np.float32(0)
        for value in x[row]:
            top = max(top, abs(value))
        half = np.float32(0.5) * top
        square = np.float32(0)
        error = np.float32(0)
        for value in x[row]:
            difference = value - top * np.float32(_level(value, half) - 1)
            square += value * value
            error += difference * difference
        if error < np.float32(0.1) * square:
            _write_ternary_row(x[row], half, top, out[row])


@inline
def _write_ternary_row(x: Any, half: Any, top: Any, out: Any) -> None:
    for block in range(x.size // 256):
        offset = 84 * block
        out[offset : offset + 16] = 0x11
        for i in range(64):
            first, byte = 256 * block + i // 32 * 128 + i % 32, 0
            for part in range(4):
                byte |= _level(x[first + 32 * part], half) << (2 * part)
            out[offset + 16 + i] = byte
        scale = f32_to_f16(top)
        for field in (80, 82):
            out[offset + field], out[offset + field + 1] = scale & 255, scale >> 8


# ---------------------------------------------------------------- IQ1_M


@inline
def _sum_of_squares(x: Any, first: Any) -> Any:
    total = np.float32(0)
    for i in range(first, first + 16):
        total += x[i] * x[i]
    return total


@kernel
def repeat_shifts(x: npt.NDArray[np.float32], out: npt.NDArray[np.uint8]) -> None:
    """Give halves of zeros in groups of 4 rows of IQ1_M_ROW the shift of the same half of the block before.

    ``before`` is that in ik's order: of all rows of the group, block by block. Blocks of zeros shift up.
    """
    for group in range(0, x.shape[0], 4):
        last = [np.uint8(0), np.uint8(0)]
        for block in range(x.shape[1] // 32):
            for row in range(group, group + 4):
                low, high = _sum_of_squares(x[row], 32 * block), _sum_of_squares(x[row], 32 * block + 16)
                if low + high < NOTHING:
                    continue
                for half in range(2):
                    byte = 2 + 7 * block + 4 + half
                    if (high if half else low) > NOTHING:
                        last[half] = out[row, byte] & np.uint8(0x88)
                    else:
                        out[row, byte] |= last[half]


#: Types whose rows are changed after they are encoded: the function, and whether it also applies with importance.
CHANGED: dict[str, tuple[Any, bool]] = {"Q2_K_R4": (write_ternary, False), "IQ1_M_R4": (repeat_shifts, True)}


def _encode_and_change(
    encode: Encoder, change: Any, always: bool, x: Any, weights: Any, out: Any, row0: int, row1: int
) -> None:
    encode(x, weights, out, row0, row1)
    if always or not weights.size:
        change(x[row0:row1], out[row0:row1])
