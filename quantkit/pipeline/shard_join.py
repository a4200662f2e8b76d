"""Join shards and delete each as soon as its bytes are in the output: one shard of free space is enough.

OUT.joining grows shard by shard. OUT.join lists the ranges to copy, and how many shards are in the output: each is
copied, compared and flushed to the disk before it is counted, and deleted after. A run that is killed at any moment can
go on, for every byte is in a shard or in OUT.joining.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, ResourceError, os_error_code
from quantkit.formats.files import Stamp
from quantkit.formats.outputs import Output, atomic_write, check_free, sibling_path
from quantkit.formats.ranges import copy_range, crc32_range, read_range, sync, write_range
from quantkit.formats.remote import URL
from quantkit.pipeline.plan import Plan
from quantkit.records import DAMAGE, record
from quantkit.units import format_size

#: Bytes that are copied at once.
_CHUNK = 64 << 20


@dataclass(frozen=True)
class JoinShard:
    """A shard: its stamp's size and time, and ranges as offset here, offset in the output, length."""

    path: str
    size: int
    mtime_ns: int
    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class JoinState:
    """The state of a join: ``freed`` of the shards are in the output, and deleted or to be deleted."""

    nbytes: int
    shards: tuple[JoinShard, ...]
    freed: int

    @property
    def pending_bytes(self) -> int:
        """The bytes that are still to be copied."""
        return sum(n for shard in self.shards[self.freed :] for _, _, n in shard.ranges)


def state_path(output: Path) -> Path:
    """Return the file with the state of a join."""
    return sibling_path(output, ".join")


def growing_path(output: Path) -> Path:
    """Return the name of an output while shards are added to it."""
    return sibling_path(output, ".joining")


def read_state(output: Path) -> JoinState | None:
    """Return the state of an interrupted join, None without one. Raises FormatError."""
    path = state_path(output)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ResourceError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
    try:
        state: JoinState = record(JoinState, json.loads(content))
    except DAMAGE as e:
        raise FormatError(f"{path}: not the state of a join of quantkit ({e})", "QK-E122") from None
    return state


def can_free(plan: Plan) -> bool:
    """Return whether shards of a plan can be deleted one by one: local files, whose bytes are copied unchanged."""
    if isinstance(plan.shards[0].path, URL) or any(isinstance(path, URL) for path in plan.source.paths):
        return False
    return all(plan.source.place(tensor.source) is not None for tensor in plan.tensors)


def join_freeing(
    output: Path, plan: Plan | None, *, overwrite: bool = False, on_write: Callable[[int], None] = lambda nbytes: None
) -> JoinState:
    """Join shards into ``output`` and delete them; return the state at the start.

    Args:
        output: the file.
        plan: a plan of ``plan_join``; None to continue an interrupted join.
        overwrite: replace an existing output.
        on_write: called with the number of bytes that were added.

    Raises:
        FormatError: a shard changed, or its copy differs.
        ResourceError: the output exists, the disk is full, or another run writes the output.
    """
    with Output(output, overwrite=True):
        check_free(output, overwrite=overwrite or plan is None)
        try:
            state = read_state(output) if plan is None else _begin(output, plan)
            if state is None:
                raise ResourceError(f"{state_path(output)}: no interrupted join", "QK-E401")
            begin = state
            _check_growing(output, state)
            _delete(state.shards[: state.freed])
            for shard in state.shards[state.freed :]:
                _copy(shard, growing_path(output), on_write)
                state = replace(state, freed=state.freed + 1)
                _write_state(output, state)
                _delete([shard])
            if growing_path(output).exists():
                check_free(output, overwrite=overwrite)
                growing_path(output).replace(output)
                sync(output.parent)
            state_path(output).unlink()
        except OSError as e:
            raise ResourceError(
                f"{e.filename or output}: {e.strerror or e}; nothing is lost: continue with --resume", os_error_code(e)
            ) from None
    return begin


def _begin(output: Path, plan: Plan) -> JoinState:
    """Write the header of the output, then the state; the shards are untouched. Raises OSError, ResourceError."""
    growing, shards = growing_path(output), plan.source.paths
    free, need = _free_bytes(output.parent), max(os.stat(path).st_size for path in shards)
    if need > free:
        raise ResourceError(
            f"{output.parent}: the largest shard needs {format_size(need)}, but only {format_size(free)} are free",
            "QK-E406",
        )
    ranges: dict[str, list[tuple[int, int, int]]] = {os.path.abspath(path): [] for path in shards}
    for tensor in plan.tensors:
        place = plan.source.place(tensor.source)
        assert place is not None
        if tensor.nbytes:
            ranges[os.path.abspath(place[0])].append((place[1], tensor.offset, tensor.nbytes))
    layout = plan.shards[0].layout
    with open(growing, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
        file.flush()
        os.fsync(file.fileno())
    entries = []
    for path, places in ranges.items():
        stamp = Stamp.from_status(os.stat(path))
        entries.append(JoinShard(path, stamp.size, stamp.mtime_ns, tuple(places)))
    state = JoinState(layout.nbytes, tuple(entries), 0)
    _write_state(output, state)
    return state


def _check_growing(output: Path, state: JoinState) -> None:
    """Raise FormatError unless the bytes of deleted shards are there. Raises OSError."""
    growing = growing_path(output)
    was_renamed = not growing.exists() and state.freed == len(state.shards)
    path = output if was_renamed else growing
    if not path.is_file() or path.stat().st_size != state.nbytes:
        raise FormatError(f"{path}: not the file of {state.nbytes} bytes that the interrupted join left", "QK-E409")


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _write_state(output: Path, state: JoinState) -> None:
    with atomic_write(state_path(output)) as part:
        part.write_text(json.dumps(asdict(state)), encoding="utf-8")


def _copy(shard: JoinShard, growing: Path, on_write: Callable[[int], None]) -> None:
    """Copy the ranges of a shard, flush them and compare. Raises FormatError, OSError."""
    path = Path(shard.path)
    _check(shard)
    by_kernel, buffer = True, np.empty(0, np.uint8)
    for begin, target, nbytes in shard.ranges:
        for position in range(0, nbytes, _CHUNK):
            n = min(_CHUNK, nbytes - position)
            by_kernel = by_kernel and copy_range(path, growing, begin + position, target + position, n)
            if not by_kernel:
                buffer = buffer if len(buffer) >= n else np.empty(n, np.uint8)
                read_range(path, buffer[:n], begin + position)
                write_range(growing, buffer[:n], target + position)
            on_write(n)
    sync(growing)
    for begin, target, nbytes in shard.ranges:
        if crc32_range(path, begin, nbytes) != crc32_range(growing, target, nbytes):
            raise FormatError(f"{path}: its copy in {growing} differs; the shard is kept", "QK-E100")
    _check(shard)


def _check(shard: JoinShard) -> None:
    stamp = Stamp.from_status(os.stat(shard.path))
    if (stamp.size, stamp.mtime_ns) != (shard.size, shard.mtime_ns):
        raise FormatError(f"{shard.path}: changed since the join began; nothing was deleted", "QK-E109")


def _delete(shards: Sequence[JoinShard]) -> None:
    for shard in shards:
        with suppress(FileNotFoundError):
            _check(shard)
            os.unlink(shard.path)
            sync(Path(shard.path).parent)
