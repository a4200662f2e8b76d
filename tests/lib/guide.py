"""The steps of CONTRIBUTING.md, which tests quote when one is missing."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Titles of the guides whose steps are tables.
GUIDES = ("Add a type", "Add an architecture", "Add a class to `convert`", "Add a command")


@cache
def steps(title: str) -> dict[int, tuple[str, str]]:
    """Return the steps of a guide: place and action."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {int(number): (place, action) for number, place, action in rows}


def step(title: str, number: int, **names: str) -> str:
    """Return a step as a message; ``type="q4_0"`` replaces <type> in it."""
    place, action = steps(title)[number]
    text = f'CONTRIBUTING.md, "{title}", step {number}: {place}: {action}'
    for name, value in names.items():
        text = text.replace(f"<{name}>", value)
    return text
