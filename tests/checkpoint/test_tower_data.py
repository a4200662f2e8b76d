"""The checkpoints with towers: their bytes are those that the reference converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoints

DATA = Path(__file__).parents[1] / "data"
TOWERS = json.loads((DATA / "mmproj-sha256.json").read_text())


def test_every_checkpoint_has_digests() -> None:
    assert set(TOWERS) == set(checkpoints.TOWERS)


@pytest.mark.parametrize("name", checkpoints.TOWERS)
def test_bytes_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    assert checkpoints.digest(checkpoints.write_checkpoint(name, tmp_path)) == TOWERS[name]["checkpoint"]


def test_table_names_every_checkpoint() -> None:
    rows = [line.split("|") for line in (checkpoints.DESCRIPTIONS / "README.md").read_text().splitlines()]
    named = {(cells[1].strip(" `"), cells[2].strip(" `")) for cells in rows if len(cells) > 4}
    assert named >= {(row["class"], name) for name, row in TOWERS.items()}


def test_reference_converts_every_class() -> None:
    """All 68 of llama.cpp b11434's MMPROJ_MODEL_MAP have a checkpoint whose towers it converts."""
    assert len({row["class"] for row in TOWERS.values() if "error" not in row["f32"]}) == 68
