"""A batch: the tokens of one step, their positions and sequences, and the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """``tokens``, ``positions`` and ``sequences``: int32 [n]; ``outputs``: the rows whose logits are requested.

    The tokens of a sequence are in order and continue it.
    """

    tokens: Ints
    positions: Ints
    sequences: Ints
    outputs: Ints

    def rows(self, outputs: bool) -> int:
        """Return the number of rows of a value: one a token, or one an output."""
        return len(self.outputs) if outputs else len(self.tokens)

    def check(self, n_ctx: int, n_seq: int, n_vocab: int) -> None:
        """Raise ValueError unless every number is below its bound (n_vocab 0: none): kernels do not check."""
        n = len(self.tokens)
        if not (n == len(self.positions) == len(self.sequences)):
            raise ValueError(f"{n} tokens, {len(self.positions)} positions and {len(self.sequences)} sequences")
        for name, numbers, end in (
            ("token", self.tokens, n_vocab or 1 << 31),
            ("position", self.positions, n_ctx),
            ("sequence", self.sequences, n_seq),
        ):
            if n and numbers.view(np.uint32).max() >= end:  # as unsigned, negative numbers are the largest
                raise ValueError(f"a {name} of this program is 0 to {end - 1}; got {numbers.min()} to {numbers.max()}")
