"""The scripts: the shell ones parse, the Python ones explain themselves, and models made of noise are models."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml

import quantkit
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import read_imatrix

ROOT = Path(__file__).resolve().parents[1]
SHELL = [*sorted(p for p in (ROOT / "scripts").iterdir() if p.suffix == "" and p.is_file()), ROOT / ".ci/run"]
PYTHON = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])
COMMANDS = [p for p in PYTHON if "import argparse" in p.read_text()]
SIZES = {"layers": 2, "experts": 4, "used": 2, "embd": 256, "ff": 256, "heads": 4, "kv": 2, "head-dim": 64}
SMALL = [f"--{name}={n}" for name, n in SIZES.items()]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script as a module."""
    path = next(p for p in PYTHON if p.stem == name)
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def make_moe(path: Path, *arguments: str) -> str:
    command = [sys.executable, ROOT / "scripts/make_moe.py", path, *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("path", SHELL, ids=lambda p: p.name)
def test_shell_script_parses(path: Path) -> None:
    result = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=10)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("path", [p for p in SHELL if not p.name.startswith("_")], ids=lambda p: p.name)
def test_shell_script_is_executable(path: Path) -> None:
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(path, os.X_OK)


#: Runs each script with --help in a fork of a process that has most of quantkit: what they print, and how they end.
ASK = """
import os, runpy, sys, traceback
import quantkit.convert, quantkit.evaluate

folder, *paths = sys.argv[1:]
for path in paths:
    if (child := os.fork()) == 0:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{os.path.basename(path)}.{kind}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv, sys.path[0], status = [path, "--help"], os.path.dirname(path), 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as e:
            status = e.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """How each script ends that is asked for help, and what it prints."""
    folder = tmp_path_factory.mktemp("help")
    command = [sys.executable, "-c", ASK, folder, *COMMANDS]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    texts = ([folder.joinpath(f"{path.name}.{kind}").read_text() for kind in ("out", "err")] for path in COMMANDS)
    return {path.name: (code, out, err) for path, code, (out, err) in zip(COMMANDS, lines, texts, strict=True)}


@pytest.mark.parametrize("name", [path.name for path in COMMANDS])
def test_python_script_has_help(name: str, explained: dict[str, tuple[str, str, str]]) -> None:
    code, out, err = explained[name]
    assert (code, err) == ("0", "")
    assert out.startswith("usage:")


def test_make_moe_writes_the_requested_model(tmp_path: Path, tiny_moe: Path) -> None:
    make_moe(tmp_path / "m.gguf", "--type", "bf16")
    with open_gguf(tmp_path / "m.gguf") as file, open_gguf(tiny_moe) as tiny:
        assert file.get("general.architecture") == "qwen3moe"
        assert file.get("qwen3moe.expert_count") == 4
        assert file.fields["tokenizer.ggml.tokens"].raw == tiny.fields["tokenizer.ggml.tokens"].raw
        assert file.tensors["blk.1.ffn_down_exps.weight"].shape == (256, 256, 4)
        assert {str(t.type) for t in file.tensors.values() if "exps" in t.name} == {"BF16"}
        assert str(file.tensors["blk.0.ffn_gate_inp.weight"].type) == "F32"
        router = file.data("blk.0.ffn_gate_inp.weight").view("<f4")
        assert 0.01 < router.std() < 0.04
        assert (file.data("output_norm.weight").view("<f4") == 1).all()


def test_make_moe_depends_only_on_the_seed(tmp_path: Path) -> None:
    for name, options in {"a": "--threads 1", "b": "--threads 3", "c": "--threads 1 --seed 2"}.items():
        make_moe(tmp_path / f"{name}.gguf", *options.split(), "--imatrix", str(tmp_path / f"{name}-imatrix.gguf"))
    for suffix in (".gguf", "-imatrix.gguf"):
        a, b, c = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "abc")
        assert a == b
        assert a != c
    assert not list(tmp_path.glob("*.part"))


def test_make_moe_imatrix_covers_the_layers(tmp_path: Path) -> None:
    make_moe(tmp_path / "m.gguf", "--vocab", "300", "--imatrix", str(tmp_path / "imatrix.gguf"))
    imatrix = read_imatrix(tmp_path / "imatrix.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        matrices = {t.name: t for t in file.tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1}
        assert file.tensors["output.weight"].shape == (256, 300)
    assert imatrix.entries.keys() == matrices.keys()
    for name, entry in imatrix.entries.items():
        shape = matrices[name].shape
        assert entry.sums.shape == (shape[2] if len(shape) > 2 else 1, shape[0])
        assert np.isfinite(entry.sums).all()
        assert entry.sums.min() > 0


def test_make_moe_reaches_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("make_moe", monkeypatch)
    model, matrix = script.Model(), script.BY_NAME["F16"]
    layers = model.layers_for(2_000_000_000, matrix)

    def nbytes(n: int) -> int:
        tensors = script.replace(model, layers=n).tensors()
        return sum(script.stored_as(name, shape, matrix).tensor_bytes(shape) for name, shape in tensors.items())

    assert nbytes(layers - 1) < 2_000_000_000 <= nbytes(layers)


def test_make_moe_refuses_invalid_options(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/make_moe.py", tmp_path / "m.gguf", "--experts", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "--experts must be at least 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.peer
def test_llama_quantize_reads_the_output_of_make_moe(tmp_path: Path, llama_bin: Path) -> None:
    make_moe(tmp_path / "m.gguf", "--imatrix", str(tmp_path / "imatrix.gguf"))
    command = [llama_bin / "llama-quantize", "--imatrix", tmp_path / "imatrix.gguf", tmp_path / "m.gguf"]
    result = subprocess.run([*command, tmp_path / "out.gguf", "Q4_0", "1"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    with open_gguf(tmp_path / "out.gguf") as file:
        assert str(file.tensors["blk.0.ffn_up_exps.weight"].type) == "Q4_0"


def test_run_reports_time_memory_and_end() -> None:
    code = """
