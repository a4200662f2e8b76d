"""The whole of a cook: what is checked before, the steps in their order, and the run of what does not stand."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.cook.config import Config, TargetSettings, needs_text, read_config
from quantkit.cook.engine import Cooked, Decision, Observer, Silent, Step, carry_out, decide
from quantkit.cook.report_step import card_path, page_path, report_step
from quantkit.cook.search_steps import candidates_step, search_step, sensitivity_step
from quantkit.cook.source import read_source
from quantkit.cook.state import STATE, State
from quantkit.cook.steps import Places, base_step, convert_step, covariance_step, imatrix_step, texts_step
from quantkit.cook.target_steps import (
    check_path,
    check_step,
    first_file,
    quantize_options,
    quantize_step,
    without_files,
)
from quantkit.errors import FormatError, QualityGate, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_model
from quantkit.formats.outputs import check_apart, drop_lock, take_lock
from quantkit.report.page import needed as check_page
from quantkit.search.solve import check_solver
from quantkit.units import format_size


@dataclass(frozen=True)
class Dish:
    """A finished target: its file and what the check found; None unless it was checked."""

    target: str
    path: Path
    nbytes: int
    kld: float | None = None
    kld_error: float | None = None
    ppl_ratio: float | None = None
    ppl_ratio_error: float | None = None


@dataclass(frozen=True)
class CookResult:
    """What a cook came to: the steps that ran, the files, and the report if there is one."""

    ran: tuple[str, ...]
    dishes: tuple[Dish, ...]
    reports: tuple[Path, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class CookPlan:
    """A cook before it begins: its places, steps, and what stands of them. ``notes``: for the user."""

    config: Config
    places: Places
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = field(default=())


def cook(config: str | Path | Config, *, targets: Sequence[str] = (), observer: Observer | None = None) -> CookResult:
    """Cook what a TOML file, or a ``Config``, says; what stands of an earlier run is left as it is.

    Args:
        config: a file as ``quantkit cook init`` writes it, or its content.
        targets: what to cook instead of the file's own targets: "Q4_K_M", "12.3G", "4.2bpw", "kld=0.01".
        observer: is told of every step and its progress.

    Raises:
        RecipeError: a key, value or combination that cannot be followed; before any work.
        ResourceError: an extra that is not installed, a file in the way, or another cook in the same folder.
        QualityGate: everything is made, and a file diverges more than its max_kld.
    """
    settings = read_config(config, targets) if isinstance(config, (str, Path)) else config
    observer = observer or Silent()
    planned = plan_cook(settings)
    for note in planned.notes:
        observer.note(note)
    with _held(settings.work):
        state = State(settings.work)
        observer.planned(decide(planned.steps, state))
        done = carry_out(planned.steps, state, observer)
    return _result(planned, done)


def plan_cook(config: Config) -> CookPlan:
    """Check everything that can be checked before any work, and return the steps; nothing is written.

    Raises what ``cook`` raises.
    """
    _check_extras(config)
    model = read_source(config.model, config.work / "model.gguf", config.convert.options())
    places = Places(config, model)
    _check_inputs(config, places)
    notes = [*model.notes, *_check_targets(places)]
    steps = tuple(_steps(places))
    _check_outputs(places, steps)
    decisions = tuple(decide(steps, State(config.work)))
    notes += _room(config.output, decisions)
    return CookPlan(config, places, steps, decisions, tuple(notes))


def _steps(places: Places) -> Iterator[Step]:
    """Yield all steps, each after those it needs."""
    config = places.config
    if places.model.is_checkpoint:
        yield convert_step(places)
    if _has_texts(config):
        yield texts_step(places)
    if config.imatrix.run and config.imatrix.file is None:
        yield imatrix_step(places, places.work("imatrix.gguf"))
    if any(t.target.feedback for t in config.targets) and config.imatrix.covariance is None:
        yield covariance_step(places)
    if config.check.run:
        yield base_step(places)
    if config.goals:
        yield sensitivity_step(places)
        if config.search.candidates > 1:
            yield candidates_step(places)
    for target in config.targets:
        if target.target.goal is not None:
            yield search_step(places, target)
        yield quantize_step(places, target)
        if config.check.run:
            yield check_step(places, target)
    if config.report.run:
        yield report_step(places)


def _has_texts(config: Config) -> bool:
    """Tell whether texts must be made: a part of them held out, or divided."""
    made = config.calibration.evaluation is None and bool(config.calibration.text)
    return config.check.run or bool(config.goals) or (made and bool(needs_text(config)))


# ---------------------------------------------------------------- checks before any work


def _check_extras(config: Config) -> None:
    """Raise ResourceError if a step needs a package that is not installed."""
    if config.goals:
        check_solver()
    if config.report.run:
        try:
            check_page()
        except ResourceError as e:
            raise ResourceError(f"{e.message}; --no-report cooks without one") from None


def _check_inputs(config: Config, places: Places) -> None:
    """Refuse what is missing, and say for what it is needed."""
    texts, why = config.calibration, needs_text(config)
    if why and not texts.text and not texts.chat and not (texts.evaluation and config.imatrix.file):
        raise RecipeError(
            f"{config.origin}: there is no text, and {', '.join(why)} need{'s' * (len(why) == 1)} one: give some MB "
            'of what the model is for (-f TEXT, or [calibration] text = ["notes.txt", "~/src"])'
        )
    held_out = config.check.run or bool(config.goals)
    if held_out and texts.evaluation is None and not texts.text:
        raise RecipeError(f"{config.origin}: conversations alone hold nothing out: give [calibration] evaluation, too")
    for path in (*texts.text, *texts.chat, texts.evaluation, config.imatrix.file, config.imatrix.covariance):
        if path is not None and not path.exists():
            raise ResourceError(f"{path}: there is no such file ({config.origin})")
    if texts.evaluation is not None and any(path.is_dir() for path in (*texts.text, texts.evaluation)):
        raise RecipeError(
            f"{config.origin}: [calibration] text names a folder; with an evaluation text of your own it is files"
        )
    for folder in (path for path in texts.text if path.is_dir()):
        for inner in (config.output, config.work):
            if _is_within(inner, folder):
                raise RecipeError(f"{inner} lies in {folder}, whose files are the text: cook to another folder")


def _is_within(path: Path, folder: Path) -> bool:
    real = os.path.realpath
    return os.path.commonpath([real(path), real(folder)]) == real(folder)


def _check_targets(places: Places) -> list[str]:
    """Refuse targets that cannot be made, as far as headers tell; return notes."""
    config, model, notes = places.config, places.model, list[str]()
    for settings in config.targets:
        options = without_files(quantize_options(places, settings), recipe=settings.target.goal is None)
        preset = settings.target.preset or "Q4_K"
        try:
            model.plan(places.output(settings.called), preset, options)
        except QuantkitError as e:
            raise type(e)(f"{settings.called}: {e.message}") from None
        goal = settings.target.goal
        if goal is not None and goal.kind == "size" and goal.value >= model.nbytes:
            notes.append(f"{settings.called}: the model itself has {format_size(model.nbytes)}")
    if config.merge_up_gate and not model.merges:
        notes.append("merge_up_gate changes nothing: the model has no up and gate experts to merge")
    return notes


def _check_outputs(places: Places, steps: Sequence[Step]) -> None:
    """Refuse outputs that are inputs, or each other."""
    made = [path for step in steps for path in step.known_outputs]
    ours = set(made)
    read = {path for step in steps for path in step.inputs.values() if isinstance(path, Path) and path not in ours}
    files = [path for path in (*read, places.config.model) if not path.is_dir()]
    check_apart([*made, places.config.work / STATE], files)
    for path in (places.config.output, places.config.work):
        at = next((each for each in (path, *path.parents) if os.path.lexists(each)), None)
        if at is not None and not at.is_dir():
            raise ResourceError(f"{path}: {at} is a file; name a folder")


def _room(folder: Path, decisions: Sequence[Decision]) -> list[str]:
    """Return a warning if the disk is too small for what will be written."""
    need = sum(d.step.expected().nbytes or 0 for d in decisions if not d.stands)
    at = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(at).free
    if need <= free:
        return []
    return [f"warning: about {format_size(need)} will be written, and {format_size(free)} are free in {at}"]


@contextmanager
def _held(work: Path) -> Iterator[None]:
    """Hold the work folder; ResourceError while another cook does."""
    path = work / f"{STATE}.lock"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
    except BlockingIOError:
        raise ResourceError(f"{work}: another cook is at work there; wait for it or stop it") from None
    except OSError as e:
        raise ResourceError(f"{work}: cannot be written: {e.strerror or e}") from None
    try:
        yield
    finally:
        drop_lock(path, lock)


# ---------------------------------------------------------------- the result


def _result(planned: CookPlan, done: Cooked) -> CookResult:
    """Return what there is, and raise QualityGate if that is not good enough."""
    places = planned.places
    dishes = [_dish(places, settings) for settings in planned.config.targets]
    for settings, dish in zip(planned.config.targets, dishes, strict=True):
        if settings.max_kld is not None and dish.kld is not None and not dish.kld <= settings.max_kld:
            raise QualityGate(f"{dish.path}: the mean KL divergence is {dish.kld:.6f}, above {settings.max_kld:g}")
    seconds = sum(done.steps[name].seconds for name in done.ran)
    return CookResult(tuple(done.ran), tuple(dishes), _reports(places), seconds)


def _reports(places: Places) -> tuple[Path, ...]:
    settings = places.config.report
    return (page_path(places), *([card_path(places)] if settings.card else ())) if settings.run else ()


def _dish(places: Places, settings: TargetSettings) -> Dish:
    path = first_file(places, settings)
    with open_model(path) as opened:
        nbytes = sum(each.stat().st_size for each in opened.paths)
    if not places.config.check.run:
        return Dish(settings.target.text, path, nbytes)
    found: dict[str, Any] = json.loads(check_path(places, settings.called).read_bytes())
    try:
        kld, ratio = found["kld"], found["ppl_ratio"]
        values = (float(kld["value"]), float(kld["error"]), float(ratio["value"]), float(ratio["error"]))
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{check_path(places, settings.called)}: not the result of a check ({e!r})") from None
    return Dish(settings.target.text, path, nbytes, *values)
