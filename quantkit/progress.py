"""Progress of verbs: the argument of ``progress=`` callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """The progress of a verb: ``current`` of ``total`` units (0: unknown) of about equal time, and the current step.

    Records of verbs with more fields (``KldProgress``) also have these, so one function serves all verbs::

        def show(now):
            print(f"{now.current / max(now.total, 1):4.0%} {now.text}", end="\\r")

        quantkit.quantize("model-bf16.gguf", "out.gguf", "Q4_K_M", progress=show)
    """

    current: float
    total: float
    text: str = ""


#: Called with the progress of a verb, from one thread at a time.
ProgressCallback = Callable[[Progress], object]


def report_lines(report: ProgressCallback | None) -> Callable[[str], None]:
    """Return a function that reports steps of unknown number, each by a line of text."""

    def call(line: str) -> None:
        if report is not None:
            report(Progress(0, 0, line))

    return call


class ByteCounter:
    """Reports bytes as progress; safe to call from threads."""

    def __init__(self, report: ProgressCallback | None, total: int) -> None:
        self._report, self._total, self._n, self._lock = report, total, 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, and report the sum."""
        with self._lock:
            self._n += nbytes
            if self._report is not None:
                self._report(Progress(self._n, self._total))
