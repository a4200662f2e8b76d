"""What stores have in common: what is known of objects, what a store can do, and requests on fsspec's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quantkit.formats.remote import retry
from quantkit.formats.remote.retry import Broken


class Facts(NamedTuple):
    """What is known of an object: ``tag`` tells it from others, ``digest`` ("md5:..", "sha256:..") is of all bytes."""

    size: int
    tag: str
    digest: str = ""


class Object(Protocol):
    """An object by its URL, with what it was when it was first looked at."""

    address: str

    @property
    def scheme(self) -> str: ...

    @property
    def facts(self) -> Facts: ...

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes of it. Raises FormatError, OSError."""


class Store(Protocol):
    """What answers for URLs. All methods may be called from any thread."""

    def facts(self, url: Object) -> Facts:
        """Return what is known of an object now. Raises FileNotFoundError, PermissionError, other OSErrors."""

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        """Return the objects in a folder, None for each folder; None if that cannot be told. Raises OSError."""

    def read(self, url: Object, begin: int, end: int) -> bytes:
        """Return bytes of the object that was pinned. Raises FormatError if it is another one now, OSError."""

    def check_writable(self, url: Object) -> None:
        """Raise ResourceError if nothing can be written there, as far as that can be told."""

    def put(self, url: Object, file: Path) -> None:
        """Write a whole file, under another name until all of it is there. Raises OSError."""


def pinned_length(data: bytes, begin: int, end: int) -> bytes:
    """Return what a request gave if it is as long as it must be."""
    if len(data) != end - begin:
        raise Broken(f"{len(data)} bytes came instead of {end - begin}")
    return data


def together(loop: Any, work: Callable[[], Any]) -> Any:
    """Run a coroutine on fsspec's loop from any thread, and for ``REQUEST`` seconds at most."""
    import asyncio

    from fsspec.asyn import sync

    async def bounded() -> Any:
        return await asyncio.wait_for(work(), retry.REQUEST)

    return sync(loop, bounded)


def entries_of(found: list[dict[str, Any]], facts: Callable[[Mapping[str, Any]], Facts]) -> dict[str, Facts | None]:
    """Return a listing of fsspec by the last part of each name."""
    return {
        str(info["name"]).rstrip("/").rpartition("/")[2]: None if info.get("type") == "directory" else facts(info)
        for info in found
    }
