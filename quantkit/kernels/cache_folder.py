"""Folders for compiled kernels: only this user can write to them, because their contents are executed."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_STALE_SECONDS = 60 * 86400


def cache_folder(kind: str, sources: str, *machine: str) -> Path:
    """Create and return the folder KIND/SOURCES/MACHINE in $QUANTKIT_CACHE, else in the user's cache.

    If that is not writable (containers, CI), or writable by others, the folder is under the temporary directory: a
    lasting one if only this user can have filled it, else one of this process. Removes folders of the same kind but
    other sources that have not been used for two months.
    """
    configured = os.environ.get("QUANTKIT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME", "")
    home = home if os.path.isabs(home) else os.path.expanduser("~/.cache")  # XDG: relative paths are ignored
    base = Path(configured) if configured else Path(home, "quantkit")
    return _safe_folder(base, bool(configured), (kind, sources, *machine))


@cache
def _safe_folder(base: Path, configured: bool, names: tuple[str, ...]) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    temporary = Path(tempfile.gettempdir(), f"quantkit-{user}")
    folder = _private(base, configured, names) or _private(temporary, True, names)
    if folder is None:
        folder = _of_this_process().joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _private(base: Path, configured: bool, names: tuple[str, ...]) -> Path | None:
    """Return the folder, created if missing; None if it is not writable or others could have filled it."""
    folders = [base.joinpath(*names[:i]) for i in range(len(names) + 1)]
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in folders[1:]:
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in folders[configured:-1]:  # quantkit's by its name, perhaps created under umask 002
            _close(folder)
        doubt = _doubt(base.stat()) or next(filter(None, (_doubt(f.lstat()) for f in folders[1:])), "")
        if doubt:
            sys.stderr.write(f"note: {folders[-1]} is not used for compiled kernels: {doubt}\n")
            return None
        if not os.access(folders[-1], os.W_OK):
            return None
        os.utime(folders[2])
        _remove_stale(folders[1])
    except OSError:
        return None
    return folders[-1]


def _close(folder: Path) -> None:
    """Revoke others' permission to write to a folder."""
    mode = folder.stat().st_mode
    if mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(mode) & ~_OTHERS_WRITE)


def _doubt(status: os.stat_result) -> str:
    """Return the reason why other users could put code into a folder, or an empty string."""
    if not stat.S_ISDIR(status.st_mode):
        return "it, or a parent folder, is a link"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"it, or a parent folder, belongs to user {status.st_uid}"
    if os.name == "posix" and status.st_mode & _OTHERS_WRITE:
        return "other users may write to it or to a parent folder; remove it, or check its contents and run chmod go-w"
    return ""


def _remove_stale(parent: Path) -> None:
    for entry in parent.iterdir():
        if entry.is_dir() and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)


@cache
def _of_this_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
