"""How long steps take: rough figures for a plan, from what a token and a weight cost on a CPU.

A step that ran here before is a better witness: its record's time is taken instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.cpus import available_cpus
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.quality import QUALITY, SPEEDS
from quantkit.types import TensorType

#: Multiply-adds a second and core in a pass over a text, and seconds to load a model.
_MUL_ADDS, _LOAD = 15e9, 1.0
#: Weights a second and core that are encoded, by the names of speeds; with error feedback, about any type.
_ENCODED = {"fast": 400e6, "medium": 50e6, "slow": 10e6}
_FED = 0.7e6
#: Bytes a second of a disk.
_DISK = 1e9


def cores(threads: int) -> int:
    """Return how many threads will run."""
    return threads or available_cpus()


def forward_seconds(active: int, tokens: int, threads: int) -> float:
    """Return what a pass over so many tokens takes."""
    return _LOAD + tokens * active / (_MUL_ADDS * cores(threads))


def encoding_seconds(tensors: Iterable[PlannedTensor], threads: int, *, fed: bool = False) -> float:
    """Return what a plan takes to encode and to write."""
    return sum(encoded_seconds(t.type, t.n_values, threads, fed=fed) + t.nbytes / _DISK for t in tensors)


def encoded_seconds(t: TensorType, weights: int, threads: int, *, fed: bool = False) -> float:
    """Return what so many weights take in one type."""
    if not t.is_quantized:
        return 0.0
    found = QUALITY.get(t.name)
    speed = found.speed if found is not None and found.speed in SPEEDS else "medium"
    return weights / ((_FED if fed else _ENCODED[speed]) * cores(threads))


def copying_seconds(nbytes: int) -> float:
    """Return what reading and writing so many bytes takes."""
    return 2 * nbytes / _DISK
