"""The page of the Python API: every name of ``quantkit.__all__``, by what it is, documented by mkdocstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from typing import Any

import quantkit

_HEAD = """\
---
search:
  boost: 0.3
---

# Python API

The public names of `quantkit`. A command is a function of the same name, its options are keyword arguments or fields of
an option record; of `quantkit GROUP NAME` it is `NAME_GROUP`. An error is a `QuantkitError` with a [code](errors.md);
nothing is printed. [Research in Python](../research/index.md) shows what to do with them.

"""


def api_page() -> str:
    """Return the page: functions, classes, then what only public modules have; each where it is defined."""
    members = {name: getattr(quantkit, name) for name in quantkit.__all__}
    parts = [_HEAD]
    for title, is_member in (("Functions", inspect.isfunction), ("Classes", inspect.isclass)):
        parts.append(f"## {title}\n")
        parts += [_entry(name, member) for name, member in members.items() if is_member(member)]
    for name, module in members.items():
        if inspect.ismodule(module):
            parts.append(f"## Module quantkit.{name}\n")
            parts += _module_entries(name, module, set(map(id, members.values())))
    return "\n".join(parts)


def _module_entries(name: str, module: Any, present: Set[int]) -> Iterator[str]:
    """Yield the entries of a public module's functions and classes that are not listed yet."""
    for member_name in module.__all__:
        member = getattr(module, member_name)
        if id(member) not in present and (inspect.isfunction(member) or inspect.isclass(member)):
            yield _entry(f"{name}.{member_name}", member)


def _entry(name: str, member: Any) -> str:
    """Return the directive of mkdocstrings for a public name, by the module that defines it."""
    path = f"{member.__module__}.{member.__qualname__}"
    return (
        f"::: {path}\n    options:\n      heading: quantkit.{name}\n      toc_label: {name}\n      heading_level: 3\n"
    )
