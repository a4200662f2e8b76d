"""Write calibration and evaluation texts from files that Python and Debian install.

    benchmarks/feedback_texts.py FOLDER

FOLDER/manuals: Python's language reference and GNU manuals in English, without licenses and indices; for `quantkit
calibration -o corpus FOLDER/manuals`. FOLDER/source.txt: modules of Python's standard library. FOLDER/german.txt:
manual pages in German.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

MANUALS = ("coreutils", "find", "grep", "sed", "wget", "diffutils", "gettext")
#: Bytes of the other kinds of text.
SIZE = 400_000


def nodes(manual: str) -> Iterator[str]:
    """Yield the nodes of an Info manual that are prose."""
    for file in sorted(Path("/usr/share/info").glob(f"{manual}.info*.gz")):
        for node in gzip.decompress(file.read_bytes()).decode(errors="replace").split("\x1f")[1:]:
            title, _, text = node.strip("\n").partition("\n")
            if title.startswith("File:") and not re.search("Licen[cs]e|Index|Copying", title):
                yield text.split("* Menu:")[0].strip("\n\0\b[]")


def modules() -> Iterator[str]:
    """Yield modules of the standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield file.read_text(errors="replace")


def pages(language: str) -> Iterator[str]:
    """Yield manual pages in a language."""
    if shutil.which("man") is None:
        sys.exit("man is not installed: it is needed to format manual pages")
    for file in sorted(Path(f"/usr/share/man/{language}").glob("man[18]/*.gz")):
        process = subprocess.run(["man", "-E", "UTF-8", "-P", "cat", file], capture_output=True, text=True, check=False,
                              env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})  # fmt: skip
        yield re.sub(".\b", "", process.stdout)


def up_to(size: int, texts: Iterable[str]) -> str:
    """Return texts, concatenated until they have a number of bytes."""
    pages_taken, total = [], 0
    for text in texts:
        pages_taken.append(text)
        total += len(text.encode())
        if total > size:
            break
    return "\n\n".join(pages_taken)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    (folder / "manuals").mkdir(parents=True, exist_ok=True)
    (folder / "manuals" / "python.txt").write_text("\n\n".join(topics.values()))
    for manual in MANUALS:
        (folder / "manuals" / f"{manual}.txt").write_text("\n\n".join(nodes(manual)))
    (folder / "source.txt").write_text(up_to(SIZE, modules()))
    (folder / "german.txt").write_text(up_to(SIZE, pages("de")))
    for file in sorted(folder.rglob("*.txt")):
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
