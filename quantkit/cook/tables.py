"""Tables of a TOML file as dataclasses; errors name the table and the key."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from quantkit.arguments import Option, Options, declarations
from quantkit.errors import RecipeError
from quantkit.formats.remote import URL, locate
from quantkit.names import printable, shorten
from quantkit.options.quantize import parse_layers
from quantkit.units import parse_size

T = TypeVar("T")

#: Checks a TOML value and returns the setting, or raises ValueError; the folder is that of the file.
Reader = Callable[[Any, Path], Any]


def key(read: Reader, help: str, default: Any = MISSING, example: str | None = None) -> Any:  # noqa: A002
    """Return a field of a table.

    Args:
        read: reads and checks its value.
        help: its meaning, for the file that `cook init` writes.
        default: its value if the key is missing; without a default the key is required.
        example: a value, as TOML, for that file; default: the default value.
    """
    return field(default=default, metadata={"read": read, "help": help, "example": example})


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a table: the reader of its value, its help, and an example as TOML."""

    read: Reader
    help: str
    example: str
    required: bool = False


def keys_of(table: Any) -> dict[str, Key]:
    """Return the keys of a dataclass of ``key`` fields, or of options, without those that cook sets itself."""
    if issubclass(table, Options):
        names = {name: o for name, o in declarations(table).items() if o.example is not None}
        kinds = {f.name: str(f.type) for f in fields(table)}
        return {name: Key(_reader(kinds[name], o), o.help, o.example or "") for name, o in names.items()}
    return {f.name: _key(f) for f in fields(table) if "read" in f.metadata}


def _key(f: Any) -> Key:
    required = f.default is MISSING and f.default_factory is MISSING
    example = f.metadata["example"]
    return Key(f.metadata["read"], f.metadata["help"], as_toml(f.default) if example is None else example, required)


def as_toml(value: Any) -> str:
    """Return a default as TOML, which includes JSON's strings, numbers and lists."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _reader(annotation: str, declaration: Option) -> Reader:
    """Return the reader of an option's value."""
    if declaration.choices:
        return choice(*declaration.choices)
    if declaration.kind in ("size", "shard size", "layers"):
        return layers if declaration.kind == "layers" else size
    if annotation == "bool":
        return flag
    if annotation.startswith("int"):
        return integer(declaration.least)
    single, multiple = (path, paths) if "Path" in annotation else (word, words)
    return multiple if annotation.startswith("tuple") else single


@dataclass(frozen=True, slots=True)
class TableLocation:
    """Location of a table: the file, its folder, and the name of the table, for messages."""

    origin: str
    folder: Path
    table: str = ""

    def error(self, name: str, problem: str, code: str = "QK-E208") -> RecipeError:
        """Return the error for a key."""
        table = f"[{self.table}] " if self.table else ""
        return RecipeError(f"{self.origin}: {table}{shorten(printable(name), 60)}: {problem}", code)


def read_table(
    kind: type[T], table: object, location: TableLocation, tables: Mapping[str, Iterable[str]] | None = None
) -> T:
    """Return the dataclass ``kind`` of a table.

    ``tables``: keys of all tables by name, for messages about a key that belongs to another table.
    """
    return kind(**read_values(keys_of(kind), table, location, tables))


def read_values(
    keys: Mapping[str, Key], table: object, location: TableLocation, tables: Mapping[str, Iterable[str]] | None = None
) -> dict[str, Any]:
    """Return the values of a table by key; errors as ``read_table``."""
    if not isinstance(table, dict):
        raise location.error(location.table or "the file", "must be a table")
    for name in table:
        if name not in keys:
            raise location.error(str(name), _unknown(str(name), keys, tables or {}))
    values = {}
    for name, value in table.items():
        try:
            values[name] = keys[name].read(value, location.folder)
        except ValueError as e:
            text = shorten(printable(reprlib.repr(value)), 60)
            raise location.error(name, f"{text}: {e}") from None
    missing = [name for name, key in keys.items() if key.required and name not in values]
    if missing:
        raise location.error(missing[0], f"must be given ({keys[missing[0]].help})")
    return values


