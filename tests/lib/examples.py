"""The code blocks of pages: executed in a folder of small files, or only parsed if they need external resources.

Comments of a page control this. Before the first block, ``<!-- files: model-bf16.gguf imatrix.gguf -->`` lists the
files in its folder (tests/lib/example_files.py); ``<!-- server: hub -->`` has a stand-in of the Hub take its uploads
(tests/lib/model_hub.py). Before a block:

* ``<!-- needs: network -->``: it is not executed, but its command lines are parsed. Also a store, a GPU, Ray, ...
* ``<!-- fails: QK-E402 -->``: it ends with this error.

A ``text`` block is the output of the block before it. Its lines, except ``...``, are lines of that output apart from
numbers: times and the last digits of measurements are those of one machine.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from unittest import mock

import click

from model_hub import model_hub
from quantkit.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorial/*.md")), *sorted(ROOT.glob("docs/how-to/*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (\w+): (.+?) -->\s*$")
#: Replacements for a reader's files: the small checkpoint has its own vocabulary, so its pre-tokenizer has no name.
STAND_INS = {
    "convert Qwen3-30B-A3B/": "convert --pre gpt-2 Qwen3-30B-A3B/",
    "convert Qwen3-30B-A3B-DFlash/": "convert --pre gpt-2 Qwen3-30B-A3B-DFlash/",
    "-m Qwen3-30B-A3B/": "--pre gpt-2 -m Qwen3-30B-A3B/",
}


@dataclass(frozen=True)
class Block:
    """A block of code, its line in the page, its comments, and its expected output."""

    language: str
    text: str
    line: int
    needs: str = ""
    fails: str = ""
    output: list[str] = field(default_factory=list)

    @property
    def is_executed(self) -> bool:
        return not self.needs


def files_of(page: Path) -> list[str]:
    """Return the names of the files that a page needs."""
    comment = re.search(r"^<!-- files: (.+?) -->$", page.read_text("utf-8"), re.MULTILINE)
    return comment[1].split() if comment else []


@contextmanager
def environment_of(page: Path) -> Iterator[Mapping[str, str]]:
    """Yield the variables of a page's commands: those of this process, or of one that sees a stand-in of the Hub."""
    if "<!-- server: hub -->" not in page.read_text("utf-8"):
        yield os.environ
        return
    with tempfile.TemporaryDirectory() as folder, model_hub(Path(folder)) as hub:
        yield hub.environment


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are code, each with its output."""
    text, blocks = page.read_text("utf-8"), list[Block]()
    for fence in FENCE.finditer(text):
        indent, language, body = fence.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        if language in ("sh", "python"):
            comment = COMMENT.search(text[: fence.start()])
            marks = {comment[1]: comment[2]} if comment and comment[1] in ("needs", "fails") else {}
            line = text.count("\n", 0, fence.start()) + 1
            blocks.append(Block(language, "\n".join(lines) + "\n", line, **marks))
        elif language == "text" and blocks:
            blocks[-1].output.extend(lines)
    return blocks


def execute(block: Block, folder: Path, variables: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Run a block with bash or Python in a folder; return its exit status and output."""
    text = block.text
    for name, replacement in STAND_INS.items():
        text = text.replace(name, replacement)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    command = shell if block.language == "sh" else [sys.executable, "-c", text]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**variables, "PATH": path, "COLUMNS": "80"}
    process = subprocess.run(
        command,
        **{"cwd": folder, "env": environment, "timeout": 1200, "check": False, "text": True},
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    return process.returncode, process.stdout


def masked(line: str) -> str:
    """Return a line without numbers, their units and spaces."""
    return re.sub(r"([-+]?\d[\d.,]*(e[-+]?\d+)? *(([KMG](iB)?|B|h|min|m?s)\b)?)|\s|-{2,}", "", line)


def current_output(block: Block, printed: str) -> list[str | None]:
    """Return the lines of a block's output with the numbers of a run, in order; None for one that was not printed."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]", printed)]
    keys, start, current = [masked(line) for line in lines], 0, list[str | None]()
    for line in block.output:
        if line.strip() in ("...", ""):
            current.append(line)
        elif (key := masked(line)) in keys[start:]:
            start = keys.index(key, start) + 1
            current.append(lines[start - 1])
        else:
            current.append(None)
    return current


def stale_lines(block: Block, printed: str) -> list[str]:
    """Return the lines of a block's output that were not printed, or not in this order."""
    pairs = zip(block.output, current_output(block, printed), strict=True)
    return [line for line, current in pairs if current is None]


def nearest_line(line: str, printed: str) -> str | None:
    """Return the printed line that is most similar to another one."""
    matches = difflib.get_close_matches(line, re.split(r"[\r\n]", printed), n=1, cutoff=0.4)
    return matches[0].rstrip() if matches else None


def command_lines(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of every quantkit command in a shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for is_separator, group in groupby(lexer, key=lambda word: set(word) <= set("();|&<>")):
            words = list(group)
            if not is_separator and "quantkit" in words[:-1]:
                yield words[words.index("quantkit") + 1 :]


def parse(arguments: list[str]) -> None:
    """Parse the arguments of quantkit as click does, without opening or running anything. Raises click's errors."""
    with (
        mock.patch.object(click.Command, "invoke", return_value=None),
        mock.patch.object(click.Path, "convert", lambda self, value, *_: Path(value)),
    ):
        cli.main(arguments, prog_name="quantkit", standalone_mode=False)
