"""Export a GGUF file as a checkpoint of Hugging Face: ``quantkit export``, the inverse of ``convert``.

plan_export(...)  ->  ExportPlan    every tensor, shard and byte count, from the header alone, nothing written
run_export(plan)  ->  RunResult     carry out the plan
export(...)       ->  RunResult     both
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.checkpoint.export.classes import of_architecture
from quantkit.checkpoint.export.source import ExportSource, open_export
from quantkit.checkpoint.registry import ARCHITECTURES, HF_ENCODERS
from quantkit.checkpoint.tensor_names import KINDS
from quantkit.errors import RecipeError, ResourceError, os_error_code
from quantkit.formats.gguf import Layout, TensorInfo, open_gguf, open_model
from quantkit.formats.outputs import Output, atomic_write, check_apart, check_free, part_path, resolve_links
from quantkit.formats.remote import locate
from quantkit.formats.safetensors import layout_safetensors
from quantkit.options.export import ExportOptions
from quantkit.pipeline.plan import Plan, PlannedShard
from quantkit.pipeline.row_slices import PlannedTensor, plan_part, whole_tensor
from quantkit.pipeline.run import (
    DEFAULT_MAX_RAM,
    RunOptions,
    RunResult,
    complete_result,
    journal_path,
    run_plan,
    was_finished,
)
from quantkit.pipeline.run import refusal as plan_refusal
from quantkit.quantize import size_of
from quantkit.units import format_size
from quantkit.version import __version__

#: The size at which transformers begins a new shard.
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExportPlan:
    """The files to write into ``folder``: the shards of ``plan``, and ``files``, which are small."""

    folder: Path
    plan: Plan
    files: dict[str, bytes]
    opened: ExportSource

    @property
    def architecture(self) -> str:
        """The class of transformers."""
        return self.opened.architecture

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, the weights first."""
        return (*(shard.path for shard in self.plan.shards), *(self.folder / name for name in self.files))


