"""Weights of norms, refit to what norms take of products that are quantized.

What a norm gives by a weight of 1, x in the full-precision stream and y in the quantized one, differ by what is wrong
with the inputs. Of all factors f of the weight, column by column, f = sum(x y) / sum(y y) makes sum((x - f y)^2) least.
Only norms with no matrix behind them are refit, of queries and keys, and of what attention and feed-forward parts give:
matrices are corrected for all that is linear in a norm's columns. (Norm tweaking, Li et al. 2023, arXiv:2309.02784,
fits all of them, by gradients.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.model.observers import Input
from quantkit.model.ops import Norm
from quantkit.pipeline.feedback import Refitted
from quantkit.sequential.spill import Place, Spill
from quantkit.sequential.streams import Seen

F64 = npt.NDArray[np.float64]

#: Tokens whose rows are read at a time.
_TOKENS = 4096


@dataclass(eq=False)
class NormInputs:
    """What a norm with n weights takes. ``ready`` fills it in when its stage has run."""

    entry: str
    n: int
    norm: Norm
    #: Tokens, when the stage has run.
    tokens: tuple[int] | None = None
    _ready: tuple[Seen, Spill] | None = field(default=None, repr=False)

    def ready(self, seen: Seen, spill: Spill, tokens: int) -> None:
        """Take over what the stage left in files: rows of ``tokens`` tokens."""
        self.tokens, self._ready = (tokens,), (seen, spill)

    def drop(self) -> None:
        """Forget the stage: its files go."""
        self._ready = None

    def found(self) -> Refitted:
        """Return the factors of a weight that lacks least, and how much it lacks.

        Raises FormatError if what the norm takes is not finite.
        """
        xx, xy, yy = np.zeros(self.n), np.zeros(self.n), np.zeros(self.n)
        assert self.tokens is not None
        assert self._ready is not None
        seen, spill = self._ready
        for token in range(0, self.tokens[0], _TOKENS):
            count = min(_TOKENS, self.tokens[0] - token)
            x, y = (self._normalized(spill, place, token, count) for place in (seen.plain, seen.x))
            xx, xy, yy = xx + (x * x).sum(axis=0), xy + (x * y).sum(axis=0), yy + (y * y).sum(axis=0)
        if not np.isfinite(xx + yy).all():
            raise FormatError(f"what {self.entry} takes is not finite: leave out what text makes it so")
        factors = np.where(yy > 0, xy / np.where(yy > 0, yy, 1), 1).astype(np.float32)
        by = factors.astype(np.float64)
        return Refitted(factors, xx - 2 * xy + yy, xx - 2 * by * xy + by * by * yy)

    def _normalized(self, spill: Spill, place: Place, token: int, count: int) -> F64:
        """Return rows as the norm gives them by a weight of 1, float64 [rows, n]."""
        groups = spill.read(place, token, count).astype(np.float64).reshape(-1, self.norm.group)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.norm.kind == "layer":  # else "rms": those of "l2" have no weight
                groups -= groups.mean(axis=1, keepdims=True)
            groups /= np.sqrt(np.square(groups).mean(axis=1, keepdims=True) + self.norm.eps)
        return groups.reshape(-1, self.n)


def norm_inputs(item: Input) -> NormInputs:
    """Return what a norm takes, by its input (``model.observers.norms``)."""
    norm = item.at
    assert isinstance(norm, Norm)
    assert norm.weight is not None
    return NormInputs(item.names[0], norm.weight.tensor.shape[0], norm)
