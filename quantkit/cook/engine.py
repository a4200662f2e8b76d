"""Steps of a cook, and the decision which of them to run: like ``make``, but by content instead of time.

A step is up to date if its *parts*, a digest of each file that it reads and of each of its options, and its outputs are
those of its record in ``cook.json``. Parts that differ are the reason to run it again. A step that reproduces the same
bytes does not cause others to run. An interrupted run leaves a record of the unfinished step: files under the names of
its outputs are then its own, and it resumes, or starts over if its parts have changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quantkit.cook.state import State, StepRecord, value_digest
from quantkit.errors import QuantkitError, ResourceError
from quantkit.kernels.first_run import working_seconds
from quantkit.progress import Progress, ProgressCallback

Facts = dict[str, Any]


class StepProgress(Protocol):
    """Receiver of a step's progress."""

    def __call__(self, current: float, total: float, text: str = "") -> None:
        """Report that ``current`` of ``total`` units are done; ``text``: an intermediate result."""

    def note(self, text: str) -> None:
        """Report a note for the user."""


@dataclass(frozen=True)
class StepEstimate:
    """Estimated bytes on disk and seconds of a step; None: unknown."""

    nbytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """A step: the inputs and options that determine its outputs, and the function that writes them.

    ``name``: unique, "imatrix" or "quantize Q4_K_M"; ``title``: a description. ``inputs``: files it reads, by label; a
    function if a step of ``after`` determines the name. ``outputs``: likewise. ``options``: everything else that
    determines its outputs. ``late_options``: options that are known only when the inputs exist. ``run``: writes the
    outputs and returns facts; after an interruption it is called again, and resumes or starts over. ``is_complete``:
    whether existing outputs are complete after an interruption; None: unknown.
    """

    name: str
    title: str
    inputs: Mapping[str, Path | Callable[[], Path]]
    options: Mapping[str, object]
    outputs: tuple[Path, ...] | Callable[[], tuple[Path, ...]]
    run: Callable[[StepProgress], Facts]
    estimate: Callable[[], StepEstimate] = StepEstimate
    late_options: Callable[[], Mapping[str, object]] = dict
    is_complete: Callable[[], bool] | None = None
    after: tuple[str, ...] = ()

    @property
    def static_outputs(self) -> tuple[Path, ...]:
        """The outputs whose names are known before any step has run."""
        return () if callable(self.outputs) else self.outputs

    def output_paths(self) -> tuple[Path, ...]:
        """Return the outputs; the inputs exist."""
        return self.outputs() if callable(self.outputs) else self.outputs


@dataclass(frozen=True)
class Decision:
    """Whether a step is up to date, or the reason to run it. ``parts``: None if earlier steps determine them.

    ``is_first``: the step never ran, not even in part.
    """

    step: Step
    up_to_date: bool
    reason: str
    parts: Mapping[str, str] | None = None
    record: StepRecord | None = None
    is_first: bool = False


class Observer(Protocol):
    """Receiver of the events of a cook. ``number``: of the step, from 1, of ``count``."""

    def plan(self, decisions: Sequence[Decision]) -> None:
        """Called before the first step."""

    def skip(self, number: int, count: int, decision: Decision) -> None:
        """Called instead of a step that is up to date."""

    def start(self, number: int, count: int, decision: Decision) -> None:
        """Called before a step runs."""

    def progress(self, current: float, total: float, text: str) -> None:
        """Called while a step runs: ``current`` of ``total`` units are done; ``text``: an intermediate result."""

    def note(self, text: str) -> None:
        """Called with a note for the user."""

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        """Called after a step has run."""


