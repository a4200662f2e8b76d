"""The specification: every decoder in plain numpy, one short function per type.

``decode_<type>(blocks)`` takes uint8 [n, block_bytes] and returns float32 [n, block], bit for bit as llama.cpp b11434
(ggml-quants.c dequantize_row_*); where the header of a row holds a scale, it also takes that of each block's row,
float32 [n, 1]. ``decode_rows`` takes whole rows of any type. Docstrings list the fields of a block in order with their
bytes, then the formula. Nothing here is fast; the kernels in quantkit/kernels/cpu are tested against it.

*Planes*: a byte holds k fields of 8 / k bits. Plane 0 of m bytes is the lowest field of each, plane 1 the next. Values
are stored plane after plane: byte b holds values b, b + m, b + 2 m ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.kernels.tables import table
from quantkit.types import TensorType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[Any]


def _words(blocks: Bytes, offset: int, count: int, dtype: str) -> Ints:
    """Return ``count`` little-endian numbers of ``dtype`` from byte ``offset`` of each block, as [n, count]."""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[:, offset : offset + count * size]).view(dtype)


def _f16(blocks: Bytes, offset: int) -> Floats:
    return _words(blocks, offset, 1, "<f2").astype(np.float32)


def _planes(x: Bytes, bits: int) -> Bytes:
    """Split bytes [..., m] into planes [..., 8 / bits, m] of unsigned fields."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (x[..., None, :] >> shifts) & np.uint8(2**bits - 1)


def _bits(x: Bytes) -> Bytes:
    """Return the bits of bytes [n, m] as [n, 8 m], lowest first."""
    return np.unpackbits(x, axis=-1, bitorder="little")


def _values(levels: Ints, scales: Floats, mins: Floats | None = None) -> Floats:
    """Return scale * level (- min) for levels [n, ...] and scales [n, k], each for 1/k of the block."""
    n, k = scales.shape
    out = scales[:, :, None] * levels.reshape(n, k, -1).astype(np.float32)
    if mins is not None:
        out = out - mins[:, :, None]
    return out.reshape(n, -1)


# ---------------------------------------------------------------- floats


def decode_f32(blocks: Bytes) -> Floats:
    """One f32."""
    return _words(blocks, 0, 1, "<f4")


def decode_f16(blocks: Bytes) -> Floats:
    """One f16."""
    return _f16(blocks, 0)


