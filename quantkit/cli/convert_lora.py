"""``quantkit convert-lora``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli._compat_options import LORA_REFUSED, IgnoredOption, refuse_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, echo_notes, option, options, plan_options
from quantkit.cli._paths import MODEL, Place
from quantkit.cli._run_report import DryRunReport
from quantkit.cli.quantize import run_plans
from quantkit.pipeline.run import RunOptions, refusal

_FILE = "Adapter"
_FOLDER = Place(file_okay=False)

_lora_options = options(
    option(
        "--base",
        group=_FILE,
        type=_FOLDER,
        metavar="DIR",
        help="Checkpoint of the base model; only config.json is needed.",
    ),
    option(
        "--outtype",
        group=_FILE,
        type=click.Choice(("f32", "f16", "bf16", "q8_0", "auto"), case_sensitive=False),
        default="f32",
        help="Type of the matrices; auto: as stored.  [default: f32]",
    ),
    option("--bigendian", group=_FILE, is_flag=True, help="Write a big-endian file, for machines such as s390x."),
    option("--outfile", group=_FILE, metavar="FILE", help="Same as OUT.gguf."),
    plan_options,
    json_option(),
    click.option("--no-lazy", cls=IgnoredOption, is_flag=True, note="tensors are never held back until the end"),
    click.option("--verbose", cls=IgnoredOption, is_flag=True, note="--dry-run shows every tensor, --json as data"),
    click.option("--trust-remote-code", cls=IgnoredOption, is_flag=True, note="no code of a checkpoint is ever run"),
    refuse_options(LORA_REFUSED),
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
    bigendian: bool,
    outfile: str | None,
    max_ram: int,
    dry_run: bool,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Convert a PEFT LoRA adapter to a GGUF file for llama.cpp's --lora.

    ADAPTER is a directory with adapter_config.json and adapter_model.safetensors.
    Without --base, the base is the directory that adapter_config.json names;
    nothing is downloaded. Without OUT.gguf the output is written to ADAPTER.

    The bytes are those of llama.cpp's convert_lora_to_gguf.py b11434, except for
    scales that it gets wrong: those of rsLoRA, rank_pattern and alpha_pattern.
    Adapters with more than low-rank factors (DoRA, modules_to_save, biases, ..) are
    refused: `quantkit convert --merge-lora` merges them into the model.

    \b
    quantkit convert-lora adapter/ --base Qwen3-0.6B/ adapter.gguf
    """
    from quantkit.lora import plan_convert_lora

    if outfile is not None and output is not None:
        raise click.UsageError(f"the output is {output} and --outfile {outfile}: give one of them")
    target = output if outfile is None else outfile
    plan = plan_convert_lora(adapter, target, base=base, outtype=outtype, bigendian=bigendian)
    echo_notes(plan.notes)
    if dry_run:
        report = DryRunReport(plan, refusal(plan, resume=run["resume"], overwrite=run["overwrite"]))
        json_to.print(report.text, report.as_dict)
        return
    run_options: RunOptions = {name: run[name] for name in ("threads", "resume", "overwrite", "ray")}  # type: ignore[assignment]
    run_plans([plan], max_ram, run_options, json_to=json_to)
