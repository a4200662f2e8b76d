"""Results in a notebook: tables of plain values, as HTML; progress of every long verb by one function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import quantkit
from quantkit import ImatrixOptions, QuantizeOptions
from quantkit.bench import Setting
from quantkit.bench import Test as Timed
from quantkit.errors import RecipeError
from quantkit.evaluate import SaveLogits
from quantkit.html_table import MAX_ROWS, HtmlTable, Table, table_of

TOKENS = np.arange(1, 257)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def results(folder: Path, data: Path, tiny_moe: Path) -> dict[str, Any]:
    """A result of every verb that a notebook shows as a table."""
    imatrix, recipe = data / "tiny-moe-imatrix.gguf", folder / "a.recipe"
    recipe.write_text("ffn = q8_0\n")
    perplexity = quantkit.perplexity(tiny_moe, tokens=TOKENS, n_ctx=64, save_logits=SaveLogits(folder / "base"))
    quantized = quantkit.quantize(tiny_moe, folder / "q.gguf", "Q8_0", threads=2, cache=folder / "cache")
    (folder / "text.txt").write_text("One sentence. " * 40 + "\n\n" + "Another one. " * 40)
    return {
        "quantize": quantized,
        "plan_quantize": quantized.plan,
        "perplexity": perplexity,
        "kld": quantkit.kld(folder / "q.gguf", folder / "base"),
        "inspect": quantkit.inspect(tiny_moe),
        "compare": quantkit.compare(tiny_moe, folder / "q.gguf"),
        "show_imatrix": quantkit.show_imatrix(imatrix),
        "diff_imatrix": quantkit.diff_imatrix(imatrix, imatrix),
        "show_recipe": quantkit.show_recipe(recipe, model=tiny_moe),
        "diff_recipe": quantkit.diff_recipe(recipe, tiny_moe),
        "show_cache": quantkit.show_cache(folder / "cache"),
        "calibration": quantkit.calibration([folder / "text.txt"], size=2000, passage=200, heldout=0.0),
        "types": quantkit.types(),
        "imatrix": quantkit.imatrix(
            tiny_moe, (), folder / "i.gguf", tokens=TOKENS, options=ImatrixOptions(n_ctx=64, n_batch=64)
        ),
        "merge_imatrix": quantkit.merge_imatrix([imatrix, imatrix]),
        "merge_up_gate": quantkit.merge_up_gate(tiny_moe, folder / "merged.gguf", threads=1),
    }


VERBS = (
    *("quantize", "plan_quantize", "perplexity", "kld", "inspect", "compare", "show_imatrix", "diff_imatrix"),
    *("show_recipe", "diff_recipe", "show_cache", "calibration", "types", "imatrix", "merge_imatrix", "merge_up_gate"),
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_result_is_a_table(results: dict[str, Any], verb: str) -> None:
    result = results[verb]
    assert isinstance(result, HtmlTable)
    table = result.as_table()
    assert table.rows
    assert all(len(row) == len(table.header) for row in table.rows)
    html = result._repr_html_()
    assert result._repr_mimebundle_() == {"text/plain": table.to_text(), "text/html": html}
    assert html.count("<tr>") == 1 + min(len(table.rows), MAX_ROWS) + (len(table.rows) > MAX_ROWS)
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|caption)\b)", html)


def test_table_values_equal_the_result(results: dict[str, Any]) -> None:
    kld = results["kld"]
    assert kld.mean == kld.sums.kld.mean
    assert kld.as_table().rows[0] == ("mean KL divergence", kld.mean.value, kld.mean.error)
    plan = results["plan_quantize"]
    by_type = {row[0]: row for row in plan.as_table().rows}
    assert sum(row[3] for row in by_type.values()) == sum(t.nbytes for t in plan.tensors)
    assert by_type["Q8_0"][4] == 8.5


def test_tables_of_an_imatrix_and_of_merged_experts(results: dict[str, Any], tiny_moe: Path) -> None:
    result = results["imatrix"]
    assert (result.model, result.n_tokens) == (tiny_moe, len(TOKENS))
    assert result.as_table().rows == result.coverage.as_table().rows
    merged = results["merge_up_gate"]
    assert [row[0] for row in merged.as_table().rows] == [layer.prefix for layer in merged.changed]
    assert all(row[2] == f"{row[0]}ffn_gate_up_exps.weight" for row in merged.as_table().rows)


def test_texts_are_escaped_and_rows_counted() -> None:
    table = table_of("a, b", [("<script>", None)] + [(1234567, 0.123456)] * 150, "<x>")
    html = table.to_html()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;x&gt;" in html
    assert "1,234,567" in html
    assert "0.1235" in html
    assert "51 more rows" in html
    lines = table.to_text().splitlines()
    assert lines[:3] == ["<x>", "a          b", "<script>"]
    assert lines[3] == "1,234,567  0.1235"
    assert lines[-1] == "51 more rows"
    assert table == Table(("a", "b"), table.rows, "<x>")


# ---------------------------------------------------------------- progress


def run(verb: str, folder: Path, tiny_moe: Path, data: Path, **progress: Any) -> None:
    out = folder / f"{verb}.gguf"
    if verb == "quantize":
        quantkit.quantize(tiny_moe, out, "Q8_0", QuantizeOptions(), threads=2, **progress)
    elif verb == "merge_up_gate":
        quantkit.merge_up_gate(tiny_moe, out, threads=1, **progress)
    elif verb == "export":
        quantkit.export(tiny_moe, folder / "checkpoint", threads=1, **progress)
    elif verb == "compare":
        quantkit.quantize(tiny_moe, out, "Q8_0", threads=2)
        quantkit.compare(tiny_moe, out, threads=1, **progress)
    elif verb == "perplexity":
        quantkit.perplexity(tiny_moe, tokens=TOKENS, n_ctx=64, n_batch=64, **progress)
    elif verb == "imatrix":
        options = ImatrixOptions(n_ctx=64, n_batch=64)
        quantkit.imatrix(tiny_moe, (), out, tokens=TOKENS, options=options, **progress)
    elif verb == "logits":
        quantkit.logits(tiny_moe, tokens=TOKENS, n_batch=64, **progress)
    elif verb == "bench":
        quantkit.bench(tiny_moe, [Timed(4, 0), Timed(0, 1)], repetitions=1, **progress)
    elif verb == "sweep_bench":
        quantkit.sweep_bench(tiny_moe, 40, Setting(n_ubatch=16), n_gen=1, **progress)
    elif verb == "calibration":
        texts = [data / "tiny-moe-calibration.txt", data / "tiny-moe-evaluation.txt"]
        quantkit.calibration(texts, size=20_000, heldout=0.1, **progress)
    elif verb == "verify_cache":
        quantkit.quantize(tiny_moe, out, "Q8_0", threads=2, cache=folder / "cache")
        quantkit.verify_cache(folder / "cache", **progress)
    else:
        options = ImatrixOptions(n_ctx=64, n_batch=64)
        quantkit.covariance(tiny_moe, [], out, tokens=TOKENS, options=options, weighting="tokens", **progress)


PROGRESS = (
    *("quantize", "merge_up_gate", "export", "compare", "perplexity", "imatrix", "covariance", "logits"),
    *("bench", "sweep_bench", "calibration", "verify_cache"),
)


@pytest.mark.parametrize("verb", PROGRESS)
def test_one_progress_callback_works_for_every_verb(verb: str, tmp_path: Path, tiny_moe: Path, data: Path) -> None:
    events: list[tuple[float, float, str]] = []
    run(verb, tmp_path, tiny_moe, data, progress=lambda now: events.append((now.current, now.total, now.text)))
    assert len(events) > 1
    positions = [position for position, _, _ in events]
    assert positions == sorted(positions)
    assert {total for _, total, _ in events} == {events[-1][1]}
    assert 0.9 < events[-1][0] / events[-1][1] <= 1  # bytes of headers are written at the beginning


@pytest.mark.parametrize(("verb", "name"), [("quantize", "observer"), ("imatrix", "watcher")])
def test_only_one_progress_receiver(verb: str, name: str, tmp_path: Path, tiny_moe: Path, data: Path) -> None:
    from quantkit.imatrix import Watcher

    with refuses(RecipeError, "QK-E201"):
        run(verb, tmp_path, tiny_moe, data, progress=print, **{name: Watcher()})
