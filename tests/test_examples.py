"""The code blocks of README.md, of the tutorial and of the how-to pages: they run, and print what pages say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import click
import pytest

import examples
from example_files import NAMES, ExampleFiles
from examples import PAGES, ROOT, Block, blocks_of, environment_of, files_of

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
#: What a block may need that this machine does not have.
NEEDS = {"network", "gpu", "ray", "store", "minutes"}


#: A page's run, by page.
Runs = dict[Path, Future[None]]


def check_block(block: Block, folder: Path, variables: Mapping[str, str]) -> None:
    """Execute a block: it ends as it should, and prints the lines of the page."""
    status, printed = examples.execute(block, folder, variables)
    if block.fails:
        assert status != 0, printed
        assert f"[{block.fails}]" in printed, printed
    else:
        assert status == 0, printed
    assert not examples.stale_lines(block, printed), printed


def run_page(page: Path, files: ExampleFiles, folder: Path) -> None:
    files.provide(files_of(page), folder)
    with environment_of(page) as variables:
        for block in blocks_of(page):
            if block.is_executed:
                try:
                    check_block(block, folder, variables)
                except AssertionError as e:
                    e.add_note(f"{page.relative_to(ROOT)}:{block.line}:\n{block.text}")
                    raise


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The runs of the pages that are tested, two at a time: each command is a process, which mostly starts."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    pages = [item.callspec.params["page"] for item in items if item.originalname == "test_blocks_run"]
    files, folder = ExampleFiles(tmp_path_factory.mktemp("files")), tmp_path_factory.mktemp("pages")
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(run_page, page, files, folder / str(n)) for n, page in enumerate(pages)}
        pool.shutdown(cancel_futures=True)


@by_page
def test_blocks_run(page: Path, runs: Runs) -> None:
    runs[page].result()


@by_page
def test_command_lines_parse(page: Path) -> None:
    """Those of blocks that need more than this machine has; their options are quantkit's."""
    for block in blocks_of(page):
        assert set(block.needs.split()) <= NEEDS
        if block.is_executed:
            continue
        if block.language == "python":
            compile(block.text, page.name, "exec")
            continue
        for arguments in examples.command_lines(block):
            examples.parse(arguments)


@by_page
def test_files_of_a_page_are_known(page: Path) -> None:
    assert set(files_of(page)) <= NAMES


def test_an_unknown_option_is_detected() -> None:
    (arguments,) = examples.command_lines(
        Block("sh", "quantkit quantize \\\n  --no-such-option a.gguf b.gguf Q4_K  # text\n", 1)
    )
    with pytest.raises(click.NoSuchOption):
        examples.parse(arguments)


def test_a_line_that_is_not_printed_is_detected() -> None:
    block = Block("sh", "", 1, output=["1.5 s on 2 threads", "...", "wrote b.gguf"])
    assert examples.stale_lines(block, "0.3 s on 16 threads\nwrote a.gguf\n") == ["wrote b.gguf"]
