"""Completion: types in the case that was begun, files of the kind an argument takes; also by a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, CompletionItem

from quantkit.cli import cli


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model-bf16.gguf", "imatrix.dat", "notes.txt", "sub/m.gguf", "other/a b.gguf", "empty/x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def items(line: str) -> list[CompletionItem]:
    *words, incomplete = line.split(" ")
    return BashComplete(cli, {}, "quantkit", "_QUANTKIT_COMPLETE").get_completions(words, incomplete)


def values(line: str) -> list[str]:
    return [item.value for item in items(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quantize m.gguf Q4_K", ["Q4_K_M", "Q4_K_S", "Q4_K_R4", "Q4_K"]),
        ("quantize m.gguf q4_k_", ["q4_k_m", "q4_k_s", "q4_k_r4"]),
        ("quantize m.gguf o.gguf cop", ["copy"]),
        ("quantize --encoder ", ["llama.cpp", "ik"]),
        ("quantize m.gguf q4_k_m ", []),
        ("quantize --attn-v-type q6", ["q6_k", "q6_0", "q6_k_r4", "q6_0_r4"]),
        ("quantize --output-tensor-type Q6_0", ["Q6_0", "Q6_0_R4"]),
        ("quantize --tensor-type attn_v=q6", ["attn_v=q6_k", "attn_v=q6_0", "attn_v=q6_k_r4", "attn_v=q6_0_r4"]),
        ("merge-up-gate --reencode Q8_0", ["Q8_0", "Q8_0_R8"]),
        ("quantize mod", ["model-bf16.gguf"]),
        ("quantize --imatrix ima", ["imatrix.dat"]),
        ("inspect sub/", ["sub/m.gguf"]),
        ("perplexity -m ", ["model-bf16.gguf", "empty/", "other/", "sub/"]),
        ("imatrix show im", ["imatrix.dat"]),
        ("convert-lora sub mod", ["model-bf16.gguf"]),
    ],
)
def test_values(line: str, expected: list[str]) -> None:
    assert values(line) == expected


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("inspect no", "file"),
        ("inspect emp", "dir"),
        ("inspect other/", "file"),
        ("inspect gone/x", "file"),
        ("convert-lora emp", "dir"),
    ],
)
def test_paths_are_completed_by_the_shell(line: str, kind: str) -> None:
    assert [(item.type, item.value) for item in items(line)] == [(kind, line.split()[1])]


def test_adapters_are_directories() -> None:
    assert [(item.type, item.value) for item in items("convert DIR --merge-lora emp")] == [("dir", "emp")]


@pytest.mark.parametrize("line", ["quantize --cache ", "merge-up-gate --cache ", "cache show ", "cache prune --to 5G "])
def test_caches_are_directories(line: str) -> None:
    assert [item.type for item in items(f"{line}emp")] == ["dir"]


def test_types_without_an_encoder_are_not_completed() -> None:
    assert not {"Q8_1", "I8", "IQ1_S_ROW"} & set(values("quantize m.gguf "))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_in_bash(tmp_path: Path) -> None:
    command = tmp_path / "quantkit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quantkit "$@"\n')
    command.chmod(0o755)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    script = """
        eval "$(_QUANTKIT_COMPLETE=bash_source quantkit)"
        COMP_WORDS=(quantkit quantize model-bf16.gguf q4_k_) COMP_CWORD=3
        _quantkit_completion quantkit
        echo "${COMPREPLY[@]}"
    """
    process = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "q4_k_m q4_k_s q4_k_r4\n"
