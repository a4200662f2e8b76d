"""Values of a TOML file, checked one by one before any work: what is wrong is named by table and key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import RecipeError
from quantkit.names import printable, shorten
from quantkit.units import parse_size

T = TypeVar("T")

#: Reads a value as TOML has it; the folder is that of the file. Raises ValueError, which says what is expected.
Reader = Callable[[Any, Path], Any]


def key(read: Reader, help: str, default: Any = MISSING) -> Any:  # noqa: A002
    """Return a field of a table: how its value is read, what it means, and what it is if it is not given."""
    return field(default=default, metadata={"read": read, "help": help})


@dataclass(frozen=True, slots=True)
class Where:
    """Where a table is: the file, its folder, and how messages call the table."""

    origin: str
    folder: Path
    table: str = ""

    def fail(self, name: str, what: str) -> RecipeError:
        """Return the error about a key."""
        at = f"[{self.table}] " if self.table else ""
        return RecipeError(f"{self.origin}: {at}{printable(name)}: {what}")


def read_table(made: type[T], given: object, where: Where, others: Mapping[str, Iterable[str]] | None = None) -> T:
    """Return the dataclass that a table describes.

    ``others``: keys of the other tables by name, to say where a key belongs that is none of this one.
    """
    if not isinstance(given, dict):
        raise where.fail(where.table or "the file", "must be a table")
    known = {f.name: f for f in fields(made)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise where.fail(str(name), _unknown(str(name), known, others or {}))
    values = {}
    for name, value in given.items():
        try:
            values[name] = known[name].metadata["read"](value, where.folder)
        except ValueError as e:
            shown = shorten(printable(repr(value)), 60)
            raise where.fail(name, f"{shown}: {e}") from None
    missing = [n for n, f in known.items() if n not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise where.fail(missing[0], f"must be given ({known[missing[0]].metadata['help']})")
    return made(**values)


def _unknown(name: str, known: Iterable[str], others: Mapping[str, Iterable[str]]) -> str:
    near = get_close_matches(name, list(known), 1, 0.6)
    if near:
        return f"there is no such key; did you mean {near[0]}?"
    at = [table for table, keys in others.items() if name in keys]
    if at:
        return f"it is a key of {' and '.join(f'[{table}]' if table else 'the top of the file' for table in at)}"
    near = get_close_matches(name, [table for table in others if table], 1, 0.6)
    return f"there is no such key{f'; did you mean [{near[0]}]?' if near else ''}; there are {', '.join(known)}"


# ---------------------------------------------------------------- readers


def flag(value: Any, _: Path) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def word(value: Any, _: Path) -> str:
    """Read a text of one line."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("write a text of one line, in quotes")
    return value.strip()


def name_of_files(value: Any, folder: Path) -> str:
    """Read a part of file names."""
    text = word(value, folder)
    if "/" in text or text.startswith(".") or len(text.encode()) > 120:
        raise ValueError("a part of file names has no slash, no dot at its beginning, and at most 120 bytes")
    return text


def choice(*names: str) -> Reader:
    """Read one of some words."""

    def read(value: Any, _: Path) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"write {' or '.join(repr(n) for n in names)}")
        return value

    return read


def whole(least: int, most: int = 1 << 31) -> Reader:
    """Read a whole number within bounds."""

    def read(value: Any, _: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"write a whole number from {least}{f' to {most}' if most < 1 << 31 else ''}")
        return value

    return read


def count_or_all(value: Any, _: Path) -> int | None:
    """Read a number of chunks; "all" is None."""
    if value == "all":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError('write a number above 0, or "all"')
    return value


def full_runs(value: Any, folder: Path) -> int | None:
    """Read a number of types that run in full: "auto" is None, "all" -1."""
    if value == "auto":
        return None
    return -1 if value == "all" else whole(1)(value, folder)


def share(value: Any, _: Path) -> float:
    """Read a share: 0.05 or "5%"."""
    found = -1.0
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,3}(\.\d{1,9})?\s*%\s*", value):
        found = float(value.strip().rstrip("%")) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    if not 0 <= found <= 0.5:
        raise ValueError('write a share up to a half: 0.05 or "5%"')
    return found


def positive(value: Any, _: Path) -> float:
    """Read a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError("write a number above 0")
    return float(value)


def size(value: Any, _: Path) -> int:
    """Read a number of bytes: 1000000 or "1M"."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62:
        return value
    try:
        found = parse_size(value) if isinstance(value, str) and len(value) < 40 else 0
    except (ValueError, OverflowError):
        found = 0
    if not 0 < found < 1 << 62:
        raise ValueError('write a number of bytes, or "1M", "48G", "512MiB"')
    return found


def path(value: Any, folder: Path) -> Path:
    """Read a path; one that is not absolute begins in the folder of the file."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("write a path, in quotes")
    if re.match(r"\w+://", value):
        raise ValueError("a file of this machine is needed; download it first")
    try:
        return folder / Path(value).expanduser()
    except RuntimeError as e:
        raise ValueError(str(e)) from None


def paths(value: Any, folder: Path) -> tuple[Path, ...]:
    """Read one or more paths."""
    if isinstance(value, str):
        return (path(value, folder),)
    if not isinstance(value, list):
        raise ValueError('write a path, or several: ["a.txt", "b.txt"]')
    return tuple(path(each, folder) for each in value)


def words(value: Any, folder: Path) -> tuple[str, ...]:
    """Read one or more words."""
    if isinstance(value, str):
        return (word(value, folder),)
    if not isinstance(value, list):
        raise ValueError('write a word, or several: ["a", "b"]')
    return tuple(word(each, folder) for each in value)
