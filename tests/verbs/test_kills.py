"""Commands killed at any moment: no file is neither old nor new, and the resumed output is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import COMMANDS, check_kills


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command(tiny_moe: Path, tmp_path: Path, name: str) -> None:
    moments, incomplete = check_kills(COMMANDS[name], tiny_moe, tmp_path, 5)
    assert moments == 5
    assert incomplete > 0
