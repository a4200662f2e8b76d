"""Options of llama.cpp's and ik_llama.cpp's tools that have no counterpart here.

``Ignored`` options change nothing: they are accepted with a note that says why, so that existing command lines work.
``Refused`` options would change the result: each ends the command with what to do instead. ``GroupedCommand`` lists
the ignored ones at the end of --help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantkit.cli._options import GroupedOption, echo_notes

F = TypeVar("F", bound=Callable[..., Any])

_NOT_LOCKED = "weights are never locked in memory; --no-mmap copies them there, --max-ram limits how much stays"
_NOT_REPACKED = "weights are used as stored in the file; nothing is repacked"
_SWITCH = click.Choice(["on", "off", "auto", "0", "1", "0,1"])

#: Names, type of the value (None: a flag; a switch's value may be omitted), and why nothing changes.
_IGNORED: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("-fa", "--flash-attn"), _SWITCH, "attention is always computed in blocks of keys, as flash attention does"),
    (("-mla", "--mla-use"), int, "the model's metadata decide which form of latent attention runs"),
    (("-amb", "--attention-max-batch"), int, "attention never holds a whole matrix of scores"),
    (("-rtr", "--run-time-repack"), _SWITCH, _NOT_REPACKED),
    (("--repack",), _SWITCH, _NOT_REPACKED),
    (("-nr", "--no-repack"), None, _NOT_REPACKED),
    (("--mlock",), None, _NOT_LOCKED),
    (("-lm", "--load-mode"), str, _NOT_LOCKED),
    (("-tb", "--threads-batch"), int, "-t is the number of threads for prompts as well"),
    (("-np", "--parallel"), int, "-b and -c decide how many sequences run at once"),
    (("-s", "--seed"), int, "no result depends on a seed"),
    (("-fit", "--fit"), _SWITCH, "-ngl, -ot and --max-vram alone decide the placement"),
)


class Ignored(GroupedOption):
    """An option that is accepted and ignored."""

    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, hidden=True, expose_value=False, callback=self._print_note, **kwargs)
        self.note = note

    def _print_note(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None and value is not False:
            echo_notes([f"{self.opts[0]} changes nothing: {self.note}"])


def ignored_options(function: F) -> F:
    """Declare the ignored options of a command that runs a model."""
    for names, kind, note in reversed(_IGNORED):
        value: dict[str, Any] = {"is_flag": True} if kind is None else {"type": kind}
        optional_value = {"is_flag": False, "flag_value": "1"} if kind is _SWITCH else {}
        function = click.option(*names, cls=Ignored, note=note, **value, **optional_value)(function)
    return function


#: Names, whether a value follows, and the alternative.
_REFUSED = (
    ("--remote", False, "give the repository as an address: quantkit convert hf://ORGANIZATION/MODEL OUT.gguf"),
    ("--bigendian", False, "files are little-endian; gguf_convert_endian.py of llama.cpp converts finished ones"),
    (
        "--mmproj",
        False,
        "vision and audio encoders are not converted; convert_hf_to_gguf.py --mmproj writes them for use with ours",
    ),
    (
        "--dspark",
        False,
        "the draft model (DSpark) is not converted; convert_hf_to_gguf.py writes it",
    ),
    (
        "--mistral-format",
        False,
        "consolidated*.safetensors with params.json are not read; use model*.safetensors with config.json, which "
        "hold the same weights",
    ),
    (
        "--disable-mistral-community-chat-template",
        False,
        "it belongs to --mistral-format; the chat template is always that of the checkpoint",
    ),
    (
        "--sentence-transformers-dense-modules",
        False,
        "the dense modules of modules.json are not converted",
    ),
    (
        "--target-model-dir",
        True,
        "drafts that need files of another model (EAGLE3, DFlash) are not converted; convert_hf_to_gguf.py writes them",
    ),
)


class Refused(GroupedOption):
    """An option that ends the command with the reason why it is missing."""

    def __init__(self, *args: Any, reason: str, **kwargs: Any) -> None:
        super().__init__(*args, hidden=True, expose_value=False, is_eager=True, callback=self._refuse, **kwargs)
        self.reason = reason

    def _refuse(self, ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value is not None and value is not False:
            raise click.UsageError(f"{self.opts[0]}: {self.reason}", ctx)


def refused_options(function: F) -> F:
    """Declare the options that are refused."""
    for name, has_value, reason in reversed(_REFUSED):
        function = click.option(name, cls=Refused, reason=reason, is_flag=not has_value)(function)
    return function
