"""Types as integers: where the bits of levels and scales lie in a block, and their values.

A value is ``d * factor[s] * (level[q] + shift) - dmin * m`` with integers q for each value, s and m for each sub-block,
and floats d and dmin for a super-block, or a row. Where groups of columns share a q, their levels are those of a grid
(grids.py). Encoders search all of these and pack them; error feedback, which has another criterion, reads the integers
of an encoder's bytes, changes them, and writes them back.

*Fields* are arrays [fields, bits] of bit positions in a block, lowest bit first; bit i of byte b is 8 b + i. Planes are
those of reference.py, the specification of these tables: tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import TypeNotSupported
from quantkit.kernels import grids
from quantkit.kernels.grids import Grid
from quantkit.kernels.tables import table
from quantkit.types import BY_NAME, TensorType

Bits = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Levels:
    """Bit fields and codebook of a type: where its integers are stored, and their values.

    levels: fields of the q of a block's values. codebook: the level of each q, float32 [2^bits]. span: values of a
    sub-block. scale: fields of s, with factors; None: every factor is 1. d: where the scale of the super-block is, as
    in ``TensorType.scales``; "": it is 1. minimum: fields of m; None: m is 1 if there is a dmin. dmin: as d; "": there
    are no minimums. added: the minimum is added, not subtracted. shift: fields of one bit a sub-block, which adds
    ``shift_step`` to its levels. grid: where levels come from a grid, by groups; then ``levels`` has the fields of
    groups, and there is no codebook. columns: the columns of these groups, as in ``Grouping``.
    """

    type: TensorType
    levels: Bits
    codebook: F32
    span: int
    d: str = ""
    scale: Bits | None = None
    factors: F32 | None = None
    dmin: str = ""
    minimum: Bits | None = None
    added: bool = False
    shift: Bits | None = None
    shift_step: float = 0.0
    grid: Grid | None = None
    columns: tuple[int, ...] = ()

    @property
    def has_half_scales(self) -> bool:
        """Whether d, if there is one, is a half float."""
        return "f32" not in self.d

    @property
    def grouping(self) -> Grouping | None:
        """Groups of columns with one q; None if each column has its own."""
        return None if self.grid is None else Grouping(self.grid.columns, self.columns)

    def levels_of(self, q: npt.NDArray[np.unsignedinteger[Any]], shift: U8 | None) -> F32:
        """Return the levels, float32 [rows, n], of the q and shifts of rows."""
        if self.grid is None:
            plain: F32 = self.codebook[q]
            return plain
        codebook = None if shift is None else np.repeat(shift, q.shape[1] // shift.shape[1], axis=1)
        levels = self.grid.levels(q.astype(np.uint32), codebook).reshape(len(q), -1)
        if not self.columns:
            return levels
        out = np.empty_like(levels)
        out[:, Grouping(self.grid.columns, self.columns).order(levels.shape[1])] = levels
        return out


@dataclass(frozen=True)
class Grouping:
    """Columns whose levels come from one index.

    size: columns of a group. columns: the columns of the first groups, as often repeated as needed; (): in their order.
    """

    size: int
    columns: tuple[int, ...] = ()

    def order(self, n: int) -> npt.NDArray[np.int64]:
        """Return the columns, int64 [n], group after group."""
        if not self.columns:
            return np.arange(n)
        first = np.arange(0, n, len(self.columns))
        columns: npt.NDArray[np.int64] = (first[:, None] + np.array(self.columns)).ravel()
        return columns


@dataclass(eq=False)
class Integers:
    """The integers and floats of some rows of n values, as ``read`` returns and ``write`` takes them.

    q: uint8 [rows, n], of a grid uint32 [rows, groups]. s, m, shift: uint8 [rows, n / span], None where the type has
    none. d, dmin: float32 [rows, super-blocks], or [rows, 1] where it is the row's; None where the type has none.
    """

    q: U8 | U32
    s: U8 | None
    m: U8 | None
    shift: U8 | None
    d: F32 | None
    dmin: F32 | None


# ---------------------------------------------------------------- positions of bits


def field(offset: int, shift: int, bits: int, count: int) -> Bits:
    """Return ``count`` fields of ``bits``, from bit ``shift`` on of the bytes from ``offset`` on."""
    return 8 * (offset + np.arange(count))[:, None] + shift + np.arange(bits)


def in_turn(offset: int, nbytes: int, bits: int) -> Bits:
    """Return the fields of bytes, one byte after the other."""
    begin = 8 * (offset + np.arange(nbytes))[:, None] + np.arange(0, 8, bits)
    return begin.reshape(-1, 1) + np.arange(bits)


def planes(offset: int, nbytes: int, bits: int, runs: int = 1) -> Bits:
    """Return the fields of ``runs`` runs of bytes, in each plane after plane."""
    run = [offset + nbytes * i for i in range(runs)]
    return np.concatenate([field(begin, shift, bits, nbytes) for begin in run for shift in range(0, 8, bits)])


def words(offset: int, nbytes: int, count: int, shift: int, bits: int, step: int = 0, per: int = 1) -> Bits:
    """Return fields of ``count`` words, from bit ``shift`` on; ``per`` of a word, ``step`` bits apart."""
    begin = 8 * (offset + nbytes * np.arange(count))[:, None] + shift + step * np.arange(per)
    return begin.reshape(-1, 1) + np.arange(bits)


def join(*parts: Bits) -> Bits:
    """Return fields whose bits lie apart, the lowest first."""
    return np.concatenate(parts, axis=1)


# ---------------------------------------------------------------- the types


def _arange(n: int, first: int = 0) -> F32:
    return np.arange(first, first + n, dtype=np.float32)


def _odd(n: int) -> F32:
    return 2 * _arange(n) - (n - 1)


def _nonlinear(bits: str) -> F32:
    return table(f"kvalues_{bits}nl").astype(np.float32)[: 1 << int(bits[2:])]


def _int8() -> F32:
    return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)


def _ue4m3() -> F32:
    """Half of each unsigned E4M3."""
    code = np.arange(256) & 127
    exponent, mantissa = code >> 3, (code & 7).astype(np.float32)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    return np.where(code == 0x7F, 0, value / 2).astype(np.float32)


def _k_scales() -> tuple[Bits, Bits]:
    """Return the fields of s and of m of Q4_K and Q5_K."""
    s = np.concatenate([field(4, 0, 6, 4), join(field(12, 0, 4, 4), field(4, 6, 2, 4))])
    m = np.concatenate([field(8, 0, 6, 4), join(field(12, 4, 4, 4), field(8, 6, 2, 4))])
    return s, m


@cache
def all_levels() -> dict[str, Levels]:
    """Return the description of every type that has one, by name."""
    iq4 = table("kvalues_iq4nl").astype(np.float32)
    fp4 = table("kvalues_fp4").astype(np.float32)
    s, m = _k_scales()
    odd = 2 * _arange(16) + 1
    kss = tuple(int(c) for k in range(0, 16, 2) for c in (k, k + 16, k + 1, k + 17))
    six = join(in_turn(8, 8, 4), in_turn(4, 4, 2))

    def entry(name: str, levels: Bits, codebook: F32, span: int, d: str = "", **fields: object) -> Levels:
        return Levels(BY_NAME[name], levels, codebook, span, d, **fields)  # type: ignore[arg-type]

    def on(grid: Grid, name: str, levels: Bits, span: int, d: str, **fields: object) -> Levels:
        return entry(name, levels, np.zeros(0, np.float32), span, d, grid=grid, **fields)

    rows = (
        entry("Q4_0", planes(2, 16, 4), _arange(16, -8), 32, "f16@0"),
        entry("Q4_1", planes(4, 16, 4), _arange(16), 32, "f16@0", dmin="f16@2", added=True),
        entry("Q5_0", join(planes(6, 16, 4), in_turn(2, 4, 1)), _arange(32, -16), 32, "f16@0"),
        entry("Q5_1", join(planes(8, 16, 4), in_turn(4, 4, 1)), _arange(32), 32, "f16@0", dmin="f16@2", added=True),
        entry("Q8_0", field(2, 0, 8, 32), _int8(), 32, "f16@0"),
        entry("Q6_0", join(planes(10, 16, 4), planes(2, 8, 2).reshape(4, 8, 2)[[0, 2, 1, 3]].reshape(32, 2)),
           _arange(64, -32), 32, "f16@0"),
        entry("Q2_K", planes(16, 32, 2, 2), _arange(4), 16, "f16@80", scale=field(0, 0, 4, 16), factors=_arange(16),
           dmin="f16@82", minimum=field(0, 4, 4, 16)),
        entry("Q3_K", join(planes(32, 32, 2, 2), planes(0, 32, 1)), _arange(8, -4), 16, "f16@108",
           scale=join(planes(96, 8, 4), planes(104, 4, 2)), factors=_arange(64, -32)),
        entry("Q4_K", planes(16, 32, 4, 4), _arange(16), 32, "f16@0", scale=s, factors=_arange(64), dmin="f16@2",
           minimum=m),
        entry("Q5_K", join(planes(48, 32, 4, 4), planes(16, 32, 1)), _arange(32), 32, "f16@0", scale=s,
           factors=_arange(64), dmin="f16@2", minimum=m),
        entry("Q6_K", join(planes(0, 64, 4, 2), planes(128, 32, 2, 2)), _arange(64, -32), 16, "f16@208",
           scale=field(192, 0, 8, 16), factors=_int8()),
        entry("IQ4_NL", planes(2, 16, 4), iq4, 32, "f16@0"),
        entry("IQ4_XS", planes(8, 16, 4, 8), iq4, 32, "f16@0", scale=join(in_turn(4, 4, 4), in_turn(2, 2, 2)),
           factors=_arange(64, -32)),
        entry("MXFP4", planes(1, 16, 4), fp4, 32, scale=field(0, 0, 8, 1),
           factors=np.ldexp(np.float32(1), np.arange(256) - 128)),
        entry("NVFP4", planes(4, 8, 4, 4), fp4, 16, scale=field(0, 0, 8, 4), factors=_ue4m3()),
        entry("IQ2_K", planes(12, 32, 2, 2), _nonlinear("iq2"), 16, "f16@0",
           scale=in_turn(4, 8, 4), factors=_arange(16, -8), shift=in_turn(2, 2, 1), shift_step=5),
        entry("IQ3_K", join(planes(14, 32, 2, 2), planes(78, 32, 1)), _nonlinear("iq3"), 16,
           "f16@0", scale=join(in_turn(6, 8, 4), in_turn(4, 2, 1)), factors=np.concatenate([odd, -odd]),
           shift=in_turn(2, 2, 1), shift_step=4),
        entry("IQ4_K", planes(16, 16, 4, 8), iq4, 16, "f16@0", scale=six, factors=_arange(64, -32),
           shift=in_turn(2, 2, 1), shift_step=4),
        entry("IQ5_K", join(planes(16, 32, 4, 4), planes(144, 32, 1)), _nonlinear("iq5"), 16, "f16@0", scale=six,
           factors=_arange(64, -32), shift=in_turn(2, 2, 1), shift_step=2),
        entry("IQ6_K", join(planes(20, 32, 4, 4), planes(148, 32, 2, 2)), _nonlinear("iq6"), 16, "f16@0",
           scale=field(4, 0, 8, 16), factors=_int8(), shift=in_turn(2, 2, 1), shift_step=1),
        entry("IQ2_KS", planes(6, 32, 2, 2), _nonlinear("iq2"), 32, "row:f16@0",
           scale=join(in_turn(2, 4, 4), in_turn(1, 1, 1)), factors=_arange(32, -16), shift=in_turn(0, 1, 1),
           shift_step=5),
        entry("IQ3_KS", join(planes(6, 32, 2, 2), planes(70, 32, 1)), _nonlinear("iq3"), 32, "row:f16@0",
           scale=join(planes(2, 4, 4), in_turn(0, 1, 1)), factors=_arange(32, -16), shift=in_turn(1, 1, 1),
           shift_step=4),
        entry("IQ4_KS", planes(8, 16, 4, 8), iq4, 32, "row:f32@0", scale=field(0, 1, 7, 8), factors=_odd(128),
           shift=field(0, 0, 1, 8), shift_step=4),
        entry("IQ5_KS", join(planes(8, 32, 4, 4), planes(136, 32, 1)), _nonlinear("iq5"), 32, "row:f32@0",
           scale=field(0, 1, 7, 8), factors=_odd(128), shift=field(0, 0, 1, 8), shift_step=2),
        entry("TQ2_0", planes(0, 32, 2, 2), np.array([-1, 0, 1, 1], np.float32), 256, "f16@64"),
        entry("Q2_0", in_turn(2, 16, 2), _arange(4, -1), 64, "f16@0"),
        entry("Q1_0", in_turn(2, 16, 1), np.array([-1, 1], np.float32), 128, "f16@0"),
        on(grids.ternary(False), "IQ1_S", join(field(2, 0, 8, 32), words(34, 2, 8, 0, 3, 3, 4)), 32, "f16@0",
           scale=words(34, 2, 8, 12, 3), factors=odd[:8], shift=words(34, 2, 8, 15, 1), shift_step=-0.25),
        on(grids.ternary(True), "IQ1_M", join(field(0, 0, 8, 32), in_turn(32, 16, 4)), 16, "nibbles@48",
           scale=words(48, 2, 4, 0, 3, 3, 4), factors=odd[:8]),
        on(grids.magnitudes("iq2xxs_grid", 7), "IQ2_XXS", join(words(2, 8, 8, 0, 8, 8, 4), words(2, 8, 8, 32, 7, 7, 4)),
           32, "f16@0", scale=words(2, 8, 8, 60, 4), factors=odd / 8),
        on(grids.magnitudes("iq2xs_grid", 7), "IQ2_XS", words(2, 2, 32, 0, 16), 16, "f16@0", scale=in_turn(66, 8, 4),
           factors=odd / 8),
        on(grids.magnitudes("iq2s_grid", 8), "IQ2_S",
           join(field(2, 0, 8, 32), in_turn(66, 8, 2), field(34, 0, 8, 32)), 16, "f16@0", scale=in_turn(74, 8, 4),
           factors=odd / 8),
        on(grids.magnitudes("iq3xxs_grid", 7, 2), "IQ3_XXS", join(words(2, 2, 32, 0, 16), words(66, 4, 8, 0, 7, 7, 4)),
           32, "f16@0", scale=words(66, 4, 8, 28, 4), factors=odd / 4),
        on(grids.magnitudes("iq3s_grid", 4), "IQ3_S", join(field(2, 0, 8, 64), in_turn(66, 8, 1), in_turn(74, 32, 4)),
           32, "f16@0", scale=in_turn(106, 4, 4), factors=odd),
        on(grids.even_levels(), "IQ4_KSS", words(0, 2, 64, 1, 15), 32, "row:f32@0",
           scale=words(0, 2, 64, 0, 1).reshape(8, 8)[:, 1:], factors=_odd(128), shift=words(0, 16, 8, 0, 1),
           shift_step=4, columns=kss),
        on(Grid(table("iq2kl_grid").astype(np.float32)), "IQ2_KL", join(planes(6, 16, 4, 4), planes(70, 16, 1)), 32,
           "row:f16@0", scale=join(planes(2, 4, 4), in_turn(0, 2, 2)), factors=_arange(64, -32)),
        on(grids.trellis(8, 13), "IQ1_KT", join(field(8, 0, 8, 32), planes(40, 16, 4), words(0, 1, 8, 4, 1, 1, 4)), 32,
           "row:f32@0", scale=field(0, 0, 4, 8), factors=iq4),
        on(grids.trellis(8), "IQ2_KT", words(4, 2, 32, 0, 16), 32, "row:f32@0", scale=planes(0, 4, 4), factors=iq4),
        on(grids.trellis(8, signs=8), "IQ3_KT", join(words(4, 2, 32, 0, 16), planes(68, 32, 1).reshape(32, 8)), 32,
           "row:f32@0", scale=planes(0, 4, 4), factors=_arange(16)),
        on(grids.trellis(4, codebooks=2), "IQ4_KT",
           join(field(32, 0, 8, 64), planes(96, 32, 4), words(0, 4, 8, 8, 3, 3, 8)), 32, "row:f32@0",
           scale=words(0, 4, 8, 1, 7), factors=_arange(128, -64), shift=words(0, 4, 8, 0, 1)),
    )  # fmt: skip
    return {row.type.name: row for row in rows}


def levels_of(t: TensorType) -> Levels:
    """Return the integer layout of type ``t``. Raises TypeNotSupported if it has none."""
    try:
        return all_levels()[t.name]
    except KeyError:
        raise TypeNotSupported(f"this version has no error feedback for {t}", "QK-E302") from None


# ---------------------------------------------------------------- reading and writing


def _gather(bits: U8, fields: Bits, dtype: type[np.unsignedinteger[Any]] = np.uint8) -> Any:
    out = np.zeros((len(bits), len(fields)), dtype)
    for i in range(fields.shape[1]):
        out |= bits[:, fields[:, i]].astype(dtype) << dtype(i)
    return out


def _scatter(bits: U8, fields: Bits, values: npt.NDArray[np.unsignedinteger[Any]]) -> None:
    for i in range(fields.shape[1]):
        bits[:, fields[:, i]] = values >> values.dtype.type(i) & 1


def float_bits(kind: str) -> Bits:
    """Return the bits of a d or dmin, of its block or of its row's header, as a field."""
    name, _, offset = kind.removeprefix("row:").partition("@")
    if name == "nibbles":
        return words(int(offset), 2, 4, 12, 4).reshape(1, 16)
    return words(int(offset), 1, 1, 0, {"f16": 16, "f32": 32}[name])


