"""Shell completion of types and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantkit.formats.remote import URL, located


def files(incomplete: str, suffixes: tuple[str, ...]) -> list[CompletionItem]:
    """Return files with the suffixes, and folders; left to the shell if there are none, or names need quotes."""
    folder, _, name = incomplete.rpartition("/")
    try:
        here = [p for p in Path(folder or ("/" if incomplete[:1] == "/" else ".")).iterdir() if p.name.startswith(name)]
    except OSError:
        here = []
    found = sorted(p.name for p in here if p.suffix.lower() in suffixes and p.is_file())
    folders = sorted(p.name for p in here if p.is_dir() and p.name[0] != ".")
    if not found or any(re.search(r"[^\w.+@%:,-]", n) for n in (*found, *folders)):
        return [CompletionItem(incomplete, type="dir" if folders and not found else "file")]
    start = incomplete[: len(incomplete) - len(name)]
    return [CompletionItem(start + n) for n in (*found, *(f"{n}/" for n in folders))]


class FileOf(click.Path):
    """A path that completes to files with the suffixes, or a URL, unless it must be ``here``, on this machine."""

    def __init__(self, *suffixes: str, exists: bool = False, here: bool = False) -> None:
        super().__init__(exists=exists, dir_okay=not exists, path_type=Path)
        self.suffixes, self.here = suffixes, here

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path, or a URL, of which opening it tells whether it is there."""
        found = located(value)
        if not isinstance(found, URL):
            return super().convert(value, param, ctx)
        if self.here:
            self.fail(f"{found}: this command needs a file of this machine", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return completions of a path."""
        return files(incomplete, self.suffixes)


MODEL, IMATRIX = FileOf(".gguf"), FileOf(".gguf", ".dat")
MODEL_FILE, IMATRIX_FILE = FileOf(".gguf", exists=True, here=True), FileOf(".gguf", ".dat", exists=True)
IMATRIX_HERE = FileOf(".gguf", ".dat", here=True)


def types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a type that can be encoded; in a rule, after its last =."""
    rule, sign, name = incomplete.rpartition("=")
    return _begun(_types(), name, rule + sign)


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete IN, OUT and TYPE of ``quantkit quantize``."""
    from quantkit.cli.types import use_of
    from quantkit.pipeline.presets import PRESETS

    given: tuple[str, ...] = ctx.params.get("arguments") or ()
    names = {p.name: p.description for p in PRESETS if use_of(p)}
    names |= {name: text for name, text in _types().items() if name not in names}
    if not given:
        return MODEL.shell_complete(ctx, param, incomplete)
    if len(given) > 2 or given[-1].upper() in names:
        return []
    return _begun(names, incomplete) or ([] if given[1:] else MODEL.shell_complete(ctx, param, incomplete))


def _types() -> dict[str, str]:
    """Return the types that can be encoded, with a description."""
    from quantkit.kernels.formats import has_encoder
    from quantkit.types import TYPES

    return {t.name: f"{t.bpw:g} bits per weight" for t in TYPES if has_encoder(t)}


def _begun(names: dict[str, str], begin: str, before: str = "") -> list[CompletionItem]:
    """Return the names that begin with ``begin`` in any case, spelled in its case: zsh drops others."""
    lower = begin != begin.upper()
    return [
        CompletionItem(before + (name.lower() if lower else name), help=text)
        for name, text in names.items()
        if name.startswith(begin.upper())
    ]
