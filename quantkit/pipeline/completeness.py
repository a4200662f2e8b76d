"""Detection of finished outputs of a plan, which ``--resume`` reports.

An output is the plan's if every file has its size and exactly its header, except the numbers of exact weights, which a
run counts (exactness.py): metadata, tensors, types and offsets. With
provenance the header holds recipe, source fingerprint and digests of importance matrices, which identify the work;
without it (``identifies_source``) a file of another source may have the same header.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.formats.remote import URL
from quantkit.pipeline.exactness import without_counts
from quantkit.pipeline.plan import Plan

_FINGERPRINT = ".source.fingerprint"


def is_complete(plan: Plan) -> bool:
    """Return whether all files of a plan's output exist and begin with its headers. Raises OSError."""
    return all(_is_whole(plan, number) for number in range(len(plan.shards)))


def identifies_source(plan: Plan) -> bool:
    """Return whether the header of a plan's output identifies its source."""
    return any(field.key.endswith(_FINGERPRINT) for field in plan.fields)


def _is_whole(plan: Plan, number: int) -> bool:
    shard = plan.shards[number]
    path, header = shard.path, shard.layout.header
    if not path.is_file() or path.stat().st_size != shard.layout.nbytes:
        return False
    head = _head(path, len(header))
    return (head if number else without_counts(plan, head)) == header


def _head(path: Path, n: int) -> bytes:
    if isinstance(path, URL):
        return path.read_range(0, n)
    with open(path, "rb") as file:
        return file.read(n)
