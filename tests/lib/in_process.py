"""The services of quantkit.foreign in the tests' own process: a child process for each file would dominate their time.

For tests of valid files. test_foreign.py, and all tests that do not request this, use child processes with limits.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from quantkit.errors import FormatError
from quantkit.foreign.child import Child
from quantkit.foreign.serve import _reason
from quantkit.names import printable, shorten

#: The services of the children called so far.
_SERVICES: WeakKeyDictionary[Child, Any] = WeakKeyDictionary()


def _through_json(value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def _service(child: Child) -> Any:
    """Return the service of a child, created at its first call."""
    if child not in _SERVICES:
        module, _, kind = child._first["service"].partition(":")
        data = [] if child._data is None else [child._data()]
        _SERVICES[child] = getattr(import_module(module), kind)(*data, *_through_json(child._first["arguments"]))
    return _SERVICES[child]


def call(child: Child, method: str, *arguments: Any) -> Any:
    """Return the result of a method, like ``Child.call``."""
    try:
        return _through_json(getattr(_service(child), method)(*_through_json(arguments)))
    except Exception as e:
        raise FormatError(f"{child.subject}: {shorten(printable(_reason(e)), 300)}", "QK-E116") from None


def run_services_here(patch: pytest.MonkeyPatch) -> None:
    """Run the services of children without processes."""
    patch.setenv("TOKENIZERS_PARALLELISM", "false")
    patch.setattr(Child, "start", lambda child: None)
    patch.setattr(Child, "call", call)
