"""Token shares of experts, and the share of the error that falls on rarely chosen ones.

A file stores all experts of a tensor in one type, so no search can give a rare expert fewer bits than the others of its
tensor. Groups are tensors, and a measured cost weights each expert by its frequency in the text. The importance
matrix adds the routing of tokens, which shows whether experts with few tokens, whose importance is uncertain, matter.
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

#: An expert is rare if it gets less than this share of the mean number of tokens.
RARE = 0.5

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routing:
    """Tokens of each expert of a group's tensors, float64 [n_expert] by the name of the tensor."""

    tokens: Mapping[str, F64]

    def errors(self, sums: Mapping[str, Sequence[ErrorSums]]) -> list[float]:
        """Return the weighted error of rare experts and of all experts, each expert weighted by its tokens.

        Args:
            sums: errors of each expert, by tensor name. Weights are means over an expert's own tokens.
        """
        rare = total = 0.0
        for name, tokens in self.tokens.items():
            errors = np.array([expert.weighted_error for expert in sums[name]]) * tokens
            rare += float(errors[_is_rare(tokens)].sum())
            total += float(errors.sum())
        return [rare, total]

    def settings_row(self) -> dict[str, Any]:
        """Return the group's row of ``settings["experts"]``, without errors."""
        counts = list(self.tokens.values())
        rare = [_is_rare(tokens) for tokens in counts]
        total = sum(float(tokens.sum()) for tokens in counts)
        rare_tokens = sum(float(tokens[mask].sum()) for tokens, mask in zip(counts, rare, strict=True))
        shares = {name: np.round(tokens / tokens.sum(), 5).tolist() for name, tokens in self.tokens.items()}
        return {
            "shares": shares,
            "rare": int(sum(mask.sum() for mask in rare)),
            "never": int(sum((tokens == 0).sum() for tokens in counts)),
            "rare_tokens": rare_tokens / total,
        }


def routings(groups: Iterable[Group], imatrix: Imatrix | None) -> dict[str, Routing]:
    """Return the routing of each group of experts by name, from an importance matrix; a .dat has none."""
    if imatrix is None or imatrix.format != "gguf":
        return {}
    importance, result = Importance(imatrix), dict[str, Routing]()
    for group in groups:
        tokens = {name: _tokens(importance, name, shape) for name, shape in group.tensors.items()}
        counts = {name: count for name, count in tokens.items() if count is not None}
        if counts:
            result[group.name] = Routing(counts)
    return result


def _tokens(importance: Importance, name: str, shape: Sequence[int]) -> F64 | None:
    if len(shape) < 3 or shape[2] < 2:
        return None
    entry = importance.lookup(name, shape).entry
    counts = None if entry is None else importance.imatrix.entries[entry].counts
    return None if counts is None or counts.size != shape[2] or not counts.any() else counts.astype(np.float64)


def _is_rare(tokens: F64) -> npt.NDArray[np.bool_]:
    return np.asarray(tokens < RARE * tokens.mean())


def experts_summary(experts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line on the experts of all groups; "" if there are none."""
    if not experts:
        return ""
    subject = f"{len(experts)} groups of experts"
    rare = [row for row in experts.values() if row["rare"]]
    if not rare:
        return f"{subject}: no expert is selected less than half as often as the mean"
    tokens = max(row["rare_tokens"] for row in rare)
    errors = [share for row in rare for share in row["rare_errors"].values()]
    text = (
        f"{subject}: in {len(rare)} of them, some experts are selected less than half as often as the mean; they "
        f"receive up to"
    )
    return f"{text} {tokens:.1%} of the tokens" + (f" and cause up to {max(errors):.1%} of the error" if errors else "")
