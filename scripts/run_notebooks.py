"""Run the notebooks of docs/research and write their outputs; export each as the Markdown page of the site.

    scripts/run_notebooks.py [NAME ..]            run, write the notebook, its page and pictures
    scripts/run_notebooks.py --check [NAME ..]    run only; exit with 1 for a cell that fails or has
                                                  other outputs, or a page that is not the notebook's

A page needs no plugin: code and texts are fenced, tables are HTML, pictures are files beside it. stderr, on which a
first run reports compilation, is omitted.
"""

from __future__ import annotations

import argparse
import re
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parents[1] / "docs/research"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
#: Time limit of a cell in seconds: the first run on a machine compiles kernels.
TIMEOUT = 600


def run(notebook: Any) -> Any:
    """Return a copy of a notebook with the outputs of a run in a fresh kernel, in the folder of the notebooks."""
    fresh = nbformat.from_dict(notebook)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(fresh, timeout=TIMEOUT, resources=resources, coalesce_streams=True).execute()
    for cell in code_cells(fresh):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return fresh


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_kinds(notebook: Any) -> list[list[str]]:
    """Return the kinds of each code cell's outputs; texts have times and last digits, which differ."""
    return [[kind for output in cell.outputs for kind in _kinds(output)] for cell in code_cells(notebook)]


def _kinds(output: Any) -> list[str]:
    return sorted(output.data) if "data" in output else [output.output_type]


class Page:
    """The Markdown page of a notebook, and its pictures by name."""

    def __init__(self, name: str, notebook: Any) -> None:
        self.name = name
        self.pictures: dict[str, bytes] = {}
        self._heading = name
        self.text = "\n\n".join(part for cell in notebook.cells for part in self._cell(cell)) + "\n"

    def _cell(self, cell: Any) -> Iterator[str]:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
            self._heading = headings[-1] if headings else self._heading
            title, newline, text = cell.source.partition("\n")
            yield title if title.startswith("# ") else cell.source
            if title.startswith("# "):
                yield f"[Download this page as a notebook]({self.name}.ipynb)"
                yield from [text.strip()] if newline else []
            return
        yield f"```python\n{cell.source}\n```"
        for output in cell.outputs:
            yield self._output(output)

    def _output(self, output: Any) -> str:
        if output.output_type == "stream":
            return _fenced(output.text)
        if "image/png" in output.data:
            picture = f"{self.name}-{len(self.pictures) + 1}.png"
            self.pictures[picture] = b64decode(output.data["image/png"])
            return f"![{self._heading}]({picture})"
        if "text/html" in output.data:
            return str(output.data["text/html"])
        return _fenced(output.data["text/plain"])


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def check(name: str) -> bool:
    """Run a notebook; return whether the kinds of its outputs and its page match the files."""
    notebook = read(name)
    problems = list(_differences(notebook, run(notebook))) + list(_stale_files(Page(name, notebook)))
    for problem in problems:
        print(f"{name}: {problem}", file=sys.stderr)
    return not problems


def _differences(notebook: Any, fresh: Any) -> Iterator[str]:
    for number, (before, now) in enumerate(zip(output_kinds(notebook), output_kinds(fresh), strict=True)):
        if before != now:
            yield f"code cell {number} has outputs {now}, the file {before}"


def _stale_files(page: Page) -> Iterator[str]:
    """Yield the files of a page that differ from the notebook's output."""
    files = {f"{page.name}.md": page.text.encode(), **page.pictures}
    for path, data in files.items():
        if not (FOLDER / path).is_file() or (FOLDER / path).read_bytes() != data:
            yield f"{path} is not up to date: run scripts/run_notebooks.py {page.name}"


def write(name: str) -> None:
    """Run a notebook; write it, its page and its pictures."""
    notebook = run(read(name))
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")
    page = Page(name, notebook)
    for old in FOLDER.glob(f"{name}-[0-9]*.png"):
        old.unlink()
    for picture, data in page.pictures.items():
        (FOLDER / picture).write_bytes(data)
    (FOLDER / f"{name}.md").write_text(page.text, encoding="utf-8")


def main() -> int:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []])
    parser.add_argument("--check", action="store_true", help="run only")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            results = [check(name) for name in arguments.names or NAMES]
            return 0 if all(results) else 1
        for name in arguments.names or NAMES:
            write(name)
    except CellExecutionError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
