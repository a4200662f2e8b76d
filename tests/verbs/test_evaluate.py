"""Perplexity, divergence and logits: against literal definitions, and against llama-perplexity itself."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeModel, install
from refusals import refuses

from quantkit.cli import cli
from quantkit.cli.kld import chunk_line, narrow_line, statistics_text
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.evaluate import KldProgress, SaveLogits, kld, logits, perplexity
from quantkit.evaluate.passes import Session
from quantkit.evaluate.scores import compare_with_compact, compare_with_llama, largest, most_probable, softmax
from quantkit.evaluate.statistics import KldSums, NllSums, Scores, distribution, percentile
from quantkit.formats.logits import CompactLogits, LlamaRows, encode_rows, open_logits
from quantkit.model.engine import load
from quantkit.model.fusion import Fusion
from quantkit.model.placement import Placement
from quantkit.quantize import QuantizeOptions, quantize
from small_models import llama_fields, llama_tensors, write_model
from zoo import write_zoo

F32 = npt.NDArray[np.float32]
f32 = np.float32
V = 301


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real file, for its fingerprint; the fake model only bears its name."""
    return write_model(tmp_path_factory.mktemp("model") / "fake.gguf", llama_tensors(layers=1), llama_fields(layers=1))


def load_vocabulary(path: Path) -> int:
    """Return the size of a model's vocabulary."""
    with load(path) as model:
        return model.n_vocab


def some_tokens(n: int, seed: int = 5) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, V, n, dtype=np.int32)


def log_softmax(x: F32) -> npt.NDArray[np.float64]:
    y = x.astype(np.float64)
    y -= y.max(-1, keepdims=True)
    return np.asarray(y - np.log(np.exp(y).sum(-1, keepdims=True)))


def nll_by_the_letter(
    model: FakeModel, tokens: npt.NDArray[np.int32], n_ctx: int, step: int, first: int, bos: int | None = None
) -> list[float]:
    """Return the negative log-likelihoods of all scored tokens, a window at a time."""
    likelihoods = []
    for begin in range(0, len(tokens) - n_ctx + 1, step):
        window = tokens[begin : begin + n_ctx].tolist()
        inputs = window if bos is None else [bos, *window[1:]]
        log_p = log_softmax(model.forward(inputs))
        likelihoods += [-log_p[j, window[j + 1]] for j in range(first, n_ctx - 1)]
    return likelihoods


def ppl_by_the_letter(nll: list[float]) -> tuple[float, float]:
    n, mean = len(nll), sum(nll) / len(nll)
    return math.exp(mean), math.sqrt((sum(x * x for x in nll) / n - mean * mean) / (n - 1)) * math.exp(mean)


# --- perplexity ---


