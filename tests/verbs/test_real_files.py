"""Vocabularies, a checkpoint and a model as the world has them (real_files.py): bytes, ids and logits of the reference.

CI brings the files; elsewhere ``python tests/lib/real_files.py`` does.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from peer_cache import answer, peer, program_answer

import real_files
from exact_gelu import exact_gelu
from libllama import Libllama, nmse
from llama_tokenize import ask
from quantkit.checkpoint.vocab.pre_tokenizers import TEXT
from quantkit.cli import cli
from quantkit.compare import compare
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.cook import config_from, cook, plan_cook
from quantkit.embed import embed
from quantkit.errors import RecipeError
from quantkit.export import export
from quantkit.formats.gguf import open_gguf
from quantkit.formats.tokenizer import Tokenizer
from quantkit.inspect import inspect
from quantkit.model.backends import reference
from quantkit.model.encoder import POOLINGS
from quantkit.model.placement import Placement
from quantkit.quantize import QuantizeOptions, quantize, run_quantize
from verdicts import libraries, quantkit_verdicts
from vocabs import TEXTS, flags, random_texts

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/real-vocabularies.json").read_text())
VOCAB = ConvertOptions(vocab_only=True)
#: Vocabularies that llama.cpp tokenizes otherwise than the checkpoint: it does not fold the case of letters beyond
#: ASCII, or has no merges of pieces, whose scores are all the same in the reference's files.
DIFFERENT_IDS = {"gemini-llama", "gemma3-llama", "gptoss", "llama2"}
#: llama.cpp's WordPiece does not take apart syllables of Hangul, and keeps vowel signs that BERT drops.
DIFFERENT_SENTENCES = {"한국어 문장도 하나 있습니다.", "यह हिंदी में एक वाक्य है।"}
#: Nothing here runs what splits their texts.
UNCHECKED = {"mistral-v1", "mistral-v3", "mistral-v7", "qwen"}

pytestmark = pytest.mark.skipif(
    bool(real_files.missing()),
    reason=f"no real files ({', '.join(real_files.missing())}): python tests/lib/real_files.py brings them",
)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Every vocabulary converted, with the notes of its plan."""
    folder = tmp_path_factory.mktemp("vocabularies")
    outputs = {}
    for name in real_files.VOCABULARIES:
        source, out = real_files.write_vocabulary(name, folder), folder / f"{name}.gguf"
        plan = plan_convert(source, out, None, VOCAB)
        run_quantize(plan)
        outputs[name] = out, tuple(plan.notes)
    return outputs


def test_the_bytes_are_the_references(vocabularies: dict[str, tuple[Path, tuple[str, ...]]]) -> None:
    assert EXPECTED.keys() == real_files.VOCABULARIES.keys()
    sums = {name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for name, (path, _) in vocabularies.items()}
    assert sums == EXPECTED


def test_notes_name_vocabularies_that_tokenize_differently(
    vocabularies: dict[str, tuple[Path, tuple[str, ...]]],
) -> None:
    about = {name: [note for note in notes if re.search(r"\bids\b", note)] for name, (_, notes) in vocabularies.items()}
    assert {name for name, notes in about.items() if any("not checked" in note for note in notes)} == UNCHECKED
    assert {name for name, notes in about.items() if any("instead of" in note for note in notes)} == DIFFERENT_IDS
    assert {name for name, notes in about.items() if notes} == DIFFERENT_IDS | UNCHECKED


def test_ids_are_llama_cpps(vocabularies: dict[str, tuple[Path, tuple[str, ...]]], llama_bin: Path) -> None:
    texts = [TEXT.encode(), *TEXTS[::4], *random_texts(7, 12)]
    questions = [(text, *flags(number)) for number, text in enumerate(texts)]
    answers = ask(llama_bin, [(path, questions) for path, _ in vocabularies.values()])
    for (name, (path, _)), expected in zip(vocabularies.items(), answers, strict=True):
        assert expected is not None, f"llama.cpp refuses {name}"
        with open_gguf(path) as file:
            tokenizer = Tokenizer.from_gguf(file)
        for (text, add_special, parse_special), ids in zip(questions, expected, strict=True):
            actual = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            assert actual.tolist() == ids, f"{name}: {text!r}"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 in F32."""
    path = tmp_path_factory.mktemp("minilm") / "f32.gguf"
    convert(real_files.MINILM.path("/vocab.txt").parent, path, None, ConvertOptions(outtype="f32"))
    return path


def test_sentences_have_the_embeddings_of_transformers(
    minilm: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml takes GELU by the tanh and rounds it to f16; with transformers' own function, all agree to 1e-6."""
    texts, expected = real_files.sentences(), np.load(data / "sentence-embeddings.npy")
    distances = np.abs(embed(minilm, texts, truncate=True) - expected).max(1)
    assert {text for text, distance in zip(texts, distances, strict=True) if distance > 1e-3} == DIFFERENT_SENTENCES
    monkeypatch.setitem(reference._ACTIVATIONS, "gelu", exact_gelu)
    on_reference = Placement(gpu_layers=99, rules=((".*", "REFERENCE"),), accelerators=("REFERENCE",))
    assert np.abs(embed(minilm, texts[:6], placement=on_reference) - expected[:6]).max() < 1e-6


