"""Provenance of a file: the keys of its metadata about it, and the command that makes the file again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.formats.gguf import parse_split_path
from quantkit.inspect import Inspection
from quantkit.names import file_name, printable, shorten

#: Suffix of keys that are not shown: hashes of passages, thousands of numbers.
_HIDDEN_SUFFIX = "shingles"
_WIDTH = 200
#: Options in recipes that name files.
_FILES = {"--calibrate", "--like"}
#: Name of a source that is not in the metadata.
_SOURCE = "model-BF16.gguf"


def provenance_rows(inspection: Inspection) -> tuple[tuple[str, str], ...]:
    """Return the keys and values of a file's provenance as texts of one line; recipes have several."""
    rows = ((key, value) for key, value in inspection.provenance if not key.endswith(_HIDDEN_SUFFIX))
    return tuple((printable(key), _format_value(key, value)) for key, value in rows)


def _format_value(key: str, value: Any) -> str:
    if key == "quantkit.quantize.recipe":
        return "\n".join(printable(_without_folder(line)) for line in str(value).split("\n"))
    if isinstance(value, (list, tuple)):
        return shorten(", ".join(printable(item) for item in value), _WIDTH)
    text = printable(value)
    # Folders are private: only the name of a file is shown.
    return file_name(text) if key.endswith((".file", ".dataset", ".name")) else shorten(text, 10 * _WIDTH)


def rebuild_command(inspection: Inspection) -> str:
    """Return the command that makes a file again, several joined by &&; "" if its metadata do not suffice."""
    metadata = {key: value for key, value in inspection.provenance if isinstance(value, str)}
    if "quantkit.quantize.encoders" in metadata:  # functions without a command
        return ""
    if steps := _steps(inspection):
        outputs = [*(source for _, source in steps[1:]), _output_name(inspection)]
        return " && ".join(
            _quantize_command(recipe, source, output, _input_options(metadata) if i == 0 else ())
            for i, ((recipe, source), output) in enumerate(zip(steps, outputs, strict=True))
        )
    if (
        "quantize.imatrix.file" in metadata
        and "," not in inspection.file_type_name
        and " " not in inspection.file_type_name
    ):
        return _shell_line(
            ["llama-quantize", *_input_options(metadata), _SOURCE, _output_name(inspection), inspection.file_type_name]
        )
    return ""


def _steps(inspection: Inspection) -> list[tuple[str, str]]:
    """Return the recipe and the source of the quantization, and of each copy after it."""
    metadata = dict(inspection.provenance)
    recipe, source = metadata.get("quantkit.quantize.recipe"), metadata.get("quantkit.quantize.source.name", _SOURCE)
    recipes, sources = (metadata.get(f"quantkit.copy.{key}") for key in ("recipe", "source.name"))
    copies = zip(recipes, sources, strict=False) if isinstance(recipes, list) and isinstance(sources, list) else ()
    return [*([(str(recipe), str(source))] if recipe is not None else []), *((str(r), str(s)) for r, s in copies)]


def _quantize_command(recipe: str, source: str, output: str, inputs: Iterable[str]) -> str:
    first, *lines = map(_without_folder, recipe.split("\n"))
    words = ["quantkit", "quantize", *inputs, *_recipe_options(lines), source, output]
    return _shell_line([*words, *(first.split(" ", 1) if first.startswith("--like ") else [first])])


def _without_folder(line: str) -> str:
    """Return a line of a recipe with paths reduced to names of files."""
    option, _, paths = line.partition(" ")
    return f"{option} {','.join(file_name(path) for path in paths.split(','))}" if option in _FILES else line


def _output_name(inspection: Inspection) -> str:
    """Return the output name for a command, without the numbers of shards, which it adds."""
    split = parse_split_path(inspection.path.name) if len(inspection.shards) > 1 else None
    return inspection.path.name if split is None else f"{split[0]}.gguf"


def _input_options(metadata: Mapping[str, str]) -> Iterable[str]:
    if "quantize.imatrix.file" in metadata:
        yield from ("--imatrix", file_name(metadata["quantize.imatrix.file"]))
    if "quantkit.feedback.covariance.name" in metadata:
        yield from ("--feedback", file_name(metadata["quantkit.feedback.covariance.name"]))


def _recipe_options(lines: Iterable[str]) -> Iterable[str]:
    """Yield the options of a command from the lines of a recipe: options, then rules."""
    for line in lines:
        if line.startswith("--calibrate "):
            for name in line.partition(" ")[2].split(","):
                yield from ("--calibrate", name)
        elif line.startswith("--"):
            yield from line.split(" ", 1)
        elif line:
            pattern, _, name = line.rpartition(" = ")
            yield from ("--tensor-type", f"{pattern}={name}")


def _shell_line(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(printable(word)) for word in words)
