"""Plots by matplotlib: panels of lines and maps over the layers of a model, one below the other; labelled points."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.cli._plot_labels import MARK, place_labels
from quantkit.errors import RecipeError
from quantkit.extras import PLOT, check_extras
from quantkit.names import printable, shorten

#: Metadata that is omitted from each format, so that equal data give equal bytes.
FORMATS: dict[str, dict[str, None]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
#: Okabe and Ito's colours, safe for colour-blind readers; markers and dashes work without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
MARKS, DASHES = "osD^vP", ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "svg.hashsalt": "quantkit",
    "pdf.fonttype": 42,
}
#: Width of a plot, height of a panel and of a line of its legend, in inches.
_WIDTH = 8.0
_HEIGHT = 2.3
_ENTRY = 0.19
#: Font size of a point's label.
_LABEL = 7.0


@dataclass(frozen=True)
class Line:
    """One line; NaN is a gap."""

    name: str
    x: Sequence[int]
    y: Sequence[float]


@dataclass(frozen=True)
class LinePanel:
    """Lines that share an axis, optionally logarithmic (values that are not positive are then gaps).

    ``reference``: a value with a horizontal line, and its name.
    """

    title: str
    y_label: str
    lines: Sequence[Line]
    log: bool = False
    reference: tuple[float, str] | None = None


@dataclass(frozen=True, eq=False)
class MapPanel:
    """Shares [rows, layers from ``first``]: 1 is even, 0 is never, NaN is no data."""

    title: str
    y_label: str
    unit: str
    first: int
    shares: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """Points of one kind with a label each, empty: none; or a line (``is_line``) to guide the eye, or the subject."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str] = ()
    is_line: bool = False
    is_subject: bool = False


@dataclass(frozen=True)
class Scatter:
    """Kinds of points; y is logarithmic, x with ``log_x``; the note heads the legend."""

    title: str
    x_label: str
    y_label: str
    kinds: Sequence[Points]
    note: str = ""
    log_x: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels, one below the other, that share the axis of layers."""

    title: str
    panels: Sequence[LinePanel | MapPanel]


def check_plot(path: Path) -> str:
    """Return the format a plot's name implies.

    Raises RecipeError for an unknown one, MissingPackages without matplotlib.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise RecipeError(f"{path}: plots are .svg, .png or .pdf", "QK-E203")
    check_extras(PLOT)
    return kind


def draw(figure: Figure | Scatter, kind: str) -> bytes:
    """Return ``figure`` as the bytes of a file; equal data give equal bytes, regardless of the user's matplotlibrc."""
    import matplotlib.style

    file = io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        drawing = _scatter(figure) if isinstance(figure, Scatter) else _drawing(figure)
        drawing.savefig(file, format=kind, dpi=160, metadata=FORMATS[kind])
    return file.getvalue()


def _drawing(figure: Figure) -> Any:
    from matplotlib.figure import Figure as Drawing
    from matplotlib.ticker import MaxNLocator

    heights = [_height(panel) for panel in figure.panels]
    drawing = Drawing(figsize=(_WIDTH, sum(heights) + 0.6), layout="constrained")
    drawing.suptitle(_plain(figure.title), x=0.01, ha="left", fontsize=11)
    rows: dict[str, Any] = {"squeeze": False, "sharex": True, "height_ratios": heights}
    axes = drawing.subplots(len(heights), 1, **rows)[:, 0]
    styles = _styles(figure)
    for axis, panel in zip(axes, figure.panels, strict=True):
        axis.set_title(panel.title)
        axis.set_ylabel(panel.y_label)
        if isinstance(panel, LinePanel):
            _draw_lines(axis, panel, styles)
        else:
            _draw_map(axis, panel)
    drawing.align_ylabels()
    axes[-1].set_xlabel("layer")
    axes[-1].xaxis.set_major_locator(MaxNLocator(16, integer=True, min_n_ticks=1))
    axes[-1].set_xlim(*_span(figure))
    return drawing


def _height(panel: LinePanel | MapPanel) -> float:
    return max(_HEIGHT, _ENTRY * len(panel.lines) + 0.3) if isinstance(panel, LinePanel) else _HEIGHT


def _plain(text: str) -> str:
    """Return text that matplotlib prints literally: a plain $ would start a formula."""
    return shorten(printable(text), 90).replace("$", r"\$")


def _styles(figure: Figure) -> dict[str, dict[str, Any]]:
    """Return label and style of every line by its name, the same in all panels."""
    first, last = _span(figure)
    size = min(5, 200 / (last - first))
    names = dict.fromkeys(line.name for p in figure.panels if isinstance(p, LinePanel) for line in p.lines)
    return {
        name: {
            "label": _plain(name),
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKS[i % len(MARKS)],
            "linestyle": DASHES[i % len(DASHES)],
            "markersize": size * (1 - i % len(MARKS) / 10),  # where lines coincide, the earlier ones stay visible
        }
        for i, name in enumerate(names)
    }


def _span(figure: Figure) -> tuple[float, float]:
    """Return the range of layers of all panels, half a layer wider on each side."""
    x = [0, *(v for p in figure.panels if isinstance(p, LinePanel) for line in p.lines for v in line.x)]
    x += [p.first + p.shares.shape[1] - 1 for p in figure.panels if isinstance(p, MapPanel)]
    return min(x) - 0.5, max(x) + 0.5


