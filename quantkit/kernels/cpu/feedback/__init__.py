"""Levels and scales chosen with error feedback (GPTQ, LDLQ), by the covariance of a matrix's inputs; its settings."""

from __future__ import annotations

from dataclasses import dataclass

#: The maximum product of columns and sweeps for which extra rounds are affordable.
_COLUMNS = 2048


@dataclass(frozen=True)
class Rounding:
    """The steps of error feedback on a row, and their numbers of repetitions.

    rounds: of all steps, each from the scales of the one before. sweeps: over all columns, after feedback. width:
    columns of a window of a sweep; passes: over a window; repeats: of the choice of scales, then levels, of a
    sub-block, in each pass. fits: whether scales are fitted.

    Where columns are few, a sweep is cheap: there are up to ``max_sweeps`` of them and ``extra_rounds`` more rounds;
    neighbour_scales: sub-blocks are also started from the neighbours of their scale.
    """

    rounds: int = 1
    sweeps: int = 1
    max_sweeps: int = 4
    width: int = 64
    passes: int = 1
    repeats: int = 1
    fits: bool = True
    extra_rounds: int = 1
    neighbour_scales: bool = True

    def sweeps_of(self, n: int) -> int:
        """Return the sweeps over n columns."""
        return max(self.sweeps, min(_COLUMNS // n, self.max_sweeps))

    def rounds_of(self, n: int) -> int:
        """Return the rounds for n columns."""
        return self.rounds + (self.extra_rounds if self._is_narrow(n) else 0)

    def tries_neighbour_scales(self, n: int) -> bool:
        """Return whether the neighbours of scales are tried for n columns."""
        return self.neighbour_scales and self._is_narrow(n)

    def _is_narrow(self, n: int) -> bool:
        return 2 * n <= _COLUMNS
