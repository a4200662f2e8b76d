"""Allocations quantized and measured: predictions decide which few, the divergence itself which of these."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.evaluate import Kld, kld
from quantkit.formats.logits import open_logits
from quantkit.pipeline.source import Source
from quantkit.quantize import plan_from, run_quantize
from quantkit.search.allocation import Allocation


@dataclass(frozen=True)
class Check:
    """Measure the ``count`` best allocations against ``base``, logits of the full-precision model.

    ``chunks``: only the first of the base. ``cache``: a folder of encoded tensors, which allocations share.
    ``folder``: where files are made, one after the other. ``keep``: where that of the best is kept.
    """

    count: int
    base: Path
    chunks: int | None = None
    threads: int | None = None
    cache: Path | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecipeError(f"--check {self.count} must be above 0")


def measured(
    allocations: Sequence[Allocation], source: Source, check: Check, progress: Callable[[str], None]
) -> Iterator[tuple[Allocation, Kld]]:
    """Quantize each allocation and yield it with its divergence; no file remains."""
    base = open_logits(check.base)
    with tempfile.TemporaryDirectory(prefix="quantkit-search-", dir=check.folder) as folder:
        cache = check.cache or Path(folder) / "cache"
        for no, each in enumerate(allocations, 1):
            path = Path(folder) / "candidate.gguf"
            plan = plan_from(source, path, each.type_name, each.options)
            run_quantize(plan, threads=check.threads, overwrite=True, cache=cache)
            found = kld(path, base, chunks=check.chunks, threads=check.threads)
            mean = found.sums.kld.mean
            progress(
                f"{no} of {len(allocations)}: predicted {each.kld:.5f}, measured {mean.value:.5f} ± {mean.error:.5f}"
            )
            yield each, found
