"""Kernels compile down to machine code, and keep their variables in registers.

Each macro that chooses code has each of its values once, and of encoders each type has; --exhaustive: all modules.
test_cuda_unpack.py and test_cuda_dot_forms.py compile all types in one module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from ptx.device import NEWEST, compile_kernel, nvrtc
from ptx.selection import SIZES, TENSOR_CORES, TYPES
from refusals import refuses

from quantkit.errors import ResourceError
from quantkit.kernels.cuda.core.compile import compile_module, machine_code, target_of
from quantkit.kernels.cuda.core.kernel import SOURCES, Kernel
from quantkit.units import round_up

#: Every family of kernels; a .cu file without one here is found out below.
FAMILIES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for path in SOURCES.rglob("*.py")
    if path.stem != "__init__" and path.parent.name != "core" and "\ndef kernels() " in path.read_text()
)

#: For the others than the last one: test_cuda_compile_generations.py.
CAPABILITIES = (75, 80, NEWEST)
#: Macros that choose no instructions. sm_75 has other instructions, and registers for fewer columns; sm_80 has those of
#: sm_90, but for early launches.
SAME_CODE = SIZES | TYPES | {"ACTIVATION", "SHARED", "TEAM"}
PASSED_OVER = {75: SAME_CODE - {"COLUMNS"}, 80: SAME_CODE | {"CACHE"}, NEWEST: SAME_CODE}
#: Bytes of registers that a family's kernels may spill. mat_mat: 128 registers, so that two blocks run at once;
#: a few values that do not change are spilled across its loop, and none within the inner ones. attention: q of long
#: heads lies in registers, too; almost nothing is spilled in the loop over keys. mat_vec: a word, for 8 columns.
#: feedback: what changes once for some columns, so that three blocks run at once; groups: some of the losses of 64
#: lines of roots, which are read once, so that two do. trellis: two words, before sm_90, but of IQ3_KT.
PUT_ASIDE = {
    "encode.trellis": 8,
    "matmul.mat_mat": 128,
    "attention.attention": 256,
    "matmul.mat_vec": 4,
    "feedback.sweeps": 40,
    "feedback.groups": 80,
    "feedback.refine": 48,
}

#: Kernels with an array of words for sines of large angles (CUDA's own).
REDUCES_ANGLES = {"rope_table"}


#: Kernels, one of each module, with the names of all kernels needed from it.
Modules = list[tuple[Kernel, list[str]]]


def kernels(family: str) -> list[Kernel]:
    """Return all kernels of a family, those of one module side by side."""
    module = importlib.import_module(f"quantkit.kernels.cuda.{family}")
    names: set[Kernel] = set(module.kernels())
    return sorted(names, key=lambda op: (op.file, op.defines, op.name))


def modules(family: str) -> Iterator[tuple[Kernel, list[str]]]:
    """Yield a kernel of every module, and the names of all kernels wanted of it."""
    for _, group in groupby(kernels(family), key=lambda op: (op.file, op.defines)):
        members = list(group)
        yield members[0], [op.name for op in members]


def fits(kernel: Kernel, capability: int) -> bool:
    """Return whether a GPU runs a kernel: 64 keys of latent attention do not fit the 64 KiB of Turing."""
    macros = dict(kernel.defines)
    return capability > 75 or (macros.get("HEAD_K"), macros.get("KEYS")) != ("576", "64")


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


def compiled(kernel: Kernel, capability: int) -> str:
    """Return the compiler's report of a module, compiled to a cubin."""
    nvrtc_or_skip()
    return compile_kernel(kernel, f"sm_{capability}").with_suffix(".log").read_text()


def nvrtc_or_skip() -> Any:
    try:
        return nvrtc()
    except (ImportError, RuntimeError):
        pytest.skip("no NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12")


def test_every_source_has_kernels() -> None:
    sources = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu")}
    assert sources
    assert sources <= {kernel.file for family in FAMILIES for kernel in kernels(family)}


