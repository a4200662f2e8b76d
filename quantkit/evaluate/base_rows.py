"""The base's predictions for the windows of a round, in memory: whole logits, or the compact form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantkit.evaluate.passes import F32, I32, Window
from quantkit.evaluate.scores import compare_with_compact, compare_with_logits, softmax
from quantkit.evaluate.sinks import CompactSink
from quantkit.evaluate.statistics import Scores
from quantkit.formats.logits import CompactRows

#: The compact form: most tokens of a position, and the probability that may be omitted.
TOP_K, RESIDUAL = 4096, 1e-5
#: Bytes of a position in it: 12 of each token, 20 of the position.
MOST_ROW_BYTES = 12 * TOP_K + 20


class WholeRows:
    """All logits, f32 [rows, n_vocab] of each window."""

    def __init__(self, windows: Sequence[Window], n_vocab: int) -> None:
        self._logits = [np.empty((window.rows, n_vocab), np.float32) for window in windows]

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        """Keep logits from ``row`` of a window on."""
        self._logits[window][row : row + len(logits)] = logits

    def finish(self, begin: int, end: int) -> None:
        """Do nothing: windows are complete."""

    def compare(self, window: int, row: int, logits: F32, following: I32) -> Scores:
        """Return the scores of a model's logits from ``row`` of a window on."""
        return compare_with_logits(logits, self._logits[window][row : row + len(logits)], following)


class MostProbableRows:
    """The most probable tokens of each position exactly, and the mass of the others."""

    def __init__(self) -> None:
        self._sink = CompactSink(TOP_K, RESIDUAL, None)
        self._rows: list[CompactRows] = []

    def score(self, window: int, row: int, logits: F32, following: I32) -> None:
        """Keep logits from ``row`` of a window on."""
        self._sink.write(window, row, logits, softmax(logits), following)

    def finish(self, begin: int, end: int) -> None:
        """Complete windows; called in order."""
        self._rows += [self._sink.take(window) for window in range(begin, end)]

    def compare(self, window: int, row: int, logits: F32, following: I32) -> Scores:
        """Return the scores of a model's logits from ``row`` of a window on."""
        return compare_with_compact(logits, self._rows[window].slice(row, row + len(logits)), following)
