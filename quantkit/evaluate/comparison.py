"""Results of ``compare_models``: divergences of several models from one base, and their paired differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.evaluate.divergence import statistics_dict
from quantkit.evaluate.intervals import ChunkMean, alpha_of_look, chunk_mean
from quantkit.evaluate.statistics import KldSums
from quantkit.html_table import HtmlTable, Table, table_of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ModelDivergence:
    """A model's divergence from the base: its file, bytes, bits per weight, and statistics.

    by_text: of each text; by_position: of ranges of positions, first and end. totals f64 [n] and counts int64 [n]: sum
    of divergences and number of tokens of each window, in the order of evaluation.
    """

    model: Path
    nbytes: int
    bpw: float
    sums: KldSums
    by_text: tuple[KldSums, ...]
    by_position: dict[tuple[int, int], KldSums]
    totals: F64
    counts: I64

    @property
    def mean(self) -> ChunkMean:
        """The mean divergence, with the error by windows."""
        return chunk_mean(self.totals, self.counts)

    @property
    def bound(self) -> float:
        """The bound of the error of the mean divergence that the compact form causes."""
        return self.sums.bound / self.sums.n

    def minus(self, base: ModelDivergence) -> ChunkMean:
        """Return the mean difference of the divergences, paired by windows."""
        return chunk_mean(self.totals - base.totals, self.counts)


@dataclass(frozen=True)
class Stop:
    """The rule by which a run may stop early: the share, the number of looks, and whether the run met it.

    alpha: the probability that each look may spend.
    """

    share: float
    looks: tuple[int, ...]
    is_met: bool

    @property
    def alpha(self) -> float:
        return alpha_of_look(len(self.looks))


@dataclass(frozen=True, eq=False)
class Comparison(HtmlTable):
    """Result of ``compare_models``; models in the order of the arguments, texts by name and number of windows."""

    base: Path
    models: tuple[ModelDivergence, ...]
    texts: tuple[tuple[str, int], ...]
    n_ctx: int
    n_windows: int
    bos: int | None
    activations: str
    stop: Stop | None
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def alpha(self) -> float:
        """The probability with which an interval of the run misses the mean it is for."""
        return alpha_of_look(1) if self.stop is None else self.stop.alpha

    @property
    def ranking(self) -> list[ModelDivergence]:
        """The models, the least divergence first."""
        return sorted(self.models, key=lambda model: model.mean.value)

    def as_table(self) -> Table:
        """Return a row per model: bytes, bits per weight, divergence and its interval, ratio of perplexities, ..."""
        header = "model, bytes, bpw, KL divergence, standard error, PPL ratio, same top token, 99 % below"
        rows = [
            (
                *(m.model.name, m.nbytes, m.bpw, *m.sums.kld.mean, m.sums.ratio.value, m.sums.same_top_p.value),
                m.sums.kld_distribution()["99.0%"],
            )
            for m in self.models
        ]
        caption = f"divergence from {self.base.name}: {self.models[0].sums.n:,} tokens scored"
        return table_of(header, rows, caption)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``quantkit kld --base-model --json`` writes."""
        return {
            "base": str(self.base),
            "n_ctx": self.n_ctx,
            "n_chunks": self.n_windows,
            "bos": self.bos,
            "activations": self.activations,
            "texts": [{"name": name, "n_chunks": n} for name, n in self.texts],
            "seconds": self.seconds,
            "notes": list(self.notes),
            "until": None if self.stop is None else self._stop_dict(self.stop),
            "models": [self._model_dict(model) for model in self.models],
            "differences": [
                {"a": str(a.model), "b": str(b.model), **self._mean_dict(a.minus(b))}
                for a, b in combinations(self.ranking, 2)
            ],
        }

    def _stop_dict(self, stop: Stop) -> dict[str, Any]:
        return {"share": stop.share, "is_met": stop.is_met, "looks": list(stop.looks), "alpha": stop.alpha}

    def _mean_dict(self, mean: ChunkMean) -> dict[str, Any]:
        is_known = mean.n > 1
        return {
            "value": mean.value,
            "error": mean.error if is_known else None,
            "interval": list(mean.interval(self.alpha)) if is_known else None,
        }

    def _model_dict(self, model: ModelDivergence) -> dict[str, Any]:
        rows = zip(self.texts, model.by_text, strict=True)
        return {
            "model": str(model.model),
            "bytes": model.nbytes,
            "bpw": model.bpw,
            "n_scored": model.sums.n,
            **statistics_dict(model.sums),
            "kld_by_chunks": self._mean_dict(model.mean),
            "by_text": [{"name": name, "n_scored": s.n, **statistics_dict(s)} for (name, _), s in rows if s.n],
            "by_position": [
                {"first": first, "end": end, "n_scored": s.n, **statistics_dict(s)}
                for (first, end), s in model.by_position.items()
                if s.n
            ],
        }
