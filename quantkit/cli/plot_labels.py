"""Where the labels of points go, so that they neither overlap nor look like another point's.

Every label has candidates around its point, near ones first. A candidate costs what it covers (labels, points, lines),
what its leader crosses, how far away it is, and more if another point is nearer to it. Labels are placed one after
another, the most crowded first, and then moved to their cheapest place a few times, the others staying where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
#: Left, bottom, right, top.
Box = tuple[float, float, float, float]

#: Half the size of a point, the space around labels, and how often all are placed; lengths in points (1/72 in).
_MARK, _SPACE, _ROUNDS = 3.2, 1.0, 6
#: Places for labels: distances from the point, of which the first needs no leader, and directions.
_DISTANCES = (5.5, 10.0, 16.0, 23.0, 31.0, 41.0, 53.0)
_ANGLES = np.arange(24) * math.pi / 12
#: What it costs to cover a square point of a label, another point and a point of a line, to leave the area, to cross a
#: leader, a label or a point, and to have a stranger nearer than the label's point.
_COVERED, _ON_POINT, _ON_LINE, _OUTSIDE, _CROSSED, _STRANGER = 40.0, 400.0, 3.0, 1e4, 60.0, 25.0


@dataclass(frozen=True)
class Place:
    """The centre of a label, relative to its point, and whether a line should lead there."""

    x: float
    y: float
    has_leader: bool


def place_labels(
    points: F64, sizes: F64, area: Box, lines: Sequence[F64] = (), taken: Sequence[Box] = ()
) -> list[Place]:
    """Return a place for the label of each point.

    points: [n, 2]; sizes: of labels, [n, 2]; area: where they may be; lines: [m, 2], and boxes, where rather not.
    """
    search = _Search(points, sizes, area, lines, taken)
    apart = np.linalg.norm((points[:, None] - points[None]) / (1.5, 1), axis=2)
    order = np.argsort(-(apart < 40).sum(1), kind="stable")
    for _ in range(_ROUNDS):
        for i in order:
            search.place(int(i))
    return [place for place in search.places if place is not None]


class _Search:
    """The boxes of labels, NaN if not placed yet, and of what else is taken; points of leaders, NaN if none."""

    def __init__(self, points: F64, sizes: F64, area: Box, lines: Sequence[F64], taken: Sequence[Box]) -> None:
        self.points, self.sizes, self.area = points, sizes, np.array(area)
        self.way = np.concatenate([np.empty((0, 2)), *map(_samples, lines)])
        self.boxes = np.concatenate([np.full((len(points), 4), np.nan), np.reshape(taken, (-1, 4))])
        self.leaders = np.full((len(points), 8, 2), np.nan)
        self.places: list[Place | None] = [None] * len(points)

    def place(self, i: int) -> None:
        """Give label i its cheapest place."""
        self.boxes[i], self.leaders[i] = np.nan, np.nan
        distances, angles = np.repeat(_DISTANCES, len(_ANGLES)), np.tile(_ANGLES, len(_DISTANCES))
        far = distances > _DISTANCES[0]
        moves = np.stack([np.cos(angles), np.sin(angles)], 1) * (distances[:, None] + self.sizes[i] / 2)
        half = self.sizes[i] / 2 + _SPACE
        boxes = np.concatenate([self.points[i] + moves - half, self.points[i] + moves + half], 1)
        leaders = self.points[i] + np.linspace(0.15, 0.85, 8)[:, None] * moves[:, None]
        to_the_right = (angles == 0) & ~far
        cost = distances + ~to_the_right + self._of_box(i, boxes, ~far) + self._of_leader(i, leaders) * far
        best = int(np.argmin(cost))
        self.places[i] = Place(float(moves[best, 0]), float(moves[best, 1]), bool(far[best]))
        self.boxes[i], self.leaders[i] = boxes[best], leaders[best] if far[best] else np.nan

    def _of_box(self, i: int, boxes: F64, near: npt.NDArray[np.bool_]) -> F64:
        """Return what the places of boxes [c, 4] cost."""
        low, high = boxes[:, None, :2], boxes[:, None, 2:]
        over = np.minimum(self.boxes[:, 2:], high) - np.maximum(self.boxes[:, :2], low)
        cost: F64 = _COVERED * np.where((over > 0).all(2), over.prod(2), 0).sum(1)
        beside = np.maximum(np.maximum(low - self.points, self.points - high), 0)
        cost += _ON_POINT * (beside < _MARK).all(2).sum(1)
        away = np.linalg.norm(beside, axis=2)
        cost += _STRANGER * (away < away[:, i : i + 1]).sum(1) * near
        cost += _ON_LINE * _inside(self.way, boxes).sum(1) + _CROSSED * _inside(self.leaders, boxes).any(2).sum(1)
        outside = (boxes[:, :2] < self.area[:2]).any(1) | (boxes[:, 2:] > self.area[2:]).any(1)
        return cost + _OUTSIDE * outside

    def _of_leader(self, i: int, leaders: F64) -> F64:
        """Return what the leaders [c, 8, 2] cost."""
        labels = _inside(leaders, self.boxes).any(2).sum(0)
        strangers = np.delete(self.points, i, 0)
        apart = np.linalg.norm(leaders[:, :, None] - strangers, axis=3)
        cost: F64 = _CROSSED * (labels + (apart < _MARK + 1).any(1).sum(1))
        return cost


def _samples(line: F64) -> F64:
    """Return points of a line, 3 apart."""
    parts = [np.linspace(a, b, 1 + int(math.dist(a, b) / 3)) for a, b in zip(line, line[1:], strict=False)]
    return np.concatenate([line[:1], *parts])


def _inside(points: F64, boxes: F64) -> npt.NDArray[np.bool_]:
    """Tell which points [..., 2] lie in each of boxes [b, 4]: [b, ...]; none in one that is NaN."""
    boxes = boxes.reshape(-1, *[1] * (points.ndim - 1), 4)
    within = (points > boxes[..., :2]) & (points < boxes[..., 2:])
    inside: npt.NDArray[np.bool_] = np.logical_and.reduce(within, axis=-1)
    return inside
