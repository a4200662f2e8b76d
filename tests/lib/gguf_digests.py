"""Hashes of a GGUF file and of its parts, to locate differences; parsed here, not by quantkit."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def digests(path: Path) -> Json:
    """Return the hash of a file, and of its parts, to locate differences."""
    data = path.read_bytes()
    kv, infos, start, tensors = gguf_parts(data)
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "metadata": f"{zlib.crc32(data[24:kv]):08x}",
        "infos": f"{zlib.crc32(data[kv:infos]):08x}",
        "tensors": "".join(f"{zlib.crc32(data[start + offset : start + end]):08x}" for offset, end in tensors),
    }


def gguf_parts(data: bytes) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Return the ends of metadata and infos, the start of tensor data, and every tensor's padded range in it."""
    n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
    sizes, offset = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}, 24

    def skip(offset: int, kind: int) -> int:
        if kind == 8:
            return offset + 8 + int.from_bytes(data[offset : offset + 8], "little")
        if kind != 9:
            return offset + sizes[kind]
        item, n = struct.unpack_from("<IQ", data, offset)
        offset += 12
        if item in sizes:
            return offset + sizes[item] * int(n)
        for _ in range(n):
            offset = skip(offset, item)
        return offset

    for _ in range(n_kv):
        offset = skip(offset, 8)
        offset = skip(offset + 4, struct.unpack_from("<I", data, offset)[0])
    kv, offsets = offset, []
    for _ in range(n_tensors):
        offset = skip(offset, 8)
        (n_dims,) = struct.unpack_from("<I", data, offset)
        offset += 4 + 8 * n_dims + 4
        offsets.append(struct.unpack_from("<Q", data, offset)[0])
        offset += 8
    start = offset + -offset % 32
    return kv, offset, start, list(zip(offsets, [*offsets[1:], len(data) - start], strict=True))


def differences(expected: Json, actual: Json, names: list[str]) -> str:
    """Describe the differences between two files; names: of the tensors of the actual file, in its order."""
    if expected["sha256"] == actual["sha256"]:
        return ""
    parts = [f"{key} differ" for key in ("metadata", "infos") if expected[key] != actual[key]]
    a, b = (split(x["tensors"]) for x in (expected, actual))
    if len(a) != len(b):
        parts.append(f"{len(b)} tensors, not {len(a)}")
    else:
        parts += [f"{name} differs" for name, x, y in zip(names, a, b, strict=True) if x != y]
    return "; ".join(parts) or "something between the parts differs"


def split(tensors: str) -> list[str]:
    """Return the CRC-32 of each tensor."""
    return [tensors[i : i + 8] for i in range(0, len(tensors), 8)]
