"""The checkpoints with towers and the draft models: their bytes are those that the reference converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoints

DATA = Path(__file__).parents[1] / "data"
TOWERS = json.loads((DATA / "mmproj-sha256.json").read_text())
DRAFTS = json.loads((DATA / "draft-sha256.json").read_text())


def test_every_checkpoint_has_digests() -> None:
    assert (set(TOWERS), set(DRAFTS)) == (set(checkpoints.TOWERS), set(checkpoints.DRAFTS))


def test_no_name_is_another_table_s() -> None:
    names = [*checkpoints.NAMES, *checkpoints.TOWERS, *checkpoints.DRAFTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [*checkpoints.TOWERS, *checkpoints.DRAFTS])
def test_bytes_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    assert checkpoints.digest(checkpoints.write_checkpoint(name, tmp_path)) == (TOWERS | DRAFTS)[name]["checkpoint"]


def test_table_names_every_checkpoint() -> None:
    rows = [line.split("|") for line in (checkpoints.DESCRIPTIONS / "README.md").read_text().splitlines()]
    pairs = {(cells[1].strip(" `"), cells[2].strip(" `")) for cells in rows if len(cells) > 4}
    assert pairs >= {(row["class"], name) for name, row in (TOWERS | DRAFTS).items()}


@pytest.mark.parametrize(("digests", "n_classes"), [(TOWERS, 68), (DRAFTS, 15)], ids=["towers", "drafts"])
def test_reference_converts_every_class(digests: checkpoints.Json, n_classes: int) -> None:
    """All of llama.cpp b11434's MMPROJ_MODEL_MAP; 14 classes of drafts, and DeepSeek V4's whole model by --dspark."""
    assert len({row["class"] for row in digests.values() if "error" not in row["f32"]}) == n_classes
