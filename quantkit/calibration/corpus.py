"""``quantkit calibration``: build a calibration text and an evaluation text that share no passage.

Documents are split into passages; consecutive passages of one document form a *section*. The seed shuffles sections.
The first ones, whole and in reading order, are held out for evaluation until --heldout of the size is reached. Passages
of the others, shuffled by the seed, fill the calibration text. Repetitions are dropped, and so are passages that share
too much with the held-out part.

The order is that of BLAKE2b(seed, text): it depends on the content alone, not on file names, their order or Python's
random numbers. The same texts and seed give the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.calibration.documents import Inputs, read_inputs
from quantkit.calibration.overlap import Sketch, sketch
from quantkit.calibration.passages import Deduplicator, passage_hash, split_passages
from quantkit.errors import FormatError, RecipeError, ResourceError, os_error_code
from quantkit.formats.outputs import Output, atomic_write, check_apart, check_free, read_whole
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.progress import Progress, ProgressCallback

CALIBRATION = "calibration.txt"
EVALUATION = "evaluation.txt"
MANIFEST = "manifest.json"
#: Separates passages.
GAP = "\n\n"
#: A section is at most 1/this of the held-out part, so that no single document fills it.
_SECTIONS = 4
#: How many times as long a byte takes to be selected than to be read.
_SELECTION = 5


@dataclass(frozen=True)
class Part:
    """One of the two texts."""

    file: str
    passages: tuple[str, ...] = field(repr=False)

    @property
    def text(self) -> str:
        """The passages, a blank line between them, a newline at the end."""
        return GAP.join(self.passages) + "\n" if self.passages else ""

    @property
    def nbytes(self) -> int:
        return len(self.text.encode())

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the text in the manifest."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "bytes": self.nbytes,
            "passages": [passage_hash(p) for p in self.passages],
        }


@dataclass(frozen=True)
class Corpus(HtmlTable):
    """Both texts, and the options and inputs that they were built from."""

    calibration: Part
    evaluation: Part
    options: dict[str, Any]
    inputs: Inputs = field(repr=False)
    dedup: Deduplicator = field(repr=False)
    notes: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """Return the manifest: options, inputs, hashes; reproducible, hence without time or host."""
        return {
            "made_by": "quantkit calibration",
            **self.options,
            "calibration": self.calibration.as_dict(),
            "evaluation": self.evaluation.as_dict(),
            "dropped": {
                "exact_duplicates": self.dedup.exact_dropped,
                "near_duplicates": self.dedup.near_dropped,
                "shared_with_evaluation": self.dedup.leak_dropped,
            },
            "inputs": [
                {"path": str(i.path), "documents": len(i.documents), "bytes": i.nbytes, "skipped": i.n_skipped}
                for i in self.inputs.files
            ],
        }

    def as_table(self) -> Table:
        """Return both texts."""
        rows = (
            (part.file, part.nbytes, len(part.passages), part.sha256) for part in (self.calibration, self.evaluation)
        )
        return table_of("text, bytes, passages, SHA-256", rows)


@checked
def calibration(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    *,
    size: int = 1_000_000,
    heldout: float = 0.05,
    seed: int = 0,
    passage: int = 2000,
    include: Sequence[str] = (),
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Corpus:
    """Build a calibration text and an evaluation text from local files.

    Args:
        inputs: files and directories.
        output: a directory for calibration.txt, evaluation.txt and manifest.json; None writes nothing.
        size: maximum size of both texts together, in bytes.
        heldout: share held out for evaluation, 0 to 0.5.
        seed: of the shuffles.
        passage: maximum size of a passage, in bytes.
        include: name patterns for files in directories.
        overwrite: replace files of an earlier run.
        progress: called before each file that is read, and with the bytes selected for calibration.

    Raises:
        RecipeError: values out of range.
        FormatError: inputs cannot be read, or have no text.
        ResourceError: an output exists.

    All inputs are held in memory.
    """
    _check(size, heldout, passage)
    folder = None if output is None else locate(output)
    outputs = [] if folder is None else [folder / name for name in (MANIFEST, CALIBRATION, EVALUATION)]
    if folder is not None and folder.exists():
        for output in outputs:
            check_free(output, overwrite=overwrite)
    steps = _Steps(progress, size)
    corpus_files = read_inputs([locate(path) for path in inputs], include=include, report=steps.read)
    check_apart(outputs, [file.path for file in corpus_files.files])
    dedup, key = Deduplicator(), _order(seed)
    # The share refers to the available text, even if that is less than --size.
    evaluation_size = int(min(size, sum(file.nbytes for file in corpus_files.files)) * heldout)
    sections = _sections(corpus_files, passage, max(passage, evaluation_size // _SECTIONS))
    if not sections:
        raise FormatError(
            f"no text in {', '.join(map(str, inputs)) or 'nothing'}: give files or folders with text", "QK-E121"
        )
    sections.sort(key=lambda section: key(GAP.join(section)))
    evaluation, remainder = _hold_out(sections, evaluation_size, dedup)
    pool = sorted(remainder, key=key)
    corpus = Corpus(
        Part(CALIBRATION, tuple(steps.follow(_fill(pool, size - evaluation_size, dedup)))),
        Part(EVALUATION, tuple(evaluation)),
        {"seed": seed, "size": size, "heldout": heldout, "passage": passage},
        corpus_files,
        dedup,
    )
    corpus = replace(corpus, notes=tuple(_notes(corpus)))
    if not corpus.calibration.passages:
        raise FormatError(
            f"no text remains for calibration: no passage fits into {size} bytes; raise --size", "QK-E214"
        )
    if heldout and not corpus.evaluation.passages:
        raise FormatError(
            f"no passage fits into the held-out part of {evaluation_size} bytes: give more text, raise heldout or"
            " size, or set heldout to 0 for no evaluation text",
            "QK-E214",
        )
    if folder is not None:
        _write(folder, corpus, overwrite)
    return corpus


class _Steps:
    """Progress: bytes read, then bytes selected, each of which takes ``_SELECTION`` times as long."""

    def __init__(self, report: ProgressCallback | None, size: int) -> None:
        self.report, self.size, self.n_read = report, size, 0

    def read(self, current: int, n_read: int, name: str) -> None:
        """Report the bytes read before a file."""
        self.n_read = n_read
        self._call(current, f"read {name}")

    def follow(self, passages: Iterable[str]) -> Iterator[str]:
        """Yield passages, and report their bytes."""
        selected = 0
        for piece in passages:
            selected += _length(piece)
            self._call(self.n_read + _SELECTION * selected, "select passages")
            yield piece
        self._call(self._total, "select passages")

    @property
    def _total(self) -> int:
        return self.n_read + _SELECTION * min(self.size, self.n_read)

    def _call(self, current: int, text: str) -> None:
        if self.report is not None:
            self.report(Progress(min(current, self._total), self._total, text))


def _check(size: int, heldout: float, passage: int) -> None:
    if not 0 <= heldout <= 0.5:
        raise RecipeError(f"the held-out part must be 0 to 50 % of the size, not {100 * heldout:g} %", "QK-E203")
    if passage < 64:
        raise RecipeError(f"passages of {passage} bytes are too short to detect repetitions: at least 64", "QK-E203")
    if size < passage:
        raise RecipeError(f"a size of {size} bytes is less than one passage of {passage} bytes", "QK-E203")


def _order(seed: int) -> Callable[[str], bytes]:
    """Return the sort key of the seed's order."""
    salt = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return lambda text: hashlib.blake2b(text.encode(), key=salt, digest_size=16).digest()


