"""``quantkit drift``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import MEANINGS
from quantkit.cli._evaluation import (
    MODEL,
    RUN,
    TEXT,
    activations_option,
    claim_json,
    engine_options,
    json_option,
    kv_options_of,
    load_options,
    report,
    ubatch_option,
)
from quantkit.cli._options import GroupedCommand, echo_notes, option, setting, threads_option
from quantkit.cli._paths import MODEL_FILE, TEXT_FILE
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.drift import Drift, drift, read_texts
from quantkit.drift.compare import TOP, embed_base
from quantkit.drift.texts import SEPARATORS
from quantkit.errors import QualityGate
from quantkit.names import printable
from quantkit.progress import Progress
from quantkit.units import format_seconds

_POOLINGS = ("mean", "cls", "last")
#: Characters of the worst text in the output.
_EXCERPT = 60


@click.command("drift", cls=GroupedCommand)
@option(
    "-m", "--model", "models", group=MODEL, type=MODEL_FILE, multiple=True, required=True, help="GGUF file; repeatable."
)
@option("--base", group=MODEL, type=MODEL_FILE, required=True, metavar="FILE", help="The file to compare with (BF16).")
@option("-f", "--file", "file", group=TEXT, type=TEXT_FILE, required=True, help="Text file; - for stdin.")
@setting(
    "--split",
    group=TEXT,
    type=click.Choice(list(SEPARATORS)),
    default="lines",
    help="Texts are its lines, or its paragraphs, which empty lines separate.",
)
@option("--texts", "n_texts", group=TEXT, type=click.IntRange(1), metavar="N", help="Use the first N texts.")
@option(
    "--pooling", group=RUN, type=click.Choice(_POOLINGS), help="Pooling of the tokens' rows.  [default: the file's]"
)
@setting("--top", group=RUN, type=click.IntRange(1), default=TOP, help="Neighbours of recall.")
@activations_option("exact; on GPUs runtime")
@ubatch_option
@threads_option
@kv_options_of("f32")
@engine_options
@option("--max-drift", group=RUN, type=click.FloatRange(0), help="Exit with code 3 if 1 - the mean cosine is larger.")
@json_option
def command(
    models: tuple[Path, ...],
    base: Path,
    file: Path,
    split: str,
    n_texts: int | None,
    pooling: str | None,
    top: int,
    max_drift: float | None,
    json_to: str | None,
    overwrite: bool,
    **run: Any,
) -> None:
    """Compare the embeddings of a quantized encoder with its base's.

    Prints the cosine of both embeddings of a text, and what a search would notice:
    the rank correlation of the similarities of all pairs of texts, texts with the
    same nearest neighbour, and recall of the nearest ones. Encoders have no next
    token, so no perplexity; of decoders, the rows after the last norm are pooled.

    \b
    quantkit drift -m minilm-Q8_0.gguf --base minilm-f32.gguf -f sentences.txt
    quantkit drift -m a.gguf -m b.gguf --base f32.gguf -f t.txt --split paragraphs
    """
    json_file = claim_json(json_to, (), [*models, base, file], overwrite=overwrite)
    texts, load = read_texts(file, split, n_texts), load_options(run)
    with closing(Bar(unit="text", desc=printable(base.name))) as bar:
        first = embed_base(base, texts, pooling, lambda now: bar.update(now.current, now.total, ""), load)
    results = []
    for path in models:
        with closing(Bar(unit="text", desc=printable(path.name))) as bar:

            def progress(now: Progress, bar: Bar = bar) -> None:
                bar.update(now.current, now.total, "")

            results.append(drift(path, first, texts, pooling=pooling, top=top, progress=progress, **load))
    echo_notes(dict.fromkeys(note for result in results for note in result.notes))
    report(json_to, json_file, _text(results, texts), {"models": [result.as_dict() for result in results]})
    for result in results:
        if max_drift is not None and not 1 - result.mean.value <= max_drift:
            raise QualityGate(
                f"{result.model}: the mean cosine is {result.mean.value:.6f}, so the drift is above --max-drift "
                f"{max_drift:g}"
            )


def _text(results: Sequence[Drift], texts: Sequence[str]) -> str:
    heads = ["model", "mean cosine", "worst", "rank correlation", "same nearest", "recall"]
    nearest = results[0].neighbours
    heads[-1] = f"recall@{nearest.k}" if nearest is not None else "recall"
    lines = [
        f"{len(texts):,} texts, embeddings of {results[0].width} values, pooling {results[0].pooling}",
        "",
        table(heads, [_row(result) for result in results]),
        "",
    ]
    for result in results:
        text = texts[result.worst]
        excerpt = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
        lines.append(f"{printable(result.model.name)}: worst at text {result.worst + 1}: {printable(excerpt)}")
    lines += ["", MEANINGS[results[0].activations], format_seconds(sum(result.seconds for result in results))]
    return "\n".join(lines)


def _row(result: Drift) -> list[str]:
    row = [printable(result.model.name), result.mean.text(6), f"{result.cosines.min():.6f}"]
    nearest = result.neighbours
    if nearest is None:
        return [*row, "-", "-", "-"]
    low, high = nearest.same_nearest.interval()
    share = f"{100 * nearest.same_nearest.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    return [*row, nearest.rank_correlation.text(5), share, nearest.recall.text(4)]
