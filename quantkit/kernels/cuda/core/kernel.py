"""A kernel of a .cu file for Python: its file, its macros, how its arguments are packed.

The source says which arguments a kernel takes and how many threads a block has (device.cuh shows the form); they are
read from there. Arguments are one struct, passed by value, of 8-byte members: pointers,
int64_t, double, or arrays of them, whose elements are arguments of their own: x[2] is x_0 and x_1.
A struct may go on where another one, its base, ends.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

#: Where the sources are: every #include is relative to it.
SOURCES = Path(__file__).parent.parent

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
        more = tuple((name, str(value)) for name, value in defines.items())
        return Kernel(self.file, self.name, tuple(sorted({**dict(self.defines), **dict(more)}.items())))

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
        """Pack the arguments; all must be given, and no others.

        Raises:
            ValueError: an argument is missing, or unknown.
        """
        missing, unknown = self.slots.keys() - values.keys(), values.keys() - self.slots.keys()
        if missing or unknown:
            raise ValueError(f"{self.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return struct.pack(
            "<" + "".join("d" if kind == "double" else "q" for kind in self.slots.values()),
            *(float(values[n]) if kind == "double" else int(values[n]) for n, kind in self.slots.items()),
        )


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched on data of some size: which kernel, how many blocks, shared memory in bytes."""

    kernel: Kernel
    grid: tuple[int, int, int]
    shared: int = 0


@cache
def source(file: str) -> str:
    """Return the text of a source file."""
    return (SOURCES / file).read_text(encoding="utf-8")


@cache
def _slots(file: str, name: str) -> dict[str, str]:
    included = re.findall(r'^#include "(.*)"', source(file), re.MULTILINE)
    texts = "".join([source(file), *map(source, included)])
    found = re.search(rf"struct {name}_args (?:: (\w+)_args )?\{{(.*?)\}};", texts, re.DOTALL)
    if found is None:
        raise ValueError(f"{file}, and what it includes, has no struct {name}_args")
    slots = dict(_slots(file, found[1])) if found[1] else {}
    for member in re.sub(r"//[^\n]*", "", found[2]).split(";"):
        words = member.strip()
        if not words:
            continue
        kind, names = _split_member(words)
        slots |= dict.fromkeys(names, kind)
    return slots


def _split_member(text: str) -> tuple[str, list[str]]:
    """Take ``const float *a, *b``, ``int64_t rows, width[2]`` or ``double eps`` apart."""
    found = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", text, re.DOTALL)
    assert found is not None, text
    names = [name for n in found[2].split(",") for name in _elements(n.strip())]
    if all(n.startswith("*") for n in names):
        return "pointer", [n.lstrip("* ") for n in names]
    if found[1] not in ("int64_t", "double") or any("*" in n for n in names):
        raise ValueError(f"a member of a kernel's arguments is a pointer, int64_t or double: {text}")
    return found[1], names


def _elements(name: str) -> list[str]:
    """Return the names of an array's elements, or the name itself."""
    array = re.fullmatch(r"(.*)\[(\d+)\]", name)
    return [name] if array is None else [f"{array[1]}_{i}" for i in range(int(array[2]))]
