"""``quantkit imatrix show``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from quantkit.calibration import held_out_warning, read_held_out, sketch_of
from quantkit.cli._imatrix_plot import figure_of
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import SHARE, GroupedCommand, claim, json_value, one_line, option, setting
from quantkit.cli._paths import IMATRIX, MODEL, Place
from quantkit.cli._plot import check_plot, draw
from quantkit.cli._table import format_list, table
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.outputs import atomic_write
from quantkit.imatrix import (
    Coverage,
    CoverageGroup,
    LayerStatistics,
    Statistics,
    TensorStatistics,
    filled_experts,
    show_imatrix,
)
from quantkit.imatrix.coverage import HARDLY
from quantkit.imatrix.fill import FILL_KEY
from quantkit.names import printable, shorten

_SCOPE, _OUT = "Selection", "Output"
_FILE = Place()
#: The widest name, as in llama-imatrix.
_NAME = 40


@click.command("show", cls=GroupedCommand, short_help="Show contents, gaps and statistics.")
@click.argument("path", metavar="FILE", type=IMATRIX)
@option("-m", "--model", group=_SCOPE, type=MODEL, help="Model, to list its weights without an entry.")
@option("--process-output", group=_SCOPE, is_flag=True, help="With -m: also expect an entry for the output.")
@setting(
    "--hardly",
    group=_SCOPE,
    type=click.IntRange(1),
    default=HARDLY,
    help="Experts with fewer tokens are listed as hardly hit.",
)
@option("--per-tensor", group=_SCOPE, is_flag=True, help="Show statistics of every weight, and complete lists.")
@option(
    "--require-coverage",
    group=_OUT,
    type=SHARE,
    metavar="SHARE",
    help="Exit with 3 if fewer weights have data; each expert counts as one.",
)
@option("--plot", group=_OUT, type=_FILE, metavar="FILE", help="Plot by layer: .svg, .png or .pdf.")
@option("--overwrite", group=_OUT, is_flag=True, help="Replace an existing plot.")
@json_option()
def show(
    path: Path,
    model: Path | None,
    process_output: bool,
    hardly: int,
    per_tensor: bool,
    require_coverage: float | None,
    plot: Path | None,
    overwrite: bool,
    json_to: JsonOutput,
) -> None:
    """Show contents and gaps of an importance matrix, with statistics.

    Mean, StdDev, Skew and Kurt describe the mean activations or, in files without
    them (.dat), the mean squares. H Norm is the entropy of the mean squares, 100 %
    if all columns are equal. Gain, L2 Dist, CosSim, PCC (Pearson) and Cov compare
    with the previous layer. A mean square of n tokens has a relative error of about
    sqrt(2 / n); experts with fewer than --hardly tokens are listed.

    \b
    quantkit imatrix show imatrix.gguf
    quantkit imatrix show -m model-bf16.gguf --require-coverage 99% imatrix.gguf
    quantkit imatrix show --per-tensor --plot layers.svg imatrix.gguf
    """
    if plot is not None:
        kind = check_plot(plot)
        plot = claim(plot, path, model, overwrite=overwrite)
    contents = show_imatrix(path, model=model, process_output=process_output, hardly=hardly)
    imatrix, covered, figures = contents.imatrix, contents.coverage, contents.statistics
    if plot is not None:
        with atomic_write(plot) as part:
            part.write_bytes(draw(figure_of(imatrix, covered, figures), kind))
    json_to.print(
        lambda: _text(imatrix, covered, figures, per_tensor=per_tensor), lambda: _as_dict(imatrix, covered, figures)
    )
    if require_coverage is not None:
        covered.check(require_coverage)


def _text(imatrix: Imatrix, covered: Coverage, figures: Statistics, *, per_tensor: bool) -> str:
    parts = ["\n".join(_summary(imatrix, covered))]
    parts.append("By class\n" + coverage_table("class", covered.by_class()))
    parts.append("By layer\n" + coverage_table("layer", covered.by_layer()))
    parts += findings(covered, full=per_tensor)
    if per_tensor and figures.tensors:
        parts.append("Statistics of weights\n" + _tensor_table(figures))
    if figures.layers:
        parts.append("Statistics of layers\n" + _layer_table(figures))
    warning = held_out_warning(imatrix.path, imatrix.extra)
    notes = [] if warning is None else [printable(warning)]
    notes += format_list([f"note: {printable(note)}" for note in figures.notes], 0, full=per_tensor)
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _summary(imatrix: Imatrix, covered: Coverage) -> Iterator[str]:
    experts = sum(t.experts for t in covered.tensors)
    yield f"file      {printable(str(imatrix.path))} ({'GGUF' if imatrix.format == 'gguf' else '.dat'})"
    yield f"datasets  {shorten(printable(', '.join(imatrix.datasets)), 100) or '-'}"
    yield from _texts(imatrix)
    size = f" of {imatrix.chunk_size} tokens" if imatrix.chunk_size else ""
    yield f"chunks    {imatrix.chunk_count}{size}"
    yield f"entries   {len(imatrix.entries)}" + (f", with {experts} experts" if experts else "")
    fills = filled_experts(imatrix)
    if FILL_KEY in imatrix.extra:
        n = sum(map(len, fills.values()))
        yield f"fill      {one_line(imatrix.extra[FILL_KEY].value)}: {n} experts, counted as without tokens here"
    scope = (
        "of the entries that the model needs"
        if covered.of_model
        else "of its own entries (-m MODEL shows what is missing)"
    )
    yield f"coverage  {100 * covered.share:.2f} % {scope}"
    if covered.of_model and not covered.share:
        yield "          no entry matches a tensor of the model: this importance matrix belongs to another model"


def _texts(imatrix: Imatrix) -> Iterator[str]:
    """Yield hashes of the texts, and the held-out parts of their corpora."""
    texts, held_out = sketch_of(imatrix), read_held_out(imatrix.path, imatrix.extra)
    if texts is not None:
        yield f"texts     sha256 {', '.join(digest[:16] for digest in texts.sha256)}"
    if held_out is not None:
        yield f"held out  {shorten(printable(', '.join(held_out.files)), 100)}"


# --- coverage; imatrix_collect prints the same ---


def coverage_table(kind: str, groups: Sequence[CoverageGroup]) -> str:
    """Return the table of coverage by ``kind``: class or layer."""
    rows = [
        (
            shorten(printable(g.name), _NAME),
            g.present if g.expected is None else f"{g.present} of {g.expected}",
            *((g.experts, g.never, g.hardly) if g.experts else ("", "", "")),
            "-" if g.tokens_min is None else g.tokens_min,
            "-" if g.tokens_median is None else f"{g.tokens_median:.0f}",
            g.bad_values,
        )
        for g in groups
    ]
    header = [kind, "present", "experts", "never hit", "hardly hit", "tokens min", "tokens median", "bad values"]
    return table(header, rows)


def findings(covered: Coverage, *, full: bool = False) -> list[str]:
    """Return one paragraph for each kind of problem."""
    paragraphs = {
        "weights without an entry": [t.name for t in covered.missing],
        "weights that use the entry of another": [f"{t.name}: {t.notes[0]}" for t in covered.aliased],
        "entries that match no weight of the model": [t.name for t in covered.strangers],
        "experts without tokens": [f"{t.name}: {_experts(t.counts == 0)}" for t in covered.tensors if t.never],
        "entries of zeros only, which make a quantization unusable": [
            f"{t.name}: {t.zeros} of {t.experts} experts" if t.experts else t.name for t in covered.tensors if t.zeros
        ],
        "values that cannot be means of squares (NaN, Inf, negative)": [
            f"{t.name}: {t.bad_values}, first in matrix {t.bad_expert}" for t in covered.tensors if t.bad_values
        ],
    }
    return [
        "\n".join([f"{title}: {len(lines)}", *format_list(map(printable, lines), 2, full=full)])
        for title, lines in paragraphs.items()
        if lines
    ]


def _experts(mask: Any) -> str:
    numbers = [i for i, flag in enumerate(mask) if flag]
    if len(mask) == 1:
        return "none"
    omitted = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"{len(numbers)} of {len(mask)} ({', '.join(map(str, numbers[:16]))}{omitted})"


# --- statistics ---


def _number(value: float, digits: int = 4) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _tensor_table(figures: Statistics) -> str:
    l2 = figures.of_activations
    header = ["Layer", "Tensor", "Mean", "StdDev", "Skew", "Kurt", "H Norm", "∑ E[A²]", "Gain", "L2 Dist", "PCC", "Cov"]
    return table(header, [_tensor_row(t, l2) for t in figures.tensors], left=(1,))


def _tensor_row(t: TensorStatistics, l2: bool) -> list[str]:
    name = printable(t.name)
    return [
        t.label,
        name if len(name) <= _NAME else f"..{name[2 - _NAME :]}",
        *map(_number, (t.mean, t.std_deviation, t.skewness, t.kurtosis)),
        f"{_number(t.h_norm, 2)}%",
        _number(t.sum_sq),
        _number(t.gain, 2),
        _number(t.l2_dist) if l2 else "",
        _number(t.pearson),
        _number(t.covariance),
    ]


def _layer_table(figures: Statistics) -> str:
    l2 = figures.of_activations
    header = ["Layer", "∑ E[A²]", "Gain", "L2 Dist", "CosSim", "PCC", "Cov"]
    return table(header, [_layer_row(layer, l2) for layer in figures.layers], left=())


def _layer_row(layer: LayerStatistics, l2: bool) -> list[str]:
    return [
        layer.label,
        _number(layer.sum_sq),
        _number(layer.gain, 2),
        _number(layer.l2_dist) if l2 else "",
        *map(_number, (layer.cossim, layer.pearson, layer.covariance)),
    ]


# --- JSON ---


def _as_dict(imatrix: Imatrix, covered: Coverage, figures: Statistics) -> dict[str, Any]:
    return {
        "path": str(imatrix.path),
        "format": imatrix.format,
        "sha256": imatrix.sha256,
        "datasets": imatrix.datasets,
        "chunk_count": imatrix.chunk_count,
        "chunk_size": imatrix.chunk_size or None,
        "entries": len(imatrix.entries),
        "fill": imatrix.extra[FILL_KEY].value if FILL_KEY in imatrix.extra else None,
        "coverage": {
            "share": covered.share,
            "of_model": covered.of_model,
            "hardly": covered.hardly,
            "classes": [asdict(g) for g in covered.by_class()],
            "layers": [asdict(g) for g in covered.by_layer()],
            "missing": [t.name for t in covered.missing],
            "strangers": [t.name for t in covered.strangers],
            "tensors": [
                {
                    "name": t.name,
                    "expected": t.expected,
                    "entry": t.entry,
                    "tokens": None if t.estimated else t.counts.tolist(),
                    "experts_never_hit": t.never if t.experts else 0,
                    "experts_hardly_hit": t.hardly if t.experts else 0,
                    "bad_values": t.bad_values,
                    "zeros": t.zeros,
                    "notes": list(t.notes),
                }
                for t in covered.tensors
            ],
        },
        "statistics": {
            "of_activations": figures.of_activations,
            "tensors": [_plain(t, ("pair",)) for t in figures.tensors],
            "layers": [_plain(layer, ()) for layer in figures.layers],
            "notes": list(figures.notes),
        },
    }


def _plain(item: TensorStatistics | LayerStatistics, without: Sequence[str]) -> dict[str, Any]:
    return {key: json_value(value) for key, value in vars(item).items() if key not in without}
