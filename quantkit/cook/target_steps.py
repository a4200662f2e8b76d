"""The steps of each target: quantization and check."""

from __future__ import annotations

import glob
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quantkit.arguments import changed_options
from quantkit.cook import estimate
from quantkit.cook.config import TargetSettings
from quantkit.cook.engine import Facts, Step, StepEstimate, StepProgress
from quantkit.cook.steps import Paths
from quantkit.errors import QuantkitError, ResourceError
from quantkit.evaluate import kld
from quantkit.formats.outputs import atomic_write, shards_of
from quantkit.formats.own_json import read_own_json
from quantkit.pipeline.cache.keys import encoder_digest
from quantkit.pipeline.content import stamps_of
from quantkit.pipeline.fallback import fallback_line
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import RunOptions, journal_path
from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize
from quantkit.records import record
from quantkit.report import SHARES, Quality, quality_of

#: Options of quantize that name files, which are inputs of the step: compared by content, not by name.
_FILES = {"imatrix", "feedback", "calibrate", "recipe"}
#: TYPE of a recipe that has not been searched yet, for estimates.
_PLACEHOLDER_TYPE = "Q4_K"


def check_path(paths: Paths, label: str) -> Path:
    """Return the file with the divergence of a target."""
    return paths.work(f"checks/{label}.json")


#: The option that keep_grid excludes.
_EXCLUSIVE = "like"


def recipe_path(paths: Paths, label: str) -> Path:
    """Return the recipe that the search for a target writes."""
    return paths.work(f"recipes/{label}.recipe")


def search_result_path(paths: Paths, label: str) -> Path:
    """Return the file with the other results of a search: the TYPE that goes with the recipe, and predictions."""
    return paths.work(f"recipes/{label}.json")


def read_search_result(paths: Paths, label: str) -> dict[str, Any]:
    """Return the results of a search. Raises FormatError."""

    def parse(result: Any) -> dict[str, Any]:
        return {**result, "type": record(str, result["type"], "type")}

    return read_own_json(search_result_path(paths, label), "the result of a search", parse)


def quantize_options(paths: Paths, settings: TargetSettings) -> QuantizeOptions:
    """Return the options of ``quantkit quantize`` for a target."""
    target, config = settings.target, paths.config
    extra: dict[str, object] = {}
    if target.goal is not None:
        extra["recipe"] = (recipe_path(paths, settings.label),)
    if paths.imatrix is not None:
        extra["imatrix"] = paths.imatrix
    if target.feedback:
        extra["feedback"] = paths.covariance
    if target.calibrate:
        extra["calibrate"] = (*paths.calibration, *config.calibration.chat)
        extra["calibrate_ctx"] = config.imatrix.ctx or paths.model.ctx
        extra["calibrate_chunks"] = config.imatrix.chunks
    options = config.options(settings, **extra)
    return replace(options, keep_grid=True) if keeps_grid_by_default(paths, settings) else options


def keeps_grid_by_default(paths: Paths, settings: TargetSettings) -> bool:
    """Return whether a target keeps the grid that weights lie on: unless that is set, or types come from a file."""
    config = paths.config
    is_set = "keep_grid" in config.quantize or "keep_grid" in settings.quantize
    copies_types = any(options.get(_EXCLUSIVE) for options in (config.quantize, settings.quantize))
    return bool(paths.grid) and not is_set and not copies_types


@dataclass(frozen=True)
class _Quantization:
    """The quantization of a target, to ``output`` with ``options``: the functions of its step, which share one plan."""

    paths: Paths
    settings: TargetSettings
    output: Path
    options: QuantizeOptions

    @cached_property
    def inputs(self) -> dict[str, Path]:
        """The input files, by label."""
        inputs = {"the model": self.paths.source}
        if self.options.imatrix is not None:
            inputs["the importance matrix"] = self.options.imatrix
        if self.options.feedback is not None:
            inputs["the covariances"] = self.options.feedback
        if self.settings.target.goal is not None:
            inputs["the search"] = search_result_path(self.paths, self.settings.label)
        for label, files in (("the recipe", self.options.recipe), ("the text", self.options.calibrate)):
            inputs |= {f"{label} {path.name}" if len(files) > 1 else label: path for path in files}
        return inputs

    @property
    def has_feedback(self) -> bool:
        """Whether error feedback is used, by either option."""
        return self.settings.target.feedback or self.settings.target.calibrate

    def plan(self) -> Plan:
        """Return the plan, computed again only after an input has changed. The inputs must exist."""
        stamps = stamps_of(shard for path in self.inputs.values() for shard in shards_of(path) if shard.exists())
        return self.paths.plans.get((self.output, stamps), self._make_plan)

    def _make_plan(self) -> Plan:
        preset, options = self.settings.target.preset, self.options
        if preset is None:
            result = read_search_result(self.paths, self.settings.label)
            preset, options = result["type"], replace(options, rules=result.get("rules"))
        return plan_quantize(self.paths.source, self.output, preset, options)

    def late_options(self) -> dict[str, object]:
        """Return the versions of the encoders that the plan uses."""
        types = {(part.source.type, t.type) for t in self.plan().tensors if not t.is_copy for part in t.parts}
        return {"encoders": sorted(encoder_digest(source, target, self.has_feedback) for source, target in types)}

    def output_paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.plan().shards)

    def is_complete(self) -> bool:
        """Return whether an interrupted run had finished: it removes its journal last."""
        return not any(journal_path(path).exists() for path in self.output_paths()[:1])

    @cached_property
    def cost(self) -> StepEstimate:
        """The estimate from the headers of the model; unknown if they do not suffice for a plan."""
        target = self.settings.target
        options = planning_options(self.options, recipe=target.goal is None)
        try:
            plan = self.paths.model.plan(self.output, target.preset or _PLACEHOLDER_TYPE, options)
        except QuantkitError:
            return StepEstimate()
        seconds = estimate.plan_seconds(plan.tensors, self.paths.threads, feedback=self.has_feedback)
        nbytes = plan.nbytes if target.goal is None else goal_bytes(self.paths, self.settings)
        return StepEstimate(nbytes, seconds)

    def run(self, progress: StepProgress) -> Facts:
        plan = self.plan()
        self.paths.plans.clear()
        for note in plan.notes:
            progress.note(note)
        options: RunOptions = {
            **self.paths.run_options(progress, sum(t.nbytes for t in plan.tensors)),
            "cache": self.paths.cache,
            "cache_size": self.paths.config.cache_size,
        }
        cache = run_quantize(plan, **options).run.cache
        for note in cache.notes if cache is not None else ():
            progress.note(note)
        return {
            "nbytes": plan.nbytes,
            "bpw": plan.bpw,
            "fallback": fallback_line(plan.tensors),
            "from_cache": 0 if cache is None else cache.hits,
            "encoded": 0 if cache is None else cache.tensors - cache.hits,
        }


