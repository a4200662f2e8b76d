"""Sweeps over groups of columns whose levels come from a grid: with error feedback, and by coordinate descent.

As in sweeps.py, with groups for columns. With H = U D U^T, the loss of a group, given the errors e of the columns
before it, is |S U_gg^T (x - v) + S o|^2, S = sqrt(D_gg), o = sum of U_jg e_j over those columns: ``feed_groups`` sets
v = scale * level - low to where that is small. Given all other columns, it is |T^T (v' - v) + T^-1 g|^2 and a constant,
H_gg = T T^T, v' the values there are, g = H (x - v'): so ``descend_groups`` does.

Both are |T^T p + B r - T^T v|^2, T upper triangular; *frames* hold T and B of groups. Arguments are those of sweeps.py,
but: sub, the sub-block of each group; columns, those of groups, one group after the other; frames, float32 [groups, 2,
columns, columns]; codes, what groups have chosen, as in books.py, int32 [groups * parts, ROWS]; classes, which class a
sub-block may choose from, int32 [sub-blocks, ROWS].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from quantkit.kernels.cpu.core.jit import inline, kernel, specialize
from quantkit.kernels.cpu.core.simd import f32x16, load, muladd, splat, store
from quantkit.kernels.cpu.feedback import search as searches
from quantkit.kernels.cpu.feedback.sweeps import BLOCK
from quantkit.kernels.cpu.feedback.tiles import LINE, ROWS, element, multiply

F32 = npt.NDArray[np.float32]
F, I32 = np.float32, np.int32
FAR, REST, number_roots = searches.FAR, searches.REST, searches.number_roots

#: Bindings: columns of a point, points of a group, and what searches for them.
size, parts = 8, 1
search: Any = None
axes: Any = None
loss_of: Any = None
choose: Any = None


# ---------------------------------------------------------------- a group: its target and its tables


@inline
def width():
    """Return the columns of a group."""
    return size * parts


@inline
def weigh(frames, group, j, i, which):
    """Return an element of T (which = 0) or B, in all lanes."""
    return splat(f32x16, load(types.float32, frames, 4 * (((2 * group + which) * width() + j) * width() + i)))


@inline
def aim(frames, group, columns, p, r, low, inverse, place, z):
    """Set z = (T^T (p + low) + B r) / scale for all rows."""
    for half in range(0, LINE, 64):
        subtrahend, factor = load(f32x16, low, place + half), load(f32x16, inverse, place + half)
        for j in range(width()):
            total = splat(f32x16, F(0))
            for i in range(width()):
                at = LINE * columns[group * width() + i] + half
                total = muladd(load(f32x16, r, at), weigh(frames, group, j, i, 1), total)
                if i <= j:
                    total = muladd(load(f32x16, p, at) + subtrahend, weigh(frames, group, i, j, 0), total)
            store(z, LINE * j + half, total * factor)


@inline
def prepare(tree, frames, group, part, table, t):
    """Set ``table`` to T^T times the roots, and t to -T with the signs of each pattern, of one part."""
    first, unit, square = part * size, F(tree.unit), 4 * size * size
    for line in range(tree.root_lines):
        for j in range(size):
            total = splat(f32x16, F(0))
            for i in range(j + 1):
                c = load(f32x16, tree.roots, 64 * (size * line + i))
                total = muladd(c, weigh(frames, group, first + i, first + j, 0), total)
            store(table, 64 * (size * (tree.root_lines * part + line) + j), total * splat(f32x16, unit))
    base = square * tree.patterns * part
    for i in range(size):
        for j in range(size):
            element = load(types.float32, frames, 4 * ((2 * group * width() + first + i) * width() + first + j))
            store(t, base + 4 * (size * i + j), -unit * element if j >= i else F(0))
    for pattern in range(1, tree.patterns):
        for at in range(0, square, 64):
            factors = load(f32x16, tree.signs, square * pattern + at)
            store(t, base + square * pattern + at, factors * load(f32x16, t, base + at))


@inline
def point_level(tree, code, i):
    """Return level i of a point."""
    point = code & ((1 << tree.bits) - 1)
    level = load(types.int8, tree.points, 16 * size * (point >> 4) + 16 * i + (point & 15))
    return F(level) * load(types.float32, tree.signs, 4 * size * (size * (code >> tree.bits) + i)) * F(tree.unit)


@inline
def class_of(tree, code):
    """Return the class of a point, by the pattern of its signs."""
    return tree.classes * (code >> tree.bits) // tree.patterns


# ---------------------------------------------------------------- the choice of a row


@inline
def choose_one(tree, frames, group, table, t, z, row, of_class, codes, s):
    """Choose the point of a group of one part."""
    at = 4 * (ROWS * group + row)
    code, _ = search(tree, 0, table, t, axes(z, 4 * row, LINE), of_class, np.int64(load(types.int32, codes, at)), s)
    store(codes, at, I32(code))


@inline
def second(tree, frames, group, table, t, z, row, first, now, s):
    """Return the best code of the second part after ``first``, and its loss; ``now`` is what it has."""
    for j in range(size):
        rest = load(types.float32, z, LINE * (size + j) + 4 * row)
        for i in range(size):
            element = load(types.float32, frames, 4 * ((2 * group * width() + i) * width() + size + j))
            rest -= point_level(tree, first, i) * element
        store(s, REST + 4 * j, rest)
    of_class = class_of(tree, first)
    now = now if class_of(tree, now) == of_class else np.int64(-1)
    return search(tree, 1, table, t, axes(s, REST, 4), of_class, now, s)


@inline
def choose_two(tree, frames, group, table, t, z, row, _, codes, s):
    """Choose the points of a group of two parts of one class: the best pair of those of a first one."""
    at_first, at_second = 4 * (2 * ROWS * group + row), 4 * (2 * ROWS * group + ROWS + row)
    before, after = np.int64(load(types.int32, codes, at_first)), np.int64(load(types.int32, codes, at_second))
    aim_of_first = axes(z, 4 * row, LINE)
    code, loss = second(tree, frames, group, table, t, z, row, before, after, s)
    best = loss + loss_of(tree, 0, t, aim_of_first, before)
    store(codes, at_second, I32(code))
    for of_class in range(tree.classes):
        one, loss_of_one = search(tree, 0, table, t, aim_of_first, of_class, np.int64(-1), s)
        if one >= 0:
            two, loss = second(tree, frames, group, table, t, z, row, one, after, s)
            if loss_of_one + loss < best:
                best = loss_of_one + loss
                store(codes, at_first, I32(one))
                store(codes, at_second, I32(two))


@inline
def choose_rows(tree, frames, group, columns, p, r, scale, low, inverse, place, classes, codes, levels, v,
                table, t, z, s):  # fmt: skip
    """Choose the codes of a group, and set its levels and values."""
    aim(frames, group, columns, p, r, low, inverse, LINE * place, z)
    for part in range(parts):
        prepare(tree, frames, group, part, table, t)
    for row in range(ROWS):
        of_class = np.int64(load(types.int32, classes, LINE * place + 4 * row))
        choose(tree, frames, group, table, t, z, row, of_class, codes, s)
    for part in range(parts):
        for i in range(size):
            at = LINE * columns[(group * parts + part) * size + i]
            for row in range(ROWS):
                code = np.int64(load(types.int32, codes, LINE * (group * parts + part) + 4 * row))
                store(levels, at + 4 * row, point_level(tree, code, i))
            for half in range(0, LINE, 64):
                value = load(f32x16, scale, LINE * place + half) * load(f32x16, levels, at + half)
                store(v, at + half, value - load(f32x16, low, LINE * place + half))


# ---------------------------------------------------------------- sweeps


def feed_groups(x: F32, u: F32, sub: Any, columns: Any, frames: F32, tree: Any, scale: F32, low: F32, inverse: F32,
                classes: Any, codes: Any, levels: F32, v: F32, e: F32, c: F32, table: F32, t: F32, z: F32,
                s: Any) -> None:  # fmt: skip
    """Choose the levels of a tile, group after group; columns are 0 to n. e, c and what follows are scratch."""
    n = len(x)
    number_roots(s)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for at in range(LINE * begin, LINE * end, 64):
            store(c, at, load(f32x16, x, at))
        multiply(c, u, e, n, 0, begin, begin, end)
        for k in range(begin, end, width()):
            for at in range(LINE * k, LINE * (k + width()), 64):
                store(c, at, load(f32x16, c, at) - load(f32x16, x, at))
            group = k // width()
            choose_rows(tree, frames, group, columns, x, c, scale, low, inverse, sub[group], classes, codes, levels,
                         v, table, t, z, s)  # fmt: skip
            for at in range(LINE * k, LINE * (k + width()), 64):
                store(e, at, load(f32x16, x, at) - load(f32x16, v, at))
            for j in range(k + width(), end):
                for half in range(0, LINE, 64):
                    total = load(f32x16, c, LINE * j + half)
                    for i in range(k, k + width()):
                        total = muladd(load(f32x16, e, LINE * i + half), element(u, n, i, j), total)
                    store(c, LINE * j + half, total)


def descend_groups(h: F32, sub: Any, columns: Any, frames: F32, tree: Any, scale: F32, low: F32, inverse: F32,
                   classes: Any, codes: Any, levels: F32, v: F32, g: F32, d: F32, table: F32, t: F32, z: F32,
                   s: Any) -> None:  # fmt: skip
    """Choose every group again, while the others stay, and keep g = H (x - v). d and what follows are scratch."""
    n = len(v)
    number_roots(s)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end, width()):
            for i in range(k, k + width()):
                for half in range(0, LINE, 64):
                    at = LINE * columns[i] + half
                    store(d, at, load(f32x16, v, at))
            group = k // width()
            choose_rows(tree, frames, group, columns, v, g, scale, low, inverse, sub[group], classes, codes, levels,
                         v, table, t, z, s)  # fmt: skip
            for i in range(k, k + width()):
                for half in range(0, LINE, 64):
                    at = LINE * columns[i] + half
                    store(d, at, load(f32x16, d, at) - load(f32x16, v, at))
            for j in range(begin, end):
                for half in range(0, LINE, 64):
                    total = load(f32x16, g, LINE * j + half)
                    for i in range(k, k + width()):
                        change = load(f32x16, d, LINE * columns[i] + half)
                        total = muladd(change, element(h, n, columns[i], j), total)
                    store(g, LINE * j + half, total)
        multiply(g, h, d, n, begin, end, 0, begin)
        multiply(g, h, d, n, begin, end, end, n)


@cache
def sweeps_of(columns: int, of_group: int) -> tuple[Any, Any]:
    """Return ``feed_groups`` and ``descend_groups`` for points of so many columns, and so many points of a group."""
    bound: dict[str, Any] = {"size": columns, "parts": of_group}
    suffix = f"{columns}_{of_group}"

    def bind(function: Any, name: str = "", compiled: Any = inline) -> Any:
        """Compile a function with those that it uses, of those that depend on the size."""
        plain = getattr(function, "py_func", function)
        used = {key: bound[key] for key in plain.__code__.co_names if key in bound}
        bound[name or plain.__name__] = made = specialize(function, suffix, compiled, **used)
        return made

    bind(searches.squared)
    for name in ("axes", "near", "distance"):
        bind(getattr(searches, f"{name}{columns}"), name)
    steps: tuple[Any, ...] = (*searches.STEPS, width, weigh, aim, prepare, point_level, second)
    for step in steps:
        bind(step)
    bind(choose_one if of_group == 1 else choose_two, "choose")
    bind(choose_rows)
    return bind(feed_groups, compiled=kernel), bind(descend_groups, compiled=kernel)
