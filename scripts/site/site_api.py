"""The page of the Python API: every name of ``quantkit.__all__``, by what it is, documented by mkdocstrings."""

from __future__ import annotations

import inspect
from typing import Any

import quantkit

_HEAD = """\
---
search:
  boost: 0.3
---

# Python API

The public names of `quantkit`. A command is a function of the same name, its options are keyword arguments or fields of
an option record. An error is a `QuantkitError` with a [code](errors.md); nothing is printed.

"""


def api_page() -> str:
    """Return the page: functions, then classes, each where it is defined."""
    members = {name: getattr(quantkit, name) for name in quantkit.__all__}
    parts = [_HEAD]
    for title, is_member in (("Functions", inspect.isfunction), ("Classes", inspect.isclass)):
        parts.append(f"## {title}\n")
        parts += [_entry(name, member) for name, member in members.items() if is_member(member)]
    return "\n".join(parts)


def _entry(name: str, member: Any) -> str:
    """Return the directive of mkdocstrings for a public name, by the module that defines it."""
    path = f"{member.__module__}.{member.__qualname__}"
    return (
        f"::: {path}\n    options:\n      heading: quantkit.{name}\n      toc_label: {name}\n      heading_level: 3\n"
    )
