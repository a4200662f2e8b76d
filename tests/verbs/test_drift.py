"""Embeddings of texts, and their drift between two files; beside llama.cpp where the peer is here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

import checkpoints
import quantkit
from libllama import Libllama, nmse
from quantkit.cli import cli
from quantkit.convert import ConvertOptions, convert
from quantkit.drift import drift, read_texts
from quantkit.drift.statistics import cosines, neighbours, ranks
from quantkit.embed import embed
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.evaluate import perplexity
from quantkit.formats.gguf import open_gguf
from quantkit.formats.tokenizer import Tokenizer
from quantkit.model.embeddings import pooled_rows
from quantkit.model.encoder import POOLINGS
from quantkit.model.engine import load
from quantkit.model.graph import build_embeddings
from quantkit.quantize import quantize

pytestmark = pytest.mark.usefixtures("services_in_process")

TEXTS = ["the cat sat on the mat", "a dog", "where does this end?", "numbers 12 and 7", "ab cd ef gh", "one more line"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that converts a checkpoint to F32, once."""
    folder = tmp_path_factory.mktemp("encoders")

    def write(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            options = checkpoints.describe(name).convert_keywords() | {"outtype": "f32"}
            convert(checkpoints.write_checkpoint(name, folder), path, None, ConvertOptions(**options))
        return path

    return write


# ---------------------------------------------------------------- embeddings


def test_texts_together_and_alone_have_the_same_embeddings(encoder: Callable[[str], Path]) -> None:
    batch = embed(encoder("bert"), TEXTS)
    assert batch.shape == (len(TEXTS), 64)
    alone = np.concatenate([embed(encoder("bert"), [text]) for text in TEXTS])
    assert np.abs(batch - alone).max() < 1e-6
    assert np.linalg.norm(batch, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-6)


def test_small_batches_change_nothing(encoder: Callable[[str], Path]) -> None:
    """Batches end where a text does, whatever their size."""
    sequences = [np.arange(5, 5 + n, dtype=np.int32) for n in (9, 16, 3, 1, 12)]
    with (
        load(encoder("modernbert"), kv_type="f32") as large,
        load(encoder("modernbert"), kv_type="f32", n_ubatch=16) as small,
    ):
        assert nmse(pooled_rows(small, sequences), pooled_rows(large, sequences)) < 1e-12
        with refuses(FormatError, "QK-E203", "17", "16"):
            pooled_rows(small, [np.arange(17, dtype=np.int32)])


@pytest.mark.parametrize(("pooling", "rows"), [("mean", slice(None)), ("cls", slice(0, 1)), ("last", slice(-1, None))])
def test_pooling_of_rows(encoder: Callable[[str], Path], pooling: str, rows: slice) -> None:
    path = encoder("roberta")
    with open_gguf(path) as file:
        ids = Tokenizer.from_gguf(file).encode(TEXTS[0])
    with load(path, kv_type="f32") as model:
        expected = model.forward(ids)[rows].mean(0)
    actual = embed(path, [TEXTS[0]], pooling=pooling, normalize=False)[0]
    assert np.abs(actual - expected).max() < 1e-5


def test_a_decoder_has_embeddings_of_its_last_rows(tiny_moe: Path) -> None:
    with open_gguf(tiny_moe) as file:
        width = int(file.get(f"{file.get('general.architecture')}.embedding_length"))
    rows = embed(tiny_moe, ["a b", "c d"], pooling="last")
    assert rows.shape == (2, width)
    assert np.isfinite(rows).all()


def test_dense_layers_follow_pooling(encoder: Callable[[str], Path]) -> None:
    path, ids = encoder("gemma-embedding-dense"), np.array(checkpoints.PROMPT, np.int32)
    with load(path, kv_type="f32") as model:
        rows = model.forward(ids)
        actual = pooled_rows(model, [ids])[0]
        weights = [model.source.data(model.source.tensors[f"dense_{i}.weight"]).view(np.float32) for i in (2, 3)]
    first, second = (w.reshape(-1, n) for w, n in zip(weights, (64, weights[0].size // 64), strict=True))
    assert actual == pytest.approx(second @ (first @ rows.mean(0)), abs=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["bert", "t5-encoder", "modernbert", "xlm-roberta", "distilbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooled_rows_are_those_of_llama_cpp(
    encoder: Callable[[str], Path], llama_bin: Path, name: str, pooling: str
) -> None:
    path, ids = encoder(name), np.array(checkpoints.PROMPT, np.int32)
    expected = Libllama(llama_bin).embeddings(path, ids, POOLINGS.index(pooling))
    with load(path, kv_type="f32", build=lambda source, n: build_embeddings(source, n, pooling=pooling)) as model:
        assert nmse(pooled_rows(model, [ids]), expected) < 2e-8


@pytest.mark.peer
@pytest.mark.parametrize("name", ["bert-classifier", "roberta-classifier", "xlm-roberta-classifier"])
def test_scores_of_classifiers_are_those_of_llama_cpp(
    encoder: Callable[[str], Path], llama_bin: Path, name: str
) -> None:
    path, ids = encoder(name), np.array(checkpoints.PROMPT, np.int32)
    expected = Libllama(llama_bin).embeddings(path, ids, POOLINGS.index("rank"))
    with load(path, kv_type="f32", build=lambda source, n: build_embeddings(source, n, pooling="rank")) as model:
        actual = pooled_rows(model, [ids])
    assert actual.shape == expected.shape
    assert nmse(actual, expected) < 1e-7


@pytest.mark.peer
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "xlm-roberta", "t5-encoder", "nomic-bert-xlm"])
def test_texts_have_the_ids_of_llama_cpp(
    encoder: Callable[[str], Path], llama_bin: Path, tmp_path: Path, name: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS), encoding="utf-8")
    with open_gguf(encoder(name)) as file:
        actual = Tokenizer.from_gguf(file).encode(text.read_bytes())
    assert actual.tolist() == Libllama(llama_bin).tokenize(encoder(name), text).tolist()


# ---------------------------------------------------------------- drift


def test_a_file_does_not_drift_from_itself(encoder: Callable[[str], Path]) -> None:
    result = drift(encoder("bert"), encoder("bert"), TEXTS)
    assert result.cosines == pytest.approx(np.ones(len(TEXTS)), abs=1e-6)
    assert result.neighbours is not None
    assert result.neighbours.rank_correlation.value == pytest.approx(1)
    assert result.neighbours.same_nearest.value == result.neighbours.recall.value == 1


def test_fewer_bits_drift_further(encoder: Callable[[str], Path], tmp_path: Path) -> None:
    means = []
    for kind in ("Q8_0", "Q4_0"):
        quantize(encoder("bert"), tmp_path / f"{kind}.gguf", kind)
        result = drift(tmp_path / f"{kind}.gguf", encoder("bert"), TEXTS)
        means.append(result.mean.value)
        assert result.worst == int(np.argmin(result.cosines))
    assert 1 > means[0] > means[1] > 0.5


def test_neighbours_of_known_rows() -> None:
    """Of four directions, two change places: each text has another nearest neighbour but one."""
    angles = np.array([0.0, 0.1, 0.5, 1.2])
    a = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    nearest = neighbours(a, a[[0, 2, 1, 3]], 1)
    assert nearest is not None
    assert nearest.same_nearest.n_correct == 0
    assert nearest.recall.value == 0
    x = np.array([0.1, 0.5, 1.2, 0.4, 1.1, 0.7])  # distances of pairs, in the order of triu_indices
    y = np.array([0.5, 0.1, 1.2, 0.4, 0.7, 1.1])
    expected = np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1]
    assert nearest.rank_correlation.value == pytest.approx(expected)
    assert cosines(a, a[[0, 2, 1, 3]])[1] == pytest.approx(np.cos(0.4), abs=1e-6)


def test_equal_values_have_the_mean_of_their_ranks() -> None:
    assert ranks(np.array([3, 1, 3, 0], np.float32)).tolist() == [2.5, 1, 2.5, 0]


@pytest.mark.parametrize(("split", "expected"), [("lines", ["a b", "c", "d"]), ("paragraphs", ["a b\nc", "d\nc"])])
def test_texts_of_a_file(tmp_path: Path, split: str, expected: list[str]) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"a b\nc\n\n  \nd\nc\n")
    assert read_texts(path, split) == expected
    assert read_texts(path, split, 1) == expected[:1]


