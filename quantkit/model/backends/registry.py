"""The backends by device name, each imported on first use.

A backend is a row of BACKENDS: its constructor and, if it fuses operations into launches, its fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from quantkit.activations import EXACT
from quantkit.formats.gguf import GGUFFile
from quantkit.model.backends import Backend, Options
from quantkit.model.fusion import Decision
from quantkit.model.ops import Op, Value

#: (operations, their outputs, options, cache type) -> (operations to run, decisions)
Fuse = Callable[[Sequence[Op], Collection[Value], Options, str], tuple[Sequence[Op], Sequence[Decision]]]


@dataclass(frozen=True)
class Row:
    """The constructor of a backend, by source, device name and options, and its fusion."""

    make: Callable[[GGUFFile, str, Options], Backend]
    fuse: Fuse = lambda ops, leaves, options, kv_type: (ops, ())


def _cpu(source: GGUFFile, device: str, o: Options) -> Backend:
    from quantkit.model.backends.cpu.backend import CPUBackend

    return CPUBackend(source, o.threads, max_ram=o.max_ram, observer=o.observer, exact=o.activations == EXACT)


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


#: Backends by device name without its number.
BACKENDS: Mapping[str, Row] = {"CPU": Row(_cpu), "REFERENCE": Row(_reference), "CUDA": Row(_cuda, _fuse_launches)}


def backend_of(device: str) -> Row:
    """Return the row of a device such as CUDA0."""
    return BACKENDS[device.rstrip("0123456789")]