def _float_types(field: Bits) -> tuple[Any, Any]:
    """Return the dtypes of a float's bits and of itself."""
    return (np.uint16, np.float16) if field.shape[1] == 16 else (np.uint32, np.float32)


def _floats(kind: str, of_row: U8, of_block: U8) -> F32 | None:
    if not kind:
        return None
    where = float_bits(kind)
    bits, dtype = _float_types(where)
    values: F32 = _gather(of_row if kind.startswith("row:") else of_block, where, bits).view(dtype).astype(np.float32)
    return values.reshape(len(of_row), -1)


def _set_floats(kind: str, of_row: U8, of_block: U8, floats: F32) -> None:
    where = float_bits(kind)
    bits, dtype = _float_types(where)
    values = floats.reshape(-1, 1).astype(dtype).view(bits)
    _scatter(of_row if kind.startswith("row:") else of_block, where, values)


def _unpack_bits(t: TensorType, rows: U8) -> tuple[U8, U8]:
    """Return the bits of rows' headers and of their blocks."""
    blocks = np.ascontiguousarray(rows[:, t.row_header :]).reshape(-1, t.block_bytes)
    head = np.ascontiguousarray(rows[:, : t.row_header])
    return np.unpackbits(head, axis=1, bitorder="little"), np.unpackbits(blocks, axis=1, bitorder="little")


