"""``quantkit logits``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli._evaluation import (
    OUT,
    TEXT,
    claim_json,
    ids_file,
    json_option,
    load_options,
    model_option,
    report,
    run_options,
    text_options,
    text_or_tokens,
)
from quantkit.cli._options import GroupedCommand, echo_notes, option
from quantkit.cli._paths import Place
from quantkit.cli._progress import Bar
from quantkit.evaluate import logits
from quantkit.evaluate.passes import loaded_model
from quantkit.formats.outputs import check_free
from quantkit.names import printable
from quantkit.units import format_size


@click.command("logits", cls=GroupedCommand)
@model_option
@text_options
@option(
    "-c", "--ctx-size", "n_ctx", group=TEXT, type=click.IntRange(1), help="Context size.  [default: that of training]"
)
@run_options
@option(
    "-o",
    "--output",
    group=OUT,
    type=Place(),
    required=True,
    metavar="OUT.npy",
    help="Output file: float32 [tokens, vocabulary].",
)
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
    """Write the logits after each token of a text as a .npy file.

    Positions start at 0. A text is tokenized with special tokens (BOS if the model
    has one); token ids are used as given.

    \b
    quantkit logits -m model.gguf --tokens 1,2,3 -o logits.npy
    quantkit logits -m model.gguf --tokens @ids.i32 --kv-type f32 -o logits.npy
    quantkit logits -m model.gguf -p "The capital of France is" -o logits.npy
    """
    text, ids = text_or_tokens(file, prompt, tokens)
    json_file = claim_json(json_to, [output], [model, file, ids_file(tokens)], overwrite=overwrite)
    check_free(output, overwrite=overwrite)
    with loaded_model(model, n_ctx, load_options(run)) as loaded:
        echo_notes(loaded.notes)
        with closing(Bar(quiet=json_to == "-", unit="token")) as bar:
            values = logits(
                loaded,
                text,
                tokens=ids,
                output=output,
                overwrite=overwrite,
                n_batch=run["n_batch"],
                progress=lambda now: bar.update(*now),
            )
    n_tokens, n_vocab = values.shape
    summary = f"{printable(output)}: float32 [{n_tokens}, {n_vocab}], {format_size(output.stat().st_size)}"
    result = {"model": str(model), "output": str(output), "n_tokens": n_tokens, "n_vocab": n_vocab}
    report(json_to, json_file, summary, result)
