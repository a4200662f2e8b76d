"""Norm weights refit to quantized inputs.

With a weight of 1 the norm's outputs are x in the full-precision stream and y in the quantized one. Column by column,
f = sum(x y) / sum(y y) minimizes sum((x - f y)^2). Only norms without a following matrix are refit: those of queries
and keys, and those of attention and feed-forward outputs; elsewhere the matrices are corrected for anything linear in a
norm's columns. (Norm tweaking, Li et al. 2023, arXiv:2309.02784, fits all of them by gradients.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.model.observers import Input
from quantkit.model.ops import Norm
from quantkit.pipeline.feedback import NormFactors
from quantkit.sequential.spill import Place, Spill
from quantkit.sequential.streams import SpilledInput

F64 = npt.NDArray[np.float64]

#: Tokens per batch.
_TOKENS = 4096


@dataclass(eq=False)
class NormInputs:
    """Inputs of a norm with n weights, available after ``attach``."""

    entry: str
    n: int
    norm: Norm
    #: Tokens, when the stage has run.
    tokens: tuple[int] | None = None
    _stage: tuple[SpilledInput, Spill] | None = field(default=None, repr=False)

    def attach(self, source: SpilledInput, spill: Spill, tokens: int) -> None:
        """Take over the rows of ``tokens`` tokens that the stage wrote to files."""
        self.tokens, self._stage = (tokens,), (source, spill)

    def drop(self) -> None:
        """Release the stage, whose files are removed."""
        self._stage = None

    def solve(self) -> NormFactors:
        """Return the least-squares factors of a weight, and the squared error before and after.

        Raises FormatError if the inputs are not finite.
        """
        xx = np.zeros(self.n)
        xy = np.zeros(self.n)
        yy = np.zeros(self.n)
        assert self.tokens is not None
        assert self._stage is not None
        item, spill = self._stage
        for token in range(0, self.tokens[0], _TOKENS):
            count = min(_TOKENS, self.tokens[0] - token)
            x, y = (self._normalized(spill, place, token, count) for place in (item.plain, item.x))
            xx = xx + (x * x).sum(axis=0)
            xy = xy + (x * y).sum(axis=0)
            yy = yy + (y * y).sum(axis=0)
        if not np.isfinite(xx + yy).all():
            raise FormatError(f"what {self.entry} takes is not finite: leave out what text makes it so", "QK-E108")
        factors = np.where(yy > 0, xy / np.where(yy > 0, yy, 1), 1).astype(np.float32)
        f = factors.astype(np.float64)
        return NormFactors(factors, xx - 2 * xy + yy, xx - 2 * f * xy + f * f * yy)

    def _normalized(self, spill: Spill, place: Place, token: int, count: int) -> F64:
        """Return the norm's outputs with a weight of 1, float64 [rows, n]."""
        groups = spill.read(place, token, count).astype(np.float64).reshape(-1, self.norm.group)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.norm.kind == "layer":  # else "rms": those of "l2" have no weight
                groups -= groups.mean(axis=1, keepdims=True)
            groups /= np.sqrt(np.square(groups).mean(axis=1, keepdims=True) + self.norm.eps)
        return groups.reshape(-1, self.n)


def norm_inputs(item: Input) -> NormInputs:
    """Return the inputs of a norm (``model.observers.norms``)."""
    norm = item.reader
    assert isinstance(norm, Norm)
    assert norm.weight is not None
    return NormInputs(item.names[0], norm.weight.tensor.shape[0], norm)