def read_integers(t: TensorType, rows: U8, with_levels: bool = True) -> Integers:
    """Return the integers of rows, uint8 [rows, row bytes]; without levels, q is uint8 [rows, 0]."""
    layout = levels_of(t)
    head, bits = _unpack_bits(t, rows)

    def of_rows(fields: Bits | None) -> U8 | None:
        return None if fields is None else _gather(bits, fields).reshape(len(rows), -1)

    q: Any = np.zeros((len(rows), 0), np.uint8)
    if with_levels:
        q = _gather(bits, layout.levels, np.uint8 if layout.grid is None else np.uint32).reshape(len(rows), -1)
    d, dmin = (_floats(kind, head, bits) for kind in (layout.d, layout.dmin))
    return Integers(q, of_rows(layout.scale), of_rows(layout.minimum), of_rows(layout.shift), d, dmin)


def write_integers(t: TensorType, integers: Integers, rows: U8) -> None:
    """Write integers into rows that hold those of the same type already: bits outside fields are unchanged."""
    layout, i = levels_of(t), integers
    head, bits = _unpack_bits(t, rows)
    for fields, values in ((layout.levels, i.q), (layout.scale, i.s), (layout.minimum, i.m), (layout.shift, i.shift)):
        if fields is not None and values is not None:
            _scatter(bits, fields, values.reshape(len(bits), -1))
    for kind, floats in ((layout.d, i.d), (layout.dmin, i.dmin)):
        if kind and floats is not None:
            _set_floats(kind, head, bits, floats)
    rows[:, : t.row_header] = np.packbits(head, axis=1, bitorder="little")
    rows[:, t.row_header :] = np.packbits(bits, axis=1, bitorder="little").reshape(len(rows), -1)


