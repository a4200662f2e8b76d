"""Sweeps over groups of columns whose levels come from a grid: with error feedback, and by coordinate descent.

As in sweeps.py, with groups for columns. With H = U D U^T, the loss of a group, given the errors e of the columns
before it, is |S U_gg^T (x - v) + S o|^2, S = sqrt(D_gg), o = sum of U_jg e_j over those columns:
``error_feedback_groups`` sets v = scale * level - minimum to where that is small. Given all other columns, it is
|T^T (v' - v) + T^-1 g|^2 and a constant, H_gg = T T^T, v' the values there are, g = H (x - v'): so ``descend_groups``
does. Both are |T^T p + B r - T^T v|^2, T upper triangular.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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
INFINITE = searches.INFINITE
REMAINDER = searches.REMAINDER
number_roots = searches.number_roots

#: Bindings: columns of a point, points of a group, and the function that searches for them.
size, parts = 8, 1
search: Any = None
axes: Any = None
loss_of: Any = None
choose: Any = None


class Groups(NamedTuple):
    """Groups of columns in the order in which they are visited.

    tree: of their grid (codebook_tree.py). metrics: T and B of each, float32 [groups, 2, columns, columns]. columns:
    those of groups, one group after the other, int64 [n]. sub: the sub-block of each group, int32 [groups].
    """

    tree: Any
    metrics: F32
    columns: Any
    sub: Any


class SubBlocks(NamedTuple):
    """Scales as sweeps.py has them; classes: which class of points each may choose from: [sub-blocks, ROWS]."""

    scale: F32
    minimum: F32
    inverse: F32
    classes: Any


class Choice(NamedTuple):
    """The codes of groups (codebook_tree.py), int32 [groups * parts, ROWS]; levels and values, float32 [n, ROWS]."""

    codes: Any
    levels: F32
    v: F32


class Work(NamedTuple):
    """Scratch: of each part T^T times the roots, -T with the signs of each pattern; the target z; s, search.py's."""

    table: F32
    t: F32
    z: F32
    s: Any


# ---------------------------------------------------------------- a group: its target and its tables


@inline
def width():
    """Return the columns of a group."""
    return size * parts


@inline
def weigh(metrics, group, j, i, matrix):
    """Return an element of T (matrix = 0) or B (1), in all lanes."""
    return splat(f32x16, load(types.float32, metrics, 4 * (((2 * group + matrix) * width() + j) * width() + i)))


@inline
def aim(groups, group, p, r, sub_blocks, work):
    """Set z = (T^T (p + minimum) + B r) / scale for all rows."""
    metrics = groups.metrics
    columns = groups.columns
    z = work.z
    place = LINE * groups.sub[group]
    minimum, inverse = sub_blocks.minimum, sub_blocks.inverse
    for half in range(0, LINE, 64):
        subtrahend, factor = load(f32x16, minimum, place + half), load(f32x16, inverse, place + half)
        for j in range(width()):
            total = splat(f32x16, F(0))
            for i in range(width()):
                offset = LINE * columns[group * width() + i] + half
                total = muladd(load(f32x16, r, offset), weigh(metrics, group, j, i, 1), total)
                if i <= j:
                    total = muladd(load(f32x16, p, offset) + subtrahend, weigh(metrics, group, i, j, 0), total)
            store(z, LINE * j + half, total * factor)


@inline
def prepare(groups, group, part, work):
    """Set ``table`` to T^T times the roots, and t to -T with the signs of each pattern, of one part."""
    tree = groups.tree
    metrics = groups.metrics
    table = work.table
    t = work.t
    first = part * size
    unit = F(tree.unit)
    square = 4 * size * size
    for line in range(tree.root_lines):
        for j in range(size):
            total = splat(f32x16, F(0))
            for i in range(j + 1):
                c = load(f32x16, tree.roots, 64 * (size * line + i))
                total = muladd(c, weigh(metrics, group, first + i, first + j, 0), total)
            store(table, 64 * (size * (tree.root_lines * part + line) + j), total * splat(f32x16, unit))
    base = square * tree.patterns * part
    for i in range(size):
        for j in range(size):
            element = load(types.float32, metrics, 4 * ((2 * group * width() + first + i) * width() + first + j))
            store(t, base + 4 * (size * i + j), -unit * element if j >= i else F(0))
    for pattern in range(1, tree.patterns):
        for offset in range(0, square, 64):
            factors = load(f32x16, tree.signs, square * pattern + offset)
            store(t, base + square * pattern + offset, factors * load(f32x16, t, base + offset))


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
def choose_one(groups, group, row, of_class, codes, work):
    """Choose the point of a group of one part."""
    offset = 4 * (ROWS * group + row)
    target, now = axes(work.z, 4 * row, LINE), np.int64(load(types.int32, codes, offset))
    code, _ = search(groups.tree, 0, work.table, work.t, target, of_class, now, work.s)
    store(codes, offset, I32(code))


@inline
def second(groups, group, row, first, now, work):
    """Return the best code of the second part after ``first``, and its loss; ``now`` is the present code."""
    tree = groups.tree
    metrics = groups.metrics
    z = work.z
    s = work.s
    for j in range(size):
        remainder = load(types.float32, z, LINE * (size + j) + 4 * row)
        for i in range(size):
            element = load(types.float32, metrics, 4 * ((2 * group * width() + i) * width() + size + j))
            remainder -= point_level(tree, first, i) * element
        store(s, REMAINDER + 4 * j, remainder)
    of_class = class_of(tree, first)
    now = now if class_of(tree, now) == of_class else np.int64(-1)
    return search(tree, 1, work.table, work.t, axes(s, REMAINDER, 4), of_class, now, s)


