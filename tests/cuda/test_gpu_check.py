"""scripts/gpu_check without a GPU: its checks on the shim, its measurements in small, and what it must do without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import host_device
import numpy as np
import pytest

from guide import step
from quantkit.kernels import first_run

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(host_device.compiler() is None, reason="no C++ compiler: install g++")

#: Nothing but numpy and the standard library, as where the GPU is; CuPy is found missing.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "click", "tqdm", "gguf", "ml_dtypes", "zstandard", "jinja2"}:
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocked())
"""

SMALL = """
import sys
sys.path[:0] = ["scripts", "tests", "tests/lib"]
from gpu import cases, check, speed
check.use_shim()
from quantkit.kernels.cuda.core.device import open_device
speed._GPU[:] = [speed.Card(open_device("CUDA0"), 1.0, float(sys.argv[2]))]
speed.SIZES = speed.Sizes(
    matrix_bytes=1 << 18, in_turn=2, in_graph=2, token_counts=(1, 4), n_in=512, dense=256, wide=288, tokens=12,
    experts=4, used=2, expert_in=256, expert_out=256, heads=4, vocab=96, gates=(1, 12), depths=(100,), latent_heads=2,
    layers=1, single=1, repetitions=1, of_products=1, of_model=1, types=("Q8_0", "F16", "IQ2_KT"), caches=("f16",),
)
from pathlib import Path
import time
folder = Path(sys.argv[1])
run = check.Run(folder / "out.md", folder, time.time() + 1e6, ("Q4_0", "NVFP4", "IQ4_KS"))
speed.GATED_TYPES = ("Q4_K",)
for step in sys.argv[3:]:
    check.STEPS[step](run)
sys.exit(run.n_failed)
"""


#: What begins a process that does steps of a Run on the shim.
ON_SHIM = (
    SMALL.partition("speed._GPU")[0]
    + """
from pathlib import Path
import time
run = check.Run(Path(sys.argv[1]) / "out.md", Path(sys.argv[1]), time.time() + 600, ["Q8_0"])
"""
)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def gpu_check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tests/gpu/check.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_needs_only_numpy_and_cupy() -> None:
    process = python(BLOCK + 'sys.path[:0] = ["tests", "tests/lib"]\nfrom gpu import check\nprint(len(check.STEPS))')
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 10


def test_without_a_gpu_it_reports_an_error() -> None:
    from quantkit.kernels.cuda.core.device import count_devices

    if count_devices():
        pytest.skip("there is a CUDA device")
    process = gpu_check()
    assert process.returncode == 1
    assert process.stderr.startswith("gpu_check: no CUDA device: ")
    assert "Traceback" not in process.stderr


STEPS = ("--only", "products", "placements", "encoding", "parity", "rounding", "metrics", "pipeline")


