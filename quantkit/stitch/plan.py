"""The plan of a stitched model: the file of each tensor, the metadata, and the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import numpy as np

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.formats.gguf import SPLIT_KEYS, Field, GGUFFile, TensorInfo, ValueType
from quantkit.formats.outputs import resolve_links
from quantkit.formats.ranges import U8
from quantkit.formats.remote import URL, locate
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.recipe import Rule, read_recipe
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.stitch.parts import Part, open_part
from quantkit.stitch.selection import check_models, lint, select_by_pattern, select_by_recipe
from quantkit.stitch.source import StitchedSource
from quantkit.version import __version__

_PROVENANCE = "quantkit.quantize."
_PREFIX, _RULES, _RECIPE = "quantkit.stitch.", "quantkit.stitch.rules", "quantkit.stitch.recipe"
#: Tensors that are compared to recognize files of different models.
_SAMPLES = 8


@checked
def stitch(
    base: str | Path,
    output: str | Path,
    take: Mapping[str, str | Path] | None = None,
    *,
    recipe: str | Path | None = None,
    files: Sequence[str | Path] = (),
    split_max_size: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Write a model with tensors of several files, byte for byte.

    Args:
        base: the model that has metadata, order and all other tensors: a GGUF file, or a map of GGUF-Tool-Suite with
            the first shard beside it.
        output: the file to write.
        take: regular expressions of tensor names, and the file to take matching tensors from: a GGUF file, or a map,
            whose shards are checked. The first match counts; a file may lack tensors that match.
        recipe: a recipe; each tensor is taken from the first file that has it in the type of its rule, or in the type
            that replaces it where rows do not fit. ``take`` comes first. Tensors that no rule matches, and those that
            are never quantized, are the base's.
        files: further files for ``recipe``, like those of ``take``.
        split_max_size: start a new shard before this many bytes of tensors are exceeded.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: an expression that takes no tensor, or a tensor that no file has in the type of the recipe.
        FormatError: a tensor of another shape, a shard that is missing or has another SHA-256 than in its map, a
            damaged file.
        ResourceError: the output exists, or does not fit the disk.
    """
    plan = plan_stitch(base, output, take, recipe=recipe, files=files, split_max_size=split_max_size)
    return run_plan(plan, max_ram=max_ram, **run)


@checked
def plan_stitch(
    base: str | Path,
    output: str | Path,
    take: Mapping[str, str | Path] | None = None,
    *,
    recipe: str | Path | None = None,
    files: Sequence[str | Path] = (),
    split_max_size: int | None = None,
) -> Plan:
    """Plan a stitched model without writing anything; arguments and errors as for ``stitch``."""
    if not take and recipe is None:
        raise RecipeError("no tensor to take from another file: give --take REGEX=FILE, or --recipe FILE", "QK-E214")
    if files and recipe is None:
        raise RecipeError(f"{files[0]}: which tensors to take from it? Give --recipe FILE", "QK-E202")
    rules = read_recipe(locate(recipe)) if recipe is not None else []
    if files and not _exists(base) and _exists(output):
        raise ResourceError(f"{base} does not exist, and {output} does: the output comes last", "QK-E401")
    with ExitStack() as stack:
        places = dict.fromkeys(map(locate, (base, *files, *(take or {}).values())))
        parts = {place: open_part(place, stack) for place in places}
        first, *more_parts = (parts[locate(place)] for place in (base, *files))
        names = list(first.names)
        by_pattern = select_by_pattern(names, [(text, parts[locate(place)]) for text, place in (take or {}).items()])
        notes: list[str] = []
        selection = dict.fromkeys(names, first)
        if recipe is not None:
            metadata = first.open((), stack, with_metadata=True)
            check_models(metadata.get, [first, *more_parts])
            undecided = [tensor for name, tensor in first.tensors.items() if name not in by_pattern]
            selection |= select_by_recipe(undecided, metadata.get, rules, [first, *more_parts])
            notes = lint(names, rules)
        selection |= by_pattern
        source = _open(first, selection, stack)
        notes += [*_count(selection), *_differences(source, by_pattern)]
        tensors = [OutputTensor(t.name, t.shape, t.type, "copied", (whole_tensor(t),)) for t in source.tensors.values()]
        return plan_output(
            source,
            resolve_links(locate(output)),
            _fields(source, take or {}, rules),
            tensors,
            title="stitch",
            notes=notes,
            split_max_size=split_max_size,
            identity=f"{__version__} stitch {source.fingerprint()}",
            reads=[path for part in source.parts for path in part.paths],
        )


