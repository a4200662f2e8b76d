"""A function for every operation of the graph: what checks, runs and lowers operations are tables of this kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quantkit.errors import TypeNotSupported
from quantkit.model.ops import Op

F = TypeVar("F", bound=Callable[..., Any])


class OpTable(dict[type[Op], Callable[..., Any]]):
    """Functions by the class of an operation; TypeNotSupported for a class without one. what: names it in errors."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def of(self, *kinds: type[Op]) -> Callable[[F], F]:
        """Enter a function for some classes, as a decorator."""

        def enter(function: F) -> F:
            self.update(dict.fromkeys(kinds, function))
            return function

        return enter

    def __missing__(self, kind: type[Op]) -> Callable[..., Any]:
        raise TypeNotSupported(f"{self.what} has no {kind.__name__}")
