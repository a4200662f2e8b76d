"""The point of a grid nearest to a target, in the metric of a group's covariance.

For a target y of a group's columns and the metric M = T T^T, T upper triangular, the loss of a point c is
|z - T^T c|^2, z = T^T y. The search goes down the tree of codebook_tree.py: it keeps some of
the nearest roots, some of their nearest children, and takes the nearest of the points that it reaches. At each height
it keeps the nodes that are no farther than the best node of, for example, the fourth best lane: at least four, and all
nearer ones. The present point is always tried.

Rows are searched one after the other, sixteen nodes at a time. Roots are multiplied by T once for all rows; lower
nodes, once per visit, by T with the signs of the root.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    convert,
    extract,
    f32x16,
    hmin,
    i8x16,
    i32x16,
    load,
    mask_bits,
    muladd,
    select,
    splat,
    store,
    trailing_zeros,
    vmin,
)

F, I32 = np.float32, np.int32

#: A loss above all others; the maximum number of nodes kept per level.
INFINITE, MOST = F(np.inf), 64
#: Offsets into scratch: scores, two lists of nodes, the numbers of the roots' lines, a target; total bytes.
SCORES = 0
LIST = 4096
NEXT_LIST = 4096 + 4 * MOST
NUMBERS = 4096 + 8 * MOST
REMAINDER = NUMBERS + 4 * MOST
SCRATCH = REMAINDER + 64

#: Bindings: columns of a point, and the functions of that many.
size = 8
axes: Any = None
table_distance: Any = None
distance: Any = None


# ---------------------------------------------------------------- distances of 16 points


@inline
def _axis(z, offset):
    return splat(f32x16, load(types.float32, z, offset))


@inline
def axes2(z, offset, step):
    """Return the z of a row, each in all lanes."""
    return _axis(z, offset), _axis(z, offset + step)


@inline
def axes4(z, offset, step):
    """Return the z of a row, each in all lanes."""
    return _axis(z, offset), _axis(z, offset + step), _axis(z, offset + 2 * step), _axis(z, offset + 3 * step)


@inline
def axes8(z, offset, step):
    """Return the z of a row, each in all lanes."""
    return (
        _axis(z, offset),
        _axis(z, offset + step),
        _axis(z, offset + 2 * step),
        _axis(z, offset + 3 * step),
        _axis(z, offset + 4 * step),
        _axis(z, offset + 5 * step),
        _axis(z, offset + 6 * step),
        _axis(z, offset + 7 * step),
    )


@inline
def table_distance2(z, table, offset):
    """Return the squared distances of 16 products with T^T, stored axis by axis."""
    a, b = z[0] - load(f32x16, table, offset), z[1] - load(f32x16, table, offset + 64)
    return muladd(a, a, b * b)


@inline
def table_distance4(z, table, offset):
    """Return the sums of squares of the differences from 16 points of 4 columns."""
    return table_distance2((z[0], z[1]), table, offset) + table_distance2((z[2], z[3]), table, offset + 128)


@inline
def table_distance8(z, table, offset):
    """Return the sums of squares of the differences from 16 points of 8 columns."""
    return table_distance4((z[0], z[1], z[2], z[3]), table, offset) + table_distance4(
        (z[4], z[5], z[6], z[7]), table, offset + 256
    )


@inline
def square(z, lines, offset, t, place, j):
    """Return the square of z - (T^T c)_j for the 16 points c of a line; t is -T."""
    for i in range(j + 1):
        c = convert(f32x16, convert(i32x16, load(i8x16, lines, offset + 16 * i)))
        z = muladd(c, splat(f32x16, load(types.float32, t, place + 4 * (size * i + j))), z)
    return z * z


@inline
def distance2(z, lines, offset, t, place):
    """Return the squared distances of the 16 points of a line."""
    return square(z[0], lines, offset, t, place, 0) + square(z[1], lines, offset, t, place, 1)


@inline
def distance4(z, lines, offset, t, place):
    """Return ``distance2`` for points of 4 columns."""
    return (
        (square(z[0], lines, offset, t, place, 0) + square(z[1], lines, offset, t, place, 1))
        + (square(z[2], lines, offset, t, place, 2) + square(z[3], lines, offset, t, place, 3))
    )  # fmt: skip


@inline
def distance8(z, lines, offset, t, place):
    """Return ``distance2`` for points of 8 columns."""
    return distance4((z[0], z[1], z[2], z[3]), lines, offset, t, place) + (
        (square(z[4], lines, offset, t, place, 4) + square(z[5], lines, offset, t, place, 5))
        + (square(z[6], lines, offset, t, place, 6) + square(z[7], lines, offset, t, place, 7))
    )  # fmt: skip


# ---------------------------------------------------------------- down the tree


@inline
def _limit(tree, least):
    """Return the loss of the worst lane of those kept at least."""
    for _ in range(tree.beam - 1):
        least = select(least == splat(f32x16, hmin(least)), splat(f32x16, INFINITE), least)
    return hmin(least)


@inline
def _keep(s, count, parents, limit, target):
    """List the nodes of ``count`` lines that are no farther than the limit; return their number."""
    n_kept, bound = 0, splat(f32x16, limit)
    for line in range(count):
        bits = mask_bits(load(f32x16, s, SCORES + 64 * line) <= bound)
        parent = 16 * load(types.int32, s, parents + 4 * line)
        while bits != np.uint64(0):
            store(s, target + 4 * n_kept, I32(parent + trailing_zeros(bits)))
            n_kept = min(n_kept + 1, MOST - 2)
            bits &= bits - np.uint64(1)
    return n_kept


@inline
def rank_roots(table, offset, first, last, z, s):
    least = splat(f32x16, INFINITE)
    for line in range(first, last):
        distances = table_distance(z, table, offset + 64 * size * line)
        store(s, SCORES + 64 * (line - first), distances)
        least = vmin(least, distances)
    return least


@inline
def score(tree, height, node, t, place, z):
    """Return the distances of a node's children."""
    offset = tree.heights_at + 24 * height
    line = load(types.int64, offset, 0) + (node & load(types.int64, offset, 8))
    pattern = node >> load(types.int64, offset, 16)
    return distance(z, tree.lines, 16 * size * line, t, place + 4 * size * size * pattern)