@needs_compiler
def test_checks_pass_on_the_shim_and_are_recorded(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    process = gpu_check("--shim", "--out", out, "--types", "Q8_0", *STEPS)
    assert process.returncode == 0, process.stdout + process.stderr
    text = out.read_text()
    assert "products beside the CPU backend: 1 done, worst NMSE" in text
    assert "placements: 7 mixtures" in text
    assert "golden bytes: 2 cases are llama.cpp's and ik_llama.cpp's" in text
    assert "random rows: 1 cases of 64 x 2048 values have the CPU's bytes" in text
    assert "error feedback: 3 rows of 1 types have the CPU's bytes and losses" in text
    assert "a metric of 96 columns: " in text
    assert "--verify: 2 jobs are identical to the CPU's" in text
    assert text.rstrip().endswith("all checks passed")


@needs_compiler
def test_models_of_the_zoo_in_parts_or_at_once(tmp_path: Path) -> None:
    code = ON_SHIM + "run.only = {'zoo': ('llada-dense', 'qwen2-dense')}\ncheck.zoo(run)\nsys.exit(run.n_failed)"
    process = python(code, tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "zoo models in F32 beside llama.cpp, fused and unfused: 2 done, worst NMSE" in process.stdout


@needs_compiler
def test_error_feedback_of_whole_files(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    process = gpu_check("--shim", "--out", out, "--types", "Q4_K", "--only", "feedback")
    assert process.returncode == 0, process.stdout + process.stderr
    text = out.read_text()
    assert text.count("error feedback: a MoE of 0.2 M weights, F16, with covariances; 2 cards") == 1
    assert "--backend cuda: CUDA0, CUDA1 encode 9 tensors\n" in text
    assert "feedback: Q4_K_M: cards " in text
    assert text.rstrip().endswith("all checks passed")


@needs_compiler
def test_a_wrong_result_fails(tmp_path: Path) -> None:
    """The lowest bit of one level in 32 is found."""
    code = ON_SHIM + (
        "cases.blocks_right = cases.blocks\n"
        "def off(t, count, seed, largest=64):\n"
        "    data = cases.blocks_right(t, count, seed, largest).copy()\n"
        "    data[:, -1] ^= 1\n"
        "    return data\n"
        "cases.blocks = off\n"
        "check.carry_out(run, ['products'])\n"
        "print(run.n_failed)\n"
    )
    process = python(code, tmp_path)
    assert process.returncode == 0, process.stderr
    assert "FAILED products: Q8_0, dense, 1" in process.stdout
    assert int(process.stdout.split()[-1]) >= 3


CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/lib"]
from gpu import run as gpu_run
gpu_run.gpu_answers = lambda: False
run = gpu_run.Run(Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), ())
def part(name):
    run.say(f"{name} begins")
    if name == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang": time.sleep(600)
    if name == "lose": raise RuntimeError("an illegal address")
    run.check(name, 2.0 if name == "wrong" else 0.5, 1)
def prepare():
    run.say("prepares")
    if run.todo("unready", ["second"]): os.kill(os.getpid(), signal.SIGSEGV)
def unready():
    run.for_each("unready", ["good"], part)
    prepare()
    run.for_each("unready", ["second"], part)
run.do("step", lambda: run.for_each("step", ["good", "crash", "wrong", "hang", "lose", "last"], part))
run.do("unready", unready)
run.do("worse", lambda: 1 / 0)
run.do("later", lambda: run.for_each("later", ["good"], part))
"""


def test_a_crash_or_hang_fails_only_one_check(tmp_path: Path) -> None:
    from gpu import run as gpu_run

    out, work = tmp_path / "out.md", tmp_path / "work"
    work.mkdir()
    out.touch()
    until = time.time() + 600
    command = [sys.executable, "-c", CHILD, *map(str, (ROOT / "tests", out, work, until))]
    gpu_run.watch(command, out, work, until, patience=3)
    text = out.read_text()
    assert [line.partition(" begins")[0] for line in text.splitlines() if " begins" in line or line == "prepares"] == [
        "good", "crash", "wrong", "hang", "lose", "last", "good", "prepares", "prepares", "good"
    ]  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith("FAILED")] == [
        "FAILED step: crash: the process was ended by signal 11",
        "FAILED wrong: 2, bound 1",
        "FAILED step: hang: the process had not moved for 3 s",
        "FAILED step: lose broke: RuntimeError: an illegal address",
        "FAILED unready: good: the process was ended by signal 11",  # the last part that had begun
        "FAILED before unready: the process was ended by signal 11",
        "FAILED worse broke: ZeroDivisionError: division by zero",
    ]
    assert [line for line in text.splitlines() if line.startswith("NOT RUN")] == [
        "NOT RUN: what is left of unready", "NOT RUN: what is left of worse"
    ]  # fmt: skip


@pytest.mark.parametrize("code", [1, 7])
def test_a_process_that_does_not_start_is_a_failure(tmp_path: Path, code: int) -> None:
    """Processes are not restarted forever; 1 is what Python ends with after a traceback."""
    from gpu import run as gpu_run

    out = tmp_path / "out.md"
    out.touch()
    gpu_run.watch([sys.executable, "-c", f"raise SystemExit({code})"], out, tmp_path, time.time() + 60)
    assert out.read_text() == (
        f"FAILED before any new part: the process ended with {code}\nNOT RUN: what comes after it\n"
    )
    assert gpu_run.verdict(out.read_text()) == "1 FAILED"


def test_a_skipped_check_is_not_a_success() -> None:
    from gpu import run as gpu_run

    assert gpu_run.verdict("zoo: 35 done\n") == "all checks passed"
    assert gpu_run.verdict("NOT RUN, no time left: zoo: llama\n") == "what was run passed, NOT everything was run"
    assert gpu_run.verdict("FAILED a\nNOT RUN: b\nFAILED c\n") == "2 FAILED"


def test_an_old_numba_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of the GPU machine may have an older numba than the CPU's kernels need."""
    from gpu import run as gpu_run

    needs = re.search(r"numba>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert needs is not None
    assert tuple(map(int, needs[1].split("."))) == gpu_run.NUMBA
    run = gpu_run.Run(tmp_path / "out.md", tmp_path, time.time() + 60, ())
    assert not run.lacks_numba("rounding")
    monkeypatch.setattr(gpu_run.importlib.metadata, "version", lambda name: "0.61.2")
    assert run.lacks_numba("rounding")
    assert run.lacks_numba("rounding")
    run.file.close()
    assert (tmp_path / "out.md").read_text() == "NOT RUN, numba 0.61.2 is older than 0.68: rounding\n"


@needs_compiler
def test_measurements_run(tmp_path: Path) -> None:
    process = python(SMALL, tmp_path, 1.0, "mat-vec", "mat-mat", "fused", "attention", "model", "encode", "cores")
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.count("\n") >= 20
    assert "nan" not in process.stdout
    assert "no cuBLAS" not in process.stdout


def test_one_token_is_timed_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where types have them: matrices of 4096 rows are just large enough."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu import speed
    from quantkit.kernels.formats import FORMATS

    for record in FORMATS.values():
        tiles = ["TILES" in dict(shape.kernel.defines) for shape in speed.vec_shapes(record.type)]
        assert tiles == [record.tiles, *[False] * len(speed.SIZES.token_counts[1:]), record.tiles, record.tiles], (
            record.type.name
        )


@needs_compiler
def test_without_cublas_only_its_comparison_is_missing(tmp_path: Path) -> None:
    without = SMALL.replace("speed._GPU", "type(open_device('CUDA0')).gemm_bf16 = None\nspeed._GPU")
    process = python(without, tmp_path, "nan", "mat-mat", "model")
    assert process.returncode == 0, process.stderr[-3000:]
    assert "nan" not in process.stdout
    assert process.stdout.count("| no cuBLAS |") >= 2


def test_the_gpu_without_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu import speed
    from quantkit.errors import ResourceError

    def missing(device: object) -> float:
        raise ResourceError("--cublas needs cuBLAS")

    monkeypatch.setattr(speed, "_GPU", [])
    monkeypatch.setattr(speed, "open_device", lambda name: name)
    monkeypatch.setattr(speed.peak, "copy_gb_s", lambda device: 3000.0)
    monkeypatch.setattr(speed.peak, "gemm_gops", missing)
    assert speed.the_gpu().copy_gb_s == 3000
    assert not speed.has_cublas()


def test_checks_are_ordered_by_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part once, those of FIRST before all others."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu import check

    order: list[str] = []
    parts = {"zoo": ["llama-dense", "rare"], "model": ["no fused MoE", "all fused"], "early": ["llama-dense"]}

    def step(name: str) -> Callable[[check.Run], None]:
        return lambda run: run.for_each(name, parts[name], lambda part: order.append(f"{name}: {part}"))

    steps = check.STEPS
    monkeypatch.setattr(check, "STEPS", {name: step(name) for name in parts})
    (tmp_path / "begun").touch()
    run = check.Run(tmp_path / "out.md", tmp_path, time.time() + 1e6, ())
    check.carry_out(run, list(parts))
    run.file.close()
    assert order == [
        "zoo: llama-dense", "model: all fused", "zoo: rare", "model: no fused MoE", "early: llama-dense"
    ]  # fmt: skip
    steps_of_first = {name for name in check.FIRST if "," not in name} | {"attention"}
    assert steps_of_first <= set(steps) == set(check._ALL)


#: What NVIDIA's program prints, by tool and step; it also runs what it is given.
SANITIZER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *memcheck*products*--first) echo "========= ERROR SUMMARY: 0 errors" ;;
  *memcheck*products*) echo "========= Invalid __global__ read of size 4 bytes"
    echo "=========     at quantkit_mul_mat+0x80"; echo "========= ERROR SUMMARY: 3 errors"; exit 0 ;;
  *racecheck*products*) echo "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)" ;;
  *racecheck*zoo*--first) echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)" ;;
  *racecheck*zoo*) echo "FAILED zoo: llama-dense"
    echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; exit 1 ;;
  *) echo "========= Error: Device not supported. Please refer to the documentation"; exit 255 ;;