class NullObserver:
    """An observer that does nothing."""

    def plan(self, decisions: Sequence[Decision]) -> None:
        pass

    def skip(self, number: int, count: int, decision: Decision) -> None:
        pass

    def start(self, number: int, count: int, decision: Decision) -> None:
        pass

    def progress(self, current: float, total: float, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        pass


class StepCounter(NullObserver):
    """An observer that calls a function with the steps done, counting a part of the current one."""

    def __init__(self, report: ProgressCallback) -> None:
        self.report = report
        self.number, self.count, self.name = 0, 0, ""

    def start(self, number: int, count: int, decision: Decision) -> None:
        self.number, self.count, self.name = number, count, decision.step.name
        self.progress(0, 1, "")

    def progress(self, current: float, total: float, text: str) -> None:
        share = current / total if total else 0.0
        self.report(Progress(self.number - 1 + share, self.count, f"{self.name}: {text}" if text else self.name))

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        self.report(Progress(number, count, step.name))


@dataclass(frozen=True)
class _ObserverProgress:
    observer: Observer

    def __call__(self, current: float, total: float, text: str = "") -> None:
        self.observer.progress(current, total, text)

    def note(self, text: str) -> None:
        self.observer.note(text)


@dataclass
class RunRecord:
    """Records of all steps of a cook, by name, and the names of those that ran."""

    records: dict[str, StepRecord] = field(default_factory=dict)
    executed: list[str] = field(default_factory=list)


def digest_parts(step: Step, state: State) -> dict[str, str]:
    """Return the parts of a step: a digest of each input and option. Raises ResourceError for a missing input."""
    parts = {}
    for label, location in step.inputs.items():
        path = location() if callable(location) else location
        try:
            parts[label] = state.digest(path)
        except OSError as e:
            raise ResourceError(f"{path}: {label} of {step.name}: {e.strerror or e}", "QK-E401") from None
    return parts | {name: value_digest(value) for name, value in {**step.options, **step.late_options()}.items()}


def decide(steps: Sequence[Step], state: State) -> list[Decision]:
    """Return a decision for each step, as far as possible before any has run."""
    producers: dict[Path, str] = {}
    pending: set[str] = set()
    decisions = []
    for step in steps:
        blockers = [name for name in step.after if name in pending]
        blockers += [
            producers[location]
            for location in step.inputs.values()
            if isinstance(location, Path) and location in producers
        ]
        decision = Decision(step, False, f"after {blockers[0]}") if blockers else decide_step(step, state)
        if not decision.up_to_date:
            producers |= dict.fromkeys(step.static_outputs, step.name)
            pending.add(step.name)
        decisions.append(decision)
    return decisions


def decide_step(step: Step, state: State) -> Decision:
    """Return whether a step is up to date; its inputs exist."""
    parts = digest_parts(step, state)
    record, interrupted = state.steps.get(step.name), state.unfinished.get(step.name)
    if interrupted is not None and record is None:
        changes = "" if dict(interrupted.parts) == parts else f"; {_describe_changes(interrupted.parts, parts)}"
        return Decision(step, False, f"was interrupted{changes}", parts)
    if record is None:
        return Decision(step, False, "not done yet", parts, is_first=True)
    if dict(record.parts) != parts:
        return Decision(step, False, _describe_changes(record.parts, parts), parts)
    for path in step.output_paths():
        if not os.path.lexists(path):
            return Decision(step, False, f"{path.name} is missing", parts)
        if not state.is_unchanged(path):
            return Decision(step, False, f"{path.name} was changed", parts)
    return Decision(step, True, "up to date", parts, record)


def _describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the names of parts that differ, as a text."""
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return f"changed: {', '.join(names)}"


def run_steps(steps: Sequence[Step], state: State, observer: Observer) -> RunRecord:
    """Run the steps that are not up to date, in order. Raises the errors of steps, after which a run can resume."""
    run = RunRecord()
    for number, step in enumerate(steps, 1):
        decision = decide_step(step, state)
        assert decision.parts is not None
        if decision.record is not None:
            observer.skip(number, len(steps), decision)
            run.records[step.name] = decision.record
            continue
        observer.start(number, len(steps), decision)
        record = _run_step(step, decision.parts, state, observer)
        observer.finish(number, len(steps), step, record)
        run.records[step.name] = record
        run.executed.append(step.name)
    return run


def _run_step(step: Step, parts: Mapping[str, str], state: State, observer: Observer) -> StepRecord:
    resumes = state.can_resume(step.name, parts)
    outputs = step.output_paths()
    state.begin(step.name, parts, outputs)
    start, facts = working_seconds(), Facts()
    complete = (
        resumes and step.is_complete is not None and state.has_new_outputs(step.name, outputs) and step.is_complete()
    )
    if not complete:
        for path in outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
        facts = step.run(_ObserverProgress(observer))
    missing = [path for path in outputs if not os.path.isfile(path)]
    if missing:
        raise QuantkitError(f"{step.name} ended without producing {missing[0]}: run it again", "QK-E405")
    state.finish(step.name, parts, outputs, working_seconds() - start, facts)
    return state.steps[step.name]
