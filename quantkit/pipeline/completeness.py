"""Detection of finished outputs of a plan, which ``--resume`` reports.

An output is the plan's if every file has its size and exactly its header: metadata, tensors, types and offsets. With
provenance the header holds recipe, source fingerprint and digests of importance matrices, which identify the work;
without it (``identifies_source``) a file of another source may have the same header.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.formats.remote import URL
from quantkit.pipeline.plan import Plan, PlannedShard

_FINGERPRINT = ".source.fingerprint"


def is_complete(plan: Plan) -> bool:
    """Return whether all files of a plan's output exist and begin with its headers. Raises OSError."""
    return all(map(_is_whole, plan.shards))


def identifies_source(plan: Plan) -> bool:
    """Return whether the header of a plan's output identifies its source."""
    return any(field.key.endswith(_FINGERPRINT) for field in plan.fields)


def _is_whole(shard: PlannedShard) -> bool:
    path, header = shard.path, shard.layout.header
    if not path.is_file() or path.stat().st_size != shard.layout.nbytes:
        return False
    return _head(path, len(header)) == header


def _head(path: Path, n: int) -> bytes:
    if isinstance(path, URL):
        return path.read_range(0, n)
    with open(path, "rb") as file:
        return file.read(n)
