"""The tables of ``quantkit kld``: a row per file, the differences between files, texts and positions; or per text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from quantkit.activations import MEANINGS
from quantkit.cli._table import table
from quantkit.evaluate import Comparison, ModelDivergence, TextKlds
from quantkit.evaluate.statistics import MIN_TOKENS, KldSums
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

_STATISTICS = ("KLD", "± error", "PPL ratio", "top-1 %", "99 % below")


def comparison_text(result: Comparison) -> str:
    """Return the tables of a comparison."""
    lines = [_files(result)]
    if len(result.models) > 1 and result.n_windows > 1:
        lines += ["", _differences(result)]
    if len(result.texts) > 1:
        lines += ["", _texts(result)]
    if result.models[0].by_position:
        lines += ["", _positions(result)]
    return "\n".join([*lines, "", *_remarks(result)])


def texts_text(result: TextKlds) -> str:
    """Return the table of a comparison with several base files: a row per text, and the total."""
    parts = [(name, part.sums) for name, part in result.by_text]
    total = [("total", result.sums)] if len(parts) > 1 else []
    rows = [[printable(name), f"{sums.n}", *_statistics(sums)] for name, sums in (*parts, *total)]
    n_chunks = sum(part.n_chunks for _, part in result.by_text)
    lines = [table(["text", "tokens", *_STATISTICS], rows, droppable=(1, 4)), ""]
    lines.append(f"{result.sums.n} tokens scored in {n_chunks} chunks, {format_seconds(result.seconds)}")
    if result.sums.bound:
        lines.append(_bound_line(result.sums.bound / result.sums.n))
    return "\n".join([*lines, MEANINGS[result.activations]])


def _bound_line(bound: float) -> str:
    return f"A part of the vocabulary is estimated: each KLD is off by at most {bound:.6f}."


def _files(result: Comparison) -> str:
    rows = []
    for model in result.models:
        value, *cells = _statistics(model.sums)
        interval = [] if result.stop is None else [_interval(model.mean.interval(result.alpha), "")]
        size = [format_size(model.nbytes), f"{model.bpw:.2f}"]
        rows.append([printable(model.model.name), *size, value, *(interval or cells[:1]), *cells[1:]])
    value, error, *names = _STATISTICS
    header = ["file", "size", "bpw", value, error if result.stop is None else "95 % interval", *names]
    return table(header, rows, droppable=(2, 5))


def _interval(ends: tuple[float, float], sign: str) -> str:
    return f"{ends[0]:{sign}.5f} to {ends[1]:{sign}.5f}"


def _statistics(sums: KldSums) -> list[str]:
    value, error = sums.kld.mean
    cells = [f"{value:.5f}", f"{error:.5f}", f"{sums.ratio.value:.4f}", f"{100 * sums.same_top_p.value:.2f}"]
    return [*cells, f"{sums.kld_distribution()['99.0%']:.3f}" if sums.n >= MIN_TOKENS else "-"]


def _differences(result: Comparison) -> str:
    """Return the difference of each file to the next better one."""
    rows = []
    for better, model in pairwise(result.ranking):
        difference = model.minus(better)
        cells = [printable(model.model.name), printable(better.model.name), f"{difference.value:+.5f}"]
        rows.append([*cells, _interval(difference.interval(result.alpha), "+")])
    return table(["file", "next better", "difference", "95 % interval"], rows, left=2)


def _texts(result: Comparison) -> str:
    rows = []
    for number, (name, _) in enumerate(result.texts):
        rows += [_part(name, model, model.by_text[number]) for model in result.models]
    return table(["text", "file", "tokens", *_STATISTICS], rows, left=2, droppable=(2, 5))


def _positions(result: Comparison) -> str:
    rows = []
    for first, end in result.models[0].by_position:
        name = f"{first} to {end - 1}"
        rows += [_part(name, model, model.by_position[first, end]) for model in result.models]
    return table(["position", "file", "tokens", *_STATISTICS], rows, left=2, droppable=(2, 5))


def _part(name: str, model: ModelDivergence, sums: KldSums) -> Sequence[str]:
    cells = [printable(name), printable(model.model.name), f"{sums.n}"]
    return [*cells, *(_statistics(sums) if sums.n else ["-"] * len(_STATISTICS))]


def _remarks(result: Comparison) -> Iterator[str]:
    n = result.models[0].sums.n
    yield f"{n} tokens scored in {result.n_windows} chunks, {format_seconds(result.seconds)}"
    bound = max(model.bound for model in result.models)
    if bound:
        yield _bound_line(bound)
    stop = result.stop
    if stop is not None:
        verb = "within" if stop.is_met else "the text ended before all were within"
        yield f"95 % intervals, valid for {len(stop.looks)} looks: {verb} {100 * stop.share:g} % of the mean."
    yield MEANINGS[result.activations]
