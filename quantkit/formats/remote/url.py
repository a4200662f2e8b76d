"""A URL as a path: its names, what is known of the object there, and the folder it was found in."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tempfile
from collections.abc import Generator, Iterable
from functools import cached_property
from pathlib import Path, PosixPath
from typing import IO, Any

from quantkit.errors import FormatError
from quantkit.formats.remote.common import Facts, Store
from quantkit.formats.remote.reader import fetch
from quantkit.formats.remote.stores import store_of

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(?!/*$)", re.IGNORECASE)
_WEB = ("http", "https")


def located(place: str | os.PathLike[str], spool: Path | None = None) -> Path:
    """Return what a user wrote as a path: a URL, or a file of this machine. ``spool``: see ``URL``."""
    if isinstance(place, URL):
        return place if spool is None else URL(place.address, spool)
    text = os.fspath(place)
    return URL(text, spool) if _ADDRESS.match(text) else Path(place)


class URL(PosixPath):
    """A place in a store. As text it has no user, password or query; two are equal if their addresses are.

    ``spool``: the folder where an output for it grows, with its journal. ``facts`` stay as they were first seen, also
    in another process that gets the URL.
    """

    address: str
    spool: Path | None
    folder: URL | None

    def __new__(cls, address: str, *more: Any) -> URL:
        """Make one without taking it apart as a path of this machine."""
        return object.__new__(cls)

    def __init__(self, address: str, spool: Path | None = None, folder: URL | None = None) -> None:
        self.address, self.spool, self.folder = address, spool, folder

    def __reduce__(self) -> Any:
        return _again, (self.address, self.spool, self.__dict__.get("facts"))

    # ---------------------------------------------------------------- names

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0].lower()

    def _split(self) -> tuple[str, str]:
        """Return the address up to its query, and the query with its question mark."""
        at = self.address.find("?") if self.scheme in _WEB else -1
        return (self.address, "") if at < 0 else (self.address[:at], self.address[at:])

    @cached_property
    def _shown(self) -> str:
        base, query = self._split()
        scheme, _, rest = base.partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2] if scheme.lower() in _WEB else host}{slash}{path}" + (
            query and "?.."
        )

    def __str__(self) -> str:
        return self._shown

    def __fspath__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"URL({self._shown!r})"

    def __hash__(self) -> int:
        return hash(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, URL) and self.address == other.address

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)

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
        """Return its neighbour, by the same query: that of a signed address is for one object only."""
        base, query = self._split()
        return URL(f"{base.rstrip('/').rpartition('/')[0]}/{name}{query}", self.spool, self.folder)

    def __truediv__(self, name: str | os.PathLike[str]) -> URL:
        base, query = self._split()
        return URL(f"{base.rstrip('/')}/{os.fspath(name)}{query}", self.spool, self)

    def joinpath(self, *names: str | os.PathLike[str]) -> URL:
        found = self
        for name in names:
            found = found / name
        return found

    def absolute(self) -> URL:
        return self

    def resolve(self, strict: bool = False) -> URL:
        return self

    @property
    def local(self) -> Path:
        """The file of this machine that stands for it while it is written: its name begins those of all files of it."""
        digest = hashlib.sha256(self.address.encode()).hexdigest()
        return (self.spool or default_spool()) / f"{digest[:16]}-{self.name[-100:]}"

    # ---------------------------------------------------------------- what is there

    @property
    def store(self) -> Store:
        return store_of(self)

    @cached_property
    def facts(self) -> Facts:
        """Its size and identity, pinned. Raises OSError."""
        listed = self.folder.listing if self.folder is not None and "listing" in self.folder.__dict__ else None
        found = listed.get(self.name) if listed is not None else None
        return found or self.store.facts(self)

    @cached_property
    def listing(self) -> dict[str, Facts | None] | None:
        """The objects in it, and None for each folder; None if its store cannot list. Raises OSError."""
        return self.store.entries(self)

    def _listed(self) -> tuple[bool, Facts | None]:
        """Return whether its folder is known, and what it says of this."""
        if self.folder is None or self.folder.listing is None:
            return False, None
        return True, self.folder.listing.get(self.name)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        known, found = self._listed()
        if known or "facts" in self.__dict__:
            return not known or found is not None
        try:
            return bool(self.facts)
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

    def glob(self, pattern: str, **more: Any) -> Generator[Path, None, None]:  # type: ignore[override]
        """Yield the files in it whose names match; none if its store cannot list."""
        from fnmatch import fnmatchcase

        try:
            names = list(self.listing or ())
        except FileNotFoundError:
            names = []
        yield from (self / name for name in names if fnmatchcase(name, pattern))

    def iterdir(self) -> Generator[Path, None, None]:  # type: ignore[override]
        return self.glob("*")

    # ---------------------------------------------------------------- its bytes

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes of it by one request, repeated if need be. Raises FormatError, OSError."""
        return self.store.read(self, begin, end)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            data: bytes = file.read()
            return data

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:  # type: ignore[override]
        """Open a copy of the whole object, a file of this machine without a name."""
        if set(mode) - set("rbt"):
            raise io.UnsupportedOperation(f"{self}: only for reading")
        file: IO[Any] = tempfile.TemporaryFile()  # noqa: SIM115 - returned
        try:
            fetch(self, file)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return file if "b" in mode else io.TextIOWrapper(file, encoding=kwargs.get("encoding") or "utf-8")


def _again(address: str, spool: Path | None, facts: Facts | None) -> URL:
    url = URL(address, spool)
    if facts is not None:
        url.__dict__["facts"] = facts
    return url


def default_spool() -> Path:
    """Return where outputs for stores grow, unless told otherwise: a folder of the cache."""
    configured = os.environ.get("QUANTKIT_CACHE")
    base = (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkit"
    )
    return base / "spool"


def check_unchanged(paths: Iterable[Path]) -> None:
    """Raise FormatError if an object is not what it was when it was pinned. Raises OSError, too."""
    for url in paths:
        if isinstance(url, URL) and "facts" in url.__dict__:
            now = url.store.facts(url)
            if now[:2] != url.facts[:2]:
                raise FormatError(f"{url}: it was replaced by another object while it was read; begin anew")
