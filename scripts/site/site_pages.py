"""Pages of the site that are not files of docs/: generated from the source, or at the root of the repository."""

from __future__ import annotations

from pathlib import Path

from site_api import api_page
from site_commands import command_pages
from site_models import models_page
from site_types import presets_page, types_page

ROOT = Path(__file__).resolve().parents[2]
#: Pages at the root of the repository, and where the site has them.
COPIES = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every page that is not a file of docs/, by its path there."""
    pages = {f"commands/{name}": text for name, text in command_pages()}
    pages |= {"types.md": types_page(), "presets.md": presets_page(), "models.md": models_page(), "api.md": api_page()}
    pages = {f"reference/{name}": text for name, text in pages.items()}
    return pages | {target: (ROOT / name).read_text(encoding="utf-8") for name, target in COPIES.items()}
