"""Plots: SVG that is well formed whatever the data, PNG where matplotlib is."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from quantkit.cli import cli
from quantkit.cli.plot import Figure, Line, LinePanel, MapPanel, check_plot, save_plot, svg, ticks
from quantkit.errors import RecipeError, ResourceError


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["imatrix", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_plot_is_svg(data: Path, tmp_path: Path) -> None:
    run("show", data / "tiny-moe-imatrix.gguf", "--plot", tmp_path / "x.svg")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = [t.text for t in root.iter(f"{space}text")]
    assert "attn_k, attn_q, attn_v" in texts
    assert "Tokens of each expert" in texts
    cells_drawn = sum((p.get("d") or "").count("z") for p in root.iter(f"{space}path"))
    assert cells_drawn == 4 * 8


def test_plots_of_awkward_data() -> None:
    lines = [Line("a<b>", [0, 1, 2], [1, math.nan, 1]), Line("b", [0], [0]), Line("c", [], [])]
    shares = np.array([[0.0, np.nan], [1, 9]])
    figure = Figure(
        "&", "layer", [LinePanel("p", lines), LinePanel("q", lines, log=True), MapPanel("m", "r", [0, 1], shares)]
    )
    text = svg(figure)
    assert "a&lt;b&gt;" in text
    root = ElementTree.fromstring(text)
    numbers = re.findall(
        r"-?\d+\.?\d*", " ".join(p.get("d") or "" for p in root.iter("{http://www.w3.org/2000/svg}path"))
    )
    assert all(-1000 < float(n) < 2000 for n in numbers)
    assert "no data" in svg(Figure("t", "x", [LinePanel("p", [])]))
    assert "nan" not in text


@pytest.mark.parametrize(("low", "high"), [(0, 3), (0, 93), (-0.2, 1), (5, 5), (1e-9, 3e-9), (0, 127)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-12 <= t <= high + 1e-12 for t in found)


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = run("show", data / "tiny-moe-imatrix.gguf", "--plot", tmp_path / "x.png", code=1)
    assert "PNG needs matplotlib: pip install 'gguf-quantkit[plot]', or name the plot .svg" in out
    with pytest.raises(RecipeError, match=r"plots are .svg or .png"):
        check_plot(Path("x.pdf"))
    with pytest.raises(ResourceError):
        check_plot(Path("x.PNG"))


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = MapPanel("m", "r", [0, 1], np.array([[0.0, np.nan], [1, 9]]))
    save_plot(tmp_path / "x.png", Figure("t", "x", [LinePanel("p", [Line("a", [0, 1], [1, 2])], log=True), panel]))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