def _sections(inputs: Inputs, passage: int, max_bytes: int) -> list[list[str]]:
    """Split all documents into sections of at most ``max_bytes`` bytes."""
    sections = []
    for document in (text for file in inputs.files for text in file.documents):
        section: list[str] = []
        nbytes = 0
        for piece in split_passages(document, passage):
            length = _length(piece)
            if section and nbytes + length > max_bytes:
                sections.append(section)
                section, nbytes = [], 0
            section.append(piece)
            nbytes += length
        if section:
            sections.append(section)
    return sections


def _hold_out(sections: list[list[str]], nbytes: int, dedup: Deduplicator) -> tuple[list[str], list[str]]:
    """Take passages in section order up to ``nbytes`` bytes; return them and the remaining ones."""
    pieces = [piece for section in sections for piece in section]
    passages: list[str] = []
    for i, piece in enumerate(pieces):
        nbytes -= _length(piece)
        if nbytes < 0:
            return passages, pieces[i:]
        if dedup.take(piece, held_out=True):
            passages.append(piece)
        else:
            nbytes += _length(piece)
    return passages, []


def _length(piece: str) -> int:
    return len(piece.encode()) + len(GAP)


def _fill(pool: Iterable[str], nbytes: int, dedup: Deduplicator) -> Iterator[str]:
    """Yield new passages up to ``nbytes`` bytes."""
    left = nbytes
    for piece in pool:
        if _length(piece) > left:
            return
        if dedup.take(piece):
            left -= _length(piece)
            yield piece


def _notes(corpus: Corpus) -> Iterator[str]:
    inputs, size = corpus.inputs, corpus.options["size"]
    for file in inputs.files:
        if file.zeros:
            yield f"{file.path}: {file.zeros} NUL byte{'s' if file.zeros > 1 else ''} dropped"
        if file.n_skipped:
            first = f"first line {file.first_skipped}"
            yield f"{file.path}: skipped {file.n_skipped} records without text, {first}"
    if inputs.not_text:
        yield f"skipped {inputs.not_text} files in folders that are not UTF-8 text"
    total = corpus.calibration.nbytes + corpus.evaluation.nbytes
    if total < 0.9 * size:
        yield f"less text than --size: {total} of {size} bytes"


def _write(folder: Path, corpus: Corpus, overwrite: bool) -> None:
    """Write all three files; they appear together, the manifest last: if it exists, both texts are complete."""
    manifest = json.dumps(corpus.manifest(), indent=1, ensure_ascii=False) + "\n"
    texts = {MANIFEST: manifest, CALIBRATION: corpus.calibration.text, EVALUATION: corpus.evaluation.text}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError(
            f"{folder}: cannot be created: {e.strerror or e}; choose another folder", os_error_code(e)
        ) from None
    with ExitStack() as stack:
        for name, text in texts.items():
            path = stack.enter_context(Output(folder / name, overwrite=overwrite)).path
            stack.enter_context(atomic_write(path)).write_bytes(text.encode())
        (folder / MANIFEST).unlink(missing_ok=True)


def sketch_file(path: str | os.PathLike[str]) -> Sketch:
    """Return the sketch of a text file, to record (Sketch.fields) or compare (overlap). Raises FormatError."""
    return sketch(read_whole(os.fspath(path)))