def decode_bf16(blocks: Bytes) -> Floats:
    """The upper 2 bytes of an f32."""
    return (_words(blocks, 0, 1, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


# ---------------------------------------------------------------- legacy: 32 values


def decode_q4_0(blocks: Bytes) -> Floats:
    """d f16, qs 16 (two planes): d * (q - 8)."""
    return _values(_planes(blocks[:, 2:], 4).astype(np.int8) - 8, _f16(blocks, 0))


def decode_q4_1(blocks: Bytes) -> Floats:
    """d f16, m f16, qs 16 (two planes): d * q + m."""
    return _values(_planes(blocks[:, 4:], 4), _f16(blocks, 0), -_f16(blocks, 2))


def _five_bits(high: Bytes, low: Bytes) -> Ints:
    return _planes(low, 4).reshape(-1, 32) | (_bits(high) << 4)


def decode_q5_0(blocks: Bytes) -> Floats:
    """d f16, qh 4 (bit i: fifth bit of value i), qs 16 (two planes): d * (q - 16)."""
    return _values(_five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - 16, _f16(blocks, 0))


def decode_q5_1(blocks: Bytes) -> Floats:
    """d f16, m f16, qh 4, qs 16, as Q5_0: d * q + m."""
    return _values(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _f16(blocks, 0), -_f16(blocks, 2))


def decode_q8_0(blocks: Bytes) -> Floats:
    """d f16, qs 32 int8: d * q."""
    return _values(blocks[:, 2:].view(np.int8), _f16(blocks, 0))


def decode_q6_0(blocks: Bytes) -> Floats:
    """d f16, qh 8 (four planes: 2 high bits of q of values 0-7, 16-23, 8-15, 24-31), qs 16 (two): d * (q - 32)."""
    high = _planes(blocks[:, 2:10], 2)[:, [0, 2, 1, 3]].reshape(-1, 32)
    q = _planes(blocks[:, 10:], 4).reshape(-1, 32) | (high << 4)
    return _values(q.astype(np.int8) - 32, _f16(blocks, 0))


def decode_q8_kv(blocks: Bytes, d: Floats) -> Floats:
    """qs 32 int8: d * q. After d, the row's header holds the sum of all q, an i32."""
    return _values(blocks.view(np.int8), d)


# ---------------------------------------------------------------- K-quants: 256 values


def decode_q2_k(blocks: Bytes) -> Floats:
    """scales 16, qs 64 (2 x 32 in four planes), d f16, dmin f16: d * (s & 15) * q - dmin * (s >> 4), s per 16."""
    s = blocks[:, :16]
    scales = _f16(blocks, 80) * (s & 15).astype(np.float32)
    mins = _f16(blocks, 82) * (s >> 4).astype(np.float32)
    return _values(_planes(blocks[:, 16:80].reshape(-1, 2, 32), 2), scales, mins)


def decode_q3_k(blocks: Bytes) -> Floats:
    """hmask 32 (eight planes), qs 64 (2 x 32 in four planes), scales 12, d f16: d * (s - 32) * (q - 4).

    hmask: the third bit of q. The 16 scales: low nibbles in 8 bytes of two planes, 2 high bits in 4 of four planes.
    """
    low, high = _planes(blocks[:, 32:96].reshape(-1, 2, 32), 2), _planes(blocks[:, :32], 1)
    q = low.reshape(-1, 256) | (high.reshape(-1, 256) << 2)
    s = _planes(blocks[:, 96:104], 4).reshape(-1, 16) | (_planes(blocks[:, 104:108], 2).reshape(-1, 16) << 4)
    return _values(q.astype(np.int8) - 4, _f16(blocks, 108) * (s.astype(np.float32) - 32))


def _sub_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """d f16, dmin f16, scales 12: 8 scales d * s and 8 minimums dmin * m.

    Bytes 0-3: 6 bits of s 0-3, and above them the top 2 bits of s 4-7; bytes 4-7: the same for m; bytes 8-11: low 4
    bits of s 4-7 in the low nibble, of m 4-7 in the high one.
    """
    a = blocks[:, 4:8]
    b = blocks[:, 8:12]
    c = blocks[:, 12:16]
    s = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1).astype(np.float32)
    m = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1).astype(np.float32)
    return _f16(blocks, 0) * s, _f16(blocks, 2) * m


def decode_q4_k(blocks: Bytes) -> Floats:
    """d f16, dmin f16, scales 12, qs 128 (4 x 32 in two planes): d * s * q - dmin * m, s and m per 32."""
    return _values(_planes(blocks[:, 16:].reshape(-1, 4, 32), 4), *_sub_scales(blocks))


def decode_q5_k(blocks: Bytes) -> Floats:
    """d f16, dmin f16, scales 12, qh 32 (eight planes: the fifth bits), qs 128: as Q4_K."""
    high = _planes(blocks[:, 16:48], 1).reshape(-1, 256) << 4
    return _values(_planes(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 256) | high, *_sub_scales(blocks))


