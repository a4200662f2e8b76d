"""``quantkit calibration``: a corpus to calibrate on, and one to evaluate on that shares nothing with it.

Documents are cut into passages; a run of passages of one document is a *section*. Sections are shuffled by the seed.
The first of them, whole and in reading order, are held out for evaluation until --heldout of the size is reached. The
passages of the others, shuffled by the seed, make the calibration text until the size is full. Repetitions are dropped,
and so are passages that share too much with the held-out part.

The order is that of BLAKE2b(seed, text): it depends on the content, not on file names, their order or
Python's random numbers. The same texts and the same seed give the same bytes everywhere.
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

from quantkit.calibration.documents import Inputs, read_inputs
from quantkit.calibration.overlap import Sketch, sketch
from quantkit.calibration.passages import Seen, cut, passage_hash
from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.formats.outputs import Output, check_apart, check_free, read_whole, written

CALIBRATION, EVALUATION, MANIFEST = "calibration.txt", "evaluation.txt", "manifest.json"
#: Separates passages.
GAP = "\n\n"
#: A section is at most this share of the held-out part, so that no document can fill it alone.
_SECTIONS = 4


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
        """Return its entry in the manifest."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "bytes": self.nbytes,
            "passages": [passage_hash(p) for p in self.passages],
        }


