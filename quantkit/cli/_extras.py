"""The optional packages of a command line: all that are missing are named together, before any work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from quantkit.cli._paths import Place
from quantkit.extras import CHAT, CLUSTERS, COMPRESSION, GPUS, PLOT, Extra, missing_packages, store_extras

#: Returns the extras that a command needs besides, given its parameters; called only if any package is missing.
Further = Callable[[Mapping[str, Any]], Iterable[Extra]]


def check_command(
    extras: Sequence[Extra],
    params: Sequence[click.Parameter],
    values: Mapping[str, Any],
    further: Further | None = None,
) -> None:
    """Raise MissingPackages with all that a command needs, ``extras`` and those of its values, and that is missing."""
    missing = [extra for extra in dict.fromkeys([*extras, *_list_extras(params, values)]) if extra.missing()]
    if missing:
        missing += [extra for extra in (further(values) if further else ()) if extra.missing()]
        raise missing_packages(*dict.fromkeys(missing))


def _list_extras(params: Sequence[click.Parameter], values: Mapping[str, Any]) -> Iterator[Extra]:
    """Yield the extras that options and places need."""
    if values.get("plot") is not None:
        yield PLOT
    if values.get("chat"):
        yield CHAT
    if values.get("ray") is not None:
        yield CLUSTERS
    elif str(values.get("backend")).lower() == "cuda":  # on a cluster the nodes have it
        yield GPUS
    saves_compact = values.get("save") is not None and values.get("format") == "compact"
    if saves_compact and values.get("codec") == "zstd" and sys.version_info < (3, 14):
        yield COMPRESSION
    for scheme in dict.fromkeys(_schemes(params, values)):
        yield from store_extras(scheme)


def _schemes(params: Sequence[click.Parameter], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the schemes of all URLs among the values of places."""
    from quantkit.formats.remote import URL, locate

    if values.get("remote") is True or values.get("hf_repo") is not None:
        yield "hf"
    for param in params:
        value = values.get(param.name or "")
        if isinstance(param.type, Place) or (isinstance(param, click.Argument) and value):
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and isinstance(place := locate(item), URL):
                    yield place.scheme