@pytest.mark.parametrize("n_ctx", [16, 21])
@pytest.mark.parametrize("n_batch", [1, 5, 16, 21, 50, 1000])
@pytest.mark.parametrize("bos", [None, 7])
def test_perplexity_follows_its_definition_for_any_batching(
    gguf: Path, n_ctx: int, n_batch: int, bos: int | None
) -> None:
    tokens = some_tokens(137)
    model = FakeModel(gguf, V, bos=bos)
    result = perplexity(model, tokens=tokens, n_ctx=n_ctx, n_batch=n_batch, threads=2)
    nll = nll_by_the_letter(model, tokens, n_ctx, n_ctx, n_ctx // 2, bos)
    assert result.ppl == pytest.approx(ppl_by_the_letter(nll), rel=1e-6)
    assert result.n_scored == len(nll) == (137 // n_ctx) * (n_ctx - 1 - n_ctx // 2)
    assert result.bos == bos
    per_chunk = len(nll) // result.n_chunks
    running = [ppl_by_the_letter(nll[:n])[0] for n in range(per_chunk, len(nll) + 1, per_chunk)]
    assert [e.value for e in result.running] == pytest.approx(running, rel=1e-6)


def test_several_sequences_run_in_one_pass(gguf: Path) -> None:
    model = FakeModel(gguf, V)
    result = perplexity(model, tokens=some_tokens(16 * 7), n_ctx=16, n_batch=50)
    assert result.n_seq == 3
    assert model.calls == [48, 48, 16]


def test_a_limited_number_of_chunks(gguf: Path) -> None:
    model = FakeModel(gguf, V)
    result = perplexity(model, tokens=some_tokens(16 * 7), n_ctx=16, n_batch=16, chunks=2)
    assert (result.n_chunks, result.n_scored, model.calls) == (2, 14, [16, 16])
    assert perplexity(model, tokens=some_tokens(16 * 7), n_ctx=16, chunks=99).n_chunks == 7


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize("stride", [1, 5, 15])
def test_with_a_stride_every_token_is_scored_once_after_bos(gguf: Path, bos: int | None, stride: int) -> None:
    tokens, n_ctx = some_tokens(70), 16
    model = FakeModel(gguf, V, bos=bos)
    result = perplexity(model, tokens=tokens, n_ctx=n_ctx, n_batch=40, stride=stride)
    n = -(-(70 - n_ctx) // stride)
    nll = nll_by_the_letter(model, tokens[: (n - 1) * stride + n_ctx], n_ctx, stride, n_ctx - stride - 1, bos)
    assert result.n_chunks == n
    assert result.n_scored == n * stride == len(nll)
    assert result.ppl == pytest.approx(ppl_by_the_letter(nll), rel=1e-6)


def test_a_text_is_tokenized_with_its_special_tokens(gguf: Path) -> None:
    model = FakeModel(gguf, V, bos=7)
    result = perplexity(model, "abcdefghijklmnopqrstuvwxyz", n_ctx=8)
    ids = np.array([7, *range(97, 123)], np.int32)
    assert result.n_tokens == 27
    assert result.ppl.value == pytest.approx(ppl_by_the_letter(nll_by_the_letter(model, ids, 8, 8, 4, 7))[0], rel=1e-6)


def test_ids_need_no_tokenizer(gguf: Path) -> None:
    tokens = some_tokens(64)
    without = perplexity(FakeModel(gguf, V, tokenizer=False), tokens=tokens, n_ctx=16)
    assert "no tokenizer" in without.notes[0]
    assert without.ppl == perplexity(FakeModel(gguf, V), tokens=tokens, n_ctx=16).ppl


def test_a_context_beyond_the_training_length_is_noted(gguf: Path) -> None:
    model = FakeModel(gguf, V, n_ctx_train=10)
    assert "exceeds the 10" in perplexity(model, tokens=some_tokens(64), n_ctx=16).notes[0]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"tokens": [1, 2, 3]}, "QK-E203 512"),
        ({"tokens": [1, V], "n_ctx": 4}, f"QK-E203 1 {V}"),
        ({"tokens": [-1, 2], "n_ctx": 4}, "QK-E203 0 -1"),
        ({"tokens": [[1, 2]]}, "QK-E210"),
        ({"tokens": [1.5, 2]}, "QK-E210"),
        ({"tokens": []}, "QK-E210"),
        ({}, "QK-E201"),
        ({"text": "a", "tokens": [1]}, "QK-E201"),
        ({"tokens": [1] * 64, "n_ctx": 3}, "QK-E203 3 4"),
        ({"tokens": [1] * 64, "n_ctx": 16, "stride": 16}, "QK-E203 --ppl-stride 16"),
        ({"tokens": [1] * 16, "n_ctx": 16, "stride": 4}, "QK-E203 16"),
        (
            {"tokens": [1] * 64, "n_ctx": 16, "stride": 4, "save_logits": SaveLogits("x")},
            "QK-E201 --ppl-stride",
        ),
        ({"tokens": [1] * 64, "n_ctx": 16, "save_logits": SaveLogits("x", "csv")}, "QK-E203 csv"),
        ({"tokens": [1] * 64, "n_ctx": 16, "save_logits": SaveLogits("x", "compact", top_k=0)}, "QK-E203 0"),
    ],
)
def test_impossible_evaluations_are_refused(gguf: Path, arguments: dict[str, Any], refusal: str) -> None:
    with refuses(QuantkitError, refusal):
        perplexity(FakeModel(gguf, V), **arguments)


class _FailingModel(FakeModel):
    """Computes NaN after some prefix."""

    def after(self, keys: list[list[int]]) -> F32:
        out = super().after(keys)
        out[[key[0] == 12 for key in keys], 5] = np.nan
        return out


@pytest.mark.parametrize("form", ["llama.cpp", "compact"])
def test_nonfinite_logits_end_the_run_without_a_file(gguf: Path, tmp_path: Path, form: str) -> None:
    with refuses(QuantkitError, "QK-E108 NaN"):
        perplexity(
            _FailingModel(gguf, V), tokens=some_tokens(64), n_ctx=16, save_logits=SaveLogits(tmp_path / "base", form)
        )
    assert not list(tmp_path.iterdir())


def test_an_existing_base_is_kept(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "base").write_text("dear")
    with refuses(QuantkitError, "QK-E402 --overwrite"):
        perplexity(FakeModel(gguf, V), tokens=some_tokens(64), n_ctx=16, save_logits=SaveLogits(tmp_path / "base"))
    assert (tmp_path / "base").read_text() == "dear"


# --- divergence ---


def save(model: FakeModel, path: Path, n: int = 16 * 9, n_ctx: int = 16, **options: Any) -> Path:
    base = SaveLogits(path, **{"format": "llama.cpp", **options})
    perplexity(model, tokens=some_tokens(n), n_ctx=n_ctx, n_batch=40, save_logits=base)
    return path


def kld_by_the_letter(x: F32, base: LlamaRows, row: int, token: int) -> tuple[float, ...]:
    """One position, one number at a time, after llama.cpp's log_softmax with kld."""
    top = f32(max(x))
    log_total = f32(math.log(sum(float(np.exp(f32(v - top))) for v in x)))
    nll = f32(f32(top + log_total) - x[token])
    log_p = [f32(f32(base.scale[row] * f32(c)) + base.minimum[row]) for c in base.codes[row]]
    shift, total = f32(top + log_total), 0.0
    for i, value in enumerate(log_p):
        if value > -16:
            total += float(f32(np.exp(value) * f32(f32(value - x[i]) + shift)))
    same_top = max(range(len(x)), key=lambda i: x[i]) == max(range(len(x)), key=lambda i: log_p[i])
    nll_base = f32(-log_p[token])
    return float(nll), float(nll_base), total, float(f32(np.exp(-nll) - np.exp(-nll_base))), float(same_top)