# ---------------------------------------------------------------- refusals


def test_an_encoder_has_no_next_token(encoder: Callable[[str], Path]) -> None:
    with refuses(TypeNotSupported, "QK-E306", "bert", "drift"):
        perplexity(encoder("bert"), "some text", n_ctx=8)
    with refuses(TypeNotSupported, "QK-E306", "drift"):
        quantkit.logits(encoder("bert"), "text")


def test_a_model_with_logits_is_not_embedded(tiny_moe: Path) -> None:
    with load(tiny_moe) as model, refuses(TypeNotSupported, "QK-E306"):
        embed(model, ["a"])


def test_what_cannot_be_compared(encoder: Callable[[str], Path], tiny_moe: Path) -> None:
    with refuses(RecipeError, "QK-E203", "pooling"):
        drift(encoder("bert-classifier"), encoder("bert-classifier"), TEXTS, pooling="rank")
    with refuses(RecipeError, "QK-E207", "mean", "cls"):
        drift(encoder("distilbert"), encoder("bert"), TEXTS)
    with refuses(RecipeError, "QK-E203", "text 1"):
        embed(encoder("bert"), ["a", " "])


def test_long_texts_are_cut_or_refused(encoder: Callable[[str], Path]) -> None:
    long = "a " * 600
    with refuses(FormatError, "QK-E203", "512"):
        embed(encoder("xlm-roberta"), [long])
    assert embed(encoder("xlm-roberta"), [long], truncate=True).shape == (1, 64)
    result = drift(encoder("xlm-roberta"), encoder("xlm-roberta"), [long, "a"])
    assert any("1 of 2 texts" in note for note in result.notes)


def test_the_command(encoder: Callable[[str], Path], tmp_path: Path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "out.json"
    text.write_text("\n".join(TEXTS))
    quantize(encoder("bert"), tmp_path / "q.gguf", "Q4_0")
    command = ["drift", "-m", str(tmp_path / "q.gguf"), "--base", str(encoder("bert")), "-f", str(text)]
    result = CliRunner().invoke(cli, [*command, "--json", str(out), "--max-drift", "0.5"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["models"]
    assert row["n_texts"] == len(TEXTS)
    assert row["activations"] == "exact"
    assert row["cosine"]["value"] == pytest.approx(np.mean(row["cosines"]))
    assert CliRunner().invoke(cli, [*command, "--max-drift", "0"]).exit_code == 3
