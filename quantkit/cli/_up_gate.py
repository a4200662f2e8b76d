"""Options, run and report shared by ``quantkit merge-up-gate`` and ``quantkit split-up-gate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import SHARD_SIZE, claim, echo_notes, option, options, plan_options, spool_option
from quantkit.cli._paths import IMATRIX, IMATRIX_FILE, MODEL
from quantkit.cli._run_report import RunReport, cache_dict, cache_lines, dry_run_line, nodes_line
from quantkit.formats.imatrix import Imatrix, write_imatrix
from quantkit.formats.outputs import check_apart
from quantkit.merge import MergePlan, run_merge
from quantkit.names import printable
from quantkit.pipeline.regroup import layer_names
from quantkit.pipeline.run import RunResult, forecast_cache, refusal
from quantkit.units import format_seconds, format_size

_FILES = "Files"


#: The options of both commands.
shared_options = options(
    click.argument("source", metavar="IN.gguf", type=MODEL),
    click.argument("output", metavar="OUT.gguf", type=MODEL),
    option("--keep-split", group=_FILES, is_flag=True, help="Write one output shard per input shard."),
    option("--split-max-size", group=_FILES, type=SHARD_SIZE, help="Maximum size of a shard (48G)."),
    option("--imatrix", group=_FILES, type=IMATRIX_FILE, help="Importance matrix to rename the entries of."),
    option("--imatrix-out", group=_FILES, type=IMATRIX, help="Output file of the renamed importance matrix."),
    spool_option,
    plan_options,
    json_option(),
)


def run_merge_plan(
    merge: MergePlan,
    convert_imatrix: Callable[[Path], Imatrix],
    *,
    imatrix: Path | None,
    imatrix_out: Path | None,
    dry_run: bool,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Run a merge plan, convert the importance matrix, and print the report."""
    if (imatrix is None) != (imatrix_out is None):
        raise click.UsageError("give both --imatrix and --imatrix-out, or neither")
    plan = merge.plan
    check_apart([imatrix_out, *(shard.path for shard in plan.shards)], [imatrix, *plan.source.paths])
    refused = refusal(plan, imatrix_out, resume=run["resume"], overwrite=run["overwrite"]) if dry_run else None
    imatrix_path = None if imatrix_out is None or dry_run else claim(imatrix_out, overwrite=run["overwrite"])
    converted = convert_imatrix(imatrix) if imatrix is not None else None
    echo_notes(plan.notes)
    result = None
    if not dry_run:
        report = RunReport(plan, quiet=json_to.only)
        with report.show_progress("continue with --resume"):
            result = run_merge(merge, observer=report, **run)
        echo_notes(result.cache.notes if result.cache is not None else ())
    cache = forecast_cache(plan, run.get("cache")) if result is None else result.cache
    if converted is not None and imatrix_path is not None:
        write_imatrix(imatrix_path, converted, converted.format)
    json_to.print(
        lambda: "\n".join([*_lines(merge, imatrix_out), *cache_lines(cache, dry=dry_run), _end(result, refused)]),
        lambda: _as_dict(merge, result) | {"refused": refused} | cache_dict(cache),
    )


def _loads(merge: MergePlan) -> str:
    return ", ".join(f"{name}: {'yes' if loads else 'no'}" for name, loads in merge.loads_merged.items())


def _end(result: RunResult | None, refused: str | None) -> str:
    if result is None:
        return dry_run_line(refused)
    if result.was_complete:
        return "already complete"
    return "\n".join([f"written in {format_seconds(result.seconds)}", *nodes_line(result)])


def _lines(merge: MergePlan, imatrix_out: Path | None) -> list[str]:
    layers = layer_names(merge.changed)
    changed = sum(t.nbytes for t in merge.plan.tensors if not all(part.is_whole for part in t.parts))
    lines = [
        f"{merge.plan.title}: {len(merge.changed)} layers ({layers}), {format_size(changed)};"
        f" {len(merge.refused)} unchanged",
        f"merged experts of this architecture load in: {_loads(merge)}",
        *(f"{printable(shard.path)}: {shard.layout.nbytes} bytes" for shard in merge.plan.shards),
    ]
    if imatrix_out is not None:
        lines.append(f"importance matrix: {printable(imatrix_out)}")
    return lines


def _as_dict(merge: MergePlan, result: RunResult | None) -> dict[str, Any]:
    return {
        "command": merge.plan.title,
        "files": [{"path": str(s.path), "bytes": s.layout.nbytes} for s in merge.plan.shards],
        "layers": [{"prefix": layer.prefix, "made": [j.name for j in layer.outputs]} for layer in merge.changed],
        "left_alone": [{"prefix": layer.prefix, "reason": layer.refusal} for layer in merge.refused],
        "loads_merged": dict(merge.loads_merged),
        "written": result is not None,
        "seconds": result.seconds if result else None,
    }
