"""A chat template run as by llama.cpp and transformers: jinja2 in its sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox


class Template:
    """A compiled template. ``tokens``: texts of special tokens by their name in templates."""

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime(2025, 1, 1).strftime(form)  # reproducible
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        self._compiled, self._tokens = environment.from_string(text), tokens

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; ``add_generation_prompt``: with the beginning of an answer."""
        settings = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return str(self._compiled.render(**settings, **self._tokens))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
