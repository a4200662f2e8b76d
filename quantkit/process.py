"""The process of a command: standard descriptors, garbage collection and Ctrl-C."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: Whether Ctrl-C was pressed: the exception may be of another kind when it arrives.
_STATE = {"interrupted": False}


def note_interrupts() -> None:
    """Record Ctrl-C for ``interruptible``; it still raises KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _STATE["interrupted"] = True
    signal.default_int_handler(number, frame)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for any error after Ctrl-C, because packages turn it into errors of an import or a
    kernel."""
    try:
        yield
    except Exception as e:
        if not _STATE["interrupted"]:
            raise
        raise KeyboardInterrupt from e


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection, which takes a sixth to a third of the time where many lasting objects are created."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def open_descriptors() -> None:
    """Open closed standard descriptors on the null device, so that no file gets their numbers.

    Standard streams escape characters that their encoding lacks.
    """
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
