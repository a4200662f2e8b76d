"""Kernels are right on CPUs older than this one: the golden and SIMD tests once more, compiled for AVX2 and SSE2.

numba reads the CPU's name when it is imported, so each CPU needs a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPUS = {
    "avx2": ("haswell", "+avx2,+avx,+sse4.2,+sse4.1,+ssse3,+sse3,+f16c,+fma,+bmi,+bmi2,+popcnt,+lzcnt"),
    "sse2": ("x86-64", ""),
}
#: Whole files, then of every other file the tests with these words in their names.
FILES = ["test_simd.py", "test_check.py"]
WORDS = "golden or row_range or awkward"

#: Of the engine: three zoo models take in every kind of operation, and some types their products.
ENGINE = {
    "test_engine_zoo.py": "fused-CPU and not unfused and (llama-dense or qwen3next or gpt-oss)",
    "test_observers.py": "exact",
    "test_matmul.py": "test_products and (Q4_K or IQ4_XS or Q8_0 or Q5_1)",
}


@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_compiled_for(cpu: str) -> None:
    name, features = CPUS[cpu]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    wanted = " or ".join([WORDS, *(Path(f).stem for f in FILES)])
    files = [HERE / f for f in FILES] + sorted(HERE.glob("test_encode_*.py")) + sorted(HERE.glob("test_dequantize*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", wanted]
    run = subprocess.run(
        [*command, HERE / "test_kernels.py", *files], env=environment, cwd=HERE.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{cpu}: {run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout


@pytest.mark.parametrize("file", ENGINE)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_engine_compiled_for(cpu: str, file: str) -> None:
    name, features = CPUS[cpu]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ENGINE[file], HERE / file]
    run = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True)
    assert run.returncode == 0, f"{cpu}: {run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout


def test_the_names_select_other_code() -> None:
    """Guard against a numba that ignores the variables: the features our target code asks for must differ."""
    code = "from quantkit.kernels.cpu.simd import FEATURES; print('avx2' in FEATURES, 'avx512f' in FEATURES)"
    seen = []
    for name, features in CPUS.values():
        environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
        seen.append(subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=HERE.parent, text=True))
    assert seen == ["True False\n", "False False\n"]
