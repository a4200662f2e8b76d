"""What was cooked already: a small file in the work folder, of the steps that are done and the files they made.

A step is remembered by the digests of everything that decides its outputs. Files are told by size and time of change;
where those changed, by their content. Of models that is both ends of every tensor: as for importance matrices and
the cache of encoded tensors, that is enough to tell trained models apart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError, ResourceError
from quantkit.formats.gguf import open_model, parse_split_path
from quantkit.formats.outputs import written
from quantkit.version import __version__

STATE = "cook.json"
_KIND, _VERSION = "quantkit.cook", 1
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was when it was made: its size, time of change and digest."""

    nbytes: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that is done: what decided it, digest by name, what it made, how long it took, and what it found."""

    parts: Mapping[str, str]
    outputs: Mapping[str, FileRecord]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    quantkit: str = __version__


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that was begun: what decides it, and its outputs, each with size and time of change before, if any."""

    parts: Mapping[str, str]
    outputs: Mapping[str, tuple[int, int] | None]


class State:
    """The state of a work folder. Paths in it are relative to the folder, so that both can be moved together."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATE
        self.steps: dict[str, StepRecord] = {}
        self.begun: dict[str, Begun] = {}
        self._digests: dict[str, FileRecord] = {}
        self._known: dict[str, FileRecord] = {}
        self._read()

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_bytes())
            if data["kind"] != _KIND or data["version"] != _VERSION:
                raise ValueError(data["version"])
            for name, step in data["steps"].items():
                outputs = {path: FileRecord(**each) for path, each in step["outputs"].items()}
                self.steps[name] = StepRecord(**{**step, "outputs": outputs})
            for name, step in data["begun"].items():
                before = {path: None if found is None else tuple(found) for path, found in step["outputs"].items()}
                self.begun[name] = Begun(dict(step["parts"]), before)
            self._digests = {path: FileRecord(**each) for path, each in data["digests"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
            raise QuantkitError(
                f"{self.path}: not a state of quantkit cook ({e!r}); move it away to begin anew, and the files it made"
            ) from None

    def save(self) -> None:
        """Write the file, whole or not at all."""
        data = {
            "kind": _KIND,
            "version": _VERSION,
            "steps": {name: asdict(step) for name, step in self.steps.items()},
            "begun": {name: asdict(step) for name, step in self.begun.items()},
            "digests": {path: asdict(each) for path, each in (self._digests | self._known).items()},
        }
        with written(self.path) as part:
            part.write_text(json.dumps(data, indent=1) + "\n")

    # ------------------------------------------------------------ files

    def digest(self, path: Path) -> str:
        """Return the digest of a file's content, or of a folder's files. Raises OSError, QuantkitError."""
        name = self._name(path)
        if path.is_dir():
            return _folder_digest(path)
        found = os.stat(path)
        known = self._known.get(name) or self._digests.get(name)
        if (
            known is None
            or parse_split_path(path)
            or (known.nbytes, known.mtime_ns) != (found.st_size, found.st_mtime_ns)
        ):
            known = FileRecord(found.st_size, found.st_mtime_ns, content_digest(path))
        self._known[name] = known
        return known.digest

    def record(self, paths: Iterable[Path]) -> dict[str, FileRecord]:
        """Return what files are now, by name."""
        made = {}
        for path in paths:
            self.digest(path)
            made[self._name(path)] = self._known[self._name(path)]
        return made

    def is_as_made(self, path: Path) -> bool:
        """Tell whether a file is there and is what a step that is on record made."""
        name = self._name(path)
        record = next((s.outputs[name] for s in self.steps.values() if name in s.outputs), None)
        if record is None:
            return False
        try:
            return os.stat(path).st_size == record.nbytes and self.digest(path) == record.digest
        except (OSError, QuantkitError):
            return False

    def is_ours(self, path: Path) -> bool:
        """Tell whether a file may be replaced: a step made it, or was making it when it was killed."""
        return any(self._name(path) in b.outputs for b in self.begun.values()) or self.is_as_made(path)

    def _name(self, path: Path) -> str:
        return os.path.relpath(os.path.abspath(path), os.path.abspath(self.path.parent))

    # ------------------------------------------------------------ steps

    def begin(self, name: str, parts: Mapping[str, str], outputs: Iterable[Path]) -> None:
        """Note that a step begins, before it makes anything. Raises ResourceError if a file is somebody else's."""
        outputs = list(outputs)
        for path in outputs:
            if os.path.lexists(path) and not self.is_ours(path):
                raise ResourceError(
                    f"{path} is there, and quantkit cook did not make it, or it was changed since: move it away, or "
                    "cook to another folder"
                )
        if not self.goes_on(name, parts):
            self.begun[name] = Begun(dict(parts), {self._name(path): _stat(path) for path in outputs})
        self.steps.pop(name, None)
        self.save()

    def goes_on(self, name: str, parts: Mapping[str, str]) -> bool:
        """Tell whether a step was begun before, with the same parts, and was not finished."""
        begun = self.begun.get(name)
        return begun is not None and name not in self.steps and dict(begun.parts) == dict(parts)

    def has_made(self, name: str, outputs: Iterable[Path]) -> bool:
        """Tell whether the outputs of a step that was begun are there, and are none that were there before."""
        before = self.begun[name].outputs
        return all(_stat(path) not in (None, before.get(self._name(path))) for path in outputs)

    def finish(
        self, name: str, parts: Mapping[str, str], outputs: Iterable[Path], seconds: float, facts: Mapping[str, Any]
    ) -> None:
        """Note that a step is done and its outputs are whole."""
        self.steps[name] = StepRecord(dict(parts), self.record(outputs), seconds, dict(facts))
        self.begun.pop(name, None)
        self.save()


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def content_digest(path: Path) -> str:
    """Return a digest of a file: of models the fingerprint, of others the SHA-256. Raises OSError, QuantkitError."""
    if path.suffix == ".gguf" and not _is_small(path):
        with open_model(path) as source:
            return source.fingerprint()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _is_small(path: Path) -> bool:
    return os.stat(path).st_size <= 1 << 24


def _folder_digest(folder: Path) -> str:
    """Return a digest of the files of a folder: names, sizes and times of change.

    Of a checkpoint only those beside config.json count, and no GGUF: what is cooked may lie in it.
    """
    digest = hashlib.sha256()
    flat = (folder / "config.json").is_file()
    for root, folders, files in os.walk(folder):
        folders[:] = [] if flat else sorted(f for f in folders if not f.startswith("."))
        for name in sorted(f for f in files if not f.startswith(".") and not (flat and f.endswith(".gguf"))):
            found = os.stat(os.path.join(root, name))
            where = os.path.relpath(os.path.join(root, name), folder)
            digest.update(f"{where}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def value_digest(value: object) -> str:
    """Return a digest of a value of JSON; paths and the like count as their text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
