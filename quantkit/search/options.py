"""``SearchOptions``: target and constraints of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.arguments import Options
from quantkit.errors import RecipeError

#: Values of --runtime.
RUNTIMES = ("mainline", "ik", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(Options):
    """Target and constraints of a search; names as on the command line.

    One target: ``target_size`` (bytes of the file), ``target_bpw`` (bits per weight of the tensor data) or
    ``target_kld`` (predicted nats per token, in the least bytes).

    ``types``: what groups may become; without, all that were measured. ``runtime``: only what it loads: "mainline",
    "ik" or "both". ``allow`` (RE=TYPE,TYPE), ``at_least`` and ``at_most`` (RE=TYPE, by bits per weight) restrict groups
    with a tensor whose name matches; of each kind the first that matches counts. ``same``: classes, or parts of their
    names (up,gate), that have one type within a layer. ``merge_up_gate``: the file will have merged experts.

    ``max_read``: bytes of weights read for a generated token. ``min_speed``: tokens per second, by ``speeds``, the GB/s
    at which types are read; one that is not in the table counts as the slowest.

    ``imatrix`` and ``feedback`` are what the file will be quantized with; their names are part of its size. With
    ``feedback``, costs measured with it count where there are any. ``proxy``: which one stands for a divergence where
    none was measured. ``allow_requantize``: take tensors that are quantized already.

    ``time_limit`` (seconds) and ``gap`` (share of the divergence) end the solver before the optimum is proven.
    """

    target_size: int | None = None
    target_bpw: float | None = None
    target_kld: float | None = None

    types: tuple[str, ...] = ()
    runtime: str | None = None
    allow: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    at_most: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    merge_up_gate: bool = False
    max_read: int | None = None
    min_speed: float | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)

    imatrix: Path | None = None
    feedback: Path | None = None
    proxy: str | None = None
    allow_requantize: bool = False

    time_limit: float = 60.0
    gap: float = 0.0

    def check(self) -> None:
        """Raise RecipeError for values out of range."""
        if self.runtime not in (None, *RUNTIMES):
            raise RecipeError(f"--runtime {self.runtime}: there are {', '.join(RUNTIMES)}", "QK-E203")
        positive = ("target_size", "target_bpw", "target_kld", "max_read", "min_speed", "time_limit")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RecipeError(f"--{name.replace('_', '-')} {value} must be above 0", "QK-E203")
        if self.min_speed is not None and not self.speeds:
            raise RecipeError("--min-speed needs the speeds of types on this machine: --speeds FILE", "QK-E202")

    def check_target(self) -> None:
        """Raise RecipeError unless there is exactly one target."""
        targets = [name for name in ("target_size", "target_bpw", "target_kld") if getattr(self, name) is not None]
        if len(targets) != 1:
            raise RecipeError(
                "give one of --target-size, --target-bpw and --target-kld", "QK-E201" if targets else "QK-E202"
            )
