"""How often the experts of a tensor are chosen, and how much of its error falls on those that hardly are.

A file stores all experts of a tensor in one type, so no search can give a rarely chosen expert fewer bits than others
of its tensor: groups are tensors, and what is measured of them has each expert as often as the text chooses it. What an
importance matrix tells beyond that is said beside the costs: where tokens go, and whether experts that few tokens of it
reach, so that they are encoded by a vague importance, matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.imatrix import Imatrix
from quantkit.pipeline.importance import Importance
from quantkit.pipeline.jobs import ErrorSums
from quantkit.sensitivity.file import Group

#: An expert is rare that is chosen less often than this share of the mean.
RARE = 0.5

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routing:
    """Tokens of each expert of a group's tensors, float64 [n_expert] by the name of the tensor."""

    tokens: Mapping[str, F64]

    def errors(self, sums: Mapping[str, Sequence[ErrorSums]]) -> list[float]:
        """Return the weighted error, each expert's as often as it is chosen, of rare experts and of all.

        ``sums``: of each expert, by the name of the tensor. Weights are means over an expert's own tokens.
        """
        rare = total = 0.0
        for name, tokens in self.tokens.items():
            each = np.array([found.weighted_error for found in sums[name]]) * tokens
            rare += float(each[_is_rare(tokens)].sum())
            total += float(each.sum())
        return [rare, total]

    def row(self) -> dict[str, Any]:
        """Return what ``settings["experts"]`` says of the group, without errors."""
        every = list(self.tokens.values())
        rare = [_is_rare(tokens) for tokens in every]
        total = sum(float(tokens.sum()) for tokens in every)
        of_rare = sum(float(tokens[which].sum()) for tokens, which in zip(every, rare, strict=True))
        shares = {name: np.round(tokens / tokens.sum(), 5).tolist() for name, tokens in self.tokens.items()}
        return {
            "shares": shares,
            "rare": int(sum(which.sum() for which in rare)),
            "never": int(sum((tokens == 0).sum() for tokens in every)),
            "rare_tokens": of_rare / total,
        }


def routings(groups: Iterable[Group], imatrix: Imatrix | None) -> dict[str, Routing]:
    """Return the routing of each group of experts, by name, that an importance matrix tells; a .dat tells none."""
    if imatrix is None or imatrix.format != "gguf":
        return {}
    importance, found = Importance(imatrix), dict[str, Routing]()
    for group in groups:
        tokens = {name: _tokens(importance, name, shape) for name, shape in group.tensors.items()}
        told = {name: each for name, each in tokens.items() if each is not None}
        if told:
            found[group.name] = Routing(told)
    return found


def _tokens(importance: Importance, name: str, shape: Sequence[int]) -> F64 | None:
    if len(shape) < 3 or shape[2] < 2:
        return None
    entry = importance.lookup(name, shape).entry
    counts = None if entry is None else importance.imatrix.entries[entry].counts
    return None if counts is None or counts.size != shape[2] or not counts.any() else counts.astype(np.float64)


def _is_rare(tokens: F64) -> npt.NDArray[np.bool_]:
    return np.asarray(tokens < RARE * tokens.mean())


def line_of(experts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what there is to say about the experts of all groups, in a line; "" without any."""
    if not experts:
        return ""
    of = f"{len(experts)} groups of experts"
    rare = [row for row in experts.values() if row["rare"]]
    if not rare:
        return f"{of}: none is chosen less than half as often as the mean"
    tokens = max(row["rare_tokens"] for row in rare)
    errors = [share for row in rare for share in row["rare_errors"].values()]
    text = f"{of}: in {len(rare)} some are chosen less than half as often as the mean; of these groups they get up to"
    return f"{text} {tokens:.1%} of the tokens" + (f" and have up to {max(errors):.1%} of the error" if errors else "")
