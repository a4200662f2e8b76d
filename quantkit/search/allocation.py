"""Results of a search, and the measurement of the best: predictions choose a few, measured divergences the best."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.evaluate import Kld, kld
from quantkit.fit import Device
from quantkit.formats.logits import open_logits
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.recipe import Rule
from quantkit.pipeline.source import Source
from quantkit.quantize import QuantizeOptions, plan_from, run_quantize
from quantkit.search.space import Footprint
from quantkit.types import TensorType


@dataclass(frozen=True)
class DeviceFit:
    """Memory of an allocation by device, and the command that places it so.

    ``seconds``: predicted time to read the weights of a token; None: the speed of a device is unknown.
    """

    ctx: int
    gpu_layers: int
    cpu_moe: int
    tensor_split: tuple[int, ...]
    devices: tuple[Device, ...]
    command: str
    seconds: float | None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else 1 / self.seconds


@dataclass(frozen=True)
class Allocation:
    """A type for every group, by name, and the file that it gives.

    ``kld``: predicted nats per token. ``footprint``: of all tensors. ``type_name``: TYPE of the plan. ``gap``: upper
    bound of the optimum's lower divergence, if the solver ran out of time. ``picks``: index of the choice of each
    choice group. ``check``: the measured divergence. ``fit``: its memory, of a search with ``fit``.
    """

    types: Mapping[str, TensorType]
    kld: float
    footprint: Footprint
    rules: tuple[Rule, ...]
    type_name: str
    options: QuantizeOptions
    plan: Plan
    gap: float
    picks: tuple[int, ...]
    check: Kld | None = None
    fit: DeviceFit | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.plan.nbytes

    @property
    def bpw(self) -> float:
        return self.plan.bpw


@dataclass(frozen=True)
class Check:
    """Settings for the measurement of the ``count`` best allocations against ``base``, the base logits.

    ``chunks``: number of chunks; None: all of the base. ``cache``: folder of encoded tensors, which allocations share.
    ``folder``: folder of temporary files. ``activations``: None: those of the sensitivities.
    """

    count: int
    base: Path
    chunks: int | None = None
    threads: int | None = None
    cache: Path | None = None
    folder: Path | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecipeError(f"--check {self.count} must be greater than 0", "QK-E203")


def measure(
    allocations: Sequence[Allocation],
    source: Source,
    check: Check,
    activations: str,
    progress: Callable[[str], object],
) -> Iterator[tuple[Allocation, Kld]]:
    """Quantize each allocation and yield it with its measured divergence; the files are removed."""
    base = open_logits(check.base)
    with tempfile.TemporaryDirectory(prefix="quantkit-search-", dir=check.folder) as folder:
        cache = check.cache or Path(folder) / "cache"
        for number, allocation in enumerate(allocations, 1):
            path = Path(folder) / "candidate.gguf"
            plan = plan_from(source, path, allocation.type_name, allocation.options)
            run_quantize(plan, threads=check.threads, overwrite=True, cache=cache)
            result = kld(path, base, chunks=check.chunks, threads=check.threads, activations=activations)
            mean = result.sums.kld.mean
            prediction = f"{number} of {len(allocations)}: predicted {allocation.kld:.5f}"
            progress(f"{prediction}, measured {mean.text(5)} (standard error)")
            yield allocation, result
