"""A run's state: sums in full precision and how far it has come, so that it goes on as if it had never stopped.

Beside OUT lies OUT.state while a run lasts (a .npz: every accumulator's arrays, and one line of JSON). It is what an
interrupted run resumes from, and what a run goes back to when a chunk brings values that are no numbers. An imatrix
itself could not serve: it has sums in float32.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.ranges import sync

Accumulators = Mapping[str, Mapping[str, npt.NDArray[Any]]]


@dataclass
class Progress:
    """How far a run has come: chunks looked at (dropped ones included), those dropped and why, the likelihood."""

    done: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    n: int = 0
    total: float = 0.0
    squares: float = 0.0


def state_of(output: Path) -> Path:
    """Return the state file of a run that writes ``output``."""
    return output.with_name(output.name + ".state")


class Checkpoint:
    """The state file of a run; ``identity`` names model, text and options, and must agree."""

    def __init__(self, output: Path, identity: str) -> None:
        self.path, self.identity = state_of(output), identity

    def save(self, accumulators: Accumulators, progress: Progress, about: Mapping[str, Any] | None = None) -> None:
        """Write the state, and ``about`` what else of JSON is to be known; the file appears whole or not at all."""
        head = json.dumps({"identity": self.identity, "progress": asdict(progress), "about": about or {}})
        arrays = {f"{of}\n{name}": array for of, parts in accumulators.items() for name, array in parts.items()}
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb") as file:
                np.savez(file, allow_pickle=False, **{"\n": np.array(head), **arrays})
            sync(part)
            os.replace(part, self.path)
        finally:
            part.unlink(missing_ok=True)
        sync(self.path.parent)

    def load(self, accumulators: Accumulators) -> Progress | None:
        """Fill the accumulators from the file and return the progress; None, and nothing done, if it does not fit."""
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                head = json.loads(str(saved["\n"]))
                arrays = {f"{of}\n{name}": array for of, parts in accumulators.items() for name, array in parts.items()}
                if head["identity"] != self.identity or set(saved.files) != {"\n", *arrays}:
                    return None
                for key, array in arrays.items():
                    array[...] = saved[key]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        made = Progress(**head["progress"])
        made.dropped = {int(chunk): why for chunk, why in made.dropped.items()}
        return made

    def about(self) -> dict[str, Any] | None:
        """Return what ``save`` was told to keep beside the sums; None if there is no state, or another run's."""
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                head = json.loads(str(saved["\n"]))
                return dict(head["about"]) if head["identity"] == self.identity else None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def remove(self) -> None:
        """Forget the state."""
        self.path.unlink(missing_ok=True)


def clear(accumulators: Accumulators) -> None:
    """Set all sums to zero."""
    for parts in accumulators.values():
        for array in parts.values():
            array[...] = 0