@inline
def rank_children(tree, height, t, place, z, s, nodes, n_kept):
    least = splat(f32x16, INFINITE)
    for i in range(n_kept):
        distances = score(tree, height, load(types.int32, s, nodes + 4 * i), t, place, z)
        store(s, SCORES + 64 * i, distances)
        least = vmin(least, distances)
    return least


@inline
def _pick(best, place, now):
    """Return the index of the best lane, and its loss; ``now`` if there is none."""
    least = hmin(best)
    if not least < INFINITE:
        return now, INFINITE
    lane = trailing_zeros(mask_bits(best == splat(f32x16, least)))
    return np.int64(extract(place, lane)) + lane, least


@inline
def nearest_point(tree, t, place, z, s, nodes, n_kept, now):
    best, code = splat(f32x16, INFINITE), splat(i32x16, I32(0))
    for i in range(n_kept):
        node = load(types.int32, s, nodes + 4 * i)
        distances = score(tree, tree.heights - 1, node, t, place, z)
        less = distances < best
        best, code = select(less, distances, best), select(less, splat(i32x16, I32(16 * node)), code)
    return _pick(best, code, now)


@inline
def nearest_root(table, offset, first, last, z, now):
    best, code = splat(f32x16, INFINITE), splat(i32x16, I32(0))
    for line in range(first, last):
        distances = table_distance(z, table, offset + 64 * size * line)
        less = distances < best
        best, code = select(less, distances, best), select(less, splat(i32x16, I32(16 * line)), code)
    return _pick(best, code, now)


@inline
def search(tree, part, table, t, z, of_class, now, s):
    """Return the code of a near point, and its loss.

    Args:
        tree: of the points.
        part: the group's part.
        table: for each part, T^T times the roots, float32 [parts, roots / 16, size, 16].
        t: for each part, -T with its rows multiplied by the signs of each pattern, float32 [parts, patterns, size,
            size], and 16 more.
        z: the target, each axis in all lanes.
        of_class: the class that the point must have.
        now: the code of a point of that class, which is kept unless there is a nearer one, or -1.
        s: scratch, of SCRATCH bytes.
    """
    offset, place = 64 * size * tree.root_lines * part, 4 * size * size * tree.patterns * part
    lines = tree.root_lines // tree.classes
    first = of_class * lines
    if tree.heights == 0:
        return nearest_root(table, offset, first, first + lines, z, now)
    least = rank_roots(table, offset, first, first + lines, z, s)
    nodes, next_nodes = LIST, NEXT_LIST
    n_kept = _keep(s, lines, NUMBERS + 4 * first, _limit(tree, least), nodes)
    for height in range(tree.heights - 1):
        least = rank_children(tree, height, t, place, z, s, nodes, n_kept)
        n_kept = _keep(s, n_kept, nodes, _limit(tree, least), next_nodes)
        nodes, next_nodes = next_nodes, nodes
    if now >= 0:
        store(s, nodes + 4 * n_kept, I32(now >> 4))
        n_kept += 1
    return nearest_point(tree, t, place, z, s, nodes, n_kept, now)


@inline
def loss_of(tree, part, t, z, code):
    """Return the loss of the point of a code."""
    place = 4 * size * size * tree.patterns * part
    return extract(score(tree, tree.heights - 1, code >> 4, t, place, z), code & 15)


@inline
def number_roots(s):
    """Prepare scratch."""
    for line in range(MOST):
        store(s, NUMBERS + 4 * line, I32(line))


#: Functions that depend on the number of columns, in the order of use.
STEPS = (rank_roots, score, rank_children, nearest_point, nearest_root, search, loss_of)
