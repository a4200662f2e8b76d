"""Texts to measure models on, a file a category, written for quantkit and in the public domain: ``quantkit texts``.

No model was calibrated on them, and none should be: ``calibration.heldout`` recognizes them. Each has at least ten
chunks of 512 tokens with common vocabularies, so that the divergence of a category has an error. The files are beside
this module; their digests are recorded here, so that figures of different machines are on the same text.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.outputs import Output, atomic_write
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of

_FOLDER = Path(__file__).parent
#: The license of the texts, an SPDX identifier.
LICENSE = "CC0-1.0"


@dataclass(frozen=True)
class CategoryText:
    """A text of the set: the name of its file, what it contains, its size in bytes, and its SHA-256, hex."""

    name: str
    content: str
    nbytes: int
    sha256: str

    def read(self) -> bytes:
        """Return its bytes. Raises FormatError if they are not those recorded."""
        path = _FOLDER / self.name
        try:
            raw = path.read_bytes()
        except OSError as e:
            raise FormatError(f"{path}: {e.strerror or e}: install quantkit again", "QK-E401") from None
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            raise FormatError(f"{path}: it is not the text of this version of quantkit: install it again", "QK-E100")
        return raw


TEXTS = (
    CategoryText(
        "prose.txt",
        "English prose: stories, letters, essays, instructions",
        24329,
        "a87640b96bd3f3bb4b68dfeadb815c2cf3b09ad319b78371ae73db46807bb62f",
    ),
    CategoryText(
        "code.txt",
        "source code in 13 languages, a diff, a build file",
        23716,
        "2cf111392d41ad0fbf284a293cb4e30a307eb025134a0506f1d0e31ef3c95fbd",
    ),
    CategoryText(
        "languages.txt",
        "prose in 15 languages, from German to Hindi",
        23163,
        "2e6cfc5f29d61c554f4bf8433b3f2e6f98953f2d05639b22491f8b898e5f5c08",
    ),
    CategoryText(
        "mathematics.txt",
        "proofs and worked exercises of mathematics and science, in LaTeX",
        19259,
        "8a4f662509b15639f71cb75fdd71de43a499835a2654925ee1fcec70cb5bca15",
    ),
    CategoryText(
        "structured.txt",
        "tool calls, JSON, YAML, tables, logs, shell sessions",
        16938,
        "03fa968dfb5326c806d26b7dfb37191a16d8f362db95e3b660a714023623de06",
    ),
    CategoryText(
        "chat.jsonl",
        "16 conversations, for --chat",
        25759,
        "4628efa21656021d372c726cecd44dc61c6b53da5653e68ea62af467605bdd8d",
    ),
)


@dataclass(frozen=True)
class TextSet(HtmlTable):
    """The set; ``folder``: where it was written, or None."""

    texts: tuple[CategoryText, ...] = TEXTS
    folder: Path | None = None

    def as_table(self) -> Table:
        """Return a row per text: name, bytes, SHA-256, content."""
        return table_of("text, bytes, SHA-256, content", [(t.name, t.nbytes, t.sha256, t.content) for t in self.texts])

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit texts --json`` writes."""
        folder = None if self.folder is None else str(self.folder)
        return {"license": LICENSE, "folder": folder, "texts": [asdict(text) for text in self.texts]}


@checked
def texts(folder: str | Path | None = None, *, overwrite: bool = False) -> TextSet:
    """Return the set of texts, and write its files to a folder, if one is given; it is created.

    Raises:
        FormatError: a file of the installation is damaged.
        ResourceError: a file exists, unless ``overwrite``, or cannot be written.
    """
    if folder is None:
        return TextSet()
    place = locate(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        problem = f"{place}: cannot be created: {e.strerror or e}; choose another folder"
        raise ResourceError(problem, os_error_code(e)) from None
    with ExitStack() as stack:
        outputs = [(stack.enter_context(Output(place / t.name, overwrite=overwrite)), t.read()) for t in TEXTS]
        for output, raw in outputs:
            with atomic_write(output.path) as part:
                part.write_bytes(raw)
    return TextSet(folder=place)


def is_in_set(raw: bytes) -> bool:
    """Return whether the bytes of a file are those of a text of the set."""
    return hashlib.sha256(raw).hexdigest() in _DIGESTS


_DIGESTS = frozenset(text.sha256 for text in TEXTS)
