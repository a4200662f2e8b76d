"""``quantkit logits``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.evaluation import (
    OUT,
    TEXT,
    check_json_target,
    given_text,
    json_option,
    load_options,
    model_option,
    run_options,
    text_options,
    write_json,
)
from quantkit.cli.options import GroupedCommand, echo_notes, option
from quantkit.evaluate import logits
from quantkit.evaluate.passes import opened
from quantkit.helpers import format_size


@click.command("logits", cls=GroupedCommand)
@model_option
@text_options
@option("-c", "--ctx-size", "n_ctx", group=TEXT, type=click.IntRange(1), help="Set up for this context; of training.")
@run_options
@option(
    "-o",
    "--output",
    group=OUT,
    type=click.Path(path_type=Path),
    required=True,
    metavar="OUT.npy",
    help="float32 [tokens, vocabulary].",
)
@option("--overwrite", group=OUT, is_flag=True, help="Replace it if it exists.")
@json_option
def command(
    model: Path,
    file: Path | None,
    prompt: str | None,
    tokens: str | None,
    n_ctx: int | None,
    output: Path,
    overwrite: bool,
    json_to: str | None,
    **run: Any,
) -> None:
    """Write the logits after each token of a text, positions from 0, as a .npy.

    Of a text the tokenizer's special tokens are part (BOS where the model wants one); ids are taken as they are.

    \b
    quantkit logits -m model.gguf --tokens 1,2,3 -o logits.npy
    quantkit logits -m model.gguf --tokens @ids.i32 --kv-type f32 -o logits.npy
    quantkit logits -m model.gguf -p "The capital of France is" -o logits.npy
    """
    text, ids = given_text(file, prompt, tokens)
    check_json_target(json_to)
    with opened(model, n_ctx, load_options(run)) as loaded:
        echo_notes(loaded.notes)
        found = logits(loaded, text, tokens=ids, output=output, overwrite=overwrite, n_batch=run["n_batch"])
    n_tokens, n_vocab = found.shape
    if json_to != "-":
        click.echo(f"{output}: float32 [{n_tokens}, {n_vocab}], {format_size(output.stat().st_size)}")
    if json_to is not None:
        write_json(json_to, {"model": str(model), "output": str(output), "n_tokens": n_tokens, "n_vocab": n_vocab})
