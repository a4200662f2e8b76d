"""Kernels are right on CPUs older than this one: what cpu_name_worker.py calls, compiled for AVX2 and SSE2.

On a CPU without AVX-512 all tests run what is compiled for AVX2, and few types are compiled here; --exhaustive: all.
Encoders make the same bytes of awkward rows as on this one, which test_encode_ggml.py holds to ggml's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rows import hashes
from quantkit.kernels.cpu.core.simd import FEATURES
from quantkit.types import BY_NAME

TESTS = Path(__file__).parents[1]
#: Names and features; and what our code takes them for: the variables are no use if numba passes over them.
CPUS = {
    "avx2": ("haswell", "+avx2,+avx,+sse4.2,+sse4.1,+ssse3,+sse3,+f16c,+fma,+bmi,+bmi2,+popcnt,+lzcnt", "['avx2']"),
    "sse2": ("x86-64", "", "[]"),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_compiled_for_other_cpus(cpu: str) -> None:
    name, features, cpu_features = CPUS[cpu]
    has_avx512 = "avx512f" in FEATURES
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    environment["PYTHONPATH"] = os.pathsep.join(
        [*(str(p) for p in TESTS.iterdir() if p.is_dir()), str(TESTS), str(TESTS.parent)]
    )
    selection = "all" if os.environ.get("QUANTKIT_ALL") else "most" if has_avx512 and cpu == "avx2" else "few"
    command = [sys.executable, TESTS / "lib/cpu_name_worker.py", selection]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{cpu}: {run.stdout[-2000:]}\n{run.stderr[-8000:]}"
    taken_for, output = run.stdout.splitlines()
    assert taken_for.startswith(cpu_features)
    expected = json.loads(output)
    assert hashes(BY_NAME[name] for name in expected) == expected
