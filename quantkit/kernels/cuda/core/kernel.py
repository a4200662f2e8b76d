"""Kernels of .cu files for Python: file, macros, and packing of arguments.

A kernel's arguments and the number of threads of a block are parsed from the source (device.cuh shows the form).
Arguments are one struct, passed by value, of 8-byte members: pointers, int64_t, double, or arrays of them, whose
elements are separate arguments: x[2] is x_0 and x_1. A struct may extend another one, its base.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

#: The folder of the sources, to which every #include is relative.
SOURCES = Path(__file__).parent.parent

_STRUCT_FORMATS = {"pointer": "<q", "int64_t": "<q", "double": "<d"}

_KERNEL = re.compile(r"^KERNEL(?:_THAT_WAITS)?\((\w+),\s*(\w+)\)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A kernel: its file, its name, and the macros (name, value) that its file is compiled with.

    Kernels of one file and the same macros are one module on the device.
    """

    file: str
    name: str
    defines: tuple[tuple[str, str], ...] = ()

    def bind(self, **defines: str | int) -> Kernel:
        """Return the same kernel, compiled with more macros."""
        return _bound(self, tuple(defines.items()))

    @cached_property
    def slots(self) -> dict[str, str]:
        """The names of its arguments, in order, each with its type: ``pointer``, ``int64_t`` or ``double``."""
        return _slots(self.file, self.name)

    @cached_property
    def threads(self) -> int:
        """The threads of a block."""
        for name, count in _KERNEL.findall(source(self.file)):
            if name == self.name:
                return int(dict(self.defines).get(count, count))
        raise ValueError(f"{self.file} has no KERNEL({self.name}, threads)")

    def block(self, **values: int | float) -> bytes:
        """Pack the arguments: all of them, and no others.

        Raises:
            ValueError: an argument is missing, or unknown.
        """
        missing, unknown = self.slots.keys() - values.keys(), values.keys() - self.slots.keys()
        if missing or unknown:
            raise ValueError(f"{self.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return self.template(**values).pack({})

    def template(self, **values: int | float) -> Template:
        """Pack the arguments that are constant over launches; the others are 0."""
        slots = self.slots
        where = {name: (_STRUCT_FORMATS[kind], 8 * i) for i, (name, kind) in enumerate(slots.items())}
        return Template(where, Template(where, bytes(8 * len(slots))).pack(values))


@dataclass(frozen=True)
class Template:
    """Packed arguments of launches, and the type and offset of each."""

    where: dict[str, tuple[str, int]]
    block: bytes

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """Return the packed arguments with ``values`` filled in; KeyError for an unknown name."""
        block = bytearray(self.block)
        for name, value in values.items():
            format_, offset = self.where[name]
            struct.pack_into(format_, block, offset, value if format_ == _STRUCT_FORMATS["double"] else int(value))
        return bytes(block)


@dataclass(frozen=True)
class Shape:
    """A launch configuration: the kernel, the grid of blocks, shared memory in bytes."""

    kernel: Kernel
    grid: tuple[int, int, int]
    shared: int = 0


@cache
def _bound(kernel: Kernel, defines: tuple[tuple[str, str | int], ...]) -> Kernel:
    """Return one object for equal ones, so that lookups happen once."""
    values = {name: str(value) for name, value in defines}
    return Kernel(kernel.file, kernel.name, tuple(sorted({**dict(kernel.defines), **values}.items())))


@cache
def source(file: str) -> str:
    """Return the text of a source file."""
    return (SOURCES / file).read_text(encoding="utf-8")


@cache
def _slots(file: str, name: str) -> dict[str, str]:
    included = re.findall(r'^#include "(.*)"', source(file), re.MULTILINE)
    texts = "".join([source(file), *map(source, included)])
    match = re.search(rf"struct {name}_args (?:: (\w+)_args )?\{{(.*?)\}};", texts, re.DOTALL)
    if match is None:
        raise ValueError(f"{file}, and what it includes, has no struct {name}_args")
    slots = dict(_slots(file, match[1])) if match[1] else {}
    for member in re.sub(r"//[^\n]*", "", match[2]).split(";"):
        words = member.strip()
        if not words:
            continue
        kind, names = _split_member(words)
        slots |= dict.fromkeys(names, kind)
    return slots


def _split_member(text: str) -> tuple[str, list[str]]:
    """Parse ``const float *a, *b``, ``int64_t rows, width[2]`` or ``double eps``."""
    match = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", text, re.DOTALL)
    assert match is not None, text
    names = [name for n in match[2].split(",") for name in _elements(n.strip())]
    if all(n.startswith("*") for n in names):
        return "pointer", [n.lstrip("* ") for n in names]
    if match[1] not in ("int64_t", "double") or any("*" in n for n in names):
        raise ValueError(f"a member of a kernel's arguments is a pointer, int64_t or double: {text}")
    return match[1], names


def _elements(name: str) -> list[str]:
    """Return the names of an array's elements, or the name itself."""
    array = re.fullmatch(r"(.*)\[(\d+)\]", name)
    return [name] if array is None else [f"{array[1]}_{i}" for i in range(int(array[2]))]


# ---------------------------------------------------------------- limits of GPUs

#: KiB of shared memory per multiprocessor, from which compute capability on (CUDA C++ Programming Guide).
_KIB = {0: 48, 75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 120: 100}

#: Bytes of it that the system reserves for each block, from capability 8.0 on.
BLOCK_TAKES = 1024


def shared_of_multiprocessor(capability: int) -> int:
    """Return the bytes of shared memory of a multiprocessor, which its blocks share."""
    return _KIB[max(c for c in _KIB if c <= capability)] << 10


def shared_of_block(capability: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    return shared_of_multiprocessor(capability) - (BLOCK_TAKES if capability >= 80 else 0)