esac
"""


def test_sanitizer_findings_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the checks it watches find; a GPU that it cannot watch has not passed."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from gpu import run as gpu_run
    from gpu import sanitizer

    program, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    run = gpu_run.Run(tmp_path / "out.md", tmp_path, time.time() + 1e6, ("Q4_K",))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setattr(sanitizer, "PLACES", ())
    sanitizer.sanitizer(run)
    program.write_text(SANITIZER.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    sanitizer.sanitizer(run)
    run.file.close()
    lines = [line for line in (tmp_path / "out.md").read_text().splitlines() if not line.startswith("=")]
    hazards, end_text = "========= RACECHECK SUMMARY:", "the process ended with"
    refused = "it ended with 255: ========= Error: Device not supported. Please refer to the documentation"
    assert [line.removesuffix(", 0 s") for line in lines] == [
        "NOT RUN: sanitizer: compute-sanitizer is not here: pip install nvidia-cuda-sanitizer-api",
        "sanitizer: memcheck products: nothing found",
        "sanitizer: racecheck products: nothing found",
        f"NOT RUN: sanitizer: memcheck zoo: {refused}",
        f"FAILED sanitizer: racecheck zoo: {hazards} 2 hazards displayed (2 errors, 0 warnings); {end_text} 0",
        f"NOT RUN: sanitizer: memcheck encoding: {refused}",
        f"NOT RUN: sanitizer: racecheck encoding: {refused}",
        f"FAILED sanitizer: memcheck products, all: ========= ERROR SUMMARY: 3 errors; {end_text} 0",
        "sanitizer: racecheck products, all: nothing found",
        f"NOT RUN: sanitizer: memcheck zoo, all: {refused}",
        f"FAILED sanitizer: racecheck zoo, all: {hazards} 0 hazards displayed (0 errors, 0 warnings); {end_text} 1",
        "FAILED zoo: llama-dense",
        f"NOT RUN: sanitizer: memcheck encoding, all: {refused}",
        f"NOT RUN: sanitizer: racecheck encoding, all: {refused}",
    ]
    commands = log.read_text().splitlines()
    assert len(commands) == 12
    assert all("--sanitized" in line and "--types Q4_K" in line for line in commands)


def test_a_long_compilation_reports_progress(tmp_path: Path) -> None:
    """Its lines move the file that the watching process looks at."""
    from gpu.run import Run

    run = Run(tmp_path / "out.md", tmp_path, time.time() + 60, ())
    run.begun_file.touch()
    os.utime(run.begun_file, (1, 1))
    first_run.tell(run.moves)
    try:
        with first_run.compilation():
            pass
    finally:
        first_run._STATE.listener = None
        run.file.close()
    assert run.begun_file.stat().st_mtime > 1e9


def test_a_growing_file_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a model of 18 GB takes minutes on a slow disk; a stalled write reports no progress."""
    from gpu.run import Run

    run, path, lines = Run(tmp_path / "out.md", tmp_path, time.time() + 60, ()), tmp_path / "model", list[str]()
    monkeypatch.setattr(run, "moves", lines.append)
    with run.growing(path, 0.01), path.open("wb") as file:
        file.truncate(1 << 20)  # which takes no room yet
        for _ in range(2):
            time.sleep(0.2)
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
        time.sleep(0.2)
    run.file.close()
    assert lines == ["model: 64.00 KiB", "model: 128.00 KiB"]


