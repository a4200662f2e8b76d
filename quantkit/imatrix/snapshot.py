"""Snapshots of a run: sums in full precision and progress, so that it resumes as if it had never stopped.

OUT.state exists beside OUT during a run (a .npz: every accumulator's arrays, and one line of JSON). An interrupted run
resumes from it, and a run returns to it when a chunk yields NaN or Inf. The imatrix itself does not suffice: its sums
are float32. A snapshot is resumed only with its own model, identified as in ``pipeline.content``.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.outputs import atomic_write
from quantkit.pipeline.content import FileRecord, Origin
from quantkit.records import DAMAGE

Accumulators = Mapping[str, Mapping[str, npt.NDArray[Any]]]


@dataclass
class RunState:
    """Progress of a run: finished chunks, including dropped ones; reasons by dropped chunk; the likelihood."""

    done: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    n: int = 0
    total: float = 0.0
    squares: float = 0.0


def snapshot_path(output: Path) -> Path:
    """Return the snapshot file of a run that writes ``output``."""
    return output.with_name(output.name + ".state")


class Snapshot:
    """The snapshot file of a run. ``identity`` names text and options and must agree, as must the model's bytes.

    ``model``: its files, pinned as they were opened.
    """

    def __init__(self, output: Path, identity: str, model: Sequence[Path]) -> None:
        self.path = snapshot_path(output)
        self.identity = identity
        self.model = Origin(model)

    def save(self, accumulators: Accumulators, progress: RunState, metadata: Mapping[str, Any] | None = None) -> None:
        """Write the sums and ``metadata``, further JSON, atomically. Raises as ``Origin.record``."""
        head = json.dumps(
            {
                "identity": self.identity,
                "model": asdict(self.model.record()),
                "progress": asdict(progress),
                "about": metadata or {},
            }
        )
        arrays = {f"{tensor}\n{name}": array for tensor, parts in accumulators.items() for name, array in parts.items()}
        with atomic_write(self.path) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, **{"\n": np.array(head), **arrays})

    def load(self, accumulators: Accumulators) -> RunState | None:
        """Fill the accumulators from the file and return the progress; None, without a change, if it does not fit."""
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                head = json.loads(str(saved["\n"]))
                arrays = {
                    f"{tensor}\n{name}": array
                    for tensor, parts in accumulators.items()
                    for name, array in parts.items()
                }
                if not self._is_same_run(head) or set(saved.files) != {"\n", *arrays}:
                    return None
                progress = RunState(**head["progress"])
                progress.dropped = {int(chunk): reason for chunk, reason in progress.dropped.items()}
                for key, array in arrays.items():
                    array[...] = saved[key]
        except (OSError, zipfile.BadZipFile, *DAMAGE):
            return None
        return progress

    def read_metadata(self) -> dict[str, Any] | None:
        """Return the ``metadata`` of ``save``; None without a snapshot of this run."""
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                head = json.loads(str(saved["\n"]))
                return dict(head["about"]) if self._is_same_run(head) else None
        except (OSError, zipfile.BadZipFile, *DAMAGE):
            return None

    def _is_same_run(self, head: Mapping[str, Any]) -> bool:
        """Return whether a snapshot is of this run and model. Raises as ``Origin.is_that_of``."""
        return bool(head["identity"] == self.identity) and self.model.matches(head["model"])

    def check(self, model: Sequence[Path]) -> None:
        """Raise FormatError if a reopened model is not the one of this run."""
        record = self.model.record()
        if FileRecord.read(model, [record]).digest != record.digest:
            raise FormatError(f"{model[0]}: the file was replaced between two passes; start over", "QK-E109")

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def clear(accumulators: Accumulators) -> None:
    """Set all sums to zero."""
    for parts in accumulators.values():
        for array in parts.values():
            array[...] = 0