@pytest.mark.parametrize("clip", [16, 24])
@pytest.mark.parametrize("spread", [0.5, 4.0, 12.0])
def test_scores_equal_a_transcription_of_llama_cpp(clip: int, spread: float) -> None:
    rng = np.random.default_rng(int(spread))
    p = (rng.standard_normal((6, V)) * spread).astype(f32)
    q = p + rng.standard_normal((6, V)).astype(f32) * f32(0.3)
    q[0, 3] = q[0].max() + 1
    following = rng.integers(0, V, 6, dtype=np.int32)
    raw = encode_rows(p, softmax(p).log_total.astype(f32), clip)
    header = raw[:, :4].copy().view(f32)
    base = LlamaRows(header[:, 0], header[:, 1], raw[:, 4 : 4 + V])
    result = compare_with_llama(q, base, following)
    expected = np.array([kld_by_the_letter(q[i], base, i, int(following[i])) for i in range(6)])
    assert np.abs(np.array(result[:5]).T - expected).max() < 3e-6 * max(1, np.abs(expected).max())
    assert not result.bound.any()


def test_tokens_outside_a_base_may_have_probability_zero() -> None:
    p = np.zeros((1, V), f32)
    p[0, 5] = -40
    q = np.zeros((1, V), f32)
    q[0, 5] = -np.inf
    raw = encode_rows(p, softmax(p).log_total.astype(f32), 24)
    base = LlamaRows(*raw[:, :4].copy().view(f32).T[:2], raw[:, 4 : 4 + V])
    assert abs(compare_with_llama(q, base, np.zeros(1, np.int32)).kld[0]) < 1e-4
    q[0, 6] = -np.inf
    assert compare_with_llama(q, base, np.zeros(1, np.int32)).kld[0] == np.inf


@pytest.mark.parametrize("bos", [None, 9])
@pytest.mark.parametrize("n_batch", [7, 16, 70, 1000])
def test_a_base_has_the_text_and_the_predictions(gguf: Path, tmp_path: Path, bos: int | None, n_batch: int) -> None:
    model = FakeModel(gguf, V, bos=bos)
    base = open_logits(save(model, tmp_path / "base"))
    assert np.array_equal(base.chunks.tokens.ravel(), some_tokens(16 * 9))
    result = kld(model, base, n_batch=n_batch, n_ctx=16)
    assert abs(result.sums.kld.mean.value) < 2e-4
    assert result.sums.same_top_p == (1, 0)
    assert result.sums.nll.ppl.value == pytest.approx(result.sums.nll_base.ppl.value, rel=1e-3)
    assert result.sums.n == 9 * 7


def test_divergence_follows_its_definition(gguf: Path, tmp_path: Path) -> None:
    model, noisy = FakeModel(gguf, V, bos=3), FakeModel(gguf, V, bos=3, noise=0.3)
    result = kld(noisy, save(model, tmp_path / "base"), n_batch=50)
    expected = []
    for chunk in some_tokens(16 * 9).reshape(-1, 16):
        tokens_of_chunk = [3, *chunk[1:].tolist()]
        p, q = log_softmax(model.forward(tokens_of_chunk)), log_softmax(noisy.forward(tokens_of_chunk))
        expected += (np.exp(p) * (p - q)).sum(-1)[8:15].tolist()
    assert result.sums.kld.mean.value == pytest.approx(np.mean(expected), rel=1e-3)
    assert np.allclose(np.concatenate(result.sums.klds), expected, atol=2e-3)
    assert result.sums.kld_distribution()["Maximum"] == pytest.approx(max(expected), rel=1e-2)


def test_a_limited_number_of_chunks_of_a_base(gguf: Path, tmp_path: Path) -> None:
    base = save(FakeModel(gguf, V), tmp_path / "base")
    events: list[KldProgress] = []
    result = kld(FakeModel(gguf, V, noise=0.2), base, chunks=4, n_batch=48, progress=events.append)
    assert (result.n_chunks, result.chunks_in_base, result.sums.n) == (4, 9, 28)
    assert [s.current for s in events] == [1, 2, 3, 4]


def test_a_base_of_another_model_is_refused(gguf: Path, tmp_path: Path) -> None:
    base = save(FakeModel(gguf, V), tmp_path / "base")
    with refuses(QuantkitError, "QK-E207", V, V + 1):
        kld(FakeModel(gguf, V + 1), base)
    with refuses(RecipeError, "QK-E203 16 32"):
        kld(FakeModel(gguf, V), base, n_ctx=32)


@pytest.mark.parametrize("form", ["llama.cpp", "compact"])
def test_a_truncated_base_is_only_valid_for_its_complete_chunks(gguf: Path, tmp_path: Path, form: str) -> None:
    raw = save(FakeModel(gguf, V), tmp_path / "base", format=form).read_bytes()
    (tmp_path / "cut").write_bytes(raw[:-5])
    with refuses(FormatError, "QK-E103 8 9 --chunks"):
        kld(FakeModel(gguf, V), tmp_path / "cut")
    assert kld(FakeModel(gguf, V), tmp_path / "cut", chunks=8).n_chunks == 8


