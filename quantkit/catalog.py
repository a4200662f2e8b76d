"""The tensor types and presets of quantkit: ``quantkit types``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.presets import PRESETS, RULES, Preset
from quantkit.pipeline.quality import QUALITY
from quantkit.pipeline.runtimes import TREES
from quantkit.types import TYPES, TensorType


@dataclass(frozen=True, slots=True)
class TypeRow:
    """A tensor type, with the figures of a fixed sample.

    ``error``: relative RMS error of the sample's weights, weighted by importance, in percent; ``speed`` of encoding:
    "fast", "medium" (below 200 million weights per second and core) or "slow" (below 20); both None if not measured.
    ``encoder``, ``decoder``: whether this version has one.
    """

    type: TensorType
    error: float | None
    speed: str | None
    encoder: bool
    decoder: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            **asdict(self.type),
            "bits_per_weight": self.type.bpw,
            "weighted_error": self.error,
            "encoding": self.speed,
            "encoder": self.encoder,
            "decoder": self.decoder,
        }


@dataclass(frozen=True)
class TypeCatalog(Sequence[TypeRow], HtmlTable):
    """Tensor types in the order of their ids."""

    rows: tuple[TypeRow, ...]

    @overload
    def __getitem__(self, index: int) -> TypeRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TypeRow, ...]: ...
    def __getitem__(self, index: int | slice) -> TypeRow | tuple[TypeRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TypeRow]:
        return iter(self.rows)

    def as_table(self) -> Table:
        """Return size, error in percent and speed by type."""
        rows = (
            (r.type.id, r.type.name, r.type.bpw, r.type.block, r.type.trees, r.error, r.speed, r.type.imatrix)
            for r in self.rows
        )
        return table_of("id, type, bpw, block, trees, error, speed, imatrix", rows)


@checked
def types(tree: str | None = None) -> TypeCatalog:
    """Return the tensor types, with size, error and speed of each.

    Args:
        tree: "llama.cpp" or "ik_llama.cpp" (also "mainline", "ik"): only types that it has; None: all.

    Raises RecipeError for another project.
    """
    tree = _tree_of(tree)
    return TypeCatalog(tuple(_row(t) for t in TYPES if tree is None or t.is_in(tree)))


@checked
def presets(tree: str | None = None) -> tuple[Preset, ...]:
    """Return the presets, the names that TYPE of ``quantize`` may have beside a tensor type; ``tree`` as for ``types``.

    Raises RecipeError for another project.
    """
    tree = _tree_of(tree)
    return tuple(p for p in PRESETS if tree in (None, p.trees) or p.trees == "both")


def _tree_of(project: str | None) -> str | None:
    tree = None if project is None else TREES.get(project, project)
    if tree not in (None, *RULES):
        raise RecipeError(f"unknown project {project!r}: choose {' or '.join(TREES)}", "QK-E203")
    return tree


def _row(t: TensorType) -> TypeRow:
    quality = QUALITY.get(t.name)
    error, speed = (None, None) if quality is None else quality
    return TypeRow(t, error, speed, has_encoder(t), has_decoder(decoded_as(t)))
