"""``quantkit export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quantkit.cli._options import SIZE, GroupedCommand, echo_notes, option, options, plan_options, setting
from quantkit.cli._paths import MODEL_FILE, Place
from quantkit.cli._table import table
from quantkit.cpus import available_cpus

_CHECKPOINT = "Checkpoint"


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the supported architectures and exit."""
    from quantkit.export import exported_classes

    if value:
        rows = [(arch, ", ".join(classes)) for arch, classes in exported_classes().items()]
        click.echo(table(["architecture", "classes of transformers"], rows, left=2))
        ctx.exit()


_export_options = options(
    option(
        "--outtype",
        group=_CHECKPOINT,
        type=click.Choice(("f32", "f16", "bf16", "auto"), case_sensitive=False),
        default="auto",
        help="Data type; auto: that of the matrices, bf16 if quantized.  [default: auto]",
    ),
    option(
        "--class",
        "architecture",
        group=_CHECKPOINT,
        metavar="NAME",
        help="Model class, if the architecture has several.",
    ),
    option(
        "--list",
        group=_CHECKPOINT,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List supported architectures.",
    ),
    option("--no-tokenizer", group=_CHECKPOINT, is_flag=True, help="Omit the tokenizer's files."),
    setting(
        "--max-shard-size", group=_CHECKPOINT, type=SIZE, default="5GB", help="Start a new shard beyond this size."
    ),
    plan_options,
)


@click.command("export", cls=GroupedCommand)
@click.argument("source", metavar="IN.gguf", type=MODEL_FILE)
@click.argument("folder", metavar="DIR", type=Place(file_okay=False))
@_export_options
def command(
    source: Path,
    folder: Path,
    outtype: str,
    architecture: str | None,
    no_tokenizer: bool,
    max_shard_size: int,
    dry_run: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Export a GGUF file as a checkpoint that transformers loads: the inverse of `quantkit convert`.

    Writes safetensors, in shards with an index if they are large, config.json and the tokenizer's files to DIR. Tensors
    get the names, row order and separate experts of the transformers class; quantized ones are decoded. A model that
    `quantkit convert` would not restore exactly is refused.
    """
    from quantkit.cli._export_report import ExportProgress, ExportReport
    from quantkit.export import ExportOptions, plan_export, refusal, run_export

    options = ExportOptions(
        outtype=outtype, architecture=architecture, tokenizer=not no_tokenizer, max_shard_size=max_shard_size
    )
    export = plan_export(source, folder, options)
    echo_notes(export.plan.notes)
    report = ExportReport(export)
    if dry_run:
        refused = refusal(export, resume=run["resume"], overwrite=run["overwrite"])
        click.echo(json.dumps(report.as_dict(refused), indent=2) if as_json else report.text(refused))
        return
    run["threads"] = run["threads"] or (available_cpus() if run["ray"] is None else None)
    progress = ExportProgress(export.plan, quiet=as_json)
    with progress.show_progress("what is done is kept, continue with --resume"):
        result = run_export(export, observer=progress, **run)
    threads = run["threads"] or sum(node.cpus for node in result.nodes)
    if as_json:
        facts = {"seconds": result.seconds, "threads": threads, "resumed_tensors": result.resumed}
        click.echo(json.dumps(report.as_dict() | facts, indent=2))
        return
    click.echo(report.summary(result, threads))
