"""Row-interleaved types: the position of each bit of 4, 8 or 16 rows when they are interleaved.

An interleaved type (_R4, _R8, _R16 of ik_llama.cpp; Q4_0_4X4, Q4_0_4X8 and Q4_0_8X8 of ARM builds) holds the blocks of
a *base* type, rearranged so that a CPU multiplies several rows at once: dwords of the rows alternate, nibbles and bits
of values that are multiplied together share a byte. Values do not change: a layout is a permutation of bits, written
below as data, from which kernels/cpu/interleave.py makes a kernel for each direction.

What permutations do not cover::

    signs       IQ2_XXS, IQ2_XS and IQ3_XXS store 7 signs of 8 and give the last by parity; interleaved, each is the
    parity of
                all up to it, which is linear, too: bits 1 .. 7 of some bytes, see ``Layout.signs``
    flipped     levels that are stored with an offset: a constant is XORed
    Q8_KV_R8    drops the sum of a row's levels, which is counted again
    Q8_K_R8     and Q8_K_R16 interleave activations, Q8_K, which no file holds: deinterleaved they become Q8_0,
                whose scales then repeat, with the same values; there is no inverse
    IQ1_S_R4    and IQ1_M_R4 are distinct formats, with a scale per row: their base types are ``types.ROWS``, which
                no file holds. For files IQ1_S_R4 becomes IQ1_S, whose scales then repeat, with the same values; scales
                of IQ1_M_R4, which may be even, are not among those of IQ1_M

Layouts after ik_llama.cpp 8337e4cd3: ggml/src/iqk/iqk_quantize.cpp, repack_* and dequantize_row_*_r*;
ggml/src/ggml-aarch64.c for ARM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.kernels.tensor_scale import ROW_SCALED, TENSOR_SCALED
from quantkit.types import BY_NAME, TensorType

Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of the rows of an interleaved type in a group of ``type.interleave`` rows.

    A *unit* is rearranged at a time: ``values`` values of each row, one block or several. source_bits: for each bit of
    an interleaved unit, the bit of the rows' units that it holds, these one after another; None if rows can only be
    deinterleaved. target_bits: for each bit of the rows' units, the bit of the interleaved one.
    """

    type: TensorType
    base: TensorType
    values: int
    source_bits: Bits | None
    target_bits: Bits
    #: Bytes of an interleaved unit whose bits 1 .. 7 are running parities.
    signs: npt.NDArray[np.bool_]
    #: The mask that the bytes of an interleaved unit are XORed with.
    xor: npt.NDArray[np.uint8]

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return self.type.interleave

    @property
    def repeats_row_scale(self) -> bool:
        """Whether each block gets the scale of its row."""
        return self.type.row_header == 2 and self.base.row_header == 0

    @property
    def is_exact(self) -> bool:
        """Whether interleaving and deinterleaving restores the bytes."""
        return self.source_bits is not None


# --- bits --------------------------------------------------------------------------------------------------------
#
# Bits are numbered 8 * byte + position. Arrays of them end in an axis of bits, low ones first; joined along it, fields
# become wider. ``rows`` below is [R, bytes of a unit, 8].


def _bits(*shape: int) -> Bits:
    return np.arange(8 * int(np.prod(shape)), dtype=np.int32).reshape(*shape, 8)


def _join(*fields: Bits) -> Bits:
    """Return fields joined bit by bit, the first in the low bits."""
    return np.concatenate(fields, axis=-1)


def _split(field: Bits, width: int) -> Bits:
    """Return bytes [..., n, 8] as [..., n * 8 / width, width], low parts first."""
    return field.reshape(*field.shape[:-2], -1, width)


def _stripes(field: Bits, width: int, per: int) -> Bits:
    """Return the values of bytes [..., n, 8] whose parts of ``width`` bits are ``per`` values apart: [..., 8n/w, w]."""
    lead, parts = field.shape[:-2], 8 // width
    blocks = field.reshape(*lead, -1, per, parts, width)
    return np.moveaxis(blocks, -2, -3).reshape(*lead, -1, width)


