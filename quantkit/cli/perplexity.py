"""``quantkit perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import EXACT
from quantkit.arguments import declarations
from quantkit.cli._declared_options import declared_options
from quantkit.cli._evaluation import (
    OUT,
    TEXT,
    activations_option,
    claim_json,
    evaluation_options,
    ids_file,
    json_option,
    model_option,
    report,
    run_options,
    text_or_tokens,
)
from quantkit.cli._options import (
    CHUNKS,
    GroupedCommand,
    echo_notes,
    on_command_line,
    option,
    options,
    ray_option,
    setting,
)
from quantkit.cli._paths import TEXT_FILE, Place
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.cli._tasks import task_options
from quantkit.cli._texts import TEXT_VALUES, texts_from, texts_options
from quantkit.evaluate import (
    NllSums,
    Perplexity,
    PerplexityProgress,
    SaveLogits,
    TextPerplexities,
    perplexity,
    perplexity_of_texts,
)
from quantkit.evaluate.sinks import BASE_LOGITS
from quantkit.evaluate.statistics import finite
from quantkit.formats.outputs import read_text
from quantkit.names import printable
from quantkit.units import format_seconds, format_size


@click.command("perplexity", cls=GroupedCommand)
@model_option
@texts_options
@setting("-c", "--ctx-size", "n_ctx", group=TEXT, type=click.IntRange(4), default=512, help="Tokens per chunk.")
@option("--chunks", group=TEXT, type=CHUNKS, default=-1, help="Number of chunks.  [default: all]")
@option(
    "--ppl-stride",
    "stride",
    group=TEXT,
    type=click.IntRange(0),
    default=0,
    help="Score a window every N tokens, instead of chunks.",
)
@option("--by-position", group=TEXT, is_flag=True, help="Score all positions; add a table by position in the chunk.")
@option("-bf", "--binary-file", "binary_file", group=TEXT, type=TEXT_FILE, help="Text file; its final newline is kept.")
@task_options
@activations_option("runtime; exact with FILE of base logits")
@run_options
@ray_option
@option(
    "--save-all-logits",
    "save",
    group=BASE_LOGITS,
    type=Place(),
    metavar="FILE",
    help="Write the logits of all scored positions to FILE.",
)
@option(
    "--kl-divergence-base",
    "base",
    group=BASE_LOGITS,
    type=Place(),
    metavar="FILE",
    help="The same, by default in format llama.cpp; with --kl-divergence, the file to read.",
)
@options(*declared_options(SaveLogits, (BASE_LOGITS,)))
@option(
    "--kl-divergence",
    "divergence",
    group=BASE_LOGITS,
    is_flag=True,
    help="Measure the divergence from the base in FILE, as quantkit kld does.",
)
@setting(
    "--ppl-output-type",
    "output_type",
    group=OUT,
    type=click.Choice(["0", "1"]),
    default="0",
    help="Output per chunk: 0 is the running PPL; 1 is token, PPL, ln(PPL) and its error.",
)
@json_option
def command(
    model: Path,
    files: tuple[Path, ...],
    prompt: str | None,
    tokens: str | None,
    n_ctx: int,
    chunks: int | None,
    stride: int,
    by_position: bool,
    binary_file: Path | None,
    kind: str | None,
    n_tasks: int | None,
    save: Path | None,
    base: Path | None,
    divergence: bool,
    overwrite: bool,
    output_type: str,
    json_to: str | None,
    **run: Any,
) -> None:
    """Measure perplexity on a text, as llama-perplexity does; lower is better.

    The text is cut into chunks of -c tokens. BOS replaces the first token of each
    chunk if the model has one, and the second half of each chunk is scored. Values
    are comparable only for the same text, -c and tokenizer. As in llama.cpp,
    activations are rounded, except for base logits, which by default are exact, as
    are the figures of quantkit kld (--activations). Several texts have a row each,
    and a total; quantkit texts writes some.

    \b
    quantkit perplexity -m model-Q4_K_M.gguf -f wiki.test.raw
    quantkit perplexity -m model-bf16.gguf -f text.txt --save-all-logits base.bin
    quantkit perplexity -m model.gguf -f code.txt -f german.txt --chat chats.jsonl
    quantkit perplexity -m model.gguf --tokens @ids.i32 -c 2048 --chunks 10 --json
    """
    text_values = {"files": files, "prompt": prompt, "tokens": tokens}
    text_values |= {name: run.pop(name) for name in TEXT_VALUES if name not in text_values}
    if save is not None and base is not None:
        raise click.UsageError("give one of --save-all-logits and --kl-divergence-base")
    save = save or base
    if divergence:
        _divergence(model, save, n_ctx, chunks, json_to, run)
        return
    if kind is not None or n_tasks is not None:
        _score(model, next(iter(files), binary_file), kind, n_tasks, json_to, run)
        return
    has_texts = len(files) > 1 or any(path.is_dir() for path in files)
    if by_position or text_values["chat"] or text_values["parse_special"] or has_texts:
        alone = {"--ppl-stride": stride, "--binary-file": binary_file, "--save-all-logits": save}
        if (flag := next((name for name, value in alone.items() if value), None)) is not None:
            raise click.UsageError(f"{flag} takes one text file, without --chat, --parse-special and --by-position")
        for name in declarations(SaveLogits):
            run.pop(name)
        _measure_texts(model, text_values, n_ctx, chunks, by_position, json_to, overwrite, run)
        return
    file = next(iter(files), None)
    if binary_file is None:
        text, ids = text_or_tokens(file, prompt, tokens)
    else:
        if any(value is not None for value in (file, prompt, tokens)):
            raise click.UsageError("give one of -f, -bf, -p and --tokens")
        text, ids = read_text(binary_file), None
    json_file = claim_json(json_to, [save], [model, file, binary_file, ids_file(tokens)], overwrite=overwrite)
    logits = {name: run.pop(name) for name in declarations(SaveLogits)}
    if base is not None and not on_command_line("format"):
        logits["format"] = "llama.cpp"
    if on_command_line("clip") and logits["format"] != "llama.cpp":
        raise click.UsageError("--clip is the range of another format: add --logits-format llama.cpp")
    save_logits = SaveLogits(save, overwrite=overwrite, **logits) if save is not None else None
    with closing(Bar(unit="chunk", desc="first pass")) as bar:

        def progress(now: PerplexityProgress) -> None:
            bar.update(now.current, now.total, f"PPL {now.ppl.value:.4f} +/- {now.ppl.error:.4f}")
            if json_to != "-":
                bar.print(_chunk_line(now, n_ctx, stride) if output_type == "1" else _running_line(now))

        result = perplexity(
            model,
            text,
            tokens=ids,
            n_ctx=n_ctx,
            n_batch=run["n_batch"],
            chunks=chunks,
            stride=stride,
            save_logits=save_logits,
            progress=progress,
            **evaluation_options(run),
        )
    echo_notes(result.notes)
    report(json_to, json_file, _final(result), _as_dict(result))


def _measure_texts(
    model: Path,
    values: Mapping[str, Any],
    n_ctx: int,
    chunks: int | None,
    by_position: bool,
    json_to: str | None,
    overwrite: bool,
    run: Mapping[str, Any],
) -> None:
    """Measure several texts, conversations, or positions, and print a row for each."""
    inputs = [model, *values["files"], *values["chat"], ids_file(values["tokens"])]
    json_file = claim_json(json_to, (), inputs, overwrite=overwrite)
    with closing(Bar(unit="chunk", desc="first pass")) as bar:
        result = perplexity_of_texts(
            model,
            texts_from(values),
            n_ctx=n_ctx,
            n_batch=run["n_batch"],
            chunks=chunks,
            by_position=by_position,
            progress=lambda now: bar.update(now.current, now.total, f"PPL {now.ppl.text(4)}"),
            **evaluation_options(run),
        )
    echo_notes(result.notes)
    report(json_to, json_file, _rows(result), result.as_dict())


def _rows(result: TextPerplexities) -> str:
    header = ["text", "tokens", "PPL", "± error"]
    total = [("total", result.sums)] if len(result.by_text) > 1 else []
    lines = [table(header, [_row(name, sums) for name, sums in (*result.by_text, *total)])]
    if result.by_position:
        rows = [_row(f"{first} to {end - 1}", sums) for (first, end), sums in result.by_position.items() if sums.n]
        lines += ["", table(["position", *header[1:]], rows)]
    lines += ["", f"{result.sums.n} tokens scored in {result.n_windows} chunks, {format_seconds(result.seconds)}"]
    return "\n".join(lines)


def _row(name: str, sums: NllSums) -> list[str]:
    return [printable(name), f"{sums.n}", f"{sums.ppl.value:.4f}", f"{sums.ppl.error:.4f}"]


def _divergence(
    model: Path, base: Path | None, n_ctx: int, chunks: int | None, json_to: str | None, run: Mapping[str, Any]
) -> None:
    """Run quantkit kld, whose text is that of the base."""
    from quantkit.cli.kld import command as kld

    ctx = click.get_current_context()
    if base is None:
        raise click.UsageError("--kl-divergence needs --kl-divergence-base FILE")
    if any(ctx.params[name] not in (None, ()) for name in ("files", "prompt", "tokens")):
        echo_notes([f"-f, -p and --tokens are ignored: {base} contains its text"])
    ctx.invoke(
        kld,
        models=(model,),
        bases=(base,),
        n_ctx=n_ctx if on_command_line("n_ctx") else None,
        chunks=chunks,
        json_to=json_to,
        overwrite=ctx.params["overwrite"],
        **run,
    )


def _score(
    model: Path, file: Path | None, kind: str | None, n_tasks: int | None, json_to: str | None, run: Mapping[str, Any]
) -> None:
    """Run quantkit score, as llama-perplexity with tasks."""
    from quantkit.cli.score import command as score

    ctx = click.get_current_context()
    if file is None:
        raise click.UsageError("tasks are given by -f FILE or -bf FILE")
    models = {"models": (model,), "hf_repo": None, "hf_file": None, "base": None}
    ctx.invoke(
        score,
        **models,
        file=file,
        kind=kind,
        n_tasks=n_tasks,
        json_to=json_to,
        overwrite=ctx.params["overwrite"],
        **run,
    )


def _running_line(now: PerplexityProgress) -> str:
    return f"[{now.current}]{now.ppl.value:.4f}, +/- {now.ppl.error:.4f}"


def _chunk_line(now: PerplexityProgress, n_ctx: int, stride: int) -> str:
    first_token = (now.current - 1) * (stride or n_ctx)
    return f"{first_token:8d}  {now.ppl.value:.4f}  {now.log_ppl.value:4f}  {now.log_ppl.error:4f}"


def _final(result: Perplexity) -> str:
    chunks = f"{result.n_chunks} {'windows' if result.stride else 'chunks'} of {result.n_ctx} tokens"
    lines = [f"Final estimate: PPL = {result.ppl.value:.4f} +/- {result.ppl.error:.5f}"]
    lines.append(f"{result.n_scored} tokens scored in {chunks}, {format_seconds(result.seconds)}")
    if result.activations == EXACT:
        lines.append("exact activations: not the perplexity of a runtime, which rounds them")
    if result.saved is not None:
        lines.append(f"{printable(result.saved)}: {format_size(result.saved.stat().st_size)}")
    return "\n".join(lines)


def _as_dict(result: Perplexity) -> dict[str, Any]:
    return {
        "model": str(result.model),
        "ppl": result.ppl.as_dict(),
        "ln_ppl": result.log_ppl.as_dict(),
        "n_ctx": result.n_ctx,
        "n_chunks": result.n_chunks,
        "ppl_stride": result.stride,
        "n_seq": result.n_seq,
        "n_tokens": result.n_tokens,
        "n_scored": result.n_scored,
        "bos": result.bos,
        "activations": result.activations,
        "seconds": result.seconds,
        "saved": str(result.saved) if result.saved is not None else None,
        "notes": list(result.notes),
        "running": [[finite(e.value), finite(e.error)] for e in result.running],
    }
