"""Divergences of several models from one base in one run: against ``kld`` and definitions, and when it may stop."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeModel, install
from refusals import check_refused, refuses

from quantkit.cli import cli
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate import (
    ComparisonProgress,
    KldProgress,
    Nodes,
    SaveLogits,
    Texts,
    compare_models,
    kld,
    kld_of_texts,
    perplexity,
)
from quantkit.evaluate.intervals import alpha_of_look, chunk_mean, looks, student_quantile
from quantkit.evaluate.scores import compare_with_logits
from quantkit.evaluate.texts import position_ranges, read_texts
from quantkit.model.engine import load
from quantkit.quantize import quantize
from small_models import llama_fields, llama_tensors, write_model, write_with_template
from zoo import write_zoo

f32 = np.float32
F64 = npt.NDArray[np.float64]
V, N_CTX = 301, 32


def some_tokens(n: int, seed: int = 5) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, V, n, dtype=np.int32)


TOKENS = some_tokens(40 * N_CTX)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of a base, of two models near it, and of one with another vocabulary; each runs as a fake model."""
    paths = [tmp_path / f"{name}.gguf" for name in ("base", "near", "far", "other")]
    for path in paths:
        write_model(path, llama_tensors(layers=1), llama_fields(layers=1))
    models = [FakeModel(path, V, noise=noise, bos=3) for path, noise in zip(paths, (0, 0.1, 0.3), strict=False)]
    install(monkeypatch, *models, FakeModel(paths[3], V + 1))
    return paths


def whole_base(path: Path, folder: Path, tokens: npt.NDArray[np.int32]) -> Path:
    """Write base logits with every token."""
    save = SaveLogits(folder / "base.logits", "compact", top_k=V, residual=0, overwrite=True)
    perplexity(path, tokens=tokens, n_ctx=N_CTX, save_logits=save)
    return folder / "base.logits"


@pytest.mark.parametrize("base_bytes", [1 << 30, 4 * 15 * V * 5, 4 * 15 * V * 70])
def test_figures_equal_those_of_an_exact_base_file(files: list[Path], tmp_path: Path, base_bytes: int) -> None:
    """Whatever the number of rounds."""
    base, *models = files[:3]
    result = compare_models(base, models, Texts(tokens=TOKENS), n_ctx=N_CTX, n_batch=128, base_bytes=base_bytes)
    logits = whole_base(base, tmp_path, TOKENS)
    assert (result.n_windows, result.bos) == (40, 3)
    for model, path in zip(result.models, models, strict=True):
        expected = kld(path, logits)
        sums = model.sums
        assert sums.n == expected.sums.n == 40 * 15
        assert sums.kld.mean == pytest.approx(expected.mean, abs=1e-6)
        assert sums.nll.ppl == expected.sums.nll.ppl
        assert sums.ratio == pytest.approx(expected.sums.ratio, abs=1e-6)
        assert sums.same_top_p == expected.sums.same_top_p
        assert dict(sums.kld_distribution().rows) == pytest.approx(
            dict(expected.sums.kld_distribution().rows), abs=2e-6
        )
        assert model.bound == 0
        assert model.mean.value == pytest.approx(expected.mean.value, abs=1e-6)


def test_a_model_does_not_diverge_from_itself(files: list[Path]) -> None:
    result = compare_models(files[0], [files[0]], Texts(tokens=TOKENS), n_ctx=N_CTX, chunks=3)
    assert result.models[0].sums.kld.mean == (0, 0)
    assert result.n_windows == 3


def test_logits_of_minus_infinity_have_no_share() -> None:
    p = np.zeros((2, V), f32)
    p[0, 5] = -np.inf
    q = p.copy()
    q[1, 7] = -np.inf
    following = np.zeros(2, np.int32)
    kld_values = compare_with_logits(q, p, following).kld
    assert kld_values.tolist() == [0, math.inf]


