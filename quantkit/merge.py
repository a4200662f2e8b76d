"""Merge up and gate experts, and take them apart: ``quantkit merge-up-gate`` and ``quantkit split-up-gate``.

Each undoes the other exactly. What undoing needs, the order of the tensors and their shards, is kept under
``quantkit.merge.*`` keys, which the inverse removes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, ValueType, open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix
from quantkit.helpers import available_cpus
from quantkit.pipeline.experts import GATE, MERGED, UP, Joined, Layer, find_layers, merge_layer, runtimes, split_layer
from quantkit.pipeline.metadata import Metadata
from quantkit.pipeline.plan import Chosen, Plan, check_kernels, plan_output, source_fingerprint
from quantkit.pipeline.run import DEFAULT_MAX_RAM, Observer, RunResult, run_plan
from quantkit.pipeline.work import whole
from quantkit.types import type_by_name

ORDER_KEY, SHARDS_KEY = "quantkit.merge.tensors", "quantkit.merge.shards"
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class MergePlan:
    """A plan, and which layers it changes or leaves alone (``refused``: prefix and reason)."""

    plan: Plan
    changed: tuple[Layer, ...]
    refused: tuple[Layer, ...]
    #: Which runtimes load merged experts of this architecture.
    loads_merged: Mapping[str, bool]


def merge_up_gate(
    source: str | Path,
    output: str | Path,
    *,
    reencode: str | None = None,
    keep_split: bool = False,
    split_max_size: int | None = None,
    **run: Any,
) -> MergePlan:
    """Merge up and gate experts of ``source`` into ``output``: ``plan_merge_up_gate``, then ``run_merge``."""
    plan = plan_merge_up_gate(source, output, reencode=reencode, keep_split=keep_split, split_max_size=split_max_size)
    run_merge(plan, **run)
    return plan


def split_up_gate(
    source: str | Path,
    output: str | Path,
    *,
    keep_split: bool = False,
    split_max_size: int | None = None,
    **run: Any,
) -> MergePlan:
    """Take merged experts of ``source`` apart into ``output``: ``plan_split_up_gate``, then ``run_merge``."""
    plan = plan_split_up_gate(source, output, keep_split=keep_split, split_max_size=split_max_size)
    run_merge(plan, **run)
    return plan


def run_merge(
    merge: MergePlan,
    *,
    threads: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> RunResult:
    """Carry out a plan: streamed, journaled, renamed at the end; arguments and errors as for ``run_plan``."""
    return run_plan(
        merge.plan,
        threads=threads or available_cpus(),
        max_ram=max_ram,
        resume=resume,
        overwrite=overwrite,
        observer=observer,
    )


def plan_merge_up_gate(
    source: str | Path,
    output: str | Path,
    *,
    reencode: str | None = None,
    keep_split: bool = False,
    split_max_size: int | None = None,
) -> MergePlan:
    """Plan to merge ``ffn_gate_exps`` and ``ffn_up_exps`` into ``ffn_gate_up_exps``, per expert gate rows first.

    Args:
        source: a GGUF file or any shard of a split one, of any architecture and any types.
        output: the file to write.
        reencode: the type both halves get where their types differ; without, such layers are left alone.
        keep_split: shards as in the source; split_max_size: new shards of at most so many bytes.

    Raises RecipeError when no layer can be merged, with the reasons; FormatError for a broken file.
    """
    t = None if reencode is None else type_by_name(reencode)
    return _plan(source, output, lambda p, has: merge_layer(p, has, t), "merge", keep_split, split_max_size)


def plan_split_up_gate(
    source: str | Path, output: str | Path, *, keep_split: bool = False, split_max_size: int | None = None
) -> MergePlan:
    """Plan to take ``ffn_gate_up_exps`` apart; arguments and errors as for ``plan_merge_up_gate``.

    A file that was merged here gets its order of tensors and its shards back; then only what was merged here is
    taken apart.
    """
    return _plan(source, output, split_layer, "split", keep_split, split_max_size)


def _plan(
    source: str | Path,
    output: str | Path,
    decide: Callable[[str, Mapping[str, TensorInfo]], Layer | None],
    verb: str,
    keep_split: bool,
    split_max_size: int | None,
) -> MergePlan:
    with open_gguf(source) as opened:
        layers = [layer for p, has in find_layers(opened.tensors).items() if (layer := decide(p, has)) is not None]
        changed = _only_recorded(opened, [layer for layer in layers if not layer.refusal])
        refused = [layer for layer in layers if layer.refusal]
        if not changed:
            raise RecipeError(_nothing_to_do(opened, verb, refused))
        chosen = _replace(opened, changed)
        chosen, shards, undone = _restore(opened, chosen)
        metadata = Metadata(opened.fields.values())
        if undone:
            metadata.remove(ORDER_KEY, SHARDS_KEY)
        else:
            _record(metadata, opened)
            shards = [c.parts[0].source.shard for c in chosen] if keep_split and len(opened.paths) > 1 else None
        if split_max_size is not None or shards is None or len(set(shards)) == 1:
            shards = None
            metadata.remove(*_SPLIT_KEYS)
        check_kernels(chosen)
        path = Path(output)
        plan = plan_output(
            opened,
            path.resolve() if path.is_symlink() else path,
            metadata.fields(),
            chosen,
            title=f"{verb}-up-gate",
            notes=[f"{layer.prefix}*: left alone: {layer.refusal}" for layer in refused],
            shard_of=shards,
            split_max_size=split_max_size,
            identity=f"{__version__} {verb} {source_fingerprint(opened)}",
        )
        arch = str(opened.get("general.architecture", ""))
        return MergePlan(plan, tuple(changed), tuple(refused), runtimes(arch))


def _nothing_to_do(source: GGUFFile, verb: str, refused: Sequence[Layer]) -> str:
    if refused:
        reasons = "; ".join(f"{layer.prefix}*: {layer.refusal}" for layer in refused[:4])
        return f"{source.paths[0]}: no layer can be {'merged' if verb == 'merge' else 'taken apart'}: {reasons}"
    if verb == "merge" and any(MERGED in name for name in source.tensors):
        return f"{source.paths[0]}: its up and gate experts are merged already"
    what = f"{GATE} and {UP}" if verb == "merge" else MERGED
    return f"{source.paths[0]}: there are no tensors {what} in it"


def _recorded(source: GGUFFile) -> list[str]:
    order = source.get(ORDER_KEY, [])
    return list(order) if isinstance(order, list) else []


def _only_recorded(source: GGUFFile, layers: list[Layer]) -> list[Layer]:
    """Keep to the layers that an earlier run here changed, if any of them was: the others came as they are."""
    recorded = set(_recorded(source))
    ours = [layer for layer in layers if all(joined.name in recorded for joined in layer.made)]
    return ours or layers


def _replace(source: GGUFFile, changed: Sequence[Layer]) -> list[Chosen]:
    """Return all tensors of the output; what is made stands where the first tensor it is made of stood."""
    made: dict[str, list[Joined]] = {}
    gone: set[str] = set()
    position = {name: i for i, name in enumerate(source.tensors)}
    for layer in changed:
        gone.update(layer.tensors)
        for joined in layer.made:
            first = min((part.source.name for part in joined.parts), key=position.__getitem__)
            made.setdefault(first, []).append(joined)
    chosen = []
    for name, tensor in source.tensors.items():
        chosen += [Chosen(j.name, j.shape, j.type, j.reason, j.parts) for j in made.get(name, ())]
        if name not in gone:
            chosen.append(Chosen(name, tensor.shape, tensor.type, "copied", (whole(tensor),)))
    return chosen


def _restore(source: GGUFFile, chosen: list[Chosen]) -> tuple[list[Chosen], list[int] | None, bool]:
    """Return the tensors in the recorded order with their shards, if they are the recorded ones."""
    order = _recorded(source)
    by_name = {c.name: c for c in chosen}
    if not order or set(order) != set(by_name) or len(order) != len(chosen):
        return chosen, None, False
    shards = source.get(SHARDS_KEY)
    known = isinstance(shards, list) and len(shards) == len(order) and shards == sorted(shards)
    return [by_name[name] for name in order], list(shards) if known and isinstance(shards, list) else None, True


def _record(metadata: Metadata, source: GGUFFile) -> None:
    """Keep the order and the shards of the source's tensors for the inverse."""
    metadata.set(Field.of(ORDER_KEY, list(source.tensors), ValueType.ARRAY, ValueType.STRING))
    metadata.remove(SHARDS_KEY)
    if len(source.paths) > 1:
        shards = [tensor.shard for tensor in source.tensors.values()]
        metadata.set(Field.of(SHARDS_KEY, shards, ValueType.ARRAY, ValueType.UINT32))


