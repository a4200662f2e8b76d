"""The figures of `quantkit types`: every type that can be encoded has one, and it is what its encoder does."""

from __future__ import annotations

import pytest
from encoded import ENCODED

from quantkit.pipeline.quality import QUALITY, SPEEDS, weighted_error
from quantkit.types import TensorType


def test_every_type_is_measured() -> None:
    assert list(QUALITY) == [t.name for t in ENCODED]
    assert {q.speed for q in QUALITY.values()} <= SPEEDS.keys()


@pytest.mark.parametrize("t", ENCODED, ids=str)
def test_errors_are_what_was_measured(t: TensorType) -> None:
    assert weighted_error(t) == pytest.approx(QUALITY[t.name].error, rel=1e-3)
