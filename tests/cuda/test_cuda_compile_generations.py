"""Kernels compile for older generations of GPUs, down to machine code, and keep their variables in registers.

Each macro that chooses code has each of its values once; test_cuda_compile.py compiles all modules for the newest.
"""

from __future__ import annotations

import pytest
import test_cuda_dot_forms
import test_cuda_unpack
from ptx.selection import SIZES, TENSOR_CORES, TYPES
from test_cuda_compile import CAPABILITIES, FAMILIES, Modules, check_modules, compiled, fits, modules

from quantkit.kernels.cuda.core.kernel import Kernel

#: sm_75 has other instructions, and registers for fewer columns; sm_80 has those of sm_90, but for early launches.
SAME_CODE = SIZES | TYPES | {"ACTIVATION", "SHARED", "TEAM"}
PASSED_OVER = {75: SAME_CODE - {"COLUMNS"}, 80: SAME_CODE | {"CACHE"}}

#: All types in one module each: how they are unpacked, how they are multiplied otherwise.
SHARED_MODULES = (
    Kernel(test_cuda_unpack.ALL, "unpack_all").bind(**test_cuda_unpack.SAMPLE_TYPES),
    Kernel(test_cuda_dot_forms.ALL, "dot_forms_all"),
)


def some_of(all_modules: Modules, capability: int) -> Modules:
    """Return modules in which each kernel is, with and without each macro that chooses code, and each of its values."""
    selection, kinds = Modules(), set[tuple[str, ...]]()
    for kernel, names in all_modules:
        by_type = capability < 80 and (
            kernel.file == TENSOR_CORES or "TILES" in dict(kernel.defines)
        )  # of each type other instructions
        passed_over = PASSED_OVER[capability] - (TYPES if by_type else set())
        macros = [define for define in kernel.defines if define[0] not in passed_over]
        of_it = {(kernel.file, *define) for define in macros}
        of_it |= {(kernel.file, name, *(macro for macro, _ in macros)) for name in names}
        if not of_it <= kinds:
            selection.append((kernel, names))
        kinds |= of_it
    return selection


@pytest.mark.parametrize("capability", CAPABILITIES[:-1])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_do_not_spill(family: str, capability: int, request: pytest.FixtureRequest) -> None:
    selection = [module for module in modules(family) if fits(module[0], capability)]
    if not request.config.getoption("--all-ptx"):
        selection = some_of(selection, capability)
    check_modules(family, selection, capability)


@pytest.mark.parametrize("kernel", SHARED_MODULES, ids=lambda kernel: kernel.name)
def test_every_type_compiles_for_turing(kernel: Kernel) -> None:
    assert f"'quantkit_{kernel.name}'" in compiled(kernel, CAPABILITIES[0])
