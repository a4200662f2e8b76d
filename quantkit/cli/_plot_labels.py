"""Placement of point labels without overlaps or ambiguity.

Every label has candidates around its point, near ones first. Its cost counts what it covers (labels, points, lines),
what its leader crosses, its distance, and other points that are nearer to it. Labels are placed one after another, the
most crowded first, and then moved to their cheapest place a few times while the others stay.
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

#: Half the size of a point, and the space around labels, in points (1/72 in).
MARK = 3.2
_PADDING = 1.0
#: Number of passes over all labels.
_ROUNDS = 6
#: Positions of labels: distances from the point (the first needs no leader) and directions.
_DISTANCES = (5.5, 10.0, 16.0, 23.0, 31.0, 41.0, 53.0)
_ANGLES = np.arange(24) * math.pi / 12
# Costs of a position.
_COVERS_LABEL = 40.0  #: of each square point of another label
_ON_POINT = 400.0
_ON_LINE = 3.0  #: of each sample of a line
_LEAVES_AREA = 1e4
_CROSSES = 60.0  #: a leader, a label or a point
_STRANGER = 25.0  #: another point is nearer than the label's own


@dataclass(frozen=True)
class Place:
    """The centre of a label, relative to its point, and whether it has a leader."""

    x: float
    y: float
    has_leader: bool


def place_labels(
    points: F64, sizes: F64, area: Box, lines: Sequence[F64] = (), obstacles: Sequence[Box] = ()
) -> list[Place]:
    """Return a place for the label of each point.

    points: [n, 2]; sizes: of labels, [n, 2]; area: allowed for labels; lines: [m, 2], and obstacles: boxes, to avoid.
    """
    search = _Search(points, sizes, area, lines, obstacles)
    distances = np.linalg.norm((points[:, None] - points[None]) / (1.5, 1), axis=2)
    order = np.argsort(-(distances < 40).sum(1), kind="stable")
    for _ in range(_ROUNDS):
        for i in order:
            search.place(int(i))
    return [place for place in search.places if place is not None]


class _Search:
    """The boxes of labels, NaN until placed, and of obstacles; points of leaders, NaN without one."""

    def __init__(self, points: F64, sizes: F64, area: Box, lines: Sequence[F64], obstacles: Sequence[Box]) -> None:
        self.points = points
        self.sizes = sizes
        self.area = np.array(area)
        self.line_points = np.concatenate([np.empty((0, 2)), *map(_samples, lines)])
        self.boxes = np.concatenate([np.full((len(points), 4), np.nan), np.reshape(obstacles, (-1, 4))])
        self.leaders = np.full((len(points), 8, 2), np.nan)
        self.places: list[Place | None] = [None] * len(points)

    def place(self, i: int) -> None:
        """Give label i its cheapest place."""
        self.boxes[i], self.leaders[i] = np.nan, np.nan
        distances, angles = np.repeat(_DISTANCES, len(_ANGLES)), np.tile(_ANGLES, len(_DISTANCES))
        needs_leader = distances > _DISTANCES[0]
        moves = np.stack([np.cos(angles), np.sin(angles)], 1) * (distances[:, None] + self.sizes[i] / 2)
        half = self.sizes[i] / 2 + _PADDING
        boxes = np.concatenate([self.points[i] + moves - half, self.points[i] + moves + half], 1)
        leaders = self.points[i] + np.linspace(0.15, 0.85, 8)[:, None] * moves[:, None]
        to_the_right = (angles == 0) & ~needs_leader
        cost = (
            distances
            + ~to_the_right
            + self._box_cost(i, boxes, ~needs_leader)
            + self._leader_cost(i, leaders) * needs_leader
        )
        best = int(np.argmin(cost))
        self.places[i] = Place(float(moves[best, 0]), float(moves[best, 1]), bool(needs_leader[best]))
        self.boxes[i], self.leaders[i] = boxes[best], leaders[best] if needs_leader[best] else np.nan

    def _box_cost(self, i: int, boxes: F64, is_near: npt.NDArray[np.bool_]) -> F64:
        """Return the costs of boxes [c, 4]."""
        low, high = boxes[:, None, :2], boxes[:, None, 2:]
        overlaps = np.minimum(self.boxes[:, 2:], high) - np.maximum(self.boxes[:, :2], low)
        cost: F64 = _COVERS_LABEL * np.where((overlaps > 0).all(2), overlaps.prod(2), 0).sum(1)
        gaps = np.maximum(np.maximum(low - self.points, self.points - high), 0)
        cost += _ON_POINT * (gaps < MARK).all(2).sum(1)
        distances = np.linalg.norm(gaps, axis=2)
        cost += _STRANGER * (distances < distances[:, i : i + 1]).sum(1) * is_near
        cost += _ON_LINE * _contains(self.line_points, boxes).sum(1) + _CROSSES * _contains(self.leaders, boxes).any(
            2
        ).sum(1)
        leaves_area = (boxes[:, :2] < self.area[:2]).any(1) | (boxes[:, 2:] > self.area[2:]).any(1)
        return cost + _LEAVES_AREA * leaves_area

    def _leader_cost(self, i: int, leaders: F64) -> F64:
        """Return the costs of leaders [c, 8, 2]."""
        labels = _contains(leaders, self.boxes).any(2).sum(0)
        strangers = np.delete(self.points, i, 0)
        distances = np.linalg.norm(leaders[:, :, None] - strangers, axis=3)
        cost: F64 = _CROSSES * (labels + (distances < MARK + 1).any(1).sum(1))
        return cost


def _samples(line: F64) -> F64:
    """Return points of a line, 3 apart."""
    parts = [np.linspace(a, b, 1 + int(math.dist(a, b) / 3)) for a, b in zip(line, line[1:], strict=False)]
    return np.concatenate([line[:1], *parts])


def _contains(points: F64, boxes: F64) -> npt.NDArray[np.bool_]:
    """Return whether points [..., 2] are inside each of boxes [b, 4], bool [b, ...]; never if the box is NaN."""
    boxes = boxes.reshape(-1, *[1] * (points.ndim - 1), 4)
    within = (points > boxes[..., :2]) & (points < boxes[..., 2:])
    result: npt.NDArray[np.bool_] = np.logical_and.reduce(within, axis=-1)
    return result
