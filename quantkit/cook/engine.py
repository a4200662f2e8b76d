"""Steps, and which of them must run: one whose inputs, options and outputs are as they were stands.

A step is decided by *parts*: a digest for each file it reads and for each of its options. What differs from the record
is the reason why it runs again. Files count by their content, so a step that runs again to the same bytes does not make
those after it run. A killed run leaves a note of the step that had begun: what is there under the names of its outputs
is then its own, and the step goes on, or starts over.
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

Facts = dict[str, Any]


class Tell(Protocol):
    """How a step reports while it runs."""

    def __call__(self, done: float, total: float, text: str = "") -> None:
        """Report that ``done`` of ``total`` is done, in any unit; ``text``: what is known so far."""

    def note(self, text: str) -> None:
        """Report what the user should know."""


@dataclass(frozen=True)
class Expected:
    """What a step will take: bytes on the disk and seconds, None where nobody can tell."""

    nbytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """One step: what decides its outputs, and how they are made.

    ``name``: unique, "imatrix" or "quantize Q4_K_M". ``inputs``: files it reads, by what they are; a function where
    the steps ``after`` which it comes find out the name. ``outputs``: likewise. ``options``: what else decides its
    outputs. ``code``: the same, for what can be told only when the inputs are there. ``run``: makes the outputs and
    returns what it found; a step that was killed is run again and is to go on, or to start over. ``whole``: tells,
    after a kill, whether outputs that are there are whole; None: nobody can tell. ``forget``: removes what the same
    step of other parts left half done.
    """

    name: str
    what: str
    inputs: Mapping[str, Path | Callable[[], Path]]
    options: Mapping[str, object]
    outputs: tuple[Path, ...] | Callable[[], tuple[Path, ...]]
    run: Callable[[Tell], Facts]
    expected: Callable[[], Expected] = Expected
    code: Callable[[], Mapping[str, object]] = dict
    whole: Callable[[], bool] | None = None
    forget: Callable[[], None] | None = None
    after: tuple[str, ...] = ()

    @property
    def known_outputs(self) -> tuple[Path, ...]:
        """The outputs whose names nothing has to find out."""
        return () if callable(self.outputs) else self.outputs

    def made(self) -> tuple[Path, ...]:
        """Return the outputs; the inputs are there."""
        return self.outputs() if callable(self.outputs) else self.outputs


@dataclass(frozen=True)
class Decision:
    """Whether a step stands; else why it runs. ``parts`` is None if that depends on steps before it."""

    step: Step
    stands: bool
    why: str
    parts: Mapping[str, str] | None = None
    record: StepRecord | None = None


class Observer(Protocol):
    """Is told how a cook goes."""

    def planned(self, decisions: Sequence[Decision]) -> None:
        """Nothing has begun yet."""

    def stands(self, number: int, count: int, decision: Decision) -> None:
        """A step is left out, as it stands."""

    def started(self, number: int, count: int, decision: Decision) -> None:
        """A step begins."""

    def progress(self, done: float, total: float, text: str) -> None:
        """The step goes on."""

    def note(self, text: str) -> None:
        """The step has something to say."""

    def finished(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        """A step is done."""


class Silent:
    """An observer that does nothing."""

    def planned(self, decisions: Sequence[Decision]) -> None:
        pass

    def stands(self, number: int, count: int, decision: Decision) -> None:
        pass

    def started(self, number: int, count: int, decision: Decision) -> None:
        pass

    def progress(self, done: float, total: float, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finished(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        pass


@dataclass(frozen=True)
class _Teller:
    observer: Observer

    def __call__(self, done: float, total: float, text: str = "") -> None:
        self.observer.progress(done, total, text)

    def note(self, text: str) -> None:
        self.observer.note(text)


@dataclass
class Cooked:
    """What a cook did: records of all steps by name, and the names of those that ran."""

    steps: dict[str, StepRecord] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)


def parts_of(step: Step, state: State) -> dict[str, str]:
    """Return the digests of all that decides a step's outputs. Raises ResourceError for an input that is not there."""
    parts = {}
    for label, given in step.inputs.items():
        path = given() if callable(given) else given
        try:
            parts[label] = state.digest(path)
        except OSError as e:
            raise ResourceError(f"{path}: {label} of {step.name}: {e.strerror or e}") from None
    return parts | {name: value_digest(value) for name, value in {**step.options, **step.code()}.items()}


def decide(steps: Sequence[Step], state: State) -> list[Decision]:
    """Return which steps stand, as far as that can be told before any has run."""
    made: dict[Path, str] = {}
    runs: set[str] = set()
    decisions = []
    for step in steps:
        waits = [name for name in step.after if name in runs]
        waits += [made[given] for given in step.inputs.values() if isinstance(given, Path) and given in made]
        decision = Decision(step, False, f"after {waits[0]}") if waits else decide_step(step, state)
        if not decision.stands:
            made |= dict.fromkeys(step.known_outputs, step.name)
            runs.add(step.name)
        decisions.append(decision)
    return decisions


def decide_step(step: Step, state: State) -> Decision:
    """Return whether a step stands; its inputs are there."""
    parts, record, begun = parts_of(step, state), state.steps.get(step.name), state.begun.get(step.name)
    if begun is not None and record is None:
        changed = "" if dict(begun.parts) == parts else f", and {_changed(begun.parts, parts)}"
        return Decision(step, False, f"was interrupted{changed}", parts)
    if record is None:
        return Decision(step, False, "not done yet", parts)
    if dict(record.parts) != parts:
        return Decision(step, False, _changed(record.parts, parts), parts)
    for path in step.made():
        if not os.path.lexists(path):
            return Decision(step, False, f"{path.name} is gone", parts)
        if not state.is_as_made(path):
            return Decision(step, False, f"{path.name} was changed", parts)
    return Decision(step, True, "stands", parts, record)


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs, in words."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return f"changed: {', '.join(names)}"


def carry_out(steps: Sequence[Step], state: State, observer: Observer) -> Cooked:
    """Run what does not stand, in order. Raises what a step raises; the state then says how far it came."""
    done = Cooked()
    for number, step in enumerate(steps, 1):
        decision = decide_step(step, state)
        assert decision.parts is not None
        if decision.record is not None:
            observer.stands(number, len(steps), decision)
            done.steps[step.name] = decision.record
            continue
        observer.started(number, len(steps), decision)
        record = _run(step, decision.parts, state, observer)
        observer.finished(number, len(steps), step, record)
        done.steps[step.name] = record
        done.ran.append(step.name)
    return done


def _run(step: Step, parts: Mapping[str, str], state: State, observer: Observer) -> StepRecord:
    goes_on = state.goes_on(step.name, parts)
    outputs = step.made()
    state.begin(step.name, parts, outputs)
    if not goes_on and step.forget is not None:
        step.forget()
    began, facts = working_seconds(), Facts()
    done = goes_on and step.whole is not None and state.has_made(step.name, outputs) and step.whole()
    if not done:
        for path in outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
        facts = step.run(_Teller(observer))
    missing = [path for path in outputs if not os.path.isfile(path)]
    if missing:
        raise QuantkitError(f"{step.name} ended without {missing[0]}: run it again")
    state.finish(step.name, parts, outputs, working_seconds() - began, facts)
    return state.steps[step.name]
