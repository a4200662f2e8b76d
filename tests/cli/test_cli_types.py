from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from guide import step
from quantkit.cli import cli
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.kernels.interleave import base_of
from quantkit.pipeline.presets import PRESETS
from quantkit.pipeline.quality import QUALITY
from quantkit.types import BY_NAME, TYPES


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["types", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments: str) -> dict[str, Any]:
    output: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return output


def test_every_type_has_a_row() -> None:
    rows = {line.split()[1]: line.split() for line in run().splitlines()[2 : 2 + len(TYPES)]}
    assert list(rows) == [t.name for t in TYPES]
    q4_k = [f"{QUALITY['Q4_K'].error:.3g}", QUALITY["Q4_K"].speed]
    assert rows["Q4_K"] == ["12", "Q4_K", "4.5", "256", "144", "k_quant", "both", *q4_k, "used", "full"]
    assert rows["IQ2_KS"][:6] == ["145", "IQ2_KS", "2.1875", "256", "70", "2"]
    assert rows["IQ2_XS"][5:7] + rows["IQ2_XS"][9:11] == ["i_quant", "both", "required", "mainline+ik"]
    assert rows["Q4_0_R8"][5] == "8"


@pytest.mark.parametrize("tree", ["mainline", "ik"])
def test_types_of_one_project(tree: str) -> None:
    output = run_json("--tree", tree, "--presets")
    assert {t["trees"] for t in output["types"]} == {tree, "both"}
    assert [t["name"] for t in output["types"]] == [t.name for t in TYPES if t.is_in(tree)]
    assert {p["trees"] for p in output["presets"]} == {tree, "both"}


def test_json_has_the_whole_table() -> None:
    output = run_json()
    assert "presets" not in output
    assert len(output["types"]) == len(TYPES)
    for row in output["types"]:
        t = BY_NAME[row["name"]]
        assert (row["id"], row["ggml_name"], row["row_header"], row["interleave"]) == (
            t.id,
            t.ggml_name,
            t.row_header,
            t.interleave,
        )
        assert row["bits_per_weight"] == t.bpw


def test_listed_encoders_and_decoders_exist() -> None:
    for row in run_json()["types"]:
        t = BY_NAME[row["name"]]
        assert (row["encoder"], row["decoder"]) == (has_encoder(t), has_decoder(t) or t.name == "I2_S")
        if t.trees != "none" or t.name in QUALITY:
            assert (row["weighted_error"] is None, row["encoding"] is None) == (not row["encoder"],) * 2


def shown_in(plot: Path) -> set[str]:
    """Return the types that a plot names."""
    return {n for label in re.findall(r"<!-- ([A-Z0-9_, ]+) -->", plot.read_text()) for n in label.split(", ")}


def test_the_plot_shows_every_type_or_its_base(tmp_path: Path) -> None:
    run("--plot", str(tmp_path / "p.svg"))
    names = shown_in(tmp_path / "p.svg")
    in_docs = shown_in(Path(__file__).parents[2] / "docs/types.svg")
    assert {n for n in names if n in BY_NAME and BY_NAME[n].trees != "none"} <= in_docs, step("Add a type", 12)
    for t in TYPES:
        if has_encoder(t) and t.is_quantized and (t.trees != "none" or t.name in QUALITY):
            ratio = QUALITY[t.name].error / QUALITY[base_of(t).name].error if base_of(t).name in QUALITY else 0
            assert t.name in names or (base_of(t).name in names and 0.98 < ratio < 1.02)
    assert {"Q6_K_R4", "Q8_K_R8", "Q4_0_4X4", "IQ1_S_R4"} <= names
    assert not {"Q4_K_R4", "IQ2_K_R4", "BF16_R16"} & names


def test_presets() -> None:
    presets = run_json("--presets")["presets"]
    assert [(p["number"], p["name"]) for p in presets] == [(p.ftype, p.name) for p in PRESETS]
    use = {p["name"]: p["use"] for p in presets}
    bases = {p.name: str(p.base) for p in PRESETS}
    assert use.pop("COPY") == "copy"
    assert use == {name: "mixture" if has_encoder(BY_NAME[bases[name]]) else None for name in use}
    assert use["Q4_K_M"] == use["MXFP4"] == use["IQ4_KS"] == "mixture"
    output = run("--presets")
    assert "Q4_K is Q4_K_M" in output
    assert all(p.description in output for p in PRESETS)


def test_usage() -> None:
    assert CliRunner().invoke(cli, ["types", "--tree", "other"]).exit_code == 2
    assert CliRunner().invoke(cli, ["types", "more"]).exit_code == 2
