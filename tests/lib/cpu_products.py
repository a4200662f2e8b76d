"""Shared by tests of products on the CPU: rows of activations, from the operation that converts them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.matmul import activations
from quantkit.kernels.cpu.matmul.activations import ROW_GAP, SCALES, SUMS, UNIT_BYTES, row_bytes
from quantkit.kernels.formats import activation_format
from quantkit.types import TensorType

TEAMS = {n: Team(n) for n in (1, 2, 3)}


def aligned(n: int) -> Any:
    space = np.zeros(n + 64, np.uint8)
    start = -address_of(space) % 64
    return space[start : start + n]


def in_order(values: Any) -> Any:
    """Return values stored by words (unpack/lanes.py: by_words), [rows, units * 256], in order."""
    words = values.reshape(len(values), -1, 4, 4, 4, 4)  # unit, word g, 16 bytes i, vector v, byte
    return words.transpose(0, 1, 4, 3, 2, 5).reshape(len(values), -1)


class Rows:
    """Rows of x, ``per`` for each token, in the activation format of a type."""

    def __init__(self, t: TensorType, x: Any, threads: int = 1, per: int = 1) -> None:
        self.x, self.kind, n = x, activation_format(t), x.shape[1]
        self.stride = row_bytes(self.kind, n)
        self.bytes = aligned(len(x) * self.stride)
        if self.kind == "f32":
            self.bytes[:] = x.view(np.uint8).reshape(-1)
            return
        team, tokens = TEAMS[threads], len(x) // per
        batch = Batch(team, tokens)
        batch.set(np.zeros(tokens, np.int32))
        quantizer = activations.quantize(self.kind)
        block = quantizer.block(
            batch=batch.address, x=address_of(x), out=address_of(self.bytes), n=n, rows_of=0, per=per
        )
        Tape(team, batch, [(quantizer, block)]).run()

    def part(self, byte: int, count: int, dtype: Any) -> Any:
        """Return a field of all units, [rows, units * count]."""
        units = self.bytes.reshape(len(self.x), -1)[:, :-ROW_GAP].reshape(len(self.x), -1, UNIT_BYTES)
        size = count * np.dtype(dtype).itemsize
        return np.ascontiguousarray(units[:, :, byte : byte + size]).view(dtype).reshape(len(self.x), -1)

    def values(self) -> tuple[Any, Any]:
        """Return the decoded rows and their excess (matmul_cases.products), float64."""
        if not self.kind.startswith("q8"):
            return self.bytes.view(np.float32).reshape(self.x.shape).astype(np.float64), np.zeros((len(self.x), 0))
        levels, scales = self.part(0, 256, np.int8).astype(np.float64), self.part(SCALES, 16, np.float32)
        values = levels * np.repeat(scales, 16, axis=1)
        if self.kind == "q8_k64":
            values = in_order(values)
        values = values[:, : self.x.shape[1]]
        if self.kind != "q8_1":
            return values, np.zeros((len(self.x), 0))
        sums = values.reshape(len(values), -1, 32).sum(2)
        return values, sums - self.part(SUMS, 16, np.float32)[:, : 2 * sums.shape[1] : 2]