def _draw_lines(axis: Any, panel: LinePanel, styles: dict[str, dict[str, Any]]) -> None:
    """Draw lines; the legend lists those that no panel above lists."""
    if panel.log:
        axis.set_yscale("log", nonpositive="mask")
    for line in panel.lines:
        axis.plot(line.x, line.y, **styles[line.name])
        styles[line.name]["label"] = None
    if panel.reference is not None:
        value, name = panel.reference
        axis.axhline(value, color="#444444", linewidth=0.9, linestyle="--", zorder=1)
        right = {"xytext": (-2, -2), "textcoords": "offset points", "ha": "right", "va": "top"}
        axis.annotate(name, (1, value), xycoords=("axes fraction", "data"), color="#444444", fontsize=8, **right)
    if panel.log:
        _number_range(axis.yaxis)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))
    if not any(np.isfinite(line.y).any() for line in panel.lines):
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center")


def _draw_map(axis: Any, panel: MapPanel) -> None:
    """Draw shares on a logarithmic scale from 1/8 to 8; zero is black, no data is grey."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    with np.errstate(divide="ignore"):
        steps = np.log2(panel.shares)
    is_zero = np.isneginf(steps)
    colours = colormaps["RdBu_r"].with_extremes(under="black")
    rows, columns = (np.arange(n) for n in steps.shape)
    style: dict[str, Any] = {
        "cmap": colours,
        "vmin": -3,
        "vmax": 3,
        "edgecolors": "face",
        "linewidth": 0.2,
        "rasterized": steps.size > 4096,
    }
    cells = axis.pcolormesh(panel.first + columns, rows, np.where(is_zero, -9, steps.clip(-3, 3)), **style)
    axis.set_facecolor("#d0d0d0")
    axis.grid(False)
    axis.invert_yaxis()
    axis.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    place = axis.inset_axes((1.03, 0, 0.03, 1))
    place.grid(False)
    extend = {"extend": "min", "extendfrac": 0.18, "extendrect": True} if is_zero.any() else {}
    bar = axis.figure.colorbar(cells, place, label=panel.unit, **extend)
    bar.set_ticks(range(-3, 4), labels=["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"])
    if extend:
        place.text(1.75, -0.11, "never", transform=place.transAxes, va="center")


def _scatter(figure: Scatter) -> Any:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(_WIDTH, 0.85 * _WIDTH), layout="constrained")
    axis = drawing.subplots()
    axis.set_title(_plain(figure.title), fontsize=11)
    axis.set_xlabel(figure.x_label)
    axis.set_ylabel(figure.y_label)
    axis.set_yscale("log")
    _number_decades(axis.yaxis)
    if figure.log_x:
        axis.set_xscale("log")
        _number_decades(axis.xaxis)
    labels: list[_Label] = []
    style: dict[str, Any]
    for i, points in enumerate(figure.kinds):
        if points.is_subject:
            style = {"color": COLOURS[i], "linewidth": 1.8, "marker": ".", "markersize": 5, "zorder": 2}
            axis.plot(points.x, points.y, label=_plain(points.name), **style)
        elif points.is_line:
            axis.plot(points.x, points.y, color="#bbbbbb", linewidth=1, zorder=1, label=_plain(points.name))
        else:
            colour = COLOURS[i % len(COLOURS)]
            style = {"color": colour, "marker": MARKS[i], "linestyle": "", "markersize": 4.5}
            axis.plot(points.x, points.y, label=_plain(points.name), **style)
            texts = points.labels or [""] * len(points.x)
            labels += [(x, y, text, colour) for x, y, text in zip(points.x, points.y, texts, strict=True)]
    axis.margins(0.05)
    axis.set_axisbelow(True)
    # Where both are logarithmic, points rise to the right.
    legend = axis.legend(loc="upper left" if figure.log_x else "upper right", title=figure.note, alignment="left")
    drawing.draw_without_rendering()  # places the axes
    if labels:
        _label(axis, labels, legend.get_window_extent(), [p for p in figure.kinds if p.is_line])
    return drawing


def _number_decades(axis: Any) -> None:
    """Write 1, 2 and 5 of each decade of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _number_range(axis: Any) -> None:
    """Write plain numbers on a logarithmic axis, round ones where 1, 2 and 5 of each decade are too few or many."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    _number_decades(axis)
    low, high = axis.get_view_interval()
    if high / low < 8:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_minor_locator(NullLocator())
    elif high / low > 1e3:
        axis.set_major_locator(LogLocator(10))


#: Position of a label's point, text and colour.
_Label = tuple[float, float, str, str]


def _label(axis: Any, labels: Sequence[_Label], legend: Any, curves: Sequence[Points]) -> None:
    """Write labels near their points, in their colour, with a leader to distant ones; none covers a point without."""
    from matplotlib.colors import to_rgb
    from matplotlib.textpath import TextPath

    point = axis.figure.dpi / 72

    def places(x: Sequence[float], y: Sequence[float]) -> Any:
        return axis.transData.transform(np.column_stack([x, y])) / point

    area, box = axis.get_window_extent(), legend.extents / point
    marks = [places([x], [y])[0] for x, y, text, _ in labels if not text]
    obstacles = [tuple(box), *((x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks)]
    labels = [label for label in labels if label[2]]
    sizes = np.array([(TextPath((0, 0), text, size=_LABEL).get_extents().width, _LABEL) for *_, text, _ in labels])
    positions = places([label[0] for label in labels], [label[1] for label in labels])
    lines = [places(p.x, p.y) for p in curves]
    label_places = place_labels(positions, sizes, tuple(area.extents / point), lines, obstacles)
    for (x, y, text, colour), place in zip(labels, label_places, strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        style: dict[str, Any] = {"arrowprops": line} if place.has_leader else {}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}
        centre: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center_baseline"}
        dark = np.array(to_rgb(colour)) * 0.7
        axis.annotate(
            _plain(text), (x, y), (place.x, place.y), fontsize=_LABEL, color=dark, zorder=1.5, **centre, **style
        )