def test_sentences_have_the_embeddings_of_llama_cpp(minilm: Path, llama_bin: Path) -> None:
    texts = real_files.sentences()[::4]
    with open_gguf(minilm) as file:
        tokenizer = Tokenizer.from_gguf(file)
    ids = [tokenizer.encode(text, parse_special=True) for text in texts]
    expected = [Libllama(llama_bin).embeddings(minilm, i, POOLINGS.index("mean"))[0] for i in ids]
    for row, expected_row in zip(embed(minilm, texts, normalize=False), expected, strict=True):
        assert nmse(row, expected_row) < 2e-7


def test_a_whole_model_is_read_and_requantized(tmp_path: Path, llama_bin: Path, data: Path) -> None:
    """Gemma 3 270M in Q4_K_M: inspect, an F32 copy, compare, perplexity beside llama-perplexity."""
    facts = inspect(real_files.GEMMA)
    assert (facts.architecture, facts.n_tensors) == ("gemma3", 236)
    copy, text = tmp_path / "f32.gguf", data / "tiny-moe-evaluation.txt"
    quantize(real_files.GEMMA, copy, "F32", QuantizeOptions(allow_requantize=True))
    compared = compare(copy, real_files.GEMMA)
    assert not compared.only_a
    assert not compared.only_b
    common = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-b", "128", "-ub", "128", "-c", "128", "--chunks", "2")
    command = [llama_bin / "llama-perplexity", "-m", copy, "-f", text, "-t", "2", *common]
    output = program_answer(command, environment={"LD_LIBRARY_PATH": str(llama_bin)}, last="Final estimate")
    assert not output.code
    expected = re.search(r"Final estimate: PPL = ([0-9.]+)", output.text)
    assert expected is not None
    run = ["perplexity", "-m", str(copy), "-f", str(text), "-c", "128", "--chunks", "2", "-ctk", "f32", "-ctv", "f32"]
    actual = re.search(r"Final estimate: PPL = ([0-9.]+)", CliRunner().invoke(cli, run).output)
    assert actual is not None
    assert float(actual[1]) == pytest.approx(float(expected[1]), rel=1e-4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma as a checkpoint of transformers."""
    folder = tmp_path_factory.mktemp("exported") / "gemma"
    export(real_files.GEMMA, folder)
    return folder


def test_a_whole_model_round_trips_through_a_checkpoint(exported: Path, tmp_path: Path) -> None:
    """Values and keys are those of a BF16 copy; only the RoPE base that the file leaves to its loader is added."""
    output, copy = tmp_path / "back.gguf", tmp_path / "copy.gguf"
    convert(exported, output)
    quantize(real_files.GEMMA, copy, "BF16", QuantizeOptions(allow_requantize=True, no_provenance=True))
    compared = compare(copy, output, error=False)
    assert {change.key: change.kind for change in compared.metadata or ()} == {"gemma3.rope.freq_base_swa": "added"}
    assert (compared.only_a, compared.only_b) == ((), ())
    assert [tensor.name for tensor in compared.tensors or () if not tensor.identical] == []
    assert len(compared.tensors or ()) == 236


@pytest.mark.parametrize("preset", ["Q4_0", "Q8_0", "IQ4_XS"])
def test_a_requantized_whole_model_equals_llama_quantizes(preset: str, tmp_path: Path, llama_bin: Path) -> None:
    out = tmp_path / "out.gguf"
    command = ["llama-quantize", "--allow-requantize", str(real_files.GEMMA), str(out), preset, "2"]

    def digest() -> bytes:
        with out.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def ask_llama_quantize() -> bytes:
        subprocess.run([llama_bin / command[0], *command[1:]], capture_output=True, check=True)
        return digest()

    expected = answer(ask_llama_quantize, peer(llama_bin), *command[:2], preset, real_files.GEMMA)
    quantize(real_files.GEMMA, out, preset, QuantizeOptions(allow_requantize=True, no_provenance=True), overwrite=True)
    assert digest() == expected


def test_a_whole_model_is_cooked(exported: Path, tmp_path: Path, data: Path) -> None:
    """From its checkpoint: cook refuses a model that is quantized already."""
    text = {"text": [str(data / "tiny-moe-calibration.txt")], "evaluation": str(data / "tiny-moe-evaluation.txt")}
    steps = {"imatrix": {"run": False}, "check": {"ctx": 128, "chunks": 2}, "report": {"run": False}}
    keys = {"targets": ["Q8_0"], "output": "cooked", "calibration": text, **steps}
    with pytest.raises(RecipeError):
        plan_cook(config_from({"model": str(real_files.GEMMA), **keys}, "cook.toml", tmp_path))
    (target,) = cook(config_from({"model": str(exported), **keys}, "cook.toml", tmp_path)).targets
    assert target.kld is not None
    assert 0 < target.kld < 0.01
    verdicts = quantkit_verdicts(target.path)
    expected = {name: library.load(target.path).loads for name, library in libraries().items()}
    assert expected == {name: verdicts[name].loads for name in expected} == dict.fromkeys(expected, True)
