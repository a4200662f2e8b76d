"""A batch: the tokens of one step, where each stands, and which logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """``tokens``, ``positions`` and ``sequences``: int32 [n]; ``outputs``: the rows whose logits are wanted.

    The tokens of a sequence stand in order and follow what the sequence holds already.
    """

    tokens: Ints
    positions: Ints
    sequences: Ints
    outputs: Ints

    def rows(self, outputs: bool) -> int:
        """Return the number of rows of a value: one a token, or one an output."""
        return len(self.outputs) if outputs else len(self.tokens)
