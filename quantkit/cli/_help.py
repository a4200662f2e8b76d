"""The layout of help: lines of 80 columns that never break in a name, and what --help shows of a long one."""

from __future__ import annotations

from collections.abc import Iterable

import click

#: Width of all help in columns.
WIDTH = 80
#: Placeholder for a hyphen at which no line may be broken.
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class HelpFormatter(click.HelpFormatter):
    """Breaks lines at spaces only."""

    def write_text(self, text: str) -> None:
        super().write_text(_keep_hyphens(text))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(_keep_hyphens(prog), _keep_hyphens(args), prefix)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(term, _keep_hyphens(text)) for term, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-")


def _keep_hyphens(text: str) -> str:
    return text.replace("-", _HYPHEN)


class HelpContext(click.Context):
    """The context of all commands."""

    formatter_class = HelpFormatter
