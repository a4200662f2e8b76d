"""Folders of texts: each text of a folder is measured, so that one argument names a set of categories."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quantkit.errors import FormatError, ResourceError
from quantkit.names import printable

#: Suffixes of texts, and of conversations.
TEXT_SUFFIXES, CHAT_SUFFIXES = (".txt", ".raw"), (".jsonl",)


def list_texts(paths: Iterable[Path], notes: list[str]) -> tuple[list[Path], list[Path]]:
    """Return the texts that paths name, and the conversations in folders among them, each folder's by name.

    Hidden files and subfolders are not read. ``notes`` gets a note on other files of a folder.

    Raises:
        FormatError: a folder has no text.
        ResourceError: it cannot be read.
    """
    texts: list[Path] = []
    chats: list[Path] = []
    for path in paths:
        if not path.is_dir():
            texts.append(path)
            continue
        files = _files_of(path)
        in_folder = [file for file in files if file.suffix in TEXT_SUFFIXES]
        chats_in_folder = [file for file in files if file.suffix in CHAT_SUFFIXES]
        if not in_folder and not chats_in_folder:
            patterns = ", ".join(f"*{suffix}" for suffix in (*TEXT_SUFFIXES, *CHAT_SUFFIXES))
            raise FormatError(
                f"{path}: a folder without texts ({patterns}): give a file; quantkit texts -o DIR writes texts",
                "QK-E121",
            )
        if n_other := len(files) - len(in_folder) - len(chats_in_folder):
            notes.append(f"{printable(str(path))}: {n_other} files with other suffixes are not read")
        texts += in_folder
        chats += chats_in_folder
    return texts, chats


def _files_of(folder: Path) -> list[Path]:
    """Return the files directly in a folder, by name, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as e:
        raise ResourceError(f"{folder}: {e.strerror or e}; choose another folder", "QK-E405") from None
