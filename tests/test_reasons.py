"""Reasons and errors are data: no part of the program reads the words that another part writes for people."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli import cli
from quantkit.errors import CODES, ClusterError, FormatError, QuantkitError
from quantkit.pipeline.type_rules import Reason

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "quantkit").rglob("*.py"))
#: Methods that read a text.
METHODS = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "find", "index", "removeprefix"}


def is_message(node: ast.expr) -> bool:
    """Return whether an expression is the message of an error, or the words of a reason."""
    return isinstance(node, ast.Attribute) and node.attr in ("message", "reason", "reason_text")


def readings(tree: ast.AST) -> Iterator[int]:
    """Yield the lines where a message is searched, split or compared."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            with_text = any(isinstance(side, ast.Constant) for side in node.comparators)
            if any(map(is_message, node.comparators)) or (with_text and is_message(node.left)):
                yield node.lineno
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        searched = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
        split = node.func.attr in METHODS and is_message(node.func.value)
        if split or (searched and any(map(is_message, node.args))):
            yield node.lineno


def test_no_code_reads_messages() -> None:
    lines = {str(path.relative_to(ROOT)): list(readings(ast.parse(path.read_text("utf-8")))) for path in SOURCES}
    assert not {path: numbers for path, numbers in lines.items() if numbers}


@pytest.mark.parametrize(
    "line",
    [
        'e.message.startswith("x")',
        '"x" in c.reason',
        're.search("x", c.reason)',
        'c.reason.split(" and ")',
        'e.message == "x"',
    ],
)
def test_reads_of_messages_are_detected(line: str) -> None:
    assert list(readings(ast.parse(line)))


def errors_by_words(tree: ast.AST) -> Iterator[int]:
    """Yield the lines where a test expects one of our errors by the words of its message."""
    kinds = {kind.__name__ for kind in (QuantkitError, *subclasses(QuantkitError))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raises":
            names = {name.id for arg in node.args for name in ast.walk(arg) if isinstance(name, ast.Name)}
            if any(keyword.arg == "match" for keyword in node.keywords) and names & kinds:
                yield node.lineno


def subclasses(kind: type) -> Iterator[type]:
    """Yield all classes that a class is a base of."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_tests_check_codes() -> None:
    """So that the English of an error can be mended: tests/lib/refusals.py."""
    paths = sorted((ROOT / "tests").glob("*/test_*.py"))
    lines = {path.name: list(errors_by_words(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    assert not {name: numbers for name, numbers in lines.items() if numbers}
    assert list(errors_by_words(ast.parse("pytest.raises((FormatError, OSError), match='x')"))) == [1]


def test_every_code_that_is_used_is_documented() -> None:
    used = {code for path in SOURCES for code in re.findall(r"QK-E\d+", path.read_text(encoding="utf-8"))}
    assert used <= set(CODES)


def test_the_command_line_shows_the_code(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(tmp_path / "no.gguf")])
    assert result.exit_code == 1
    assert re.search(r" \[QK-E\d{3}\]$", result.output.strip())


def test_errors_keep_their_codes() -> None:
    error = FormatError("a", "QK-E115").extend("; b")
    assert (type(error), error.message, error.code) == (FormatError, "a; b", "QK-E115")
    assert [kind("a").code for kind in (QuantkitError, FormatError, ClusterError)] == ["QK-E400", "QK-E100", "QK-E450"]


def test_a_reason_has_a_text() -> None:
    reason = Reason("class", "--attn-v-type", ("--attn-v-type",)).adjust("rows of 5: Q4_0").adjust("c")
    assert str(reason) == "--attn-v-type; rows of 5: Q4_0; c"
