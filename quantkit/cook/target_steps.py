"""The steps of each target: quantization and check."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.cook import estimate
from quantkit.cook.config import TargetSettings
from quantkit.cook.engine import Expected, Facts, Step, Tell
from quantkit.cook.steps import Places
from quantkit.errors import FormatError, QuantkitError, ResourceError
from quantkit.evaluate import kld
from quantkit.formats.outputs import written
from quantkit.pipeline.cache.keys import encoder_digest
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.run import RunOptions, journal_path
from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize
from quantkit.report import SHARES, Quality, quality_from, quality_of

#: Options of quantize that are files: their content counts, not their names.
_FILES = {"imatrix", "feedback", "calibrate", "recipe"}
#: Stands for the TYPE of a recipe that is not there yet.
_SEARCHED = "Q4_K"


def check_path(places: Places, called: str) -> Path:
    """Return the file of a target's divergence."""
    return places.work(f"checks/{called}.json")


def recipe_path(places: Places, called: str) -> Path:
    """Return the recipe that is searched for."""
    return places.work(f"recipes/{called}.recipe")


def chosen_path(places: Places, called: str) -> Path:
    """Return the file of what else a search found: the TYPE that goes with the recipe, and what is predicted."""
    return places.work(f"recipes/{called}.json")


def searched(places: Places, called: str) -> dict[str, Any]:
    """Return what a search found. Raises FormatError."""
    path = chosen_path(places, called)
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return {"type": str(found["type"]), **found}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise FormatError(f"{path}: not the result of a search ({e!r})") from None


def quantize_options(places: Places, settings: TargetSettings) -> QuantizeOptions:
    """Return the options that the command of a target would have."""
    target, config = settings.target, places.config
    more: dict[str, object] = {}
    if target.goal is not None:
        more["recipe"] = (recipe_path(places, settings.called),)
    if places.imatrix is not None:
        more["imatrix"] = places.imatrix
    if target.feedback:
        more["feedback"] = places.covariance
    if target.calibrate:
        more["calibrate"] = (*places.calibration, *config.calibration.chat)
        more["calibrate_ctx"] = config.imatrix.ctx or places.model.ctx
        more["calibrate_chunks"] = config.imatrix.chunks
    return config.options(settings, **more)


def quantize_step(places: Places, settings: TargetSettings) -> Step:
    """Return the quantization of a target."""
    target, out = settings.target, places.output(settings.called)
    options = quantize_options(places, settings)
    inputs: dict[str, Path | Callable[[], Path]] = {"the model": places.source}
    if options.imatrix is not None:
        inputs["the importance matrix"] = options.imatrix
    if options.feedback is not None:
        inputs["the covariances"] = options.feedback
    if target.goal is not None:
        inputs["the search"] = chosen_path(places, settings.called)
    for label, paths in (("the recipe", options.recipe), ("the text", options.calibrate)):
        inputs |= {f"{label} {path.name}" if len(paths) > 1 else label: path for path in paths}

    def plan() -> Plan:
        if target.preset is not None:
            return plan_quantize(places.source, out, target.preset, options)
        found = searched(places, settings.called)
        return plan_quantize(places.source, out, found["type"], replace(options, rules=found.get("rules")))

    def code() -> dict[str, object]:
        planned = plan()
        pairs = {(p.source.type, t.type) for t in planned.tensors if not t.is_copy for p in t.parts}
        fed = target.feedback or target.calibrate
        return {"encoders": sorted(encoder_digest(source, made, fed) for source, made in pairs)}

    def expected() -> Expected:
        try:
            planned = places.model.plan(
                out, target.preset or _SEARCHED, without_files(options, recipe=target.goal is None)
            )
        except QuantkitError:
            return Expected()
        fed = target.feedback or target.calibrate
        seconds = estimate.encoding_seconds(planned.tensors, places.threads, fed=fed)
        return Expected(goal_bytes(places, settings) if target.goal is not None else planned.nbytes, seconds)

    def run(tell: Tell) -> Facts:
        planned = plan()
        for note in planned.notes:
            tell.note(note)
        total = sum(t.nbytes for t in planned.tensors)
        how: RunOptions = {
            **places.pipeline(tell, total),
            "cache": places.cache,
            "cache_size": places.config.cache_size,
        }
        made = run_quantize(planned, **how)
        used = made.run.cache
        for note in used.notes if used is not None else ():
            tell.note(note)
        return {
            "nbytes": planned.nbytes,
            "bpw": planned.bpw,
            "from_cache": 0 if used is None else used.taken,
            "encoded": 0 if used is None else used.tensors - used.taken,
        }

    def made() -> tuple[Path, ...]:
        return tuple(shard.path for shard in plan().shards)

    said = {name: value for name, value in asdict(options).items() if name not in _FILES}
    default = asdict(QuantizeOptions())
    given = {name: value for name, value in said.items() if value != default[name]}
    return Step(
        f"quantize {settings.called}",
        out.name,
        inputs,
        {"the type": target.preset, **given},
        (out,) if options.split_max_size is None else made,
        run,
        expected,
        code,
        whole=lambda: not any(journal_path(path).exists() for path in made()[:1]),
    )


