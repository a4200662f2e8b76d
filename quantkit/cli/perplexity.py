"""``quantkit perplexity``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.cli.evaluation import (
    OUT,
    TEXT,
    Bar,
    check_json_target,
    estimate,
    finite,
    given_text,
    json_option,
    load_options,
    model_option,
    run_options,
    text_options,
    write_json,
)
from quantkit.cli.options import GroupedCommand, echo_notes, option
from quantkit.evaluate import Perplexity, PerplexityProgress, SaveLogits, perplexity
from quantkit.formats.logits import CLIPS, CODECS
from quantkit.helpers import format_seconds, format_size

_BASE = "Base logits, for quantkit kld"


@click.command("perplexity", cls=GroupedCommand)
@model_option
@text_options
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    group=TEXT,
    type=click.IntRange(4),
    default=512,
    show_default=True,
    help="Tokens of a chunk.",
)
@option("--chunks", group=TEXT, type=int, default=-1, help="Evaluate only so many chunks; -1, the default: all.")
@option(
    "--ppl-stride",
    "stride",
    group=TEXT,
    type=click.IntRange(0),
    default=0,
    help="A window every so many tokens, instead of chunks.",
)
@run_options
@option(
    "--save-all-logits",
    "--kl-divergence-base",
    "save",
    group=_BASE,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep the logits of all scored positions in FILE.",
)
@option(
    "--logits-format",
    group=_BASE,
    type=click.Choice(["llama.cpp", "compact"]),
    default="llama.cpp",
    show_default=True,
    help="All of the vocabulary in 16 bits a token; or the most probable tokens, exact, and the mass of the rest.",
)
@option(
    "--clip",
    group=_BASE,
    type=click.Choice([str(c) for c in CLIPS.values()]),
    default="16",
    show_default=True,
    help="llama.cpp format: nats below the top token that are told apart; 24 is ik_llama.cpp's.",
)
@option(
    "--top-k",
    group=_BASE,
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="compact: most tokens kept of a position.",
)
@option(
    "--residual",
    group=_BASE,
    type=click.FloatRange(0, 1, max_open=True),
    default=1e-5,
    show_default=True,
    help="compact: keep fewer once no more mass than this is left.",
)
@option(
    "--codec",
    group=_BASE,
    type=click.Choice(list(CODECS)),
    default="zlib",
    show_default=True,
    help="compact: how it is packed; zstd unpacks faster, but is not always installed.",
)
@option("--overwrite", group=_BASE, is_flag=True, help="Replace FILE if it exists.")
@option(
    "--ppl-output-type",
    "output_type",
    group=OUT,
    type=click.Choice(["0", "1"]),
    default="0",
    show_default=True,
    help="1: a table of token, PPL, ln(PPL) and its error per chunk.",
)
@json_option
def command(
    model: Path,
    file: Path | None,
    prompt: str | None,
    tokens: str | None,
    n_ctx: int,
    chunks: int,
    stride: int,
    save: Path | None,
    logits_format: str,
    clip: str,
    top_k: int,
    residual: float,
    codec: str,
    overwrite: bool,
    output_type: str,
    json_to: str | None,
    **run: Any,
) -> None:
    """Measure the perplexity of a text, as llama-perplexity does: the lower, the better the model predicts it.

    The text is cut into chunks of -c tokens, BOS takes the place of the first of each where the model wants one, and
    the second half of each is scored. Compare only values of the same text, -c and tokenizer.

    \b
    quantkit perplexity -m model-Q4_K_M.gguf -f wiki.test.raw
    quantkit perplexity -m model-bf16.gguf -f text.txt --save-all-logits base.bin    # then: quantkit kld
    quantkit perplexity -m model.gguf --tokens @ids.i32 -c 2048 --chunks 10 --json -
    """
    text, ids = given_text(file, prompt, tokens)
    if chunks == 0 or chunks < -1:
        raise click.BadParameter("a number above 0, or -1 for all", param_hint="--chunks")
    check_json_target(json_to)
    kept = SaveLogits(save, logits_format, float(clip), top_k, residual, codec, overwrite) if save is not None else None
    with Bar() as bar:

        def progress(now: PerplexityProgress) -> None:
            if json_to != "-":
                bar.print(_chunk_line(now, n_ctx, stride) if output_type == "1" else _running(now))
            bar.update(now.chunk, now.n_chunks, f"PPL {now.ppl.value:.4f} +/- {now.ppl.error:.4f}")

        found = perplexity(
            model,
            text,
            tokens=ids,
            n_ctx=n_ctx,
            n_batch=run["n_batch"],
            chunks=chunks if chunks > 0 else None,
            stride=stride,
            save_logits=kept,
            progress=progress,
            **load_options(run),
        )
    echo_notes(found.notes)
    if json_to != "-":
        click.echo(_final(found))
    if json_to is not None:
        write_json(json_to, _as_dict(found))


def _running(now: PerplexityProgress) -> str:
    return f"[{now.chunk}]{now.ppl.value:.4f}, +/- {now.ppl.error:.4f}"


def _chunk_line(now: PerplexityProgress, n_ctx: int, stride: int) -> str:
    at = (now.chunk - 1) * (stride or n_ctx)
    return f"{at:8d}  {now.ppl.value:.4f}  {now.log_ppl.value:4f}  {now.log_ppl.error:4f}"


def _final(found: Perplexity) -> str:
    chunks = f"{found.n_chunks} {'windows' if found.stride else 'chunks'} of {found.n_ctx} tokens"
    lines = [f"Final estimate: PPL = {found.ppl.value:.4f} +/- {found.ppl.error:.5f}"]
    lines.append(f"{found.n_scored} tokens scored in {chunks}, {format_seconds(found.seconds)}")
    if found.saved is not None:
        lines.append(f"{found.saved}: {format_size(found.saved.stat().st_size)}")
    return "\n".join(lines)


def _as_dict(found: Perplexity) -> dict[str, Any]:
    return {
        "model": str(found.model),
        "ppl": estimate(found.ppl),
        "ln_ppl": estimate(found.log_ppl),
        "n_ctx": found.n_ctx,
        "n_chunks": found.n_chunks,
        "ppl_stride": found.stride,
        "n_seq": found.n_seq,
        "n_tokens": found.n_tokens,
        "n_scored": found.n_scored,
        "bos": found.bos,
        "seconds": found.seconds,
        "saved": str(found.saved) if found.saved is not None else None,
        "notes": list(found.notes),
        "running": [[finite(e.value), finite(e.error)] for e in found.running],
    }
