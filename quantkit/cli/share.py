"""A share on the command line: 5% or 0.05."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _ParamType = click.ParamType[float]
else:  # click before 8.5 has it plain
    _ParamType = click.ParamType


class Share(_ParamType):
    """A number from 0 to 1, or a percentage."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found <= 1:
            self.fail(f"{text!r} is not a share; write 5% or 0.05", param, ctx)
        return found


SHARE = Share()