# --- the compact base ---


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("top_k", [1, 5, 40, 300, V])
@pytest.mark.parametrize("residual", [0.0, 0.01])
def test_the_compact_bound_holds_for_every_position(top_k: int, noise: float, residual: float) -> None:
    rng = np.random.default_rng(top_k)
    p = (rng.standard_normal((40, V)) * rng.choice([0.5, 2, 5], (40, 1))).astype(f32)
    q = p + rng.standard_normal((40, V)).astype(f32) * f32(noise)
    q[::7] = rng.permuted(q[::7], axis=1)
    following = rng.integers(0, V, 40, dtype=np.int32)
    base = most_probable(p, softmax(p), following, top_k, residual)
    result = compare_with_compact(q, base, following)
    log_p, log_q = log_softmax(p), log_softmax(q)
    true = (np.exp(log_p) * (log_p - log_q)).sum(1)
    assert (np.abs(result.kld - true) <= result.bound).all()
    if top_k == V and not residual:
        assert np.abs(result.kld - true).max() < 1e-6
    rows = np.arange(40)
    assert np.allclose(result.nll, -log_q[rows, following], atol=1e-5)
    assert np.allclose(result.nll_base, -log_p[rows, following], atol=1e-5)
    assert np.array_equal(result.same_top, p.argmax(1) == q.argmax(1))


def test_the_compact_bound_is_reached() -> None:
    # Six tokens share the base's mass, five are kept; the model thinks least of the sixth.
    p, q = np.full((1, V), -30, f32), np.zeros((1, V), f32)
    p[0, 10:16] = 0
    q[0, 15] = -9
    base = most_probable(p, softmax(p), np.zeros(1, np.int32), 5, 0)
    assert base.ids.tolist() == [10, 11, 12, 13, 14]
    result = compare_with_compact(q, base, np.zeros(1, np.int32))
    log_p, log_q = log_softmax(p), log_softmax(q)
    true = float((np.exp(log_p) * (log_p - log_q)).sum())
    error = true - float(result.kld[0])
    assert 0.99 * result.bound[0] < error <= result.bound[0]


def test_the_first_of_equal_top_tokens_is_used() -> None:
    x = np.zeros((3, V), f32)
    x[:, [4, 7, 9]] = 5
    base = most_probable(x, softmax(x), np.zeros(3, np.int32), 20, 0)
    assert compare_with_compact(x, base, np.zeros(3, np.int32)).same_top.all()


def test_compact_rows_keep_their_promised_tokens() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((5, 4000)) * 3).astype(f32)
    rows = most_probable(x, softmax(x), np.zeros(5, np.int32), 500, 0.05)
    p = np.exp(log_softmax(x))
    for i in range(5):
        ids = rows.ids[rows.starts[i] : rows.starts[i + 1]]
        assert set(ids) == set(np.argsort(-p[i])[: ids.size])
        residual = 1 - p[i, ids].sum()
        assert rows.residual[i] == pytest.approx(residual, rel=1e-4)
        # One token fewer would leave too much, unless the limit was reached.
        assert ids.size == 500 or residual <= 0.05 < residual + p[i, ids].min()
    assert np.allclose(rows.log_sum_exp, np.log(np.exp(x.astype(np.float64)).sum(1)))


