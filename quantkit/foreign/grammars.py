"""Texts in grammars that can grow while being read, as JSON values."""

from __future__ import annotations

import tomllib
import warnings
from typing import Any


class Grammars:
    """One method per grammar."""

    def yaml(self, text: str) -> Any:
        """Parse a YAML document; dates and other types become text."""
        import yaml

        return yaml.safe_load(text)

    def toml(self, text: str) -> dict[str, Any]:
        """Return the tables of TOML; dates and times as their text."""
        return tomllib.loads(text)

    def regex(self, text: str, flags: int) -> None:
        """Compile a regular expression."""
        import regex

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            regex.compile(text, flags)