import sys, processes
child = "import time; x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(0.1); print('done')"
outcome = processes.run([sys.executable, "-c", child])
print(outcome.returncode, outcome.stdout.strip(), outcome.seconds, outcome.peak_rss)
"""
    # In a process of its own, for a child's memory begins with its parent's, and pytest has grown.
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True, timeout=60)
    returncode, stdout, seconds, peak_rss = result.stdout.split()
    assert (returncode, stdout) == ("0", "done")
    assert float(seconds) >= 0.1
    assert 200 << 20 <= int(peak_rss) < 300 << 20


def test_run_survives_a_kill_before_and_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, kill_resume = load("processes", monkeypatch), load("kill_resume", monkeypatch)
    sleeper = [sys.executable, "-c", "import time; time.sleep(30)"]
    assert processes.run(sleeper, watch=kill_resume.kill_after(0.05)).returncode == -9
    assert processes.run(["true"], watch=kill_resume.kill_after(0.2)).returncode == 0


def test_benchmark_names_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench_quantize", monkeypatch)
    monkeypatch.setattr(bench, "llama_bin", lambda: None)
    monkeypatch.setattr(bench, "package_folder", lambda name: None)
    available, missing = bench.libraries()
    assert list(available) == ["quantkit"]
    assert missing.keys() == {"ggml", "libgguf", "ik"}
    assert "scripts/peers" in missing["ggml"]


def test_benchmark_detects_different_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench_quantize", monkeypatch)
    x, weights = bench.matrix(8, 32)

    def encode(x: np.ndarray, weights: np.ndarray, out: np.ndarray, row0: int, row1: int) -> None:
        out[row0:row1] = 7

    def encode_other(x: np.ndarray, weights: np.ndarray, out: np.ndarray, row0: int, row1: int) -> None:
        out[row0:row1] = 7
        out[3, 5] = 8

    measurement = bench.Bench(x, weights, 1, 0.01)
    assert bench.differing_rows(bench.BY_NAME["Q8_0"], measurement, weights, encode, encode) == 0
    assert bench.differing_rows(bench.BY_NAME["Q8_0"], measurement, weights, encode, encode_other) == 1


def test_benchmark_of_engines_reports_the_faster_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench_engine", monkeypatch)

    def runner(engine: str, setting: str, *seconds: float, reason: str = "") -> object:
        return bench.Runner(engine, setting, None, None, {"tg": list(seconds), "read": [1, 1, 1]}, reason)

    runners = [
        runner("quantkit", "mapped", 2, 3, 9),
        runner("quantkit", "copied", 2, 2, 4),
        runner("llama.cpp", "plain", 5, 5, 1),
        runner("llama.cpp", "repacked", 4, 3, 2),
        runner("ik_llama.cpp", "plain", reason="no such type"),
    ]
    assert bench.row("MoE", "tg", 64, runners) == "| MoE | tg64 | 32.0 copied | 50% | 21.3 repacked | 1.50x | - | - |"
    assert bench.header(["quantkit", "ik"]).startswith("| model | test | quantkit t/s | read | ik t/s | / ik |\n|---|")


def test_benchmark_of_engines_reports_the_reason_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench_engine", monkeypatch)
    log = "loading\ninvalid ggml type 144\nbye\n"
    assert bench.reason_of(3, log) == "invalid ggml type 144"
    assert bench.reason_of(-8, "loading\n") == "died of SIGFPE"
    assert bench.reason_of(1, "") == "ended with 1"


def worker(engine: str, *arguments: str | Path, lines: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/engine_worker.py", engine, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=lines, timeout=120)


def test_worker_runs_requested_tests(tiny_moe: Path) -> None:
    output = worker("quantkit", tiny_moe, "--set", "mmap=0", lines="pp 8\ntg 2\n")
    assert output.returncode == 0, output.stderr
    ready, *seconds = output.stdout.split()
    assert (ready, len(seconds)) == ("ready", 2)
    assert all(float(s) > 0 for s in seconds)
    assert "quantkit takes merge_up_gate and mmap" in worker("quantkit", tiny_moe, "--set", "speed=9").stderr


@pytest.mark.peer
def test_worker_runs_ik(tiny_moe: Path, ik_bin: Path) -> None:
    output = worker("ik_llama.cpp", tiny_moe, lines="pp 8\ntg 2\n")
    assert output.returncode == 0, output.stderr
    assert [float(s) > 0 for s in output.stdout.split()[-2:]] == [True, True]
    refused = worker("ik_llama.cpp", tiny_moe, "--set", "speed=9")
    assert refused.returncode == 1
    assert "no such parameter" in refused.stderr


def test_profile_of_the_engine_names_operations(tiny_moe: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks/profile_engine.py", tiny_moe, "--steps", "3", "--batch", "2"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    assert sum(row[0].startswith("| UpGateId: gate_by_expert") for row in rows) == 1
    assert all(float(row[2]) > 0 for row in rows)
    assert [row[0] for row in rows if "mul_mat" in row[0] and row[4] == " |"] == []


def test_tensor_kinds_equal_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer numbers are stars, and kinds with equal names are distinguished."""
    script = load("make_tensor_names", monkeypatch)
    kind = Enum("kind", ["TOKEN_EMBD", "FFN_NORM", "FFN_PRE_NORM", "ENC"])
    names = {
        kind.TOKEN_EMBD: "token_embd",
        kind.FFN_NORM: "blk.{bid}.ffn_norm",
        kind.FFN_PRE_NORM: "blk.{bid}.ffn_norm",
        kind.ENC: "enc.blk.{bid}.attn_q",
    }
    constants = {
        "MODEL_ARCH_NAMES": {1: "arctic", 2: "gemma2"},
        "MODEL_TENSORS": {1: [kind.TOKEN_EMBD, kind.FFN_NORM], 2: [kind.FFN_NORM, kind.FFN_PRE_NORM, kind.ENC]},
        "TENSOR_NAMES": names,
    }
    assert script.kinds_of(constants, "arctic") == "token_embd *ffn_norm:residual"
    assert script.kinds_of(constants, "gemma2") == "*ffn_norm *ffn_norm:pre enc.*attn_q"
    names = SimpleNamespace(
        mappings_cfg={kind.TOKEN_EMBD: ("embed", "language_model.embed")},
        block_mappings_cfg={kind.FFN_NORM: ("layers.{bid}.norm", "ln.{bid}")},
        arch_block_mappings_cfg={1: {kind.FFN_NORM: ("residual.{bid}",)}},
    )
    kinds = ("*ffn_norm", "token_embd", "*ffn_norm:residual", "*rope")
    assert script.names_of(constants, names, kinds) == {
        "token_embd": "embed",
        "*ffn_norm": "layers.*.norm ln.*",
        "*ffn_norm:residual": "residual.*",
        "*rope": "",
    }


