"""Progress on stderr: a bar on a terminal that has a size, lines from time to time elsewhere."""

from __future__ import annotations

import os
import sys

import click

from quantkit.names import printable
from quantkit.units import format_seconds

#: Seconds between lines of progress.
LINE_SECONDS = 15.0
#: Share of the work after which the remaining time is estimated.
_MIN_SHARE = 0.02
#: A bar with space for text; the remaining time is computed here, not by tqdm.
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def has_bar() -> bool:
    """Return whether stderr is a terminal that can show a bar: one without a size, as of `script` in cron, cannot."""
    return _is_terminal() and all(_terminal_size())


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _terminal_size() -> tuple[int, int]:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # a test's stderr is not a file
        return (0, 0)


def seconds_left(seconds: float, share: float) -> float:
    """Return the seconds left after ``seconds`` for a share of the work; 0 while an estimate is unreliable."""
    return seconds * (1 - share) / share if _MIN_SHARE < share <= 1 else 0.0


class Lines:
    """Lines of progress, at most one in ``LINE_SECONDS``, where there is no bar.

    ``on_terminal_only``: none where stderr is a file or a pipe.
    """

    def __init__(self, *, on_terminal_only: bool = True) -> None:
        from quantkit.kernels.first_run import working_seconds  # a clock that stops while kernels are compiled

        self._clock = working_seconds
        self._is_active = not has_bar() and (_is_terminal() or not on_terminal_only)
        self._began = self._last = working_seconds()

    def update(self, current: float, total: float, text: str) -> None:
        """Print a line, if the last one was long ago."""
        now, share = self._clock(), current / total if total else 0.0
        if not self._is_active or now - self._last < LINE_SECONDS:
            return
        self._last = now
        left = seconds_left(now - self._began, share)
        words = [f"{100 * share:3.0f} %", *([printable(text)] if text else [])]
        words += [f"about {format_seconds(left)} left"] if left > 1 else []
        click.echo(", ".join(words), err=True)
