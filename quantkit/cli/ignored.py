"""Options of llama.cpp's and ik_llama.cpp's tools that change nothing here: they are accepted, with a note why.

So command lines of theirs work as they are; ``GroupedCommand`` lists these options at the end of --help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantkit.cli.options import GroupedOption, echo_notes

F = TypeVar("F", bound=Callable[..., Any])

_NOT_LOCKED = "weights are never locked in memory; --no-mmap copies them there, --max-ram bounds what stays"
_AS_THEY_LIE = "weights are computed with as they lie in the file; nothing is repacked"
_SWITCH = click.Choice(["on", "off", "auto", "0", "1", "0,1"])

#: Names, the type of the value (None: a flag; a switch's value may be omitted), and why nothing changes.
_IGNORED: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("-fa", "--flash-attn"), _SWITCH, "attention is always computed in blocks of keys, as flash attention does"),
    (("-mla", "--mla-use"), int, "the model's metadata decide which form of latent attention runs"),
    (("-amb", "--attention-max-batch"), int, "attention never holds a whole matrix of scores"),
    (("-rtr", "--run-time-repack"), _SWITCH, _AS_THEY_LIE),
    (("--repack",), _SWITCH, _AS_THEY_LIE),
    (("-nr", "--no-repack"), None, _AS_THEY_LIE),
    (("--mlock",), None, _NOT_LOCKED),
    (("-lm", "--load-mode"), str, _NOT_LOCKED),
    (("-tb", "--threads-batch"), int, "-t is the number of threads for prompts as well"),
    (("-np", "--parallel"), int, "-b and -c decide how many sequences run at once"),
    (("-s", "--seed"), int, "no result depends on a seed"),
    (("-fit", "--fit"), _SWITCH, "-ngl, -ot and --max-vram alone decide what lies on a device"),
)


class Ignored(GroupedOption):
    """An option that is accepted and changes nothing."""

    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, hidden=True, expose_value=False, callback=self._tell, **kwargs)
        self.note = note

    def _tell(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None and value is not False:
            echo_notes([f"{self.opts[0]} changes nothing: {self.note}"])


def ignored_options(function: F) -> F:
    """Declare, for a command that runs a model, the options that change nothing."""
    for names, kind, note in reversed(_IGNORED):
        value: dict[str, Any] = {"is_flag": True} if kind is None else {"type": kind}
        bare = {"is_flag": False, "flag_value": "1"} if kind is _SWITCH else {}
        function = click.option(*names, cls=Ignored, note=note, **value, **bare)(function)
    return function
