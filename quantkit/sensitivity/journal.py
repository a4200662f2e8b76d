"""What a run has measured so far, beside its output: a line of JSON that identifies it, then one for each measurement.

Lines are appended; one that a kill cut off is ignored, and measured again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError
from quantkit.formats.outputs import beside

Key = tuple[str, ...]


class Journal:
    """The journal of an output that is held. ``done``: what was measured, by its key."""

    def __init__(self, out: Path, identity: str, *, resume: bool, overwrite: bool) -> None:
        self.path, self.done = beside(out, ".journal"), dict[Key, list[float]]()
        self.resumed = False
        if self.path.exists():
            if resume:
                self.resumed = self._read(identity)
                if not self.resumed and not overwrite:
                    raise ResourceError(
                        f"{self.path} is of another model, text or options: --overwrite starts anew, without --resume"
                    )
            elif not overwrite:
                raise ResourceError(
                    f"{self.path} is there: an earlier run was interrupted; --resume goes on with it, --overwrite "
                    "starts anew"
                )
        try:
            self._file = self.path.open("ab" if self.resumed else "wb")
        except OSError as e:
            raise ResourceError(f"{self.path}: {e.strerror or e}") from e
        if not self.resumed:
            self._append({"quantkit sensitivity": 1, "run": identity})

    def _read(self, identity: str) -> bool:
        lines = self.path.read_bytes().split(b"\n")
        whole = 0
        for number, line in enumerate(lines[:-1]):
            try:
                entry = json.loads(line)
                if number == 0 and entry["run"] != identity:
                    return False
                if number:
                    self.done[tuple(entry["of"])] = [float(x) for x in entry["is"]]
            except (ValueError, LookupError, TypeError):
                break
            whole += len(line) + 1
        with self.path.open("r+b") as file:
            file.truncate(whole)
        return whole > 0

    def add(self, key: Key, values: list[float]) -> None:
        """Note a measurement; a killed process loses none, for the system has it."""
        self.done[key] = values
        self._append({"of": key, "is": values})

    def _append(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        except OSError as e:
            raise ResourceError(f"{self.path}: {e.strerror or e}; what is there can be resumed") from e

    def close(self, *, remove: bool) -> None:
        """Close it; ``remove`` it when its output is there."""
        self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)
