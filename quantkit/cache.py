"""Manage a tensor cache: ``quantkit cache show``, ``prune`` and ``verify``.

The commands that encode use it with ``--cache DIR``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.formats.cache_entry import DamagedEntry, Entry, are_intact
from quantkit.formats.ranges import Buffers
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.pipeline.cache.store import Store, StoredEntry, open_store
from quantkit.progress import Progress, ProgressCallback
from quantkit.units import format_size, parse_size


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Entries of one model and type."""

    model: str
    type: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheReport(HtmlTable):
    """Contents of a cache and its use so far. Times are seconds since 1970; None without entries."""

    folder: Path
    limit: int
    entries: int
    nbytes: int
    #: Bytes of unfinished files, of running or killed runs.
    unfinished: int
    groups: tuple[CacheGroup, ...]
    #: Entries that cannot be read; ``verify`` removes damaged ones.
    unreadable: int
    #: When the least and the most recently used entries were.
    oldest: float | None
    newest: float | None
    #: Recorded runs, the tensors that they needed, and tensors and bytes that came from the cache.
    runs: int
    tensors: int
    hits: int
    hit_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        names = {"hits": "taken", "hit_bytes": "taken_bytes"}
        return {names.get(name, name): value for name, value in asdict(self).items()} | {"folder": str(self.folder)}

    def as_table(self) -> Table:
        """Return tensors and bytes by model and type."""
        rows = ((g.model, g.type, g.entries, g.nbytes) for g in self.groups)
        caption = f"{self.folder}: {self.entries} tensors, {format_size(self.nbytes)} of {format_size(self.limit)}"
        return table_of("model, type, tensors, bytes", rows, caption)


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The entries that ``prune_cache`` removed, and those that remain."""

    removed: int
    removed_bytes: int
    entries: int
    nbytes: int
    #: Files of killed runs that were removed.
    unfinished: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of ``verify_cache``: ``damaged`` has paths and reasons; ``n_not_removable`` of them remain on the disk."""

    entries: int
    nbytes: int
    damaged: tuple[tuple[str, str], ...]
    n_not_removable: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"kept" if name == "n_not_removable" else name: value for name, value in asdict(self).items()}


@checked
def show_cache(folder: str | Path) -> CacheReport:
    """Return a report about the cache in ``folder``; only headers are read.

    Raises ResourceError if it is not a cache.
    """
    store = open_store(locate(folder), make=False)
    entries = list(store.entries())
    groups: dict[tuple[str, str], list[int]] = {}
    unreadable = 0
    for stored in entries:
        try:
            with Entry(stored.path) as entry:
                labels = entry.header.origin
            groups.setdefault((labels.get("model", ""), labels.get("type", "")), []).append(stored.nbytes)
        except (OSError, DamagedEntry):
            unreadable += 1
    cache_groups = [CacheGroup(model, t, len(sizes), sum(sizes)) for (model, t), sizes in groups.items()]
    runs = store.runs()
    return CacheReport(
        folder=store.folder,
        limit=store.limit,
        entries=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
        unfinished=sum(status.st_size for status in store.temporary().values()),
        groups=tuple(sorted(cache_groups, key=lambda g: (-g.nbytes, g.model, g.type))),
        unreadable=unreadable,
        oldest=min((entry.used for entry in entries), default=None),
        newest=max((entry.used for entry in entries), default=None),
        runs=len(runs),
        **{name: sum(_count(run, key) for run in runs) for name, key in _COUNTS.items()},
    )


#: Sums of ``CacheReport`` over runs, by the key of a run.
_COUNTS = {"tensors": "tensors", "hits": "taken", "hit_bytes": "bytes"}


def _count(run: dict[str, object], key: str) -> int:
    value = run.get(key)
    return value if type(value) is int else 0


@checked
def prune_cache(folder: str | Path, *, to: int | str | None = None, older_than: float | None = None) -> PruneResult:
    """Remove the least recently used entries, and temporary files of killed runs older than a day.

    Args:
        folder: the cache.
        to: the size to reach, in bytes (or "10G"); without either argument, the cache's limit.
        older_than: remove entries unused for this many seconds.

    Raises ResourceError if it is not a cache.
    """
    store = open_store(locate(folder), make=False)
    limit = parse_size(to) if isinstance(to, str) else to
    if limit is None:
        limit = store.limit if older_than is None else store.nbytes()
    evicted = store.evict(limit, before=0 if older_than is None else time.time() - older_than)
    unfinished = store.clear_temporary()
    store.forget_sources()
    remaining = list(store.entries())
    nbytes = sum(entry.nbytes for entry in remaining)
    return PruneResult(len(evicted), sum(entry.nbytes for entry in evicted), len(remaining), nbytes, unfinished)


@checked
def verify_cache(
    folder: str | Path, *, threads: int | None = None, progress: ProgressCallback | None = None
) -> VerifyResult:
    """Read all entries of a cache and remove damaged ones. Raises ResourceError if ``folder`` is not a cache.

    ``progress`` is called with the bytes of the entries read so far.
    """
    store = open_store(locate(folder), make=False)
    entries = list(store.entries())
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        reasons = []
        n_read, total = 0, sum(entry.nbytes for entry in entries)
        for entry, reason in zip(entries, pool.map(find_damage, (entry.path for entry in entries)), strict=True):
            reasons.append(reason)
            n_read += entry.nbytes
            if progress is not None:
                progress(Progress(n_read, total, entry.path.name))
    damaged = [(entry, reason) for entry, reason in zip(entries, reasons, strict=True) if reason]
    store.clear_temporary()
    return VerifyResult(
        len(entries),
        sum(entry.nbytes for entry in entries),
        tuple((str(entry.path), reason) for entry, reason in damaged),
        sum(_remove_damaged(store, damaged)),
    )


def _remove_damaged(store: Store, damaged: list[tuple[StoredEntry, str]]) -> Iterator[bool]:
    """Remove entries; yield whether each is still there."""
    for entry, _ in damaged:
        with suppress(OSError):
            store.remove(entry.path)
        yield entry.path.exists()


def find_damage(path: Path) -> str:
    """Read a whole entry; return a description of its damage, or an empty string."""
    buffers = Buffers()
    try:
        with Entry(path) as entry:
            pieces, records = entry.header.pieces, entry.records()
            if records["source"][0].tobytes().hex()[:16] not in path.name:
                return "its name belongs to another entry"
            for matrix in range(pieces.matrices):
                for row in range(0, pieces.rows, pieces.piece):
                    rows = min(pieces.piece, pieces.rows - row)
                    data = buffers.get("rows", rows * pieces.row_bytes)
                    entry.read(data, pieces.row_offset(matrix, row))
                    if not are_intact(records[pieces.span(matrix, row, rows)], [data]):
                        return f"row {row}{f' of matrix {matrix}' if pieces.matrices > 1 else ''} is damaged"
            if not np.isfinite(records["sums"]).all():
                return "it has error sums that are not finite"
    except FileNotFoundError:  # evicted meanwhile
        return ""
    except OSError as e:
        return f"it cannot be read: {e.strerror or e}"
    except DamagedEntry as e:
        return str(e)
    return ""