@checked
def export(
    source: str | Path,
    folder: str | Path,
    options: ExportOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Write the checkpoint of a GGUF file into ``folder``, which is created if it does not exist.

    Args:
        source: a GGUF file, or any of its shards.
        folder: a directory.
        options: all other settings of the output.
        max_ram: limit of the workers' buffers together, in bytes (or "2G").
        run: threads, resume, overwrite, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; no output has its final name then.
    """
    return run_export(plan_export(source, folder, options), max_ram=max_ram, **run)


@checked
def plan_export(source: str | Path, folder: str | Path, options: ExportOptions | None = None) -> ExportPlan:
    """Plan an export without writing anything; arguments and errors as for ``export``."""
    options = options or ExportOptions()
    max_bytes = size_of(options.max_shard_size)
    if max_bytes < 1:
        raise RecipeError("--max-shard-size 0: a shard contains at least one tensor; omit it for 5GB", "QK-E203")
    path = locate(folder)
    with ExitStack() as stack:
        model = stack.enter_context(open_model(source))
        mmproj = None if options.mmproj is None else stack.enter_context(open_gguf(options.mmproj))
        opened = open_export(
            model,
            outtype=options.outtype,
            architecture=options.architecture,
            tokenizer=options.tokenizer,
            mmproj=mmproj,
        )
        groups = _shards(opened, max_bytes)
        names = [_shard_name(no, len(groups)) for no in range(len(groups))]
        shards, tensors = [], []
        digest = hashlib.sha256(f"{__version__} export {opened.fingerprint()}".encode())
        for no, group in enumerate(groups):
            header, offsets, nbytes = layout_safetensors(
                [(t.name, t.type.name, opened.expressions[t.name].shape) for t in group]
            )
            shards.append(PlannedShard(path / names[no], Layout(header, tuple(offsets), nbytes)))
            digest.update(header)
            tensors += [_plan_tensor(opened, t, no, offset) for t, offset in zip(group, offsets, strict=True)]
        files = dict(opened.files)
        if len(groups) > 1:
            files[INDEX] = _index(groups, names)
        notes = tuple(opened.notes)
        plan = Plan(opened, opened.dtype, tuple(shards), tuple(tensors), notes, digest.hexdigest())
        return ExportPlan(path, plan, files, opened)


def exported_classes() -> dict[str, list[str]]:
    """Return the supported architectures, and the transformers classes of each."""
    return {arch: of_architecture(arch) for arch in sorted(KINDS) if of_architecture(arch)}


def exported_encoders() -> dict[str, list[str]]:
    """Return the architectures that are exported with an mmproj file, and the transformers classes of each."""
    classes: dict[str, list[str]] = {}
    for name, row in sorted(HF_ENCODERS.items()):
        classes.setdefault(ARCHITECTURES[row.text_class or name].arch, []).append(name)
    return classes


def _shards(opened: ExportSource, max_bytes: int) -> list[list[TensorInfo]]:
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for t in opened.tensors.values():
        if groups[-1] and size + t.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += t.nbytes
    return groups


def _shard_name(no: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{no + 1:05d}-of-{count:05d}.safetensors"


def _plan_tensor(opened: ExportSource, t: TensorInfo, shard: int, offset: int) -> PlannedTensor:
    parts = opened.origins[t.name]
    names, types = (list(dict.fromkeys(values)) for values in ([p.name for p in parts], [p.dtype for p in parts]))
    reason = f"from {' + '.join(names)} ({' + '.join(types)})" if parts else "from metadata"
    return PlannedTensor(
        t.name, t.shape, t.type, reason, None, (plan_part(whole_tensor(t), t.type),), shard, offset, t.nbytes
    )


def _index(groups: Sequence[Sequence[TensorInfo]], names: Sequence[str]) -> bytes:
    where = {t.name: name for group, name in zip(groups, names, strict=True) for t in group}
    total = sum(t.nbytes for group in groups for t in group)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


@checked
def run_export(
    export_plan: ExportPlan, *, max_ram: int | str = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]
) -> RunResult:
    """Carry out a plan of ``plan_export``; arguments and errors as for ``export``.

    When all weights are on the disk they get their names, then the other files appear, config.json last: a directory
    without it is not a checkpoint.
    """
    folders = [path for path in _folders(export_plan) if _make_folder(path)]
    try:
        check_free_folder(export_plan, resume=run.get("resume", False), overwrite=run.get("overwrite", False))
        if run.get("resume", False) and not run.get("overwrite", False) and _is_exported(export_plan):
            return complete_result(export_plan.plan)
        _check_room(export_plan)
        with ExitStack() as stack:
            replaces = run.get("overwrite", False) or run.get("resume", False)
            for name in export_plan.files:
                stack.enter_context(Output(export_plan.folder / name, overwrite=replaces))
            return run_plan(
                export_plan.plan, max_ram=size_of(max_ram), publishing=lambda: _write_files(export_plan), **run
            )
    finally:
        for path in reversed(folders):
            with suppress(OSError):  # not empty: it holds the result
                path.rmdir()


def _is_exported(export_plan: ExportPlan) -> bool:
    """Return whether the directory holds this export already."""
    files = ((export_plan.folder / name, data) for name, data in export_plan.files.items())
    return was_finished(export_plan.plan) and all(path.is_file() and path.read_bytes() == data for path, data in files)


@contextmanager
def _write_files(export_plan: ExportPlan) -> Iterator[None]:
    """Write the small files after the weights are renamed, so that config.json never exists beside other weights."""
    for name in ("config.json", INDEX):
        (export_plan.folder / name).unlink(missing_ok=True)
    yield
    for name in sorted(export_plan.files, key=lambda name: name == "config.json"):
        with atomic_write(resolve_links(export_plan.folder / name)) as part:
            part.write_bytes(export_plan.files[name])


def _check_room(export_plan: ExportPlan) -> None:
    """Refuse a disk too small for the weights and the files beside them, unless an earlier run reserved them."""
    if any(part_path(shard.path).exists() for shard in export_plan.plan.shards):
        return
    need = export_plan.plan.nbytes + sum(map(len, export_plan.files.values()))
    if need > (free := shutil.disk_usage(export_plan.folder).free):
        raise ResourceError(
            f"{export_plan.folder}: needs {format_size(need)}, but only {format_size(free)} are free", "QK-E406"
        )


def _folders(export_plan: ExportPlan) -> list[Path]:
    """Return the directories of the files, the outermost first."""
    inner = {(export_plan.folder / name).parent for name in export_plan.files} - {export_plan.folder}
    return [export_plan.folder, *sorted(inner)]


def _make_folder(folder: Path) -> bool:
    """Create the directory; return whether it was missing."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise ResourceError(f"{folder} is not a directory", "QK-E405") from None
        return False
    except FileNotFoundError:
        raise ResourceError(f"{folder.parent}: no such directory; create it first", "QK-E401") from None
    except OSError as e:
        raise ResourceError(f"{folder} cannot be created: {e.strerror or e}", os_error_code(e)) from None
    return True


def check_free_folder(export_plan: ExportPlan, *, resume: bool, overwrite: bool) -> None:
    """Refuse a directory with files that would be overwritten or be mistaken for parts of the checkpoint."""
    _check_writable(export_plan.folder)
    check_apart(export_plan.paths, export_plan.plan.source.paths)
    if resume and not overwrite and _is_exported(export_plan):
        return
    has_journal = os.path.exists(journal_path(export_plan.plan.shards[0].path))
    for name in export_plan.files:
        if os.path.isdir((export_plan.folder / name).parent):  # otherwise the run creates it
            check_free(export_plan.folder / name, overwrite=overwrite or resume and has_journal)
    own_names = {path.name for path in export_plan.paths}
    names = os.listdir(export_plan.folder)
    foreign_shards = sorted(
        n for n in names if n.startswith("model") and n.endswith(".safetensors") and n not in own_names
    )
    if foreign_shards:
        raise ResourceError(
            f"{export_plan.folder}: {foreign_shards[0]} is not part of this checkpoint, but would be loaded with it; "
            "remove it, or choose another directory",
            "QK-E402",
        )
    if INDEX in names and INDEX not in own_names and not overwrite:
        raise ResourceError(
            f"{export_plan.folder / INDEX} exists; choose another directory, or use --overwrite to replace it",
            "QK-E402",
        )


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(f"{folder}: is not writable; choose another directory", "QK-E405")


def refusal(export_plan: ExportPlan, *, resume: bool = False, overwrite: bool = False) -> str | None:
    """Return the error that a run would raise, for a dry run; None if it would start."""
    if not export_plan.folder.exists():
        parent = export_plan.folder.parent
        if not parent.is_dir():
            return f"{parent}: no such directory; create it first"
    try:
        _check_writable(export_plan.folder if export_plan.folder.exists() else export_plan.folder.parent)
        if not export_plan.folder.exists():
            return None
        check_free_folder(export_plan, resume=resume, overwrite=overwrite)
    except ResourceError as e:
        return e.message
    return plan_refusal(export_plan.plan, resume=resume, overwrite=overwrite)
