"""``quantkit export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.arguments import declarations
from quantkit.cli._declared_options import declared_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, echo_notes, option, options, plan_options
from quantkit.cli._paths import MODEL_FILE, Place
from quantkit.cli._table import table
from quantkit.cpus import available_cpus
from quantkit.options.export import CHECKPOINT, ExportOptions


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the supported architectures and exit."""
    from quantkit.export import exported_classes, exported_encoders

    if value:
        text, encoders = exported_classes(), exported_encoders()
        rows = [(arch, ", ".join(text[arch]), ", ".join(encoders.get(arch, ()))) for arch in text]
        click.echo(table(["architecture", "classes of transformers", "with --mmproj"], rows, left=3))
        ctx.exit()


_export_options = options(
    *declared_options(ExportOptions, (CHECKPOINT,)),
    option(
        "--list",
        group=CHECKPOINT,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List supported architectures.",
    ),
    plan_options,
    json_option(),
)


@click.command("export", cls=GroupedCommand)
@click.argument("source", metavar="IN.gguf", type=MODEL_FILE)
@click.argument("folder", metavar="DIR", type=Place(file_okay=False))
@_export_options
def command(
    source: Path,
    folder: Path,
    dry_run: bool,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Export a GGUF file as a checkpoint: the inverse of `quantkit convert`.

    Writes config.json, the tokenizer's files and safetensors, in shards with an
    index if they are large, to DIR. Tensors get the names, row order and separate
    experts of the transformers class; quantized ones are decoded. A model that
    `quantkit convert` would not restore exactly is refused.

    With --mmproj, the checkpoint has the vision encoder, too.

    \b
    quantkit export model-bf16.gguf checkpoint/
    quantkit export model-bf16.gguf checkpoint/ --mmproj mmproj-F16.gguf
    """
    from quantkit.cli._export_report import ExportProgress, ExportReport
    from quantkit.export import plan_export, refusal, run_export

    requested = ExportOptions(**{name: run.pop(name) for name in declarations(ExportOptions)})
    export = plan_export(source, folder, requested)
    echo_notes(export.plan.notes)
    report = ExportReport(export)
    if dry_run:
        refused = refusal(export, resume=run["resume"], overwrite=run["overwrite"])
        json_to.print(lambda: report.text(refused), lambda: report.as_dict(refused))
        return
    run["threads"] = run["threads"] or (available_cpus() if run["ray"] is None else None)
    progress = ExportProgress(export.plan, quiet=json_to.only)
    with progress.show_progress("the completed part is kept; continue with --resume"):
        result = run_export(export, observer=progress, **run)
    threads = run["threads"] or sum(node.cpus for node in result.nodes)
    facts = {"seconds": result.seconds, "threads": threads, "resumed_tensors": result.resumed}
    json_to.print(lambda: report.summary(result, threads), lambda: report.as_dict() | facts)
