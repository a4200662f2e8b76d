"""Quantize: a plan, carried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from quantkit.cpus import available_cpus
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import DEFAULT_MAX_RAM, RunOptions, RunResult, run_plan
from quantkit.quantize.options import QuantizeOptions, size_of
from quantkit.quantize.plan import plan_quantize


@dataclass(frozen=True)
class QuantizeResult:
    """What was written: the plan it followed, and how the run went."""

    plan: Plan
    run: RunResult
    threads: int

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.plan.shards)


def quantize(
    source: str | Path,
    output: str | Path | None,
    type: str,  # noqa: A002 - the word of the command line
    options: QuantizeOptions | None = None,
    *,
    max_ram: int | str = DEFAULT_MAX_RAM,
    **run: Unpack[RunOptions],
) -> QuantizeResult:
    """Quantize ``source`` to ``output``.

    Args:
        source: a GGUF file, or any shard of a split model.
        output: the file to write; None for ggml-model-TYPE.gguf beside the source, as llama-quantize.
        type: a preset, its number, or a tensor type, in any case; with ``options.repack`` or ``unrepack`` only a name
            for the output, also "REPACK" or "UNREPACK"; with ``options.like`` "LIKE".
        options: everything else that decides what is written.
        max_ram: bytes (or "2G") that the workers' buffers may take together.
        run: threads, resume, overwrite, measure_error, observer: see ``RunOptions``.

    Raises:
        QuantkitError: see quantkit.errors; nothing stands under the final name then.
    """
    return run_quantize(plan_quantize(source, output, type, options), max_ram=max_ram, **run)


def run_quantize(plan: Plan, *, max_ram: int | str = DEFAULT_MAX_RAM, **run: Unpack[RunOptions]) -> QuantizeResult:
    """Carry out a plan of ``plan_quantize``; arguments and errors as for ``quantize``."""
    given = run.get("threads") or 0
    threads = given if given > 0 else available_cpus()
    run["threads"] = threads if run.get("ray") is None else given
    result = run_plan(plan, max_ram=size_of(max_ram), **run)
    return QuantizeResult(plan, result, sum(node.cpus for node in result.nodes) or threads)
