"""Hostile checkpoints: a short run of the fuzzer, and what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from drawn_checkpoints import moe_arrays, moe_config, write_checkpoint

from quantkit.cli.panics import panics_hidden
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.errors import QuantkitError

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz_checkpoint.py"


def test_fuzz_script() -> None:
    """A thousand changed files: neither crash nor hang nor big allocation (10^6 by hand)."""
    given = [sys.executable, str(SCRIPT), "--mutations", "1000", "--seed", "7"]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout


@pytest.mark.parametrize(
    "more",
    [
        {"num_experts": 0},
        {"architectures": ["x" * 3000]},
        {"scoring_func": ["softmax"]},
        {"vocab_size": (1 << 24) - 1},
        {"head_dim": [64]},
        {"rope_scaling": {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 1}},
    ],
    ids=str,
)
def test_values_of_other_kinds(tmp_path: Path, more: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "m", moe_config(**more), moe_arrays(layers=1))
    with pytest.raises(QuantkitError) as e:
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    assert str(folder) in e.value.message
    assert len(e.value.message) < 1000


@pytest.mark.parametrize("file", ["x" * 3000, "\ud800", "a/b", "..", ""])
def test_names_of_files_in_the_index(tmp_path: Path, file: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(QuantkitError, match="no file beside the index"):
        plan_convert(folder, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))


def test_a_panic_of_the_tokenizer_is_one_line(tmp_path: Path) -> None:
    """Rust prints where it panicked, and a trace if RUST_BACKTRACE asks for one: not to the user."""
    folder = write_checkpoint(tmp_path / "m")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAQAAGFiYw=="}
    path.write_text(json.dumps(tokenizer))
    given = [sys.executable, "-m", "quantkit", "convert", str(folder), str(tmp_path / "x.gguf")]
    done = subprocess.run(given, capture_output=True, text=True, check=False, env={**os.environ, "RUST_BACKTRACE": "1"})
    assert done.returncode != 0
    assert "Cannot parse precompiled_charsmap" in done.stderr
    assert "panicked" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_else_is_written_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with panics_hidden():
        os.write(2, b"a warning\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a warning\n"
    with suppress(KeyError), panics_hidden():
        os.write(2, b"another\n\nthread '<unnamed>' (7) panicked at x.rs:1:2:\nwhy\nnote: a\n")
        raise KeyError
    assert capfd.readouterr().err == "another\n"
