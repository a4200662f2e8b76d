"""Clones of files: another file that shares the blocks of the first until one of them changes (reflinks).

btrfs, XFS and others have them (ioctl FICLONE of Linux). A clone takes no time and no space, so that a change of some
bytes of a large file can be a change of its clone, which is then renamed: every reader has the old file or the new one.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from quantkit.formats.files import open_input

#: FICLONE of linux/fs.h on x86-64.
_FICLONE = 0x40049409


def share_blocks(source: int, target: int) -> None:
    """Make an open file a clone of another. Raises OSError where the file system has no clones."""
    fcntl.ioctl(target, _FICLONE, source)


def clone(source: Path, target: Path) -> None:
    """Make a new file a clone of ``source`` with its permissions, owner and extended attributes. Raises OSError."""
    with open_input(source) as fd:
        copy = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            share_blocks(fd, copy)
            copy_attributes(fd, copy)
        finally:
            os.close(copy)


def can_clone(path: Path) -> bool:
    """Return whether ``clone`` works beside a file; a file without a name tries it, so that nothing is left behind."""
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is None:
        return False
    try:
        with open_input(path) as fd:
            copy = os.open(path.parent, unnamed | os.O_RDWR, 0o600)
            try:
                share_blocks(fd, copy)
                copy_attributes(fd, copy)
            finally:
                os.close(copy)
    except OSError:
        return False
    return True


def copy_attributes(source: int, target: int) -> None:
    """Give an open file the owner, permissions and extended attributes (with access lists) of another.

    Raises OSError where this user may not.
    """
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)  # before the mode, of which it clears bits
    os.fchmod(target, status.st_mode & 0o7777)
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))
