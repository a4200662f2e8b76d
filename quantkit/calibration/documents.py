"""Text from local files: plain text and code unchanged, JSON Lines record by record.

A named file that cannot be read is an error. In folders, all UTF-8 text files are read; hidden files are skipped, and
files that are not text are skipped and counted. Stray zero bytes are dropped; many mean that a file is not text.
The text of a JSON Lines record is the first of these that exists::

    {"messages": [{"role": ..., "content": ...}, ...]}      contents, a blank line between; also "conversation(s)"
    {"conversations": [{"from": ..., "value": ...}, ...]}
    {"text": ...} or {"content": ...}
    {"instruction": ..., "input": ..., "output": ...}, {"prompt": ..., "completion": ...}, {"question": ..., ...} etc.

Roles are omitted: their form depends on the model's chat template (quantkit imatrix --chat applies it).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError
from quantkit.formats.outputs import read_whole
from quantkit.texts import is_in_set

JSON_LINES = (".jsonl", ".ndjson")
_TURN_KEYS = ("messages", "conversations", "conversation")
_TEXT_KEYS = ("text", "content")
_PART_KEYS = (
    "system", "instruction", "question", "prompt", "input", "context", "output", "completion", "response", "answer",
)  # fmt: skip


#: A text may contain stray NUL bytes, up to one in this number.
_ZERO_SHARE = 1000


@dataclass
class Input:
    """The documents of one file."""

    path: Path
    #: Number of NUL bytes dropped.
    zeros: int = 0
    #: Whether it is a text of quantkit texts, for evaluation.
    is_held_out: bool = False
    documents: list[str] = field(default_factory=list, repr=False)
    #: JSON Lines records without a text, and the line of the first.
    n_skipped: int = 0
    first_skipped: int = 0

    @property
    def nbytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(len(text.encode()) for text in self.documents)


@dataclass
class Inputs:
    """All documents read."""

    files: list[Input]
    #: Files in folders that are not text, and files that --include excludes.
    not_text: int = 0
    left_out: int = 0


def list_inputs(paths: Sequence[Path], *, include: Sequence[str] = ()) -> tuple[list[tuple[Path, bool]], int]:
    """Return the files, each with whether it is named itself, and the number that ``include`` leaves out."""
    files, left_out = [], 0
    for path in paths:
        if not path.is_dir():
            files.append((path, True))
            continue
        for file in _walk(path):
            if include and not any(fnmatch(file.name, pattern) for pattern in include):
                left_out += 1
            else:
                files.append((file, False))
    return files, left_out


def read_inputs(
    paths: Sequence[Path], *, include: Sequence[str] = (), report: Callable[[int, int, str], object] | None = None
) -> Inputs:
    """Read files and folders; ``include`` are name patterns (*.md) for files in folders.

    ``report`` is called before each file with the bytes read so far, those of all files, and its name. Raises
    FormatError for a path that is missing, a named file that is not UTF-8 text, or invalid JSON Lines.
    """
    files, left_out = list_inputs(paths, include=include)
    sizes = [path.stat().st_size if path.is_file() else 0 for path, _ in files]
    inputs = Inputs([], left_out=left_out)
    for (path, is_named), position in zip(files, accumulate(sizes, initial=0), strict=False):
        if report is not None:
            report(position, sum(sizes), path.name)
        raw = read_whole(path)
        if not is_named and _text_problem(raw):
            inputs.not_text += 1
        else:
            inputs.files.append(_input(path, raw))
    return inputs


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted, without hidden ones or links to folders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _text_problem(raw: bytes) -> str | None:
    if raw.count(0) * _ZERO_SHARE > len(raw):
        return f"{raw.count(0)} of {len(raw)} bytes are NUL"
    try:
        raw.decode()
    except UnicodeDecodeError as e:
        return f"invalid UTF-8 at byte {e.start}"
    return None


def _input(path: Path, raw: bytes) -> Input:
    problem = _text_problem(raw)
    if problem is not None:
        raise FormatError(f"{path}: not a text file ({problem}): convert it, or omit it", "QK-E121")
    result = Input(path, raw.count(0), is_in_set(raw))
    text = raw.replace(b"\0", b"").decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    if path.suffix.lower() not in JSON_LINES:
        result.documents += [text] if text.strip() else []
        return result
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as e:
            raise FormatError(f"{path}: line {number} is not JSON: {e}", "QK-E111") from None
        document = record_text(record)
        if document is not None:
            # A lone surrogate, which JSON allows and UTF-8 does not, becomes "?".
            result.documents.append(document.encode(errors="replace").decode())
        else:
            result.n_skipped += 1
            result.first_skipped = result.first_skipped or number
    if result.n_skipped and not result.documents:
        keys = ", ".join((*_TURN_KEYS, *_TEXT_KEYS, *_PART_KEYS))
        raise FormatError(f"{path}: no record has text under any of the keys {keys}", "QK-E121")
    return result


def record_text(record: Any) -> str | None:
    """Return the text of a JSON Lines record (see the module), None without one."""
    if isinstance(record, str):
        return record if record.strip() else None
    if not isinstance(record, dict):
        return None
    for key in _TURN_KEYS:
        if isinstance(record.get(key), list):
            return _join(_turn(turn) for turn in record[key])
    for key in _TEXT_KEYS:
        if isinstance(record.get(key), str):
            return _join([record[key]])
    return _join(record[key] for key in _PART_KEYS if isinstance(record.get(key), str))


def _turn(turn: Any) -> str:
    """Return the text of a turn; of a list of parts, the text parts."""
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, dict):
        return ""
    content = turn.get("content", turn.get("value", turn.get("text")))
    if isinstance(content, list):
        return "\n".join(_turn(part) for part in content if not isinstance(part, dict) or "text" in part)
    return content if isinstance(content, str) else ""


def _join(parts: Any) -> str | None:
    return "\n\n".join(part for part in parts if part.strip()) or None