_MODELING = """
class TinyAttention(nn.Module):
    def __init__(self, config):
        self.q_proj = nn.Linear(8, 8, bias=config.attention_bias)
        self.o_proj = nn.Linear(8, 8, bias=False)

class TinyVisionBlock(nn.Module):
    def __init__(self, config):
        self.proj = nn.Linear(8, 8)

class TinyNorm(nn.Module):
    def __init__(self, config):
        self.norm = nn.LayerNorm(8)
        self.plain = nn.LayerNorm(8)
        self.plain.bias = None

ATTENTION = {"eager": TinyAttention}

class TinyModel(nn.Module):
    def __init__(self, config):
        self.layers = ATTENTION[config.kind](config)
        self.norm = TinyNorm(config)
        self.vision = TinyVisionBlock(config)

class TinyOtherHead(nn.Module):
    def __init__(self, config):
        self.dense = nn.Linear(8, 8)
"""


def test_recorded_biases_equal_the_modules_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of classes that it does not name, of towers, and biases that are taken away do not count."""
    script = load("record_biases", monkeypatch)
    assert script.biases(_MODELING, "TinyModel") == {"": "norm", "attention_bias": "q_proj"}
    monkeypatch.setitem(script.ABSENT, "TinyModel", {"norm"})
    assert script.biases(_MODELING, "TinyModel") == {"attention_bias": "q_proj"}


def test_pre_tokenizers_are_read_from_the_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two names of one hash the later counts; rows are sorted by name."""
    script = load("make_pre_hashes", monkeypatch)
    one, two = "1" * 64, "2" * 64
    source = "".join(
        f'if chkhsh == "{digest}":\n    # ref: https://huggingface.co/{model}\n    res = "{name}"\n'
        for digest, model, name in ((one, "a/b", "z"), (two, "c/d", "mpt"), (one, "e/f", "falcon"))
    )
    assert list(script.hashes_of(source).items()) == [(one, ("falcon", "e/f")), (two, ("mpt", "c/d"))]


