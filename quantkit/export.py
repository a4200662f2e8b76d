"""Export a GGUF file as a checkpoint of Hugging Face: ``quantkit export``, the way back of ``convert``.

plan_export(...)  ->  ExportPlan    every tensor, shard and byte count, from the header alone, nothing written
run_export(plan)  ->  RunResult     the plan carried out
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

from quantkit.checkpoint.back import Exported, open_export
from quantkit.checkpoint.back.classes import of_architecture
from quantkit.checkpoint.tensor_names import KINDS
from quantkit.errors import RecipeError, ResourceError
from quantkit.formats.gguf import Layout, TensorInfo, open_model
from quantkit.formats.outputs import Output, check_apart, check_free, end_of_links, part_path, written
from quantkit.formats.safetensors import layout_safetensors
from quantkit.pipeline.plan import Plan, PlannedShard
from quantkit.pipeline.planned import PlannedTensor, whole
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, journal_path, run_plan
from quantkit.pipeline.run import refusal as plan_refusal
from quantkit.quantize import size_of
from quantkit.units import format_size
from quantkit.version import __version__

#: Where transformers begins a new shard.
DEFAULT_SHARD = "5GB"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Everything about an export but input and directory; names as on the command line.

    ``outtype``: f32, f16, bf16 or auto. ``architecture``: the class of transformers, where an architecture has several.
    """

    outtype: str = "auto"
    architecture: str | None = None
    tokenizer: bool = True
    max_shard_size: int | str = DEFAULT_SHARD