@needs_compiler
def test_parity_compares_both_searches_of_a_type(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    process = gpu_check("--shim", "--out", out, "--types", "Q3_K", "--only", "parity")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "random rows: 4 cases of 64 x 2048 values have the CPU's bytes" in out.read_text()


def test_digests_match_the_cpus_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all cases of all encoders; the first rows of each."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from make_gpu_expected import encode_on_cpu

    from gpu import encoding
    from quantkit.kernels.cuda.encode.encode import SEARCHES, encoders
    from quantkit.kernels.formats import INTERLEAVED_ENCODERS
    from quantkit.types import BY_NAME

    recorded = json.loads(encoding.EXPECTED.read_text())
    names = {name for search in SEARCHES for name in encoders(search)} | {*INTERLEAVED_ENCODERS}
    for t in map(BY_NAME.__getitem__, sorted(names)):
        for case in encoding.parity_cases(t):
            actual = encoding.digests(encode_on_cpu(replace(case, x=case.x[:16]), t), rows=16)
            assert recorded.get(case.key, "").startswith(actual), step("Add a type", 10, TYPE=t.name)


def test_expected_values_equal_the_cpu_backends(tmp_path: Path) -> None:
    from gpu import cases
    from quantkit.formats.gguf import open_gguf
    from quantkit.model.backends.cpu.backend import CPUBackend
    from quantkit.model.engine import load

    path = cases.write_products(tmp_path / "products.gguf")
    with np.load(ROOT / "tests/data/gpu-expected.npz") as recorded:
        with open_gguf(path) as source:
            backend = CPUBackend(source, 1)
            for name in cases.TYPES:
                for case, actual in cases.run_products(backend, source, name):
                    assert cases.nmse(actual, recorded[case]) <= cases.BOUND / 10, (
                        f"{case}: scripts/make_gpu_expected.py"
                    )
        for name in cases.RETYPED[1]:
            with load(cases.retyped(tmp_path, name), kv_type="f16") as model:
                assert (
                    cases.nmse(model.forward(cases.retyped_tokens()), recorded[f"retyped {name}"]) <= cases.BOUND_MODEL
                )
    assert (ROOT / "tests/data/gpu-expected.npz").stat().st_size < 10_000_000
