"""Command line options built from the declarations in ``quantkit.options``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantkit.arguments import Option
from quantkit.cli._options import CHUNKS, SHARD_SIZE, SIZE, SIZES, TOKENS, option, project_names
from quantkit.cli._paths import IMATRIX_FILE, IMATRIX_LOCAL, MODEL_FILE, TEXT_FILE, TEXT_PLACE, Place, complete_types

#: Value of an option that is given without its optional file.
NO_FILE = Path()


class _OptionalFile(Place):
    """A file, or nothing: ``NO_FILE``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if value else NO_FILE


def _complete_folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def _split_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def _as_tuple(ctx: click.Context, param: click.Parameter, value: tuple[int, ...] | None) -> tuple[int, ...]:
    return value or ()


def _to_float(ctx: click.Context, param: click.Parameter, value: str) -> float:
    return float(value)


#: Settings of click by kind of option; a callable derives them from the declaration.
_KINDS: dict[str, dict[str, Any]] = {
    "type": {"metavar": "TYPE", "shell_complete": complete_types},
    "model": {"type": MODEL_FILE},
    "text": {"type": TEXT_FILE},
    "texts": {"type": TEXT_PLACE},
    "file": {"type": Place(dir_okay=False)},
    "imatrix": {"type": IMATRIX_FILE},
    "local imatrix": {"type": IMATRIX_LOCAL},
    "covariances": {
        "type": _OptionalFile(exists=True, dir_okay=False),
        "is_flag": False,
        "flag_value": "",
    },
    "size": {"type": SIZE},
    "sizes": {"type": SIZES, "multiple": False, "callback": _as_tuple},
    "tokens": {"type": TOKENS},
    "shard size": {"type": SHARD_SIZE},
    "chunks": {"type": CHUNKS},
    "layers": {},
    "folder": {"shell_complete": _complete_folders},
    "adapter": {"shell_complete": _complete_files},
    "types": {"callback": _split_names, "shell_complete": complete_types, "multiple": False},
    "rule": {"shell_complete": complete_types},
    "share": {"type": click.FloatRange(0)},
    "share below 1": {"type": click.FloatRange(0, 1, max_open=True)},
    "number": {"callback": _to_float},  # of choices
}


def declared_options(
    options: Any, groups: Collection[str], without: Collection[str] = ()
) -> list[Callable[[Any], Any]]:
    """Return a click option for each declaration of a dataclass in ``groups``, in their order, ``without`` some."""
    order = list(groups)
    declarations = [
        (f, f.metadata["option"])
        for f in fields(options)
        if "option" in f.metadata and f.metadata["option"].group in order and f.name not in without
    ]
    declarations.sort(key=lambda pair: order.index(pair[1].group))
    return [_click_option(f.name, str(f.type), f.default, declaration) for f, declaration in declarations]


def _click_option(name: str, annotation: str, default: Any, declaration: Option) -> Callable[[Any], Any]:
    settings: dict[str, Any] = {"group": declaration.group, "help": declaration.help}
    if declaration.kind:
        settings |= _KINDS[declaration.kind]
    elif annotation == "bool":
        settings |= {"is_flag": True} if default is False else {"default": default}
    elif "Path" in annotation:
        settings["type"] = Place(exists=True, dir_okay=False)
    elif annotation.startswith("int"):
        settings["type"] = click.IntRange(declaration.least)
    elif annotation.startswith("float"):
        settings["type"] = click.FloatRange(0, min_open=True)
    if declaration.choices:
        is_project = not {"mainline", "ik"}.isdisjoint(declaration.choices)
        settings["type"] = (
            project_names(declaration.choices)
            if is_project
            else click.Choice(declaration.choices, case_sensitive=False)
        )
    if annotation.startswith("tuple") and declaration.kind != "layers":
        settings.setdefault("multiple", True)
    elif isinstance(default, (str, int, float)) and not isinstance(default, bool):
        settings |= {"default": default, "show_default": bool(default)}
    if declaration.metavar is not None:
        settings["metavar"] = declaration.metavar
    names = declaration.flags or (f"--{name.replace('_', '-')}",)
    return option(*names, *([] if "/" in names[0] else [name]), **settings)
