#!/usr/bin/env python
"""Run the code blocks of pages, and print the lines of their output that differ from the pages.

    scripts/run_examples.py [--write] [PAGE ...]

Without PAGE: README.md, docs/tutorial/ and docs/how-to/. --write enters the current output: the numbers, and for a line
that is no longer printed the most similar one. tests/test_examples.py checks the pages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests/lib")]

from example_files import ExampleFiles  # noqa: E402
from examples import (  # noqa: E402
    PAGES,
    ROOT,
    Block,
    blocks_of,
    current_output,
    environment_of,
    execute,
    files_of,
    nearest_line,
    stale_lines,
)


def write_output(page: Path, block: Block, current: list[str]) -> None:
    """Replace the output in a page."""
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (block.output, current))
    text = page.read_text("utf-8")
    start = text.index(block.text)
    page.write_text(text[:start] + text[start:].replace(old, new, 1), "utf-8")


def run_page(page: Path, files: ExampleFiles, folder: Path, write: bool) -> tuple[int, int]:
    """Run the blocks of a page; return their number, and how many differ from the page."""
    files.provide(files_of(page), folder)
    name, n_bad, blocks = page.relative_to(ROOT), 0, [b for b in blocks_of(page) if b.is_executed]
    with environment_of(page) as variables:
        for block in blocks:
            status, printed = execute(block, folder, variables)
            is_right = f"[{block.fails}]" in printed if block.fails else status == 0
            if not is_right:
                print(f"{name}:{block.line}: status {status}\n{block.text}\n{printed}")
            stale = {line: nearest_line(line, printed) for line in stale_lines(block, printed)}
            for line, nearest in stale.items():
                print(f"{name}:{block.line}: not printed: {line}\n    {nearest}")
            if write and block.output:
                pairs = zip(block.output, current_output(block, printed), strict=True)
                write_output(page, block, [new if new is not None else stale[old] or old for old, new in pairs])
            n_bad += bool(stale) or not is_right
    return len(blocks), n_bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=lambda text: Path(text).resolve(), metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="enter the output of the blocks")
    arguments = parser.parse_args()
    n_run = n_wrong = n_parsed = 0
    with tempfile.TemporaryDirectory() as work:
        files = ExampleFiles(Path(work) / "files")
        files.folder.mkdir()
        for n, page in enumerate(arguments.pages or PAGES):
            run, wrong = run_page(page, files, Path(work) / f"{n}", arguments.write)
            n_run, n_wrong = n_run + run, n_wrong + wrong
            n_parsed += sum(not block.is_executed for block in blocks_of(page))
    print(f"{n_run} blocks were executed, {n_wrong} differ from the page; {n_parsed} are only parsed")
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
