"""Problems that keep a loader from loading a file, and their descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from quantkit.names import printable, shorten


class ProblemKind(Enum):
    """Kinds of problems, in the order in which a loader meets them."""

    KEY = "metadata"
    VOCABULARY = "vocabulary"
    MISSING = "missing"
    SHAPE = "shape"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason for which a file is refused: ``subject`` is a key or a tensor, ``detail`` the fault."""

    kind: ProblemKind
    subject: str
    detail: str = ""

    def __str__(self) -> str:
        subject = shorten(printable(self.subject), 80)
        match self.kind:
            case ProblemKind.MISSING:
                return f"no tensor {subject}"
            case ProblemKind.UNKNOWN:
                return f"unknown tensor {subject}"
            case ProblemKind.SHAPE:
                return f"{subject} {self.detail}"
            case _:
                return f"{subject}: {self.detail}" if subject else self.detail


def describe(problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return one sentence per kind of problem: the first of the kind, and the number of others."""
    return tuple(_first_of(problems, kind) for kind in ProblemKind if any(p.kind is kind for p in problems))


def _first_of(problems: Iterable[Problem], kind: ProblemKind) -> str:
    group = [p for p in problems if p.kind is kind]
    n_more = len(group) - 1
    return str(group[0]) + (f" (and {n_more} more)" if n_more else "")
