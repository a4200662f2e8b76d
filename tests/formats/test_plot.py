"""Plots: every format from awkward data, the same bytes for the same data, whole layers on the axis."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses

from quantkit.cli import _plot, cli
from quantkit.cli._plot import Figure, Line, LinePanel, MapPanel, Points, Scatter, check_plot, draw
from quantkit.cli._plot_labels import Box, Place, place_labels
from quantkit.errors import RecipeError

pytest.importorskip("matplotlib")

AWKWARD = Figure(
    "$a_b &",
    [
        LinePanel("p", "y", [Line("a$<b>", [0, 1, 2], [1, math.nan, -1]), Line("b", [0], [0])], log=True),
        LinePanel("q", "y", []),
        MapPanel("m", "row", "unit", 1, np.array([[0.0, np.nan], [1, 9]])),
    ],
)


def texts(svg: bytes) -> list[str]:
    """Return the texts of a plot, which matplotlib repeats in comments."""
    ElementTree.fromstring(svg)
    return re.findall("<!-- (.*?) -->", svg.decode())


def test_a_matrix_as_svg(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    result = CliRunner().invoke(cli, ["imatrix", "show", str(data / "tiny-moe-imatrix.gguf"), "--plot", str(out)])
    assert result.exit_code == 0, result.output
    labels = texts(out.read_bytes())
    assert labels.count("attn_k, attn_q, attn_v") == 1
    assert "0 1 2 3" in " ".join(t for t in labels if t.isdecimal())  # the layers
    assert {"Tokens of each expert", "expert", "tokens / even share", "layer", "E[x²]"} <= set(labels)
    assert "never" not in labels


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_edge_case_data_are_plotted_reproducibly(kind: str, magic: bytes) -> None:
    image = draw(AWKWARD, kind)
    assert image.startswith(magic)
    assert image == draw(AWKWARD, kind)


def test_missing_data_are_shown() -> None:
    labels = texts(draw(replace(AWKWARD, title="$a_b & 模型"), "svg"))
    assert {"never", "no data", "a$&lt;b&gt;", "$a_b &amp; 模型"} <= set(labels)


def test_names_and_matplotlib_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> None:
    with refuses(RecipeError, "QK-E203 .svg .png .pdf"):
        check_plot(Path("x.gif"))
    assert check_plot(Path("x.PNG")) == "png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(cli, ["imatrix", "show", str(data / "tiny-moe-imatrix.gguf"), "--plot", "x.svg"])
    assert result.exit_code == 1
    check_refused(result.output, "QK-E410 gguf-quantkit[plot]")


def test_labels_do_not_overlap() -> None:
    rng = np.random.default_rng(4)
    points, sizes, legend = rng.normal(200, 60, (40, 2)), np.full((40, 2), (35, 7)), (300.0, 300.0, 400.0, 400.0)
    places = place_labels(points, sizes, (0, 0, 400, 400), [points[:3]], [legend])
    centres = points + [(place.x, place.y) for place in places]
    boxes = np.concatenate([np.concatenate([centres - sizes / 2, centres + sizes / 2], 1), [legend]])
    assert boxes.min() >= 0
    assert boxes.max() <= 400
    low, high = np.maximum(boxes[:, None, :2], boxes[:, :2]), np.minimum(boxes[:, None, 2:], boxes[:, 2:])
    assert np.array_equal((low < high).all(2), np.eye(len(boxes), dtype=bool))
    assert any(place.has_leader for place in places)
    assert not all(place.has_leader for place in places)


def test_points_with_labels() -> None:
    line, points = (
        Points("line", [1, 2], [1, 200], is_line=True),
        Points("p$", [1, 1, 2], [1, 1, 200], ["a", "b", "c$"]),
    )
    image = draw(Scatter("title", "x", "y", [line, points], "note"), "svg")
    assert {"title", "x", "y", "line", "p$", "a", "b", "c$", "note", "200"} <= set(texts(image))
    assert image == draw(Scatter("title", "x", "y", [line, points], "note"), "svg")


def test_labels_do_not_cover_points_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark to the right of a labelled point, where its label would be: a hidden figure."""
    areas: list[Box] = []

    def place(points: Any, sizes: Any, area: Box, lines: Any, obstacles: Sequence[Box]) -> list[Place]:
        places = place_labels(points, sizes, area, lines, obstacles)
        assert len(places) == 1  # an empty label is none
        centre, half = points[0] + (places[0].x, places[0].y), sizes[0] / 2
        areas.extend([(*(centre - half), *(centre + half)), obstacles[-1]])
        return places

    monkeypatch.setattr(_plot, "place_labels", place)
    labelled, plain = Points("a", [1, 8], [10, 1e4], ["label", ""]), Points("b", [1.15], [10])
    draw(Scatter("title", "x", "y", [labelled, plain]), "svg")
    label, mark = areas
    assert label[0] > mark[2] or label[2] < mark[0] or label[1] > mark[3] or label[3] < mark[1]


@pytest.mark.parametrize(
    ("values", "least"), [([6.2, 40.0], 3), ([22.0, 29.0], 3), ([0.004, 3.0], 3), ([1e-6, 40.0], 3), ([5.0, 5.0], 1)]
)
def test_logarithmic_axes_have_plain_numbers(values: list[float], least: int) -> None:
    """Of any range, also one within a decade, whose numbers matplotlib writes as 4 x 10^1."""
    panel = LinePanel("p", "y", [Line("a", [0, 1], values)], log=True)
    labels = texts(draw(Figure("f", [panel]), "svg"))
    numbers = [float(t) for t in labels[labels.index("layer") + 1 :] if re.fullmatch(r"[\d.]+(e-\d+)?", t)]
    assert not any("mathdefault" in t for t in labels)
    assert sum(min(values) / 2 <= n <= max(values) * 2 for n in numbers) >= least


def test_a_reference_has_a_labelled_line() -> None:
    panel = LinePanel("p", "y", [Line("a", [0, 1], [0.3, 0.5])])
    image = draw(Figure("f", [replace(panel, reference=(1.0, "1: no gain"))]), "svg")
    assert "1: no gain" in texts(image)
    assert "1.0" in texts(image)  # the axis reaches it
    assert "1.0" not in texts(draw(Figure("f", [panel]), "svg"))


def test_the_subject_is_not_drawn_as_a_reference() -> None:
    points = Points("front", [1, 2], [1, 200], is_line=True, is_subject=True)
    grey = b"#bbbbbb"
    assert grey not in draw(Scatter("title", "x", "y", [points]), "svg")
    assert grey in draw(Scatter("title", "x", "y", [replace(points, is_subject=False)]), "svg")
