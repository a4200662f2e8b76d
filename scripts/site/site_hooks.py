"""Hooks of mkdocs: generated pages, and links to files of the repository outside docs/."""

from __future__ import annotations

import html
import posixpath
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from site_pages import COPIES, generated_pages

#: Files of the repository, and the pages that have their content.
_PAGES = COPIES | {"README.md": "index.md", "BENCHMARKS.md": "benchmarks/index.md"}
#: Weights in the search: who asks a question wants a guide before a list of options or figures.
_BOOSTS = {"how-to/": 4, "explanation/": 2, "benchmarks/": 0.5, "research/": 0.5}
_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

_EMPTY_HEADING = re.compile(r"<th( [^>]*)?></th>")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links to files of the repository links of the site; a file that the site lacks is plain text.

    The page gets its weight in the search.
    """
    uri = page.file.src_uri
    boost = next((boost for folder, boost in _BOOSTS.items() if uri.startswith(folder)), 1)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    is_copy = uri in COPIES.values()
    folder = "" if is_copy else posixpath.dirname(f"docs/{uri}")

    def mended(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or (path.startswith("docs/") and not is_copy):
            return match[0]
        page_uri = _PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if files.get_file_from_path(page_uri) is None:
            return text
        return f"[{text}]({posixpath.relpath(page_uri, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(mended, markdown)


def on_page_content(page_html: str, *, page: Any, config: Any, files: Files) -> str:
    """Write formulas as MathML, which browsers show without a script, and headings without text as cells."""

    def formula(match: re.Match[str]) -> str:
        source = html.unescape(match[2]).strip()
        if match[1] == "span":
            return str(convert(source))
        return f'<div class="formula">{convert(source, display="block")}</div>'

    return _EMPTY_HEADING.sub(r"<td\1></td>", _FORMULA.sub(formula, page_html))