@dataclass(frozen=True)
class ExportPlan:
    """What will lie in ``folder``: the shards of ``plan``, and ``files``, which are small."""

    folder: Path
    plan: Plan
    files: dict[str, bytes]
    opened: Exported

    @property
    def architecture(self) -> str:
        """The class of transformers."""
        return self.opened.architecture

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, the weights first."""
        return (*(shard.path for shard in self.plan.shards), *(self.folder / name for name in self.files))


def export(
    source: str | Path,
    folder: str | Path,
    options: ExportOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> RunResult:
    """Write the checkpoint of a GGUF file into ``folder``, which is made if it is not there.

    Args:
        source: a GGUF file, or any of its shards.
        folder: a directory.
        options: everything else that decides what is written.
        max_ram: bytes (or "2G") that the workers' buffers may take together.
        run: threads, resume, overwrite, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; nothing stands under a final name then.
    """
    return run_export(plan_export(source, folder, options), max_ram=max_ram, **run)


def plan_export(source: str | Path, folder: str | Path, options: ExportOptions | None = None) -> ExportPlan:
    """Decide everything about an export and write nothing; arguments and errors as for ``export``."""
    options = options or ExportOptions()
    most = size_of(options.max_shard_size)
    if most < 1:
        raise RecipeError("--max-shard-size 0: a file holds at least one tensor; leave it away for 5GB")
    path = Path(folder)
    with open_model(source) as model:
        opened = open_export(
            model, outtype=options.outtype, architecture=options.architecture, tokenizer=options.tokenizer
        )
        groups = _shards(opened, most)
        names = [_shard_name(no, len(groups)) for no in range(len(groups))]
        shards, tensors = [], []
        digest = hashlib.sha256(f"{__version__} export {opened.fingerprint()}".encode())
        for no, group in enumerate(groups):
            header, offsets, nbytes = layout_safetensors(
                [(t.name, t.type.name, opened.made[t.name].shape) for t in group]
            )
            shards.append(PlannedShard(path / names[no], Layout(header, tuple(offsets), nbytes)))
            digest.update(header)
            tensors += [_planned(opened, t, no, offset) for t, offset in zip(group, offsets, strict=True)]
        files = dict(opened.files)
        if len(groups) > 1:
            files[INDEX] = _index(groups, names)
        notes = tuple(opened.notes)
        plan = Plan(opened, opened.dtype, tuple(shards), tuple(tensors), notes, digest.hexdigest())
        return ExportPlan(path, plan, files, opened)


def exported_classes() -> dict[str, list[str]]:
    """Return the architectures that are exported, and the classes of transformers that each may become."""
    return {arch: of_architecture(arch) for arch in sorted(KINDS) if of_architecture(arch)}


def _shards(opened: Exported, most: int) -> list[list[TensorInfo]]:
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for t in opened.tensors.values():
        if groups[-1] and size + t.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += t.nbytes
    return groups


def _shard_name(no: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{no + 1:05d}-of-{count:05d}.safetensors"


def _planned(opened: Exported, t: TensorInfo, shard: int, offset: int) -> PlannedTensor:
    parts = opened.origins[t.name]
    names, types = (list(dict.fromkeys(each)) for each in ([p.name for p in parts], [p.dtype for p in parts]))
    reason = f"from {' + '.join(names)} ({' + '.join(types)})" if parts else "from metadata"
    return PlannedTensor(t.name, t.shape, t.type, reason, None, (whole(t),), shard, offset, t.nbytes)


def _index(groups: Sequence[Sequence[TensorInfo]], names: Sequence[str]) -> bytes:
    where = {t.name: name for group, name in zip(groups, names, strict=True) for t in group}
    total = sum(t.nbytes for group in groups for t in group)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def run_export(planned: ExportPlan, *, max_ram: int | str = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> RunResult:
    """Carry out a plan of ``plan_export``; arguments and errors as for ``export``.

    When all weights are on the disk they get their names, then the other files appear, config.json last: a directory
    without it is no checkpoint.
    """
    folders = [path for path in _folders(planned) if _make_folder(path)]
    try:
        check_free_folder(planned, resume=run.get("resume", False), overwrite=run.get("overwrite", False))
        _check_room(planned)
        with ExitStack() as stack:
            replaces = run.get("overwrite", False) or run.get("resume", False)
            for name in planned.files:
                stack.enter_context(Output(planned.folder / name, overwrite=replaces))
            return run_plan(planned.plan, max_ram=size_of(max_ram), publishing=lambda: _beside(planned), **run)
    finally:
        for path in reversed(folders):
            with suppress(OSError):  # not empty: it holds the result
                path.rmdir()


@contextmanager
def _beside(planned: ExportPlan) -> Iterator[None]:
    """Write the small files when the weights have their names; no time is there a config.json of other weights."""
    for name in ("config.json", INDEX):
        (planned.folder / name).unlink(missing_ok=True)
    yield
    for name in sorted(planned.files, key=lambda name: name == "config.json"):
        with written(end_of_links(planned.folder / name)) as part:
            part.write_bytes(planned.files[name])


def _check_room(planned: ExportPlan) -> None:
    """Refuse a disk on which the weights have room, and what comes last has not, unless a run has reserved its own."""
    if any(part_path(shard.path).exists() for shard in planned.plan.shards):
        return
    need = planned.plan.nbytes + sum(map(len, planned.files.values()))
    if need > (free := shutil.disk_usage(planned.folder).free):
        raise ResourceError(f"{planned.folder}: {format_size(need)} are needed and {format_size(free)} are free")


def _folders(planned: ExportPlan) -> list[Path]:
    """Return the directories in which files will lie, the outermost first."""
    inner = {(planned.folder / name).parent for name in planned.files} - {planned.folder}
    return [planned.folder, *sorted(inner)]


def _make_folder(folder: Path) -> bool:
    """Make the directory; return whether it was not there."""
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise ResourceError(f"{folder} is no directory; name one") from None
        return False
    except FileNotFoundError:
        raise ResourceError(f"{folder.parent}: no such directory; make it first") from None
    except OSError as e:
        raise ResourceError(f"{folder} cannot be made: {e.strerror or e}") from None
    return True


def check_free_folder(planned: ExportPlan, *, resume: bool, overwrite: bool) -> None:
    """Refuse a directory in which files would be destroyed, or others would be taken for parts of the checkpoint."""
    _check_writable(planned.folder)
    check_apart(planned.paths, planned.plan.source.paths)
    started = os.path.exists(journal_path(planned.plan.shards[0].path))
    for name in planned.files:
        if os.path.isdir((planned.folder / name).parent):  # else it will be made
            check_free(planned.folder / name, overwrite=overwrite or resume and started)
    known = {path.name for path in planned.paths}
    names = os.listdir(planned.folder)
    other = sorted(n for n in names if n.startswith("model") and n.endswith(".safetensors") and n not in known)
    if other:
        raise ResourceError(
            f"{planned.folder}: {other[0]} is not part of this checkpoint, and would be taken for it; remove it, or "
            "name another directory"
        )
    if INDEX in names and INDEX not in known and not overwrite:
        raise ResourceError(f"{planned.folder / INDEX} exists; give another directory, or --overwrite to replace it")


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(f"{folder}: nothing can be written there; name another directory")


def refusal(planned: ExportPlan, *, resume: bool = False, overwrite: bool = False) -> str | None:
    """Return why a run would refuse, for a dry run; None if it would not."""
    if not planned.folder.exists():
        here = planned.folder.parent
        if not here.is_dir():
            return f"{here}: no such directory; make it first"
    try:
        _check_writable(planned.folder if planned.folder.exists() else planned.folder.parent)
        if not planned.folder.exists():
            return None
        check_free_folder(planned, resume=resume, overwrite=overwrite)
    except ResourceError as e:
        return e.message
    return plan_refusal(planned.plan, resume=resume, overwrite=overwrite)
