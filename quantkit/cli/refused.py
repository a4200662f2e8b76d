"""Options of llama.cpp's convert_hf_to_gguf.py that are not there: each is refused with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from quantkit.cli.options import GroupedOption

F = TypeVar("F", bound=Callable[..., Any])

#: Names, whether a value follows, and what to do instead.
_REFUSED = (
    ("--remote", False, "nothing here uses a network: `hf download REPOSITORY --local-dir DIR`, then convert DIR"),
    ("--bigendian", False, "files are little-endian; gguf_convert_endian.py of llama.cpp turns a finished one around"),
    (
        "--mmproj",
        False,
        "what sees and hears is not converted; convert_hf_to_gguf.py --mmproj writes it, and its file fits beside ours",
    ),
    ("--dspark", False, "DeepSeek-V4 and its draft are not converted; convert_hf_to_gguf.py does it"),
    (
        "--mistral-format",
        False,
        "consolidated*.safetensors with params.json are not read; take the model*.safetensors with config.json, which "
        "hold the same weights",
    ),
    (
        "--disable-mistral-community-chat-template",
        False,
        "it is about --mistral-format; the template is that of the checkpoint: without one, none is written",
    ),
    (
        "--sentence-transformers-dense-modules",
        False,
        "what follows the model in modules.json is not converted, as without this option there",
    ),
    (
        "--target-model-dir",
        True,
        "drafts that need the files of another model (EAGLE3, DFlash) are not converted; convert_hf_to_gguf.py does it",
    ),
)


class Refused(GroupedOption):
    """An option that ends the command with the reason why it is not there."""

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
