"""The figures of `quantkit types`: every type that can be encoded has one, and it is what its encoder does."""

from __future__ import annotations

import pytest

from guide import step
from quantkit.kernels.formats import has_encoder
from quantkit.pipeline.quality import QUALITY, SPEEDS, weighted_error
from quantkit.types import BY_NAME, TYPES, TensorType

QUALITY_TYPES = [t for t in TYPES if has_encoder(t)]


def test_every_type_is_measured() -> None:
    """One of neither tree may lack its figures."""
    missing = [t.name for t in QUALITY_TYPES if t.trees != "none" and t.name not in QUALITY]
    assert not missing, step("Add a type", 11, TYPE=" ".join(missing))
    assert list(QUALITY) == [t.name for t in QUALITY_TYPES if t.name in QUALITY], "the table has the order of TYPES"
    assert {q.speed for q in QUALITY.values()} <= SPEEDS.keys()


def test_interleaved_types_have_figures_of_their_own() -> None:
    """They are encoded by ik_llama.cpp's search, Q8_K_R8 with one scale for 256 values, BF16_R16 by cutting off."""
    assert has_encoder(BY_NAME["Q4_K_R4"])
    assert QUALITY["Q6_K_R4"].error < 0.98 * QUALITY["Q6_K"].error
    assert QUALITY["Q8_K_R8"].error > 1.5 * QUALITY["Q8_0"].error
    assert QUALITY["BF16_R16"].error > 1.9 * QUALITY["BF16"].error


@pytest.mark.parametrize("t", [t for t in QUALITY_TYPES if t.name in QUALITY], ids=str)
def test_recorded_errors_match_a_measurement(t: TensorType) -> None:
    assert weighted_error(t) == pytest.approx(QUALITY[t.name].error, rel=1e-3)
