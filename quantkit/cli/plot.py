"""Small pictures for reports: lines and maps over the layers of a model, one panel below the other.

SVG is written here, in plain elements that any viewer draws, no fonts or scripts fetched. A PNG is drawn by matplotlib
where that is installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import RecipeError, ResourceError

F64Array = npt.NDArray[np.float64]

#: Okabe and Ito's colours, told apart by almost everybody; dashes tell apart what shares one.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
#: Steps of a map: shares of the even one, and what is drawn for up to each.
LEVELS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 4 / 3, 2, 4, 8, math.inf)
SHADES = ("#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f2f2f2", "#fddbc7", "#f4a582", "#d6604d", "#b2182b")
NEVER = "#111111"

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _GAP = 960, 220, 78, 236, 58, 62


@dataclass(frozen=True)
class Line:
    """One line; NaN is a gap in it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class LinePanel:
    """Lines with a common axis, logarithmic on request (what is not positive is then left out)."""

    title: str
    lines: Sequence[Line]
    log: bool = False


@dataclass(frozen=True, eq=False)
class MapPanel:
    """Cells [rows, columns] of shares: 1 is even, 0 never, NaN nothing there; ``x`` are the columns' positions."""

    title: str
    rows: str
    x: Sequence[float]
    shares: F64Array


@dataclass(frozen=True)
class Figure:
    """Panels one below the other over one horizontal axis."""

    title: str
    x_label: str
    panels: Sequence[LinePanel | MapPanel]


def save_plot(path: Path, figure: Figure) -> None:
    """Write ``figure`` as .svg or .png; raises RecipeError for other names, ResourceError without matplotlib."""
    kind = check_plot(path)
    if kind == ".svg":
        path.write_text(svg(figure), "utf-8")
    else:
        _save_png(path, figure)


