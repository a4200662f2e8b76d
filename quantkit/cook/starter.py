"""The commented TOML file that ``quantkit cook init`` writes, with all keys and their defaults."""

from __future__ import annotations

import inspect
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit.cook.config import TABLES, TARGET_KEYS, TopSettings, model_name
from quantkit.cook.source import Model, read_source
from quantkit.cook.tables import Key, as_toml, keys_of
from quantkit.errors import QuantkitError, ResourceError
from quantkit.names import printable
from quantkit.options.convert import ConvertOptions
from quantkit.options.quantize import QuantizeOptions
from quantkit.units import format_count, format_size

#: Usual names of texts next to a model.
_CALIBRATION = ("calibration.txt", "calibration_data.txt", "calibration_datav3.txt", "calib.txt", "imatrix.txt")
_EVALUATION = ("evaluation.txt", "heldout.txt", "wiki.test.raw", "eval.txt")
#: Column of comments after values.
_COLUMN = 36
#: Characters of a line.
_WIDTH = 118
#: Two presets, and a search between them.
_TARGETS = ("Q4_K_M", "IQ4_XS", "3.5bpw")


def starter(
    model: Path | None,
    folder: Path,
    pre: str | None = None,
    *,
    texts: Sequence[Path] = (),
    evaluation: Path | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file in ``folder``, with defaults for a model, and notes.

    ``model``: None to write example paths; an unreadable model becomes a note. ``pre``: its pre-tokenizer. ``texts``:
    calibration texts; default: a file beside the model with a usual name.
    """
    description, notes = None, tuple[str, ...]()
    try:
        description = None if model is None else read_source(model, folder / "model.gguf", ConvertOptions(pre=pre))
    except ResourceError:
        raise
    except QuantkitError as e:
        notes = (e.message,)
    folders = [] if model is None else [model if model.is_dir() else model.parent]
    if not texts and (calibration := _find_file(folders, _CALIBRATION)) is not None:
        texts, evaluation = [calibration], evaluation or _find_file(folders, _EVALUATION)
    name = "model" if model is None else model_name(model)
    values = {
        "model": _toml_string("path/to/model-bf16.gguf" if model is None else _toml_path(model, folder)),
        "targets": as_toml(_TARGETS),
        "calibration.text": as_toml(tuple(_toml_path(text, folder) for text in texts) or ("path/to/texts",)),
    }
    if evaluation is not None:
        values["calibration.evaluation"] = _toml_string(_toml_path(evaluation, folder))
    if pre:
        values["convert.pre"] = _toml_string(pre)
    ctx = str(512 if description is None else description.ctx)
    examples = {
        "name": _toml_string(name),
        "output": _toml_string(f"{name}-cooked"),
        "work": _toml_string(f"{name}-cooked/work"),
        **{f"{table}.ctx": ctx for table in ("imatrix", "check", "sensitivity")},
    }
    summary = [] if description is None else [f"# {_describe(description)}"]
    lines = [*_HEAD, *summary, *_key_lines("", keys_of(TopSettings), values, examples)]
    for table_name, table in TABLES.items():
        head = _HEADS.get(table_name) or inspect.getdoc(table) or ""
        lines += [
            "",
            f"[{table_name}]",
            *_comment(head),
            *_key_lines(f"{table_name}.", keys_of(table), values, examples),
        ]
    lines += ["", "# A target with its own settings, including any of [quantize]:", "# [[target]]"]
    lines += _key_lines("", {**TARGET_KEYS, "tensor_type": keys_of(QuantizeOptions)["tensor_type"]}, {}, {})
    return "\n".join(lines) + "\n", notes


def _comment(text: str) -> list[str]:
    """Return a text as lines of a comment."""
    return [f"# {line}" for part in text.split("\n\n") for line in textwrap.wrap(" ".join(part.split()), 118)]


def _key_lines(
    table: str, keys: Mapping[str, Key], values: Mapping[str, str], examples: Mapping[str, str]
) -> list[str]:
    """Return the lines of keys, with help: an assignment if there is a value, else a commented example."""
    lines = []
    for name, key in keys.items():
        value = values.get(table + name)
        setting = f"{name} = {examples.get(table + name, key.example) if value is None else value}"
        line = f"{'# ' if value is None else ''}{setting}"
        help_lines = textwrap.wrap(key.help, _WIDTH - _COLUMN)
        if len(line) < _COLUMN:
            line = f"{line:<{_COLUMN - 1}} # {help_lines.pop(0)}"
        lines += [line, *(f"{'# ':<{_COLUMN}}# {text}" for text in help_lines)]
    return lines


def _describe(model: Model) -> str:
    experts = f", {model.n_experts} experts" if model.n_experts else ""
    active = f" ({format_count(model.active)} per token)" if experts else ""
    weights = f"{format_count(model.weights)} weights{active}"
    return printable(f"{model.architecture}, {model.n_layers} layers{experts}, {weights}, {format_size(model.nbytes)}")


def _find_file(folders: list[Path], names: tuple[str, ...]) -> Path | None:
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def _toml_path(path: Path, folder: Path) -> str:
    """Return a path relative to ``folder`` if it is inside, otherwise absolute."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return os.path.abspath(path) if relative.startswith("..") else relative


def _toml_string(text: str) -> str:
    """Return a string of TOML, whose escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)


_HEAD = (
    "# Settings of `quantkit cook`. `quantkit cook FILE --dry-run` shows the plan; without --dry-run it runs.",
    "# Up-to-date steps are skipped: change a key, run it again, and only what depends on that key is redone.",
    "# A commented-out key shows its default or an example. Paths are relative to the folder of this file.",
    "#",
    "# A target is a preset (`quantkit types --presets`), or a goal, for which a search finds the best types: a size",
    '# ("12.3G"), bits per weight ("4.2bpw"), a divergence from the model ("kld=0.01"), or the memory of each GPU and',
    '# of the host ("fit=24G,64G"). "+feedback" after a goal is slower and gives a lower divergence at the same size',
    "# (docs/explanation/error-feedback.md).",
)
#: Comments at the start of tables whose options are those of other commands.
_HEADS = {
    "convert": "A checkpoint is first converted to a GGUF file.",
    "quantize": (
        "Options of `quantkit quantize` for all targets. Goals ignore those that set types: the search chooses them."
    ),
}
