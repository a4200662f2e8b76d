"""The journal of a run: the tensors that are safe on the disk, so that a killed run can resume.

Beside ``OUT.gguf.part`` is ``OUT.gguf.journal``: a line of JSON that identifies the run, then one for every tensor
whose bytes were flushed to the disk before the line was written, then one that marks the output as complete. A line
truncated by a crash is ignored, and its work is repeated.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from quantkit.errors import ResourceError, os_error_code
from quantkit.records import DAMAGE


class JournalEntry(NamedTuple):
    """A finished tensor: CRC-32 of its bytes, error sums, and, with feedback, losses of each matrix.

    ``source``: the values of a job, and a digest of the rows that the jobs read; None where some were not read.
    """

    crc: int
    sums: list[float]
    losses: list[list[float]]
    source: tuple[int, int] | None = None


def has_mark(path: Path, text: str) -> bool:
    """Return whether a journal has the line of ``Journal.mark``. Raises OSError."""
    with open(path, "rb") as file:
        return json.dumps({"mark": text}).encode() in file.read().split(b"\n")


class Journal:
    """The open journal of an output that is held. ``crcs``: CRC-32 of the bytes of finished tensors, by name.

    ``inputs``: stamps of the source files (``formats.files.stamp_of``).
    """

    def __init__(self, path: Path, fingerprint: str, inputs: list[list[int | str]]) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.inputs = inputs
        self.crcs: dict[str, int] = {}
        #: Source digests of finished tensors, where known: see ``JournalEntry``.
        self.sources: dict[str, tuple[int, int]] = {}
        self.sums: dict[str, list[float]] = {}
        self.losses: dict[str, list[list[float]]] = {}
        #: Notes of the run's target, in order.
        self.notes: list[dict[str, Any]] = []
        self.sealed = False
        self._inputs_before: list[list[int | str]] = []
        self._lock = threading.Lock()
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - held until close()
        except OSError as e:
            raise ResourceError(f"{path}: {e.strerror}; nothing was written", os_error_code(e)) from e

    def start(self) -> None:
        """Empty the journal and write its first line."""
        self._file.truncate(0)
        self.crcs.clear()
        self.sources.clear()
        self.sums.clear()
        self.losses.clear()
        self.notes.clear()
        self.sealed = False
        self._append({"quantkit": 1, "run": self.fingerprint, "inputs": self.inputs})

    @property
    def inputs_changed(self) -> bool:
        """Whether the source files differ from those at the start of the run."""
        return self._inputs_before != self.inputs

    def record_inputs(self) -> None:
        """Record the inputs of a resumed run whose files differ but whose finished tensors are still valid."""
        self._append({"inputs": self.inputs})

    def read_notes(self) -> list[dict[str, Any]]:
        """Return the notes in the journal, of any run."""
        self._file.seek(0)
        notes = []
        for line in self._file.read().split(b"\n")[:-1]:
            with suppress(*DAMAGE):
                notes.append(dict(json.loads(line)["note"]))
        return notes

    def resume(self) -> bool:
        """Load the entries of an earlier run of the same work; False if the journal belongs to other work."""
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        keep = 0
        for i, line in enumerate(lines[:-1]):
            try:
                entry = json.loads(line)
                if i == 0 and entry["run"] != self.fingerprint:
                    return False
                self._apply(entry)
            except DAMAGE:  # not JSON, or not of a journal
                break
            keep += len(line) + 1
        self._file.truncate(keep)
        return keep > 0

    def _apply(self, entry: dict[str, Any]) -> None:
        if "tensor" in entry:
            losses = [[float(v) for v in row] for row in entry.get("losses", ())]
            source = (int(entry["source"][0]), int(entry["source"][1])) if "source" in entry else None
            sums = [float(s) for s in entry["sums"]]
            self._enter(entry["tensor"], JournalEntry(int(entry["crc32"]), sums, losses, source))
        if "inputs" in entry:
            self._inputs_before = list(entry["inputs"])
        if "note" in entry:
            self.notes.append(dict(entry["note"]))
        self.sealed = self.sealed or "sealed" in entry

    def forget(self, name: str) -> None:
        """Remove a tensor whose bytes no longer match."""
        del self.crcs[name]

    def add(self, tensors: dict[str, JournalEntry]) -> None:
        """Record tensors whose bytes are on the disk, by name."""
        for name, entry in tensors.items():
            self._enter(name, entry)
        self._append(
            *(
                {"tensor": name, "crc32": crc, "sums": sums}
                | ({"losses": losses} if losses else {})
                | ({"source": source} if source else {})
                for name, (crc, sums, losses, source) in tensors.items()
            )
        )

    def _enter(self, name: str, entry: JournalEntry) -> None:
        self.crcs[name], self.sums[name] = entry.crc, entry.sums
        if entry.source:
            self.sources[name] = entry.source
        if entry.losses:
            self.losses[name] = entry.losses

    def mark(self, text: str) -> None:
        """Write a line by which another process recognizes this journal, and so the same folder."""
        self._append({"mark": text})

    def note(self, entry: dict[str, Any]) -> None:
        """Record a note of the target, from any thread; a resumed run has it in ``notes``."""
        self.notes.append(entry)
        self._append({"note": entry})

    def seal(self) -> None:
        """Record that every byte of the output is on the disk."""
        self.sealed = True
        self._append({"sealed": True})

    def _append(self, *entries: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(b"".join(json.dumps(e).encode() + b"\n" for e in entries))
            self._file.flush()
            os.fdatasync(self._file.fileno())

    def remove(self) -> None:
        """Delete the journal of finished or abandoned work."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
