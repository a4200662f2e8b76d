"""Progress on stderr: a bar on a terminal that has a size, lines from time to time elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from tqdm import tqdm

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
    """Lines of progress, the first at once and then one in ``LINE_SECONDS``, where there is no bar.

    ``on_terminal_only``: none where stderr is a file or a pipe.
    """

    def __init__(self, *, on_terminal_only: bool = True) -> None:
        from quantkit.kernels.first_run import working_seconds  # a clock that stops while kernels are compiled

        self._clock = working_seconds
        self._is_active = not has_bar() and (_is_terminal() or not on_terminal_only)
        self._began, self._last = working_seconds(), -LINE_SECONDS

    def update(self, current: float, total: float, text: str) -> None:
        """Print a line, if the last one was long ago."""
        now, share = self._clock(), current / total if total else 0.0
        if not self._is_active or now - self._last < LINE_SECONDS:
            return
        self._last = now
        left = seconds_left(now - self._began, share)
        words = [f"{100 * share:3.0f} %"] if total else []
        words += [printable(text)] if text else []
        words += [f"about {format_seconds(left)} left"] if left > 1 else []
        if words:
            click.echo(", ".join(words), err=True)


class Bar:
    """A bar with the step and the time left; lines where the terminal has no size, nothing if ``quiet``.

    ``lines``: also where stderr is no terminal. ``layout``: arguments of tqdm.
    """

    def __init__(self, *, quiet: bool = False, lines: bool = False, **layout: Any) -> None:
        self._lines = None if quiet else Lines(on_terminal_only=not lines)
        # Units often complete several at once, so the speed is the mean since the start.
        layout = {"leave": False, "dynamic_ncols": True, "smoothing": 0, **layout}
        self._bar: tqdm[Any] | None = tqdm(**layout) if not quiet and has_bar() else None

    def update(self, current: float, total: float, text: str = "") -> None:
        """Show that ``current`` of ``total`` units (0: unknown) are done, and a text."""
        if self._lines is not None:
            self._lines.update(current, total, text)
        if self._bar is not None:
            self._bar.total = total or None
            if text:
                self._bar.set_description_str(printable(text), refresh=False)
            self._bar.update(current - self._bar.n)

    def print(self, line: str, *, err: bool = False) -> None:
        """Print a line on stdout, or stderr, above the bar."""
        with tqdm.external_write_mode(file=sys.stderr if err else sys.stdout):
            click.echo(line, err=err)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