# ---------------------------------------------------------------- importance matrices


def merge_imatrix(path: str | Path) -> Imatrix:
    """Return an importance matrix with the entries of up and gate experts joined under the merged name.

    Both see the same input, so either entry is the merged one; the gate's is taken. Raises FormatError.
    """
    return _rename(read_imatrix(path), _merged_entries)


def split_imatrix(path: str | Path) -> Imatrix:
    """Return an importance matrix with every merged entry under both separate names. Raises FormatError."""
    return _rename(read_imatrix(path), _separate_entries)


def _rename(imatrix: Imatrix, change: Callable[[dict[str, ImatrixEntry]], dict[str, ImatrixEntry]]) -> Imatrix:
    return replace(imatrix, entries=change(imatrix.entries))


def _merged_entries(entries: dict[str, ImatrixEntry]) -> dict[str, ImatrixEntry]:
    merged = {name: e for name, e in entries.items() if GATE not in name and UP not in name}
    for half in (UP, GATE):
        merged |= {name.replace(half, MERGED): e for name, e in entries.items() if half in name}
    return merged


def _separate_entries(entries: dict[str, ImatrixEntry]) -> dict[str, ImatrixEntry]:
    separate = {name: e for name, e in entries.items() if MERGED not in name}
    for half in (UP, GATE):
        separate |= {name.replace(MERGED, half): e for name, e in entries.items() if MERGED in name}
    return separate
