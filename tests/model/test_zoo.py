"""The zoo is the one that llama.cpp's logits were computed from, and tests/lib/libllama.py computes them again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from guide import step
from libllama import Libllama, LibllamaError, nmse
from quantkit.model.arch import ARCHS
from quantkit.model.engine import load
from zoo import NAMES, VARIED, ZOO, expected, write_hollow_zoo, write_zoo

guide_step = partial(step, "Add an architecture")

#: SHA-256 of models drawn from seed 1.
WRITERS = {
    "deepseek2-moe": "1f7a7a97c6d571540b0762f0fedd0d010633a399bd88eac6ea1108cc1291dcb6",
    "llama-dense": "0b77f68fa5a82d632a340bda80a2102c4db09432ee4dd21b4bd5866dc36ff282",
    "qwen3next-moe": "fbbde454992fbb61f73c3be7f7b3f210e103954c90d92663c6fe04627e104719",
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_weights_match_the_logits(tmp_path: Path, name: str) -> None:
    model = write_zoo(name, tmp_path / "z.gguf")
    assert hashlib.sha256(model.read_bytes()).hexdigest() == WRITERS[name]


def is_encoder(name: str) -> bool:
    return ARCHS[name.rpartition("-")[0]].encoder


def test_every_model_has_logits() -> None:
    with np.load(ZOO / "logits.npz") as file:
        missing = set(NAMES) - set(file.files)
    assert not missing, f"{missing}: {guide_step(4)}"
    for name in NAMES:
        tokens, logits = expected(name)
        assert logits.shape == (*tokens.shape, 256 if is_encoder(name) else 128)
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1


def neighbours(path: Path, names: Iterable[str]) -> set[tuple[str, str]]:
    """Return the pairs of operations that follow each other in some of the models."""
    pairs = set[tuple[str, str]]()
    for name in names:
        with load(write_hollow_zoo(name, path), threads=1) as model:
            pairs |= set(pairwise(type(op).__name__ for op in model.unfused.ops))
    return pairs


def test_varied_models_have_all_pairs_of_operations(tmp_path: Path) -> None:
    missing = neighbours(tmp_path / "m.gguf", NAMES) - neighbours(tmp_path / "m.gguf", VARIED)
    assert not missing, f"{missing}: enter a model with them in VARIED of tests/lib/zoo.py"


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_stored_logits_equal_llama_cpps(zoo: Callable[[str], Path], llama_bin: Path, name: str) -> None:
    tokens, logits = expected(name)
    library = Libllama(llama_bin)
    assert nmse((library.embeddings if is_encoder(name) else library.logits)(zoo(name), tokens), logits) <= 1e-8


@pytest.mark.peer
def test_sequences_and_batches_are_independent(llama_bin: Path, tmp_path: Path) -> None:
    """A recurrent model, so that a cache that is not emptied would show."""
    tokens, logits = expected("qwen3next-moe")
    model, two = write_zoo("qwen3next-moe", tmp_path / "z.gguf"), np.stack([tokens, tokens[::-1]])
    actual = Libllama(llama_bin).logits(model, two[::-1], batch=7)
    assert actual.shape == (2, *logits.shape)
    assert nmse(actual[1], logits) <= 1e-8
    assert nmse(actual[0], logits) > 1e-2


@pytest.mark.peer
def test_another_seed_is_another_model(llama_bin: Path, tmp_path: Path) -> None:
    tokens, logits = expected("llama-dense")
    assert nmse(Libllama(llama_bin).logits(write_zoo("llama-dense", tmp_path / "z.gguf", 2), tokens), logits) > 0.1


@pytest.mark.peer
def test_a_refusal_of_the_library_has_its_message(llama_bin: Path, tmp_path: Path) -> None:
    model = write_zoo("llama-dense", tmp_path / "z.gguf")
    with pytest.raises(LibllamaError, match="expected ids below 128"):
        Libllama(llama_bin).logits(model, [1, 128])
    model.write_bytes(model.read_bytes()[:100_000])
    with pytest.raises(LibllamaError, match="the model was refused"):
        Libllama(llama_bin).logits(model, [1, 2])
