"""Look after a tensor cache: ``quantkit cache show``, ``prune`` and ``verify``.

What fills it, and takes from it, is ``--cache DIR`` of the commands that encode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.cpus import available_cpus
from quantkit.formats.cache_entry import DamagedEntry, Entry, are_intact
from quantkit.formats.ranges import Buffers
from quantkit.pipeline.cache.store import Kept, Store, open_store
from quantkit.units import parse_size


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Entries of one model and type."""

    model: str
    type: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What is in a cache, and what it was good for. Times are seconds since 1970, or None without entries."""

    folder: Path
    limit: int
    entries: int
    nbytes: int
    #: Bytes of what is being written, or was when a run was killed.
    unfinished: int
    groups: tuple[CacheGroup, ...]
    #: Entries that cannot be read; ``verify`` removes what is damaged.
    unreadable: int
    #: When the least and the most recently used entries were.
    oldest: float | None
    newest: float | None
    #: Runs that are on record, tensors they encoded or took, those and the bytes that they took.
    runs: int
    tensors: int
    taken: int
    taken_bytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What ``prune_cache`` removed, and what is left."""

    removed: int
    removed_bytes: int
    entries: int
    nbytes: int
    #: Files of killed runs that were removed.
    unfinished: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify_cache`` read, and the entries that it found damaged, with the reason. ``kept``: not removable."""

    entries: int
    nbytes: int
    damaged: tuple[tuple[str, str], ...]
    kept: int


def show_cache(folder: str | Path) -> CacheReport:
    """Return what is in the cache in ``folder``; only headers are read. Raises ResourceError if it is none."""
    store = open_store(Path(folder), make=False)
    entries = list(store.entries())
    groups: dict[tuple[str, str], list[int]] = {}
    unreadable = 0
    for kept in entries:
        try:
            with Entry(kept.path) as entry:
                made = entry.header.made
            groups.setdefault((made.get("model", ""), made.get("type", "")), []).append(kept.nbytes)
        except (OSError, DamagedEntry):
            unreadable += 1
    found = [CacheGroup(model, t, len(sizes), sum(sizes)) for (model, t), sizes in groups.items()]
    runs = store.runs()
    return CacheReport(
        folder=store.folder,
        limit=store.limit,
        entries=len(entries),
        nbytes=sum(kept.nbytes for kept in entries),
        unfinished=sum(_size(path) for path in store.temporary()),
        groups=tuple(sorted(found, key=lambda g: (-g.nbytes, g.model, g.type))),
        unreadable=unreadable,
        oldest=min((kept.used for kept in entries), default=None),
        newest=max((kept.used for kept in entries), default=None),
        runs=len(runs),
        **{name: sum(_count(run, key) for run in runs) for name, key in _COUNTS.items()},
    )


#: Sums of ``CacheReport`` over runs, by what a run notes.
_COUNTS = {"tensors": "tensors", "taken": "taken", "taken_bytes": "bytes"}


def _count(run: dict[str, object], key: str) -> int:
    value = run.get(key)
    return value if type(value) is int else 0


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def prune_cache(folder: str | Path, *, to: int | str | None = None, older_than: float | None = None) -> Pruned:
    """Remove what killed runs left behind for a day, and entries, the least recently used first.

    Args:
        folder: the cache.
        to: until it has no more bytes than these (or "10G"); its limit without either argument.
        older_than: those that nobody has used for so many seconds.

    Raises ResourceError if it is no cache.
    """
    store = open_store(Path(folder), make=False)
    most = parse_size(to) if isinstance(to, str) else to
    if most is None:
        most = store.limit if older_than is None else store.nbytes()
    gone = store.evict(most, before=0 if older_than is None else time.time() - older_than)
    unfinished = store.clear_temporary()
    store.forget_sources()
    left = list(store.entries())
    nbytes = sum(kept.nbytes for kept in left)
    return Pruned(len(gone), sum(kept.nbytes for kept in gone), len(left), nbytes, unfinished)


def verify_cache(folder: str | Path, *, threads: int | None = None) -> Verified:
    """Read all entries of a cache, and remove those that are damaged. Raises ResourceError if it is no cache."""
    store = open_store(Path(folder), make=False)
    entries = list(store.entries())
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        wrong = list(pool.map(why_damaged, (kept.path for kept in entries)))
    damaged = [(kept, why) for kept, why in zip(entries, wrong, strict=True) if why]
    store.clear_temporary()
    return Verified(
        len(entries),
        sum(kept.nbytes for kept in entries),
        tuple((str(kept.path), why) for kept, why in damaged),
        sum(_removed(store, damaged)),
    )


def _removed(store: Store, damaged: list[tuple[Kept, str]]) -> Iterator[bool]:
    """Remove entries; yield whether each is still there."""
    for kept, _ in damaged:
        with suppress(OSError):
            kept.path.unlink()
        yield kept.path.exists()


def why_damaged(path: Path) -> str:
    """Read a whole entry; return what is wrong with it, or an empty string."""
    buffers = Buffers()
    try:
        with Entry(path) as entry:
            pieces, records = entry.header.pieces, entry.records()
            if records["source"][0].tobytes().hex()[:16] not in path.name:
                return "its name is another entry's"
            for matrix in range(pieces.matrices):
                for row in range(0, pieces.rows, pieces.piece):
                    rows = min(pieces.piece, pieces.rows - row)
                    data = buffers.get("rows", rows * pieces.row_bytes)
                    entry.read(data, pieces.at(matrix, row))
                    if not are_intact(records[pieces.span(matrix, row, rows)], [data]):
                        return f"row {row}{f' of matrix {matrix}' if pieces.matrices > 1 else ''} is damaged"
            if not np.isfinite(records["sums"]).all():
                return "its error sums are not finite"
    except FileNotFoundError:  # evicted meanwhile
        return ""
    except OSError as e:
        return f"it cannot be read: {e.strerror or e}"
    except DamagedEntry as e:
        return str(e)
    return ""