def decode_q6_k(blocks: Bytes) -> Floats:
    """ql 128 (2 x 64 in two planes), qh 64 (2 x 32 in four), scales 16 int8, d f16: d * s * (q - 32), s per 16."""
    low = _planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = _planes(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    s = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _values((low | (high << 4)).astype(np.int8) - 32, _f16(blocks, 208) * s)


# ---------------------------------------------------------------- i-quants


def _seven_signs(words: Ints) -> Bytes:
    """Return 32 sign bytes from words [n, 8] of 4 x 7 signs, lowest bits first; ksigns adds the eighth sign."""
    sevens = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    signs: Bytes = table("ksigns")[sevens].reshape(-1, 32)
    return signs


def _apply_signs(magnitudes: Ints, signs: Bytes) -> Ints:
    """Return 256 magnitudes, negated where the bit of the 32 sign bytes is set."""
    return magnitudes.reshape(-1, 256).astype(np.int8) * (1 - 2 * _bits(signs).astype(np.int8))


def _halves(d: Floats, s: Ints, factor: float) -> Floats:
    return d * (np.float32(0.5) + s.astype(np.float32)) * np.float32(factor)


def _in_turn(x: Bytes) -> Bytes:
    """Return the nibbles of bytes [n, m] as [n, 2 m]: low, then high, of each byte."""
    return np.stack([x & 15, x >> 4], axis=-1).reshape(len(x), -1)


def decode_iq4_nl(blocks: Bytes) -> Floats:
    """32 values: d f16, qs 16 (two planes): d * codebook[q]."""
    return _values(table("kvalues_iq4nl")[_planes(blocks[:, 2:], 4)], _f16(blocks, 0))


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """d f16, scales_h u16, scales_l 4, qs 128 (8 x 16 in two planes): d * (s - 32) * codebook[q], s per 32.

    Sub-block i: the 4 low bits of s are nibble i of scales_l, the 2 high bits are bits 2 i and 2 i + 1 of scales_h.
    """
    high = (_words(blocks, 2, 1, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    s = (_in_turn(blocks[:, 4:8]) | (high << 4)).astype(np.float32) - 32
    return _values(table("kvalues_iq4nl")[_planes(blocks[:, 8:].reshape(-1, 8, 16), 4)], _f16(blocks, 0) * s)


def decode_iq3_xxs(blocks: Bytes) -> Floats:
    """d f16, qs 64, 8 words of 4 x 7 signs and 4 bits of s: d * (0.5 + s) * 0.5 * grid[q], s per 32."""
    words = _words(blocks, 66, 8, "<u4")
    levels = _apply_signs(table("iq3xxs_grid")[blocks[:, 2:66]], _seven_signs(words))
    return _values(levels, _halves(_f16(blocks, 0), words >> 28, 0.5))


def decode_iq3_s(blocks: Bytes) -> Floats:
    """d f16, qs 64, qh 8 (bit i: ninth bit of q of i), signs 32, scales 4: d * (1 + 2 s) * grid[q], s per 32."""
    q = blocks[:, 2:66].astype(np.uint16) | (_bits(blocks[:, 66:74]).astype(np.uint16) << 8)
    levels = _apply_signs(table("iq3s_grid")[q], blocks[:, 74:106])
    return _values(levels, _f16(blocks, 0) * (2 * _in_turn(blocks[:, 106:]) + 1).astype(np.float32))


def decode_iq2_xxs(blocks: Bytes) -> Floats:
    """d f16, 8 x (qs 4, a word of 4 x 7 signs and 4 bits of s): d * (0.5 + s) * 0.25 * grid[q], s per 32."""
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    words = _words(blocks, 2, 16, "<u4")[:, 1::2]
    levels = _apply_signs(table("iq2xxs_grid")[groups[:, :, :4]], _seven_signs(words))
    return _values(levels, _halves(_f16(blocks, 0), words >> 28, 0.25))


def decode_iq2_xs(blocks: Bytes) -> Floats:
    """d f16, 32 u16 of 9 bits q and 7 signs, scales 8: d * (0.5 + s) * 0.25 * grid[q], s per 16."""
    words = _words(blocks, 2, 32, "<u2")
    levels = _apply_signs(table("iq2xs_grid")[words & np.uint16(511)], table("ksigns")[words >> 9])
    return _values(levels, _halves(_f16(blocks, 0), _in_turn(blocks[:, 66:]), 0.25))


def decode_iq2_s(blocks: Bytes) -> Floats:
    """d f16, qs 32, signs 32, qh 8 (2 bits for each q), scales 8: d * (0.5 + s) * 0.25 * grid[q], s per 16."""
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    q = blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32).astype(np.uint16) << 8)
    levels = _apply_signs(table("iq2s_grid")[q], blocks[:, 34:66])
    return _values(levels, _halves(_f16(blocks, 0), _in_turn(blocks[:, 74:]), 0.25))


def decode_iq1_s(blocks: Bytes) -> Floats:
    """d f16, qs 32, 8 u16 h: d * (2 s + 1) * (grid[q] + shift), s and shift per 32.

    h: 3 high bits for each of 4 q, then 3 bits of s, then the sign of the shift, 1/8 or -1/8.
    """
    h = _words(blocks, 34, 8, "<u2")
    high = (h[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    grid = table("iq1s_grid")[blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32) << 8)]
    shift = np.where(h >> 15, np.float32(-0.125), np.float32(0.125))
    levels = grid.reshape(-1, 8, 32).astype(np.float32) + shift[:, :, None]
    return _values(levels, _f16(blocks, 0) * (2 * ((h >> 12) & np.uint16(7)) + 1).astype(np.float32))


def decode_iq1_m(blocks: Bytes) -> Floats:
    """qs 32, qh 16, 4 u16 w: d * (2 s + 1) * (grid[q] + shift), s per 16, shift per 8.

    A nibble of qh for each q: 3 high bits and the sign of the shift. w: 4 x 3 bits of s, then 4 bits of the f16 d.
    """
    half = _in_turn(blocks[:, 32:48])
    grid = table("iq1s_grid")[blocks[:, :32].astype(np.uint16) | ((half & 7).astype(np.uint16) << 8)]
    shift = np.where(half & 8, np.float32(-0.125), np.float32(0.125))
    w = _words(blocks, 48, 4, "<u2")
    d = np.bitwise_or.reduce((w >> 12) << np.array([0, 4, 8, 12], np.uint16), axis=1)[:, None].view(np.float16)
    s = ((w[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)).reshape(-1, 16)
    return _values(grid.astype(np.float32) + shift[:, :, None], d.astype(np.float32) * (2 * s + 1).astype(np.float32))


def decode_iq1_s_row(blocks: Bytes, d: Floats) -> Floats:
    """32 values of a row of IQ1_S_R4: qs 4, h u16 as in IQ1_S: d * (2 s + 1) * (grid[q] + shift)."""
    h = _words(blocks, 4, 1, "<u2")
    high = (h >> np.array([0, 3, 6, 9], np.uint16)) & np.uint16(7)
    shift = np.where(h >> 15, np.float32(-0.125), np.float32(0.125))
    levels = table("iq1s_grid")[blocks[:, :4].astype(np.uint16) | (high << 8)].astype(np.float32) + shift[:, :, None]
    return _values(levels, d * (2 * ((h >> 12) & np.uint16(7)) + 1).astype(np.float32))


def decode_iq1_m_row(blocks: Bytes, d: Floats) -> Floats:
    """32 values of a row of IQ1_M_R4: qs 4, qh 2 as in IQ1_M, s 1 (two nibbles): d * s * (grid[q] + shift)."""
    half = _in_turn(blocks[:, 4:6])
    grid = table("iq1s_grid")[blocks[:, :4].astype(np.uint16) | ((half & 7).astype(np.uint16) << 8)]
    shift = np.where(half & 8, np.float32(-0.125), np.float32(0.125))
    return _values(grid.astype(np.float32) + shift[:, :, None], d * _in_turn(blocks[:, 6:]).astype(np.float32))


# ---------------------------------------------------------------- ternary and binary


def decode_tq1_0(blocks: Bytes) -> Floats:
    """256 values: qs 48, qh 4, d f16: d * (digit - 1).

    A byte is a base-3 fraction of 256: digit n is (byte * 3^n mod 256) * 3 >> 8. Digits 0-4 of the first 32 bytes, then
    0-4 of the next 16, then 0-3 of qh; digit n of all bytes comes before digit n + 1.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = (blocks[:, :32], powers), (blocks[:, 32:48], powers), (blocks[:, 48:52], powers[:4])
    q = np.concatenate([(x[:, None, :] * p).reshape(len(x), -1) for x, p in parts], axis=1)
    return _values((q.astype(np.uint16) * 3 >> 8).astype(np.int8) - 1, _f16(blocks, 52))


def decode_tq2_0(blocks: Bytes) -> Floats:
    """256 values: qs 64 (2 x 32 in four planes), d f16: d * (q - 1)."""
    return _values(_planes(blocks[:, :64].reshape(-1, 2, 32), 2).astype(np.int8) - 1, _f16(blocks, 64))


def decode_q2_0(blocks: Bytes) -> Floats:
    """64 values: d f16, qs 16 (values 4 i to 4 i + 3 in byte i): d * (q - 1)."""
    q = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return _values(q.astype(np.int8) - 1, _f16(blocks, 0))


def decode_q1_0(blocks: Bytes) -> Floats:
    """128 values: d f16, qs 16: d where bit i is set, else -d."""
    return _values(2 * _bits(blocks[:, 2:]).astype(np.int8) - 1, _f16(blocks, 0))


# ---------------------------------------------------------------- fp4


def decode_mxfp4(blocks: Bytes) -> Floats:
    """32 values: e u8, qs 16 (two planes): 2^(e - 128) * twice_e2m1[q]; e is never a NaN."""
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _values(table("kvalues_fp4")[_planes(blocks[:, 1:], 4)], half)


def decode_nvfp4(blocks: Bytes) -> Floats:
    """64 values: scales 4 (unsigned E4M3), qs 32 (4 x 8 in two planes): scale / 2 * twice_e2m1[q], scale per 16.

    E4M3: 4 bits of exponent, bias 7, 3 of mantissa; the top bit is ignored; 0x7F is 0.
    """
    code = blocks[:, :4]
    exponent, mantissa = (code >> 3 & 15).astype(np.int32), (code & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    half = np.where(code == 0x7F, np.float32(0), value * np.float32(0.5))
    return _values(table("kvalues_fp4")[_planes(blocks[:, 4:].reshape(-1, 4, 8), 4)], half)


# ---------------------------------------------------------------- ik_llama.cpp's own: ternary, 64 values


def decode_iq1_bn(blocks: Bytes, d: Floats) -> Floats:
    """ql 12, extra 1: d * (digit - 1), bytes as in TQ1_0.

    Of each 16 values, 15 are the digits of three bytes of ql, from digit 4 to digit 0; the last one is one of extra:
    digit 4 in the first 16, digit 1 in the last.
    """
    powers = np.array([81, 27, 9, 3, 1], np.uint8)
    fives = (blocks[:, :12, None] * powers).reshape(-1, 4, 15)
    q = np.concatenate([fives, (blocks[:, 12:] * powers[:4])[:, :, None]], axis=2)
    return _values((q.astype(np.uint16) * 3 >> 8).astype(np.int8) - 1, d)


def decode_iq2_bn(blocks: Bytes, d: Floats) -> Floats:
    """qs 16 (four planes): d * (q - 1)."""
    return _values(_planes(blocks, 2).astype(np.int8) - 1, d)


# ---------------------------------------------------------------- ik_llama.cpp's own: 256 values


def _shift(codebook: str, q: Ints, shifts: Ints, step: int) -> Ints:
    """Return codebook[q] + step * shift for shifts [n, k] of 0 or 1, each of 1/k of the block."""
    levels = table(codebook)[q.reshape(len(shifts), shifts.shape[1], -1)]
    return levels + step * shifts.astype(np.int8)[:, :, None]


def _low_then_high(x: Bytes) -> Bytes:
    """Return the nibbles of bytes [n, m] as [n, 2 m]: all low ones, then all high ones."""
    return _planes(x, 4).reshape(len(x), -1)


def _scales_6_bits(blocks: Bytes) -> Floats:
    """Return the 16 scales d * (s - 32) of IQ4_K and IQ5_K: d f16, 2 bytes, 2 high bits of each s, 4 low bits."""
    high = (blocks[:, 4:8, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    s = _in_turn(blocks[:, 8:16]) | (high.reshape(-1, 16) << 4)
    return _f16(blocks, 0) * (s.astype(np.float32) - 32)


def _three_bits(blocks: Bytes, offset: int) -> Ints:
    """Return 256 indices: qs 64 (2 x 32 in four planes), qh 32 (eight planes: the third bits)."""
    low = _planes(blocks[:, offset : offset + 64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return low | (_planes(blocks[:, offset + 64 : offset + 96], 1).reshape(-1, 256) << 2)


def _five_of_256(blocks: Bytes, offset: int) -> Ints:
    """Return 256 indices: qs 128 (4 x 32 in two planes), qh 32 (eight planes: the fifth bits)."""
    low = _planes(blocks[:, offset : offset + 128].reshape(-1, 4, 32), 4).reshape(-1, 256)
    return low | (_planes(blocks[:, offset + 128 : offset + 160], 1).reshape(-1, 256) << 4)


def decode_iq2_k(blocks: Bytes) -> Floats:
    """d f16, extra u16, scales 8, qs 64 (2 x 32 in four planes): d * (s - 8) * (codebook[q] + 5 * shift), s per 16.

    The bits of extra are the shifts.
    """
    levels = _shift("kvalues_iq2nl", _planes(blocks[:, 12:].reshape(-1, 2, 32), 2), _bits(blocks[:, 2:4]), 5)
    return _values(levels, _f16(blocks, 0) * (_in_turn(blocks[:, 4:12]).astype(np.float32) - 8))


def decode_iq3_k(blocks: Bytes) -> Floats:
    """d f16, extra u16, signs u16, scales 8, qs 64, qh 32: d * (2 s + 1) * (codebook[q] + 4 * shift), s per 16.

    The bits of extra are the shifts; a bit of signs negates the scale.
    """
    levels = _shift("kvalues_iq3nl", _three_bits(blocks, 14), _bits(blocks[:, 2:4]), 4)
    s = (2 * _in_turn(blocks[:, 6:14]) + 1).astype(np.float32)
    return _values(levels, _f16(blocks, 0) * (s * (1 - 2 * _bits(blocks[:, 4:6]).astype(np.float32))))


def decode_iq4_k(blocks: Bytes) -> Floats:
    """d f16, extra u16, scales 12, qs 128 (8 x 16 in two planes): d * (s - 32) * (codebook[q] + 4 * shift), s per 16.

    The bits of extra are the shifts.
    """
    q = _planes(blocks[:, 16:].reshape(-1, 8, 16), 4)
    return _values(_shift("kvalues_iq4nl", q, _bits(blocks[:, 2:4]), 4), _scales_6_bits(blocks))


def decode_iq5_k(blocks: Bytes) -> Floats:
    """d f16, extra u16, scales 12, qs 128, qh 32: d * (s - 32) * (codebook[q] + 2 * shift), s per 16, as in IQ4_K."""
    return _values(_shift("kvalues_iq5nl", _five_of_256(blocks, 16), _bits(blocks[:, 2:4]), 2), _scales_6_bits(blocks))


def decode_iq6_k(blocks: Bytes) -> Floats:
    """d f16, extra u16, scales 16 int8, qs 128 (4 x 32 in two planes), qh 64 (2 x 32 in four planes).

    d * s * (codebook[q] + shift), s per 16; qh: 2 high bits of q; the bits of extra are the shifts. The codebook is
    what ik_llama.cpp multiplies by on every backend; its dequantize_row_iq6_k alone computes the polynomial that the
    codebook rounds to integers.
    """
    low = _planes(blocks[:, 20:148].reshape(-1, 4, 32), 4).reshape(-1, 256)
    q = low | (_planes(blocks[:, 148:].reshape(-1, 2, 32), 2).reshape(-1, 256) << 4)
    s = blocks[:, 4:20].view(np.int8).astype(np.float32)
    return _values(_shift("kvalues_iq6nl", q, _bits(blocks[:, 2:4]), 1), _f16(blocks, 0) * s)


def decode_iq2_ks(blocks: Bytes, d: Floats) -> Floats:
    """extra u16, scales 4, qs 64 (2 x 32 in four planes): d * (s - 16) * (codebook[q] + 5 * shift), s per 32.

    Bits 0-7 of extra are the shifts, bits 8-15 the fifth bits of the scales; their low halves are those of scales.
    """
    s = _in_turn(blocks[:, 2:6]) | (_bits(blocks[:, 1:2]) << 4)
    levels = _shift("kvalues_iq2nl", _planes(blocks[:, 6:].reshape(-1, 2, 32), 2), _bits(blocks[:, :1]), 5)
    return _values(levels, d * (s.astype(np.float32) - 16))


def decode_iq3_ks(blocks: Bytes, d: Floats) -> Floats:
    """extra u16, scales 4, qs 64, qh 32 as in IQ3_K: d * (s - 16) * (codebook[q] + 4 * shift), s per 32.

    Bits 0-7 of extra are the fifth bits of the scales, bits 8-15 the shifts. scales: s 0-3 in the low, 4-7 in the high
    nibbles.
    """
    s = _low_then_high(blocks[:, 2:6]) | (_bits(blocks[:, :1]) << 4)
    levels = _shift("kvalues_iq3nl", _three_bits(blocks, 6), _bits(blocks[:, 1:2]), 4)
    return _values(levels, d * (s.astype(np.float32) - 16))


def decode_iq4_ks(blocks: Bytes, d: Floats) -> Floats:
    """scales 8, qs 128 (8 x 16 in two planes): d * ((s & 254) - 127) * (codebook[q] + 4 * (s & 1)), s per 32."""
    s = blocks[:, :8]
    levels = _shift("kvalues_iq4nl", _planes(blocks[:, 8:].reshape(-1, 8, 16), 4), s & 1, 4)
    return _values(levels, d * ((s & 254).astype(np.float32) - 127))


def decode_iq5_ks(blocks: Bytes, d: Floats) -> Floats:
    """scales 8, qs 128, qh 32 as in IQ5_K: d * ((s & 254) - 127) * (codebook[q] + 2 * (s & 1)), s per 32."""
    s = blocks[:, :8]
    levels = _shift("kvalues_iq5nl", _five_of_256(blocks, 8), s & 1, 2)
    return _values(levels, d * ((s & 254).astype(np.float32) - 127))


def decode_iq4_kss(blocks: Bytes, d: Floats) -> Floats:
    """64 u16: as IQ4_KS. s is the lowest bits of 8 u16; without these, x of a u16 holds 4 q as x ^ x >> 1."""
    words = _words(blocks, 0, 64, "<u2")
    s = np.packbits((words & np.uint16(1)).astype(np.uint8), axis=-1, bitorder="little")
    x = words & np.uint16(0xFFFE)
    return decode_iq4_ks(np.concatenate([s, (x ^ (x >> 1)).view(np.uint8)], axis=1), d)


def decode_iq2_kl(blocks: Bytes, d: Floats) -> Floats:
    """scales_h u16, scales_l 4, qs 64 (4 x 16 in two planes), qh 16 (eight planes): d * (s - 32) * grid[q], s per 32.

    Two values for each q of 5 bits, the fifth of them in qh. s: 2 high bits each in scales_h; scales_l as in IQ3_KS.
    """
    high = (_words(blocks, 0, 1, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    s = (_low_then_high(blocks[:, 2:6]) | (high << 4)).astype(np.float32) - 32
    low = _planes(blocks[:, 6:70].reshape(-1, 4, 16), 4).reshape(-1, 128)
    return _values(table("iq2kl_grid")[low | (_planes(blocks[:, 70:], 1).reshape(-1, 128) << 4)], d * s)


# ---------------------------------------------------------------- trellis


def _trellis(seeds: Ints, count: int) -> Ints:
    """Return ``count`` levels for each seed, int8 [..., count]: the bytes' sum of a masked random number, less 126.

    The numbers are those of a multiplicative generator that starts at seed + 4096.
    """
    x, levels = seeds.astype(np.uint32) + np.uint32(4096), []
    for _ in range(count):
        x = x * np.uint32(0xCBAC1FED)
        levels.append((x & np.uint32(0x3F3F3F3F))[..., None].view(np.uint8).sum(-1, np.int32) - 126)
    return np.stack(levels, -1).astype(np.int8)


def decode_iq1_kt(blocks: Bytes, d: Floats) -> Floats:
    """sh 8, ql 32, qh 16 (two planes): d * codebook[sh & 15] * trellis[q], 8 values for each q, sh per 32.

    q: a byte of ql, four bits of qh, and bit 4 + k of sh for the k-th q of 32 values.
    """
    q = blocks[:, 8:40].astype(np.uint16) | (_planes(blocks[:, 40:], 4).reshape(-1, 32).astype(np.uint16) << 8)
    q |= _bits(blocks[:, :8]).reshape(-1, 8, 8)[:, :, 4:].reshape(-1, 32).astype(np.uint16) << 12
    return _values(_trellis(q, 8), d * table("kvalues_iq4nl")[blocks[:, :8] & 15].astype(np.float32))


def decode_iq2_kt(blocks: Bytes, d: Floats) -> Floats:
    """scales 4 (two planes), qs 32 u16: d * codebook[s] * trellis[q], 8 values for each q, s per 32."""
    s = table("kvalues_iq4nl")[_planes(blocks[:, :4], 4).reshape(-1, 8)]
    return _values(_trellis(_words(blocks, 4, 32, "<u2"), 8), d * s.astype(np.float32))


def decode_iq3_kt(blocks: Bytes, d: Floats) -> Floats:
    """scales 4 (two planes), qs 32 u16, signs 32 (eight planes): d * s * +-|trellis[q]|, 8 values for each q, s per 32.

    ik_llama.cpp decodes the level 0 with the sign set as -0.
    """
    magnitudes = np.abs(_trellis(_words(blocks, 4, 32, "<u2"), 8)).reshape(-1, 256)
    levels = np.where(_planes(blocks[:, 68:], 1).reshape(-1, 256), -magnitudes, magnitudes)
    return _values(levels, d * _planes(blocks[:, :4], 4).reshape(-1, 8).astype(np.float32))


def decode_iq4_kt(blocks: Bytes, d: Floats) -> Floats:
    """w 8 u32, ql 64, qh 32 (two planes): d * (s - 64) * trellis[q + 32768 * high], 4 values for each q, w per 32.

    w: bit 0 is high, bits 1-7 s, the rest the upper 3 bits of 8 q; others: 4 bits of qh, a byte of ql.
    """
    w = _words(blocks, 0, 8, "<u4")[:, :, None]
    q = blocks[:, 32:96].astype(np.uint32) | (_planes(blocks[:, 96:], 4).reshape(-1, 64).astype(np.uint32) << 8)
    q = q.reshape(-1, 8, 8) | ((w >> np.arange(8, 32, 3, dtype=np.uint32) & 7) << 12) | ((w & 1) << 15)
    s = (w[:, :, 0] >> 1 & 127).astype(np.float32) - 64
    return _values(_trellis(q, 4), d * s)


# ---------------------------------------------------------------- rows


def decode_rows(t: TensorType, rows: Bytes) -> Floats:
    """Return the values, float32 [..., n], of rows of type ``t``, uint8 [..., row_bytes].

    Raises TypeNotSupported if there is no decoder.
    """
    decode: Callable[..., Floats] | None = globals().get(f"decode_{t.name.lower()}")
    if decode is None:
        raise TypeNotSupported(f"no reference decoder for {t.name}", "QK-E302")
    blocks = np.ascontiguousarray(rows[..., t.row_header :]).reshape(-1, t.block_bytes)
    if not t.row_scale:
        return decode(blocks).reshape(*rows.shape[:-1], -1)
    heads = np.ascontiguousarray(rows[..., : t.row_header]).reshape(-1, t.row_header)
    d = _words(heads, 0, 1, {"f32": "<f4", "f16": "<f2"}[t.row_scale]).astype(np.float32)
    return decode(blocks, d.repeat(len(blocks) // len(heads), 0)).reshape(*rows.shape[:-1], -1)
