"""Which cases run as PTX, too, unless --all-ptx: of each file, the first that launches a kernel.

So a file begins with tests of random inputs, which show any mistake; those of special ones come behind.

A kernel is a source, a name and the macros that choose code, for a capability. Sizes choose none, and types only
where they are multiplied by tensor cores, where they choose a way to multiply: the rest of their code is C++ alone, but
for what tests/kernels takes together. Of encoders with the same search one runs, unless --exhaustive, and not each
product of choices for tensor cores; the shim runs all of them. Its run of the same case tells what is launched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import SEARCHES, struct_of
from quantkit.kernels.cuda.encode.encode import encoders
from quantkit.kernels.formats import FORMATS
from quantkit.types import BY_NAME

#: Macros that are sizes, and types of weights.
SIZES = {
    *("BLOCKS_AT_ONCE", "COLUMNS", "HEAD", "HEAD_K", "HEAD_V", "KEYS", "LANES", "ROWS", "SPAN", "THREADS", "TOKENS"),
    *("UNITS", "CLASSES", "FIRST_OF_POINTS", "HEIGHT_BITS", "KEPT", "PATTERNS", "POINT_BITS", "ROOT_LINES"),
    *("HELD", "SHARED_BYTES", "SIZE", "SURVIVOR_WORDS", "UNIT"),
}
TYPES = {"TYPE", "OTHER"}
TENSOR_CORES = "matmul/mat_mat.cu"

#: The search of each encoder: its source, project, minimums, grid, scale of a row.
ENCODER_SEARCHES = {
    struct_of(BY_NAME[name], search): (
        *(file, search, FORMATS[name].mins, FORMATS[name].grid > 0),
        BY_NAME[name].row_header > 0,
    )
    for search in SEARCHES
    for name, file in encoders(search).items()
}

Kinds = set[tuple[object, ...]]


def kinds(launched: set[tuple[Kernel, int]], is_exhaustive: bool = False) -> Kinds:
    """Return the launched kernels.

    Unless exhaustive, encoders of one search are one, and of tensor cores each kernel with a tile, each path of types
    with a tile, and each activation are apart: they do not depend on each other.
    """
    if is_exhaustive:
        return {(kernel.file, kernel.name, capability, *_choices(kernel)) for kernel, capability in launched}
    return {(kernel.file, capability, *kind) for kernel, capability in launched for kind in _kinds(kernel)}


def _kinds(kernel: Kernel) -> Kinds:
    if kernel.file == TENSOR_CORES:
        tokens, activation, form = _choices(kernel)
        return {(kernel.name, tokens), (form, tokens), ("ACTIVATION", activation)}
    return {(kernel.name, *map(_search, _choices(kernel)))}


def _search(choice: object) -> object:
    """Return the search of a macro that names an encoder; else the choice itself."""
    name, value = choice if isinstance(choice, tuple) and len(choice) == 2 else ("", "")
    return ENCODER_SEARCHES[value] if name == "ENCODER" else choice


def _choices(kernel: Kernel) -> tuple[object, ...]:
    macros = dict(kernel.defines)
    defines = tuple(define for define in kernel.defines if define[0] not in SIZES | TYPES)
    if kernel.file == TENSOR_CORES:  # the shared memory that a tile and a type take is a size, too
        return macros["TOKENS"], macros.get("ACTIVATION"), _unpack_form(macros["TYPE"])
    return (*defines, macros["TYPE"]) if "TILES" in macros else defines


def _unpack_form(name: str) -> tuple[object, ...]:
    """Return the tensor-core path of a type; other types of the same path differ in their unpacker."""
    record = FORMATS[name]
    return record.span, record.mins, record.folded_scale_bytes, record.grid > 0, name if record.is_float else ""


class ChosenNodes:
    """Keeps what cases launched on the shim, and which kernels of each file ran as PTX."""

    def __init__(self, is_exhaustive: bool = False) -> None:
        self._is_exhaustive = is_exhaustive
        self._on_shim: dict[tuple[object, ...], Kinds] = {}
        self._kinds_by_path: dict[Path, Kinds] = {}

    def ran_on_shim(self, node: Any, launched: set[tuple[Kernel, int]]) -> None:
        self._on_shim[_case(node)] = kinds(launched, self._is_exhaustive)

    def ran_as_ptx(self, node: Any, launched: set[tuple[Kernel, int]]) -> None:
        self._kinds_by_path.setdefault(node.path, set()).update(kinds(launched, self._is_exhaustive))

    def wants(self, node: Any) -> bool:
        """Return whether a case has a kernel that no previous one had; true for one that did not run on the shim."""
        lines = self._on_shim.get(_case(node))
        return lines is None or bool(lines - self._kinds_by_path.get(node.path, set()))


def _case(node: Any) -> tuple[object, ...]:
    """Return the key shared by a test's cases on all devices."""
    words = node.callspec.id.split("-")
    return node.path, node.originalname, *(word for word in words if word != node.callspec.params["device"])
