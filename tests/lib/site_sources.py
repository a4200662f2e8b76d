"""The documentation site: its pages as they are in docs/, and those that scripts/site/site_pages.py generates."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Pages that are files: those at the root of the repository, and those of the site.
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


@cache
def generated() -> dict[str, str]:
    """Return the Markdown of the generated pages, by their path in the repository if they were files."""
    sys.path.insert(0, str(ROOT / "scripts/site"))
    try:
        from site_pages import generated_pages
    finally:
        sys.path.remove(str(ROOT / "scripts/site"))
    return {f"docs/{path}": text for path, text in generated_pages().items()}