@dataclass(frozen=True)
class Corpus:
    """Both texts, and how they were made."""

    calibration: Part
    evaluation: Part
    options: dict[str, Any]
    inputs: Inputs = field(repr=False)
    seen: Seen = field(repr=False)
    notes: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """Return the manifest: options, inputs, hashes; reproducible, hence without time or host."""
        return {
            "made_by": "quantkit calibration",
            **self.options,
            "calibration": self.calibration.as_dict(),
            "evaluation": self.evaluation.as_dict(),
            "dropped": {
                "exact_duplicates": self.seen.exact_dropped,
                "near_duplicates": self.seen.near_dropped,
                "shared_with_evaluation": self.seen.leak_dropped,
            },
            "inputs": [
                {"path": str(i.path), "documents": len(i.documents), "bytes": i.nbytes, "skipped": i.skipped}
                for i in self.inputs.files
            ],
        }


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
) -> Corpus:
    """Build a corpus from local texts.

    Args:
        inputs: files and folders.
        output: a folder for calibration.txt, evaluation.txt and manifest.json; None writes nothing.
        size: bytes of both texts together, at most.
        heldout: the share kept for evaluation, 0 to 0.5.
        seed: draws the order.
        passage: bytes of a passage, at most.
        include: name patterns for files in folders.
        overwrite: replace files of an earlier run.

    Raises RecipeError for options that make no sense, FormatError for unusable inputs, ResourceError for an output
    that exists. All inputs are held in memory.
    """
    _check(size, heldout, passage)
    folder = None if output is None else Path(output)
    outputs = [] if folder is None else [folder / name for name in (MANIFEST, CALIBRATION, EVALUATION)]
    if folder is not None and folder.exists():
        for output in outputs:
            check_free(output, overwrite=overwrite)
    found = read_inputs([Path(path) for path in inputs], include=include)
    check_apart(outputs, [file.path for file in found.files])
    seen, key = Seen(), _order(seed)
    # The share is that of the text there is, even if it is less than --size.
    evaluation_size = int(min(size, sum(file.nbytes for file in found.files)) * heldout)
    sections = _sections(found, passage, max(passage, evaluation_size // _SECTIONS))
    if not sections:
        raise FormatError(f"no text in {', '.join(map(str, inputs)) or 'nothing'}: name files or folders with text")
    sections.sort(key=lambda section: key(GAP.join(section)))
    evaluation, rest = _hold_out(sections, evaluation_size, seen)
    pool = sorted(rest, key=key)
    corpus = Corpus(
        Part(CALIBRATION, tuple(_fill(pool, size - evaluation_size, seen))),
        Part(EVALUATION, tuple(evaluation)),
        {"seed": seed, "size": size, "heldout": heldout, "passage": passage},
        found,
        seen,
    )
    corpus = replace(corpus, notes=tuple(_notes(corpus)))
    if not corpus.calibration.passages:
        raise FormatError(f"nothing is left to calibrate on: no passage fits {size} bytes; raise --size")
    if folder is not None:
        _write(folder, corpus, overwrite)
    return corpus


def _check(size: int, heldout: float, passage: int) -> None:
    if not 0 <= heldout <= 0.5:
        raise RecipeError(f"the held-out part must be 0 to 50 % of the size, not {100 * heldout:g} %")
    if passage < 64:
        raise RecipeError(f"passages of {passage} bytes are too short to tell repetitions: at least 64")
    if size < passage:
        raise RecipeError(f"a size of {size} bytes holds no passage of {passage} bytes")


def _order(seed: int) -> Callable[[str], bytes]:
    """Return the key that puts texts in the seed's order."""
    salt = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return lambda text: hashlib.blake2b(text.encode(), key=salt, digest_size=16).digest()


def _sections(inputs: Inputs, passage: int, most: int) -> list[list[str]]:
    """Cut all documents into runs of passages of at most ``most`` bytes."""
    sections = []
    for document in (text for file in inputs.files for text in file.documents):
        section: list[str] = []
        nbytes = 0
        for piece in cut(document, passage):
            length = _length(piece)
            if section and nbytes + length > most:
                sections.append(section)
                section, nbytes = [], 0
            section.append(piece)
            nbytes += length
        if section:
            sections.append(section)
    return sections


def _hold_out(sections: list[list[str]], nbytes: int, seen: Seen) -> tuple[list[str], list[str]]:
    """Take passages in section order until ``nbytes`` are full; return them and the rest."""
    pieces = [piece for section in sections for piece in section]
    taken: list[str] = []
    for i, piece in enumerate(pieces):
        nbytes -= _length(piece)
        if nbytes < 0:
            return taken, pieces[i:]
        if seen.take(piece, held_out=True):
            taken.append(piece)
        else:
            nbytes += _length(piece)
    return taken, []


def _length(piece: str) -> int:
    return len(piece.encode()) + len(GAP)


def _fill(pool: Iterable[str], nbytes: int, seen: Seen) -> Iterator[str]:
    """Yield passages that are new until ``nbytes`` are full."""
    left = nbytes
    for piece in pool:
        if _length(piece) > left:
            return
        if seen.take(piece):
            left -= _length(piece)
            yield piece


def _notes(corpus: Corpus) -> Iterator[str]:
    inputs, size = corpus.inputs, corpus.options["size"]
    for file in inputs.files:
        if file.zeros:
            yield f"{file.path}: {file.zeros} bytes 0 are dropped"
        if file.skipped:
            yield f"{file.path}: {file.skipped} records have no text and are left out, first line {file.first_skipped}"
    if inputs.not_text:
        yield f"{inputs.not_text} files in folders are no UTF-8 text"
    total = corpus.calibration.nbytes + corpus.evaluation.nbytes
    if total < 0.9 * size:
        yield f"there is less text than --size: {total} of {size} bytes"
    if corpus.options["heldout"] and not corpus.evaluation.passages:
        yield "the held-out part is too small for a single passage: no evaluation text"


def _write(folder: Path, corpus: Corpus, overwrite: bool) -> None:
    """Write all three files; they appear together, the manifest last: if it exists, both texts are complete."""
    manifest = json.dumps(corpus.manifest(), indent=1, ensure_ascii=False) + "\n"
    texts = {MANIFEST: manifest, CALIBRATION: corpus.calibration.text, EVALUATION: corpus.evaluation.text}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError(f"{folder}: cannot be made: {e.strerror or e}; name another folder") from None
    with ExitStack() as stack:
        for name, text in texts.items():
            path = stack.enter_context(Output(folder / name, overwrite=overwrite)).path
            stack.enter_context(written(path)).write_bytes(text.encode())
        (folder / MANIFEST).unlink(missing_ok=True)


def sketch_file(path: str | os.PathLike[str]) -> Sketch:
    """Return the sketch of a text file, to record (Sketch.fields) or compare (overlap). Raises FormatError."""
    return sketch(read_whole(os.fspath(path)))
