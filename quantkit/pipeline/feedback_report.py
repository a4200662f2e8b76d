"""Report of error feedback: losses before and after by tensor and matrix, tokens, and tensors without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.names import tensor_class
from quantkit.pipeline.facts import layer_of
from quantkit.pipeline.jobs import MatrixLoss
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedTensor, RowSlice

_FEW_TOKENS = "fewer tokens than columns"


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """A matrix of a tensor: an expert, a head, or all of it.

    ``damping`` is None if there were too few tokens. Losses are those of the reference's bytes and of the written
    bytes, in the metric of the damped covariance. ``rows``: of the matrix; ``better``: rows with a lower loss than the
    reference's.
    """

    part: int
    matrix: int
    tokens: int
    columns: int
    damping: float | None
    rows: int
    better: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A tensor that is encoded with feedback; ``layer`` is -1 outside of layers.

    ``uniform``: its columns have equal weights, as those of embeddings, which have no covariance.
    """

    name: str
    kind: str
    layer: int
    type: str
    uniform: bool
    matrices: tuple[MatrixReport, ...]

    @property
    def before(self) -> float:
        return sum(m.before for m in self.matrices)

    @property
    def after(self) -> float:
        return sum(m.after for m in self.matrices)


@dataclass(frozen=True)
class FeedbackReport:
    """Tensors with feedback, and the reasons why other encoded ones have none, by name and type."""

    tensors: tuple[TensorReport, ...]
    without: tuple[tuple[str, str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "tensors": [
                {
                    "name": t.name,
                    "class": t.kind,
                    "layer": None if t.layer < 0 else t.layer,
                    "type": t.type,
                    "columns_alike": t.uniform,
                    "loss_before": t.before,
                    "loss_after": t.after,
                    "matrices": [_matrix_dict(m) for m in t.matrices],
                }
                for t in self.tensors
            ],
            "without": [{"name": name, "type": kind, "why": reason} for name, kind, reason in self.without],
        }


def _matrix_dict(m: MatrixReport) -> dict[str, Any]:
    return {
        "part": m.part,
        "matrix": m.matrix,
        "tokens": m.tokens,
        "damping": m.damping,
        "why_without": _FEW_TOKENS if m.damping is None else None,
        "rows": m.rows,
        "rows_better": m.better,
        "loss_before": m.before,
        "loss_after": m.after,
    }


def feedback_report(plan: Plan, losses: Mapping[str, Sequence[MatrixLoss]]) -> FeedbackReport | None:
    """Return the report of a run with these ``losses``; None for a plan without feedback."""
    names = {name for name, _ in plan.without_feedback}
    tensors = [tensor for tensor in plan.tensors if tensor.name not in names and _has_feedback(tensor)]
    if not tensors and not plan.without_feedback:
        return None
    types = {tensor.name: tensor.type.name for tensor in plan.tensors}
    without = tuple((name, types.get(name, ""), reason) for name, reason in plan.without_feedback)
    return FeedbackReport(tuple(_tensor(tensor, losses.get(tensor.name, ())) for tensor in tensors), without)


def _has_feedback(tensor: PlannedTensor) -> bool:
    return tensor.type.is_quantized and any(part.inputs is not None for part in tensor.parts)


def _tensor(tensor: PlannedTensor, losses: Sequence[MatrixLoss]) -> TensorReport:
    losses_by_matrix = {(loss.part, loss.matrix): loss for loss in losses}
    matrices: list[MatrixReport] = []
    for number, part in enumerate(tensor.parts):
        matrices += _matrices(number, part, losses_by_matrix)
    uniform = any(part.inputs is not None and part.inputs.is_uniform for part in tensor.parts)
    kind = tensor_class(tensor.name)
    return TensorReport(tensor.name, kind, layer_of(tensor.name), tensor.type.name, uniform, tuple(matrices))


def _matrices(number: int, part: RowSlice, losses: Mapping[tuple[int, int], MatrixLoss]) -> Iterable[MatrixReport]:
    if part.inputs is None:
        return
    n, tokens = part.inputs.n, part.inputs.tokens
    rows = part.rows * part.values // n
    for matrix in range(part.inputs.matrices):
        loss = losses.get((number, matrix), MatrixLoss(number, matrix, tokens[matrix] if tokens else 0, 0, 0, 0))
        damping = part.inputs.damping_by(loss.tokens)
        yield MatrixReport(number, matrix, loss.tokens, n, damping, rows, int(loss.rows), loss.before, loss.after)
