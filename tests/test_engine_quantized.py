"""Quantized models: as near to llama.cpp's logits on the same file as llama.cpp's own batches are to each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import quantkit
from libllama import Libllama, nmse
from quantkit.model.engine import load
from zoo import NAMES, expected, write_zoo

pytestmark = pytest.mark.peer

TYPES = ("Q8_0", "Q4_K_S", "IQ4_XS")
TOKENS = expected(NAMES[0])[0]

#: Enough of them for every kind of layer; QUANTKIT_ALL=1 takes all.
SOME = (
    "llama-dense",
    "gemma2-dense",
    "qwen3moe-moe",
    "gpt-oss-moe",
    "deepseek2-moe",
    "qwen3next-moe",
    "phi3-dense",
    "starcoder2-dense",
)
CHOSEN = NAMES if os.environ.get("QUANTKIT_ALL") else SOME

#: The issue's bound: twice llama.cpp's own difference between batches of 1 and 64, or this.
FLOOR = 1e-6


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("preset", TYPES)
def test_logits_are_as_near_as_llama_cpp_is_to_itself(
    tmp_path: Path, llama_bin: Path, name: str, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    quantkit.quantize(write_zoo(name, tmp_path / "f32.gguf"), path, preset)
    peer = Libllama(llama_bin)
    together, single = peer.logits(path, TOKENS, batch=64), peer.logits(path, TOKENS, batch=1)
    with load(path, kv_type="f32") as model:
        ours = model.forward(TOKENS)
    own, error = nmse(single, together), min(nmse(ours, together), nmse(ours, single))
    with capsys.disabled():
        if os.environ.get("QUANTKIT_ALL"):
            print(f"{name} {preset}: {error:.1e}, llama.cpp to itself {own:.1e}")
    assert error <= max(2 * own, FLOOR)
