"""The backends by the devices they run on; each is imported when one of its devices is asked for.

A new backend is a row of BACKENDS: how it is made and, where several operations fit one launch, how they are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from quantkit.formats.gguf import GGUFFile
from quantkit.model.backends import Backend, Options
from quantkit.model.fusion import Decision
from quantkit.model.ops import Op, Value

#: Operations, the values that leave them, options, the type of caches: operations to run, and what was decided.
Fuse = Callable[[Sequence[Op], Collection[Value], Options, str], tuple[Sequence[Op], Sequence[Decision]]]


@dataclass(frozen=True)
class Row:
    """How a backend is made for a device of a name, and how its operations are fused."""

    make: Callable[[GGUFFile, str, Options], Backend]
    fuse: Fuse = lambda ops, leaves, options, kv_type: (ops, ())


def _cpu(source: GGUFFile, device: str, o: Options) -> Backend:
    from quantkit.model.backends.cpu.backend import CPUBackend

    return CPUBackend(source, o.threads, max_ram=o.max_ram, observer=o.observer)


def _reference(source: GGUFFile, device: str, o: Options) -> Backend:
    from quantkit.model.backends.reference import Reference

    return Reference(source, o.observer)


def _cuda(source: GGUFFile, device: str, o: Options) -> Backend:
    from quantkit.kernels.cuda.core.device import open_device
    from quantkit.model.backends.cuda.backend import CUDABackend

    return CUDABackend(source, open_device(device), max_vram=o.max_vram, cublas=o.cublas, observer=o.observer)


def _fuse_launches(
    ops: Sequence[Op], leaves: Collection[Value], o: Options, kv_type: str
) -> tuple[Sequence[Op], Sequence[Decision]]:
    from quantkit.model.backends.cuda.fuse import fuse

    return fuse(ops, leaves, o.fusion, kv_type, cublas=o.cublas)


#: By the names of devices, without their number.
BACKENDS: Mapping[str, Row] = {"CPU": Row(_cpu), "REFERENCE": Row(_reference), "CUDA": Row(_cuda, _fuse_launches)}


def backend_of(device: str) -> Row:
    """Return the row of a device such as CUDA0."""
    return BACKENDS[device.rstrip("0123456789")]
