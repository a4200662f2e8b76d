"""``quantkit imatrix diff``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import DiffError, GroupedCommand, json_value, option, setting
from quantkit.cli._paths import IMATRIX, MODEL
from quantkit.cli._table import format_list, table
from quantkit.errors import QuantkitError
from quantkit.imatrix import Difference, TensorDifference, diff_imatrix
from quantkit.names import printable, shorten

_SCOPE, _OUT = "Comparison", "Output"
#: Rows of the table without --per-tensor; widest name.
_ROWS, _NAME = 12, 48


@click.command("diff", cls=GroupedCommand, short_help="Compare two files, weight by weight.")
@click.argument("a", metavar="A", type=IMATRIX)
@click.argument("b", metavar="B", type=IMATRIX)
@option("-m", "--model", group=_SCOPE, type=MODEL, help="Model, for the numbers of experts of a .dat.")
@setting(
    "--min-tokens",
    group=_SCOPE,
    type=click.IntRange(1),
    default=1,
    help="Skip experts with fewer tokens in either file.",
)
@option("--fail-above", group=_OUT, type=float, metavar="X", help="Exit with 1 above this relative difference.")
@option("--per-tensor", group=_OUT, is_flag=True, help="List every weight, not only the most different.")
@json_option()
def diff(
    a: Path,
    b: Path,
    model: Path | None,
    min_tokens: int,
    fail_above: float | None,
    per_tensor: bool,
    json_to: JsonOutput,
) -> None:
    """Compare two importance matrices of either format by their mean squares.

    The relative difference is |A - B| / |A| over the experts that have tokens in
    both files; "worst expert" is the one that differs most. Counts are compared if
    both files have them.

    Exit code 0; 1 with --fail-above if a matrix or an expert differs by more, or
    is in one file only; 2 for wrong usage or a file that cannot be read. `imatrix
    compare` is the same command.

    \b
    quantkit imatrix diff llama.cpp.gguf quantkit.gguf
    quantkit imatrix diff --min-tokens 1000 --fail-above 0.01 old.gguf new.gguf
    """
    try:
        result = diff_imatrix(a, b, model=model, min_tokens=min_tokens)
    except QuantkitError as e:
        raise DiffError(e) from e
    beyond = [] if fail_above is None else result.beyond(fail_above)
    json_to.print(
        lambda: _text(a, b, result, beyond, fail_above, per_tensor=per_tensor),
        lambda: _as_dict(a, b, result, beyond),
    )
    sys.exit(1 if beyond else 0)


def _text(a: Path, b: Path, result: Difference, beyond: Sequence[str], limit: float | None, *, per_tensor: bool) -> str:
    parts = [f"A  {printable(str(a))}\nB  {printable(str(b))}"]
    for side, only in (("A", result.only_a), ("B", result.only_b)):
        if only:
            names = format_list(map(printable, only), 2, full=per_tensor)
            parts.append("\n".join([f"only in {side}: {len(only)}", *names]))
    tensors = result.tensors if per_tensor else sorted(result.tensors, key=_badness)[:_ROWS]
    if tensors:
        parts.append(_table(tensors))
    if len(tensors) < len(result.tensors):
        parts.append(
            f"{len(tensors)} of {len(result.tensors)} weights, the most different ones (--per-tensor lists all)"
        )
    parts.append(_verdict(result, beyond, limit, full=per_tensor))
    return "\n\n".join(parts)


def _badness(t: TensorDifference) -> tuple[float, str]:
    return (-math.inf if math.isnan(t.figure) else -t.figure, t.name)


def _table(tensors: Sequence[TensorDifference]) -> str:
    header = ["weight", "rel. difference", "cosine", "worst expert", "tokens A", "tokens B", "counts", "remarks"]
    rows = [
        (
            shorten(printable(t.name), _NAME),
            _figure(t.relative),
            "-" if math.isnan(t.cosine) else f"{t.cosine:.6f}",
            "" if t.worst is None else f"{t.worst}: {_figure(t.worst_relative)}",
            "-" if t.tokens_a is None else t.tokens_a,
            "-" if t.tokens_b is None else t.tokens_b,
            "-" if t.counts is None else _figure(t.counts),
            _remarks(t),
        )
        for t in tensors
    ]
    return table(header, rows, left=(0, 7))


def _figure(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.3g}"


def _remarks(t: TensorDifference) -> str:
    remarks = [t.note] if t.note else []
    if t.n_skipped and not t.note:
        remarks.append(f"{t.n_skipped} experts skipped")
    if t.one_sided:
        remarks.append(f"{t.one_sided} empty in one file only")
    return "; ".join(remarks)


def _verdict(result: Difference, beyond: Sequence[str], limit: float | None, *, full: bool) -> str:
    figures = [t.figure for t in result.tensors if not math.isnan(t.figure)]
    largest = f"largest relative difference {_figure(max(figures))}" if figures else "nothing to compare"
    if limit is None:
        return f"{len(result.tensors)} weights in both files; {largest}"
    if not beyond:
        return f"{len(result.tensors)} weights in both files, all within {limit:g}; {largest}"
    return "\n".join([f"beyond {limit:g}: {len(beyond)}", *format_list(map(printable, beyond), 2, full=full)])


def _as_dict(a: Path, b: Path, result: Difference, beyond: Sequence[str]) -> dict[str, Any]:
    return {
        "a": str(a),
        "b": str(b),
        "only_in_a": list(result.only_a),
        "only_in_b": list(result.only_b),
        "beyond": list(beyond),
        "tensors": [
            {
                "name": t.name,
                "relative": json_value(t.relative),
                "cosine": json_value(t.cosine),
                "worst_expert": t.worst,
                "worst_relative": json_value(t.worst_relative),
                "tokens_a": t.tokens_a,
                "tokens_b": t.tokens_b,
                "counts": t.counts,
                "experts_left_out": t.n_skipped,
                "experts_in_one_file_only": t.one_sided,
                "note": t.note or None,
            }
            for t in result.tensors
        ],
    }
