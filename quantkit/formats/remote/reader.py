"""Reading ahead: blocks of 8 MiB, a few requested at a time, shared by all threads.

A job reads a MiB or two. Over a network, a request costs as much as several of those, so whole blocks are read, in
advance where possible, and each only once while it is in the cache.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from quantkit.errors import FormatError
from quantkit.formats.remote.common import Object

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Bytes of a request, maximum number of requests in flight, and bytes cached, which --max-ram does not count.
BLOCK = 8 << 20
MAX_REQUESTS = 8
CACHE_BYTES = 128 << 20
#: Minimum number of blocks requested ahead of a reader.
_PREFETCH_BLOCKS = 3
#: Maximum number of attempts to fetch an object whose checksum is wrong.
_COPIES = 3

#: Tensors below this length are read with their neighbours, in blocks of ``SMALL`` bytes.
_TINY, SMALL = 256 << 10, 1 << 20

Key = tuple[str, str, int, int]


class Blocks:
    """The most recently read blocks of all objects."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="fetch")
        self._futures: OrderedDict[Key, Future[bytes]] = OrderedDict()
        self._nbytes = 0

    def block(self, url: Object, begin: int, end: int) -> Future[bytes]:
        """Return a range of an object, requested if it is missing."""
        key = (url.address, url.facts.tag, begin, end)
        with self._lock:
            future = self._futures.get(key)
            if future is not None and future.done() and future.exception() is not None:
                del self._futures[key]
                self._nbytes -= end - begin
                future = None
            if future is None:
                future = self.pool.submit(url.read_range, begin, end)
                self._futures[key] = future
                self._nbytes += end - begin
                while self._nbytes > CACHE_BYTES and len(self._futures) > 1:
                    (_, _, low, high), _ = self._futures.popitem(last=False)
                    self._nbytes -= high - low
            self._futures.move_to_end(key)
        return future


_blocks: Blocks | None = None
_making = threading.Lock()


def blocks() -> Blocks:
    """Return the blocks of this process."""
    global _blocks
    with _making:
        if _blocks is None or _blocks.process != os.getpid():
            _blocks = Blocks()
        return _blocks


def read_into(
    url: Object, out: npt.NDArray[np.uint8], offset: int, readahead: int = 0, within: tuple[int, int] | None = None
) -> None:
    """Fill ``out`` from byte ``offset`` of an object on; the next ``readahead`` bytes are requested in the background.

    ``within``: begin and end of the tensor; tensors are not read in file order, so nothing outside is requested. Raises
    FormatError if the object ends early or was replaced, OSError if it cannot be read.
    """
    end, size = offset + out.size, url.facts.size
    if end > size:
        raise FormatError(f"{url}: ends at byte {size}, within tensor data: truncated", "QK-E103")
    if not out.size:
        return
    start, stop, step = (*within, BLOCK) if within is not None else (0, size, BLOCK)
    if stop - start < _TINY:
        start = 0
        stop = size
        step = min(SMALL, BLOCK)
    cache = blocks()

    def block(number: int) -> Future[bytes]:
        begin = start + number * step
        return cache.block(url, begin, min(begin + step, stop))

    first, last = (offset - start) // step, (end - 1 - start) // step
    futures = [block(number) for number in range(first, last + 1)]
    if readahead and step == BLOCK:
        reach = min(last + max(_PREFETCH_BLOCKS, min(-(-readahead // step), MAX_REQUESTS)), (stop - 1 - start) // step)
        for number in range(last + 1, reach + 1):
            block(number)
    for number, future in enumerate(futures, first):
        begin = start + number * step
        low, high = max(offset, begin), min(end, begin + step)
        out.data[low - offset : high - offset] = memoryview(future.result())[low - begin : high - begin]


def fetch(url: Object, file: IO[bytes]) -> None:
    """Copy a whole object into a file; its checksum is verified if the store has one for the whole object.

    Raises FormatError, OSError.
    """

    kind, _, expected = url.facts.digest.partition(":")
    for _ in range(_COPIES):
        file.seek(0)
        file.truncate()
        digest = hashlib.new(kind, usedforsecurity=False) if kind else None
        for data in _blocks_in_order(url):
            file.write(data)
            if digest is not None:
                digest.update(data)
        file.flush()
        if digest is None or digest.hexdigest() == expected:
            return
    raise FormatError(f"{url}: received damaged data: its {kind} differs from the store's", "QK-E412")


def _blocks_in_order(url: Object) -> Iterable[bytes]:
    """Yield an object in blocks, with a few requests in flight."""
    size, cache = url.facts.size, blocks()
    pool: list[Future[Any]] = []
    starts = iter(range(0, size, BLOCK))
    for begin in starts:
        pool.append(cache.pool.submit(url.read_range, begin, min(begin + BLOCK, size)))
        if len(pool) >= MAX_REQUESTS:
            yield pool.pop(0).result()
    while pool:
        yield pool.pop(0).result()


class Prefix:
    """The beginning of an object, read on demand, for headers."""

    def __init__(self, url: Object) -> None:
        self.url = url
        self.size = url.facts.size
        self.data = b""

    def read_to(self, end: int) -> bytes:
        """Read up to byte ``end``, or to the end of the object."""
        have = len(self.data)
        end = min(self.size, max(end, 4 * have, 1 << 20))
        if end > have:
            self.data += self.url.read_range(have, end)
        return self.data
