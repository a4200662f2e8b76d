"""``quantkit imatrix diff``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli.options import GroupedCommand, json_value, option, table
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.helpers import printable, shorten
from quantkit.imatrix import Difference, TensorDifference, difference, expert_counts

_WHAT, _OUT = "What is compared", "Output"
_FILE = click.Path(path_type=Path)
#: Rows of the table that --per-tensor does not shorten; widest name.
_ROWS, _NAME = 12, 48


@click.command("diff", cls=GroupedCommand, short_help="Compare two, weight by weight.")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@option("-m", "--model", group=_WHAT, type=_FILE, help="The model: tells a .dat's numbers of experts.")
@option(
    "--min-tokens",
    group=_WHAT,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Leave out experts with fewer tokens in either file.",
)
@option("--fail-above", group=_OUT, type=float, metavar="X", help="Exit code 1 beyond this relative difference.")
@option("--per-tensor", group=_OUT, is_flag=True, help="List every weight, not only those that differ most.")
@option("--json", "as_json", group=_OUT, is_flag=True, help="Print everything as JSON.")
def diff(
    a: Path, b: Path, model: Path | None, min_tokens: int, fail_above: float | None, per_tensor: bool, as_json: bool
) -> None:
    """Compare two importance matrices, of any format, by what an encoder sees: means of squares.

    The relative difference is |A - B| / |A| over the experts with tokens in both; "worst expert" is the expert whose
    own is the largest. Counts are compared where both files have them.

    Exit code: 0, or with --fail-above 1 when a weight or an expert differs by more than that, or only one file has
    it; 2 wrong usage or a file that cannot be read.

    \b
    quantkit imatrix diff llama.cpp.gguf ours.gguf
    quantkit imatrix diff --min-tokens 1000 --fail-above 0.01 llama.cpp.gguf ours.gguf
    """
    try:
        one, two = read_imatrix(a), read_imatrix(b)
        experts = {}
        if model is not None:
            with open_gguf(model) as file:
                experts = expert_counts(one.entries.keys() | two.entries.keys(), file.tensors.values())
        found = difference(one, two, min_tokens=min_tokens, experts=experts)
    except QuantkitError as e:
        raise _Trouble(e.message) from e
    beyond = [] if fail_above is None else found.beyond(fail_above)
    if as_json:
        click.echo(json.dumps(_as_dict(a, b, found, beyond), indent=2, allow_nan=False))
    else:
        click.echo(_text(a, b, found, beyond, fail_above, per_tensor=per_tensor))
    sys.exit(1 if beyond else 0)


class _Trouble(click.ClickException):
    """An error, told apart from a difference by its exit code, as diff does."""

    exit_code = 2


def _text(a: Path, b: Path, found: Difference, beyond: Sequence[str], limit: float | None, *, per_tensor: bool) -> str:
    parts = [f"A  {printable(str(a))}\nB  {printable(str(b))}"]
    for side, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            shown = only if per_tensor else only[:_ROWS]
            more = [f"  and {len(only) - len(shown)} more"] if len(only) > len(shown) else []
            parts.append("\n".join([f"only in {side}: {len(only)}", *(f"  {printable(n)}" for n in shown), *more]))
    tensors = found.tensors if per_tensor else sorted(found.tensors, key=_badness)[:_ROWS]
    if tensors:
        parts.append(_table(tensors))
    if len(tensors) < len(found.tensors):
        parts.append(
            f"{len(tensors)} of {len(found.tensors)} weights, the most different ones (--per-tensor lists all)"
        )
    parts.append(_verdict(found, beyond, limit))
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
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.3g}"


def _remarks(t: TensorDifference) -> str:
    remarks = [t.note] if t.note else []
    if t.skipped and not t.note:
        remarks.append(f"{t.skipped} experts left out")
    if t.one_sided:
        remarks.append(f"{t.one_sided} empty in one file only")
    return "; ".join(remarks)


def _verdict(found: Difference, beyond: Sequence[str], limit: float | None) -> str:
    figures = [t.figure for t in found.tensors if not math.isnan(t.figure)]
    largest = f"largest relative difference {_figure(max(figures))}" if figures else "nothing could be compared"
    if limit is None:
        return f"{len(found.tensors)} weights in both files; {largest}"
    if not beyond:
        return f"{len(found.tensors)} weights in both files, all within {limit:g}; {largest}"
    more = f"\n  and {len(beyond) - _ROWS} more" if len(beyond) > _ROWS else ""
    return "\n  ".join([f"beyond {limit:g}: {len(beyond)}", *map(printable, beyond[:_ROWS])]) + more


def _as_dict(a: Path, b: Path, found: Difference, beyond: Sequence[str]) -> dict[str, Any]:
    return {
        "a": str(a),
        "b": str(b),
        "only_in_a": list(found.only_a),
        "only_in_b": list(found.only_b),
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
                "experts_left_out": t.skipped,
                "experts_in_one_file_only": t.one_sided,
                "note": t.note or None,
            }
            for t in found.tensors
        ],
    }
