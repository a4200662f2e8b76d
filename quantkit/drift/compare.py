"""The verb ``drift``: the embeddings of a quantized file beside those of its base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.activations import EXACT
from quantkit.arguments import checked
from quantkit.drift.statistics import MOST_NEIGHBOURS, Neighbours, cosines, mean_of, neighbours, percentiles
from quantkit.embed import Embeddings, embeddings_of, normalize_rows
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.passes import LoadOptions, choose_activations
from quantkit.evaluate.statistics import Distribution, Estimate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.kernels.first_run import working_seconds
from quantkit.progress import ProgressCallback

F64 = npt.NDArray[np.float64]

#: Neighbours of recall@k.
TOP = 10


@dataclass(frozen=True)
class Drift(HtmlTable):
    """The embeddings of a file compared with those of its base.

    cosines: float64 [texts], of the two embeddings of each text. neighbours: None for fewer than three texts.
    """

    model: Path
    base: Path
    pooling: str
    width: int
    cosines: F64
    neighbours: Neighbours | None
    seconds: float
    activations: str
    notes: tuple[str, ...]

    @property
    def mean(self) -> Estimate:
        """The mean cosine, with its standard error."""
        return mean_of(self.cosines)

    @property
    def worst(self) -> int:
        """The number of the text with the smallest cosine."""
        return int(np.argmin(self.cosines))

    @property
    def percentiles(self) -> Distribution:
        return percentiles(self.cosines)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit drift --json`` writes."""
        nearest = self.neighbours
        return {
            "model": str(self.model),
            "base": str(self.base),
            "pooling": self.pooling,
            "width": self.width,
            "n_texts": len(self.cosines),
            "activations": self.activations,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "cosine": self.mean.as_dict(),
            "cosine_percentiles": dict(self.percentiles.rows),
            "worst_text": self.worst,
            "neighbours": None if nearest is None else _neighbours_dict(nearest),
            "cosines": self.cosines.tolist(),
        }

    def as_table(self) -> Table:
        """Return the statistics, with standard errors."""
        rows: list[tuple[str, float, float | None]] = [("mean cosine", *self.mean)]
        if self.neighbours is not None:
            nearest = self.neighbours
            rows += [
                ("rank correlation of similarities", *nearest.rank_correlation),
                ("same nearest neighbour", nearest.same_nearest.value, None),
                (f"recall@{nearest.k}", *nearest.recall),
            ]
        rows += [(f"cosine, {label}", value, None) for label, value in self.percentiles.rows]
        caption = f"{self.model.name}: {len(self.cosines):,} texts, pooling {self.pooling}"
        return table_of("statistic, value, standard error", rows, caption)


def _neighbours_dict(nearest: Neighbours) -> dict[str, Any]:
    return {
        "n_texts": nearest.n,
        "k": nearest.k,
        "rank_correlation": nearest.rank_correlation.as_dict(),
        "same_nearest": nearest.same_nearest.value,
        "same_nearest_interval": list(nearest.same_nearest.interval()),
        "recall": nearest.recall.as_dict(),
    }


@checked
def drift(
    model: str | Path,
    base: str | Path | Embeddings,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    top: int = TOP,
    progress: ProgressCallback | None = None,
    **load: Unpack[LoadOptions],
) -> Drift:
    """Return the drift of a file's embeddings from those of its base, on the same texts.

    Texts longer than the model's context are cut to it.

    Args:
        model: path of a GGUF file: an encoder, or a decoder, whose rows after the last norm are pooled.
        base: path of the file to compare with, usually BF16 or F32; or its embeddings of these texts
            (``embeddings_of`` with the same options).
        texts: at least one; the files' tokens must be the same.
        pooling: mean, cls or last; None: the files', or mean.
        top: the number of neighbours of recall.
        progress: called with the number of texts, of one file after the model.
        load: options of quantkit.load. ``activations`` are exact by default, on GPUs those of the runtime.

    Raises:
        RecipeError: the files make embeddings of different kinds, or scores of a classifier.
        QuantkitError: an embedding is zero, NaN or infinite. Errors of ``quantkit.load``.
    """
    if top < 1:
        raise RecipeError(f"{top} neighbours: at least 1", "QK-E203")
    start = working_seconds()
    load, mode_notes = choose_activations(load, EXACT)
    first = base if isinstance(base, Embeddings) else embed_base(base, texts, pooling, progress, load)
    second = embeddings_of(model, texts, pooling=pooling, truncate=True, progress=progress, **load)
    _check_alike(first, second)
    a, b = normalize_rows(first), normalize_rows(second)
    limit = [f"neighbours: among the first {MOST_NEIGHBOURS:,} texts"] if len(texts) > MOST_NEIGHBOURS else []
    return Drift(
        model=second.model,
        base=first.model,
        pooling=second.pooling,
        width=a.shape[1],
        cosines=cosines(a, b),
        neighbours=neighbours(a, b, top),
        seconds=working_seconds() - start,
        activations=second.activations,
        notes=tuple(dict.fromkeys([*mode_notes, *first.notes, *second.notes, *limit])),
    )


def embed_base(
    base: str | Path,
    texts: Sequence[str],
    pooling: str | None = None,
    progress: ProgressCallback | None = None,
    load: LoadOptions | None = None,
) -> Embeddings:
    """Return the embeddings of a base, to compare several files with it."""
    options, _ = choose_activations(load or {}, EXACT)
    return embeddings_of(base, texts, pooling=pooling, truncate=True, progress=progress, **options)


def _check_alike(base: Embeddings, model: Embeddings) -> None:
    """Raise RecipeError unless two files' embeddings can be compared."""
    if "rank" in (base.pooling, model.pooling):
        raise RecipeError(
            f"{base.model}: a classifier gives scores, not embeddings: choose --pooling cls, mean or last", "QK-E203"
        )
    if base.pooling != model.pooling:
        raise RecipeError(
            f"{base.model} pools by {base.pooling}, {model.model} by {model.pooling}: choose one by --pooling",
            "QK-E207",
        )
    if base.rows.shape != model.rows.shape:
        raise QuantkitError(
            f"embeddings of {base.model} have {base.rows.shape[1]} columns, those of {model.model} "
            f"{model.rows.shape[1]}: use files of one model",
            "QK-E207",
        )