@inline
def choose_two(groups, group, row, _, codes, work):
    """Choose the points of a group of two parts of one class: the best pair of those of a first one."""
    tree = groups.tree
    at_first, at_second = 4 * (2 * ROWS * group + row), 4 * (2 * ROWS * group + ROWS + row)
    before, after = np.int64(load(types.int32, codes, at_first)), np.int64(load(types.int32, codes, at_second))
    aim_of_first = axes(work.z, 4 * row, LINE)
    code, loss = second(groups, group, row, before, after, work)
    best = loss + loss_of(tree, 0, work.t, aim_of_first, before)
    store(codes, at_second, I32(code))
    for of_class in range(tree.classes):
        one, loss_of_one = search(tree, 0, work.table, work.t, aim_of_first, of_class, np.int64(-1), work.s)
        if one >= 0:
            two, loss = second(groups, group, row, one, after, work)
            if loss_of_one + loss < best:
                best = loss_of_one + loss
                store(codes, at_first, I32(one))
                store(codes, at_second, I32(two))


@inline
def choose_rows(groups, group, p, r, sub_blocks, choice, work):
    """Choose the codes of a group, and set its levels and values."""
    aim(groups, group, p, r, sub_blocks, work)
    for part in range(parts):
        prepare(groups, group, part, work)
    columns = groups.columns
    place = LINE * groups.sub[group]
    codes = choice.codes
    levels = choice.levels
    v = choice.v
    for row in range(ROWS):
        of_class = np.int64(load(types.int32, sub_blocks.classes, place + 4 * row))
        choose(groups, group, row, of_class, codes, work)
    for part in range(parts):
        for i in range(size):
            offset = LINE * columns[(group * parts + part) * size + i]
            for row in range(ROWS):
                code = np.int64(load(types.int32, codes, LINE * (group * parts + part) + 4 * row))
                store(levels, offset + 4 * row, point_level(groups.tree, code, i))
            for half in range(0, LINE, 64):
                value = load(f32x16, sub_blocks.scale, place + half) * load(f32x16, levels, offset + half)
                store(v, offset + half, value - load(f32x16, sub_blocks.minimum, place + half))


# ---------------------------------------------------------------- sweeps


def error_feedback_groups(x: F32, u: F32, groups: Groups, sub_blocks: SubBlocks, choice: Choice, e: F32, c: F32,
                          work: Work) -> None:  # fmt: skip
    """Choose the levels of a tile, group after group; columns are 0 to n. e, c: scratch, float32 [n, ROWS]."""
    n, v = len(x), choice.v
    number_roots(work.s)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for offset in range(LINE * begin, LINE * end, 64):
            store(c, offset, load(f32x16, x, offset))
        multiply(c, u, e, n, 0, begin, begin, end)
        for k in range(begin, end, width()):
            for offset in range(LINE * k, LINE * (k + width()), 64):
                store(c, offset, load(f32x16, c, offset) - load(f32x16, x, offset))
            group = k // width()
            choose_rows(groups, group, x, c, sub_blocks, choice, work)
            for offset in range(LINE * k, LINE * (k + width()), 64):
                store(e, offset, load(f32x16, x, offset) - load(f32x16, v, offset))
            for j in range(k + width(), end):
                for half in range(0, LINE, 64):
                    total = load(f32x16, c, LINE * j + half)
                    for i in range(k, k + width()):
                        total = muladd(load(f32x16, e, LINE * i + half), element(u, n, i, j), total)
                    store(c, LINE * j + half, total)


def descend_groups(h: F32, groups: Groups, sub_blocks: SubBlocks, choice: Choice, g: F32, d: F32, work: Work) -> None:
    """Choose every group again, while the others stay, and keep g = H (x - v). d: scratch, float32 [n, ROWS]."""
    n = len(choice.v)
    v = choice.v
    columns = groups.columns
    number_roots(work.s)
    for begin in range(0, n, BLOCK):
        end = min(begin + BLOCK, n)
        for k in range(begin, end, width()):
            for i in range(k, k + width()):
                for half in range(0, LINE, 64):
                    offset = LINE * columns[i] + half
                    store(d, offset, load(f32x16, v, offset))
            group = k // width()
            choose_rows(groups, group, v, g, sub_blocks, choice, work)
            for i in range(k, k + width()):
                for half in range(0, LINE, 64):
                    offset = LINE * columns[i] + half
                    store(d, offset, load(f32x16, d, offset) - load(f32x16, v, offset))
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
    """Return ``error_feedback_groups`` and ``descend_groups`` for points of this number of columns, and groups of "
    "this number of points."""
    bindings: dict[str, Any] = {"size": columns, "parts": of_group}
    suffix = f"{columns}_{of_group}"

    def bind(function: Any, name: str = "", compiled: Any = inline) -> Any:
        """Compile a function together with the functions it uses that depend on the size."""
        plain = getattr(function, "py_func", function)
        used = {key: bindings[key] for key in plain.__code__.co_names if key in bindings}
        compiled_function = specialize(function, suffix, compiled, **used)
        bindings[name or plain.__name__] = compiled_function
        return compiled_function

    bind(searches.square)
    for name in ("axes", "table_distance", "distance"):
        bind(getattr(searches, f"{name}{columns}"), name)
    steps: tuple[Any, ...] = (*searches.STEPS, width, weigh, aim, prepare, point_level, second)
    for step in steps:
        bind(step)
    bind(choose_one if of_group == 1 else choose_two, "choose")
    bind(choose_rows)
    return bind(error_feedback_groups, compiled=kernel), bind(descend_groups, compiled=kernel)
