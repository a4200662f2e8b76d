"""``quantkit kld``."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import MEANINGS
from quantkit.cli._evaluation import (
    RUN,
    activations_option,
    claim_json,
    evaluation_options,
    json_option,
    model_option,
    report,
    run_options,
)
from quantkit.cli._options import CHUNKS, GroupedCommand, echo_notes, option, ray_option
from quantkit.cli._paths import Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import columns
from quantkit.errors import QualityGate
from quantkit.evaluate import Estimate, Kld, KldProgress, KldSums, kld
from quantkit.evaluate.statistics import MIN_TOKENS
from quantkit.units import format_seconds

_BASE = "Base logits"
#: llama-perplexity's headings; a narrow terminal shows one statistic less.
_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
    "            Same top p"
)
_WIDE, _NARROW = 125, "chunk         PPL             KL Divergence        Δp RMS (%)     Same top p (%)"


@click.command("kld", cls=GroupedCommand)
@model_option
@option(
    "--base",
    "--kl-divergence-base",
    "base",
    group=_BASE,
    type=Place(),
    required=True,
    metavar="FILE",
    help="Output of --save-all-logits of quantkit or llama-perplexity; includes the text.",
)
@option("-c", "--ctx-size", "n_ctx", group=_BASE, type=click.IntRange(1), help="Expected tokens per chunk of the base.")
@option("--chunks", group=_BASE, type=CHUNKS, default=-1, help="Number of chunks.  [default: all]")
@activations_option("exact; on GPUs runtime")
@run_options
@ray_option
@option("--max-kld", group=RUN, type=click.FloatRange(0), help="Exit with code 3 if the mean divergence is larger.")
@json_option
def command(
    model: Path,
    base: Path,
    n_ctx: int | None,
    chunks: int | None,
    max_kld: float | None,
    json_to: str | None,
    overwrite: bool,
    **run: Any,
) -> None:
    """Measure the KL divergence of a model from a base model.

    Text and context size come from the base file. The mean KL divergence estimates
    how many nats of log-perplexity a quantization costs; it is far less noisy than
    a difference of perplexities. The output is that of llama-perplexity
    --kl-divergence; its figures also contain the rounding of activations, as with
    --activations runtime, which is as large as the divergence of 5 bits and more.

    \b
    quantkit perplexity -m model-bf16.gguf -f text.txt --save-all-logits base.bin
    quantkit kld -m model-Q4_K_M.gguf --base base.bin
    quantkit kld -m model-Q4_K_M.gguf --base base.bin --max-kld 0.02
    """
    json_file = claim_json(json_to, (), [model, base], overwrite=overwrite)
    narrow = (columns() or sys.maxsize) < _WIDE
    with closing(Bar(unit="chunk", desc="first pass")) as bar:

        def progress(now: KldProgress) -> None:
            mean = now.sums.kld.mean
            bar.update(now.current, now.total, f"KLD {mean.value:.5f} +/- {mean.error:.5f}")
            if json_to != "-":
                if now.current == 1:
                    bar.print(_NARROW if narrow else _HEADER)
                bar.print((narrow_line if narrow else chunk_line)(now.current, now.sums))

        result = kld(
            model,
            base,
            n_ctx=n_ctx,
            n_batch=run["n_batch"],
            chunks=chunks,
            progress=progress,
            **evaluation_options(run),
        )
    echo_notes(result.notes)
    report(json_to, json_file, "\n" + _text(result), result.as_dict())
    mean = result.sums.kld.mean.value
    if max_kld is not None and not mean <= max_kld:
        raise QualityGate(f"{model}: the mean KL divergence is {mean:.6f}, above --max-kld {max_kld:g}")


def chunk_line(chunk: int, sums: KldSums) -> str:
    """Return a chunk's line: the statistics so far, as llama-perplexity prints them."""
    rms, top = sums.rms_p_diff, sums.same_top_p
    return (
        f"{chunk:4d}    {_pair(sums.nll.ppl, 9, 4)}    {_pair(sums.ln_ratio, 10, 5)}    {_pair(sums.kld.mean, 10, 5)}"
        f"    {_percent(rms, 6)}    {_percent(top, 6)}"
    )


def narrow_line(chunk: int, sums: KldSums) -> str:
    """Return the line of a chunk for a narrow terminal."""
    shares = (f"{100 * e.value:6.3f} ± {100 * e.error:5.3f}" for e in (sums.rms_p_diff, sums.same_top_p))
    return "  ".join([f"{chunk:5d}", _pair(sums.nll.ppl, 8, 4), _pair(sums.kld.mean, 8, 5), *shares])


def _pair(e: Estimate, width: int, digits: int) -> str:
    return f"{e.value:{width}.{digits}f} ± {e.error:{width}.{digits}f}"


def _percent(e: Estimate, width: int) -> str:
    return f"{100 * e.value:6.3f} ± {100 * e.error:{width}.3f} %"


def statistics_text(sums: KldSums) -> str:
    """Return the three blocks of llama-perplexity's final statistics, letter for letter."""
    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {_pair(sums.nll.ppl, 10, 6)}",
        f"Mean PPL(base)                : {_pair(sums.nll_base.ppl, 10, 6)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * sums.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {_pair(sums.ln_ratio, 10, 6)}",
        f"Mean PPL(Q)/PPL(base)         : {_pair(sums.ratio, 10, 6)}",
        f"Mean PPL(Q)-PPL(base)         : {_pair(sums.difference, 10, 6)}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {_pair(sums.kld.mean, 10, 6)}",
        *(f"{_label(label)} KLD: {value:10.6f}" for label, value in sums.kld_distribution().rows),
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {_percent(sums.p_diff.mean, 5)}",
        *(f"{_label(label)} Δp: {100 * value:6.3f}%" for label, value in sums.p_diff_distribution().rows),
        f"RMS Δp    : {_percent(sums.rms_p_diff, 5)}",
        f"Same top p: {_percent(sums.same_top_p, 5)}",
    ]
    return "\n".join(lines)


def _label(label: str) -> str:
    return f"{label:>5}  " if label.endswith("%") else f"{label:<7}"


def _text(result: Kld) -> str:
    lines = []
    if result.sums.n >= MIN_TOKENS:
        lines.append(statistics_text(result.sums))
    else:
        lines.append(f"{result.sums.n} tokens were scored, too few for statistics: {MIN_TOKENS} are needed")
    if result.bound:
        lines.append(
            f"\nThe base contains a part of the vocabulary; the rest is estimated:\n"
            f"the mean KLD is off by at most {result.bound:.6f}."
        )
    chunks = f"{result.n_chunks} of {result.chunks_in_base} chunks of {result.n_ctx} tokens"
    lines.append(f"\n{result.sums.n} tokens scored in {chunks}, {format_seconds(result.seconds)}\n{result.base_kind}")
    lines.append(MEANINGS[result.activations])
    return "\n".join(lines)
