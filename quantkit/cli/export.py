"""``quantkit export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quantkit.cli.complete import MODEL_FILE
from quantkit.cli.options import SIZE, GroupedCommand, echo_notes, option, options, plan_options, setting
from quantkit.cli.table import table
from quantkit.cpus import available_cpus

_WRITTEN, _RUN, _OUT = "The checkpoint", "The run", "Output"


def _list_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print what is exported, and end."""
    from quantkit.export import exported_classes

    if value:
        rows = [(arch, ", ".join(classes)) for arch, classes in exported_classes().items()]
        click.echo(table(["architecture", "classes of transformers"], rows, left=2))
        ctx.exit()


_export_options = options(
    option(
        "--outtype",
        group=_WRITTEN,
        type=click.Choice(("f32", "f16", "bf16", "auto"), case_sensitive=False),
        default="auto",
        help="Type of the values; auto: that of the matrices, bf16 if they are quantized.  [default: auto]",
    ),
    option("--class", "architecture", group=_WRITTEN, metavar="NAME", help="Class of transformers, if there are two."),
    option(
        "--list",
        group=_WRITTEN,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list_all,
        help="List the architectures that are exported.",
    ),
    option("--no-tokenizer", group=_WRITTEN, is_flag=True, help="Leave out the files of the tokenizer."),
    setting("--max-shard-size", group=_WRITTEN, type=SIZE, default="5GB", help="Begin a new file beyond this size."),
    plan_options,
)


@click.command("export", cls=GroupedCommand)
@click.argument("source", metavar="IN.gguf", type=MODEL_FILE)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
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
    """Export a GGUF file as a checkpoint that transformers loads: the way back of `quantkit convert`.

    Writes safetensors, in shards with an index if they are large, config.json and the files of the tokenizer to DIR.
    Tensors get the names, the order of rows and the experts of their own that the class of transformers has;
    quantized ones are decoded. What `quantkit convert` would not turn into the same model again is refused.
    """
    from quantkit.cli.exported import ExportProgress, ExportReport
    from quantkit.export import ExportOptions, plan_export, refusal, run_export

    given = ExportOptions(
        outtype=outtype, architecture=architecture, tokenizer=not no_tokenizer, max_shard_size=max_shard_size
    )
    planned = plan_export(source, folder, given)
    echo_notes(planned.plan.notes)
    report = ExportReport(planned)
    if dry_run:
        refused = refusal(planned, resume=run["resume"], overwrite=run["overwrite"])
        click.echo(json.dumps(report.as_dict(refused), indent=2) if as_json else report.text(refused))
        return
    run["threads"] = run["threads"] or (available_cpus() if run["ray"] is None else None)
    shown = ExportProgress(planned.plan, quiet=as_json)
    with shown.shown("what is done is kept, continue with --resume"):
        done = run_export(planned, observer=shown, **run)
    threads = run["threads"] or sum(node.cpus for node in done.nodes)
    if as_json:
        more = {"seconds": done.seconds, "threads": threads, "resumed_tensors": done.resumed}
        click.echo(json.dumps(report.as_dict() | more, indent=2))
        return
    click.echo(report.done(done, threads))
