"""State of a cook, ``cook.json`` in the work folder: finished steps with digests of their inputs, options and outputs.

Files are identified as in ``pipeline.content``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError, ResourceError
from quantkit.formats.outputs import atomic_write, shards_of
from quantkit.formats.own_json import read_own_json
from quantkit.pipeline.content import FileRecord, stamps_of
from quantkit.records import record
from quantkit.version import __version__

STATE = "cook.json"
_KIND, _VERSION = "quantkit.cook", 2


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of a finished step.

    ``parts``: digests of its inputs and options, by label; ``outputs``: its files; ``seconds``: its duration;
    ``facts``: its results.
    """

    parts: Mapping[str, str]
    outputs: Mapping[str, FileRecord]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    quantkit: str = __version__


@dataclass(frozen=True, slots=True)
class UnfinishedStep:
    """Record of a step that has started and not finished.

    ``outputs``: size and modification time (ns) of each output before the start; None if it did not exist.
    """

    parts: Mapping[str, str]
    outputs: Mapping[str, tuple[int, int] | None]


class State:
    """State of a work folder. Its paths are relative to the folder, so that outputs and work can be moved together.

    With ``planning``, files without a saved digest are not read: steps that depend on them always run.
    """

    def __init__(self, folder: Path, *, planning: bool = False) -> None:
        self.path = folder / STATE
        self.planning = planning
        self.steps: dict[str, StepRecord] = {}
        self.unfinished: dict[str, UnfinishedStep] = {}
        self._saved_digests: dict[str, FileRecord] = {}
        self._digests: dict[str, FileRecord] = {}
        self._read()

    def _read(self) -> None:
        if not os.path.lexists(self.path):
            return
        content = read_own_json(
            self.path, "a state file of quantkit cook; move or delete it to start over", _parse_state
        )
        self.steps = dict(content.steps)
        self.unfinished = dict(content.unfinished)
        self._saved_digests = dict(content.digests)

    def save(self) -> None:
        """Write the file atomically."""
        data = {
            "kind": _KIND,
            "version": _VERSION,
            "steps": {name: asdict(step) for name, step in self.steps.items()},
            "begun": {name: asdict(step) for name, step in self.unfinished.items()},
            "digests": {path: asdict(record) for path, record in (self._saved_digests | self._digests).items()},
        }
        with atomic_write(self.path) as part:
            part.write_text(json.dumps(data, indent=1) + "\n")

    # ------------------------------------------------------------ files

    def digest(self, path: Path) -> str:
        """Return the digest of a file, of all shards of a model, or of the files of a folder. Raises OSError."""
        if path.is_dir():
            return self._folder_digest(path)
        name, shards = self._relative(path), _existing_shards(path)
        saved = self._digests.get(name) or self._saved_digests.get(name)
        if saved is None and self.planning:
            return f"not read: {stamps_of(shards)}"
        self._digests[name] = FileRecord.read(shards, [saved])
        return self._digests[name].digest

    def _folder_digest(self, folder: Path) -> str:
        """Return a digest of the names and contents of a folder's files.

        For a checkpoint, only files beside config.json count, without GGUF files, which may be outputs.
        """
        digest = hashlib.sha256()
        flat = (folder / "config.json").is_file()
        for root, folders, files in os.walk(folder):
            folders[:] = [] if flat else sorted(f for f in folders if not f.startswith("."))
            for name in sorted(f for f in files if not f.startswith(".") and not (flat and f.endswith(".gguf"))):
                path = Path(root, name)
                content = self.digest(path) if stat.S_ISREG(os.stat(path).st_mode) else ""
                digest.update(f"{path.relative_to(folder)}\0{content}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def record(self, paths: Iterable[Path]) -> dict[str, FileRecord]:
        """Return the current records of files, by relative path."""
        records = {}
        for path in paths:
            self.digest(path)
            records[self._relative(path)] = self._digests[self._relative(path)]
        return records

    def is_unchanged(self, path: Path) -> bool:
        """Return whether a file exists with the content that a finished step wrote."""
        name = self._relative(path)
        record = next((s.outputs[name] for s in self.steps.values() if name in s.outputs), None)
        if record is None:
            return False
        try:
            return self.digest(path) == record.digest
        except (OSError, QuantkitError):
            return False

    def may_replace(self, path: Path) -> bool:
        """Return whether a file may be replaced: a step wrote it, or was interrupted while writing it."""
        return any(self._relative(path) in b.outputs for b in self.unfinished.values()) or self.is_unchanged(path)

    def _relative(self, path: Path) -> str:
        return os.path.relpath(os.path.abspath(path), os.path.abspath(self.path.parent))

    # ------------------------------------------------------------ steps

    def begin(self, name: str, parts: Mapping[str, str], outputs: Iterable[Path]) -> None:
        """Record the start of a step, before it writes. Raises ResourceError for a file written by another program."""
        outputs = list(outputs)
        for path in outputs:
            if os.path.lexists(path) and not self.may_replace(path):
                raise ResourceError(
                    f"{path} exists, but was not written by quantkit cook, or has changed since: move it, or choose "
                    f"another folder",
                    "QK-E402",
                )
        if not self.can_resume(name, parts):
            self.unfinished[name] = UnfinishedStep(
                dict(parts), {self._relative(path): _stamp(path) for path in outputs}
            )
        self.steps.pop(name, None)
        self.save()

    def can_resume(self, name: str, parts: Mapping[str, str]) -> bool:
        """Return whether a step with the same parts was interrupted."""
        step = self.unfinished.get(name)
        return step is not None and name not in self.steps and dict(step.parts) == dict(parts)

    def has_new_outputs(self, name: str, outputs: Iterable[Path]) -> bool:
        """Return whether all outputs of an unfinished step exist and differ from those before its start."""
        before = self.unfinished[name].outputs
        return all(_stamp(path) not in (None, before.get(self._relative(path))) for path in outputs)

    def finish(
        self, name: str, parts: Mapping[str, str], outputs: Iterable[Path], seconds: float, facts: Mapping[str, Any]
    ) -> None:
        """Record the end of a step with complete outputs."""
        self.steps[name] = StepRecord(dict(parts), self.record(outputs), seconds, dict(facts))
        self.unfinished.pop(name, None)
        self.save()


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the state file."""

    steps: Mapping[str, StepRecord]
    unfinished: Mapping[str, UnfinishedStep]
    digests: Mapping[str, FileRecord]


def _parse_state(data: Any) -> _Content:
    if data.pop("kind") != _KIND or data.pop("version") != _VERSION:
        raise ValueError(f"not a state file of version {_VERSION}")
    data["unfinished"] = data.pop("begun")
    content: _Content = record(_Content, data)
    return content


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _existing_shards(path: Path) -> list[Path]:
    """Return all existing shards of a model, given one of them; only the path itself if it is not a shard."""
    return [shard for shard in sorted(set(shards_of(path))) if shard.exists()] or [path]


def value_digest(value: object) -> str:
    """Return a digest of a JSON value; other values, such as paths, are converted to text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
