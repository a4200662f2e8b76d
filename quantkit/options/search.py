"""The options of `search`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.arguments import Options, option
from quantkit.errors import RecipeError
from quantkit.model.kv_types import KV_TYPES

#: Values of --runtime.
RUNTIMES = ("mainline", "ik", "both")
#: Values of --aim.
AIMS = ("quality", "balance", "speed")
#: Headings of --help.
MODEL = "Model"
TARGET = "Target (exactly one)"
LIMITS = "Constraints"
SOLVER = "Solver"
DEVICES = "Devices (--fit)"


def _limit(help: str, metavar: str) -> Any:  # noqa: A002
    return option((), help, LIMITS, kind="rule", metavar=metavar)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(Options):
    """Target and constraints of a search; names as on the command line. Each option is declared here alone.

    ``target_size`` and ``max_read`` are bytes. ``allow``, ``at_least`` and ``at_most`` restrict groups with a tensor
    whose name matches; of each kind the first that matches counts. ``speeds``: GB/s at which types are read; one that
    is not in the table counts as the slowest. The names of ``imatrix`` and ``feedback`` are part of the file's size.
    """

    target_size: int | None = option(None, "Maximum size of the file: 12.3G, 11.5GiB.", TARGET, kind="size")
    target_bpw: float | None = option(None, "Maximum bits per weight.", TARGET)
    target_kld: float | None = option(None, "Maximum predicted divergence; finds the smallest file.", TARGET)

    fit: tuple[int, ...] = option(
        (), "Memory of each GPU, then of the host: 24G,64G.", TARGET, kind="sizes", metavar="SIZE,.."
    )

    types: tuple[str, ...] = option(
        (), "Types to choose from.  [default: all measured ones]", LIMITS, kind="types", metavar="TYPE,.."
    )
    runtime: str | None = option(None, "Use only types that this runtime loads, or both do.", LIMITS, choices=RUNTIMES)
    allow: tuple[str, ...] = _limit("Types allowed for matching tensors; the first match decides.", "RE=TYPE,..")
    at_least: tuple[str, ...] = _limit("Minimum bits per weight of matching tensors: those of TYPE.", "RE=TYPE")
    at_most: tuple[str, ...] = _limit("Maximum bits per weight of matching tensors: those of TYPE.", "RE=TYPE")
    same: tuple[str, ...] = option(
        (),
        "Give tensor classes the same type within a layer: up,gate or q,k,v.",
        LIMITS,
        metavar="A,B",
    )
    max_read: int | None = option(
        None, "Maximum bytes of weights read per token; experts: those in use.", LIMITS, kind="size"
    )
    min_speed: float | None = option(
        None, "Minimum tokens per second, by the time of reading weights on this machine.", LIMITS, metavar="T/S"
    )
    speeds: Mapping[str, float] = field(default_factory=dict)
    proxy: str | None = option(None, "Proxy for divergences that were not measured.", LIMITS, metavar="NAME")

    imatrix: Path | None = option(
        None, "Importance matrix for quantizing.  [default: that of -s]", MODEL, kind="imatrix"
    )
    feedback: Path | None = option(
        None, "Covariances for quantizing with error feedback, as measured.", MODEL, metavar="COV.gguf"
    )
    merge_up_gate: bool = option(False, "Merge up and gate experts when quantizing.", MODEL)
    allow_requantize: bool = option(False, "Allow tensors that are quantized already.", MODEL)

    time_limit: float = option(60.0, "Time limit for each allocation.", SOLVER, metavar="SECONDS")
    gap: float = option(0.0, "Stop at this relative distance from the optimum.", SOLVER, kind="share")

    aim: str = option("quality", "Criterion to choose among the allocations that fit.", DEVICES, choices=AIMS)
    max_kld: float | None = option(
        None,
        "Maximum predicted divergence for speed and balance.  [default: 1.5 times the least that fits]",
        DEVICES,
        metavar="NATS",
    )
    bandwidth: tuple[int, ...] = option(
        (),
        "Bytes per second that each device reads: 936G,80G; without that of the host, speeds of types are measured.",
        DEVICES,
        kind="sizes",
        metavar="B/S,..",
    )
    margin: int | None = option(
        None, "Memory of each GPU that must remain free.  [default: 1GiB]", DEVICES, kind="size"
    )
    ctx: int = option(
        0,
        "Context of all sequences (32k).  [default: that of training]",
        DEVICES,
        kind="tokens",
        flags=("-c", "--ctx", "--ctx-size"),
        metavar="N",
    )
    ctk: str = option(
        "f16", "Type of the K cache.", DEVICES, choices=KV_TYPES, flags=("-ctk", "--ctk", "--cache-type-k")
    )
    ctv: str = option(
        "f16", "Type of the V cache.", DEVICES, choices=KV_TYPES, flags=("-ctv", "--ctv", "--cache-type-v")
    )
    parallel: int = option(1, "Parallel sequences.", DEVICES, least=1, flags=("-np", "--parallel"))
    ubatch: int = option(512, "Physical batch size.", DEVICES, least=1, flags=("-ub", "--ubatch-size"))

    def check(self) -> None:
        """Raise RecipeError for values out of range."""
        if self.aim not in AIMS:
            raise RecipeError(f"--aim {self.aim}: choose one of {', '.join(AIMS)}", "QK-E203")
        if self.runtime not in (None, *RUNTIMES):
            raise RecipeError(f"--runtime {self.runtime}: choose one of {', '.join(RUNTIMES)}", "QK-E203")
        positive = ("target_size", "target_bpw", "target_kld", "max_read", "min_speed", "time_limit", "max_kld")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RecipeError(f"--{name.replace('_', '-')} {value} must be above 0", "QK-E203")
        if self.min_speed is not None and not self.speeds:
            raise RecipeError("--min-speed needs the speeds of types on this machine: --speeds FILE", "QK-E202")
        self._check_devices()

    def _check_devices(self) -> None:
        n = len(self.fit)
        for name, sizes in (("fit", self.fit), ("bandwidth", self.bandwidth)):
            if any(size <= 0 for size in sizes):
                raise RecipeError(f"--{name} {','.join(map(str, sizes))}: sizes must be above 0", "QK-E203")
        if not n:
            return
        if self.min_speed is not None:
            raise RecipeError("--min-speed counts memory alone: omit it, and give --fit with --aim speed", "QK-E201")
        if self.bandwidth and len(self.bandwidth) not in (n, n - 1):
            raise RecipeError(
                f"--bandwidth has {len(self.bandwidth)} devices, --fit {n}: give one number for each, GPUs first",
                "QK-E203",
            )
        if self.aim != "quality" and not self.has_bandwidths:
            raise RecipeError(
                f"--aim {self.aim} needs the speed of every device: --bandwidth, of the host also --speeds FILE",
                "QK-E202",
            )

    @property
    def has_bandwidths(self) -> bool:
        """Whether the speed of every device of --fit is known."""
        n = len(self.bandwidth)
        return n == len(self.fit) or n == len(self.fit) - 1 and bool(self.speeds)

    def check_target(self) -> None:
        """Raise RecipeError unless there is exactly one target."""
        if len(targets := self.targets) != 1:
            raise RecipeError(
                "give one of --target-size, --target-bpw, --target-kld and --fit", "QK-E201" if targets else "QK-E202"
            )

    @property
    def targets(self) -> list[str]:
        """Names of the targets that are given."""
        names = ("target_size", "target_bpw", "target_kld", "fit")
        return [name for name in names if getattr(self, name) not in (None, ())]