def test_recorded_defaults_equal_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's own defaults come before those of what it is made of."""
    script = load("make_class_defaults", monkeypatch)

    class Base:
        def __init__(self, width: int = 1, heads: int = 2) -> None: ...

    class Derived(Base):
        def __init__(self, width: int = 3, depth: int | None = None, *, vocab_size: int) -> None: ...

    assert script.parameters(Derived) == {"width": 3, "heads": 2, "depth": None}
    monkeypatch.setattr(script, "class_of", lambda kind: Derived)
    assert script.defaults("own", ["width", "rope_scaling"], []) == {"width": 3, "rope_scaling": None}
    assert script.defaults("own", None, ["heads", "theta"]) == {"heads": 2}


def test_measuring_one_type_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("measure_types", monkeypatch)
    before = script.TARGET.read_text()
    after = script.with_figures(before, {"Q4_K": script.quality.Quality(1.23456, "slow")})
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert [b for _, b in changed] == ['    "Q4_K": Quality(1.235, "slow"),']
    assert [a.split('"')[1] for a, _ in changed] == ["Q4_K"]


def test_a_missing_type_takes_its_place_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("measure_types", monkeypatch)
    text = script.TARGET.read_text()
    line = next(line for line in text.splitlines(keepends=True) if '"Q4_K": Quality' in line)
    result = script.with_figures(text.replace(line, ""), {"Q4_K": script.quality.QUALITY["Q4_K"]})
    assert result == text


@pytest.mark.peer
def test_golden_bytes_equal_the_references(monkeypatch: pytest.MonkeyPatch, llama_bin: Path, tmp_path: Path) -> None:
    """A type whose bytes are lost is entered again; nothing else changes."""
    script = load("make_golden_bytes", monkeypatch)
    with np.load(script.DATA / "golden-mainline.npz") as file:
        entries = dict(file)
    np.savez(
        tmp_path / "golden-mainline.npz", allow_pickle=False, **{k: v for k, v in entries.items() if "Q4_K" not in k}
    )
    monkeypatch.setattr(script, "DATA", tmp_path)
    assert script.enter(script.type_by_name("Q4_K"), "mainline", llama_bin).keys() == {"Q4_K", "Q4_K+imatrix"}
    with np.load(tmp_path / "golden-mainline.npz") as file:
        assert sorted(file.files) == sorted(entries)
        assert all(np.array_equal(file[key], data) for key, data in entries.items())
    assert not script.enter(script.type_by_name("Q4_K"), "mainline", llama_bin)


def test_the_page_of_errors_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("make_error_page", monkeypatch)
    assert script.PAGE.read_text(encoding="utf-8") == script.error_page(), "run scripts/make_error_page.py"


def test_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """quantkit/version.py has it; the package's metadata and CITATION.cff follow."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "quantkit/version.py"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == quantkit.__version__
    assert citation["license"] == settings["project"]["license"]


def test_the_sdist_has_the_files_of_its_tests() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / path).exists() for path in included)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    parts = {line.partition("/")[0] for line in tracked.splitlines()} - {".gitignore"}
    assert not parts - {*included, "pyproject.toml"}
