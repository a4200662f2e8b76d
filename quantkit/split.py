"""Split a GGUF file into shards, and join shards: ``quantkit split`` and ``quantkit join``.

Keys, order and bytes are those of llama-gguf-split (llama.cpp b11434, tools/gguf-split/gguf-split.cpp).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError, ResourceError
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
from quantkit.formats.remote import URL, locate
from quantkit.pipeline.plan import OutputTensor, Plan, plan_output
from quantkit.pipeline.row_slices import whole_tensor
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, check_targets, run_plan
from quantkit.pipeline.shard_join import can_free, join_freeing, read_state, state_path
from quantkit.progress import ByteCounter
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
        delete_source: remove each shard as soon as its bytes are on the disk, so that one shard of free space is
            enough; of big-endian shards and with ``ray`` all at the end.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: the model is not split.
        FormatError: a damaged or missing shard. ResourceError: the output exists, or does not fit the disk.
    """
    if delete_source and run.get("resume") and (result := resume_join(source, output, **run)) is not None:
        return result
    return run_split(plan_join(source, output), delete_source=delete_source, max_ram=max_ram, **run)


@checked
def resume_join(source: str | Path, output: str | Path | None = None, **run: Unpack[RunOptions]) -> RunResult | None:
    """Continue an interrupted ``join`` that deletes its shards; None if there is none. Arguments as for ``join``."""
    target = _join_output(source, output)
    if target is None or isinstance(target, URL) or read_state(target) is None:
        return None
    return _join_freeing(target, None, **run)


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
        path = resolve_links(model.paths[0] if output is None else locate(output))
        if path.suffix != ".gguf" and path.is_dir():
            raise ResourceError(f"{output} is a directory; give a name for the shards: {output}/model.gguf", "QK-E120")
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
    with _open_shards(source, output) as model:
        parts = parse_split_path(model.paths[0])
        if len(model.paths) == 1 or parts is None:
            raise RecipeError(f"{model.paths[0]}: the model is a single file: there is nothing to join", "QK-E214")
        fields = {key: field for key, field in model.fields.items() if key != "split.count"}
        fields["split.count"] = Field.of("split.count", 0, ValueType.UINT16)
        target = _join_output(source, output)
        assert target is not None
        return plan_output(
            model,
            target,
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
    if delete_source and plan.title == "join" and run.get("ray") is None and can_free(plan):
        return _start_freeing(plan, **run)
    result = run_plan(plan, max_ram=max_ram, **run)
    if delete_source:
        check_unchanged(plan.source.inputs)
        for path in sources:
            path.unlink()
    return result


def _join_output(source: str | Path, output: str | Path | None) -> Path | None:
    """Return the output of a join, None if it follows from a name that is not of a shard."""
    if output is not None:
        return resolve_links(locate(output))
    parts = parse_split_path(source)
    return None if parts is None else resolve_links(locate(f"{parts[0]}.gguf"))


def _open_shards(source: str | Path, output: str | Path | None) -> GGUFFile:
    """Open a split model, unless an interrupted join has deleted some of its shards."""
    try:
        return open_model(source)
    except FormatError:
        target = _join_output(source, output)
        if target is None or isinstance(target, URL) or not state_path(target).exists():
            raise
        raise ResourceError(
            f"{target}: a join that deletes its shards was interrupted: continue with --delete-source --resume",
            "QK-E408",
        ) from None


def _start_freeing(plan: Plan, **run: Unpack[RunOptions]) -> RunResult:
    output = plan.shards[0].path
    check_targets(plan, resume=run.get("resume", False), overwrite=run.get("overwrite", False))
    if state_path(output).exists() and not run.get("overwrite"):
        raise ResourceError(
            f"{state_path(output)} exists: an earlier join was interrupted; continue with --resume, or start over with "
            "--overwrite",
            "QK-E408",
        )
    return _join_freeing(output, plan, **run)


def _join_freeing(output: Path, plan: Plan | None, **run: Unpack[RunOptions]) -> RunResult:
    observer, progress = run.get("observer"), run.get("progress")
    counter = ByteCounter(progress, plan.nbytes if plan is not None else 0)

    def count(nbytes: int) -> None:
        counter.add(nbytes)
        if observer is not None:
            observer.on_write(nbytes)

    began = time.monotonic()
    state = join_freeing(output, plan, overwrite=run.get("overwrite", False), on_write=count)
    return RunResult(time.monotonic() - began, state.freed, {})


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
