"""The report: its numbers, what it takes from an earlier one, the page as text, the card."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from refusals import refuses

import task_files
from quantkit import ReportOptions, perplexity, quantize, report, score
from quantkit.cli import cli
from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.evaluate import Estimate, SaveLogits, Texts, compare_models
from quantkit.inspect import inspect
from quantkit.quantize import QuantizeOptions
from quantkit.report import Report, by_text, measure, read_data, scores
from quantkit.report.card import advice, card_text, decimal_size, preset_name
from quantkit.report.charts import charts, short_names
from quantkit.report.colours import text_colour
from quantkit.report.conclusion import better_file, closest_file, larger_but_worse, perplexity_warning
from quantkit.report.data import (
    Base,
    Costs,
    Coverage,
    File,
    GroupCost,
    Matrix,
    ModelSummary,
    Quality,
    Quantile,
    Speed,
    Support,
    TaskScore,
    TensorCoverage,
    Text,
    TextQuality,
)
from quantkit.report.heat_maps import GUESS, NOT_MEASURED, type_keys
from quantkit.report.page import page_text, script_json
from quantkit.report.provenance import provenance_rows, rebuild_command
from quantkit.report.tables import costs_table, files_table, scores_table, texts_table
from quantkit.score import Accuracy, PairedAccuracy
from quantkit.sensitivity import Cost, Group, Sensitivity
from quantkit.types import TYPES, type_by_name
from quantkit.units import PLUS_MINUS
from report_data import report_of
from zoo import write_zoo

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028`|*[x](http://e.vil)\u202e{{ 7 * 7 }}"


def scores_of(n_correct: int, difference: PairedAccuracy | None) -> Iterator[TaskScore]:
    """Yield scores of three metrics."""
    for tasks, kind, metric in (
        ("mmlu.bin", "multiple-choice", "acc_norm"),
        ("arc.jsonl", "requests", "acc"),
        ("arc.jsonl", "requests", "acc_norm"),
    ):
        yield TaskScore(tasks, kind, metric, "k", Accuracy(n_correct, 100), difference, "b")


def example(hostile: str = "", layers: int = 6) -> Report:
    """Return a report with every part, of drawn numbers; ``hostile`` stands in every name."""
    rng = np.random.default_rng(1)
    kinds = ("attn_q", "ffn_down" + hostile, "ffn_up")
    files = []
    for i, name in enumerate(("Q2_K", "Q3_K", "Q4_K", "Q6_K")):
        kld = 0.1 / 4**i
        matrices = [
            Matrix(f"blk.{layer}.{kind}.weight", kind, layer, name, 65536, 20000 + 9000 * i, float(kld), True)
            for layer in range(layers)
            for kind in kinds
        ]
        matrices.append(Matrix("token_embd.weight", "token_embd", None, "Q8_0", 1 << 20, 1 << 20, 0.005, False))
        quality = Quality(
            key="k",
            n_scored=4000,
            n_ctx=512,
            chunks=16,
            ppl=Estimate(30 * (1 + kld), 0.5),
            ppl_base=Estimate(30, 0.5),
            ppl_ratio=Estimate(1 + kld, kld / 10),
            kld=Estimate(kld, kld / 20),
            bound=1e-6,
            same_top=Estimate(0.97 - kld, 0.004),
            rms_p_diff=Estimate(kld, kld / 20),
            quantiles=tuple(Quantile(s, kld * (0.2 / s) ** 0.7) for s in (0.9, 0.5, 0.1, 0.01)),
        )
        speeds = tuple(
            Speed(t, Estimate(float(rng.uniform(80, 99)), 3.0), "a CPU, 2 threads") for t in ("pp512", "tg64")
        )
        file = File(
            name=f"model{hostile}-{name}.gguf",
            fingerprint=f"{i}",
            shards=1,
            nbytes=4_000_000 + 900_000 * i,
            tensor_bytes=3_900_000 + 900_000 * i,
            values=9_000_000,
            preset=name,
            by_type=((name, 18, 3_000_000), ("Q8_0", 1, 900_000)),
            matrices=tuple(matrices),
            support=(Support("llama.cpp", True, "loads"), Support("ik_llama.cpp", False, "does not load: " + hostile)),
            provenance=(("quantize.imatrix.file", hostile or "im.gguf"),),
            command=f"quantkit quantize model.gguf {hostile} {name}",
            notes=(f"about 3 % of this text was used for calibration {hostile}",) if i == 0 else (),
            quality=quality,
            errors_key="e",
            speeds=speeds,
            scores=tuple(scores_of(40 + i, PairedAccuracy(100, 1, 5 - i, 7))),
            by_text=tuple(
                TextQuality(
                    f"{text}.txt{hostile}", 900, Estimate(kld, kld / 9), Estimate(1 + kld, 0.01), Estimate(0.9, 0)
                )
                for text in ("code", "prose")
            ),
            texts_key="t",
        )
        files.append(file)
    costs = [
        GroupCost(
            f"blk.{layer}.attn_q", "attn_q", layer, (f"blk.{layer}.attn_q.weight",), f.preset, 1e-3 / (i + 1), 1e-5
        )
        for layer in range(6)
        for i, f in enumerate(files)
    ]
    covered = [
        TensorCoverage(f"blk.{i}.{kind}.weight", kind, i, True, 8, int(i == 5), 0 if i == 5 else 90 * i, 99.0 * i)
        for i in range(6)
        for kind in kinds[1:]
    ]
    return Report(
        title=f"A model{hostile}",
        made="2026-01-01",
        version="0",
        model=ModelSummary(
            "A model" + hostile, "llama", 9_000_000, None, (("layers", "6"),), (("general.license", "mit"),)
        ),
        files=tuple(files),
        base=Base("base.gguf", "b", 18_000_000, ("BF16",), tuple(scores_of(44, None))),
        text=Text("text.txt" + hostile, "0" * 64, 12345),
        imatrix=Coverage("im.gguf" + hostile, ("text" + hostile,), ("1" * 64,), 0.99, 100, tuple(covered)),
        sensitivity=Costs("s.json", "held-out", tuple(costs)),
    )


def test_report_data_round_trip(tmp_path: Path) -> None:
    numbers = example(HOSTILE)
    path = tmp_path / "data.json"
    path.write_text(numbers.to_json())
    assert read_data(path) == numbers


@pytest.mark.parametrize(
    ("place", "value"), [("files", 1), ("kind", "other"), ("format", 2), ("title", None), ("more", 1), ("model", [])]
)
def test_unknown_data_are_refused(tmp_path: Path, place: str, value: object) -> None:
    data = json.loads(example().to_json())
    data[place] = value
    path = tmp_path / "data.json"
    path.write_text(json.dumps(data))
    with refuses(FormatError, "QK-E122", path):
        read_data(path)


def test_names_are_escaped_in_the_page() -> None:
    text = page_text(example(HOSTILE))
    plain = page_text(example())
    assert text.count("<script") == plain.count("<script")
    assert text.count("</script") == plain.count("</script")
    assert text.count("<img") == plain.count("<img")  # in the library
    assert "{{ 7" in text  # a template would make 49 of it
    assert "\u2028" not in script_json(HOSTILE)
    assert not set("<>&") & set(script_json(HOSTILE))
    assert json.loads(script_json(HOSTILE)) == HOSTILE


def test_the_page_makes_no_request() -> None:
    text = page_text(example())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;")
    assert "unsafe-eval" not in policy[1]
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|\ssrc=|@import|url\(", text.partition("<script")[0])


def test_a_clipped_colour_scale_is_labelled() -> None:
    numbers = example()
    assert numbers.sensitivity is not None
    least = dataclasses.replace(numbers.sensitivity.costs[0], kld=1e-9)
    costs = dataclasses.replace(numbers.sensitivity, costs=(least, *numbers.sensitivity.costs[1:]))
    for report_data, is_open in ((numbers, False), (dataclasses.replace(numbers, sensitivity=costs), True)):
        (chart,) = (c for c in charts(report_data) if c.name == "chart-costs")
        assert chart.scale is not None
        assert chart.scale.ticks[0].startswith("≤") is is_open


def test_tables_have_all_data_of_charts() -> None:
    numbers = example()
    text = page_text(numbers)
    assert {c.name for c in charts(numbers)} >= {"chart-divergence", "chart-tokens", "chart-errors", "chart-coverage"}
    for f, row in zip(numbers.files, files_table(numbers).rows, strict=True):
        (cell,) = (c.text for c in row if c.value == f.quality.kld.value)  # type: ignore[union-attr]
        value, _, wide = cell.partition(" ± ")
        assert float(value) == pytest.approx(f.quality.kld.value, abs=float(wide) / 20)  # type: ignore[union-attr]
        assert len(value.partition(".")[2]) == len(wide.partition(".")[2])
        assert cell in text


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["m-7B-a", "m-7B-b"], ["a", "b"]),
        (["Model-Q4_K_M", "Model-Q4_K_S"], ["Q4_K_M", "Q4_K_S"]),
        (["smol-iq2_m", "smol-iq2_xs"], ["iq2_m", "iq2_xs"]),
        (["my_model_Q4_K_M", "my_model_Q4_K_S"], ["Q4_K_M", "Q4_K_S"]),
        (["m.Q4_K_XL", "m.Q4_K_M"], ["Q4_K_XL", "Q4_K_M"]),
        (["tiny-3.5bpw", "tiny-3.7bpw"], ["3.5bpw", "3.7bpw"]),
        (["my_model", "my_other"], ["my_model", "my_other"]),
        (["m-", "m-Q4_0"], ["m-", "m-Q4_0"]),
    ],
)
def test_labels_are_truncated_between_words(names: list[str], labels: list[str]) -> None:
    files = [dataclasses.replace(f, name=f"{n}.gguf") for f, n in zip(example().files, names, strict=False)]
    assert short_names(files) == labels


def test_colours_have_contrast() -> None:
    assert (text_colour("#440154"), text_colour("#fde725")) == ("#ffffff", "#000000")


def measured_as(*values: tuple[int, float, float, float]) -> list[File]:
    """Return files of sizes, divergences with standard errors, and ratios of perplexities."""
    files = []
    for f, (nbytes, kld, error, ratio) in zip(example().files, values, strict=False):
        assert f.quality is not None
        quality = dataclasses.replace(f.quality, kld=Estimate(kld, error), ppl_ratio=Estimate(ratio, 0.008))
        files.append(dataclasses.replace(f, nbytes=nbytes, quality=quality))
    return files


@pytest.mark.parametrize(
    ("values", "closest", "worse"),
    [
        # The newcomer's four: a damaged file whose perplexity is lower than the base's is never the one to take.
        ([(31, 0.121, 0.004, 0.98), (34, 0.062, 0.002, 1.02), (57, 0.012, 0.001, 1.004)], "Q4_K", []),
        ([(31, 0.062, 0.002, 1.02), (34, 0.121, 0.004, 0.98), (57, 0.012, 0.001, 1.004)], "Q4_K", [("Q3_K", "Q2_K")]),
        ([(31, 0.020, 0.005, 1.0), (34, 0.012, 0.005, 1.0)], None, []),  # the intervals overlap
        ([(31, 0.020, 0.0, 1.0), (34, 0.012, 0.0, 1.0)], None, []),  # nobody knows how exact they are
        ([(31, 0.020, 0.001, 1.0)], None, []),
    ],
)
def test_only_disjoint_intervals_give_a_conclusion(
    values: list[tuple[int, float, float, float]], closest: str | None, worse: list[tuple[str, str]]
) -> None:
    files = measured_as(*values)
    sentences = [*closest_file(files), *larger_but_worse(files)]
    expected = [(f"model-{closest}.gguf",)] if closest else []
    expected += [(f"model-{larger}.gguf", f"model-{smaller}.gguf") for larger, smaller in worse]
    assert [tuple(re.findall(r"model-\w+\.gguf", sentence)) for sentence in sentences] == expected


def test_different_texts_give_no_conclusion() -> None:
    first, *files = measured_as((31, 0.12, 0.004, 1.1), (57, 0.012, 0.001, 1.0))
    assert first.quality is not None
    assert closest_file([first, *files])
    other_text = dataclasses.replace(first, quality=dataclasses.replace(first.quality, key="other"))
    for file in (other_text, dataclasses.replace(first, quality=None)):
        assert closest_file([file, *files]) == larger_but_worse([file, *files]) == []


def test_a_perplexity_below_the_base_is_explained() -> None:
    assert perplexity_warning(measured_as((31, 0.12, 0.004, 0.98), (57, 0.012, 0.001, 1.0)))
    assert not perplexity_warning(example().files)


def test_page_and_card_use_standard_errors_and_binary_sizes() -> None:
    numbers = example()
    file = numbers.files[0]
    assert file.quality is not None
    assert file.quality.kld is not None
    columns = [column.label for column in files_table(numbers).columns]
    cells = dict(zip(columns, files_table(numbers).rows[0], strict=True))
    assert float(cells["MiB"].text) == pytest.approx(file.nbytes / 2**20, abs=1e-3)
    assert cells["KL divergence, nats"].text.endswith(f" ± {file.quality.kld.error:.4f}")
    for text in (page_text(numbers), card_text(numbers)):
        assert PLUS_MINUS in text
    assert not re.search(r"\b[kMG]B\b", page_text(numbers).partition("<script")[0])
    speeds = [cell.text for label, cell in cells.items() if label.endswith("tokens/s")]
    assert speeds
    assert not any("±" in text for text in speeds)  # a standard deviation, in its own column


@pytest.mark.parametrize("hostile", ["", HOSTILE])
def test_the_front_matter_of_a_card_is_yaml(hostile: str) -> None:
    text = card_text(example(hostile))
    _, front, body = text.split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["base_model_relation"] == "quantized"
    assert values["license"] == "mit"
    assert "gguf" in values["tags"]
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows[:6]}
    assert len(cells) == 1
    assert "<img" not in body.partition("```")[0].replace("\\<", "")


def test_page_and_card_have_files_by_size() -> None:
    numbers = report_of(20, 4)
    sizes = [f.nbytes for f in numbers.files]
    assert sizes != sorted(sizes)
    names = [f.name for f in sorted(numbers.files, key=lambda f: f.nbytes)]
    body = page_text(numbers).replace("<wbr>", "")
    table = body[body.index('id="table-files"') : body.index("</table>")]
    assert re.findall(r"<th scope=row[^>]*>([^<]*)<", table) == names
    rows = [line for line in card_text(numbers).splitlines() if line.startswith("| Qwen3")]
    assert [row.split(" | ")[0][2:].replace("\\", "") for row in rows[:20]] == names


def test_the_table_of_files_is_not_capped() -> None:
    text = page_text(report_of(20, 4))
    tables = re.findall(r'class="scroll( capped)?" [^>]*aria-labelledby="(table-[\w-]+)-caption"', text)
    is_capped = {name: bool(capped) for capped, name in tables}
    assert (is_capped["table-files"], is_capped["table-types"]) == (False, True)


@pytest.mark.parametrize("names", [[t.name for t in TYPES if t.block], ["IQ4_NL", "IQ4_XS", "Q4_K", "Q4_0", "Q4_1"]])
def test_legend_entries_distinguish_types(names: list[str]) -> None:
    keys = type_keys(names[:60])
    assert len(set(keys.values())) == len(keys)
    assert all(len(key) == 1 for key in keys.values())
    assert "?" not in keys.values()


@pytest.mark.parametrize("layers", [4, 30, 90])
def test_every_type_cell_has_a_name_and_a_legend_entry(layers: int) -> None:
    numbers = report_of(3, layers)
    (chart,) = (c for c in charts(numbers) if c.name == "chart-types")
    keys = type_keys(sorted({m.type for f in numbers.files for m in f.matrices}))
    for file, cells in zip(numbers.files, chart.cells, strict=True):
        types = {m.name: m.type for m in file.matrices}
        assert {cell["name"]: cell["text"] for cell in cells} == types
        assert all(cell["key"] in keys.values() for cell in cells)
    assert chart.min_width >= 9 * layers


def test_a_map_marks_missing_measurements() -> None:
    """No cell without a value has a colour of the scale; a row without any says so."""
    numbers = report_of(3, 30)
    for name in ("chart-errors", "chart-costs"):
        (chart,) = (c for c in charts(numbers) if c.name == name)
        assert chart.has_gaps
        assert chart.scale is not None
        assert len(chart.scale.ticks) == 5
        for cells in chart.cells:
            gaps = [cell for cell in cells if "note" not in cell and cell["value"] is None]
            assert gaps
            assert {cell["colour"] for cell in gaps} == {"var(--gap)"}
            notes = {cell["kind"]: cell["note"] for cell in cells if "note" in cell}
            assert notes["attn_q"] == NOT_MEASURED
            values = {cell["kind"] for cell in cells if "note" not in cell and cell["value"] is not None}
            assert values.isdisjoint(notes)
    errors = {m.name: m.error for m in numbers.files[0].matrices}
    (chart,) = (c for c in charts(numbers) if c.name == "chart-errors")
    names = {c["name"] for c in chart.cells[0] if c.get("value") is not None}
    assert names == {name for name, error in errors.items() if error is not None}


def test_large_token_counts_share_one_colour() -> None:
    """The colour of the coverage follows the number that suffices, not the largest one."""
    numbers = report_of(3, 30)
    (chart,) = (c for c in charts(numbers) if c.name == "chart-coverage")
    colours = {cell["value"]: cell["colour"] for cell in chart.spec["data"]["values"] if "value" in cell}
    assert colours[11_000.0] == colours[88_000.0]
    red, blue = (int(colours[60.0][i : i + 2], 16) for i in (1, 5))
    assert red > blue
    red, blue = (int(colours[11_000.0][i : i + 2], 16) for i in (1, 5))
    assert blue > red


def test_many_files_get_small_charts_with_one_scale() -> None:
    of_three, of_twenty = charts(report_of(3, 4)), charts(report_of(20, 4))
    assert "chart-tokens" in {c.name for c in of_three}
    small = [c for c in of_twenty if c.name.startswith("chart-tokens-")]
    assert len(small) == 20
    domains = {
        json.dumps([layer["encoding"][axis]["scale"] for axis in "xy"]) for c in small for layer in c.spec["layer"]
    }
    assert len(domains) == 1


def test_the_card_advises_by_measured_divergence() -> None:
    files = measured_as((31, 0.2, 0.004, 1.1), (34, 0.3, 0.004, 1.2), (57, 0.012, 0.001, 1.0), (80, 0.001, 1e-5, 1.0))
    texts = [advice(f, files) for f in files]
    assert files[0].name in texts[1]
    assert len(set(texts)) == 4
    assert better_file(files[1], files) is files[0]
    unmeasured = dataclasses.replace(files[0], quality=None)
    assert advice(unmeasured, [unmeasured]) == NOT_MEASURED
    with_files = dataclasses.replace(example(), files=tuple(files))
    (download,) = re.findall(r"^hf download .*$", card_text(with_files), re.M)
    assert files[2].name in download


def test_the_card_fills_missing_metadata() -> None:
    def front(text: str) -> dict[str, str]:
        values: dict[str, str] = yaml.safe_load(text.split("---\n")[1])
        return values

    numbers = dataclasses.replace(example(), model=dataclasses.replace(example().model, card=()))
    assert (front(card_text(numbers))["base_model"], front(card_text(numbers))["license"]) == (None, None)
    values = front(card_text(numbers, "org/Base: 1", "apache-2.0"))
    assert (values["base_model"], values["license"]) == ("org/Base: 1", "apache-2.0")
    assert front(card_text(example(), license="other"))["license"] == "other"


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("Q2_K", "Q2_K"), ("Q2_K\n--calibrate a.txt", "Q2_K"), ("Q2_K\n^x$ = Q4_K", "recipe"), (None, "Q2_K")],
)
def test_a_recipe_is_not_labelled_as_a_preset(recipe: str | None, name: str) -> None:
    file = dataclasses.replace(example().files[0], preset="Q2_K")
    provenance = () if recipe is None else (("quantkit.quantize.recipe", recipe),)
    assert preset_name(dataclasses.replace(file, provenance=provenance)) == name


def test_downloads_have_decimal_sizes() -> None:
    assert [decimal_size(n) for n in (6_056_000, 99_000_000, 4_370_000_000)] == ["6.1 MB", "99.0 MB", "4.37 GB"]
    shards = dataclasses.replace(example().files[0], name="m-00001-of-00003.gguf", shards=3)
    assert "--include 'm-*.gguf'" in card_text(dataclasses.replace(example(), files=(shards,)))


def test_a_page_from_data_alone(tmp_path: Path) -> None:
    data, out = tmp_path / "kept.json", tmp_path / "page.html"
    with refuses(RecipeError, "QK-E214 page.json"):
        report([], out)
    data.write_text(example().to_json())
    result = CliRunner().invoke(
        cli,
        ["report", str(out), "--data", str(data), "--card", str(tmp_path / "README.md"), "--base-model", "org/base"],
    )
    assert result.exit_code == 0, result.output
    assert "chart-divergence" in out.read_text()
    assert "base_model: org/base\n" in (tmp_path / "README.md").read_text()
    with refuses(ResourceError, "QK-E402 --overwrite"):
        report([], out, data=data)


def test_measurements_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the zoo against one of them; another run measures nothing, and says the same."""
    base, logits = write_zoo("llama-dense", tmp_path / "base.gguf"), tmp_path / "base.logits"
    tokens = np.random.default_rng(1).integers(0, 100, 16 * 24)
    perplexity(base, tokens=tokens, n_ctx=16, save_logits=SaveLogits(logits, "compact"))
    files = [tmp_path / "a-Q8_0.gguf", tmp_path / "a-Q4_0.gguf"]
    for file in files:
        quantize(base, file, file.stem[2:])
    out = tmp_path / "page.html"
    options = ReportOptions(logits=logits)
    result = report(files, out, base=base, options=options)
    assert all(f.quality is not None and f.quality.kld is not None for f in result.files)
    first, second = (f.quality.kld.value for f in result.files)  # type: ignore[union-attr]
    assert 0 < first < second
    assert all(m.error is not None for f in result.files for m in f.matrices)
    assert result.files[1].command.startswith("quantkit quantize base.gguf a-Q4_0.gguf Q4_0")
    for name in ("kld", "perplexity", "compare"):
        monkeypatch.delattr(measure, name)
    rerun = report(files, out, base=base, options=options, overwrite=True)
    assert rerun.files == result.files
    assert report(files, out, overwrite=True).base == result.base


