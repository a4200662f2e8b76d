"""Rough estimates of the time of steps, from costs per token and per weight on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.cpus import available_cpus
from quantkit.pipeline.quality import QUALITY, SPEEDS
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.types import TensorType

#: Multiply-adds per second and core in a forward pass, and seconds to load a model.
_MUL_ADDS, _LOAD_SECONDS = 15e9, 1.0
#: Weights encoded per second and core, by speed of the type; with error feedback, for any type.
_ENCODING_SPEEDS = {"fast": 400e6, "medium": 50e6, "slow": 10e6}
_FEEDBACK_SPEED = 0.7e6
#: Bytes per second of a disk.
_DISK_SPEED = 1e9


def count_cores(threads: int) -> int:
    """Return the number of threads: 0 is all CPUs."""
    return threads or available_cpus()


def forward_seconds(active: int, tokens: int, threads: int) -> float:
    """Return the seconds of a pass: load + tokens * active / (speed * cores); ``active``: weights per token."""
    return _LOAD_SECONDS + tokens * active / (_MUL_ADDS * count_cores(threads))


def plan_seconds(tensors: Iterable[PlannedTensor], threads: int, *, feedback: bool = False) -> float:
    """Return the seconds to encode and to write the tensors of a plan."""
    return sum(type_seconds(t.type, t.n_values, threads, feedback=feedback) + t.nbytes / _DISK_SPEED for t in tensors)


def type_seconds(t: TensorType, weights: int, threads: int, *, feedback: bool = False) -> float:
    """Return the seconds to encode a number of weights in a type."""
    if not t.is_quantized:
        return 0.0
    quality = QUALITY.get(t.name)
    speed = quality.speed if quality is not None and quality.speed in SPEEDS else "medium"
    return weights / ((_FEEDBACK_SPEED if feedback else _ENCODING_SPEEDS[speed]) * count_cores(threads))


def copying_seconds(nbytes: int) -> float:
    """Return the seconds to read and to write a number of bytes."""
    return 2 * nbytes / _DISK_SPEED