def test_a_window_beyond_the_memory_is_kept_in_the_compact_form(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *models = files[:3]
    texts = Texts(tokens=TOKENS)
    exact = compare_models(base, models, texts, n_ctx=N_CTX)
    monkeypatch.setattr("quantkit.evaluate.base_rows.TOP_K", 100)
    compact = compare_models(base, models, texts, n_ctx=N_CTX, base_bytes=1000)
    assert [note for note in compact.notes if "15 positions" in note]
    for a, b in zip(compact.models, exact.models, strict=True):
        assert 0 < abs(a.mean.value - b.mean.value) <= a.bound
        assert a.mean.value == pytest.approx(b.mean.value, rel=0.02)


class _Wide(FakeModel):
    """A large vocabulary, and logits that cost little to make."""

    def after(self, keys: list[list[int]]) -> npt.NDArray[np.float32]:
        logits = (np.arange(self.n_vocab, dtype=np.uint32) * 2654435761 % 1009).astype(f32) / 100
        return np.stack([np.roll(logits, key[1] % 97) for key in keys])


def test_memory_does_not_grow_with_the_text(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *(_Wide(path, 20000) for path in files[:3]))
    base, *models = files[:3]
    tokens = np.arange(6 * 256, dtype=np.int32) % 997
    arguments: dict[str, Any] = {"n_ctx": 256, "n_batch": 256, "base_bytes": 11_000_000, "threads": 2}
    compare_models(base, models, Texts(tokens=tokens[:256]), **arguments)
    tracemalloc.start()
    compare_models(base, models, Texts(tokens=tokens), **arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All scored logits are 61 MB, those of a chunk 10 MB; blocks have at most 23 rows, 1.8 MB.
    assert peak < 11e6 + 9e6


def test_each_text_has_its_row_and_all_have_a_total(files: list[Path], tmp_path: Path) -> None:
    base, *models = files[:3]
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, seed in zip(texts, (1, 2), strict=True):
        path.write_bytes((some_tokens(5 * N_CTX + seed, seed) % 200).astype(np.uint8).tobytes())
    both = compare_models(base, models, Texts(files=tuple(texts)), n_ctx=N_CTX)
    assert both.texts == ((str(texts[0]), 5), (str(texts[1]), 5))
    for number, path in enumerate(texts):
        alone = compare_models(base, models, Texts(files=(path,)), n_ctx=N_CTX)
        for model, expected in zip(both.models, alone.models, strict=True):
            assert model.by_text[number].kld.mean == pytest.approx(expected.sums.kld.mean, rel=1e-9)
            assert model.by_text[number].ratio == pytest.approx(expected.sums.ratio, rel=1e-6)
    model = both.models[0]
    assert model.sums.kld.total == pytest.approx(sum(s.kld.total for s in model.by_text))
    with refuses(QuantkitError, f"QK-E203 {texts[0]}"):
        compare_models(base, models, Texts(files=tuple(texts)), n_ctx=512)


def test_differences_are_paired_by_chunks(files: list[Path]) -> None:
    base, *models = files[:3]
    result = compare_models(base, models, Texts(tokens=TOKENS), n_ctx=N_CTX)
    first, second = result.models
    assert result.ranking == [first, second]
    difference = second.minus(first)
    means = [
        np.concatenate(model.sums.klds).reshape(40, 15).mean(axis=1, dtype=np.float64) for model in (first, second)
    ]
    assert difference.value == pytest.approx((means[1] - means[0]).mean(), rel=1e-5)
    assert difference.error == pytest.approx((means[1] - means[0]).std(ddof=1) / math.sqrt(40), rel=1e-4)
    assert difference.half_width() == pytest.approx(2.022691 * difference.error, rel=1e-5)
    assert difference.interval()[0] > 0
    entry = result.as_dict()["differences"][0]
    assert (entry["a"], entry["b"], entry["value"]) == (str(first.model), str(second.model), -difference.value)


def test_statistics_by_position(files: list[Path]) -> None:
    """The last range is the half that is scored anyway; the others are those of their positions."""
    base, *models = files[:3]
    texts = Texts(tokens=TOKENS[: 6 * 64])
    plain = compare_models(base, models, texts, n_ctx=64)
    result = compare_models(base, models, texts, n_ctx=64, by_position=True)
    assert position_ranges(64) == [(0, 16), (16, 32), (32, 64)]
    for model, expected in zip(result.models, plain.models, strict=True):
        assert model.sums.kld == expected.sums.kld
        assert model.by_position[32, 64].kld == model.sums.kld
        assert {part: sums.n for part, sums in model.by_position.items()} == {
            (0, 16): 6 * 16, (16, 32): 6 * 16, (32, 64): 6 * 31
        }  # fmt: skip
    fakes = FakeModel(base, V), FakeModel(models[1], V, noise=0.3)
    expected_klds = []
    for chunk in TOKENS[: 6 * 64].reshape(6, 64):
        p, q = (model.forward([3, *chunk[1:].tolist()]).astype(np.float64)[16:32] for model in fakes)
        p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
        expected_klds += (np.exp(p) * (p - q)).sum(-1).tolist()
    assert result.models[1].by_position[16, 32].kld.mean.value == pytest.approx(np.mean(expected_klds), rel=1e-4)


def test_impossible_comparisons_are_refused(files: list[Path]) -> None:
    texts = Texts(tokens=TOKENS)
    with refuses(QuantkitError, "QK-E207", V, V + 1):
        compare_models(files[0], [files[3]], texts, n_ctx=N_CTX)
    with refuses(QuantkitError, "QK-E201"):
        compare_models(files[0], files[1:2], Texts(), n_ctx=N_CTX)
    with refuses(RecipeError, "QK-E201"):
        compare_models(files[0], [], texts)
    with refuses(RecipeError, "QK-E203 --until"):
        compare_models(files[0], files[1:2], texts, until=1.5)
    with refuses(RecipeError, "QK-E210 --save-all-logits"):
        compare_models(files[0], files[1:2], texts, nodes=Nodes())
    with refuses(RecipeError, "QK-E203 half"):
        compare_models(files[0], files[1:2], replace(texts, scored="half"))


# --- when to stop ---


@pytest.mark.parametrize(
    ("p", "degrees", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.995, 15, 2.94671), (0.975, 1999, 1.96115),
     (0.975, 10**6, 1.95996)],
)  # fmt: skip
def test_quantiles_of_students_distribution(p: float, degrees: int, value: float) -> None:
    assert student_quantile(p, degrees) == pytest.approx(value, rel=1e-5)


def test_looks_are_fixed_beforehand() -> None:
    assert looks(64) == (16, 24, 36, 54, 64)
    assert looks(100, 4) == (16, 24, 36, 56, 84, 100)
    assert looks(10) == (10,)
    assert alpha_of_look(5) == pytest.approx(0.01)


def test_the_mean_of_unequal_chunks_is_that_of_their_tokens() -> None:
    totals, counts = np.array([10.0, 40.0, 20.0]), np.array([10, 20, 10])
    mean = chunk_mean(totals, counts)
    residuals = totals - 70 / 40 * counts
    assert mean == pytest.approx((70 / 40, math.sqrt(1.5 * (residuals**2).sum()) / 40, 3))
    assert chunk_mean(totals[:1], counts[:1]).half_width() == math.inf


def _stopped_mean(totals: F64, share: float, rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval of a run over chunks in random order that stops by the rule."""
    order, ends = rng.permutation(len(totals)), looks(len(totals))
    for end in ends:
        mean = chunk_mean(totals[order[:end]], np.ones(end, np.int64))
        if mean.half_width(alpha_of_look(len(ends))) <= share * mean.value:
            break
    return mean.interval(alpha_of_look(len(ends)))


def _impatient_mean(totals: F64, share: float, rng: np.random.Generator) -> tuple[float, float]:
    """The same by an interval for one look, at every chunk from the fifth on."""
    order = rng.permutation(len(totals))
    for end in range(5, len(totals) + 1):
        mean = chunk_mean(totals[order[:end]], np.ones(end, np.int64))
        if mean.half_width() <= share * mean.value:
            break
    return mean.interval()


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_intervals_hold_although_a_run_stops_when_they_are_narrow(share: float) -> None:
    """95 % of intervals have the mean of a text with skewed chunks, whose second half diverges more."""
    rng = np.random.default_rng(8)
    text = 0.01 * rng.lognormal(0, 0.5, 2000) * np.repeat([1, 1.5], 1000)
    intervals = np.array([_stopped_mean(text, share, rng) for _ in range(1000)])
    covered = ((intervals[:, 0] <= text.mean()) & (text.mean() <= intervals[:, 1])).mean()
    assert covered > 0.95
    impatient = np.array([_impatient_mean(text, 0.2, rng) for _ in range(400)])
    assert ((impatient[:, 0] <= text.mean()) & (text.mean() <= impatient[:, 1])).mean() < 0.93


def test_a_run_stops_when_all_intervals_are_narrow(files: list[Path]) -> None:
    base, *models = files[:3]
    texts = Texts(tokens=some_tokens(200 * N_CTX))
    events: list[ComparisonProgress] = []
    arguments: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": 128, "until": 0.1}
    result = compare_models(base, models, texts, progress=events.append, **arguments)
    assert result.stop is not None
    assert result.stop.is_met
    assert result.n_windows in result.stop.looks[:-1]
    assert events[-1].current == 3 * result.n_windows < events[-1].total == 600
    for model in result.models:
        assert len(model.totals) == result.n_windows
        assert model.mean.half_width(result.alpha) <= 0.1 * model.mean.value
    assert result.texts == (("tokens", result.n_windows),)
    repetition = compare_models(base, models, texts, **arguments)
    assert np.array_equal(repetition.models[0].totals, result.models[0].totals)
    reseeded = compare_models(base, models, texts, seed=1, **arguments)
    assert not np.array_equal(reseeded.models[0].totals[:16], result.models[0].totals[:16])
    complete = compare_models(base, models, replace(texts, tokens=TOKENS), n_ctx=N_CTX, until=0.001)
    assert complete.stop is not None
    assert not complete.stop.is_met
    assert complete.n_windows == 40
    assert sorted(complete.models[0].totals) == pytest.approx(
        sorted(compare_models(base, models, Texts(tokens=TOKENS), n_ctx=N_CTX).models[0].totals)
    )


# --- conversations ---

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DIALOGUE = [("user", "what is it"), ("assistant", "a tree"), ("user", "and that"), ("assistant", "a river, I think")]


@pytest.fixture(scope="module")
def chat_model(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_template(tiny_moe, tmp_path_factory.mktemp("chat") / "model.gguf", TEMPLATE)


def conversation_file(path: Path, *dialogues: list[tuple[str, str]]) -> Path:
    messages = [[{"role": role, "content": content} for role, content in dialogue] for dialogue in dialogues]
    path.write_text("".join(f"{json.dumps({'messages': m})}\n" for m in messages))
    return path


def test_the_tokens_of_answers_are_scored(chat_model: Path, tmp_path: Path) -> None:
    """With the end of their turns, but without what the template writes before and after."""
    pytest.importorskip("jinja2")
    path = conversation_file(tmp_path / "chat.jsonl", DIALOGUE)
    with load(chat_model) as model:
        tokenizer = model.tokenizer
        eos = tokenizer.piece(tokenizer.eos).decode()
        for scored, expected in (
            ("answers", [f"a tree{eos}", f"a river, I think{eos}"]),
            ("all", ["".join(f"<|{role}|>{content}{eos}\n" for role, content in DIALOGUE)]),
        ):
            (text,) = read_texts(Texts(chat=(path,), scored=scored), model, 512, None, [], all_positions=False)
            (window,) = text.windows
            pieces = b"".join(map(tokenizer.piece, window.following)).decode()
            assert pieces == "".join(expected)
            assert window.is_scored.sum() == window.rows < len(window.tokens)


def test_divergence_of_conversations(chat_model: Path, tmp_path: Path) -> None:
    """Each is a window of its own length; a longer one is cut, one without an answer left out."""
    pytest.importorskip("jinja2")
    model = tmp_path / "q4_0.gguf"
    quantize(chat_model, model, "Q4_0")
    long = [("user", "and then "), ("assistant", "one more word " * 40)]
    chats = conversation_file(tmp_path / "chat.jsonl", DIALOGUE, long, [("user", "hello")])
    result = compare_models(chat_model, [model], Texts(chat=(chats,)), n_ctx=64)
    assert result.texts == ((str(chats), 2),)
    assert len([note for note in result.notes if str(chats) in note]) == 2
    with load(chat_model) as base, load(model) as quant:
        (text,) = read_texts(Texts(chat=(chats,)), base, 64, None, [], all_positions=False)
        klds = []
        for window in text.windows:
            p, q = (x.forward(window.tokens).astype(np.float64)[window.is_scored] for x in (base, quant))
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
            klds += (np.exp(p) * (p - q)).sum(-1).tolist()
    assert result.models[0].sums.n == len(klds)
    runtime = compare_models(chat_model, [model], Texts(chat=(chats,)), n_ctx=64, activations="runtime")
    assert runtime.models[0].mean.value == pytest.approx(np.mean(klds), rel=0.05)
    with refuses(QuantkitError, f"QK-E203 {chats}"):
        compare_models(chat_model, [model], Texts(chat=(chats,)), n_ctx=4)


# --- the command line ---


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_kld_prints_a_row_per_file(files: list[Path], tmp_path: Path) -> None:
    TOKENS.tofile(tmp_path / "ids.i32")
    (tmp_path / "a.txt").write_bytes((TOKENS[: 9 * N_CTX] % 200).astype(np.uint8).tobytes())
    common = ("kld", "--base-model", files[0], files[1], files[2], "-c", N_CTX, "--tokens", f"@{tmp_path}/ids.i32")
    result = run(*common, "-f", tmp_path / "a.txt", "--by-position", "--json", tmp_path / "o.json")
    assert result.exit_code == 0, result.output
    expected = compare_models(
        files[0], files[1:3], Texts(files=(tmp_path / "a.txt",), tokens=TOKENS), n_ctx=N_CTX, by_position=True
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    for model in expected.models:
        value, error = model.sums.kld.mean
        row = next(row for row in rows if row[:1] == [model.model.name])
        assert {f"{value:.5f}", f"{error:.5f}", f"{model.sums.ratio.value:.4f}"} <= set(row)
    assert ["far.gguf", "near.gguf"] in [row[:2] for row in rows]
    output = json.loads((tmp_path / "o.json").read_text())
    assert {**output, "seconds": 0} == json.loads(json.dumps({**expected.as_dict(), "seconds": 0}))
    interim = compare_models(files[0], files[1:3], Texts(tokens=TOKENS), n_ctx=N_CTX, until=0.5)
    low, high = interim.models[0].mean.interval(interim.alpha)
    assert f"{low:.5f} to {high:.5f}" in run(*common, "--until", "50%").stdout
    assert run(*common, "--max-kld", 10).exit_code == 0
    assert run(*common, "--max-kld", 1e-9).exit_code == 3


def test_perplexity_of_several_texts(files: list[Path], tmp_path: Path) -> None:
    """A row each, equal to a run of its own; by position, the last range is the half that is scored anyway."""
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, seed in zip(texts, (1, 2), strict=True):
        path.write_bytes((some_tokens(5 * N_CTX, seed) % 200).astype(np.uint8).tobytes())
    common = ("perplexity", "-m", files[1], "-c", N_CTX, "--json")
    both = json.loads(run(*common, "-", "-f", texts[0], "-f", texts[1], "--by-position").stdout)
    alone = [json.loads(run(*common, "-", "-f", path).stdout) for path in texts]
    for entry, expected in zip(both["by_text"], alone, strict=True):
        assert entry["ppl"] == pytest.approx(expected["ppl"])
        assert entry["n_scored"] == expected["n_scored"]
    assert both["n_scored"] == sum(expected["n_scored"] for expected in alone)
    assert both["ln_ppl"]["value"] == pytest.approx(np.mean([expected["ln_ppl"]["value"] for expected in alone]))
    parts = {(part["first"], part["end"]): part for part in both["by_position"]}
    assert list(parts) == [(0, 16), (16, 32)]
    assert parts[16, 32]["ppl"] == both["ppl"]
    assert parts[0, 16]["n_scored"] == 10 * 16
    model = FakeModel(files[1], V, noise=0.1)
    ids = np.frombuffer(texts[0].read_bytes(), np.uint8)[: N_CTX - 1].tolist()
    x = model.forward([3, *ids]).astype(np.float64)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    first = json.loads(run(*common, "-", "-f", texts[0], "--by-position", "--chunks", 1).stdout)["by_position"][0]
    assert first["ln_ppl"]["value"] == pytest.approx(-log_p[np.arange(16), ids[:16]].mean(), rel=1e-6)
    refused = run(*common[:-1], "-f", texts[0], "-f", texts[1], "--save-all-logits", tmp_path / "base")
    assert refused.exit_code == 2
    assert "--save-all-logits" in refused.stderr


def test_special_tokens_of_a_text(chat_model: Path, tmp_path: Path) -> None:
    with load(chat_model) as model:
        tokenizer = model.tokenizer
        name = tokenizer.piece(tokenizer.eos).decode()
    text = tmp_path / "a.txt"
    text.write_text(f"words {name} words and more words " * 12)
    n_tokens = []
    for option in ((), ("--parse-special",)):
        result = run("kld", "--base-model", chat_model, chat_model, "-f", text, "-c", 8, "--json", "-", *option)
        n_tokens.append(json.loads(result.stdout)["n_chunks"])
    assert n_tokens[1] < n_tokens[0]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("near.gguf",), "--base-model"),
        (("--base-model", "base.gguf"), "-m"),
        (("near.gguf", "--base", "b", "--base-model", "base.gguf"), "--base-model"),
        (("near.gguf", "--base", "b", "--by-position"), "--by-position needs --base-model"),
        (("near.gguf", "--base", "b", "--until", "2%"), "--until"),
        (("near.gguf", "far.gguf", "--base", "b"), "--base-model"),
    ],
)
def test_options_that_contradict_each_other(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], option: str
) -> None:
    monkeypatch.chdir(files[0].parent)
    result = run("kld", *arguments)
    assert result.exit_code == 2, result.output
    assert option in result.stderr


# --- folders of texts, and several base files ---


def write_text(path: Path, chunks: int, seed: int) -> Path:
    """Write a text of some chunks of tokens, which the fake tokenizer reads byte by byte after BOS."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((some_tokens(chunks * N_CTX, seed) % 200).astype(np.uint8).tobytes())
    return path


def test_a_folder_is_its_texts(files: list[Path], tmp_path: Path) -> None:
    """Each a row, by name; other files are counted, hidden ones and subfolders ignored."""
    folder = tmp_path / "texts"
    paths = [write_text(folder / name, n, n) for name, n in (("a.txt", 3), ("b.raw", 2))]
    for name in ("notes.md", ".hidden.txt"):
        (folder / name).write_text("no text")
    write_text(folder / "sub" / "c.txt", 3, 3)
    result = compare_models(files[0], files[1:3], Texts(files=(folder,)), n_ctx=N_CTX)
    assert result.texts == tuple((str(path), n) for path, n in zip(paths, (3, 2), strict=True))
    assert [note for note in result.notes if str(folder) in note and "1 files" in note]
    by_name = compare_models(files[0], files[1:3], Texts(files=tuple(paths)), n_ctx=N_CTX)
    assert [m.sums.kld.mean for m in result.models] == [m.sums.kld.mean for m in by_name.models]
    printed = json.loads(run("perplexity", "-m", files[1], "-c", N_CTX, "-f", folder, "--json", "-").stdout)
    assert [part["name"] for part in printed["by_text"]] == list(map(str, paths))
    for path in paths:
        path.unlink()
    check_refused(run("kld", "--base-model", files[0], files[1], "-f", folder).output, f"QK-E121 {folder}")


def test_no_text_names_the_way_to_some(files: list[Path]) -> None:
    result = run("kld", "--base-model", files[0], files[1])
    check_refused(result.output, "QK-E201 -f --chat")
    assert "quantkit texts" in result.output


def test_conversations_of_a_folder_need_a_template(tiny_moe: Path, chat_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    folder = tmp_path / "texts"
    folder.mkdir()
    chats = conversation_file(folder / "chat.jsonl", DIALOGUE)
    (folder / "a.txt").write_text("words and more words " * 60)
    names = {}
    for model in (chat_model, tiny_moe):
        with load(model) as loaded:
            notes: list[str] = []
            parts = read_texts(Texts(files=(folder,)), loaded, 64, 1, notes, all_positions=False)
        names[model] = [part.name for part in parts], [note for note in notes if f"{chats}: not measured" in note]
    assert names[chat_model] == ([str(folder / "a.txt"), str(chats)], [])
    assert [len(part) for part in names[tiny_moe]] == [1, 1]


@pytest.fixture
def bases(files: list[Path], tmp_path: Path) -> list[tuple[Path, Path]]:
    """Two texts, of different lengths, and base logits of each."""
    pairs = []
    for name, chunks in (("a", 5), ("b", 3)):
        text = write_text(tmp_path / "texts" / f"{name}.txt", chunks, chunks)
        base = tmp_path / f"{name}.logits"
        arguments = ("-f", text, "-c", N_CTX, "--top-k", V, "--save-all-logits", base)
        assert run("perplexity", "-m", files[0], *arguments).exit_code == 0
        pairs.append((text, base))
    return pairs


def test_several_base_files_equal_one_run_with_the_base_model(
    files: list[Path], bases: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    """A row each and the total, whichever base comes first; the model is loaded once."""
    expected = compare_models(files[0], [files[1]], Texts(files=tuple(text for text, _ in bases)), n_ctx=N_CTX)
    (model,) = expected.models
    by_name = dict(zip((name for name, _ in expected.texts), model.by_text, strict=True))
    reports: list[KldProgress] = []
    result = kld_of_texts(files[1], [base for _, base in reversed(bases)], Texts(files=(tmp_path / "texts",)),
                          progress=reports.append)  # fmt: skip
    assert [name for name, _ in result.by_text] == [str(text) for text, _ in reversed(bases)]
    for name, part in result.by_text:
        assert part.sums.n == by_name[name].n
        assert part.sums.kld.mean == pytest.approx(by_name[name].kld.mean, abs=1e-6)
    assert result.mean == pytest.approx(model.sums.kld.mean, abs=1e-6)
    assert result.sums.ratio == pytest.approx(model.sums.ratio, abs=1e-6)
    assert result.sums.same_top_p == model.sums.same_top_p
    assert dict(result.sums.p_diff_distribution().rows) == pytest.approx(
        dict(model.sums.p_diff_distribution().rows), abs=2e-6
    )
    assert [(now.current, now.total) for now in reports] == [(n, 8) for n in range(1, 9)]
    assert reports[-1].sums.kld.mean == result.mean


def test_several_base_files_on_the_command_line(files: list[Path], bases: list[tuple[Path, Path]]) -> None:
    (a_text, a), (b_text, b) = bases
    common = ("kld", "-m", files[1], "--base", a, "--base", b)
    result = run(*common, "--json", "-")
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    alone = [json.loads(run("kld", "-m", files[1], "--base", base, "--json", "-").stdout) for base in (a, b)]
    for entry, expected in zip(output["by_text"], alone, strict=True):
        assert (entry["name"], entry["kld"], entry["n_scored"]) == (
            expected["base"], expected["kld"], expected["n_scored"],
        )  # fmt: skip
    assert output["n_scored"] == sum(entry["n_scored"] for entry in alone)
    rows = [line.split() for line in run(*common, "-f", b_text, "-f", a_text).stdout.splitlines()]
    for name, n in ((str(a_text), 75), (str(b_text), 45), ("total", 120)):
        assert [row[1] for row in rows if row[:1] == [name]] == [str(n)]
    assert run(*common, "--max-kld", 1e-9).exit_code == 3
    limited = json.loads(run(*common, "--chunks", 2, "--json", "-").stdout)
    assert [entry["n_chunks"] for entry in limited["by_text"]] == [2, 2]


def test_a_base_is_checked_against_its_text(files: list[Path], bases: list[tuple[Path, Path]], tmp_path: Path) -> None:
    (a_text, a), (b_text, b) = bases
    changed = write_text(tmp_path / "changed.txt", 5, 9)
    check_refused(run("kld", "-m", files[1], "--base", a, "-f", changed).output, f"QK-E207 {a}")
    two_texts = run("kld", "-m", files[1], "--base", a, "-f", a_text, "-f", b_text)
    check_refused(two_texts.output, f"QK-E207 {b_text}")
    check_refused(run("kld", "-m", files[1], "--base", a, "--base", b, "-f", a_text).output, f"QK-E207 {b}")
    check_refused(run("kld", "-m", files[3], "--base", a, "--base", b).output, f"QK-E207 {a} {V} {V + 1}")
    with refuses(RecipeError, "QK-E201 --chat --base-model"):
        kld_of_texts(files[1], [a], Texts(chat=(a_text,)))
    with refuses(RecipeError, "QK-E201"):
        kld_of_texts(files[1], [])


# --- with the engine ---


def test_real_models_equal_an_exact_base_file(tmp_path: Path) -> None:
    base = write_zoo("llama-dense", tmp_path / "f32.gguf")
    model = tmp_path / "q4_0.gguf"
    quantize(base, model, "Q4_0")
    tokens = some_tokens(6 * N_CTX) % 128
    logits = whole_base(base, tmp_path, tokens)
    result = compare_models(base, [model], Texts(tokens=tokens), n_ctx=N_CTX)
    expected = kld(model, logits)
    assert result.activations == expected.activations == "exact"
    assert result.models[0].sums.kld.mean == pytest.approx(expected.mean, rel=1e-4, abs=1e-7)
    assert result.models[0].nbytes == model.stat().st_size
    assert result.models[0].bpw < 32
