"""Check the English of documents, helps, messages, docstrings and comments, also of benchmarks, scripts and tests.

``scripts/prose.toml`` has the rules: patterns of phrases, and what to write instead. Each finding is one line with
file and line number. Spelling is checked by codespell (``[tool.codespell]`` in pyproject.toml).
"""

from __future__ import annotations

import ast
import bisect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).parent / "prose.toml"
DOCUMENTS = ("*.md", "docs/**/*.md")
SOURCES = "quantkit/**/*.py"
#: Developers' files. The strings of tests are data, so only their docstrings and comments are checked.
DEVELOPER_SOURCES = ("benchmarks/*.py", "scripts/**/*.py", "tests/**/*.py")
KERNELS = ("quantkit/**/*.cu", "quantkit/**/*.cuh", "tests/**/*.cu", "tests/**/*.cpp", "tests/**/*.h")
#: Code in Markdown, which is not prose: spans, link targets, HTML.
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\]\([^)]*\)|<[^>\n]*>|https?://\S+")
_FENCE = re.compile(r"\s*(```|~~~)")
#: A comment on its own line, or after code and two spaces.
_COMMENT = re.compile(r"(?:^\s*|  )#:? (.*)")
_KERNEL_COMMENT = re.compile(r"(?:^\s*|  )// ?(.*)")
#: A sentence has two words; keys, names and patterns do not.
_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? +[A-Za-z(`'{-]")


@dataclass(frozen=True)
class Rule:
    """A pattern of bad phrases. ``places``: the kinds of text that it applies to; all if empty."""

    pattern: re.Pattern[str]
    remedy: str
    places: frozenset[str]


@dataclass(frozen=True)
class Passage:
    """A text of kind ``place`` whose line breaks are spaces; ``lines``: offset and number of each of its lines."""

    place: str
    text: str
    lines: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Finding:
    """A phrase of a file that a rule forbids."""

    path: str
    line: int
    phrase: str
    remedy: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}": {self.remedy}'


def read_rules(path: Path = RULES) -> list[Rule]:
    """Return the rules of a file."""
    rules = tomllib.loads(path.read_text(encoding="utf-8"))["rule"]
    return [Rule(re.compile(r["pattern"], re.MULTILINE), r["instead"], frozenset(r.get("places", ()))) for r in rules]


def passage(place: str, lines: list[tuple[int, str]]) -> Passage:
    """Join numbered lines to a passage."""
    text, starts = "", []
    for number, line in lines:
        starts.append((len(text), number))
        text += line.strip() + " "
    return Passage(place, text, tuple(starts))


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield the paragraphs, items and table rows of a Markdown document, without code."""
    block: list[tuple[int, str]] = []
    fenced, last_column_is_code = False, False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        starts_item = re.match(r"\s*([-*|#>]|\d+\.) ?", line)
        if block and (fenced or starts_item or not line.strip()):
            yield passage("document", block)
            block = []
        if fenced or not line.strip():
            continue
        if line.startswith("|"):
            # The glossary's last column lists the words to avoid.
            cells = line.rstrip().rstrip("|").split("|")
            last_column_is_code = cells[-1].strip() == "not" or (last_column_is_code and number > 1)
            line = "|".join(cells[:-1]) if last_column_is_code else line
        else:
            last_column_is_code = False
        block.append((number, _CODE.sub(lambda m: re.sub(r"\S", "#", m[0]), line)))
    if block:
        yield passage("document", block)


def python_passages(text: str, place: str) -> Iterator[Passage]:
    """Yield the docstrings, sentences in other strings (of kind ``place``) and comments of a Python module."""
    source = text.splitlines()
    spans = []
    for node, is_docstring in strings(ast.parse(text)):
        literal = string_text(node)
        if node.end_lineno != node.lineno:
            spans.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if is_docstring:
            for block in paragraphs(list(enumerate(literal.splitlines(), node.lineno))):
                yield passage("docstring", [(n, re.sub(r"``[^`]*``", "#", line)) for n, line in block])
        elif _WORDS.search(literal):
            yield locate(place, literal, node, source)
    yield from comments(source, {number for span in spans for number in span})


def kernel_passages(text: str) -> Iterator[Passage]:
    """Yield the comments of a CUDA or C++ file; indented lines, which are tables and formulas, separate them."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _KERNEL_COMMENT.search(line) if "//" in line else None
        is_text = match and match[1].strip() and not match[1].startswith("  ")
        if block and not is_text:
            yield passage("comment", block)
            block = []
        elif match and is_text:
            block.append((number, match[1]))
    if block:
        yield passage("comment", block)


def paragraphs(lines: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield runs of lines that are not empty."""
    block: list[tuple[int, str]] = []
    for number, line in lines:
        if line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def strings(tree: ast.AST) -> Iterator[tuple[ast.Constant | ast.JoinedStr, bool]]:
    """Yield all string literals, f-strings as a whole and those within their expressions; True for docstrings."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_docstring = stack.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield node, is_docstring
        elif isinstance(node, ast.JoinedStr):
            yield node, False
            stack += [(value, False) for value in node.values if isinstance(value, ast.FormattedValue)]
        elif not isinstance(node, ast.Name | ast.expr_context | ast.operator | ast.alias):
            documented = None
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
                documented = node.body[0].value if isinstance(node.body[0], ast.Expr) else None
            # An expression statement at the beginning is the docstring; its value is pushed below instead of it.
            children = ast.iter_child_nodes(node)
            stack += [(c, False) for c in children if not (isinstance(c, ast.Expr) and c.value is documented)]
            if documented is not None:
                stack.append((documented, True))


def string_text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return the text of a string literal; expressions of an f-string become ``#``."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "#" for v in node.values)


def locate(place: str, text: str, node: ast.Constant | ast.JoinedStr, source: list[str]) -> Passage:
    """Return a string literal as a passage, with the source lines of its pieces."""
    first, last = node.lineno, node.end_lineno or node.lineno
    starts, offset = [(0, first)], 0
    for number in range(first, last + 1):
        for piece in re.split(r"\{[^}]*\}|[\"'\\]", source[number - 1]):
            start = text.find(piece, offset) if len(piece) > 3 else -1
            if start >= 0:
                starts.append((start, number))
                offset = start + len(piece)
    return Passage(place, re.sub(r"\s", " ", text), tuple(starts))


def comments(source: list[str], in_strings: set[int]) -> Iterator[Passage]:
    """Yield the comments in the lines of a Python module, those of adjacent lines as one."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(source, 1):
        match = _COMMENT.search(line) if "#" in line and number not in in_strings else None
        if match:
            block.append((number, match[1]))
        elif block:
            yield passage("comment", block)
            block = []
    if block:
        yield passage("comment", block)


def passages(root: Path, path: Path) -> Iterator[Passage]:
    """Yield the passages of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return markdown_passages(text)
    if path.suffix != ".py":
        return kernel_passages(text)
    parts = path.relative_to(root).parts
    if parts[0] == "tests":
        return (p for p in python_passages(text, "message") if p.place != "message")
    return python_passages(text, "help" if parts[1] in ("cli", "options") else "message")


def check_file(root: Path, path: Path, rules: list[Rule]) -> Iterator[Finding]:
    """Yield the findings in a file. All passages of a kind are searched together, in lower case, each on a line."""
    by_place: dict[str, list[Passage]] = {}
    for text in passages(root, path):
        by_place.setdefault(text.place, []).append(text)
    for place, texts in by_place.items():
        starts: list[tuple[int, int]] = []
        search_text = ""
        for text in texts:
            starts += [(len(search_text) + offset, number) for offset, number in text.lines]
            search_text += text.text + ".\n"
        lower = search_text.lower()
        for rule in rules:
            if not rule.places or place in rule.places:
                for match in rule.pattern.finditer(lower):
                    line = starts[bisect.bisect(starts, (match.start(), sys.maxsize)) - 1][1]
                    phrase = search_text[match.start() : match.end()].strip()
                    yield Finding(path.relative_to(root).as_posix(), line, phrase, rule.remedy)


def files(root: Path) -> list[Path]:
    """Return all files with prose."""
    return sorted(
        {path for pattern in (*DOCUMENTS, SOURCES, *DEVELOPER_SOURCES, *KERNELS) for path in root.glob(pattern)}
    )


def main() -> int:
    """Print all findings; return 1 if there are any."""
    rules = read_rules()
    findings = [finding for path in files(ROOT) for finding in check_file(ROOT, path, rules)]
    for finding in sorted(findings, key=lambda f: (f.path, f.line)):
        print(finding)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