@pytest.mark.parametrize("n", [1, 5, 1000, 30000])
@pytest.mark.parametrize("k", [1, 3, 64, 1024])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "sorted", "comb"])
def test_the_largest_logits_are_selected(n: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(n + k)
    x = rng.standard_normal(n).astype(f32)
    if kind == "ties":
        x = np.round(x * 2)
    elif kind == "constant":
        x[:] = 1
    elif kind == "sorted":
        x = np.sort(x)
    elif kind == "comb":
        x[::64] += 100  # all that a sample may see
    actual = largest(x, k)
    # A stable sort keeps the first of equals first.
    assert actual.tolist() == sorted(np.argsort(-x, kind="stable")[:k].tolist())


def test_a_compact_base_agrees_with_the_full_one(gguf: Path, tmp_path: Path) -> None:
    model, noisy = FakeModel(gguf, V, bos=3), FakeModel(gguf, V, bos=3, noise=0.3)
    full = kld(noisy, save(model, tmp_path / "whole", clip=24))
    compact = kld(noisy, save(model, tmp_path / "compact", format="compact", top_k=200))
    assert compact.base_model == "fake.gguf"
    mean = compact.sums.kld.mean.value
    assert abs(mean - full.sums.kld.mean.value) < 1e-3
    assert compact.sums.nll_base.ppl.value == pytest.approx(full.sums.nll_base.ppl.value, rel=1e-3)
    assert compact.sums.same_top_p == full.sums.same_top_p
    file = open_logits(tmp_path / "compact")
    assert isinstance(file, CompactLogits)
    assert len(file.fingerprint) == 64 != file.fingerprint.count("0")


# --- memory ---


class _Wide(FakeModel):
    """A large vocabulary, and logits that cost little to make."""

    def after(self, keys: list[list[int]]) -> F32:
        one = (np.arange(self.n_vocab, dtype=np.uint32) * 2654435761 % 1009).astype(f32) / 100
        return np.stack([np.roll(one, key[1] % 97) for key in keys])


@pytest.mark.parametrize("form", ["llama.cpp", "compact"])
def test_memory_does_not_grow_with_the_context(gguf: Path, tmp_path: Path, form: str) -> None:
    n_vocab, n_ctx = 20000, 256
    model, tokens = _Wide(gguf, n_vocab), np.arange(2 * n_ctx) % 997
    perplexity(model, tokens=tokens[:64], n_ctx=16, save_logits=SaveLogits(tmp_path / "warm", form, top_k=50))
    tracemalloc.start()
    perplexity(model, tokens=tokens, n_ctx=n_ctx, threads=2, save_logits=SaveLogits(tmp_path / "b", form, top_k=50))
    kld(model, tmp_path / "b", threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All scored logits are 20 MB; blocks have at most 23 rows, 1.8 MB, and two threads a few tiles of 0.5 MB.
    assert peak < 9e6


# --- statistics ---


def test_running_sums_equal_llama_cpps_formulas() -> None:
    rng = np.random.default_rng(2)
    nll, nll_base, kld_values, p_diff = (rng.gamma(2, 1, 1000).astype(f32) for _ in range(4))
    sums = KldSums()
    for part in (slice(0, 300), slice(300, 1000)):
        same_top = np.arange(1000)[part] % 4 > 0
        scores = Scores(
            nll[part], nll_base[part], kld_values[part].astype(np.float64), p_diff[part], same_top, same_top * 0.5
        )
        sums.add(scores)

    def mean_error(x: F32) -> tuple[float, float]:
        return float(x.mean(dtype=float)), float(x.std(dtype=float) / math.sqrt(999))

    a, da = mean_error(nll)
    b, db = mean_error(nll_base)
    covariance = float(np.cov(nll, nll_base, bias=True)[0, 1] / 999)
    assert sums.nll.mean == pytest.approx((a, da), rel=1e-6)
    assert sums.nll.ppl == pytest.approx((math.exp(a), math.exp(a) * da), rel=1e-6)
    assert sums.correlation == pytest.approx(np.corrcoef(nll, nll_base)[0, 1], abs=1e-6)
    ratio_error = math.sqrt(da**2 + db**2 - 2 * covariance)
    assert sums.ln_ratio == pytest.approx((a - b, ratio_error), rel=1e-5)
    assert sums.ratio == pytest.approx((math.exp(a - b), math.exp(a - b) * ratio_error), rel=1e-5)
    product = math.exp(a + b) * covariance
    error = math.sqrt((math.exp(a) * da) ** 2 + (math.exp(b) * db) ** 2 - 2 * product)
    assert sums.difference == pytest.approx((math.exp(a) - math.exp(b), error), rel=1e-5)
    assert sums.kld.mean == pytest.approx(mean_error(kld_values), rel=1e-6)
    square, square_error = mean_error(p_diff.astype(np.float64) ** 2)
    assert sums.rms_p_diff == pytest.approx((math.sqrt(square), 0.5 / math.sqrt(square) * square_error), rel=1e-5)
    assert sums.same_top_p == pytest.approx((0.75, math.sqrt(0.75 * 0.25 / 999)))
    assert sums.bound == pytest.approx(375)
    assert sums.n == 1000


def test_a_model_compared_with_itself_has_no_nan() -> None:
    x = np.full(50, 1.5, f32)
    sums = KldSums()
    sums.add(Scores(x, x, x * 0.0, x * 0, x > 0, x * 0.0))
    assert (sums.correlation, sums.ln_ratio, sums.rms_p_diff) == (1, (0, 0), (0, 0))
    assert "nan" not in statistics_text(sums) + chunk_line(1, sums)
    assert len(narrow_line(1, sums)) <= 80


@pytest.mark.parametrize("n", [0, 5, 10, 11])
def test_few_tokens_have_no_standard_error(n: int) -> None:
    sums = NllSums()
    sums.add(np.arange(n, dtype=f32))
    assert (sums.mean.error > 0) == (n > 10)


def test_percentiles_are_linear_between_values() -> None:
    x = np.arange(11, dtype=f32)
    assert percentile(x, 0.25) == 2.5
    rows = dict(distribution(x[::-1], (0.95, 0.5, 0.1)).rows)
    assert rows == {"Maximum": 10, "95.0%": pytest.approx(9.5), "Median": 5, "10.0%": pytest.approx(1), "Minimum": 0}
    assert distribution(x[:4], (0.5,))["Median"] == 1.5
    assert percentile(x[:1], 0.999) == 0


# --- logits ---


def test_logits_equal_a_fresh_context(gguf: Path, tmp_path: Path) -> None:
    model, tokens = FakeModel(gguf, V, bos=3), some_tokens(50)
    expected = model.forward(tokens.tolist())
    assert np.array_equal(logits(model, tokens=tokens, n_batch=7), expected)
    mapped = logits(model, tokens=tokens, output=tmp_path / "o.npy", n_batch=20)
    assert np.array_equal(mapped, expected)
    assert [p.name for p in tmp_path.iterdir()] == ["o.npy"]
    assert np.array_equal(logits(model, "ab"), model.forward([3, 97, 98]))


class _Failing(FakeModel):
    def session(self, n_ctx: int, n_seq: int = 1) -> Session:
        raise QuantkitError("no")


def test_logits_files_appear_complete(gguf: Path, tmp_path: Path) -> None:
    with refuses(QuantkitError, "QK-E400"):
        logits(_Failing(gguf, V), tokens=[1, 2], output=tmp_path / "o.npy")
    assert not list(tmp_path.iterdir())


# --- the command line ---


def run(*arguments: object, input: bytes | None = None) -> Result:  # noqa: A002 - click's word
    return CliRunner().invoke(cli, list(map(str, arguments)), input=input)


@pytest.fixture
def loads(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """quantkit.load gives fake models for two names; all tokens lie in ids.i32."""
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        (tmp_path / name).write_bytes(gguf.read_bytes())
    some_tokens(20 * 32).tofile(tmp_path / "ids.i32")
    models = [FakeModel(tmp_path / "a.gguf", V), FakeModel(tmp_path / "b.gguf", V, noise=0.2)]
    return install(monkeypatch, *models, FakeModel(tmp_path / "c.gguf", V + 2))


@pytest.mark.usefixtures("loads")
def test_perplexity_prints_like_llama_perplexity(tmp_path: Path) -> None:
    expected = perplexity(FakeModel(tmp_path / "a.gguf", V), tokens=some_tokens(20 * 32), n_ctx=32)
    result = run("perplexity", "-m", tmp_path / "a.gguf", "--tokens", f"@{tmp_path}/ids.i32", "-c", 32)
    assert result.exit_code == 0, result.output
    assert f"Final estimate: PPL = {expected.ppl.value:.4f} +/- {expected.ppl.error:.5f}" in result.stdout
    assert re.findall(r"^\[(\d+)\]([\d.]+), \+/- [\d.]+$", result.stdout, re.MULTILINE) == [
        (str(i), f"{e.value:.4f}") for i, e in enumerate(expected.running, 1)
    ]
    rows = run(
        *("perplexity", "-m", tmp_path / "a.gguf", "--tokens", f"@{tmp_path}/ids.i32", "-c", 32),
        *("--ppl-output-type", 1, "--chunks", 2),
    ).stdout.splitlines()
    assert [row.split()[0] for row in rows[:2]] == ["0", "32"]
    assert float(rows[1].split()[2]) == pytest.approx(math.log(expected.running[1].value), abs=1e-5)


def test_options_reach_the_engine(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    options = (
        "-t",
        3,
        "-ub",
        64,
        "--kv-type",
        "Q8_0",
        "--max-ram",
        "1G",
        "-no-fmoe",
        "-no-fqkv",
        "-no-flaunch",
        "-muge",
        "-ot",
        "exps=CPU",
    )
    for command in (("perplexity", "-c", 4), ("logits", "-c", 4, "-o", tmp_path / "o.npy")):
        result = run(*command, "-m", tmp_path / "a.gguf", "--tokens", "1,2,3,4,5,6,7,8,9", *options)
        assert result.exit_code == 0, result.output
    expected = {
        "n_ctx": 4,
        "threads": 3,
        "n_ubatch": 64,
        "kv_type": "q8_0",
        "mmap": True,
        "max_ram": 10**9,
        "max_vram": None,
        "cublas": False,
        "override_kv": (),
    }
    settings = {
        "merge_up_gate": True,
        "fusion": Fusion(True, False, False, False),
        "placement": Placement(0, (("exps", "CPU"),)),
    }
    assert loads == [{**expected, **settings, **mode} for mode in ({"activations": "runtime"}, {})]


def test_activations_are_chosen_and_recorded(tmp_path: Path) -> None:
    """Base logits and divergences are exact by default, perplexity is llama.cpp's; the other kind of base is noted."""
    source = write_zoo("llama-dense", tmp_path / "f32.gguf")
    file, copy = tmp_path / "q4_0.gguf", tmp_path / "copy.gguf"
    quantize(source, file, "Q4_0")
    quantize(file, copy, "F32", QuantizeOptions(allow_requantize=True))
    tokens = some_tokens(64) % load_vocabulary(source)
    text, exact, rounded = ",".join(map(str, tokens)), tmp_path / "exact", tmp_path / "rounded"
    for path, form, *options in (
        (exact, "compact"),
        (tmp_path / "exact.llama", "llama.cpp"),
        (rounded, "llama.cpp", "--activations", "runtime"),
    ):
        result = run("perplexity", "-m", copy, "--tokens", text, "-c", 16, "--save-all-logits", path, "--logits-format",
                     form, *options)  # fmt: skip
        assert result.exit_code == 0, result.output
    kinds = [open_logits(tmp_path / name).activations for name in ("exact", "exact.llama", "rounded")]
    assert kinds == ["exact", "exact", "runtime"]
    assert perplexity(file, tokens=tokens, n_ctx=16).activations == "runtime"
    result = kld(file, exact)
    assert (result.activations, result.base_activations) == ("exact", "exact")
    assert not [note for note in result.notes if str(exact) in note]
    assert abs(result.mean.value) < 1e-6 < kld(file, exact, activations="runtime").mean.value
    assert [note for note in kld(file, rounded).notes if str(rounded) in note]
    printed = json.loads(run("kld", "-m", file, "--base", rounded, "--activations", "runtime", "--json", "-").stdout)
    assert (printed["activations"], printed["base_activations"]) == ("runtime", "runtime")
    with refuses(RecipeError, "QK-E303"):
        kld(file, exact, activations="exact", placement=Placement(gpu_layers=1))


@pytest.mark.parametrize(
    ("peer_options", "options", "says"),
    [
        (("-fa",), (), "note: -fa has no effect: attention is always computed in blocks"),
        (("-fa", "1", "--mlock"), (), "--mlock has no effect: weights are never locked"),
        (
            ("--flash-attn=on", "-mla", 3, "-amb", 512, "-rtr", "-np", 4, "-tb", 8),
            (),
            "-mla has no effect",
        ),
        (("--seed", 0, "-fit", "off", "-nr", "-lm", "none", "-fmoe", "-fug"), (), "no result depends on a seed"),
        (("-ctk", "q8_0", "-ctv", "Q8_0"), ("--kv-type", "q8_0"), ""),
        (("-ctk", "q8_0"), ("-ctk", "q8_0", "-ctv", "f16"), "rounded to the type"),
        (("--no-mmap",), ("--no-mmap",), ""),
        (("-t2", "-ub64"), None, "No such option '-ub64'"),
        (("-t2", "-b512", "-ub=64"), ("-t", 2, "-b", 512, "-ub", 64), ""),
        (("-ngl", 99), (), "note: -ngl: all layers run on the CPU; "),
        (("-ngl", "all"), (), "note: -ngl: all layers run on the CPU; "),
        (("-ngl", "some"), None, "'some' is not a valid int"),
        (("-cmoe",), ("-ot", r"blk\.(\d+)\.ffn_\w+_(ch)?exps=CPU"), ""),
        (("-ncmoe", 2), ("-ot", r"blk\.(0|1)\.ffn_\w+_(ch)?exps=CPU"), ""),
        (("-fmo",), None, "No such option '-fmo'"),
    ],
)
def test_option_names_of_the_peers(
    tmp_path: Path,
    loads: list[dict[str, Any]],
    peer_options: tuple[Any, ...],
    options: tuple[Any, ...] | None,
    says: str,
) -> None:
    common = ("perplexity", "-c", 4, "-m", tmp_path / "a.gguf", "--tokens", "1,2,3,4,5,6,7,8,9")
    result = run(*common, *peer_options)
    assert says in result.stderr
    if options is None:
        assert result.exit_code in (1, 2), result.output
        assert "Traceback" not in result.output
        return
    assert result.exit_code == 0, result.output
    assert run(*common, *options).exit_code == 0
    assert loads[0] == loads[1]


@pytest.mark.usefixtures("loads")
def test_perplexity_takes_its_text_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"some words, and some more words\n"
    (tmp_path / "text").write_bytes(text)
    common = ("perplexity", "-m", tmp_path / "a.gguf", "-c", 8, "--json", "-", "-f")
    piped, read = (json.loads(run(*common, f, input=text).stdout) for f in ("-", tmp_path / "text"))
    assert {**piped, "seconds": 0} == {**read, "seconds": 0}
    monkeypatch.setattr("quantkit.formats.outputs.MAX_TEXT", 16)
    for file, why in (("-", "standard input: larger than 16 B"), ("/dev/zero", "/dev/zero: a device")):
        refused = run(*common, file, input=text)
        assert refused.exit_code == 1
        assert why in refused.output


@pytest.mark.usefixtures("loads")
def test_perplexity_as_json(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"some words, and some more words\n")
    common = ("perplexity", "-m", tmp_path / "a.gguf", "-f", text, "-c", 8, "--json")
    printed = run(*common, "-")
    assert printed.exit_code == 0, printed.output
    output = json.loads(printed.stdout)
    # The newline at the end is no part of the text.
    assert (output["n_tokens"], output["n_chunks"], output["n_scored"], output["bos"]) == (31, 3, 9, None)
    assert output["ppl"]["value"] > 1
    assert len(output["running"]) == 3
    assert run(*common, tmp_path / "o.json").exit_code == 0
    assert json.loads((tmp_path / "o.json").read_text())["ppl"] == output["ppl"]


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("form", [("--logits-format", "llama.cpp", "--clip", 24), ("--top-k", 100)])
def test_kld_prints_all_statistics(tmp_path: Path, form: tuple[object, ...]) -> None:
    base, ids = tmp_path / "base.bin", f"@{tmp_path}/ids.i32"
    saved = run("perplexity", "-m", tmp_path / "a.gguf", "--tokens", ids, "-c", 32, "--save-all-logits", base, *form)
    assert saved.exit_code == 0, saved.output
    assert str(base) in saved.stdout
    result = run("kld", "-m", tmp_path / "b.gguf", "--base", base, "--json", tmp_path / "o.json")
    assert result.exit_code == 0, result.output
    expected = kld(FakeModel(tmp_path / "b.gguf", V, noise=0.2), base)
    assert statistics_text(expected.sums) in result.stdout
    assert chunk_line(20, expected.sums) in result.stdout
    assert ("The base contains a part of the vocabulary" in result.stdout) == (form[0] == "--top-k")
    command = ("perplexity", "-m", tmp_path / "b.gguf", "--kl-divergence", "--tokens", "1,2")
    peer_run = run(*command, "--kl-divergence-base", base)
    assert statistics_text(expected.sums) in peer_run.stdout
    assert f"note: -f, -p and --tokens are ignored: {base} contains its text" in peer_run.stderr
    assert "--kl-divergence needs --kl-divergence-base FILE" in run(*command).stderr
    output = json.loads((tmp_path / "o.json").read_text())
    assert output["kld"] == {"value": expected.sums.kld.mean.value, "error": expected.sums.kld.mean.error}
    assert output["kld_percentiles"]["Maximum"] == expected.sums.kld_distribution()["Maximum"]
    assert set(output["p_diff_percentiles"]) >= {"75.0%", "Median", "0.1%", "Minimum"}
    assert json.loads(run("kld", "-m", tmp_path / "b.gguf", "--base", base, "--json", "-").stdout)["n_chunks"] == 20


@pytest.mark.usefixtures("loads")
def test_the_option_names_the_format_of_base_logits(tmp_path: Path) -> None:
    """llama.cpp's option writes llama.cpp's format, which llama-perplexity reads."""
    common = ("perplexity", "-m", tmp_path / "a.gguf", "--tokens", f"@{tmp_path}/ids.i32", "-c", 32)
    for options, kind in (
        (("--save-all-logits", tmp_path / "a"), "quantkit"),
        (("--kl-divergence-base", tmp_path / "b"), "llama.cpp"),
        (("--save-all-logits", tmp_path / "c", "--logits-format", "llama.cpp"), "llama.cpp"),
        (("--kl-divergence-base", tmp_path / "d", "--logits-format", "compact"), "quantkit"),
        (("--kl-divergence-base", tmp_path / "e", "--clip", 24), "llama.cpp"),
    ):
        result = run(*common, *options)
        assert result.exit_code == 0, result.output
        assert open_logits(options[1]).kind == kind
    for options, name in (
        (("--save-all-logits", "f", "--kl-divergence-base", "g"), "--kl-divergence-base"),
        (("--save-all-logits", "f", "--clip", 24), "--clip"),
    ):
        assert name in run(*common, *options).stderr


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("kld", "-m", "b.gguf", "--base", "base", "--max-kld", "1e-9"), 3, "above --max-kld"),
        (("kld", "-m", "b.gguf", "--base", "base", "--max-kld", "10"), 0, "Mean    KLD"),
        (("kld", "-m", "b.gguf", "--base", "base", "-c", "16"), 2, "chunks of 32 tokens, not 16"),
        (("kld", "-m", "c.gguf", "--base", "base"), 1, "use base logits of the same model"),
        (("kld", "-m", "b.gguf", "--base", "a.gguf"), 1, "not base logits"),
        (("kld", "-m", "b.gguf", "--base", "nothing"), 1, "no such file"),
        (("kld", "-m", "b.gguf", "--base", "base", "--chunks", "0"), 2, "above 0"),
        (("kld", "-m", "b.gguf", "--base", "base", "--chunks", "2"), 0, "too few for statistics"),
        (("kld", "-m", "b.gguf"), 2, "--base"),
        (("perplexity", "-m", "a.gguf"), 2, "give one of"),
        (("perplexity", "-m", "a.gguf", "-p", "x", "--tokens", "1"), 2, "give one of"),
        (("perplexity", "-m", "a.gguf", "--tokens", "1,x"), 2, "not a number"),
        (("perplexity", "-m", "a.gguf", "--tokens", "@nothing"), 1, "No such file"),
        (("perplexity", "-m", "a.gguf", "--tokens", "@odd"), 1, "not one or more int32 ids"),
        (("perplexity", "-m", "a.gguf", "-f", "latin", "-c", "4"), 0, "Final estimate"),
        (("perplexity", "-m", "a.gguf", "-p", "x", "--json", "no/o.json"), 1, "folder does not exist"),
        (("perplexity", "-m", "nothing", "-p", "x"), 2, "does not exist"),
        (("logits", "-m", "a.gguf", "--tokens", "1,2,3", "-o", "base"), 1, "--overwrite"),
        (("logits", "-m", "a.gguf", "--tokens", "1,2,999", "-o", "o.npy"), 1, "token 2 is 999"),
    ],
)
def test_exit_codes_and_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "odd").write_bytes(b"12345")
    (tmp_path / "latin").write_bytes(b"ab\xe4c" * 4)
    save(FakeModel(tmp_path / "a.gguf", V), tmp_path / "base", 20 * 32, 32)
    names = {p.name for p in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    absolute = [str(tmp_path / a) if a in names and a.endswith(".gguf") else a for a in arguments]
    result = run(*absolute)
    assert result.exit_code == code, result.output
    assert message in result.output


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("ids", ["5,6,7", "@three.i32"])
def test_logits_of_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.array([5, 6, 7], "<i4").tofile("three.i32")
    result = run("logits", "-m", tmp_path / "a.gguf", "--tokens", ids, "-o", "o.npy", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_tokens"] == 3
    out = np.load("o.npy")
    assert out.dtype == f32
    assert np.array_equal(out, FakeModel(tmp_path / "a.gguf", V).forward([5, 6, 7]))


@pytest.mark.parametrize("command", ["perplexity", "kld", "logits"])
def test_help_has_examples(command: str) -> None:
    text = run(command, "--help").output
    assert f"quantkit {command} -m" in text
    assert "Run:" in text


# --- with the engine ---


def test_the_engine_implements_the_session_interface(tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    numpy_backend = Placement(99, ((".*", "REFERENCE"),), ("REFERENCE",))
    text = (data / "tiny-moe-evaluation.txt").read_bytes()
    with load(tiny_moe, kv_type="f32", placement=numpy_backend) as model:
        result = perplexity(model, text, n_ctx=32, n_batch=64, chunks=3, save_logits=SaveLogits(tmp_path / "base"))
        nll = []
        for chunk in model.tokenizer.encode(text)[:96].reshape(3, 32):
            log_p = log_softmax(model.forward(chunk))
            nll += [-log_p[j, chunk[j + 1]] for j in range(16, 31)]
        assert result.ppl == pytest.approx(ppl_by_the_letter(nll), rel=1e-5)
        assert abs(kld(model, tmp_path / "base", n_batch=20).sums.kld.mean.value) < 1e-4
        assert np.allclose(logits(model, tokens=[5, 6, 7], n_batch=2), model.forward([5, 6, 7]), atol=1e-3)