def check_modules(family: str, selection: Modules, capability: int) -> None:
    """Compile modules of a family, and check the bytes that their kernels spill."""
    for kernel, names in selection:
        log = compiled(kernel, capability)
        for name in names:
            assert f"'quantkit_{name}'" in log, f"{kernel}: no {name}"
        framed = re.findall(r"for quantkit_(\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores", log)
        frames = [(name, int(frame), int(spilled)) for name, frame, spilled in framed if name in names]
        too_much = [entry for entry in frames if entry[2] > PUT_ASIDE.get(family, 0)]
        assert not too_much, f"{kernel}: {too_much}"
        copied = [entry for entry in frames if entry[1] > round_up(entry[2], 8) and entry[0] not in REDUCES_ANGLES]
        assert not copied, f"{kernel}: arguments, or an array, lie in each thread's memory: {copied}"


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_and_do_not_spill(family: str, is_exhaustive: bool) -> None:
    selection = [module for module in modules(family) if fits(module[0], NEWEST)]
    check_modules(family, selection if is_exhaustive else some_of(selection, NEWEST), NEWEST)


def test_machine_code_is_cached_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.kernels.cuda.core import compile as compiling
    from quantkit.kernels.cuda.layer.norms_rope import norm

    nvrtc_or_skip()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    kernel = norm("rms").kernel
    code = machine_code(kernel, 90)
    assert code.startswith(b"\x7fELF")
    (cubin,) = (tmp_path / "cuda").rglob("*.cubin")
    monkeypatch.setattr(compiling, "compile_module", lambda *arguments: (b"another", ""))
    assert machine_code(kernel, 90) == code
    monkeypatch.setattr(compiling, "sources_hash", lambda: "of other sources")
    assert machine_code(kernel, 90) == b"another"
    assert len(list((tmp_path / "cuda").rglob("*.cubin"))) == 2


@pytest.mark.parametrize(
    ("capability", "targets", "target"),
    [
        (90, (75, 80, 86, 89, 90), "sm_90"),
        (121, (90, 100, 120, 121), "sm_121"),
        (89, (75, 80, 86), "sm_86"),
        (89, (75, 80, 86, 87), "sm_86"),  # an Orin's machine code is for Orin
        (103, (90, 100, 101), "sm_100"),
        (90, (75, 80, 86, 87, 89), "compute_89"),
        (120, (80, 90, 100, 101, 103), "compute_103"),
        (87, (75, 80, 86), "compute_86"),
    ],
)
def test_a_gpu_newer_than_the_compiler(capability: int, targets: tuple[int, ...], target: str) -> None:
    assert target_of(capability, targets) == target


def test_a_gpu_too_old_for_the_compiler() -> None:
    nvrtc_or_skip()
    with refuses(ResourceError, "QK-E411 NVRTC 7.0"):
        target_of(70, (75, 80))


def test_newer_generations_get_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.kernels.cuda.core import compile as compiling
    from quantkit.kernels.cuda.layer.norms_rope import norm

    nvrtc_or_skip()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    kernel = norm("rms").kernel
    for capability, targets, begins in ((90, (75, 80, 86), b".target sm_86\n"), (89, (75, 80, 86), b"\x7fELF")):
        monkeypatch.setattr(
            compiling, "_target", lambda capability_asked, targets=targets: target_of(capability_asked, targets)
        )
        code = machine_code(kernel, capability)
        assert begins in code
        assert code.endswith(b"\0")
        assert machine_code(kernel, capability) == code
    assert sorted(path.suffix for path in (tmp_path / "cuda").rglob("*.*")) == [".cubin", ".ptx"]


def test_a_compilation_error_names_the_source() -> None:
    nvrtc_or_skip()
    with pytest.raises(RuntimeError, match=r"NO_SUCH_KIND.*undefined"):
        compile_module(Kernel("layer/norms.cu", "norm").bind(KIND="NO_SUCH_KIND"), 90)
