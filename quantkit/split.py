"""Split a GGUF file into shards, and join shards: ``quantkit split`` and ``quantkit join``.

Keys, order and bytes are those of llama-gguf-split (llama.cpp b11434, tools/gguf-split/gguf-split.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.errors import RecipeError, ResourceError
from quantkit.formats.files import check_unchanged
from quantkit.formats.gguf import (
    SPLIT_KEYS,
    Field,
    GGUFFile,
    ValueType,
    open_model,
    parse_split_path,
    split_fields,
)
from quantkit.formats.outputs import resolve_links
from quantkit.formats.remote import URL, located
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.quantize import size_of
from quantkit.units import round_up
from quantkit.version import __version__

#: The alignment by which llama-gguf-split counts the size of tensors, regardless of the file's.
_PADDING = 32


@checked
def split(
    source: str | Path,
    output: str | Path | None = None,
    *,
    max_size: int | str | None = None,
    max_tensors: int | None = None,
    no_tensor_first_split: bool = False,
    delete_source: bool = False,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Split a GGUF file into shards; tensor data is copied.

    Args:
        source: a GGUF file.
        output: PREFIX.gguf, whose shards are PREFIX-00001-of-00003.gguf and so on; by default the name of ``source``.
        max_size: bytes of tensors in a shard ("48G"); a larger tensor has a shard of its own.
        max_tensors: tensors in a shard, instead.
        no_tensor_first_split: begin with a shard of metadata alone.
        delete_source: remove ``source`` when all shards are on the disk.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: neither limit, or both; everything fits into one shard.
        FormatError: a damaged file. ResourceError: the output exists, or does not fit the disk.
    """
    plan = plan_split(
        source, output, max_size=max_size, max_tensors=max_tensors, no_tensor_first_split=no_tensor_first_split
    )
    return run_split(plan, delete_source=delete_source, max_ram=max_ram, **run)


@checked
def join(
    source: str | Path,
    output: str | Path | None = None,
    *,
    delete_source: bool = False,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Join the shards of a model into one file; tensor data is copied.

    Args:
        source: any of the shards; the others lie beside it.
        output: the file; by default PREFIX.gguf beside the shards.
        delete_source: remove the shards when the file is on the disk.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: the model is not split.
        FormatError: a damaged or missing shard. ResourceError: the output exists, or does not fit the disk.
    """
    return run_split(plan_join(source, output), delete_source=delete_source, max_ram=max_ram, **run)


@checked
def plan_split(
    source: str | Path,
    output: str | Path | None = None,
    *,
    max_size: int | str | None = None,
    max_tensors: int | None = None,
    no_tensor_first_split: bool = False,
) -> Plan:
    """Plan to split a file without writing anything; arguments and errors as for ``split``."""
    if (max_size is None) == (max_tensors is None):
        raise RecipeError("give --max-size 48G or --max-tensors 128, one of them", "QK-E201")
    if max_tensors is not None and max_tensors < 1:
        raise RecipeError(f"--max-tensors {max_tensors}: at least 1", "QK-E203")
    with open_model(source) as model:
        path = resolve_links(model.paths[0] if output is None else located(output))
        tensors = _copies(model)
        shards = _shards(tensors, 0 if max_size is None else size_of(max_size), max_tensors)
        if shards[-1] == 0 and not no_tensor_first_split:
            raise RecipeError(
                f"{model.paths[0]}: all tensors fit into one shard: give a smaller limit, or copy the file", "QK-E214"
            )
        return plan_output(
            model,
            path,
            [field for key, field in model.fields.items() if key not in SPLIT_KEYS],
            tensors,
            title="split",
            shard_of=shards,
            empty_first=no_tensor_first_split,
            split_keys=_split_keys,
            identity=f"{__version__} split {model.fingerprint()}",
        )


@checked
def plan_join(source: str | Path, output: str | Path | None = None) -> Plan:
    """Plan to join shards without writing anything; arguments and errors as for ``join``."""
    with open_model(source) as model:
        parts = parse_split_path(model.paths[0])
        if len(model.paths) == 1 or parts is None:
            raise RecipeError(f"{model.paths[0]}: the model is a single file: there is nothing to join", "QK-E214")
        fields = {key: field for key, field in model.fields.items() if key != "split.count"}
        fields["split.count"] = Field.of("split.count", 0, ValueType.UINT16)
        return plan_output(
            model,
            resolve_links(located(f"{parts[0]}.gguf" if output is None else output)),
            list(fields.values()),
            _copies(model),
            title="join",
            identity=f"{__version__} join {model.fingerprint()}",
        )


@checked
def run_split(
    plan: Plan, *, delete_source: bool = False, max_ram: int = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]
) -> RunResult:
    """Carry out a plan of ``plan_split`` or ``plan_join``; arguments and errors as for these."""
    sources = [Path(os.fspath(path)) for path in plan.source.paths]
    if delete_source and any(isinstance(path, URL) for path in plan.source.paths):
        message = f"{plan.source.paths[0]}: objects of a store are not deleted: omit --delete-source"
        raise ResourceError(message, "QK-E412")
    result = run_plan(plan, max_ram=max_ram, **run)
    if delete_source:
        check_unchanged(plan.source.inputs)
        for path in sources:
            path.unlink()
    return result


def _copies(model: GGUFFile) -> list[OutputTensor]:
    return [OutputTensor(t.name, t.shape, t.type, "copied", (whole_tensor(t),)) for t in model.tensors.values()]


def _shards(tensors: Sequence[OutputTensor], max_size: int, max_tensors: int | None) -> list[int]:
    """Return the shard of each tensor among those with tensors."""
    shards, no, size = [], 0, 0
    for i, tensor in enumerate(tensors):
        nbytes = round_up(tensor.nbytes, _PADDING)
        is_full = i > 0 and i % max_tensors == 0 if max_tensors is not None else size > 0 and size + nbytes > max_size
        if is_full:
            no, size = no + 1, 0
        size += nbytes
        shards.append(no)
    return shards


def _split_keys(no: int, count: int, n_tensors: int) -> list[Field]:
    """Return the keys of a shard in llama-gguf-split's order, which sets the number of shards last."""
    number, n_shards, total = split_fields(no, count, n_tensors)
    return [number, total, n_shards]
