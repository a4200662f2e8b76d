"""``quantkit calibration``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click

from quantkit.calibration import Corpus, calibration
from quantkit.calibration.corpus import MANIFEST
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import SHARE, SIZE, GroupedCommand, echo_notes, option, setting
from quantkit.cli._paths import Place
from quantkit.cli._progress import Bar
from quantkit.names import printable
from quantkit.units import format_size

_TEXT, _OUT = "Text", "Output"


@click.command("calibration", cls=GroupedCommand)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=Place())
@setting("--size", group=_TEXT, type=SIZE, default="1M", help="Total size of both texts.")
@setting("--heldout", group=_TEXT, type=SHARE, default="5%", metavar="SHARE", help="Share of the text for evaluation.")
@setting("--seed", group=_TEXT, type=int, default=0, help="Seed of the selection and of its order.")
@setting("--passage", group=_TEXT, type=SIZE, default="2000", help="Maximum size of a passage.")
@option(
    "--include", group=_TEXT, multiple=True, metavar="GLOB", help="Read only matching files of directories; repeatable."
)
@option(
    "-o",
    "--output",
    group=_OUT,
    metavar="DIR",
    required=True,
    type=Place(file_okay=False),
    help="Output directory, for calibration.txt, evaluation.txt and manifest.json.",
)
@option("--overwrite", group=_OUT, is_flag=True, help="Replace the files of an earlier run.")
@json_option("the manifest")
def command(
    inputs: tuple[Path, ...],
    size: int,
    heldout: float,
    seed: int,
    passage: int,
    include: tuple[str, ...],
    output: Path,
    overwrite: bool,
    json_to: JsonOutput,
) -> None:
    """Build a calibration text and an evaluation text that share no passage.

    INPUT: files and directories of text, code, Markdown or JSON Lines (.jsonl,
    .ndjson) with chats or texts. They are split into passages, exact and near
    duplicates are dropped, and --seed selects passages. The same texts and seed
    give the same bytes.

    \b
    quantkit calibration -o corpus wiki.txt chats.jsonl ~/src/project
    quantkit calibration -o corpus --size 3M --heldout 10% --include '*.py' ~/src
    quantkit imatrix -m model-bf16.gguf -f corpus/calibration.txt
    quantkit perplexity -m model-Q4_K_M.gguf -f corpus/evaluation.txt
    """
    with closing(Bar(quiet=json_to.only, unit="B", unit_scale=True)) as bar:
        corpus = calibration(
            inputs,
            output,
            size=size,
            heldout=heldout,
            seed=seed,
            passage=passage,
            include=include,
            overwrite=overwrite,
            progress=lambda now: bar.update(*now),
        )
    echo_notes(corpus.notes)
    json_to.print(lambda: "\n".join(_lines(corpus, output)), corpus.manifest)


def _lines(corpus: Corpus, output: Path) -> Iterator[str]:
    files = corpus.inputs.files
    documents = sum(len(file.documents) for file in files)
    yield f"read: {len(files)} files, {documents} documents, {format_size(sum(file.nbytes for file in files))}"
    dedup = corpus.dedup
    yield (
        f"dropped: {dedup.exact_dropped} repeated passages, {dedup.near_dropped} nearly repeated,"
        f" {dedup.leak_dropped} too close to the held-out part"
    )
    for part in (corpus.calibration, corpus.evaluation):
        path = printable(str(output / part.file))
        yield f"{path}: {format_size(part.nbytes)}, {len(part.passages)} passages, sha256 {part.sha256[:16]}"
    yield f"{printable(str(output / MANIFEST))}: hashes of both texts and of every passage"