def test_scores_are_reused_and_compared_with_the_base(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file answers once; a difference from another base is dropped."""
    tasks, requests = tmp_path / "mmlu.bin", tmp_path / "arc.jsonl"
    tasks.write_bytes(task_files.multiple_choice(6))
    requests.write_bytes(task_files.requests(4))
    file, out = tmp_path / "a-Q2_K.gguf", tmp_path / "page.html"
    quantize(tiny_moe, file, "Q2_K")
    options = ReportOptions(score=(tasks, requests), errors=True)
    result = report([file], out, base=tiny_moe, options=options)
    assert result.base is not None
    for model in (result.base, result.files[0]):
        assert [(s.tasks, s.metric) for s in model.scores] == [
            ("mmlu.bin", "acc_norm"),
            ("arc.jsonl", "acc"),
            ("arc.jsonl", "acc_norm"),
        ]
    direct = [score(path, tasks, activations="exact") for path in (tiny_moe, file)]
    assert result.base.scores[0].accuracy == direct[0].accuracies["acc_norm"]
    assert result.files[0].scores[0].difference == direct[1].compare(direct[0])["acc_norm"]
    assert [row[0].text for row in scores_table(result).rows] == [
        *["mmlu.bin"] * 2,
        *["arc.jsonl acc"] * 2,
        *["arc.jsonl acc_norm"] * 2,
    ]
    monkeypatch.delattr(scores, "score")
    rerun = report([file], out, base=tiny_moe, options=options, overwrite=True)
    assert (rerun.files[0].scores, rerun.base) == (result.files[0].scores, result.base)
    assert not report([file], out, base=file, overwrite=True).files[0].scores
    twin = tmp_path / "folder" / tasks.name
    twin.parent.mkdir()
    twin.write_bytes(b"")
    with refuses(RecipeError, "QK-E203 mmlu.bin"):
        report([file], out, options=ReportOptions(score=(tasks, twin)), overwrite=True)


def test_divergence_on_each_text(tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """As compare_models, in one run for all files; on page and card; kept while files, base and texts are the same."""
    folder, out, card = tmp_path / "texts", tmp_path / "page.html", tmp_path / "card.md"
    folder.mkdir()
    raw = (data / "tiny-moe-evaluation.txt").read_bytes()
    for i, name in enumerate(("code.txt", "prose.txt")):
        (folder / name).write_bytes(raw[1000 * i : 1000 * (i + 1)])
    files = [tmp_path / f"a-{name}.gguf" for name in ("Q2_K", "Q8_0")]
    for path, name in zip(files, ("Q2_K", "Q8_0"), strict=True):
        quantize(tiny_moe, path, name)
    options = ReportOptions(texts=(folder,), n_ctx=32, errors=False)
    result = report(files, out, base=tiny_moe, card=card, options=options)
    expected = compare_models(tiny_moe, files, Texts(files=(folder,)), n_ctx=32)
    for file, model in zip(result.files, expected.models, strict=True):
        assert [(q.text, q.n_scored) for q in file.by_text] == [
            (name, sums.n) for name, sums in zip(("code.txt", "prose.txt"), model.by_text, strict=True)
        ]
        assert [q.kld for q in file.by_text] == [sums.kld.mean for sums in model.by_text]
        assert [q.ppl_ratio for q in file.by_text] == [sums.ratio for sums in model.by_text]
        assert file.quality is None
    rows = [[cell.text for cell in row[:2]] for row in texts_table(result).rows]
    assert rows == [[text, file.name] for text in ("code.txt", "prose.txt") for file in files]
    assert 'id="table-texts"' in out.read_text()
    assert "| prose.txt | a-Q8\\_0.gguf |" in card.read_text()
    assert str(tmp_path) not in out.read_text() + card.read_text() + out.with_suffix(".json").read_text()
    monkeypatch.setattr(by_text, "compare_models", None)
    assert report(files, out, base=tiny_moe, options=options, overwrite=True).files == result.files
    with pytest.raises(TypeError):
        report(files, out, base=tiny_moe, options=dataclasses.replace(options, n_ctx=16), overwrite=True)
    with refuses(RecipeError, "QK-E202 --texts --base"):
        report(files, tmp_path / "b.html", options=options)
    with refuses(RecipeError, "QK-E203 code.txt"):
        report(
            files,
            tmp_path / "b.html",
            base=tiny_moe,
            options=dataclasses.replace(options, texts=(folder, folder / "code.txt")),
        )


def test_shards_are_one_model(tmp_path: Path) -> None:
    """A pattern of names finds all of them; what is measured, and said of them, is that of the whole file."""
    base, logits = write_zoo("llama-dense", tmp_path / "base.gguf"), tmp_path / "base.logits"
    tokens = np.random.default_rng(1).integers(0, 100, 16 * 24)
    perplexity(base, tokens=tokens, n_ctx=16, save_logits=SaveLogits(logits, "compact"))
    full = tmp_path / "whole.gguf"
    quantize(base, full, "Q8_0")
    quantize(base, tmp_path / "parts.gguf", "Q8_0", QuantizeOptions(split_max_size=full.stat().st_size // 3))
    shards = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(shards) > 2
    report_result = report(
        [full, *shards[1:], shards[0]], tmp_path / "page.html", base=base, options=ReportOptions(logits=logits)
    )
    one, parts = report_result.files
    assert (parts.name, parts.shards, parts.nbytes) == (
        shards[0].name,
        len(shards),
        sum(s.stat().st_size for s in shards),
    )
    assert (parts.matrices, parts.by_type, parts.values) == (one.matrices, one.by_type, one.values)
    assert parts.quality is not None
    assert parts.quality == one.quality
    arguments = parts.command.split()[2:]
    assert arguments[-2:] == ["parts.gguf", "Q8_0"]
    for shard in shards:
        shard.unlink()
    result = CliRunner().invoke(
        cli, ["quantize", *arguments[:-3], str(base), str(tmp_path / arguments[-2]), arguments[-1]]
    )
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.glob("parts-*.gguf")) == shards


def test_estimates_are_distinguished_from_measurements(tmp_path: Path) -> None:
    groups = tuple(Group(f"blk.{i}.attn_q", "attn_q", i, {f"blk.{i}.attn_q.weight": (256, 256)}) for i in range(3))
    q2_k = type_by_name("Q2_K")
    costs = (
        Cost("blk.0.attn_q", q2_k, 1e-3, 1e-5, 0.0, 0.0, {"layer_error": 2e-3}),
        Cost("blk.1.attn_q", q2_k, None, None, None, None, {"layer_error": 4e-3}),
        Cost("blk.2.attn_q", q2_k, None, None, None, None, {"weighted_error": 5e-3}),
    )
    path = tmp_path / "s.json"
    path.write_text(Sensitivity({}, {}, {}, groups, costs).to_json())
    numbers = dataclasses.replace(example(), sensitivity=measure._costs(path))
    table = costs_table(numbers)
    assert [row[2].text for row in table.rows] == ["1", "≈ 4"]
    assert GUESS in table.caption
    assert GUESS not in costs_table(example()).caption
    (chart,) = (c for c in charts(numbers) if c.name == "chart-costs")
    marks = {
        cell["name"]: (cell["text"].startswith(GUESS), cell["key"]) for cell in chart.cells[0] if "is_guess" in cell
    }
    assert marks == {"blk.0.attn_q": (False, ""), "blk.1.attn_q": (True, GUESS)}
    assert GUESS in page_text(numbers).partition("<script")[0]


def test_the_command_without_provenance(tmp_path: Path) -> None:
    """A file of llama-quantize names the importance matrix at most."""
    summary = dataclasses.replace(inspect(write_zoo("llama-dense", tmp_path / "q.gguf")), file_type_name="Q4_0")
    assert rebuild_command(summary) == ""
    changed_summary = dataclasses.replace(summary, provenance=(("quantize.imatrix.file", "/home/me/i.gguf"),))
    assert rebuild_command(changed_summary) == "llama-quantize --imatrix i.gguf model-BF16.gguf q.gguf Q4_0"


def test_the_command_with_calibration(tmp_path: Path) -> None:
    """No covariances were given; texts are named without their folders."""
    recipe = "Q4_K_M\n--calibrate /home/me/a.txt,b.jsonl\n--calibrate-chunks 3\n^x$ = Q8_0"
    facts = (("quantkit.quantize.recipe", recipe), ("quantkit.feedback.method", 2))
    summary = inspect(write_zoo("llama-dense", tmp_path / "q.gguf"))
    changed_summary = dataclasses.replace(summary, provenance=facts)
    options = "--calibrate a.txt --calibrate b.jsonl --calibrate-chunks 3 --tensor-type '^x$=Q8_0'"
    assert rebuild_command(changed_summary) == f"quantkit quantize {options} model-BF16.gguf q.gguf Q4_K_M"
    assert "/home" not in str(provenance_rows(changed_summary))
    with_feedback = dataclasses.replace(
        changed_summary, provenance=(*facts, ("quantkit.feedback.covariance.name", "cov.gguf"))
    )
    assert "--feedback cov.gguf" in rebuild_command(with_feedback)
    copies = (
        ("quantkit.copy.recipe", ["COPY\n--prune-layers 1", "COPY"]),
        ("quantkit.copy.source.name", ["a.gguf", "b.gguf"]),
    )
    assert rebuild_command(
        dataclasses.replace(summary, provenance=(("quantkit.quantize.recipe", "Q4_K"), *copies))
    ) == (
        "quantkit quantize model-BF16.gguf a.gguf Q4_K && quantkit quantize --prune-layers 1 a.gguf b.gguf COPY"
        " && quantkit quantize b.gguf q.gguf COPY"
    )
