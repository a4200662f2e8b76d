"""``cook`` and ``plan_cook``: checks before any work, the steps in their order, and the run of those not up to date."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.cook.config import Config, TargetSettings, read_config, text_consumers
from quantkit.cook.encoders import MmprojFile, mmproj_files
from quantkit.cook.engine import Decision, NullObserver, Observer, RunRecord, Step, StepCounter, decide, run_steps
from quantkit.cook.report_step import card_path, page_path, report_step
from quantkit.cook.search_steps import LARGEST_TYPE, candidates_step, search_step, sensitivity_step
from quantkit.cook.source import Model, read_source
from quantkit.cook.state import STATE, State
from quantkit.cook.steps import Paths, base_step, convert_step, covariance_step, imatrix_step, mmproj_step, texts_step
from quantkit.cook.target_steps import (
    check_path,
    check_step,
    first_shard,
    planning_options,
    quantize_options,
    quantize_step,
)
from quantkit.errors import QualityGate, QuantkitError, RecipeError, ResourceError, os_error_code
from quantkit.extras import CHAT, REPORT, SEARCH, Extra, MissingPackages, check_extras, missing_packages
from quantkit.formats.gguf import open_model
from quantkit.formats.locks import drop_lock, take_lock
from quantkit.formats.outputs import check_apart, read_whole
from quantkit.formats.own_json import read_own_json
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.pipeline.fallback import fallback_line
from quantkit.progress import ProgressCallback
from quantkit.score.files import read_questions
from quantkit.types import type_by_name
from quantkit.units import format_size


@dataclass(frozen=True)
class TargetResult:
    """The file of a target, with the divergence that its check measured; None without a check.

    ``kld``: nats per token; ``..._error``: standard errors; ``fallback``: see ``fallback_line``.
    """

    target: str
    path: Path
    nbytes: int
    kld: float | None = None
    kld_error: float | None = None
    ppl_ratio: float | None = None
    ppl_ratio_error: float | None = None
    fallback: str = ""


@dataclass(frozen=True)
class CookResult(HtmlTable):
    """Result of a cook: names of the steps that ran, a record per target, and the files of the report, if any.

    ``mmproj``: the files of the model's encoders.
    """

    executed: tuple[str, ...]
    targets: tuple[TargetResult, ...]
    reports: tuple[Path, ...] = ()
    seconds: float = 0.0
    mmproj: tuple[MmprojFile, ...] = ()

    def as_table(self) -> Table:
        """Return the files with their divergence, in nats per token."""
        rows = ((t.target, t.path, t.nbytes, t.kld, t.kld_error, t.ppl_ratio) for t in self.targets)
        return table_of("target, file, bytes, KL divergence, its standard error, perplexity / model's", rows)


@dataclass(frozen=True)
class CookPlan(HtmlTable):
    """A cook before any work: its steps, and the decision about each. ``notes``: for the user."""

    config: Config
    paths: Paths
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = field(default=())

    def as_table(self) -> Table:
        """Return the steps, whether each would run, and its estimated bytes and seconds."""
        rows = (
            (d.step.name, d.step.title, d.reason, None if d.up_to_date else d.step.estimate().seconds)
            for d in self.decisions
        )
        return table_of("step, action, state, seconds", rows, f"{self.config.model} to {self.config.output}")


@checked
def cook(
    config: str | Path | Config,
    *,
    targets: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    observer: Observer | None = None,
) -> CookResult:
    """Run the steps of a TOML file or a ``Config`` that are not up to date.

    Args:
        config: a TOML file as ``quantkit cook init`` writes it, or its content.
        targets: targets that replace those of the file: "Q4_K_M", "12.3G", "4.2bpw", "kld=0.01".
        progress: called with the steps done so far, a part of the current one included, and its name.
        observer: receives the start, the progress and the end of every step, instead.

    Raises:
        RecipeError: an invalid key, value or combination; before any work.
        ResourceError: an extra is not installed, an output was written by another program, or another cook is running
            in the same folder.
        QualityGate: all files are written, and one diverges more than its max_kld.
    """
    settings = read_config(config, targets) if isinstance(config, (str, Path)) else config
    if progress is not None and observer is not None:
        raise RecipeError("progress and observer are mutually exclusive: omit one of them", "QK-E201")
    observer = observer or (NullObserver() if progress is None else StepCounter(progress))
    plan = plan_cook(settings)
    for note in plan.notes:
        observer.note(note)
    with _lock_folder(settings.work):
        state = State(settings.work)
        observer.plan(decide(plan.steps, state))
        record = run_steps(plan.steps, state, observer)
    return _result(plan, record)


def plan_cook(config: Config) -> CookPlan:
    """Return the steps of a cook, after all checks that are possible before any work; nothing is written.

    Raises as ``cook``.
    """
    model, config, large = _read_source(config)
    paths = Paths(config, model, tuple(mmproj_files(config, model)), grid=model.read_grid())
    _check_inputs(config, paths)
    notes = [*model.notes, *large, *_grid_notes(paths), *_check_targets(paths)]
    steps = tuple(_steps(paths))
    _check_outputs(paths, steps)
    decisions = tuple(decide(steps, State(config.work, planning=True)))
    notes += _check_disk_space(config.output, decisions)
    return CookPlan(config, paths, steps, decisions, tuple(notes))


def _steps(paths: Paths) -> Iterator[Step]:
    """Yield all steps, each after those whose outputs it reads."""
    config = paths.config
    if paths.model.is_checkpoint:
        yield convert_step(paths)
    for file in paths.mmproj:
        if file.type is not None:
            yield mmproj_step(paths, file)
    if _needs_texts(config):
        yield texts_step(paths)
    if config.imatrix.run and config.imatrix.file is None:
        yield imatrix_step(paths, paths.work("imatrix.gguf"))
    if any(t.target.feedback for t in config.targets) and config.imatrix.covariance is None:
        yield covariance_step(paths)
    if config.check.run:
        yield base_step(paths)
    if config.goals:
        yield sensitivity_step(paths)
        if config.search.candidates > 1:
            yield candidates_step(paths)
    for target in config.targets:
        if target.target.goal is not None:
            yield search_step(paths, target)
        yield quantize_step(paths, target)
        if config.check.run:
            yield check_step(paths, target)
    if config.report.run:
        yield report_step(paths)


def _needs_texts(config: Config) -> bool:
    """Return whether texts must be prepared: a corpus built, or held-out text divided."""
    return config.check.run or bool(config.goals) or (config.calibration.is_corpus and bool(text_consumers(config)))


# --- checks before any work ---


def _read_source(config: Config) -> tuple[Model, Config, list[str]]:
    """Return the model, from its headers, and the settings without searches that have nothing to choose, with notes.

    Raises MissingPackages for all extras that this and later steps need.
    """
    hint = "use --no-report to omit the report" if config.report.run and REPORT.missing() else ""
    try:
        model = read_source(config.model, config.work / "model.gguf", config.convert)
    except MissingPackages as e:
        missing = [extra for extra in _extras(config) if extra.missing()]
        raise missing_packages(*e.extras, *missing, hint=hint) from None
    config, notes = _without_idle_searches(config, model)
    check_extras(*_extras(config), hint=hint)
    return model, config, notes


def _extras(config: Config) -> list[Extra]:
    """Return the extras that the steps need, besides those of the model."""
    extras = [*([SEARCH] if config.goals else ()), *([CHAT] if config.calibration.chat else ())]
    return [*extras, *([REPORT] if config.report.run else ())]


def _without_idle_searches(config: Config, model: Model) -> tuple[Config, list[str]]:
    """Return settings whose targets that the largest type meets have that type as their preset, and notes on them.

    Limits of a search may exclude the type from some tensors, so such targets are searched.
    """
    if config.search.allow or config.search.at_most:
        return config, []
    largest = max(map(type_by_name, config.sensitivity.types or (LARGEST_TYPE,)), key=lambda t: t.bpw).name
    paths = Paths(config, model)
    targets, notes = [], []
    for settings in config.targets:
        goal = settings.target.goal
        direct = replace(settings, target=replace(settings.target, preset=largest, goal=None))
        if goal is not None and goal.kind in ("size", "bpw"):
            options = planning_options(quantize_options(paths, direct), recipe=True)
            with suppress(QuantkitError):  # the checks of targets name it
                plan = model.plan(paths.output(settings.label), largest, options)
                if goal.value >= (plan.nbytes if goal.kind == "size" else plan.bpw):
                    notes.append(
                        f"warning: {settings.label}: no search: {largest}, the largest type, takes"
                        f" {format_size(plan.nbytes)}, {plan.bpw:.2f} bits per weight"
                    )
                    targets.append(direct)
                    continue
        targets.append(settings)
    return replace(config, targets=tuple(targets)), notes


def _check_inputs(config: Config, paths: Paths) -> None:
    """Raise RecipeError or ResourceError for a text or file that is missing, with the steps that need it."""
    texts, consumers = config.calibration, text_consumers(config)
    if consumers and not texts.text and not texts.chat and not (texts.evaluation and config.imatrix.file):
        raise RecipeError(
            f"{config.origin}: {', '.join(consumers)} need{'s' * (len(consumers) == 1)} a text: give some MB of text "
            'that the model is used for (-f TEXT, or [calibration] text = ["notes.txt", "~/src"])',
            "QK-E202",
        )
    held_out = config.check.run or bool(config.goals)
    if held_out and texts.evaluation is None and not texts.text:
        raise RecipeError(
            f"{config.origin}: no part of conversations is held out: also give [calibration] evaluation", "QK-E202"
        )
    files = (*texts.text, *texts.chat, texts.evaluation, config.imatrix.file, config.imatrix.covariance)
    folders = (*texts.text, *config.report.texts)
    for path in (*files, *config.report.texts, *config.report.score):
        if path is not None and not path.is_file() and not (path in folders and path.is_dir()):
            if path.exists():
                raise ResourceError(f"{path}: not a regular file ({config.origin})", "QK-E120")
            raise ResourceError(f"{path}: no such file ({config.origin})", "QK-E401")
    for path in config.report.score:
        read_questions(read_whole(path), str(path))
    if texts.evaluation is not None and any(path.is_dir() for path in (*texts.text, texts.evaluation)):
        raise RecipeError(
            f"{config.origin}: [calibration] text contains a folder; with an evaluation text it must list files only",
            "QK-E201",
        )
    for folder in (path for path in texts.text if path.is_dir()):
        for inner in (config.output, config.work):
            if _is_within(inner, folder):
                raise RecipeError(
                    f"{inner} is inside {folder}, whose files are the calibration text: choose another folder",
                    "QK-E403",
                )


def _is_within(path: Path, folder: Path) -> bool:
    real = os.path.realpath
    return os.path.commonpath([real(path), real(folder)]) == real(folder)


def _grid_notes(paths: Paths) -> list[str]:
    """Return a note on weights that lie on a grid, and on the targets that keep it."""
    if not paths.grid:
        return []
    labels = [t.label for t in paths.config.targets if quantize_options(paths, t).keep_grid]
    if not labels:
        return [f"{paths.grid}; no target keeps it"]
    return [
        f"{paths.grid}; {', '.join(labels)} keep{'s' * (len(labels) == 1)} it ([quantize] keep_grid = false: do not)"
    ]


def _check_targets(paths: Paths) -> list[str]:
    """Raise an error for the first target that is impossible according to the headers; return notes on the others."""
    config, model = paths.config, paths.model
    notes: list[str] = []
    for settings in config.targets:
        options = planning_options(quantize_options(paths, settings), recipe=settings.target.goal is None)
        preset = settings.target.preset or "Q4_K"
        try:
            plan = model.plan(paths.output(settings.label), preset, options)
        except QuantkitError as e:
            raise type(e)(f"{settings.label}: {e.message}", e.code) from None
        if settings.target.goal is None and (line := fallback_line(plan.tensors)):
            notes.append(f"{settings.label}: {line}")
        goal = settings.target.goal
        if goal is not None and goal.kind == "size" and goal.value >= model.nbytes:
            notes.append(f"{settings.label}: larger than the model itself ({format_size(model.nbytes)})")
    if config.merge_up_gate and not model.can_merge_experts:
        notes.append("merge_up_gate is ignored: the model has no up and gate experts to merge")
    return notes


def _check_outputs(paths: Paths, steps: Sequence[Step]) -> None:
    """Raise an error for outputs that are inputs, equal to one another, or not possible as folders."""
    outputs = [path for step in steps for path in step.static_outputs]
    results = set(outputs)
    inputs = {path for step in steps for path in step.inputs.values() if isinstance(path, Path) and path not in results}
    files = [path for path in (*inputs, paths.config.model) if not path.is_dir()]
    check_apart([*outputs, paths.config.work / STATE], files)
    for path in (paths.config.output, paths.config.work):
        existing = next((ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor)), None)
        if existing is not None and not existing.is_dir():
            raise ResourceError(f"{path}: {existing} is a file; choose a folder", "QK-E405")


def _check_disk_space(folder: Path, decisions: Sequence[Decision]) -> list[str]:
    """Return a warning if the disk is too small for the outputs of all steps."""
    required = sum(d.step.estimate().nbytes or 0 for d in decisions if not d.up_to_date)
    existing = next(ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.exists())
    free = shutil.disk_usage(existing).free
    if required <= free:
        return []
    return [
        (f"warning: about {format_size(required)} will be written, but only {format_size(free)} are free in {existing}")
    ]


@contextmanager
def _lock_folder(work: Path) -> Iterator[None]:
    """Hold the lock of the work folder. Raises ResourceError while another cook holds it."""
    path = work / f"{STATE}.lock"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
    except BlockingIOError:
        raise ResourceError(f"{work}: another cook is using this folder; wait for it or stop it", "QK-E404") from None
    except OSError as e:
        raise ResourceError(f"{work}: cannot be written: {e.strerror or e}", os_error_code(e)) from None
    try:
        yield
    finally:
        drop_lock(path, lock)


# --- the result ---


def _result(plan: CookPlan, record: RunRecord) -> CookResult:
    """Return the result. Raises QualityGate if a file diverges more than its max_kld."""
    paths = plan.paths
    targets = [
        replace(_target_result(paths, t), fallback=record.records[f"quantize {t.label}"].facts.get("fallback", ""))
        for t in plan.config.targets
    ]
    for settings, target in zip(plan.config.targets, targets, strict=True):
        if settings.max_kld is not None and target.kld is not None and not target.kld <= settings.max_kld:
            raise QualityGate(f"{target.path}: the mean KL divergence is {target.kld:.6f}, above {settings.max_kld:g}")
    seconds = sum(record.records[name].seconds for name in record.executed)
    return CookResult(tuple(record.executed), tuple(targets), _report_paths(paths), seconds, paths.mmproj)


def _report_paths(paths: Paths) -> tuple[Path, ...]:
    settings = paths.config.report
    return (page_path(paths), *([card_path(paths)] if settings.card else ())) if settings.run else ()


def _target_result(paths: Paths, settings: TargetSettings) -> TargetResult:
    path = first_shard(paths, settings)
    with open_model(path) as model:
        nbytes = sum(shard.stat().st_size for shard in model.paths)
    if not paths.config.check.run:
        return TargetResult(settings.target.text, path, nbytes)
    values = read_own_json(check_path(paths, settings.label), "the result of a check", _parse_check)
    return TargetResult(settings.target.text, path, nbytes, *values)


def _parse_check(result: Any) -> tuple[float, float, float, float]:
    kld, ratio = result["kld"], result["ppl_ratio"]
    return float(kld["value"]), float(kld["error"]), float(ratio["value"]), float(ratio["error"])
