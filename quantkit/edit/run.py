"""Carry out the plan of an edit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantkit.arguments import checked
from quantkit.edit.plan import EditPlan, Method, plan_edit
from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.clone import clone, copy_attributes
from quantkit.formats.files import check_unchanged, open_input
from quantkit.formats.gguf.header_journal import replace_header
from quantkit.formats.outputs import Output, atomic_write
from quantkit.formats.ranges import copy_range, read_range, write_range
from quantkit.options.edit import EditOptions
from quantkit.progress import ByteCounter, ProgressCallback

#: Bytes that are copied at once.
_CHUNK = 64 << 20


@checked
def edit(
    source: str | Path,
    output: str | Path | None = None,
    options: EditOptions | None = None,
    *,
    reserve: int | None = None,
    force: bool = False,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> EditPlan:
    """Edit the metadata of a GGUF file, in place where the new header fits; tensor data is never decoded.

    Only the first shard of a split model changes. Where the file system has clones, the header of one changes, which is
    then renamed. Elsewhere the writes are journaled first and undone, after a crash, by the next command that opens the
    file; other programs have the old header or the new one where the room can hold a second copy of the keys from the
    first changed one on, and refuse the file where it cannot (``EditPlan.is_atomic``). A header that does not fit has
    the file written again, beside, and renamed; data is shared or copied by the file system where it can.

    Args:
        source: a file, or any shard of a split one.
        output: another file; None to change ``source``.
        options: the changes.
        reserve: bytes of room for later edits in a file that is written; by default those that ``source`` has, or,
            where its header has grown, those of all keys and 64 KiB.
        force: also write changes with which a runtime no longer loads the file.
        overwrite: replace an existing output.
        progress: called with the bytes written.

    Raises:
        RecipeError: a change cannot be applied, or would keep a runtime from loading the file.
        FormatError: a damaged file, or a chat template that fails.
        ResourceError: the file cannot be written, or another process writes it.
    """
    plan = plan_edit(source, output, options, reserve=reserve, force=force)
    run_edit(plan, overwrite=overwrite, progress=progress)
    return plan


@checked
def run_edit(plan: EditPlan, *, overwrite: bool = False, progress: ProgressCallback | None = None) -> None:
    """Carry out a plan; arguments and errors as for ``edit``."""
    if plan.method is Method.NOTHING:
        return
    replaces = plan.method is not Method.COPY or overwrite
    with ExitStack() as stack:
        paths = [stack.enter_context(Output(path, overwrite=replaces)).path for path in plan.outputs]
        try:
            if plan.method is Method.IN_PLACE:
                replace_header(paths[0], plan.present, plan.writes)
                return
            counter = ByteCounter(progress, plan.nbytes)
            parts = [stack.enter_context(atomic_write(path)) for path in paths]
            if plan.method is Method.CLONE:
                _write_clone(plan, parts[0])
                counter.add(plan.nbytes)
                return
            for i, (source, part) in enumerate(zip(plan.sources, parts, strict=False)):
                header = plan.header if i == 0 else b""
                _write(_Copy(source, part, header, len(plan.present) if i == 0 else 0), counter.add)
                _copy_attributes(source, part, of_owner=plan.method is Method.REWRITE)
            check_unchanged(plan.sources)
            if plan.method is Method.REWRITE:
                _check_name(plan)
        except OSError as e:
            raise ResourceError(f"{paths[0]}: {e.strerror or e}; nothing was changed", os_error_code(e)) from None


def _write_clone(plan: EditPlan, part: Path) -> None:
    """Write the new header into a clone of the first shard. Raises FormatError, OSError."""
    source = plan.sources[0]
    clone(source, part)
    write_range(part, np.frombuffer(plan.header, np.uint8), 0)
    check_unchanged([source])
    _check_name(plan)


def _check_name(plan: EditPlan) -> None:
    """Raise FormatError if another file has the name of the first shard since the plan. Raises OSError."""
    with open_input(plan.sources[0]) as fd:
        if not os.path.samestat(os.fstat(fd), os.stat(plan.outputs[0])):
            raise FormatError(f"{plan.outputs[0]}: the file was replaced meanwhile; start over", "QK-E109")


def _copy_attributes(source: Path, part: Path, *, of_owner: bool) -> None:
    """Give a written file the permissions of its source; also the rest of its attributes where this user may."""
    shutil.copymode(source, part)
    if of_owner:
        with open_input(source) as fd, open(part, "rb+") as file, suppress(OSError):
            copy_attributes(fd, file.fileno())


class _Copy(NamedTuple):
    """A file that is written: ``header`` in place of the first ``begin`` bytes of the source."""

    source: Path
    part: Path
    header: bytes
    begin: int


def _write(copy: _Copy, count: Callable[[int], None]) -> None:
    """Write a file: the header, then the source's other bytes, by the kernel if it can."""
    nbytes = copy.source.stat().st_size - copy.begin
    # Without allocating: blocks that the file system shares need no space.
    with open(copy.part, "wb") as file:
        file.write(copy.header)
        file.truncate(len(copy.header) + nbytes)
    count(len(copy.header))
    by_kernel, buffer = True, np.empty(0, np.uint8)
    for position in range(0, nbytes, _CHUNK):
        n = min(_CHUNK, nbytes - position)
        source_offset, target = copy.begin + position, len(copy.header) + position
        by_kernel = by_kernel and copy_range(copy.source, copy.part, source_offset, target, n)
        if not by_kernel:
            buffer = buffer if len(buffer) >= n else np.empty(n, np.uint8)
            read_range(copy.source, buffer[:n], source_offset)
            write_range(copy.part, buffer[:n], target)
        count(n)
