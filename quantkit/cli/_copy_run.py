"""Options, run and report of commands that copy tensors into other files: ``split``, ``join``, ``prune-experts``, .."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import echo_notes, option, options, plan_options, spool_option
from quantkit.cli._run_report import RunReport, dry_run_line, nodes_line
from quantkit.names import printable
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import refusal
from quantkit.split import run_split
from quantkit.units import format_seconds, format_size


def copy_options(*, delete: str = "") -> Callable[[Any], Any]:
    """Declare the options that these commands share; ``delete``: the help of --delete-source, if they have it."""
    delete_source = [option("--delete-source", group="Files", is_flag=True, help=delete)] * bool(delete)
    return options(*delete_source, spool_option, plan_options, json_option())


def run_copy_plan(
    plan: Plan,
    *,
    dry_run: bool,
    json_to: JsonOutput,
    delete_source: bool = False,
    summary: Sequence[str] = (),
    record: Mapping[str, Any] | None = None,
    **run: Any,
) -> None:
    """Carry out a plan, and print the files; before them ``summary``, or for JSON also ``record``."""
    refused = refusal(plan, resume=run["resume"], overwrite=run["overwrite"]) if dry_run else None
    echo_notes(plan.notes)
    result = None
    if not dry_run:
        report = RunReport(plan, quiet=json_to.only)
        with report.show_progress("continue with --resume"):
            result = run_split(plan, delete_source=delete_source, observer=report, **run)
    verb = "would write" if dry_run else "wrote"
    lines = [*summary]
    lines += [
        f"{verb} {printable(shard.path)}: {len(tensors)} tensors, {format_size(shard.layout.nbytes)}"
        for shard, tensors in zip(plan.shards, _tensors(plan), strict=True)
    ]
    if dry_run:
        lines.append(dry_run_line(refused))
    elif result is not None:
        lines.append("already complete" if result.was_complete else f"{format_seconds(result.seconds)}")
        lines += nodes_line(result)
        lines += [f"deleted {printable(path)}" for path in plan.source.paths if delete_source]
    json_to.print(
        lambda: "\n".join(lines),
        lambda: {
            **(record or {}),
            "command": plan.title,
            "files": [
                {"path": str(shard.path), "bytes": shard.layout.nbytes, "tensors": len(tensors)}
                for shard, tensors in zip(plan.shards, _tensors(plan), strict=True)
            ],
            "written": result is not None,
            "deleted": [str(path) for path in plan.source.paths] if delete_source and result is not None else [],
            "refused": refused,
            "seconds": result.seconds if result else None,
        },
    )


def _tensors(plan: Plan) -> list[list[str]]:
    """Return the names of the tensors in each file."""
    names: list[list[str]] = [[] for _ in plan.shards]
    for tensor in plan.tensors:
        names[tensor.shard].append(tensor.name)
    return names
