"""Reports of panics: kept from the user, whom an error of one line tells the same."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PANIC = re.compile(rb"(?:^|\n)thread '[^'\n]*'(?: \(\d+\))? panicked at ")


@contextmanager
def panics_hidden() -> Iterator[None]:
    """Hold back standard error, and leave out what Rust prints of a panic that became an exception.

    The package tokenizers panics at some broken files, and prints where before Python hears of it; nothing but the
    process's descriptor can be told not to. So descriptor 2 is a file meanwhile, and what else was written follows.
    Only for a command, which has its process for itself, and one thread then.
    """
    try:
        real = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        _flush()
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            _flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            text = held.read()
            panic = _PANIC.search(text) if failed else None
            _write(text if panic is None else text[: panic.start()])


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def _write(text: bytes) -> None:
    with suppress(OSError):
        while text:
            text = text[os.write(2, text) :]
