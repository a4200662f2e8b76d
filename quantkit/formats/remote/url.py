"""A URL as a path: its names, the facts of its object, and the folder that lists it."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Generator
from functools import cached_property
from pathlib import Path, PosixPath
from typing import IO, Any

from quantkit.errors import FormatError, ResourceError
from quantkit.formats.remote.common import Facts, Store
from quantkit.formats.remote.reader import fetch
from quantkit.formats.remote.s3 import VERSION
from quantkit.formats.remote.stores import store_of

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
_WEB, _LOCAL = ("http", "https"), ("file", "local")
#: Other names of a scheme.
_SCHEME_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs", "ssh": "sftp"}
#: Object stores, where a name is any text; elsewhere names are paths, in which ``..`` is the parent.
_OBJECTS = ("s3", "gs", "abfs", "hf", *_WEB)


def locate(place: str | os.PathLike[str], spool: Path | None = None) -> Path:
    """Return the path for a user's text: a URL, or a local file, also as ``file://``.

    All inputs and outputs of all commands go through this function, so that different spellings are the same place.
    ``spool``: see ``URL``. Raises ResourceError for an address with a user and a password, if its store does not use
    them.
    """
    if isinstance(place, URL):
        return place if spool is None else URL(place.address, spool)
    if isinstance(place, Path):
        return place
    match = _ADDRESS.fullmatch(os.fspath(place))
    if match is None:
        return Path(place)
    scheme, location = match[1].lower(), match[2]
    if scheme in _LOCAL:
        return Path(location.removeprefix("localhost") if location.startswith("localhost/") else location)
    if not location.strip("/"):
        return Path(place)
    return URL(_normalize(_SCHEME_ALIASES.get(scheme, scheme), location), spool)


def _normalize(scheme: str, location: str) -> str:
    """Return the canonical address of a URL. Raises ResourceError for one with a password."""
    if scheme in _OBJECTS:
        location = location.lstrip("/")
    host, slash, path = location.partition("/")
    user, _, server = host.rpartition("@")
    port = host.rpartition(":")[2] if ":" in host else ""
    has_secret = not user and port and not port.isdecimal() and not host.startswith("arn:") and "@" in path
    if has_secret or (":" in user or user and scheme in ("s3", "gs")) and scheme not in _WEB:
        raise ResourceError(
            f"{scheme}://..: this address contains a user and a password, which would appear in outputs and messages: "
            "pass them as the store expects (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or ~/.aws)",
            "QK-E412",
        )
    if scheme in _WEB:
        host = f"{user}@{server.lower()}" if user else server.lower()
    return f"{scheme}://{host}{slash}{path}"


class URL(PosixPath):
    """A place in a store. As text it has no user, password or query; two are equal if their addresses are.

    ``identity`` is one for all addresses of an object.

    ``spool``: the folder of the local copy of an output, with its journal. ``facts`` stay as they were first seen, also
    in another process that gets the URL.
    """

    address: str
    spool: Path | None
    folder: URL | None

    def __new__(cls, address: str, *arguments: Any) -> URL:
        """Construct a URL without parsing it as a local path."""
        return object.__new__(cls)

    def __init__(self, address: str, spool: Path | None = None, folder: URL | None = None) -> None:
        self.address = address
        self.spool = spool
        self.folder = folder

    def __reduce__(self) -> Any:
        return _restore_url, (self.address, self.spool, self.__dict__.get("facts"))

    # ---------------------------------------------------------------- names

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0].lower()

    def _split(self) -> tuple[str, str]:
        """Return the address up to its query, and the query with its question mark."""
        query_start = self.address.find("?") if self.scheme in _WEB else -1
        return (self.address, "") if query_start < 0 else (self.address[:query_start], self.address[query_start:])

    @cached_property
    def _text(self) -> str:
        base, query = self._split()
        if not query and VERSION not in base:
            base, query, _ = base.partition("?")
        scheme, _, location = base.partition("://")
        host, slash, path = location.partition("/")
        return f"{scheme}://{host.rpartition('@')[2] if scheme in _WEB else host}{slash}{path}" + (query and "?..")

    @property
    def identity(self) -> str:
        """The address without parts that do not select the object: a version, trailing slashes."""
        web = self.scheme in _WEB
        base = self._text.removesuffix("?..") if web else self.address.partition(VERSION)[0]
        scheme, _, location = base.partition("://")
        return f"{scheme}://{location.rstrip('/') if scheme in _OBJECTS else posixpath.normpath(location)}"

    def __str__(self) -> str:
        return self._text

    def __fspath__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"URL({self._text!r})"

    def __hash__(self) -> int:
        return hash(self.address)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, URL) and self.address == value.address

    def __lt__(self, value: Any) -> bool:
        return str(self) < str(value)

    @property
    def name(self) -> str:
        return self._split()[0].rstrip("/").partition("://")[2].rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def parent(self) -> URL:
        return URL(self._split()[0].rstrip("/").rpartition("/")[0], self.spool)

    def with_name(self, name: str) -> URL:
        """Return a neighbour with the same query; a signed address has none, since its query is for one object."""
        base, query = self._split()
        return URL(f"{base.rstrip('/').rpartition('/')[0]}/{name}{query}", self.spool, self.folder)

    def __truediv__(self, name: str | os.PathLike[str]) -> URL:
        base, query = self._split()
        return URL(f"{base.rstrip('/')}/{os.fspath(name)}{query}", self.spool, self)

    def joinpath(self, *names: str | os.PathLike[str]) -> URL:
        url = self
        for name in names:
            url = url / name
        return url

    def absolute(self) -> URL:
        return self

    def resolve(self, strict: bool = False) -> URL:
        return self

    @property
    def local(self) -> Path:
        """The local file that replaces it while being written, and the prefix of its temporary files."""
        digest = hashlib.sha256(self.identity.encode()).hexdigest()
        return (self.spool or default_spool()) / f"{digest[:16]}-{self.identity.rpartition('/')[2][-100:]}"

    # ---------------------------------------------------------------- queries

    @property
    def store(self) -> Store:
        return store_of(self)

    @cached_property
    def facts(self) -> Facts:
        """Its size and identity, pinned. Raises OSError."""
        listing = self.folder.listing if self.folder is not None and "listing" in self.folder.__dict__ else None
        facts = listing.get(self.name) if listing is not None else None
        return facts or self.store.facts(self)

    @cached_property
    def listing(self) -> dict[str, Facts | None] | None:
        """The objects in it, and None for each folder; None if its store cannot list. Raises OSError."""
        return self.store.entries(self)

    def _folder_facts(self) -> tuple[bool, Facts | None]:
        """Return whether the folder can be listed, and its facts about this object."""
        if self.folder is None or self.folder.listing is None:
            return False, None
        return True, self.folder.listing.get(self.name)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        try:
            is_listed, facts = self._folder_facts()
            return facts is not None if is_listed else bool(self.facts)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        if self.address.endswith("/"):
            return True
        try:
            return bool(self.listing)
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        facts = self.facts
        number = int(hashlib.sha256(facts.tag.encode()).hexdigest()[:12], 16)
        return os.stat_result(
            (stat.S_IFREG | 0o444, number, 0, 1, 0, 0, facts.size, 0, 0, 0, 0.0, 0.0, 0.0, 0, number, 0)
        )

    def glob(self, pattern: str, **options: Any) -> Generator[Path, None, None]:  # type: ignore[override]
        """Yield the objects in it whose names match; none if its store cannot list."""
        from fnmatch import fnmatchcase

        try:
            names = list(self.listing or ())
        except FileNotFoundError:
            names = []
        yield from (self / name for name in names if fnmatchcase(name, pattern))

    def iterdir(self) -> Generator[Path, None, None]:  # type: ignore[override]
        return self.glob("*")

    def check(self) -> None:
        """Raise FormatError if the object has changed since it was pinned. Also raises OSError."""
        if "facts" in self.__dict__ and self.store.facts(self)[:2] != self.facts[:2]:
            raise FormatError(f"{self}: the object was replaced while it was being read; start over", "QK-E109")

    # ---------------------------------------------------------------- its bytes

    def read_range(self, begin: int, end: int) -> bytes:
        """Read a range by one request, retried if it fails. Raises FormatError, OSError."""
        return self.store.read(self, begin, end)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            data: bytes = file.read()
            return data

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:  # type: ignore[override]
        """Open a copy of the whole object, a local file without a name."""
        if set(mode) - set("rbt"):
            raise io.UnsupportedOperation(f"{self}: read-only")
        file: IO[Any] = tempfile.TemporaryFile()  # noqa: SIM115 - returned
        try:
            fetch(self, file)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return file if "b" in mode else io.TextIOWrapper(file, encoding=kwargs.get("encoding") or "utf-8")


def _restore_url(address: str, spool: Path | None, facts: Facts | None) -> URL:
    url = URL(address, spool)
    if facts is not None:
        url.__dict__["facts"] = facts
    return url


def default_spool() -> Path:
    """Return the default spool of outputs for stores: a folder of the cache."""
    configured = os.environ.get("QUANTKIT_CACHE")
    base = (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkit"
    )
    return base / "spool"
