"""How much is done for a row."""

from __future__ import annotations

from dataclasses import dataclass

#: Columns times sweeps that are not many.
_COLUMNS = 2048


@dataclass(frozen=True)
class Rounding:
    """How levels are chosen: what more costs more, and gives less each time.

    rounds: how often all of this is done, each time with the scales found before. sweeps: over all columns after
    feedback; where columns are few, up to ``most``, which take less time than one sweep of many. width: the columns
    that are visited together in a sweep; passes: how often; repeats: how often scales and levels of a sub-block are
    chosen in turn, each time. fits: whether scales are.
    """

    rounds: int = 1
    sweeps: int = 1
    most: int = 4
    width: int = 64
    passes: int = 1
    repeats: int = 1
    fits: bool = True

    def sweeps_of(self, n: int) -> int:
        """Return the sweeps over n columns."""
        return max(self.sweeps, min(_COLUMNS // n, self.most))
