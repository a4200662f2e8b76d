"""One model out of tensors of several files: ``quantkit stitch``. No tensor is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import SPLIT_KEYS, Field, GGUFFile, TensorInfo, ValueType, open_model
from quantkit.formats.outputs import resolve_links
from quantkit.formats.ranges import U8
from quantkit.formats.remote import located
from quantkit.formats.tensor_map import MapEntry, is_map, open_entries, read_map
from quantkit.hash import file_digests
from quantkit.patterns import Pattern
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.version import __version__

_PROVENANCE = "quantkit.quantize."
_PREFIX, _RULES = "quantkit.stitch.", "quantkit.stitch.rules"


@dataclass(frozen=True, eq=False)
class StitchedSource:
    """The source of a stitched model: ``base``, and the file of each tensor that comes from another."""

    base: GGUFFile
    owners: Mapping[str, GGUFFile]

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        """The other files."""
        return tuple({id(owner): owner for owner in self.owners.values()}.values())

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.base.paths

    @property
    def inputs(self) -> tuple[Path, ...]:
        return (*self.base.inputs, *(path for part in self.parts for path in part.inputs))

    @property
    def fields(self) -> dict[str, Field]:
        return self.base.fields

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: self._owner(name).tensors[name] for name in self.base.tensors}

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return tensor

    def get(self, key: str, default: Any = None) -> Any:
        return self.base.get(key, default)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for part in self.parts:
            names = [name for name, owner in self.owners.items() if owner is part]
            digest.update("\n".join((part.fingerprint(), *names)).encode())
        return digest.hexdigest()

    def read(self, tensor: TensorInfo, out: U8, offset: int, readahead: int = 0) -> None:
        self._owner(tensor.name).read(tensor, out, offset, readahead)

    def place(self, tensor: TensorInfo) -> tuple[Path, int] | None:
        return self._owner(tensor.name).place(tensor)

    def where(self, tensor: TensorInfo) -> str:
        return self._owner(tensor.name).where(tensor)

    def _owner(self, name: str) -> GGUFFile:
        return self.owners.get(name, self.base)


@checked
def stitch(
    base: str | Path,
    output: str | Path,
    take: Mapping[str, str | Path],
    *,
    split_max_size: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Write a model with some tensors of other files, byte for byte.

    Args:
        base: the model that has metadata, order and all other tensors.
        output: the file to write.
        take: regular expressions of tensor names, and the file to take matching tensors from: a GGUF file, or a map of
            GGUF-Tool-Suite, whose shards are checked. The first match counts; a file may lack tensors that match.
        split_max_size: start a new shard before this many bytes of tensors are exceeded.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: an expression that takes no tensor.
        FormatError: a tensor of another shape, a shard with another SHA-256 than in its map, a damaged file.
        ResourceError: the output exists, or does not fit the disk.
    """
    return run_plan(plan_stitch(base, output, take, split_max_size=split_max_size), max_ram=max_ram, **run)


@checked
def plan_stitch(
    base: str | Path, output: str | Path, take: Mapping[str, str | Path], *, split_max_size: int | None = None
) -> Plan:
    """Plan a stitched model without writing anything; arguments and errors as for ``stitch``."""
    if not take:
        raise RecipeError("no tensor to take from another file: give --take REGEX=FILE", "QK-E214")
    with ExitStack() as stack:
        model = stack.enter_context(open_model(base))
        owners, notes = _owners(model, take, lambda file: stack.enter_context(file))
        source = StitchedSource(model, owners)
        tensors = [OutputTensor(t.name, t.shape, t.type, "copied", (whole_tensor(t),)) for t in source.tensors.values()]
        return plan_output(
            source,
            resolve_links(located(output)),
            _fields(source, take),
            tensors,
            title="stitch",
            notes=notes,
            split_max_size=split_max_size,
            identity=f"{__version__} stitch {source.fingerprint()}",
            reads=[path for part in source.parts for path in part.paths],
        )


def _owners(
    model: GGUFFile, take: Mapping[str, str | Path], hold: Callable[[GGUFFile], GGUFFile]
) -> tuple[dict[str, GGUFFile], list[str]]:
    """Return the file of each tensor that is taken, and a note for each expression."""
    owners: dict[str, GGUFFile] = {}
    undecided, notes = list(model.tensors), []
    for text, place in take.items():
        pattern, path = Pattern(text, "--take"), located(place)
        matches = [name for name in undecided if pattern.search(name)]
        file = hold(_open(path, matches))
        names = [name for name in matches if name in file.tensors]
        if not names:
            raise RecipeError(f"--take {text}: takes no tensor from {path}", "QK-E206")
        for name in names:
            _check_shape(model, file, name)
            owners[name] = file
        undecided = [name for name in undecided if name not in owners]
        notes.append(f"{len(names)} tensors from {path}")
    return owners, notes


def _open(path: Path, names: Sequence[str]) -> GGUFFile:
    """Open a file, or those shards of a map that have the tensors."""
    if not is_map(path):
        return open_model(path)
    entries = read_map(path)
    selected = [entries[name] for name in names if name in entries]
    if not selected:
        raise RecipeError(f"--take: {path} has none of the matching tensors", "QK-E206")
    _check_digests(path, selected)
    return open_entries(selected)


def _check_digests(path: Path, entries: Sequence[MapEntry]) -> None:
    for entry, digest in zip(entries, file_digests([entry.path for entry in entries]), strict=True):
        if digest != entry.sha256:
            raise FormatError(
                f"{entry.path}: its SHA-256 is not that of {path.name}: download the shard again", "QK-E100"
            )


def _check_shape(model: GGUFFile, file: GGUFFile, name: str) -> None:
    present, reference = model.tensors[name], file.tensors[name]
    if present.shape != reference.shape:
        raise FormatError(
            f"{file.where(reference)}: tensor {name} is {list(reference.shape)}, but that of {model.paths[0]} is "
            f"{list(present.shape)}: take it from a file of the same model",
            "QK-E106",
        )


def _fields(source: StitchedSource, take: Mapping[str, str | Path]) -> list[Field]:
    """Return the metadata: that of the base, the expressions, and how the other files were quantized."""
    fields = {key: field for key, field in source.fields.items() if key not in SPLIT_KEYS}
    rules = [f"{text}={Path(place).name}" for text, place in take.items()]
    records = {_RULES: Field.of(_RULES, rules, ValueType.ARRAY, ValueType.STRING)}
    for i, part in enumerate(source.parts):
        for key, field in part.fields.items():
            if key.startswith(_PROVENANCE):
                name = f"{_PREFIX}{i}.{key.removeprefix('quantkit.')}"
                records[name] = Field(name, field.type, field.item_type, bytes(field.raw))
    return [*(field for key, field in fields.items() if not key.startswith(_PREFIX)), *records.values()]