def _pack_stripes(values: Bits) -> Bits:
    """Return bytes that hold values [..., width] in order, the first of all bytes low, then the next part of all."""
    width = values.shape[-1]
    parts = 8 // width
    flat = values.reshape(parts, -1, width)
    return np.moveaxis(flat, 0, 1).reshape(-1, 8)


def _by_row(field: Bits, size: int = 1) -> Bits:
    """Return a field [R, n, 8] with its rows alternating after ``size`` bytes: [n / size, R, size, 8]."""
    r, n = field.shape[:2]
    return np.moveaxis(field.reshape(r, n // size, size, 8), 0, 1)


def _bytes_of_levels(levels: Bits, *starts: tuple[int, ...], span: int = 32) -> Bits:
    """Return bytes that each hold levels of one row that are far apart.

    levels: [R, values, width]. In each ``span`` values, every tuple of starts makes a piece: 4 bytes of each row, of
    which byte i holds the values start + i, the first of the tuple in the low bits.
    """
    r, n, width = levels.shape
    indices = np.array(starts)[:, :, None] + np.arange(4)  # [pieces, parts, 4]
    values = levels.reshape(r, n // span, span, width)[:, :, indices]  # [R, n / span, pieces, parts, 4, width]
    return values.transpose(1, 2, 0, 4, 3, 5).reshape(n // span, len(starts), r, 4, -1)


#: The order of nibbles in most types, and of quarters.
NIBBLES = ((0, 8), (16, 24), (4, 12), (20, 28))
QUARTERS = ((0, 4, 8, 12), (16, 20, 24, 28))
EIGHTHS = ((0, 4, 8, 12, 16, 20, 24, 28),)


def _flat(*fields: Bits) -> Bits:
    """Return fields as bytes one after another, flat."""
    return np.concatenate([field.reshape(-1) for field in fields])


# --- layouts -----------------------------------------------------------------------------------------------------


def _dwords(rows: Bits, scale: int) -> Bits:
    """A scale of some bytes, then levels: dwords alternate."""
    return _flat(rows[:, :scale], _by_row(rows[:, scale:], 4))


def _plain_nibbles(rows: Bits) -> Bits:
    return _flat(rows[:, :2], _bytes_of_levels(_stripes(rows[:, 2:18], 4, 16), *NIBBLES))


def _q5_0(rows: Bits) -> Bits:
    high = _split(rows[:, 2:6], 1)
    order = (0, 16, 4, 20, 8, 24, 12, 28)
    return _flat(rows[:, :2], _bytes_of_levels(high, order), _bytes_of_levels(_stripes(rows[:, 6:], 4, 16), *NIBBLES))


def _q6_0(rows: Bits) -> Bits:
    # Byte j of qh: values j, j + 16 and then j + 8, j + 24.
    pairs = _split(rows[:, 2:10], 2).reshape(-1, 8, 2, 2, 2)
    high = pairs.transpose(0, 3, 2, 1, 4).reshape(-1, 32, 2)
    return _flat(
        rows[:, :2], _bytes_of_levels(high, *QUARTERS), _bytes_of_levels(_stripes(rows[:, 10:], 4, 16), *NIBBLES)
    )


def _pair_scales(rows: Bits) -> tuple[Bits, Bits]:
    """Return scales and minimums of Q4_K and Q5_K, [R, 8, 6] each."""
    low = rows[:, 4:8]
    mid = rows[:, 8:12]
    high = rows[:, 12:16]
    scales = [low[..., :6], _join(high[..., :4], low[..., 6:])]
    mins = [mid[..., :6], _join(high[..., 4:], mid[..., 6:])]
    return np.concatenate(scales, axis=1), np.concatenate(mins, axis=1)


def _k_head(rows: Bits) -> Bits:
    scales, mins = (x.swapaxes(0, 1) for x in _pair_scales(rows))
    high = _pack_stripes(_join(scales[..., 4:], mins[..., 4:]))
    return _flat(rows[:, 0:2], rows[:, 2:4], high, _join(scales[..., :4], mins[..., :4]))


def _q4_k(rows: Bits) -> Bits:
    return _flat(_k_head(rows), _bytes_of_levels(_stripes(rows[:, 16:], 4, 32), *NIBBLES))


def _q5_k(rows: Bits) -> Bits:
    high = _stripes(rows[:, 16:48], 1, 32)
    levels = _bytes_of_levels(_stripes(rows[:, 48:], 4, 32), *NIBBLES)
    return _flat(_k_head(rows), _bytes_of_levels(high, (0, 8, 4, 12, 16, 24, 20, 28)), levels)


def _q6_k(rows: Bits) -> Bits:
    # Of each 128 values, byte l of 64 holds l and l + 64.
    low = _stripes(rows[:, :128], 4, 64)
    high = _stripes(rows[:, 128:192], 2, 32)
    scales = _by_row(rows[:, 192:208])
    quarters = ((0, 8, 4, 12), (16, 24, 20, 28))
    return _flat(rows[:, 208:], scales, _bytes_of_levels(high, *quarters), _bytes_of_levels(low, *NIBBLES))


def _q2_k(rows: Bits) -> Bits:
    levels = _bytes_of_levels(_stripes(rows[:, 16:80], 2, 32), *QUARTERS)
    return _flat(rows[:, 80:82], rows[:, 82:84], _by_row(rows[:, :16]), levels)


def _q3_k(rows: Bits) -> Bits:
    low, high = _stripes(rows[:, 96:104], 4, 8), _stripes(rows[:, 104:108], 2, 4)  # 16 scales of 4 + 2 bits
    stripes = [_pack_stripes(x.swapaxes(0, 1).reshape(-1, x.shape[-1])) for x in (high, low)]
    levels = _bytes_of_levels(_stripes(rows[:, 32:96], 2, 32), *QUARTERS)
    return _flat(rows[:, 108:], *stripes, _bytes_of_levels(_stripes(rows[:, :32], 1, 32), *EIGHTHS), levels)


def _shifts(rows: Bits) -> Bits:
    """The shifts of 16 sub-blocks, a word of each row: those of the even ones in a byte, then of the odd ones."""
    return _split(rows, 1).reshape(len(rows), 8, 2).transpose(2, 0, 1)


def _sub_scales(*fields: Bits) -> list[Bits]:
    """Return fields of the scales of sub-blocks, [R, 16 or 8, width], packed."""
    return [_pack_stripes(x.swapaxes(0, 1).reshape(-1, x.shape[-1])) for x in fields]


def _iq2_k(rows: Bits) -> Bits:
    scales = _sub_scales(_split(rows[:, 4:12], 4))
    return _flat(
        rows[:, :2], _shifts(rows[:, 2:4]), *scales, _bytes_of_levels(_stripes(rows[:, 12:], 2, 32), *QUARTERS)
    )


def _iq3_k(rows: Bits) -> Bits:
    scales = _sub_scales(_split(rows[:, 4:6], 1), _split(rows[:, 6:14], 4))
    low, high = _stripes(rows[:, 14:78], 2, 32), _stripes(rows[:, 78:], 1, 32)
    return _flat(
        rows[:, :2], _shifts(rows[:, 2:4]), *scales, _bytes_of_levels(low, *QUARTERS), _bytes_of_levels(high, *EIGHTHS)
    )


def _iq4_k(rows: Bits) -> Bits:
    scales = _sub_scales(_split(rows[:, 4:8], 2), _split(rows[:, 8:16], 4))
    levels = _bytes_of_levels(_stripes(rows[:, 16:144], 4, 16), *NIBBLES)
    return _flat(rows[:, :2], _shifts(rows[:, 2:4]), *scales, levels)


def _iq5_levels(low: Bits, high: Bits) -> Bits:
    bits = _bytes_of_levels(_stripes(high, 1, 32), (0, 8, 16, 24, 4, 12, 20, 28))
    return _flat(_bytes_of_levels(_stripes(low, 4, 32), *NIBBLES), bits)


def _iq5_k(rows: Bits) -> Bits:
    scales = _sub_scales(_split(rows[:, 4:8], 2), _split(rows[:, 8:16], 4))
    return _flat(rows[:, :2], _shifts(rows[:, 2:4]), *scales, _iq5_levels(rows[:, 16:144], rows[:, 144:]))


def _iq4_ks(rows: Bits) -> Bits:
    return _flat(_by_row(rows[:, :8]), _bytes_of_levels(_stripes(rows[:, 8:], 4, 16), *NIBBLES))


def _iq5_ks(rows: Bits) -> Bits:
    return _flat(_by_row(rows[:, :8]), _iq5_levels(rows[:, 8:136], rows[:, 136:]))


def _iq4_xs(rows: Bits) -> Bits:
    scales = _sub_scales(_split(rows[:, 2:4], 2), _split(rows[:, 4:8], 4))
    levels = _bytes_of_levels(_stripes(rows[:, 8:], 4, 16), (0, 4), (8, 12), (16, 20), (24, 28))
    return _flat(rows[:, :2], *scales, levels)


def _iq2_bn(rows: Bits) -> Bits:
    quarters = [tuple(16 * part + start for start in (0, 4, 8, 12)) for part in range(4)]
    return _flat(_bytes_of_levels(_stripes(rows, 2, 16), *quarters, span=64))


def _signs_and_scale(words: Bits) -> Bits:
    """Words [R, n, 4, 8] of four times 7 signs and a scale of 4 bits: four bytes, each a bit of the scale, 7 signs."""
    bits = words.reshape(*words.shape[:2], 32)
    signs, scale = bits[..., :28].reshape(*bits.shape[:2], 4, 7), bits[..., 28:, None]
    return np.concatenate([scale, signs], axis=-1).swapaxes(0, 1)


def _iq2_xxs(rows: Bits) -> Bits:
    parts = rows[:, 2:].reshape(len(rows), 8, 2, 4, 8)
    return _flat(rows[:, :2], _signs_and_scale(parts[:, :, 1]), parts[:, :, 0].swapaxes(0, 1))


def _iq3_xxs(rows: Bits) -> Bits:
    words = rows[:, 66:].reshape(len(rows), 8, 4, 8)
    return _flat(rows[:, :2], _signs_and_scale(words), _by_row(rows[:, 2:66], 8))


def _iq2_xs(rows: Bits) -> Bits:
    return _flat(rows[:, :2], _by_row(rows[:, 2:66], 8), _by_row(rows[:, 66:]))


def _iq2_s(rows: Bits) -> Bits:
    levels, signs = _by_row(rows[:, 2:34], 4), _by_row(rows[:, 34:66], 4)
    return _flat(rows[:, :2], levels, _by_row(rows[:, 66:74]), signs, _by_row(rows[:, 74:]))


def _iq3_s(rows: Bits) -> Bits:
    # Indices of groups i and i + 4 of a sub-block are neighbours, a dword of the 4 rows each.
    levels = rows[:, 2:66].reshape(-1, 8, 2, 4, 8).transpose(1, 3, 2, 0, 4)
    # Byte i holds the signs of values 4 j + i.
    signs = rows[:, 74:106].reshape(-1, 8, 4, 2, 4).transpose(1, 0, 4, 2, 3)
    return _flat(rows[:, :2], levels, _by_row(rows[:, 66:74]), signs, *_sub_scales(_split(rows[:, 106:], 4)))


def _arm(size: int) -> Callable[[Bits], Bits]:
    return lambda rows: _flat(rows[:, :2], _by_row(rows[:, 2:], size))


def _iq1_s(rows: Bits) -> Bits:
    return _flat(_by_row(rows[:, :4]), rows[:, 4:])


def _iq1_m(rows: Bits) -> Bits:
    return _flat(_by_row(rows[:, :4]), _by_row(rows[:, 4:6]), rows[:, 6:])


def _q8_0_of_q8_k(rows: int) -> Bits:
    """The bits of Q8_0 rows in a group of Q8_K_R8 or Q8_K_R16: a half float of each row, then dwords in turn."""
    interleaved = _bits(258 * rows)
    scales = interleaved[: 2 * rows].reshape(rows, 1, 2, 8).repeat(8, axis=1)
    levels = interleaved[2 * rows :].reshape(64, rows, 4, 8).swapaxes(0, 1).reshape(rows, 8, 32, 8)
    return np.concatenate([scales, levels], axis=2).reshape(-1)


def _iq1_s_of_r4() -> Bits:
    """The bits of IQ1_S rows in 8 blocks of IQ1_S_R4; their scales, which are the rows', are written afterwards."""
    blocks = _bits(8, 24)
    index = blocks[:, :16].reshape(8, 4, 4, 8).transpose(2, 0, 1, 3).reshape(4, 32, 8)
    high = blocks[:, 16:].reshape(8, 4, 2, 8).swapaxes(0, 1).reshape(4, 16, 8)
    return np.concatenate([high[:, :2], index, high], axis=1).reshape(-1)


# --- the registry --------------------------------------------------------------------------------------------------

#: Interleaved type: the base type, the values of a unit, the layout.
_EXACT: dict[str, tuple[str, int, Callable[[Bits], Bits]]] = {
    "Q4_0_4X4": ("Q4_0", 32, _arm(4)),
    "Q4_0_4X8": ("Q4_0", 32, _arm(8)),
    "Q4_0_8X8": ("Q4_0", 32, _arm(8)),
    "Q4_0_R8": ("Q4_0", 32, lambda rows: _dwords(rows, 2)),
    "Q5_0_R4": ("Q5_0", 32, _q5_0),
    "Q6_0_R4": ("Q6_0", 32, _q6_0),
    "Q8_0_R8": ("Q8_0", 32, lambda rows: _dwords(rows, 2)),
    "Q8_KV_R8": ("Q8_KV", 32, lambda rows: _dwords(rows, 0)),
    "MXFP4_R8": ("MXFP4", 32, lambda rows: _dwords(rows, 1)),
    "Q2_K_R4": ("Q2_K", 256, _q2_k),
    "Q3_K_R4": ("Q3_K", 256, _q3_k),
    "Q4_K_R4": ("Q4_K", 256, _q4_k),
    "Q5_K_R4": ("Q5_K", 256, _q5_k),
    "Q6_K_R4": ("Q6_K", 256, _q6_k),
    "IQ2_XXS_R4": ("IQ2_XXS", 256, _iq2_xxs),
    "IQ2_XS_R4": ("IQ2_XS", 256, _iq2_xs),
    "IQ2_S_R4": ("IQ2_S", 256, _iq2_s),
    "IQ3_XXS_R4": ("IQ3_XXS", 256, _iq3_xxs),
    "IQ3_S_R4": ("IQ3_S", 256, _iq3_s),
    "IQ4_NL_R4": ("IQ4_NL", 32, _plain_nibbles),
    "IQ4_XS_R8": ("IQ4_XS", 256, _iq4_xs),
    "IQ2_BN_R4": ("IQ2_BN", 64, _iq2_bn),
    "IQ2_K_R4": ("IQ2_K", 256, _iq2_k),
    "IQ3_K_R4": ("IQ3_K", 256, _iq3_k),
    "IQ4_K_R4": ("IQ4_K", 256, _iq4_k),
    "IQ5_K_R4": ("IQ5_K", 256, _iq5_k),
    "IQ4_KS_R4": ("IQ4_KS", 256, _iq4_ks),
    "IQ5_KS_R4": ("IQ5_KS", 256, _iq5_ks),
    "IQ1_S_R4": ("IQ1_S_ROW", 32, _iq1_s),
    "IQ1_M_R4": ("IQ1_M_ROW", 32, _iq1_m),
    "BF16_R16": ("BF16", 2, lambda rows: _flat(_by_row(rows, 4))),
}
#: Interleaved types that can only be deinterleaved, to another type with the same values.
_ONE_WAY: dict[str, tuple[str, Callable[[], Bits]]] = {
    "Q8_K_R8": ("Q8_0", lambda: _q8_0_of_q8_k(8)),
    "Q8_K_R16": ("Q8_0", lambda: _q8_0_of_q8_k(16)),
    "IQ1_S_R4": ("IQ1_S", _iq1_s_of_r4),
}
#: Bytes of an interleaved unit with signs: (first, end, step).
_SIGNS = {"IQ2_XXS_R4": (8, 136, 1), "IQ3_XXS_R4": (8, 136, 1), "IQ2_XS_R4": (9, 264, 2)}
#: A byte that all bytes of an interleaved unit from a position on are XORed with: (byte, first).
_FLIPPED = {"Q4_0_4X4": (0x88, 8), "Q4_0_4X8": (0x88, 8), "Q4_0_8X8": (0x88, 16), "Q8_K_R16": (0x80, 32)}

#: The base types of interleaved types, by name, and the inverse (of several types, ik's).
BASES: dict[str, str] = {**{n: r[0] for n, r in _ONE_WAY.items()}, **{name: row[0] for name, row in _EXACT.items()}}
INTERLEAVED: dict[str, str] = {row[0]: name for name, row in _EXACT.items() if BY_NAME[name].id > 100}


def can_interleave(t: TensorType, *shape: int) -> bool:
    """Return whether a tensor of ggml shape ``shape`` can be interleaved: whole groups of rows, whole units."""
    rows = shape[1] if len(shape) > 1 else 1
    return rows % t.interleave == 0 and shape[0] % layout_of(t, shape[0]).values == 0


def is_interleaved(t: TensorType) -> bool:
    """Return whether type ``t`` is interleaved."""
    return t.name in BASES


def base_of(t: TensorType) -> TensorType:
    """Return the type of the single rows of an interleaved type, on which kernels work; any other type itself."""
    return BY_NAME[BASES.get(t.name, t.name)]


def plain_of(t: TensorType) -> TensorType | None:
    """Return the type in which files hold single rows of an interleaved type, or None; of other types itself."""
    if base_of(t).in_files:
        return base_of(t)
    return BY_NAME[_ONE_WAY[t.name][0]] if t.name in _ONE_WAY else None


def repacks(source: TensorType, target: TensorType) -> bool:
    """Return whether conversion from one type to another only changes the order of bytes (repacking)."""
    if source is target:
        return False
    if source is TENSOR_SCALED:
        return target is ROW_SCALED
    if not is_interleaved(target):
        return plain_of(source) is target
    return base_of(source) is base_of(target) and layout_of(target).is_exact


def interleaved_of(t: TensorType) -> TensorType | None:
    """Return the interleaved type that holds rows of type ``t`` without loss, or None."""
    return BY_NAME[INTERLEAVED[t.name]] if t.name in INTERLEAVED else None


@cache
def layout_of(t: TensorType, n: int = 0, row_type: TensorType | None = None) -> Layout:
    """Return the layout of an interleaved type for rows of ``n`` values. Raises TypeNotSupported if there is none.

    ``row_type``: the type of single rows, by default the base type.
    """
    if t.name not in BASES:
        raise TypeNotSupported(f"{t.name} is not an interleaved type")
    row_type = row_type or base_of(t)
    if t.name in _EXACT and row_type is base_of(t):
        _, values, make = _EXACT[t.name]
        if values < 32 and n % 32 == 0:  # BF16_R16: pairs, many together
            values = 32
        nbytes = values // row_type.block * row_type.block_bytes
        source_bits = make(_bits(t.interleave, nbytes)).astype(np.int32)
        target_bits = np.argsort(source_bits).astype(np.int32)
        return Layout(
            t,
            row_type,
            values,
            source_bits,
            target_bits,
            _signs(t, source_bits.size // 8),
            _flips(t, source_bits.size // 8),
        )
    if t.name not in _ONE_WAY or row_type is not plain_of(t):
        raise TypeNotSupported(f"{t.name} cannot be deinterleaved to {row_type.name}")
    target_bits, nbytes = _ONE_WAY[t.name][1](), t.interleave * 256 // t.block * t.block_bytes
    return Layout(t, row_type, 256, None, target_bits.astype(np.int32), _signs(t, nbytes), _flips(t, nbytes))


def _signs(t: TensorType, nbytes: int) -> npt.NDArray[np.bool_]:
    out = np.zeros(nbytes, bool)
    if t.name in _SIGNS:
        out[slice(*_SIGNS[t.name])] = True
    return out


def _flips(t: TensorType, nbytes: int) -> npt.NDArray[np.uint8]:
    out = np.zeros(nbytes, np.uint8)
    if t.name in _FLIPPED:
        byte, first = _FLIPPED[t.name]
        out[first:] = byte
    return out
