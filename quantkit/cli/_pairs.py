"""NAME=VALUE on the command line."""

from __future__ import annotations

from typing import Any

import click


class Pair(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """A name and a value, as a pair of texts; ``last``: at the last sign =, for names that may have one."""

    name = "pair"

    def __init__(self, form: str, *, name_is_optional: bool = False, last: bool = False) -> None:
        self.form, self.name_is_optional, self.last = form, name_is_optional, last

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the pair."""
        if isinstance(value, tuple):
            return value[0], value[1]
        text = str(value)
        name, sign, content = text.rpartition("=") if self.last else text.partition("=")
        if not sign and self.name_is_optional:
            return "", text
        if not sign or not name:
            self.fail(f"{text!r}: write {self.form}", param, ctx)
        return name, content
