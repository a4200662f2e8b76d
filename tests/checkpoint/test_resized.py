"""Checkpoints of random sizes convert to the reference's bytes: encoders, text models, draft models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from fuzz_shapes import SHA256, convert_own, jobs_of, summary, write_case
from quantkit.errors import QuantkitError

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads(SHA256.read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_bytes_are_the_references(name: str, tmp_path: Path) -> None:
    row = EXPECTED[name]
    case, actual = write_case(name, row["seed"], tmp_path / "case"), {"seed": row["seed"]}
    for key in row.keys() - {"seed"}:
        try:
            actual[key] = summary(convert_own(case, key, tmp_path / "model.gguf"))
        except QuantkitError:
            actual[key] = "refused"
    assert actual == row


def test_every_checkpoint_of_encoders_and_drafts_has_random_sizes() -> None:
    """Native ones have no config.json; of the others, those that the reference does not read are missing."""
    names = {name for name in (*checkpoints.TOWERS, *checkpoints.DRAFTS) if "native" not in name}
    assert names == EXPECTED.keys()
    conversions = [key for name in names for key, _ in jobs_of(name) if key in EXPECTED[name]]
    refused = [key for row in EXPECTED.values() for key, value in row.items() if value == "refused"]
    assert len(refused) < len(conversions) / 5
