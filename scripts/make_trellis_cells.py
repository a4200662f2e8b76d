"""Sort the points of trellis codebooks into cells of 16 and families of 16 cells: quantkit/kernels/trellis_cells.npz.

A search ranks the centers of cells, so compact cells let it search fewer of them. Cells are clusters of equal size:
split along each dimension in turn, then points of two cells are exchanged while their squared distances from the
centers decrease. Distances are weighted like a search's errors (``_warped``). A search keeps the best point, cell and
family of each of 16 lanes, so neighbours are assigned to different lanes.

    scripts/make_trellis_cells.py            # minutes; the same on every machine
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from quantkit.kernels.cpu.encode.trellis_codebook import CELLS, cells_key
from quantkit.kernels.grids import trellis_levels

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

#: Per type, IQ1_KT, IQ2_KT and IQ3_KT: points of a codebook, values of a point, whether these are magnitudes.
CODEBOOKS = ((8192, 8, False), (65536, 8, False), (65536, 8, True))
#: Nearest clusters to which an item may move; maximum number of passes over all items; nearest clusters compared for
#: lanes.
N_NEAREST, PASSES, NEIGHBOURS = 10, 40, 32


def _warped(levels: Numbers) -> Floats:
    """Return coordinates in which squared distances are weighted as ``3 m + v^2``, m the mean square of levels.

    This is between the weights of searches with and without importances.
    """
    m = 3 * (levels**2).mean()
    v = levels.astype(np.float64)
    warped: Floats = (v * np.sqrt(m + v * v) + m * np.arcsinh(v / np.sqrt(m))) / (2 * np.sqrt(m))
    return warped


def _split(points: Floats, size: int) -> Numbers:
    """Return the numbers of items in groups of ``size``: halved along each dimension in turn, repeatedly."""
    groups, splits = np.arange(len(points))[None], 0
    while groups.shape[1] > size:
        projections = points[groups][:, :, splits % points.shape[1]]
        groups = np.take_along_axis(groups, projections.argsort(1, kind="stable"), 1).reshape(2 * len(groups), -1)
        splits += 1
    return groups


@nb.njit
def _nearest(points: Floats, centers: Floats, out: Numbers) -> None:
    """Write the indices of the centers nearest to each item, nearest first."""
    distances, count = np.empty(len(centers)), out.shape[1]
    for i in range(len(points)):
        for c in range(len(centers)):
            distances[c] = 0
        for k in range(points.shape[1]):
            for c in range(len(centers)):
                distances[c] += (points[i, k] - centers[c, k]) ** 2
        best = np.full(count, np.inf)
        for c in range(len(centers)):
            if distances[c] < best[count - 1]:
                place = count - 1
                while place > 0 and best[place - 1] > distances[c]:
                    best[place], out[i, place] = best[place - 1], out[i, place - 1]
                    place -= 1
                best[place], out[i, place] = distances[c], c


@nb.njit
def _exchange(
    points: Floats, groups: Numbers, group_of: Numbers, place_of: Numbers, sums: Floats, neighbours: Numbers
) -> int:
    """Exchange each item with the one of a near group that reduces squared distances from centers the most."""
    moved = 0
    for i in range(len(points)):
        own_group, best, target_group, place = group_of[i], 1e-9, -1, -1
        for neighbour in neighbours[i]:
            if neighbour == own_group:
                continue
            for p in range(groups.shape[1]):
                gain = 0.0
                for k in range(points.shape[1]):
                    step = points[groups[neighbour, p], k] - points[i, k]
                    gain += step * (sums[own_group, k] - sums[neighbour, k] + step)
                if gain > best:
                    best, target_group, place = gain, neighbour, p
        if target_group >= 0:
            j, place_in_group = groups[target_group, place], place_of[i]
            for k in range(points.shape[1]):
                step = points[j, k] - points[i, k]
                sums[own_group, k] += step
                sums[target_group, k] -= step
            groups[own_group, place_in_group], groups[target_group, place] = j, i
            group_of[i], group_of[j], place_of[i], place_of[j] = target_group, own_group, place, place_in_group
            moved += 1
    return moved


def cluster(points: Floats, size: int) -> Numbers:
    """Return the numbers of items in clusters of ``size``."""
    groups = _split(points, size)
    group_of, place_of = np.empty(len(points), np.int64), np.empty(len(points), np.int64)
    group_of[groups], place_of[groups] = np.arange(len(groups))[:, None], np.arange(size)
    neighbours = np.empty((len(points), N_NEAREST), np.int64)
    for _ in range(PASSES):
        sums = points[groups].sum(1)
        _nearest(points, sums / size, neighbours)
        if not _exchange(points, groups, group_of, place_of, sums, neighbours):
            break
    return groups


@nb.njit
def _exchange_lanes(points: Floats, groups: Numbers, neighbours: Numbers, scale: float) -> int:
    """Exchange lanes within each group while items in the same lane of near groups move further apart."""
    lanes, moved = groups.shape[1], 0
    close = np.empty((lanes, lanes))
    for g in range(len(groups)):
        close[:] = 0
        for neighbour in neighbours[g]:
            if neighbour == g:
                continue
            for a in range(lanes):
                for b in range(lanes):
                    distance = 0.0
                    for k in range(points.shape[1]):
                        distance += (points[groups[g, a], k] - points[groups[neighbour, b], k]) ** 2
                    close[a, b] += np.exp(-distance / scale)
        item = np.arange(lanes)
        better = True
        while better:
            better = False
            for a in range(lanes):
                for b in range(a):
                    i, j = item[a], item[b]
                    if close[i, b] + close[j, a] < close[i, a] + close[j, b] - 1e-9:
                        item[a], item[b] = j, i
                        better = True
                        moved += 1
        groups[g] = groups[g][item]
    return moved


def assign_lanes(points: Floats, groups: Numbers) -> Numbers:
    """Return the groups, ordered such that an item's neighbours in other groups have other positions."""
    groups, points_of_group = groups.copy(), points[groups]
    centers = points_of_group.mean(1)
    scale = 2 * ((points_of_group - centers[:, None]) ** 2).sum(2).mean()
    neighbours = np.empty((len(groups), min(NEIGHBOURS, len(groups))), np.int64)
    _nearest(centers, centers, neighbours)
    for _ in range(PASSES):
        if not _exchange_lanes(points, groups, neighbours, scale):
            break
    return groups


def sorted_points(levels: Numbers) -> Numbers:
    """Return the numbers of points [points, size], cell by cell, family by family."""
    points = _warped(levels)
    cells = assign_lanes(points, cluster(points, 16))
    centers = points[cells].mean(1)
    families = assign_lanes(centers, cluster(centers, 16))
    of_families = centers[families].mean(1)
    lines = np.random.default_rng(0).permutation(len(families)).reshape(-1, 16)
    lines = assign_lanes(of_families, lines)
    order: Numbers = cells[families[lines].reshape(-1)].reshape(-1)
    return order


def main() -> None:
    orders: dict[str, Any] = {}
    for count, size, magnitudes in CODEBOOKS:
        levels = trellis_levels(0, count, size)
        order = sorted_points(abs(levels) if magnitudes else levels)
        orders[cells_key(count, size, magnitudes)] = order.astype(np.uint16)
    np.savez_compressed(CELLS, **orders)


if __name__ == "__main__":
    main()
