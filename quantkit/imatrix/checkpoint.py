"""The state of a run: sums in full precision and progress, so that it resumes as if it had never stopped.

OUT.state exists beside OUT during a run (a .npz: every accumulator's arrays, and one line of JSON). An interrupted run
resumes from it, and a run returns to it when a chunk yields NaN or Inf. The imatrix itself will not do: its sums are
float32.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.outputs import written

Accumulators = Mapping[str, Mapping[str, npt.NDArray[Any]]]


@dataclass
class Progress:
    """Progress of a run: chunks done (dropped ones included), those dropped and why, the likelihood."""

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
        """Write the state and ``about``, further JSON; the file appears whole or not at all."""
        head = json.dumps({"identity": self.identity, "progress": asdict(progress), "about": about or {}})
        arrays = {f"{of}\n{name}": array for of, parts in accumulators.items() for name, array in parts.items()}
        with written(self.path) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, **{"\n": np.array(head), **arrays})

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
        """Return the ``about`` of ``save``; None if there is no state, or another run's."""
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                head = json.loads(str(saved["\n"]))
                return dict(head["about"]) if head["identity"] == self.identity else None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def remove(self) -> None:
        """Remove the state."""
        self.path.unlink(missing_ok=True)


def clear(accumulators: Accumulators) -> None:
    """Set all sums to zero."""
    for parts in accumulators.values():
        for array in parts.values():
            array[...] = 0
