"""What ``quantkit merge-up-gate`` and ``quantkit split-up-gate`` share: options, the run, the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quantkit.cli.options import SIZE, echo_notes, option
from quantkit.cli.summary import RunReport
from quantkit.errors import QuantkitError
from quantkit.formats.imatrix import Imatrix, write_imatrix
from quantkit.helpers import format_seconds, format_size
from quantkit.merge import MergePlan, run_merge
from quantkit.pipeline.regroup import layer_names
from quantkit.pipeline.run import RunResult

_FILES, _RUN, _OUT = "Files", "The run", "Output"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def shared_options(function: Any) -> Any:
    """Declare the options both commands have."""
    for decorate in reversed(
        (
            click.argument("source", metavar="IN.gguf"),
            click.argument("output", metavar="OUT.gguf"),
            option("--keep-split", group=_FILES, is_flag=True, help="One output shard per input shard."),
            option("--split-max-size", group=_FILES, type=SIZE, help="Begin a new shard beyond this size (48G)."),
            option("--imatrix", group=_FILES, type=_FILE, help="Rename the entries of this importance matrix, too ..."),
            option("--imatrix-out", group=_FILES, type=click.Path(path_type=Path), help="... and write it here."),
            option("-j", "--threads", group=_RUN, type=click.IntRange(1), help="Worker threads; without: all CPUs."),
            option("--max-ram", group=_RUN, type=SIZE, default="512MiB", show_default=True, help="For all buffers."),
            option("--resume", group=_RUN, is_flag=True, help="Go on with an interrupted run."),
            option("--overwrite", group=_RUN, is_flag=True, help="Replace an existing output."),
            option("--dry-run", group=_OUT, is_flag=True, help="Say what would be done, and stop."),
            option("--json", "as_json", group=_OUT, is_flag=True, help="Print the summary as JSON."),
        )
    ):
        function = decorate(function)
    return function


def carry_out(
    merge: MergePlan,
    convert_imatrix: Callable[[Path], Imatrix],
    *,
    imatrix: Path | None,
    imatrix_out: Path | None,
    threads: int | None,
    max_ram: int,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run a merge plan, convert the importance matrix along with it, and print the report."""
    if (imatrix is None) != (imatrix_out is None):
        raise click.UsageError("--imatrix and --imatrix-out go together")
    if imatrix_out is not None and imatrix_out.exists() and not overwrite:
        raise QuantkitError(f"{imatrix_out} exists; give another name, or --overwrite to replace it")
    converted = convert_imatrix(imatrix) if imatrix is not None else None
    echo_notes(merge.plan.notes)
    result = None if dry_run else _run(merge, threads, max_ram, resume, overwrite, as_json)
    if converted is not None and imatrix_out is not None and not dry_run:
        write_imatrix(imatrix_out, converted, converted.format)
    click.echo(json.dumps(_as_dict(merge, result), indent=2) if as_json else _text(merge, result, imatrix_out))


def _run(merge: MergePlan, threads: int | None, max_ram: int, resume: bool, overwrite: bool, quiet: bool) -> RunResult:
    part = f"{merge.plan.shards[0].path}.part"
    report = RunReport(merge.plan, quiet=quiet)
    try:
        with report:
            return run_merge(
                merge, threads=threads, max_ram=max_ram, resume=resume, overwrite=overwrite, observer=report
            )
    except KeyboardInterrupt:
        click.echo(f"\ninterrupted; go on with the same command and --resume ({part})", err=True)
        sys.exit(130)
    except OSError as e:
        raise QuantkitError(f"{e.filename or part}: {e.strerror or e}; go on with --resume") from e


def _loads(merge: MergePlan) -> str:
    return ", ".join(f"{name}: {'yes' if loads else 'no'}" for name, loads in merge.loads_merged.items())


def _text(merge: MergePlan, result: RunResult | None, imatrix_out: Path | None) -> str:
    layers = layer_names(merge.changed)
    changed = sum(t.nbytes for t in merge.plan.tensors if t.reason != "copied")
    lines = [
        f"{merge.plan.title}: {len(merge.changed)} layers ({layers}), {format_size(changed)};"
        f" {len(merge.refused)} left alone",
        f"merged experts of this architecture load in: {_loads(merge)}",
        *(f"{shard.path}: {shard.layout.nbytes} bytes" for shard in merge.plan.shards),
    ]
    if imatrix_out is not None:
        lines.append(f"importance matrix: {imatrix_out}")
    return "\n".join(
        [*lines, f"written in {format_seconds(result.seconds)}" if result else "dry run: nothing was written"]
    )


def _as_dict(merge: MergePlan, result: RunResult | None) -> dict[str, Any]:
    return {
        "command": merge.plan.title,
        "files": [{"path": str(s.path), "bytes": s.layout.nbytes} for s in merge.plan.shards],
        "layers": [{"prefix": layer.prefix, "made": [j.name for j in layer.made]} for layer in merge.changed],
        "left_alone": [{"prefix": layer.prefix, "reason": layer.refusal} for layer in merge.refused],
        "loads_merged": dict(merge.loads_merged),
        "written": result is not None,
        "seconds": result.seconds if result else None,
    }
