"""The interface of stores: facts about objects, the operations of a store, and requests on fsspec's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quantkit.formats.remote import retry
from quantkit.formats.remote.retry import BrokenAnswer


class Facts(NamedTuple):
    """The facts about an object: ``tag`` identifies its version, ``digest`` ("md5:..", "sha256:..") is of all bytes."""

    size: int
    tag: str
    digest: str = ""


class Object(Protocol):
    """An object at a URL, with its facts when it was first requested."""

    address: str

    @property
    def scheme(self) -> str: ...

    @property
    def facts(self) -> Facts: ...

    def read_range(self, begin: int, end: int) -> bytes:
        """Return a range of bytes. Raises FormatError, OSError."""


class Store(Protocol):
    """A store for URLs. All methods may be called from any thread."""

    def facts(self, url: Object) -> Facts:
        """Return the facts about an object now. Raises FileNotFoundError, PermissionError, other OSErrors."""

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        """Return the objects in a folder, None for each folder; None if unknown. Raises OSError."""

    def read(self, url: Object, begin: int, end: int) -> bytes:
        """Return bytes of the object that was pinned. Raises FormatError if it is another one now, OSError."""

    def check_writable(self, url: Object) -> None:
        """Raise ResourceError if the store is known to be read-only."""

    def upload_file(self, url: Object, file: Path) -> None:
        """Write a whole file, under a temporary name until it is complete. Raises OSError."""


def pinned_length(data: bytes, begin: int, end: int) -> bytes:
    """Return the bytes of an answer; raise BrokenAnswer if they are too few or too many."""
    if len(data) != end - begin:
        raise BrokenAnswer(f"received {len(data)} bytes instead of {end - begin}")
    return data


def run_on_loop(loop: Any, request: Callable[[], Any]) -> Any:
    """Run a coroutine on fsspec's loop from any thread, and for ``REQUEST`` seconds at most."""
    import asyncio

    from fsspec.asyn import sync

    async def bounded() -> Any:
        return await asyncio.wait_for(request(), retry.REQUEST)

    return sync(loop, bounded)


def entries_of(listing: list[dict[str, Any]], facts: Callable[[Mapping[str, Any]], Facts]) -> dict[str, Facts | None]:
    """Return a listing of fsspec by the last part of each name."""
    return {
        str(info["name"]).rstrip("/").rpartition("/")[2]: None if info.get("type") == "directory" else facts(info)
        for info in listing
    }
