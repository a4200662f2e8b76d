"""``quantkit compare``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._metadata_diff import describe_change, field_dict, key_name
from quantkit.cli._options import (
    DiffError,
    GroupedCommand,
    echo_notes,
    json_value,
    option,
    threads_option,
)
from quantkit.cli._paths import IMATRIX, MODEL
from quantkit.cli._progress import Bar
from quantkit.cli._table import fold, format_list, table
from quantkit.compare import (
    ClassComparison,
    Comparison,
    ErrorOfB,
    TensorComparison,
    compare,
)
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import TensorInfo
from quantkit.names import printable
from quantkit.units import format_shape, format_size

_SCOPE, _OUT = "Comparison", "Output"


@click.command("compare", cls=GroupedCommand)
@click.argument("a", metavar="A", type=MODEL)
@click.argument("b", metavar="B", type=MODEL)
@option("--metadata-only", group=_SCOPE, is_flag=True, help="Skip the tensors.")
@option("--tensors-only", group=_SCOPE, is_flag=True, help="Skip the metadata.")
@option("--ignore-metadata", group=_SCOPE, multiple=True, metavar="REGEX", help="Metadata keys to ignore; repeatable.")
@option("--tensors", group=_SCOPE, metavar="REGEX", help="Only tensors whose names match REGEX.")
@option("--no-error", group=_SCOPE, is_flag=True, help="Compare bytes only, without decoding.")
@option("--imatrix", group=_SCOPE, type=IMATRIX, help="Also report the error weighted by this importance matrix.")
@threads_option
@option("--per-tensor", group=_OUT, is_flag=True, help="List every tensor, not only classes.")
@json_option()
def command(
    a: Path,
    b: Path,
    metadata_only: bool,
    tensors_only: bool,
    ignore_metadata: tuple[str, ...],
    tensors: str | None,
    no_error: bool,
    imatrix: Path | None,
    threads: int | None,
    per_tensor: bool,
    json_to: JsonOutput,
) -> None:
    """Compare two GGUF models: metadata, shapes, types, bytes, and error of B.

    Split models are compared as a whole; shards, tensor order, padding and GGUF
    version are ignored. The relative error is sqrt(sum (A - B)^2 / sum A^2) over
    the tensors that differ, "max error" the largest |A - B|.

    Exit code as with diff: 0 nothing differs, 1 something does, 2 wrong usage or an unreadable file.
    """
    if metadata_only and (tensors_only or tensors is not None):
        raise click.UsageError(
            "--metadata-only and --tensors-only or --tensors are mutually exclusive: omit one of them"
        )
    try:
        with closing(Bar(quiet=json_to.only, unit="iB", unit_scale=True, unit_divisor=1024)) as bar:
            comparison = compare(
                a,
                b,
                metadata=not tensors_only,
                tensors=not metadata_only if tensors is None else tensors,
                error=not no_error,
                ignore_metadata=ignore_metadata,
                imatrix=imatrix,
                threads=threads or None,
                progress=lambda now: bar.update(*now),
            )
    except QuantkitError as e:
        raise DiffError(e) from e
    echo_notes(comparison.notes)
    json_to.print(lambda: _text(comparison, per_tensor=per_tensor), lambda: _as_dict(comparison))
    sys.exit(0 if comparison.identical else 1)


# --- text ---


def _text(comparison: Comparison, *, per_tensor: bool) -> str:
    parts = [f"A  {_paths(comparison.a)}\nB  {_paths(comparison.b)}"]
    if comparison.metadata is not None:
        parts.append("\n".join(_metadata_lines(comparison)))
    if comparison.tensors is not None:
        parts.append("\n".join(_tensor_lines(comparison, comparison.tensors, full=per_tensor)))
        if per_tensor and comparison.tensors:
            parts.append(_tensor_table(comparison.tensors))
        if comparison.total is not None:
            parts.append(_class_table(comparison.classes, comparison.total))
    if comparison.tensors is None:
        parts.append("the metadata is identical" if comparison.identical else "the metadata differs")
    else:
        subject = "the tensors" if comparison.metadata is None else "the models"
        parts.append(f"{subject} are identical" if comparison.identical else f"{subject} differ")
    return "\n\n".join(parts)


def _paths(paths: Sequence[Path]) -> str:
    suffix = f" and {len(paths) - 1} more shards" if len(paths) > 1 else ""
    return printable(str(paths[0])) + suffix


def _metadata_lines(comparison: Comparison) -> Iterator[str]:
    differences = comparison.metadata or ()
    kinds = Counter(d.kind for d in differences)
    counts = [
        f"{comparison.metadata_equal} keys are the same",
        *(f"{kinds[k]} {k}" for k in ("changed", "added", "removed")),
    ]
    ignored = f", {comparison.metadata_ignored} ignored" if comparison.metadata_ignored else ""
    yield f"metadata: {', '.join(counts)}{ignored}"
    for difference in sorted(differences, key=lambda d: ("changed", "added", "removed").index(d.kind)):
        yield fold(
            f"  {difference.kind:<7}  {key_name(difference.key)}: {describe_change(difference.a, difference.b)}", 11
        )


def _tensor_lines(comparison: Comparison, tensors: Sequence[TensorComparison], *, full: bool) -> Iterator[str]:
    kinds = Counter(t.difference for t in tensors)
    counts = [f"{kinds['']} identical", *(f"{kinds[k]} differ in {k}" for k in ("bytes", "type", "shape") if kinds[k])]
    yield f"tensors: {len(tensors)} in both files: {', '.join(counts)}"
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            yield f"  only in {side}: {len(only)}"
            yield from format_list(map(_tensor, only), 4, full=full)
    shapes = [t for t in tensors if t.difference == "shape"]
    if shapes:
        yield "  of different shape:"
        lines = [f"{key_name(t.name)}: {_dims(t.a)} {t.a.type} -> {_dims(t.b)} {t.b.type}" for t in shapes]
        yield from format_list(lines, 4, full=full)
    weighted = [t.error.weighted for t in tensors if t.error is not None]
    if any(weighted) and not all(weighted):
        yield f"  the importance matrix has entries for {sum(weighted)} of the {len(weighted)} tensors with an error"
    unmeasured = Counter(t.note for t in tensors if t.note and t.difference != "shape")
    for note, n in unmeasured.items():
        yield f"  no error for {n}: {note}"


def _dims(tensor: TensorInfo) -> str:
    return format_shape(tensor.shape)


def _tensor(tensor: TensorInfo) -> str:
    return f"{key_name(tensor.name)}: {_dims(tensor)} {tensor.type}, {format_size(tensor.nbytes)}"


def _percent(value: float) -> str:
    """Return a share in percent, with an exponent if it is too small for three decimals."""
    return f"{100 * value:.3f} %" if value == 0 or not abs(value) < 5e-5 else f"{100 * value:.2e} %"


_ERRORS = "rel. error", "max error", "weighted"


def _errors(error: ErrorOfB | None) -> tuple[str, str, str]:
    if error is None:
        return "", "", ""
    weighted = error.weighted_relative
    return _percent(error.relative), f"{error.largest:.3g}", "" if weighted is None else _percent(weighted)


def _tensor_table(tensors: Sequence[TensorComparison]) -> str:
    rows = [(key_name(t.name), t.types, t.difference or "identical", *_errors(t.error)) for t in tensors]
    return table(["tensor", "types", "differs in", *_ERRORS], rows, left=3)


def _class_table(classes: Sequence[ClassComparison], total: ClassComparison) -> str:
    rows = [
        (
            key_name(c.name),
            c.types,
            c.tensors,
            c.identical,
            *_errors(c.error),
            format_size(c.a_bytes),
            format_size(c.b_bytes),
        )
        for c in (*classes, *([total] if len(classes) > 1 else ()))
    ]
    return table(["class", "types", "tensors", "identical", *_ERRORS, "size A", "size B"], rows, left=2)


# --- JSON ---


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return everything, for JSON."""
    result: dict[str, Any] = {
        "a": [str(p) for p in comparison.a],
        "b": [str(p) for p in comparison.b],
        "identical": comparison.identical,
        "notes": list(comparison.notes),
    }
    if comparison.metadata is not None:
        result["metadata"] = {
            "same": comparison.metadata_equal,
            "ignored": comparison.metadata_ignored,
            "differences": [
                {"key": d.key, "kind": d.kind, "a": field_dict(d.a), "b": field_dict(d.b)} for d in comparison.metadata
            ],
        }
    if comparison.tensors is not None:
        result["only_in_a"] = [_info_dict(t) for t in comparison.only_a]
        result["only_in_b"] = [_info_dict(t) for t in comparison.only_b]
        result["total"] = _class_dict(comparison.total) if comparison.total is not None else None
        result["classes"] = [_class_dict(c) for c in comparison.classes]
        result["tensors"] = [
            {
                "name": t.name,
                "a": _info_dict(t.a),
                "b": _info_dict(t.b),
                "identical": t.identical,
                "differs_in": t.difference or None,
                "error": _error_dict(t.error),
                "note": t.note or None,
            }
            for t in comparison.tensors
        ]
    return result


def _info_dict(t: TensorInfo) -> dict[str, Any]:
    return {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.nbytes}


def _class_dict(c: ClassComparison) -> dict[str, Any]:
    return {
        "class": c.name,
        "types": c.types,
        "tensors": c.tensors,
        "identical": c.identical,
        "a_bytes": c.a_bytes,
        "b_bytes": c.b_bytes,
        "error": _error_dict(c.error),
    }


def _error_dict(error: ErrorOfB | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "relative": json_value(error.relative),
        "largest": json_value(error.largest),
        "weighted_relative": json_value(error.weighted_relative),
    }