def scales_and_minimums(t: TensorType, i: Integers) -> tuple[F32, F32 | None]:
    """Return scales and minimums: value = scale * level - minimum, float32 [rows, n / span] each."""
    layout = levels_of(t)
    n = i.q.shape[1] * (layout.grid.columns if layout.grid else 1) // layout.span
    scale = np.ones((len(i.q), n), np.float32) if i.s is None or layout.factors is None else layout.factors[i.s]
    if i.d is not None:
        scale = scale * np.repeat(i.d, n // i.d.shape[1], axis=1)
    low: F32 | None = None
    if i.dmin is not None:
        low = np.repeat(-i.dmin if layout.added else i.dmin, n // i.dmin.shape[1], axis=1)
        low = low if i.m is None else low * i.m.astype(np.float32)
    if i.shift is not None:
        raised = scale * (np.float32(layout.shift_step) * i.shift.astype(np.float32))
        low = -raised if low is None else low - raised
    return scale, low


def decode(t: TensorType, i: Integers) -> F32:
    """Return the values of integers, float32 [rows, n]; a shift of levels may cost the last bit."""
    layout = levels_of(t)
    scale, low = scales_and_minimums(t, i)
    out = np.repeat(scale, layout.span, axis=1) * layout.levels_of(i.q, i.shift)
    return out if low is None else out - np.repeat(low, layout.span, axis=1)
