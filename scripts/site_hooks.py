"""Hooks of mkdocs: pages generated from the source, pages of the repository's root, and links to files outside docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from site_api import api_page
from site_commands import command_pages
from site_types import presets_page, types_page

ROOT = Path(__file__).resolve().parents[1]
#: Pages at the root of the repository, and where the site has them.
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "CHANGELOG.md": "changelog.md",
    "BENCHMARKS.md": "benchmarks/index.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every page that is not a file of docs/, by its path there."""
    pages = {f"reference/commands/{name}": text for name, text in command_pages()}
    pages |= {"reference/types.md": types_page(), "reference/presets.md": presets_page(), "reference/api.md": api_page()}
    copies = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
    return pages | {ROOT_PAGES[name]: (ROOT / name).read_text(encoding="utf-8") for name in copies}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links to the repository's files links of the site; what the site does not have is text."""
    uri = page.file.src_uri
    origin = next((name for name, target in ROOT_PAGES.items() if target == uri and page.file.generated_by), "")
    folder = "" if origin else posixpath.dirname(f"docs/{uri}")

    def mended(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or (folder and path.startswith("docs/")):
            return match[0]
        page_uri = ROOT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if files.get_file_from_path(page_uri) is None:
            return text
        return f"[{text}]({posixpath.relpath(page_uri, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(mended, markdown)
