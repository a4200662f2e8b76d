"""Interface of backends, which compile any part of a graph and run it, batch after batch.

Backends are ``reference`` (numpy, the specification), ``cpu`` (numba) and ``cuda``; another one implements these two
protocols and gets a row in registry.py. Values are passed between backends, or between segments of one backend, as
numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.activations import RUNTIME
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.fusion import Fusion
from quantkit.model.ops import Op, Value

#: Called with a tensor's name, the input of its multiplication [rows, n_in] and, for experts, their ids.
Observer = Callable[[str, Floats, Ints | None], None]


@dataclass(frozen=True)
class Limits:
    """The limits of a program: sequences of ``n_ctx`` cells each, ``n_ubatch`` tokens a run at most.

    kv_type: the type of keys and values in caches (kv_types.py).
    """

    n_ctx: int
    n_seq: int = 1
    n_ubatch: int = 512
    kv_type: str = "f16"


@dataclass(frozen=True)
class Options:
    """Options of backends; ``quantkit.model.engine.load`` explains each."""

    threads: int
    fusion: Fusion
    max_ram: int | None = None
    max_vram: int | None = None
    cublas: bool = False
    observer: Observer | None = None
    activations: str = RUNTIME


class Program(Protocol):
    """Compiled operations, with the caches and states they own.

    accumulators: the sums of observing operations so far, by label. not_finite: reports of values that are not finite,
    which the caller clears.
    """

    not_finite: list[NotFinite]

    @property
    def accumulators(self) -> Mapping[str, Accumulator]: ...

    def run(self, batch: Batch) -> None:
        """Carry out all operations for a batch of at most ``n_ubatch`` tokens."""

    def read(self, value: Value) -> Any:
        """Return a value that leaves the program: [rows, width], valid until the next run."""

    def write(self, value: Value, array: Any) -> None:
        """Set a value that another program computed."""

    def clear(self, sequence: int | None = None) -> None:
        """Reset the states of a sequence, or of all (caches need no reset)."""


class Backend(Protocol):
    """Compiler of programs for one device."""

    def compile(self, ops: Sequence[Op], limits: Limits, leaves: Sequence[Value]) -> Program:
        """Return a program of ``ops``; ``leaves`` are the values read after a run."""

    def close(self) -> None:
        """Free the backend's resources."""
