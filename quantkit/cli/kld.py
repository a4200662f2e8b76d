"""``quantkit kld``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import MEANINGS
from quantkit.cli._comparison import comparison_text, texts_text
from quantkit.cli._evaluation import (
    MODEL,
    RUN,
    TEXT,
    activations_option,
    claim_json,
    evaluation_options,
    hub_model,
    hub_options,
    ids_file,
    json_option,
    report,
    run_options,
)
from quantkit.cli._options import (
    CHUNKS,
    SHARE,
    GroupedCommand,
    echo_notes,
    on_command_line,
    option,
    ray_option,
)
from quantkit.cli._paths import MODEL_FILE, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import columns
from quantkit.cli._texts import TEXT_VALUES, texts_from, texts_options
from quantkit.errors import QualityGate
from quantkit.evaluate import Estimate, Kld, KldProgress, KldSums, Texts, compare_models, kld, kld_of_texts
from quantkit.evaluate.statistics import MIN_TOKENS
from quantkit.units import format_seconds

_BASE = "Base logits"
#: Values of --base-model, besides those of texts; and those of texts that --base takes, too: texts to check.
_COMPARISON_VALUES = ("by_position", "until", "seed")
_BASE_VALUES = ("files", "prompt", "tokens")
#: llama-perplexity's headings; a narrow terminal shows one statistic less.
_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
    "            Same top p"
)
_WIDE, _NARROW = 125, "chunk         PPL             KL Divergence        Δp RMS (%)     Same top p (%)"


@click.command("kld", cls=GroupedCommand)
@click.argument("models", nargs=-1, type=MODEL_FILE)
@option("-m", "--model", "model", group=MODEL, type=MODEL_FILE, help="GGUF file; any shard of a split model.")
@hub_options
@option(
    "--base",
    "--kl-divergence-base",
    "bases",
    group=_BASE,
    type=Place(),
    multiple=True,
    metavar="FILE",
    help="Output of --save-all-logits of quantkit or llama-perplexity; includes the text. Repeatable: a row for each.",
)
@option(
    "--base-model",
    "base_model",
    group=MODEL,
    type=MODEL_FILE,
    metavar="FILE",
    help="Compare all files with this model (BF16), which is computed once, on the texts below.",
)
@texts_options
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    group=TEXT,
    type=click.IntRange(1),
    help="Tokens per chunk.  [default: those of the base file, else 512]",
)
@option("--chunks", group=TEXT, type=CHUNKS, default=-1, help="Number of chunks, of each text.  [default: all]")
@option("--by-position", group=TEXT, is_flag=True, help="Score all positions; add a table by position in the chunk.")
@option(
    "--until",
    group=TEXT,
    type=SHARE,
    metavar="SHARE",
    help="Take chunks at random until each 95 % interval is within this share of the mean (2%).",
)
@option("--seed", group=TEXT, type=click.IntRange(0), default=0, help="Seed of the order of --until.  [default: 0]")
@activations_option("exact; on GPUs runtime")
@run_options
@ray_option
@option("--max-kld", group=RUN, type=click.FloatRange(0), help="Exit with code 3 if a mean divergence is larger.")
@json_option
def command(
    models: tuple[Path, ...],
    model: Path | None,
    hf_repo: str | None,
    hf_file: str | None,
    bases: tuple[Path, ...],
    base_model: Path | None,
    n_ctx: int | None,
    chunks: int | None,
    max_kld: float | None,
    json_to: str | None,
    overwrite: bool,
    **values: Any,
) -> None:
    """Measure the KL divergence of models from a base model.

    With --base-model, all files are compared on the texts in one run: a row per
    file, and the differences between files with their intervals. With --base, text
    and base come from a file, and the output is that of llama-perplexity
    --kl-divergence; of several, a row each. Without a text of your own, quantkit
    texts writes some. The mean KL divergence estimates how many nats of
    log-perplexity a quantization costs; it is far less noisy than a difference of
    perplexities. Activations are exact by default: a runtime rounds them
    (--activations runtime), which adds as much divergence as weights of 5 bits or more.

    \b
    quantkit kld --base-model bf16.gguf Q6_K.gguf Q4_K_M.gguf -f text.txt
    quantkit kld --base-model bf16.gguf Q4_K_M.gguf -f texts/ --until 2%
    quantkit kld -m model-Q4_K_M.gguf --base base.bin --max-kld 0.02
    quantkit kld -m model-Q4_K_M.gguf --base code.bin --base german.bin
    """
    downloaded = hub_model(model, hf_repo, hf_file)
    files = (*([] if downloaded is None else [downloaded]), *models)
    if not files:
        raise click.UsageError("give a model: MODELS, -m FILE or -hf ORG/REPO")
    if bool(bases) == (base_model is not None):
        raise click.UsageError("give either --base FILE, a file of base logits, or --base-model FILE")
    settings = {name: values.pop(name) for name in (*TEXT_VALUES, *_COMPARISON_VALUES)}
    results: list[tuple[Path, float]]
    if base_model is not None:
        results = _compare(base_model, files, n_ctx, chunks, json_to, overwrite, settings, values)
    else:
        alone = [name for name in settings if name not in _BASE_VALUES and on_command_line(name)]
        if alone:
            raise click.UsageError(f"{_flag(alone[0])} needs --base-model: --base contains text and base logits")
        if len(files) > 1:
            raise click.UsageError(f"--base takes one model, not {len(files)}: compare several with --base-model")
        texts = texts_from(settings) if any(settings[name] for name in _BASE_VALUES) else None
        if len(bases) > 1 or texts is not None:
            results = [_measure_texts(files[0], bases, texts, n_ctx, chunks, json_to, overwrite, values)]
        else:
            results = [_measure(files[0], bases[0], n_ctx, chunks, json_to, overwrite, values)]
    for path, mean in results:
        if max_kld is not None and not mean <= max_kld:
            raise QualityGate(f"{path}: the mean KL divergence is {mean:.6f}, above --max-kld {max_kld:g}")


def _flag(name: str) -> str:
    """Return the first name of an option of this command."""
    return next(p.opts[0] for p in click.get_current_context().command.params if p.name == name)


def _compare(
    base: Path,
    files: Sequence[Path],
    n_ctx: int | None,
    chunks: int | None,
    json_to: str | None,
    overwrite: bool,
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
) -> list[tuple[Path, float]]:
    """Compare files with a base model, print the tables, and return the mean divergence of each file."""
    texts = texts_from(settings)
    inputs = [base, *files, *settings["files"], *settings["chat"], ids_file(settings["tokens"])]
    json_file = claim_json(json_to, (), inputs, overwrite=overwrite)
    with closing(Bar(unit="chunk", desc="first pass")) as bar:
        result = compare_models(
            base,
            files,
            texts,
            n_ctx=n_ctx or 512,
            n_batch=run["n_batch"],
            chunks=chunks,
            by_position=settings["by_position"],
            until=settings["until"],
            seed=settings["seed"],
            progress=lambda now: bar.update(now.current, now.total, now.model),
            **evaluation_options(run),
        )
    echo_notes(result.notes)
    report(json_to, json_file, comparison_text(result), result.as_dict())
    return [(m.model, m.sums.kld.mean.value) for m in result.models]


def _measure(
    model: Path,
    base: Path,
    n_ctx: int | None,
    chunks: int | None,
    json_to: str | None,
    overwrite: bool,
    run: Mapping[str, Any],
) -> tuple[Path, float]:
    """Compare a file with base logits, print llama-perplexity's statistics, and return its mean divergence."""
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
    return model, result.sums.kld.mean.value


def _measure_texts(
    model: Path,
    bases: Sequence[Path],
    texts: Texts | None,
    n_ctx: int | None,
    chunks: int | None,
    json_to: str | None,
    overwrite: bool,
    run: Mapping[str, Any],
) -> tuple[Path, float]:
    """Compare a file with several base logits, print a row per text, and return its mean divergence."""
    json_file = claim_json(json_to, (), [model, *bases, *(() if texts is None else texts.files)], overwrite=overwrite)
    with closing(Bar(unit="chunk", desc="first pass")) as bar:
        result = kld_of_texts(
            model,
            bases,
            texts,
            n_ctx=n_ctx,
            n_batch=run["n_batch"],
            chunks=chunks,
            progress=lambda now: bar.update(now.current, now.total, f"KLD {now.sums.kld.mean.text(5)}"),
            **evaluation_options(run),
        )
    echo_notes(result.notes)
    report(json_to, json_file, texts_text(result), result.as_dict())
    return model, result.mean.value


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