def goal_bytes(places: Places, settings: TargetSettings) -> int | None:
    """Return about how large the file of a goal will be; None if nobody can tell."""
    goal = settings.target.goal
    if goal is None or goal.kind == "kld":
        return None
    return int(goal.value if goal.kind == "size" else goal.value * places.model.weights / 8)


def without_files(options: QuantizeOptions, *, recipe: bool) -> QuantizeOptions:
    """Return options that plan about the same sizes before the files of other steps are there.

    ``recipe``: the recipe is the user's. Where there will be an importance matrix, no type is refused for lack of it.
    """
    return replace(
        options,
        imatrix=None,
        feedback=None,
        calibrate=(),
        recipe=options.recipe if recipe else (),
        ignore_imatrix_rules=bool(options.imatrix or options.calibrate or options.feedback),
    )


def first_file(places: Places, settings: TargetSettings) -> Path:
    """Return the file of a target, of several the first. Raises ResourceError if there is none."""
    out = places.output(settings.called)
    if quantize_options(places, settings).split_max_size is None:
        return out
    found = sorted(out.parent.glob(f"{glob.escape(out.stem)}-00001-of-?????.gguf"))
    if not found:
        raise ResourceError(f"{out}: there is no file of {settings.called}")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def checked(places: Places, called: str) -> Quality:
    """Return what a check found, for the report. Raises FormatError."""
    path = check_path(places, called)
    try:
        return quality_from(json.loads(path.read_bytes())["quality"])
    except (OSError, ValueError, KeyError, TypeError, FormatError) as e:
        raise FormatError(f"{path}: not the result of a check ({e!r})") from None


def check_step(places: Places, settings: TargetSettings) -> Step:
    """Return the check of a target: its divergence from the model."""
    out = check_path(places, settings.called)
    made = partial(first_file, places, settings)
    model = places.model

    def run(tell: Tell) -> Facts:
        found = kld(
            made(),
            places.base,
            progress=lambda now: tell(now.chunk, now.n_chunks, f"divergence {now.sums.kld.mean.value:.5f}"),
            **places.evaluation(),
        )
        for note in found.notes:
            tell.note(note)
        with written(out) as part:
            told = {**found.as_dict(), "quality": asdict(quality_of(found))}
            part.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n")
        return {"kld": found.sums.kld.mean.as_dict(), "ppl_ratio": found.sums.ratio.as_dict()}

    def expected() -> Expected:
        settings = places.config.check
        tokens = places.measured_tokens(places.check_text, settings.ctx or model.ctx, settings.chunks)
        return Expected(None, estimate.forward_seconds(model.active, tokens, places.threads))

    return Step(
        f"check {settings.called}",
        f"the divergence of {places.output(settings.called).name}",
        {"the file": made, "the base logits": places.base},
        {"shares of the tokens": SHARES},
        (out,),
        run,
        expected,
        whole=lambda: True,
        after=(f"quantize {settings.called}",),
    )