def quantize_step(paths: Paths, settings: TargetSettings) -> Step:
    """Return the quantization of a target."""
    output, options = paths.output(settings.label), quantize_options(paths, settings)
    quantization = _Quantization(paths, settings, output, options)
    changed = {name: value for name, value in changed_options(options).items() if name not in _FILES}
    return Step(
        f"quantize {settings.label}",
        output.name,
        quantization.inputs,
        {"the type": settings.target.preset, **changed},
        (output,) if options.split_max_size is None else quantization.output_paths,
        quantization.run,
        lambda: quantization.cost,
        quantization.late_options,
        is_complete=quantization.is_complete,
    )


def goal_bytes(paths: Paths, settings: TargetSettings) -> int | None:
    """Return the approximate bytes of a goal's file; None for a divergence."""
    goal = settings.target.goal
    if goal is None or goal.kind == "kld":
        return None
    if goal.kind == "bpw":
        return int(goal.value * paths.model.weights / 8)
    return int(goal.value if goal.kind == "size" else min(goal.value, paths.model.nbytes))


def planning_options(options: QuantizeOptions, *, recipe: bool) -> QuantizeOptions:
    """Return options for a plan of approximately the same size without files that other steps write.

    ``recipe``: keep the user's recipe. If there will be an importance matrix, types that need one are allowed.
    """
    return replace(
        options,
        imatrix=None,
        feedback=None,
        calibrate=(),
        recipe=options.recipe if recipe else (),
        ignore_imatrix_rules=bool(options.imatrix or options.calibrate or options.feedback),
    )


def first_shard(paths: Paths, settings: TargetSettings) -> Path:
    """Return the file of a target, the first of several shards. Raises ResourceError if there is none."""
    out = paths.output(settings.label)
    if quantize_options(paths, settings).split_max_size is None:
        return out
    shards = sorted(out.parent.glob(f"{glob.escape(out.stem)}-00001-of-?????.gguf"))
    if not shards:
        raise ResourceError(f"{out}: the file of {settings.label} does not exist", "QK-E401")
    return max(shards, key=lambda path: path.stat().st_mtime_ns)


def read_check(paths: Paths, label: str) -> Quality:
    """Return the result of a check, for the report. Raises FormatError."""

    def parse(result: Any) -> Quality:
        quality: Quality = record(Quality, result["quality"], "quality")
        return quality

    return read_own_json(check_path(paths, label), "the result of a check", parse)


def check_step(paths: Paths, settings: TargetSettings) -> Step:
    """Return the check of a target: the measurement of its divergence from the model."""
    out = check_path(paths, settings.label)
    find_file = partial(first_shard, paths, settings)
    model = paths.model

    def run(progress: StepProgress) -> Facts:
        divergence = kld(
            find_file(),
            paths.base_logits,
            progress=lambda now: progress(now.current, now.total, f"divergence {now.sums.kld.mean.value:.5f}"),
            **paths.measuring_options(),
        )
        for note in divergence.notes:
            progress.note(note)
        with atomic_write(out) as part:
            content = {**divergence.as_dict(), "quality": asdict(quality_of(divergence))}
            part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        return {
            "activations": divergence.activations,
            "kld": divergence.sums.kld.mean.as_dict(),
            "ppl_ratio": divergence.sums.ratio.as_dict(),
        }

    def estimate_cost() -> StepEstimate:
        check = paths.config.check
        tokens = paths.evaluation_tokens(paths.check_text, check.ctx or model.ctx, check.chunks)
        return StepEstimate(None, estimate.forward_seconds(model.active, tokens, paths.threads))

    return Step(
        f"check {settings.label}",
        f"the divergence of {paths.output(settings.label).name}",
        {"the file": find_file, "the base logits": paths.base_logits},
        {"shares of the tokens": SHARES, "activations": paths.config.check.activations},
        (out,),
        run,
        estimate_cost,
        is_complete=lambda: True,
        after=(f"quantize {settings.label}",),
    )
