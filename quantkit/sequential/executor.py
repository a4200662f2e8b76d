"""An executor that runs jobs stage by stage, first those of tensors that need no inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.formats.gguf import split_path
from quantkit.formats.outputs import sibling_path
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.ledger import Ledger, NodeShare
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.threads import Threads
from quantkit.sequential.inputs import StageInputs
from quantkit.sequential.spill import Spill
from quantkit.sequential.streams import Streams, Tokens


@dataclass(frozen=True, eq=False)
class SequentialExecutor:
    """Runs jobs on ``threads`` once their ``inputs``, by entry, are available. ``model``: the source's path."""

    threads: Threads
    model: Path
    tokens: Tokens
    inputs: Mapping[str, StageInputs]

    @property
    def count(self) -> int:
        return self.threads.count

    @property
    def nodes(self) -> tuple[NodeShare, ...]:
        return ()

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs of a ledger, in the order of the model's operations."""
        plan = ledger.plan
        calibrated = [t for t in plan.tensors if _calibrated_entries(t)]
        self.threads.run(ledger.part({t.name for t in plan.tensors} - {t.name for t in calibrated}), measure=measure)
        spill = Spill(sibling_path(plan.shards[0].path, ".activations"), plan.fingerprint, plan.source.inputs)
        if ledger.stop.is_set():
            return
        if all(t.name in ledger.journal.crcs for t in calibrated):
            spill.remove()
            return
        sources = {p.source.name for t in calibrated for p in t.parts}
        try:
            with (
                Streams(self.model, sources, self.tokens, spill, self.threads.cpus) as streams,
                _open_output(ledger) as output,
            ):
                streams.open_output(output, {t.name for t in calibrated})
                self._run_stages(ledger, streams, spill, calibrated, measure)
        except QuantkitError:
            spill.remove()
            raise
        if not ledger.stop.is_set():
            spill.remove()

    def _run_stages(
        self, ledger: Ledger, streams: Streams, spill: Spill, tensors: list[PlannedTensor], measure: bool
    ) -> None:
        last_stage = self._resume_stage(ledger, streams, spill, tensors)
        for stage in range(max(last_stage, 0), len(streams)):
            if stage > last_stage:
                streams.run(stage, partial(_report_progress, ledger, stage, len(streams), self.tokens.count))
            ready = set[str]()
            for item in streams.inputs(stage):
                if item.entry in self.inputs:
                    self.inputs[item.entry].attach(item, spill, self.tokens.count)
                    ready.add(item.entry)
            names = {t.name for t in tensors if _calibrated_entries(t) & ready}
            self.threads.run(ledger.part(names, partial(_job_order, ledger.plan)), measure=measure)
            for entry in ready:
                self.inputs[entry].drop()
            if ledger.stop.is_set():
                return

    def _resume_stage(self, ledger: Ledger, streams: Streams, spill: Spill, tensors: list[PlannedTensor]) -> int:
        """Return the last stage whose activations the files hold, if all tensors of earlier stages are encoded."""
        last_stage = spill.begin()
        earlier = {item.entry for stage in range(last_stage) for item in streams.inputs(stage)}
        if all(t.name in ledger.journal.crcs for t in tensors if _calibrated_entries(t) & earlier):
            return last_stage
        spill.remove()
        return spill.begin()


@contextmanager
def _open_output(ledger: Ledger) -> Iterator[Path]:
    """Yield a path by which the unfinished output can be opened as a model."""
    shards = ledger.plan.shards
    parts = [ledger.target.file(no) for no in range(len(shards))]
    assert all(parts)
    if len(shards) == 1:
        yield Path(str(parts[0]))
        return
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        for no, part in enumerate(parts):
            split_path(Path(folder) / "output", no, len(shards)).symlink_to(Path(str(part)).absolute())
        yield split_path(Path(folder) / "output", 0, len(shards))


def _report_progress(ledger: Ledger, stage: int, stages: int, total: int, tokens: int) -> None:
    if ledger.observer is not None:
        ledger.observer.on_stage(stage, stages, tokens, total)


def _calibrated_entries(tensor: PlannedTensor) -> set[str]:
    return {part.inputs.entry for part in tensor.parts if isinstance(part.inputs, StageInputs)}


def _job_order(plan: Plan, job: Job) -> tuple[str, int, int, int]:
    """Return a sort key that keeps the jobs of one matrix together, so that its metric is computed once."""
    inputs = plan.tensors[job.tensor].parts[job.part].inputs
    return (inputs.entry if inputs is not None else "", job.matrix, job.tensor, job.part)
