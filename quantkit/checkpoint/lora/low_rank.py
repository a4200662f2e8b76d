"""Weights of low rank: B @ A, never computed unless they are merged.

A ``LowRank`` goes through the rules of an architecture like any other tensor. The result is again a product, and
``factors_of`` returns its factors: moving columns moves those of A, moving rows those of B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.checkpoint.expressions import (
    F32,
    TYPE_F32,
    Concatenated,
    Expression,
    Gathered,
    Multiplied,
    Shaped,
    Transposed,
    as_floats,
    cast,
    concatenate,
    read_f32,
    size_of,
    stack,
)
from quantkit.checkpoint.lora.row_update import RowUpdate
from quantkit.checkpoint.quantized.rows import RowWise
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType


@dataclass(frozen=True)
class LowRank(RowWise):
    """``b`` [rows, rank] @ ``a`` [rank, columns] * alpha / rank * strength.

    ``strength``: set by the user. ``of_embeddings``: of a weight whose rows are looked up.
    """

    a: Expression
    b: Expression
    alpha: float
    strength: float = 1.0
    of_embeddings: bool = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.b.shape[0], self.a.shape[1]

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """The factor of the product: PEFT's scaling times the strength."""
        return self.alpha / self.rank * self.strength

    def fill(self, first: int, rows: U8) -> None:
        out = rows.view(np.float32)
        out[...] = 0
        self.add_to(out, first)

    def add_to(self, x: F32, first: int) -> None:
        """Add rows from ``first`` on to ``x`` [n, columns]: see ``add_low_rank``."""
        from quantkit.kernels.cpu.low_rank import add_low_rank

        add_low_rank(x, _compute_once(_strips, self.a), _rows(self.b, first, len(x)), np.float32(self.scale))

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.a.parts()
        yield from self.b.parts()


def _rows(x: Expression, first: int, n: int) -> F32:
    """Return rows of a factor; a transposed factor is read completely, which is cheaper."""
    if isinstance(x, Transposed):
        return np.ascontiguousarray(_compute_once(_read_factor, x)[first : first + n])
    return _check_finite(x, read_f32(x, first * x.shape[1], n * x.shape[1])).reshape(n, x.shape[1])


def _read_factor(x: Expression) -> F32:
    return _check_finite(x, read_f32(x, 0, size_of(x))).reshape(x.shape)


def _check_finite(x: Expression, values: F32) -> F32:
    """Return values of a factor. Raises FormatError if not finite, so that the error names the factor."""
    if not np.isfinite(values).all():
        part = next(x.parts())
        raise FormatError(
            f"{part.path}: tensor {short(part.name)}: a value is infinite or NaN: the adapter is damaged", "QK-E117"
        )
    return values


def _strips(x: Expression) -> F32:
    from quantkit.kernels.cpu.low_rank import strips

    return strips(_read_factor(x))


def _compute_once(make: Callable[[Expression], F32], x: Expression) -> F32:
    """Return ``make`` of a factor; the last results are cached, because every range of rows needs them again."""
    part = next(x.parts())
    stat = part.path.stat()
    factor: Any = x  # frozen, so it can be a key
    return _compute_factor(make, factor, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _compute_factor(make: Callable[[Expression], F32], x: Any, changed: int, size: int) -> F32:
    return make(x)


@dataclass(frozen=True)
class LowRankSum(RowUpdate):
    """A weight with products of low rank added, one after another, in float32."""

    products: tuple[LowRank, ...]

    def update(self, first: int, values: F32) -> None:
        for item in self.products:
            item.add_to(values, first)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.x.parts()
        for item in self.products:
            yield from item.parts()


def add_products(x: Expression, products: tuple[LowRank, ...]) -> Expression:
    """Return a weight with products of low rank added; of blocks, the floats that they stand for."""
    return LowRankSum(as_floats(x), products)


def products_in(x: Expression) -> Iterator[LowRank]:
    """Yield the low-rank products in an expression."""
    if isinstance(x, LowRank):
        yield x
    elif isinstance(x, Concatenated):
        for item in x.xs:
            yield from products_in(item)
    elif isinstance(x, (Gathered, Shaped, Transposed)):
        yield from products_in(x.x)


def factors_of(x: Expression, alpha: float) -> tuple[Expression, Expression]:
    """Return A and B of an expression over low-rank products, such that x = B @ A * alpha / rank.

    Args:
        x: of shape [.., rows, columns].
        alpha: that of the file, common to all; a product with another alpha has the ratio in B.

    Raises:
        ValueError: it is not a product of two factors with the same scale.
    """
    if isinstance(x, LowRank):
        weight_alpha = x.alpha * x.strength
        return x.a, x.b if weight_alpha == alpha else Multiplied(cast(x.b, TYPE_F32), weight_alpha / alpha)
    if isinstance(x, Gathered):
        a, b = factors_of(x.x, alpha)
        side = len(x.shape) - x.axis
        if side == 1:
            return Gathered(a, x.axis, x.index), b
        return (a if side == 2 else Gathered(a, x.axis, x.index)), Gathered(b, x.axis, x.index)
    if isinstance(x, Transposed):
        a, b = factors_of(x.x, alpha)
        return Transposed(b), Transposed(a)
    if isinstance(x, Concatenated) and x.axis == 0:
        pairs = [factors_of(item, alpha) for item in x.xs]
        ranks = sorted({a.shape[-2] for a, _ in pairs})
        if len(ranks) > 1:
            raise ValueError(
                f"its parts have the ranks {', '.join(map(str, ranks))}, but llama.cpp needs the same rank for all"
            )
        a_parts = [a for a, _ in pairs]
        b_parts = [b for _, b in pairs]
        if len(x.shape) > len(x.xs[0].shape):
            return stack(a_parts), stack(b_parts)
        if len(x.shape) > 2:
            return concatenate(a_parts), concatenate(b_parts)
    raise ValueError(
        "after this architecture's transformation it is not a product of two matrices, which llama.cpp needs"
    )
