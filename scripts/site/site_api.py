"""The page of the Python API: every name of ``quantkit.__all__``, by what it is, documented by mkdocstrings."""

from __future__ import annotations

import inspect

import quantkit

_HEAD = """\
# Python API

The public names of `quantkit`. A command is a function of the same name, its options are keyword arguments or fields of
an option record. An error is a `QuantkitError` with a [code](errors.md); nothing is printed.

"""


def api_page() -> str:
    """Return the page: functions, then classes, each where it is defined."""
    functions, classes = [], []
    for name in quantkit.__all__:
        member = getattr(quantkit, name)
        if inspect.isclass(member):
            classes.append(member)
        elif inspect.isfunction(member):
            functions.append(member)
    parts = [_HEAD]
    for heading, members in (("Functions", functions), ("Classes", classes)):
        parts.append(f"## {heading}\n")
        for member in members:
            parts.append(f"::: {member.__module__}.{member.__qualname__}\n    options:\n      heading_level: 3\n")
    return "\n".join(parts)
