"""Commands that are killed (SIGKILL) at calls that change files, in a forked process, and what they leave behind.

A moment is the n-th such call, and of a write the share of its pages that reach the file. Afterwards every file with a
final name has the bytes of a run without a kill, or the file's old ones, and the same command with ``resume`` completes
them. A file that is edited in place is first read by other programs, which know no journal.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edit_states import Metadata, read_as_gguf_py
from libllama import Libllama
from quantkit.edit import EditOptions, edit
from quantkit.formats import clone
from quantkit.formats.gguf.header_journal import settle
from quantkit.formats.gguf.header_writes import PAGE
from quantkit.formats.gguf.reader import read_shard
from quantkit.prune import prune_experts
from quantkit.split import join, split
from quantkit.stitch import stitch

_CALLS = ("pwrite", "copy_file_range", "fsync", "fdatasync", "replace", "rename", "unlink", "truncate", "ftruncate")


@dataclass(frozen=True)
class Command:
    """A command in a folder: ``prepare`` its inputs, ``run`` it (again), and the files that it leaves in the end."""

    prepare: Callable[[Path, Path], None]
    run: Callable[[Path], object]
    #: Whether a file may have other bytes until the next command of quantkit opens it.
    has_journal: bool = False
    #: Whether other programs may refuse such a file.
    refused: bool = False


def _prepare_room(model: Path, folder: Path, reserve: int = 1 << 18) -> None:
    edit(model, folder / "m.gguf", reserve=reserve)


def _prepare_file(model: Path, folder: Path) -> None:
    shutil.copy(model, folder / "m.gguf")


def _prepare_shards(model: Path, folder: Path) -> None:
    split(model, folder / "m.gguf", max_size="5M")


def _prepare_files(model: Path, folder: Path) -> None:
    for name in ("m.gguf", "n.gguf"):
        shutil.copy(model, folder / name)


def _first(folder: Path) -> Path:
    """Return the name of the first shard, which may be gone."""
    return folder / "m-00001-of-00004.gguf"


def copy_blocks(source: int, target: int) -> None:
    """Copy an open file: what ``clone.share_blocks`` does for readers, on any file system."""
    position = 0
    while n := os.sendfile(target, source, position, 1 << 20):
        position += n


def _edit_in_place(folder: Path) -> None:
    with patch.object(clone, "share_blocks", side_effect=OSError(errno.EOPNOTSUPP, "no clones")):
        edit(folder / "m.gguf", None, EditOptions(name="Another"))


def _edit_clone(folder: Path) -> None:
    """Edit in a clone: a real one where the file system has them."""
    share = clone.share_blocks if clone.can_clone(folder / "m.gguf") else copy_blocks
    with patch.object(clone, "share_blocks", share):
        edit(folder / "m.gguf", None, EditOptions(name="Another"))


COMMANDS = {
    "edit in place": Command(_prepare_room, _edit_in_place, has_journal=True),
    "edit in place, little room": Command(
        lambda model, folder: _prepare_room(model, folder, 4096), _edit_in_place, has_journal=True, refused=True
    ),
    "edit in a clone": Command(_prepare_room, _edit_clone),
    "edit": Command(
        _prepare_file, lambda folder: edit(folder / "m.gguf", None, EditOptions(name="Another"), reserve=8192)
    ),
    "split": Command(_prepare_file, lambda folder: split(folder / "m.gguf", max_size="5M", threads=1, resume=True)),
    "join": Command(_prepare_shards, lambda folder: join(_first(folder), threads=1, resume=True)),
    "join --delete-source": Command(
        _prepare_shards, lambda folder: join(_first(folder), delete_source=True, resume=True)
    ),
    "stitch": Command(
        _prepare_files,
        lambda folder: stitch(
            folder / "m.gguf", folder / "s.gguf", {"attn_v": folder / "n.gguf"}, threads=1, resume=True
        ),
    ),
    "prune-experts": Command(
        _prepare_file,
        lambda folder: prune_experts(
            folder / "m.gguf", folder / "p.gguf", experts=dict.fromkeys(range(4), range(6)), threads=1, resume=True
        ),
    ),
}


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without locks, which a killed process leaves behind unlocked."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def check_kills(
    command: Command, model: Path, folder: Path, count: int, runtimes: Sequence[Libllama] = ()
) -> tuple[int, int]:
    """Kill a command at ``count`` moments; return these, and how many left the command's work undone.

    Files that are edited in place are also loaded by ``runtimes``. Raises AssertionError.
    """
    begin, work = folder / "begin", folder / "work"
    begin.mkdir()
    command.prepare(model, begin)
    shutil.copytree(begin, work)
    n_calls = _calls_of(lambda: command.run(work))
    before, after = files_in(begin), files_in(work)
    metadata = _metadata(begin / "m.gguf"), _metadata(work / "m.gguf")
    draw, n_killed, n_undone = random.Random(0), 0, 0
    for _ in range(3 * count):
        if n_killed == count:
            break
        moment = draw.randrange(n_calls), draw.random()
        shutil.rmtree(work)
        shutil.copytree(begin, work)
        if not _kill_at(lambda: command.run(work), *moment):
            continue  # threads of this run needed fewer calls
        n_killed += 1
        for path in sorted(work.glob("*.gguf")):
            if command.has_journal:
                _check_foreign(path, metadata, command.refused, runtimes)
                settle(path)  # the old header is put back
            name, content = path.name, path.read_bytes()
            assert content in (before.get(name), after.get(name)), f"moment {moment}: {name} is neither old nor new"
            read_shard(path, 0, header_only=False)
        n_undone += {k: v for k, v in files_in(work).items() if k.endswith(".gguf")} != after
        command.run(work)
        present = files_in(work)
        assert present.keys() == after.keys(), f"moment {moment}: {sorted(present)}, not {sorted(after)}"
        assert present == after, f"moment {moment}: other bytes"
    return n_killed, n_undone


def _metadata(path: Path) -> Metadata | None:
    return read_as_gguf_py(path) if path.exists() else None


def _check_foreign(
    path: Path, metadata: tuple[Metadata | None, ...], may_refuse: bool, runtimes: Sequence[Libllama]
) -> None:
    """Check that other programs read the old or the new metadata, or, if they may, refuse the file."""
    actual = read_as_gguf_py(path)
    assert may_refuse if actual is None else actual in metadata
    for runtime in runtimes:
        loading = runtime.load(path)
        assert loading.loads == (actual is not None), loading.complaint


def _calls_of(function: Callable[[], object]) -> int:
    """Return the number of calls of a function that change files, in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        counter = _Counter()
        try:
            counter.install()
            function()
            os.write(write, str(counter.n).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert text, "the command failed"
    return int(text)


def _kill_at(function: Callable[[], object], n: int, share: float) -> bool:
    """Run a function in a process that kills itself at its n-th call; return whether it came to that."""
    pid = os.fork()
    if pid == 0:
        try:
            _Counter(n, share).install()
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


class _Counter:
    """Counts calls of ``os``, and kills this process at one of them."""

    def __init__(self, last: int | None = None, share: float = 0.0) -> None:
        self.n, self._last, self._share, self._lock = 0, last, share, threading.Lock()

    def install(self) -> None:
        for name in _CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count_call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self.n == self._last:
                    if name == "pwrite":
                        fd, data, offset = args
                        end = offset + int(self._share * len(bytes(data)))
                        call(fd, bytes(data)[: max(0, end - end % PAGE - offset)], offset)
                    os.kill(os.getpid(), signal.SIGKILL)
                self.n += 1
            return call(*args, **kwargs)

        return count_call
