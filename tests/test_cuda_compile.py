"""Every kernel compiles for every generation of cards, down to machine code, and keeps its variables in registers."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from host_device import CACHE, sources_hash

from quantkit.kernels.cuda.compile import compile_module, compile_options, cubin, preamble
from quantkit.kernels.cuda.operation import SOURCES, Operation

#: Every family of kernels; a .cu file without one here is found out below.
FAMILIES = sorted(
    path.stem
    for path in SOURCES.glob("*.py")
    if path.stem not in ("__init__", "operation", "compile", "device", "early", "peak")
)

CAPABILITIES = (75, 80, 90)

#: Bytes of registers that a family's kernels may put aside. mat_mat: 128 registers, so that two blocks run at once;
#: a few values that do not change are put aside over its loop, and none within the inner ones. attention: q of long
#: heads lies in registers, too; next to nothing is put aside in the loop over keys. mat_vec: a word, for 8 columns.
PUT_ASIDE = {"mat_mat": 128, "attention": 256, "mat_vec": 4}


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
    """Return the compiler's report of a module, compiled to a cubin once for each version of the sources."""
    sources = sources_hash() + preamble(operation) + str(compile_options(capability)[1:])
    kept = CACHE.parent / "nvrtc" / hashlib.sha256(sources.encode()).hexdigest()[:32]
    if not kept.exists():
        log = compile_anew(operation, capability)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(log)
        part.rename(kept)
    return kept.read_text()


def nvrtc_or_skip() -> None:
    try:
        with warnings.catch_warnings(action="ignore"):  # CuPy looks for a toolkit, which is not needed
            from cupy.cuda import nvrtc  # noqa: F401
    except ImportError:
        pytest.skip("no NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12")


def compile_anew(operation: Operation, capability: int) -> str:
    """Compile a module to a cubin; return the compiler's report."""
    nvrtc_or_skip()
    code, log = compile_module(operation, capability, "--ptxas-options=-v")
    assert code.startswith(b"\x7fELF")
    return log


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


def test_machine_code_is_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.kernels.cuda import compile as compiling
    from quantkit.kernels.cuda.norms import norm

    nvrtc_or_skip()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    operation = norm("rms").operation
    code = cubin(operation, 90)
    assert code.startswith(b"\x7fELF")
    (kept,) = (tmp_path / "cuda").iterdir()
    monkeypatch.setattr(compiling, "compile_module", lambda *arguments: (b"another", ""))
    assert cubin(operation, 90) == code
    monkeypatch.setattr(compiling, "sources_hash", lambda: "of other sources")
    assert cubin(operation, 90) == b"another"
    assert len(list((tmp_path / "cuda").iterdir())) == 2


def test_a_source_that_does_not_compile_says_where() -> None:
    nvrtc_or_skip()
    with pytest.raises(RuntimeError, match=r"NO_SUCH_KIND.*undefined"):
        compile_module(Operation("norms.cu", "norm").bind(KIND="NO_SUCH_KIND"), 90)