def _unknown(name: str, allowed: Iterable[str], tables: Mapping[str, Iterable[str]]) -> str:
    matches = get_close_matches(name, list(allowed), 1, 0.6)
    if matches:
        return f"unknown key; did you mean {matches[0]}?"
    owners = [table for table, keys in tables.items() if name in keys]
    if owners:
        return (
            f"this key belongs to {' and '.join(f'[{table}]' if table else 'the top of the file' for table in owners)}"
        )
    matches = get_close_matches(name, [table for table in tables if table], 1, 0.6)
    return f"unknown key{f'; did you mean [{matches[0]}]?' if matches else ''}; allowed are {', '.join(allowed)}"


# ---------------------------------------------------------------- readers


def flag(value: Any, _: Path) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def word(value: Any, _: Path) -> str:
    """Read one line of text."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("write one line of text, in quotes")
    return value.strip()


def name_of_files(value: Any, folder: Path) -> str:
    """Read a part of file names."""
    text = word(value, folder)
    if "/" in text or text.startswith(".") or len(text.encode()) > 120:
        raise ValueError("write at most 120 bytes without a slash and without a leading dot")
    return text


def choice(*names: str) -> Reader:
    """Read one of several words."""

    def read(value: Any, _: Path) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"write {' or '.join(repr(n) for n in names)}")
        return value

    return read


def integer(least: int, most: int = 1 << 31) -> Reader:
    """Read an integer within bounds."""

    def read(value: Any, _: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"write an integer from {least}{f' to {most}' if most < 1 << 31 else ''}")
        return value

    return read


def count_or_all(value: Any, _: Path) -> int | None:
    """Read a number of chunks; "all" is None."""
    if value == "all":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError('write a number greater than 0, or "all"')
    return value


def full_runs(value: Any, folder: Path) -> int | None:
    """Read a number of types that run in full: "auto" is None, "all" -1."""
    if value == "auto":
        return None
    return -1 if value == "all" else integer(1)(value, folder)


def share(value: Any, _: Path) -> float:
    """Read a share: 0.05 or "5%"."""
    fraction = -1.0
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,3}(\.\d{1,9})?\s*%\s*", value):
        fraction = float(value.strip().rstrip("%")) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        fraction = float(value)
    if not 0 <= fraction <= 0.5:
        raise ValueError('write a share of at most one half: 0.05 or "5%"')
    return fraction


def positive(value: Any, _: Path) -> float:
    """Read a number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError("write a number greater than 0")
    return float(value)


def size(value: Any, _: Path) -> int:
    """Read a number of bytes: 1000000 or "1M"."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62:
        return value
    try:
        nbytes = parse_size(value) if isinstance(value, str) and len(value) < 40 else 0
    except (ValueError, OverflowError):
        nbytes = 0
    if not 0 < nbytes < 1 << 62:
        raise ValueError('write a number of bytes, or "1M", "48G", "512MiB"')
    return nbytes


def size_or_0(value: Any, folder: Path) -> int:
    """Read a number of bytes that may be 0."""
    return 0 if value == 0 and not isinstance(value, bool) else size(value, folder)


def sizes(value: Any, folder: Path) -> tuple[int, ...]:
    """Read one or more numbers of bytes."""
    return tuple(size(item, folder) for item in (value if isinstance(value, list) else [value]))


def path(value: Any, folder: Path) -> Path:
    """Read a path; a relative path starts at the folder of the file."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("write a path, in quotes")
    location = locate(value)
    if isinstance(location, URL):
        raise ValueError("must be a local file; download it first")
    try:
        return folder / location.expanduser()
    except RuntimeError as e:
        raise ValueError(str(e)) from None


def layers(value: Any, _: Path) -> tuple[int, ...]:
    """Read layers: "3,7-9"."""
    if not isinstance(value, str):
        raise ValueError('write layers in quotes: "3,7-9"')
    return parse_layers(value)


def paths(value: Any, folder: Path) -> tuple[Path, ...]:
    """Read one or more paths."""
    if isinstance(value, str):
        return (path(value, folder),)
    if not isinstance(value, list):
        raise ValueError('write one path, or a list: ["a.txt", "b.txt"]')
    return tuple(path(item, folder) for item in value)


def words(value: Any, folder: Path) -> tuple[str, ...]:
    """Read one or more words."""
    if isinstance(value, str):
        return (word(value, folder),)
    if not isinstance(value, list):
        raise ValueError('write one word, or a list: ["a", "b"]')
    return tuple(word(item, folder) for item in value)
