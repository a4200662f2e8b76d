"""Kernels compile for older generations of GPUs, down to machine code, and keep their variables in registers.

As in test_cuda_compile.py, modules of every kind, or all: those of sm_80, which has sm_90's instructions, only then.
"""

from __future__ import annotations

import pytest
import test_cuda_dot_forms
import test_cuda_unpack
from test_cuda_compile import CAPABILITIES, FAMILIES, check_modules, compiled, fits, modules, some_of

from quantkit.kernels.cuda.core.kernel import Kernel

#: All types in one module each: how they are unpacked, how they are multiplied otherwise.
SHARED_MODULES = (
    Kernel(test_cuda_unpack.ALL, "unpack_all").bind(**test_cuda_unpack.SAMPLE_TYPES),
    Kernel(test_cuda_dot_forms.ALL, "dot_forms_all"),
)


@pytest.mark.parametrize("capability", [75, pytest.param(80, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_do_not_spill(family: str, capability: int, is_exhaustive: bool) -> None:
    selection = [module for module in modules(family) if fits(module[0], capability)]
    check_modules(family, selection if is_exhaustive else some_of(selection, capability), capability)


@pytest.mark.parametrize("kernel", SHARED_MODULES, ids=lambda kernel: kernel.name)
def test_every_type_compiles_for_turing(kernel: Kernel) -> None:
    assert f"'quantkit_{kernel.name}'" in compiled(kernel, CAPABILITIES[0])
