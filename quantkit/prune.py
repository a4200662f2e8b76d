"""A MoE model with fewer experts: ``quantkit prune-experts``. No tensor is decoded.

Scores: ``reap`` is the saliency of Router-weighted Expert Activation Pruning (arXiv 2510.13999), the mean over the
tokens routed to an expert of its gate value times the norm of its output; ``frequency`` counts these tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import SPLIT_KEYS, open_model
from quantkit.formats.imatrix import Imatrix, read_imatrix
from quantkit.formats.outputs import resolve_links
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.pipeline.expert_lists import (
    ExpertLists,
    expert_count,
    group_count,
    layers_of,
    parse_experts,
    prune_source,
    read_experts,
)
from quantkit.pipeline.plan import Plan, plan_output
from quantkit.pipeline.regroup import keep_groups
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.pipeline.source import Source
from quantkit.version import __version__

Criterion = Literal["reap", "frequency", "list"]
CRITERIA: tuple[str, ...] = get_args(Criterion)

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PrunePlan(HtmlTable):
    """A plan, the experts that stay in each layer, and how they were chosen.

    ``scores``: of all experts of a layer, float64 [n_expert], unless a list was given; ``n_expert``: their number.
    """

    plan: Plan
    experts: ExpertLists
    criterion: str
    n_expert: int
    scores: Mapping[int, F64]

    def as_table(self) -> Table:
        """Return the experts that go, by layer, and their share of the layer's score."""
        rows = [
            (f"blk.{layer}", len(experts), *self._removal(layer, experts)) for layer, experts in self.experts.items()
        ]
        return table_of("layer, experts, removed, share of the score", rows, self.plan.title)

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON; its ``experts`` are a list for ``--experts``."""
        return {
            "command": self.plan.title,
            "files": [{"path": str(s.path), "bytes": s.layout.nbytes} for s in self.plan.shards],
            "by": self.criterion,
            "n_expert": self.n_expert,
            "experts": {str(layer): list(experts) for layer, experts in self.experts.items()},
            "removed_share": {
                str(layer): self._removal(layer, e)[1] for layer, e in self.experts.items() if self.scores
            },
        }

    def _removal(self, layer: int, experts: Sequence[int]) -> tuple[str, float | None]:
        removed = [e for e in range(self.n_expert) if e not in experts]
        scores = self.scores.get(layer)
        total = 0.0 if scores is None else float(scores.sum())
        share = None if scores is None or total == 0 else float(scores[removed].sum()) / total
        return " ".join(map(str, removed)), share


@checked
def prune_experts(
    source: str | Path,
    output: str | Path,
    keep: int | float | str | None = None,
    *,
    criterion: Criterion | None = None,
    imatrix: str | Path | None = None,
    experts: str | Path | Mapping[int, Sequence[int]] | None = None,
    keep_split: bool = False,
    split_max_size: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> PrunePlan:
    """Write a MoE model with fewer experts, equally many in each layer, byte for byte.

    Router, biases and scales of the experts follow, and so do an importance matrix or a covariance file of the model,
    if given as ``source`` with the same list.

    Args:
        source: a GGUF file or any shard of a split one, of any architecture and any types.
        output: the file to write.
        keep: the number of experts of a layer, or their share (0.75, "75%"), rounded to equal groups.
        criterion: "reap", "frequency", or "list"; None: "list" if ``experts`` is given, else "reap".
        imatrix: an importance matrix of the model; for "reap" with saliency (`imatrix --saliency`).
        experts: the experts that stay, by layer, or a file of them: JSON, or a pruned GGUF file.
        keep_split: shards as in the source; split_max_size: new shards of at most this many bytes.
        max_ram: bytes that the workers' buffers may take together.
        run: threads, resume, overwrite, progress: see ``RunOptions``.

    Raises:
        RecipeError: options that do not fit; experts that cannot be pruned; more used for a token than left.
        FormatError: a damaged file, or an importance matrix without the scores of a layer.
        ResourceError: the output exists, or does not fit the disk.
    """
    plan = plan_prune_experts(
        source, output, keep, criterion=criterion, imatrix=imatrix, experts=experts, keep_split=keep_split,
        split_max_size=split_max_size,
    )  # fmt: skip
    run_prune(plan, max_ram=max_ram, **run)
    return plan


@checked
def run_prune(prune: PrunePlan, *, max_ram: int = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> RunResult:
    """Carry out a plan: streamed, journaled, renamed at the end; arguments and errors as for ``run_plan``."""
    return run_plan(prune.plan, max_ram=max_ram, **run)


@checked
def plan_prune_experts(
    source: str | Path,
    output: str | Path,
    keep: int | float | str | None = None,
    *,
    criterion: Criterion | None = None,
    imatrix: str | Path | None = None,
    experts: str | Path | Mapping[int, Sequence[int]] | None = None,
    keep_split: bool = False,
    split_max_size: int | None = None,
) -> PrunePlan:
    """Plan a model with fewer experts without writing anything; arguments and errors as for ``prune_experts``."""
    if keep_split and split_max_size is not None:
        raise RecipeError("--keep-split and --split-max-size are mutually exclusive: omit one of them", "QK-E201")
    method = criterion or ("reap" if experts is None else "list")
    _check(method, keep, imatrix, experts)
    with open_model(source) as model:
        n, scores = expert_count(model), dict[int, F64]()
        if experts is not None:
            lists = parse_experts(dict(experts)) if isinstance(experts, Mapping) else read_experts(experts, model)
            if keep is not None and {len(list_) for list_ in lists.values()} != {_size(model, n, keep)}:
                raise RecipeError(f"--keep {keep}: the list has another number of experts: omit --keep", "QK-E203")
        else:
            assert imatrix is not None
            assert keep is not None
            scores = expert_scores(model, read_imatrix(imatrix), method)
            groups = group_count(model)
            lists = {layer: _best(s, _size(model, n, keep), groups) for layer, s in scores.items()}
        pruned = prune_source(model, lists, method)
        grouped = keep_groups(pruned, keep_split=keep_split)
        if grouped.shards is None:
            grouped.metadata.remove(*SPLIT_KEYS)
        plan = plan_output(
            pruned,
            resolve_links(locate(output)),
            grouped.metadata.fields(),
            grouped.tensors,
            title="prune-experts",
            shard_of=grouped.shards,
            split_max_size=split_max_size,
            identity=f"{__version__} prune {pruned.fingerprint()}",
            reads=[locate(path) for path in (imatrix, experts) if isinstance(path, str | Path)],
        )
        return PrunePlan(plan, {layer: lists[layer] for layer in layers_of(model)}, method, n, scores)


def _check(criterion: str, keep: object, imatrix: object, experts: object) -> None:
    if criterion not in CRITERIA:
        raise RecipeError(f"--by {criterion}: choose one of {', '.join(CRITERIA)}", "QK-E203")
    if criterion == "list":
        if experts is None:
            raise RecipeError("--by list: give --experts FILE", "QK-E202")
        if imatrix is not None:
            raise RecipeError("--imatrix and --experts are mutually exclusive: omit one of them", "QK-E201")
        return
    if experts is not None:
        raise RecipeError(f"--by {criterion} and --experts are mutually exclusive: omit one of them", "QK-E201")
    missing = {"--imatrix FILE": imatrix is None, "--keep N": keep is None}
    if any(missing.values()):
        names = " and ".join(name for name, is_missing in missing.items() if is_missing)
        raise RecipeError(f"--by {criterion}: give {names}", "QK-E202")


def _size(source: Source, n: int, keep: int | float | str) -> int:
    """Return the number of experts that ``keep`` stands for: a number, or a share rounded to equal groups."""
    text = str(keep).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if text.isdecimal():
        size = int(text)
    elif 0 < share < 1:
        groups = group_count(source)
        size = groups * math.floor(share * n / groups + 0.5)
    else:
        raise RecipeError(f"--keep {text}: give a number of experts, or a share below 100%, such as 75%", "QK-E203")
    if not 1 < size < n:
        raise RecipeError(f"--keep {text}: {size} of {n} experts: at least 2, and fewer than all", "QK-E203")
    return size


def expert_scores(source: Source, imatrix: Imatrix, criterion: str) -> dict[int, F64]:
    """Return the score of every expert by layer, float64 [n_expert]; experts without tokens have 0.

    criterion: "reap" or "frequency". Raises FormatError for a layer without entry, RecipeError without saliency.
    """
    n, scores = expert_count(source), dict[int, F64]()
    for layer in layers_of(source):
        name = f"blk.{layer}.ffn_down_exps.weight"
        entry = imatrix.entries.get(name)
        if entry is None:
            raise FormatError(
                f"{imatrix.path}: has no entry {name}: compute it with this model (of an MTP layer: imatrix --nextn), "
                "or list the experts yourself",
                "QK-E119",
            )
        if entry.counts.size != n:
            raise FormatError(f"{imatrix.path}: entry {name} has {entry.counts.size} of {n} experts", "QK-E119")
        if criterion == "frequency":
            scores[layer] = entry.counts.astype(np.float64)
        elif entry.saliency is None:
            raise RecipeError(
                f"{imatrix.path}: has no saliency of {name}: collect it by `quantkit imatrix --saliency`, or choose "
                "--by frequency",
                "QK-E202",
            )
        else:
            scores[layer] = entry.saliency.astype(np.float64) / np.maximum(entry.counts, 1)
    return scores


def _best(scores: F64, size: int, groups: int) -> tuple[int, ...]:
    """Return the experts with the largest scores, ascending, equally many of each group; of equal ones the first."""
    n = scores.size // groups
    best = [
        g * n + e
        for g in range(groups)
        for e in np.argsort(-scores[g * n : g * n + n], kind="stable")[: size // groups]
    ]
    return tuple(sorted(int(e) for e in best))
