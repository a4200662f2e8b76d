"""``quantkit convert-lora``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quantkit.cli.complete import MODEL
from quantkit.cli.ignored import Ignored
from quantkit.cli.options import GroupedCommand, echo_notes, option, options, plan_options
from quantkit.cli.quantize import run_shown
from quantkit.cli.refused import Refused
from quantkit.cli.summary import DryRunReport
from quantkit.pipeline.run import RunOptions, refusal

_FILE, _RUN, _OUT = "The adapter", "The run", "Output"
_FOLDER = click.Path(file_okay=False, path_type=Path)

_lora_options = options(
    option("--base", group=_FILE, type=_FOLDER, metavar="DIR", help="The base's checkpoint; config.json is enough."),
    option(
        "--outtype",
        group=_FILE,
        type=click.Choice(("f32", "f16", "bf16", "q8_0", "auto"), case_sensitive=False),
        default="f32",
        help="Type of the matrices; auto: the one they are stored in.  [default: f32]",
    ),
    option("--outfile", group=_FILE, metavar="FILE", help="The same as OUT.gguf."),
    plan_options,
    click.option("--no-lazy", cls=Ignored, is_flag=True, note="nothing is held back until the end"),
    click.option("--verbose", cls=Ignored, is_flag=True, note="--dry-run shows every tensor, --json as data"),
    click.option("--trust-remote-code", cls=Ignored, is_flag=True, note="no code of a checkpoint is ever run"),
    click.option(
        "--base-model-id",
        cls=Refused,
        reason="nothing here uses a network: `hf download ID config.json --local-dir DIR`, then --base DIR",
    ),
    click.option(
        "--bigendian",
        cls=Refused,
        is_flag=True,
        reason="files are little-endian; gguf_convert_endian.py of llama.cpp turns a finished one around",
    ),
)


@click.command("convert-lora", cls=GroupedCommand)
@click.argument("adapter", metavar="ADAPTER", type=_FOLDER)
@click.argument("output", metavar="[OUT.gguf]", required=False, type=MODEL)
@_lora_options
def command(
    adapter: Path,
    output: Path | None,
    base: Path | None,
    outtype: str,
    outfile: str | None,
    max_ram: int,
    dry_run: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Convert a LoRA adapter of PEFT to a GGUF file that llama.cpp loads beside its model (--lora).

    ADAPTER holds adapter_config.json and adapter_model.safetensors. Without --base, the base is the directory that
    adapter_config.json names; nothing is downloaded. Without OUT.gguf the output lies in ADAPTER.

    The bytes are those of llama.cpp's convert_lora_to_gguf.py b11434, but for scales that it gets wrong: of rsLoRA,
    rank_pattern and alpha_pattern. What is more than factors (DoRA, modules_to_save, biases, ..) is refused. To have
    an adapter in the model itself: `quantkit convert --merge-lora`.
    """
    from quantkit.lora import plan_convert_lora

    if outfile is not None and output is not None:
        raise click.UsageError(f"the output is {output} and --outfile {outfile}: give one of them")
    plan = plan_convert_lora(adapter, output if outfile is None else outfile, base=base, outtype=outtype)
    echo_notes(plan.notes)
    if dry_run:
        report = DryRunReport(plan, refusal(plan, resume=run["resume"], overwrite=run["overwrite"]))
        click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
        return
    how: RunOptions = {name: run[name] for name in ("threads", "resume", "overwrite", "ray")}  # type: ignore[assignment]
    run_shown(plan, max_ram, how, as_json=as_json)
