"""Stores: one for each scheme of URLs. fsspec and its file systems are imported on first use."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError
from quantkit.extras import STORE_PACKAGES
from quantkit.formats.remote import retry
from quantkit.formats.remote.common import Facts, Object, Store, entries_of, pinned_length, run_on_loop
from quantkit.formats.remote.retry import Answer, BrokenAnswer, FailureKind, with_retries
from quantkit.formats.remote.s3 import S3

_stores: dict[tuple[int, str], Store] = {}
_lock = threading.Lock()


def store_of(url: Object) -> Store:
    """Return the store of a URL. Raises ResourceError if its package is missing or its scheme unknown."""
    key = os.getpid(), url.scheme  # connections do not survive a fork
    with _lock:
        if key not in _stores:
            _stores[key] = _connect(url)
        return _stores[key]


def _connect(url: Object) -> Store:
    scheme = url.scheme
    try:
        import fsspec
    except ImportError:
        raise _missing_package(url, "fsspec") from None
    module, package = STORE_PACKAGES.get(scheme, ("", ""))
    try:
        if module:
            importlib.import_module(module)
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise _missing_package(url, package) from None
    except ValueError:
        raise ResourceError(
            f"{url}: unsupported scheme {scheme}://; use s3://, gs://, hf:// or https://", "QK-E412"
        ) from None
    if scheme == "s3":
        return S3(kind, fsspec.config.conf.get("s3", {}))
    if scheme in ("http", "https"):
        return Web(kind(skip_instance_cache=True))
    try:
        return FsspecStore(kind(skip_instance_cache=True), scheme)
    except Exception as e:
        raise ResourceError(f"{url}: cannot connect to {scheme}://: {retry.judge(e).reason}", "QK-E412") from None


def _missing_package(url: Object, package: str) -> ResourceError:
    extra = "" if package in ("", "fsspec", "aiohttp") else f" {package}"
    packages = f"the package {package or 'fsspec'} is" if package != "fsspec" else "the package fsspec is"
    return ResourceError(
        f"{url}: {packages} needed for {url.scheme}://: pip install 'gguf-quantkit[remote]'{extra}", "QK-E410"
    )


# ---------------------------------------------------------------- the web


class Web:
    """http:// and https://: ranges and entity tags; no folders, read-only."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def facts(self, url: Object) -> Facts:
        # Signed addresses are signed only for GET, so the first byte is requested.
        return with_retries(url, lambda: self._ask(url, 0, 1, None)[0], retry.FIRST_LOOK)

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        return None

    def read(self, url: Object, begin: int, end: int) -> bytes:
        facts = url.facts
        return with_retries(url, lambda: pinned_length(self._ask(url, begin, end, facts)[1], begin, end))

    def _ask(self, url: Object, begin: int, end: int, pinned: Facts | None) -> tuple[Facts, bytes]:
        answer: tuple[Facts, bytes] = run_on_loop(self.fs.loop, lambda: self._get(url, begin, end, pinned))
        return answer

    async def _get(self, url: Object, begin: int, end: int, pinned: Facts | None) -> tuple[Facts, bytes]:
        import aiohttp

        session = await self.fs.set_session()
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=retry.SILENCE, sock_read=retry.SILENCE)
        async with session.get(url.address, headers=headers, timeout=limit) as answer:
            if answer.status == 416 and pinned is None:
                raise Answer(416, "it is empty", kind=FailureKind.UNKNOWN)
            if answer.status not in (200, 206):
                raise Answer(answer.status, wait=answer.headers.get("Retry-After"))
            facts, is_whole = _parse_headers(answer.status, answer.headers)
            if not is_whole and facts.size < 0:
                raise BrokenAnswer("an answer without Content-Range")
            if pinned is not None and facts[:2] != pinned[:2]:
                raise Answer(412, "another entity tag, date or length", kind=FailureKind.CHANGED)
            if is_whole and facts.size > end - begin:
                raise Answer(200, "its server does not support range requests", kind=FailureKind.UNKNOWN)
            return facts, await answer.read()

    def check_writable(self, url: Object) -> None:
        raise ResourceError(f"{url}: {url.scheme}:// is read-only; write to s3://, or to a file", "QK-E412")

    def upload_file(self, url: Object, file: Path) -> None:
        self.check_writable(url)


