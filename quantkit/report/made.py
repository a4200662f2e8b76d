"""How a file was made, as far as its metadata tell: keys about its origin, and the command that makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.formats.gguf import parse_split_path
from quantkit.inspect import Inspection
from quantkit.names import printable, shorten

#: Hashes of passages: thousands of numbers for programs.
_NOT_SHOWN = "shingles"
_WIDTH = 200
#: Options in recipes that name a file, or several.
_FILES = {"--calibrate", "--like"}


def provenance(found: Inspection) -> tuple[tuple[str, str], ...]:
    """Return keys and values about a file's origin, on one line each, but for recipes."""
    shown = ((key, value) for key, value in found.provenance if not key.endswith(_NOT_SHOWN))
    return tuple((printable(key), _shown(key, value)) for key, value in shown)


def _shown(key: str, value: Any) -> str:
    if key == "quantkit.quantize.recipe":
        return "\n".join(printable(_without_folder(line)) for line in str(value).split("\n"))
    if isinstance(value, (list, tuple)):
        return shorten(", ".join(printable(each) for each in value), _WIDTH)
    text = printable(value)
    # Only the name of a file: folders tell who made it, and where.
    return text.rpartition("/")[2] if key.endswith((".file", ".dataset", ".name")) else shorten(text, 10 * _WIDTH)


def command(found: Inspection) -> str:
    """Return the command that makes a file again, "" if its metadata do not tell."""
    known = {key: str(value) for key, value in found.provenance}
    recipe = known.get("quantkit.quantize.recipe")
    source = known.get("quantkit.quantize.source.name", "model-BF16.gguf")
    if recipe is not None:
        first, *lines = map(_without_folder, recipe.split("\n"))
        words = ["quantkit", "quantize", *_inputs(known), *_options(lines), source, _output(found)]
        return _joined([*words, *(first.split(" ", 1) if first.startswith("--like ") else [first])])
    if "quantize.imatrix.file" in known and "," not in found.file_type_name and " " not in found.file_type_name:
        return _joined(["llama-quantize", *_inputs(known), source, _output(found), found.file_type_name])
    return ""


def _without_folder(line: str) -> str:
    """Return a line of a recipe with the names of files alone, where it has paths."""
    option, _, paths = line.partition(" ")
    return f"{option} {','.join(path.rpartition('/')[2] for path in paths.split(','))}" if option in _FILES else line


def _output(found: Inspection) -> str:
    """Return the name that a command is given: of shards, whose numbers it adds, that without them."""
    split = parse_split_path(found.path.name) if len(found.shards) > 1 else None
    return found.path.name if split is None else f"{split[0]}.gguf"


def _inputs(known: Mapping[str, str]) -> Iterable[str]:
    if "quantize.imatrix.file" in known:
        yield from ("--imatrix", known["quantize.imatrix.file"].rpartition("/")[2])
    if "quantkit.feedback.covariance.name" in known:
        yield from ("--feedback", known["quantkit.feedback.covariance.name"].rpartition("/")[2])


def _options(lines: Iterable[str]) -> Iterable[str]:
    """Yield the options that the lines of a recipe stand for: options, then rules."""
    for line in lines:
        if line.startswith("--calibrate "):
            for name in line.partition(" ")[2].split(","):
                yield from ("--calibrate", name)
        elif line.startswith("--"):
            yield from line.split(" ", 1)
        elif line:
            pattern, _, name = line.rpartition(" = ")
            yield from ("--tensor-type", f"{pattern}={name}")


def _joined(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(printable(word)) for word in words)
