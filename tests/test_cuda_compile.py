"""Every kernel compiles for every generation of cards, down to machine code, and keeps its variables in registers."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from itertools import groupby

import pytest

from quantkit.kernels.cuda.device import compile_options, preamble
from quantkit.kernels.cuda.operation import SOURCES, Operation

#: Every family of kernels; a .cu file without one here is found out below.
FAMILIES = sorted(
    path.stem for path in SOURCES.glob("*.py") if path.stem not in ("__init__", "operation", "device", "peak")
)

CAPABILITIES = (75, 80, 90)

#: Bytes of registers that a family's kernels may put aside. mat_mat: 128 registers, so that two blocks run at once;
#: a few values that do not change are put aside over its loop, and none within the inner ones.
PUT_ASIDE = {"mat_mat": 128}


def operations(family: str) -> list[Operation]:
    """Return all operations of a family, those of one module side by side."""
    module = importlib.import_module(f"quantkit.kernels.cuda.{family}")
    found: set[Operation] = set(module.operations())
    return sorted(found, key=lambda op: (op.file, op.defines, op.name))


def modules(family: str) -> Iterator[tuple[Operation, list[str]]]:
    """Yield an operation of every module, and the names of all kernels wanted of it."""
    for _, group in groupby(operations(family), key=lambda op: (op.file, op.defines)):
        members = list(group)
        yield members[0], [op.name for op in members]


def compiled(operation: Operation, capability: int) -> str:
    """Compile a module to a cubin; return the compiler's report."""
    try:
        with warnings.catch_warnings(action="ignore"):  # CuPy looks for a toolkit, which is not needed
            from cupy.cuda import nvrtc
    except ImportError:
        pytest.skip("no NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12")
    program = nvrtc.createProgram(preamble(operation), operation.file, (), ())
    try:
        nvrtc.compileProgram(program, (*compile_options(capability), "--ptxas-options=-v"))
        assert len(nvrtc.getCUBIN(program)) > 0
    except nvrtc.NVRTCError as e:
        raise AssertionError(nvrtc.getProgramLog(program)) from e
    return str(nvrtc.getProgramLog(program))


def test_every_source_has_its_family() -> None:
    assert {path.stem for path in SOURCES.glob("*.cu")} <= set(FAMILIES)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_do_not_spill(family: str, capability: int) -> None:
    for operation, names in modules(family):
        log = compiled(operation, capability)
        for name in names:
            assert f"'quantkit_{name}'" in log, f"{operation}: no {name}"
        spilled = re.findall(r"for quantkit_(\w+)\n.*?(\d+) bytes spill stores", log)
        too_much = [s for s in spilled if s[0] in names and int(s[1]) > PUT_ASIDE.get(family, 0)]
        assert not too_much, f"{operation}: {too_much}"
