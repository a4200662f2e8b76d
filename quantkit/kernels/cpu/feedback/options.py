"""How much is done for a row."""

from __future__ import annotations

from dataclasses import dataclass

#: Columns times sweeps that are not many.
_COLUMNS = 2048


@dataclass(frozen=True)
class Rounding:
    """How levels are chosen: what more costs more, and gives less each time.

    rounds: how often all of this is done, each time with the scales found before. sweeps: over all columns after
    feedback. width: the columns that are visited together in a sweep; passes: how often; repeats: how often scales and
    levels of a sub-block are chosen in turn, each time. fits: whether scales are.

    Where columns are few, sweeps take less time than one of many. There are up to ``most``, then, and ``again`` more
    rounds; beside: sub-blocks are also begun with the neighbours of their scale.
    """

    rounds: int = 1
    sweeps: int = 1
    most: int = 4
    width: int = 64
    passes: int = 1
    repeats: int = 1
    fits: bool = True
    again: int = 1
    beside: bool = True

    def sweeps_of(self, n: int) -> int:
        """Return the sweeps over n columns."""
        return max(self.sweeps, min(_COLUMNS // n, self.most))

    def rounds_of(self, n: int) -> int:
        """Return the rounds for n columns."""
        return self.rounds + (self.again if self._few(n) else 0)

    def looks_beside(self, n: int) -> bool:
        """Tell whether the neighbours of scales are tried for n columns."""
        return self.beside and self._few(n)

    def _few(self, n: int) -> bool:
        return 2 * n <= _COLUMNS
