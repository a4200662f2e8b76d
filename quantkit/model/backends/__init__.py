"""What a backend is: it takes any part of a graph and runs it, batch after batch.

``reference`` (numpy, the specification), ``cpu`` (numba) and ``cuda`` stand; another one implements these two protocols
and is entered in ``Model.backend``. Values cross between backends, or between two segments of one, as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.ops import Op, Value

#: Is called with a tensor's name, the input of its multiplication [rows, n_in] and, for experts, their ids.
Observer = Callable[[str, Floats, Ints | None], None]


@dataclass(frozen=True)
class Limits:
    """What a program is made for: sequences of ``n_ctx`` cells each, ``n_ubatch`` tokens a run at most.

    kv_type: ``f32``, ``f16`` or ``q8_0``, the type of keys and values in caches.
    """

    n_ctx: int
    n_seq: int = 1
    n_ubatch: int = 512
    kv_type: str = "f16"


class Program(Protocol):
    """Operations made ready to run, with the caches and states they own.

    accumulators: what operations that look on have added up so far, by ``of``. not_finite: values among what they saw
    that are no numbers, by run; emptied by whoever acts upon it.
    """

    not_finite: list[NotFinite]

    @property
    def accumulators(self) -> Mapping[str, Accumulator]: ...

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens."""

    def read(self, value: Value) -> Any:
        """Return a value that leaves the program: [rows, width], valid until the next run."""

    def write(self, value: Value, array: Any) -> None:
        """Set a value that another program made."""

    def clear(self, sequence: int | None = None) -> None:
        """Forget what recurrent layers keep of a sequence, or of all (caches need no clearing)."""


class Backend(Protocol):
    """Makes programs."""

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> Program:
        """Return a program of ``ops``; ``leaves`` are the values that others read after a run."""

    def close(self) -> None:
        """Give back what the backend holds."""
