"""Merge and split up and gate experts: ``quantkit merge-up-gate`` and ``quantkit split-up-gate``.

Each undoes the other exactly. `quantkit quantize --merge-up-gate` and `--split-up-gate` do the same while quantizing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.formats.experts import GATE, MERGED, UP
from quantkit.formats.gguf import SPLIT_KEYS, open_model
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, read_imatrix
from quantkit.formats.outputs import resolve_links
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.imatrix.fill import with_entries
from quantkit.pipeline.experts import Layer, merge_layer, split_layer
from quantkit.pipeline.importance import check_importance
from quantkit.pipeline.plan import Plan, check_kernels, plan_output
from quantkit.pipeline.regroup import Decide, regroup
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.types import type_by_name
from quantkit.version import __version__


@dataclass(frozen=True)
class MergePlan(HtmlTable):
    """A plan, the layers that it changes, and those that it does not (``refused``: prefix and reason)."""

    plan: Plan
    changed: tuple[Layer, ...]
    refused: tuple[Layer, ...]
    #: Which runtimes load merged experts of this architecture.
    loads_merged: Mapping[str, bool]

    def as_table(self) -> Table:
        """Return the tensors that each layer's experts become, or the reason why it stays as it is."""
        rows = [
            (layer.prefix, ", ".join(layer.tensors), ", ".join(tensor.name for tensor in layer.outputs), "")
            for layer in self.changed
        ]
        rows += [(layer.prefix, ", ".join(layer.tensors), "", layer.refusal) for layer in self.refused]
        return table_of("layer, tensors, result, unchanged because", rows, self.plan.title)


@checked
def merge_up_gate(
    source: str | Path,
    output: str | Path,
    *,
    reencode: str | None = None,
    keep_split: bool = False,
    split_max_size: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> MergePlan:
    """Merge up and gate experts of ``source`` into one tensor each, byte for byte, and write ``output``.

    Args:
        source: a GGUF file or any shard of a split one, of any architecture and any types.
        output: the file to write.
        reencode: the type of both halves if their types differ; None leaves such layers unchanged.
        keep_split: shards as in the source; split_max_size: new shards of at most this many bytes.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: no layer can be merged; the message has the reasons.
        FormatError: the file is damaged.
        ResourceError: the output exists, or does not fit the disk.
    """
    plan = plan_merge_up_gate(source, output, reencode=reencode, keep_split=keep_split, split_max_size=split_max_size)
    run_merge(plan, max_ram=max_ram, **run)
    return plan


@checked
def split_up_gate(
    source: str | Path,
    output: str | Path,
    *,
    keep_split: bool = False,
    split_max_size: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> MergePlan:
    """Split the merged experts of ``source`` and write ``output``, undoing ``merge_up_gate`` exactly.

    Arguments and errors as for ``merge_up_gate``.
    """
    plan = plan_split_up_gate(source, output, keep_split=keep_split, split_max_size=split_max_size)
    run_merge(plan, max_ram=max_ram, **run)
    return plan


@checked
def run_merge(merge: MergePlan, *, max_ram: int = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> RunResult:
    """Carry out a plan: streamed, journaled, renamed at the end; arguments and errors as for ``run_plan``."""
    return run_plan(merge.plan, max_ram=max_ram, **run)


@checked
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
        reencode: the type of both halves if their types differ; None leaves such layers unchanged.
        keep_split: shards as in the source; split_max_size: new shards of at most this many bytes.

    Raises RecipeError when no layer can be merged, with the reasons; FormatError for a damaged file.
    """
    t = None if reencode is None else type_by_name(reencode)
    return _plan(
        source, output, lambda prefix, tensors: merge_layer(prefix, tensors, t), "merge", keep_split, split_max_size
    )


@checked
def plan_split_up_gate(
    source: str | Path, output: str | Path, *, keep_split: bool = False, split_max_size: int | None = None
) -> MergePlan:
    """Plan splitting ``ffn_gate_up_exps``; arguments and errors as for ``plan_merge_up_gate``.

    A file merged by quantkit gets its original order of tensors and shards back; in such a file, only experts that
    quantkit merged are split.
    """
    return _plan(source, output, split_layer, "split", keep_split, split_max_size)


def _plan(
    source: str | Path, output: str | Path, decide: Decide, verb: str, keep_split: bool, split_max_size: int | None
) -> MergePlan:
    if keep_split and split_max_size is not None:
        raise RecipeError("--keep-split and --split-max-size are mutually exclusive: omit one of them", "QK-E201")
    with open_model(source) as opened:
        regrouped = regroup(opened, decide, verb, keep_split=keep_split)
        shards = regrouped.shards if split_max_size is None else None
        if shards is None:
            regrouped.metadata.remove(*SPLIT_KEYS)
        for tensor in regrouped.tensors:
            if any(part.source.type is not tensor.type for part in tensor.parts):
                check_importance(None, tensor.name, tensor.type)
        check_kernels(regrouped.tensors)
        plan = plan_output(
            opened,
            resolve_links(output),
            regrouped.metadata.fields(),
            regrouped.tensors,
            title=f"{verb}-up-gate",
            notes=regrouped.refusals(),
            shard_of=shards,
            split_max_size=split_max_size,
            identity=f"{__version__} {verb} {opened.fingerprint()}",
        )
        return MergePlan(plan, regrouped.changed, regrouped.refused, regrouped.loads_merged)


# ---------------------------------------------------------------- importance matrices


def merge_imatrix_entries(path: str | Path) -> Imatrix:
    """Return an importance matrix with the entries of up and gate experts joined under the merged name.

    Both see the same input, so either entry is the merged one; the gate's is taken. Raises FormatError.
    """
    return with_entries(read_imatrix(path), _merged_entries)


def split_imatrix_entries(path: str | Path) -> Imatrix:
    """Return an importance matrix with every merged entry under both separate names. Raises FormatError."""
    return with_entries(read_imatrix(path), _separate_entries)


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
