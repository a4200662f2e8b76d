"""Frozen records as arguments of kernels: their fields are constants, and each content has code of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from numba.core.errors import NumbaError

from quantkit.kernels.cpu.core.jit import helper, inline, kernel, specialize
from quantkit.kernels.cpu.core.specialize import ConstantsType, constants


@constants
@dataclass(frozen=True)
class Offset:
    step: int


@constants
@dataclass(frozen=True)
class Settings:
    factor: int
    offset: Offset
    function: Any


@inline
def _square(x: Any) -> Any:
    return x * x


@inline
def _negative(x: Any) -> Any:
    return -x


@helper
def _evaluate(settings: Any, x: Any) -> Any:
    return settings.function(x) * settings.factor + settings.offset.step


@helper
def _misspelt(settings: Any) -> Any:
    return settings.factors


#: Bindings of the entry points below.
settings: Any = None


def _entry(x: Any) -> Any:
    return _evaluate(settings, x)


def _misspelt_entry() -> Any:
    return _misspelt(settings)


SQUARES = Settings(3, Offset(5), _square)
NEGATIVES = Settings(7, Offset(-1), _negative)


def test_fields_are_numbers_functions_and_records() -> None:
    squares = specialize(_entry, "squares", kernel, settings=SQUARES)
    negatives = specialize(_entry, "negatives", kernel, settings=NEGATIVES)
    assert (squares(4), negatives(4)) == (3 * 16 + 5, -7 * 4 - 1)


def test_equal_content_has_one_type() -> None:
    twin = Settings(3, Offset(5), _square)
    assert ConstantsType(SQUARES) == ConstantsType(twin)
    variants = (Settings(4, Offset(5), _square), Settings(3, Offset(6), _square), Settings(3, Offset(5), _negative))
    assert len({ConstantsType(variant) for variant in (SQUARES, *variants)}) == 4


def test_a_misspelt_field_is_a_compilation_error() -> None:
    with pytest.raises(NumbaError, match="factors"):
        specialize(_misspelt_entry, "misspelt", kernel, settings=SQUARES)()