def check_plot(path: Path) -> str:
    """Return the suffix of a plot's name, once it is one that can be written here."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise RecipeError(f"{path}: plots are .svg or .png")
    if kind == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ResourceError(
                f"{path}: PNG needs matplotlib: pip install 'gguf-quantkit[plot]', or name the plot .svg"
            ) from None
    return kind


# --- SVG ---


def svg(figure: Figure) -> str:
    """Return ``figure`` as the text of an SVG file."""
    height = _TOP + len(figure.panels) * (_HEIGHT + _GAP)
    low, high = _span(figure)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 26, figure.title, size=16),
    ]
    for i, panel in enumerate(figure.panels):
        frame = _Frame(low, high, _TOP + i * (_HEIGHT + _GAP))
        lines.append(_text(_LEFT, frame.top - 8, panel.title, weight="bold"))
        lines += _lines_of(panel, frame) if isinstance(panel, LinePanel) else _map_of(panel, frame)
        lines += frame.x_axis(figure.x_label)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _span(figure: Figure) -> tuple[float, float]:
    """Return the horizontal range of all panels, half a step wider on both sides."""
    x = [v for p in figure.panels for v in (p.x if isinstance(p, MapPanel) else [v for n in p.lines for v in n.x])]
    return (min(x) - 0.5, max(x) + 0.5) if x else (-0.5, 0.5)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    at = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{bold}>'
    return f"{at}{escape(text)}</text>"


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return round numbers in low..high, at most ``most``, whole ones where the range is wide."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next((m for m in (1, 2, 5) if span / (step * m) <= most - 1), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """The rectangle of a panel, and where a layer is in it."""

    low: float
    high: float
    top: float

    @property
    def width(self) -> float:
        return _WIDTH - _LEFT - _RIGHT

    @property
    def bottom(self) -> float:
        return self.top + _HEIGHT

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low) / (self.high - self.low) * self.width

    def x_axis(self, label: str) -> Iterator[str]:
        yield (
            f'<rect x="{_LEFT}" y="{self.top}" width="{self.width}" height="{_HEIGHT}" fill="none" stroke="#888888"/>'
        )
        for value in ticks(math.ceil(self.low), math.floor(self.high), 16):
            if value == int(value):
                yield f'<path d="M{self.x(value):.1f} {self.bottom}v4" stroke="#888888"/>'
                yield _text(self.x(value), self.bottom + 17, f"{value:.0f}", anchor="middle")
        yield _text(_LEFT + self.width / 2, self.bottom + 33, label, anchor="middle")

    def y_tick(self, y: float, text: str) -> str:
        grid = f'<path d="M{_LEFT} {y:.1f}h{self.width}" stroke="#e4e4e4"/>'
        return grid + _text(_LEFT - 6, y + 4, text, anchor="end")


def _lines_of(panel: LinePanel, frame: _Frame) -> Iterator[str]:
    values = [v for line in panel.lines for v in line.y if math.isfinite(v) and (v > 0 or not panel.log)]
    if not values:
        yield _text(_LEFT + 12, frame.top + 24, "no data")
        return
    marks, low, high = _y_range(values, panel.log)
    scale = _HEIGHT / (high - low)

    def y(value: float) -> float:
        return frame.bottom - ((math.log10(value) if panel.log else value) - low) * scale

    for mark in marks:
        yield frame.y_tick(y(mark), f"{mark:.4g}")
    for i, line in enumerate(panel.lines):
        points = [
            (frame.x(a), y(b)) if math.isfinite(b) and (b > 0 or not panel.log) else None
            for a, b in zip(line.x, line.y, strict=True)
        ]
        yield from _line(points, line.name, i, frame)


def _y_range(values: Sequence[float], log: bool) -> tuple[list[float], float, float]:
    """Return ticks, and the axis's range with a little air (of exponents where logarithmic)."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
    air = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
    low, high = low - air, high + air
    if not log:
        return ticks(low, high), low, high
    decades = range(math.ceil(low), math.floor(high) + 1)
    steps = (1,) if len(decades) > 2 else (1, 2, 5)
    marks = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    skip = max(1, len(decades) // 8)
    inside = [m for m in marks if low <= math.log10(m) <= high]
    return inside[::skip] or [10.0 ** ((low + high) / 2)], low, high


def _line(points: Sequence[tuple[float, float] | None], name: str, i: int, frame: _Frame) -> Iterator[str]:
    colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
    commands, pen = [], "M"
    for point in points:
        if point is not None:
            commands.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "M" if point is None else "L"
    yield f'<path d="{"".join(commands)}" {style}/>'
    if len(points) <= 64:
        yield from (f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="2.4" fill="{colour}"/>' for p in points if p)
    x, y = _WIDTH - _RIGHT + 14, frame.top + 10 + 17 * i
    if y < frame.bottom + 20:
        yield f'<path d="M{x} {y}h22" {style}/>' + _text(x + 28, y + 4, _cut(name), size=11)


def _cut(name: str, width: int = 32) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _map_of(panel: MapPanel, frame: _Frame) -> Iterator[str]:
    """Draw all cells of one shade as one path."""
    rows = panel.shares.shape[0]
    height, width = _HEIGHT / max(1, rows), frame.width / (frame.high - frame.low)
    level = np.searchsorted(LEVELS, panel.shares)
    for shade, colour in ((-1, NEVER), *enumerate(SHADES)):
        chosen = panel.shares == 0 if shade < 0 else (level == shade) & (panel.shares > 0)
        cells = [
            f"M{frame.x(panel.x[c] - 0.5):.2f} {frame.top + r * height:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
            for r, c in np.argwhere(chosen)
        ]
        if cells:
            yield f'<path d="{"".join(cells)}" fill="{colour}"/>'
    for row in ticks(0, rows - 1, 6):
        if row == int(row):
            yield _text(_LEFT - 6, frame.top + (row + 0.5) * height + 4, f"{row:.0f}", anchor="end")
    x = _WIDTH - _RIGHT + 14
    yield _text(x, frame.top + 14, panel.rows, size=11)
    for i, (colour, text) in enumerate(map_legend()):
        y = frame.top + 24 + 17 * i
        yield f'<rect x="{x}" y="{y}" width="22" height="12" fill="{colour}" stroke="#888888" stroke-width="0.5"/>'
        yield _text(x + 28, y + 10, text, size=11)


def map_legend() -> list[tuple[str, str]]:
    """Return colours and what they mean."""
    names = ["1/8", "1/4", "1/2", "3/4", "4/3", "2", "4", "8"]
    between = [f"{a} to {b}" for a, b in pairwise(names)]
    return list(zip((NEVER, *SHADES), ["never", f"up to {names[0]}", *between, f"over {names[-1]}"], strict=True))


# --- PNG ---


def _save_png(path: Path, figure: Figure) -> None:
    """Draw the same panels with matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    n = len(figure.panels)
    drawn, axes = pyplot.subplots(n, 1, figsize=(9.6, 0.6 + 2.8 * n), squeeze=False, layout="constrained")
    drawn.suptitle(figure.title)
    for panel, axis in zip(figure.panels, axes[:, 0], strict=True):
        axis.set_title(panel.title, loc="left", fontsize=10)
        axis.set_xlabel(figure.x_label)
        axis.set_xlim(*_span(figure))
        if isinstance(panel, LinePanel):
            _png_lines(axis, panel)
        else:
            _png_map(axis, panel)
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def _png_lines(axis: Any, panel: LinePanel) -> None:
    if panel.log:
        axis.set_yscale("log")
    for i, line in enumerate(panel.lines):
        axis.plot(line.x, line.y, ".-", color=COLOURS[i % len(COLOURS)], label=line.name, linewidth=1.4)
    if panel.lines:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)


def _png_map(axis: Any, panel: MapPanel) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    shades = np.where(panel.shares == 0, 0, 1 + np.searchsorted(LEVELS, panel.shares)).astype(float)
    shades[np.isnan(panel.shares)] = np.nan
    colours = ListedColormap([NEVER, *SHADES])
    rows = np.arange(panel.shares.shape[0])
    axis.pcolormesh(np.asarray(panel.x), rows, shades, cmap=colours, vmin=-0.5, vmax=9.5, shading="nearest")
    axis.set_ylabel("expert")
    axis.invert_yaxis()
    legend = [Patch(color=colour, label=text) for colour, text in map_legend()]
    axis.legend(handles=legend, title=panel.rows, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
