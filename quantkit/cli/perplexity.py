"""``quantkit perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.cli.evaluation import (
    OUT,
    TEXT,
    Bar,
    claim_json,
    given_text,
    ids_file,
    json_option,
    model_option,
    report,
    run_options,
    run_options_of,
    text_options,
)
from quantkit.cli.options import CHUNKS, GroupedCommand, echo_notes, on_command_line, option, ray_option, setting
from quantkit.evaluate import Perplexity, PerplexityProgress, SaveLogits, perplexity
from quantkit.evaluate.statistics import finite
from quantkit.formats.logits import CLIPS, CODECS
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

_BASE = "Base logits for quantkit kld"


@click.command("perplexity", cls=GroupedCommand)
@model_option
@text_options
@setting("-c", "--ctx-size", "n_ctx", group=TEXT, type=click.IntRange(4), default=512, help="Tokens per chunk.")
@option(
    "--chunks", group=TEXT, type=CHUNKS, default=-1, help="Evaluate only the first N chunks; -1, the default, for all."
)
@option(
    "--ppl-stride", "stride", group=TEXT, type=click.IntRange(0), default=0, help="Windows every N tokens, not chunks."
)
@run_options
@ray_option
@option(
    "--save-all-logits",
    "--kl-divergence-base",
    "save",
    group=_BASE,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Save the logits of all scored positions to FILE.",
)
@setting(
    "--logits-format",
    group=_BASE,
    type=click.Choice(["llama.cpp", "compact"]),
    default="llama.cpp",
    help="The whole vocabulary in 16 bits per token, or the most probable tokens exactly and the mass of the rest.",
)
@setting(
    "--clip",
    group=_BASE,
    type=click.Choice([str(c) for c in CLIPS.values()]),
    default="16",
    help="llama.cpp format: range in nats below the top token; 24 as in ik_llama.cpp.",
)
@setting("--top-k", group=_BASE, type=click.IntRange(1), default=1024, help="compact: most tokens per position.")
@setting(
    "--residual",
    group=_BASE,
    type=click.FloatRange(0, 1, max_open=True),
    default=1e-5,
    help="compact: stop once no more than this mass is left.",
)
@setting(
    "--codec",
    group=_BASE,
    type=click.Choice(list(CODECS)),
    default="zlib",
    help="compact: compression; zstd unpacks faster, but is an extra.",
)
@option(
    "--kl-divergence",
    "divergence",
    group=_BASE,
    is_flag=True,
    help="Read FILE instead and measure the divergence from it, as quantkit kld.",
)
@setting(
    "--ppl-output-type",
    "output_type",
    group=OUT,
    type=click.Choice(["0", "1"]),
    default="0",
    help="1: per chunk, a row of token, PPL, ln(PPL) and its error.",
)
@json_option
def command(
    model: Path,
    file: Path | None,
    prompt: str | None,
    tokens: str | None,
    n_ctx: int,
    chunks: int | None,
    stride: int,
    save: Path | None,
    logits_format: str,
    clip: str,
    top_k: int,
    residual: float,
    codec: str,
    divergence: bool,
    overwrite: bool,
    output_type: str,
    json_to: str | None,
    **run: Any,
) -> None:
    """Measure perplexity on a text, as llama-perplexity does; lower is better.

    The text is cut into chunks of -c tokens. BOS replaces the first token of each if the model wants one, and the
    second half of each chunk is scored. Values compare only for the same text, -c and tokenizer.

    \b
    quantkit perplexity -m model-Q4_K_M.gguf -f wiki.test.raw
    quantkit perplexity -m model-bf16.gguf -f text.txt --save-all-logits base.bin    # then: quantkit kld
    quantkit perplexity -m model.gguf --tokens @ids.i32 -c 2048 --chunks 10 --json -
    """
    if divergence:
        _divergence(model, save, n_ctx, chunks, json_to, run)
        return
    text, ids = given_text(file, prompt, tokens)
    json_file = claim_json(json_to, [save], [model, file, ids_file(tokens)], overwrite=overwrite)
    kept = SaveLogits(save, logits_format, float(clip), top_k, residual, codec, overwrite) if save is not None else None
    with closing(Bar()) as bar:

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
            chunks=chunks,
            stride=stride,
            save_logits=kept,
            progress=progress,
            **run_options_of(run),
        )
    echo_notes(found.notes)
    report(json_to, json_file, _final(found), _as_dict(found))


def _divergence(
    model: Path, base: Path | None, n_ctx: int, chunks: int | None, json_to: str | None, run: Mapping[str, Any]
) -> None:
    """Run quantkit kld, whose text is that of the base."""
    from quantkit.cli.kld import command as kld

    ctx = click.get_current_context()
    if base is None:
        raise click.UsageError("--kl-divergence needs --kl-divergence-base FILE")
    if any(ctx.params[name] is not None for name in ("file", "prompt", "tokens")):
        echo_notes([f"-f, -p and --tokens are ignored: {base} contains its text"])
    ctx.invoke(
        kld,
        model=model,
        base=base,
        n_ctx=n_ctx if on_command_line("n_ctx") else None,
        chunks=chunks,
        json_to=json_to,
        overwrite=ctx.params["overwrite"],
        **run,
    )


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
        lines.append(f"{printable(found.saved)}: {format_size(found.saved.stat().st_size)}")
    return "\n".join(lines)


def _as_dict(found: Perplexity) -> dict[str, Any]:
    return {
        "model": str(found.model),
        "ppl": found.ppl.as_dict(),
        "ln_ppl": found.log_ppl.as_dict(),
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