def _parse_headers(status: int, headers: Mapping[str, str]) -> tuple[Facts, bool]:
    """Return the facts about the whole object in a response, and whether the response contains all of it."""
    tag = headers.get("ETag", "").removeprefix("W/") or headers.get("Last-Modified", "")
    if status == 200:
        return Facts(int(headers.get("Content-Length", 1 << 62)), tag), True
    total = headers.get("Content-Range", "").rpartition("/")[2]
    return Facts(int(total) if total.isdecimal() else -1, tag), False


# ---------------------------------------------------------------- other stores


#: Attributes that identify an object's version in fsspec's file systems.
_TAGS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "checksum",
    "blob_id",
    "mtime",
    "LastModified",
    "created",
)


class FsspecStore:
    """Any other file system of fsspec, through the methods common to all."""

    def __init__(self, fs: Any, scheme: str) -> None:
        self.fs, self.scheme = fs, scheme

    def _path(self, url: Object) -> str:
        path: str = self.fs._strip_protocol(url.address)
        return path

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, with a time limit if it supports one."""
        if getattr(self.fs, "async_impl", False) and hasattr(self.fs, f"_{name}"):
            return run_on_loop(self.fs.loop, lambda: getattr(self.fs, f"_{name}")(*args, **kwargs))
        return getattr(self.fs, name)(*args, **kwargs)

    def facts(self, url: Object) -> Facts:
        def ask() -> Facts:
            self.fs.invalidate_cache()
            info = self._call("info", self._path(url))
            if info.get("type") == "directory":
                raise Answer(404, "a folder; give a file in it")
            return _info_facts(info)

        return with_retries(url, ask, retry.FIRST_LOOK)

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        def ask() -> dict[str, Facts | None]:
            self.fs.invalidate_cache()
            path = self._path(url)
            listing = self._call("ls", path, detail=True)
            # A name that is both a file and a directory counts as a directory.
            return entries_of(
                [info for info in listing if str(info["name"]).rstrip("/") != path.rstrip("/")], _info_facts
            )

        return with_retries(url, ask, retry.FIRST_LOOK)

    def read(self, url: Object, begin: int, end: int) -> bytes:
        end = min(end, url.facts.size)

        def ask() -> bytes:
            if getattr(self.fs, "async_impl", False):
                data = self._call("cat_file", self._path(url), start=begin, end=end)
            else:
                with self.fs.open(self._path(url), "rb", cache_type="none") as file:
                    file.seek(begin)
                    data = file.read(end - begin)
            return pinned_length(bytes(data), begin, end)

        return with_retries(url, ask)

    def check_writable(self, url: Object) -> None:
        if self.scheme == "hf":
            raise ResourceError(f"{url}: hf:// is read-only; write to a file, then run quantkit upload", "QK-E412")
        if self.scheme == "memory":
            raise ResourceError(f"{url}: memory:// is lost when this process ends; write to a file", "QK-E412")

    def upload_file(self, url: Object, file: Path) -> None:
        path = self._path(url)
        growing = f"{path}.{os.urandom(4).hex()}.part"

        def send() -> None:
            parent = self.fs._parent(path)
            with suppress(Exception):
                self.fs.makedirs(parent, exist_ok=True)
            self.fs.put_file(str(file), growing)
            if (size := self.fs.info(growing)["size"]) != file.stat().st_size:
                raise BrokenAnswer(f"received {size} bytes instead of {file.stat().st_size}")
            self.fs.mv(growing, path)

        try:
            with_retries(url, send)
        finally:
            with suppress(Exception):
                self.fs.invalidate_cache()
                if self.fs.exists(growing):
                    self.fs.rm_file(growing)


def _info_facts(info: Mapping[str, Any]) -> Facts:
    lfs = info.get("lfs")
    sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
    tag = " ".join(f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None)
    return Facts(int(info.get("size") or 0), tag, f"sha256:{sha256}" if sha256 else "")
