"""Measurements of an unfinished run, beside its output: a JSON line that identifies the run, then one per measurement.

Lines are appended; a truncated last line is ignored, and its measurement repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError, os_error_code
from quantkit.formats.outputs import read_whole, sibling_path
from quantkit.pipeline.content import Origin
from quantkit.records import DAMAGE

Key = tuple[str, ...]


class Journal:
    """The journal of an output that is held. ``measurements``: values by key.

    ``identity`` names text and options and must agree, as must the bytes of ``inputs``.
    """

    def __init__(self, out: Path, identity: str, inputs: Sequence[Path], *, resume: bool, overwrite: bool) -> None:
        self.path, self.measurements = sibling_path(out, ".journal"), dict[Key, list[float]]()
        self.identity = identity
        self.inputs = Origin(inputs)
        self.resumed = False
        if self.path.exists():
            if resume:
                self.resumed = self._read()
                if not self.resumed and not overwrite:
                    raise ResourceError(
                        f"{self.path} belongs to a run with another model, text or options: start over with "
                        "--overwrite instead of --resume",
                        "QK-E409",
                    )
            elif not overwrite:
                raise ResourceError(
                    f"{self.path} exists because an earlier run was interrupted; continue with --resume, or start "
                    "over with --overwrite",
                    "QK-E408",
                )
        inputs_now = self.inputs.record()
        try:
            self._file = self.path.open("ab" if self.resumed else "wb")
        except OSError as e:
            raise ResourceError(f"{self.path}: {e.strerror or e}", os_error_code(e)) from e
        if not self.resumed:
            self._append({"quantkit sensitivity": 1, "run": identity, "inputs": asdict(inputs_now)})

    def _read(self) -> bool:
        lines = read_whole(self.path).split(b"\n")
        valid_bytes = 0
        for number, line in enumerate(lines[:-1]):
            try:
                entry = json.loads(line)
                if number == 0 and not self._is_same_run(entry):
                    return False
                if number:
                    self.measurements[tuple(entry["of"])] = [float(x) for x in entry["is"]]
            except DAMAGE:
                break
            valid_bytes += len(line) + 1
        with self.path.open("r+b") as file:
            file.truncate(valid_bytes)
        return valid_bytes > 0

    def _is_same_run(self, head: Mapping[str, Any]) -> bool:
        """Return whether a first line identifies this run. Raises as ``Origin.is_that_of``."""
        return bool(head["run"] == self.identity) and self.inputs.matches(head["inputs"])

    def add(self, key: Key, values: list[float]) -> None:
        """Append a measurement; it survives the death of the process, because the system has it."""
        self.measurements[key] = values
        self._append({"of": key, "is": values})

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as e:
            raise ResourceError(f"{self.path}: {e.strerror or e}; the run can be resumed", os_error_code(e)) from e

    def close(self, *, remove: bool) -> None:
        """Close the file; ``remove`` it once the output is complete."""
        self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)
