"""Parameter types of files, folders and URLs; shell completion of files and tensor types."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from quantkit.pipeline.presets import Preset


class Place(click.Path):
    """A path, or a URL unless the file must be ``local``."""

    def __init__(self, *, local: bool = True, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self.local = local

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path, or a URL, whose existence is checked when it is opened."""
        from quantkit.formats.remote import URL, locate  # not for the help of all commands

        place = locate(value)
        if not isinstance(place, URL):
            return super().convert(os.fspath(place), param, ctx)
        if self.local:
            self.fail(f"{place}: this command needs a local file", param, ctx)
        return place


def complete_files(incomplete: str, suffixes: tuple[str, ...]) -> list[CompletionItem]:
    """Return files with the suffixes, and directories; left to the shell without any, or if names need quotes."""
    folder, _, name = incomplete.rpartition("/")
    try:
        candidates = [
            p for p in Path(folder or ("/" if incomplete[:1] == "/" else ".")).iterdir() if p.name.startswith(name)
        ]
    except OSError:
        candidates = []
    matches = sorted(p.name for p in candidates if p.suffix.lower() in suffixes and p.is_file())
    folders = sorted(p.name for p in candidates if p.is_dir() and p.name[0] != ".")
    if not matches or any(re.search(r"[^\w.+@%:,-]", n) for n in (*matches, *folders)):
        return [CompletionItem(incomplete, type="dir" if folders and not matches else "file")]
    start = incomplete[: len(incomplete) - len(name)]
    return [CompletionItem(start + n) for n in (*matches, *(f"{n}/" for n in folders))]


class FileOf(Place):
    """A place that completes to files with the suffixes."""

    def __init__(self, *suffixes: str, exists: bool = False, local: bool = False) -> None:
        super().__init__(local=local, exists=exists, dir_okay=not exists)
        self.suffixes = suffixes

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return completions of a path."""
        return complete_files(incomplete, self.suffixes)


MODEL, IMATRIX = FileOf(".gguf"), FileOf(".gguf", ".dat")
MODEL_FILE, IMATRIX_FILE = FileOf(".gguf", exists=True, local=True), FileOf(".gguf", ".dat", exists=True)
IMATRIX_LOCAL = FileOf(".gguf", ".dat", local=True)
TEXT_FILE = Place(exists=True, dir_okay=False, allow_dash=True)


def complete_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a type that can be encoded; in a rule, after its last =."""
    rule, sign, name = incomplete.rpartition("=")
    return _matching_names(_types(), name, rule + sign)


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete IN, OUT and TYPE of ``quantkit quantize``."""
    from quantkit.pipeline.presets import PRESETS

    arguments: tuple[str, ...] = ctx.params.get("arguments") or ()
    names = {p.name: p.description for p in PRESETS if preset_use(p)}
    names |= {name: text for name, text in _types().items() if name not in names}
    if not arguments:
        return MODEL.shell_complete(ctx, param, incomplete)
    if len(arguments) > 2 or arguments[-1].upper() in names:
        return []
    return _matching_names(names, incomplete) or ([] if arguments[1:] else MODEL.shell_complete(ctx, param, incomplete))


def _types() -> dict[str, str]:
    """Return the types that can be encoded, with a description."""
    from quantkit.kernels.formats import has_encoder
    from quantkit.types import TYPES

    return {t.name: f"{t.bpw:g} bits per weight" for t in TYPES if has_encoder(t)}


def _matching_names(names: dict[str, str], begin: str, before: str = "") -> list[CompletionItem]:
    """Return the names that begin with ``begin`` in any case, spelled in its case: zsh drops others."""
    lower = begin != begin.upper()
    return [
        CompletionItem(before + (name.lower() if lower else name), help=text)
        for name, text in names.items()
        if name.startswith(begin.upper())
    ]


def preset_use(preset: Preset) -> str | None:
    """Return the treatment of a preset by `quantkit quantize`: "mixture", "copy", or None without an encoder."""
    from quantkit.kernels.formats import has_encoder

    if preset.base is None:
        return "copy"
    return "mixture" if has_encoder(preset.base) else None