def _exists(place: str | Path) -> bool:
    path = locate(place)
    return isinstance(path, URL) or path.exists()


def _open(first: Part, selection: Mapping[str, Part], stack: ExitStack) -> StitchedSource:
    """Open the files, with those shards of maps that are needed. Raises FormatError for tensors of another shape."""
    names: dict[Part, set[str]] = {first: set()}
    for name, part in selection.items():
        names.setdefault(part, set()).add(name)
    files = {part: part.open(tensors, stack, with_metadata=part is first) for part, tensors in names.items()}
    for name, part in selection.items():
        tensor = files[part].tensors[name]
        shape = (files[first] if name in files[first].tensors else first).tensors[name].shape
        if tensor.shape != shape:
            raise FormatError(
                f"{files[part].where(tensor)}: tensor {name} is {list(tensor.shape)}, but that of {first.path} is "
                f"{list(shape)}: take it from a file of the same model",
                "QK-E106",
            )
    return StitchedSource(files[first], {name: files[part] for name, part in selection.items()})


def _count(selection: Mapping[str, Part]) -> list[str]:
    """Return the number of tensors from each file."""
    counts: dict[Part, int] = {}
    for part in selection.values():
        counts[part] = counts.get(part, 0) + 1
    return [f"{n} tensors from {part.path}" for part, n in counts.items()]


def _differences(source: StitchedSource, by_pattern: Mapping[str, Part]) -> list[str]:
    """Return a warning for each file that has other F32 tensors than the base: quants of a model have the same."""
    warnings = []
    for part in source.parts:
        names = [
            name
            for name, tensor in source.base.tensors.items()
            if name not in by_pattern and tensor.type.name == "F32" and _is_alike(part.tensors.get(name), tensor)
        ]
        for name in names[:: len(names) // _SAMPLES + 1]:
            if not np.array_equal(_bytes(source.base, name), _bytes(part, name)):
                warnings.append(
                    f"warning: {name}, which quantization does not change, differs between {source.base.paths[0]} and "
                    f"{part.paths[0]}: are they of the same model?"
                )
                break
    return warnings


def _is_alike(tensor: TensorInfo | None, reference: TensorInfo) -> bool:
    return tensor is not None and (tensor.type, tensor.shape) == (reference.type, reference.shape)


def _bytes(file: GGUFFile, name: str) -> U8:
    tensor = file.tensors[name]
    data = np.empty(tensor.nbytes, np.uint8)
    file.read(tensor, data, 0)
    return data


def _fields(source: StitchedSource, take: Mapping[str, str | Path], rules: Sequence[Rule]) -> list[Field]:
    """Return the metadata: that of the base, the rules, and how the other files were quantized."""
    fields = {key: field for key, field in source.fields.items() if key not in SPLIT_KEYS}
    texts = {
        _RULES: [f"{text}={Path(place).name}" for text, place in take.items()],
        _RECIPE: [f"{rule.pattern} = {rule.type}" for rule in rules],
    }
    records = {key: Field.of(key, lines, ValueType.ARRAY, ValueType.STRING) for key, lines in texts.items() if lines}
    for i, part in enumerate(source.parts):
        for key, field in part.fields.items():
            if key.startswith(_PROVENANCE):
                name = f"{_PREFIX}{i}.{key.removeprefix('quantkit.')}"
                records[name] = Field(name, field.type, field.item_type, bytes(field.raw))
    return [*(field for key, field in fields.items() if not key.startswith(_PREFIX)), *records.values()]
