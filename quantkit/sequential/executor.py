"""Jobs stage by stage: first those of tensors that need no inputs, then those that each stage has the inputs of."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.formats.gguf import split_path
from quantkit.formats.outputs import beside
from quantkit.pipeline.jobs import Job
from quantkit.pipeline.ledger import Ledger, NodeShare
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.threads import Threads
from quantkit.sequential.inputs import StageInputs
from quantkit.sequential.norms import NormInputs
from quantkit.sequential.spill import Spill
from quantkit.sequential.streams import Streams, Tokens


@dataclass(frozen=True, eq=False)
class Sequential:
    """An executor: ``threads`` run the jobs, once ``inputs``, by entry, are there. ``model``: the source's path."""

    threads: Threads
    model: Path
    tokens: Tokens
    inputs: Mapping[str, StageInputs | NormInputs]

    @property
    def count(self) -> int:
        return self.threads.count

    @property
    def nodes(self) -> tuple[NodeShare, ...]:
        return ()

    def run(self, ledger: Ledger, *, measure: bool) -> None:
        """Run all jobs of a ledger, in the order of the model's operations."""
        plan = ledger.plan
        calibrated = [t for t in plan.tensors if _entries(t)]
        self.threads.run(ledger.part({t.name for t in plan.tensors} - {t.name for t in calibrated}), measure=measure)
        spill = Spill(beside(plan.shards[0].path, ".activations"), plan.fingerprint)
        if ledger.stop.is_set():
            return
        if all(t.name in ledger.journal.done for t in calibrated):
            spill.remove()
            return
        sources = {p.source.name for t in calibrated for p in t.parts}
        try:
            with (
                Streams(self.model, sources, self.tokens, spill, self.threads.cpus) as streams,
                _growing(ledger) as output,
            ):
                streams.open(output, {t.name for t in calibrated})
                self._run_stages(ledger, streams, spill, calibrated, measure)
        except QuantkitError:
            spill.remove()
            raise
        if not ledger.stop.is_set():
            spill.remove()

    def _run_stages(
        self, ledger: Ledger, streams: Streams, spill: Spill, tensors: list[PlannedTensor], measure: bool
    ) -> None:
        done = self._begun(ledger, streams, spill, tensors)
        for stage in range(max(done, 0), len(streams)):
            if stage > done:
                streams.run(stage, partial(_tell, ledger, stage, len(streams), self.tokens.count))
            ready = set[str]()
            for seen in streams.seen(stage):
                if seen.entry in self.inputs:
                    self.inputs[seen.entry].ready(seen, spill, self.tokens.count)
                    ready.add(seen.entry)
            names = {t.name for t in tensors if _entries(t) & ready}
            self.threads.run(ledger.part(names, partial(_order, ledger.plan)), measure=measure)
            for entry in ready:
                self.inputs[entry].drop()
            if ledger.stop.is_set():
                return

    def _begun(self, ledger: Ledger, streams: Streams, spill: Spill, tensors: list[PlannedTensor]) -> int:
        """Return the stage that the files hold the end of, if all that earlier stages have inputs of is encoded."""
        done = spill.begin()
        earlier = {seen.entry for stage in range(done) for seen in streams.seen(stage)}
        if all(t.name in ledger.journal.done for t in tensors if _entries(t) & earlier):
            return done
        spill.remove()
        return spill.begin()


@contextmanager
def _growing(ledger: Ledger) -> Iterator[Path]:
    """Yield a path by which the files that grow can be opened as a model."""
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


def _tell(ledger: Ledger, stage: int, stages: int, total: int, tokens: int) -> None:
    if ledger.observer is not None:
        ledger.observer.ran(stage, stages, tokens, total)


def _entries(tensor: PlannedTensor) -> set[str]:
    found = (each for part in tensor.parts for each in (part.inputs, part.refit))
    return {each.entry for each in found if isinstance(each, StageInputs | NormInputs)}


def _order(plan: Plan, job: Job) -> tuple[str, int, int, int]:
    """Sort jobs so that those of one matrix of an input come together: its metric is made once."""
    inputs = plan.tensors[job.tensor].parts[job.part].inputs
    return (inputs.entry if inputs is not None else "", job.matrix, job.tensor, job.part)
