"""Steps of targets that are goals: sensitivity, base logits for candidates, the search of each recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.cook import estimate
from quantkit.cook.config import TargetSettings
from quantkit.cook.engine import Facts, Step, StepEstimate, StepProgress
from quantkit.cook.steps import Paths, logits_step
from quantkit.cook.target_steps import recipe_path, search_result_path
from quantkit.cook.targets import Goal
from quantkit.formats.outputs import atomic_write
from quantkit.pipeline.run import journal_path
from quantkit.recipes.dialects import text_of
from quantkit.search import Check, SearchOptions, SearchResult, search
from quantkit.sensitivity import SensitivityOptions, sensitivity
from quantkit.sensitivity.measure import full_runs_of
from quantkit.types import TensorType, type_by_name

#: Tensor classes of a layer, approximately.
_CLASSES_PER_LAYER = 7
#: Values of the search's --runtime.
_RUNTIMES = {"llama.cpp": "mainline", "ik_llama.cpp": "ik"}
#: Default types of a search by runtime, in order of bits, each the best of its size; few, because each takes time to
#: measure.
_LADDERS = {
    "llama.cpp": ("IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q5_K", "Q6_K", "Q8_0"),
    "ik_llama.cpp": ("IQ1_M", "IQ2_KS", "IQ2_KL", "IQ3_KS", "IQ3_K", "IQ4_KS", "IQ5_KS", "IQ6_K", "Q8_0"),
}
#: The largest type of both.
LARGEST_TYPE = "Q8_0"
#: Range of useful types, as factors of a goal's bits per weight.
_BELOW, _ABOVE = 0.6, 1.9
#: Bits per weight to expect for goals that are not sizes, and at most where memory suffices for more.
_ANY, _MOST = (3.3, 4.5), 8.0


def sensitivity_path(paths: Paths) -> Path:
    """Return the file of sensitivities."""
    return paths.work("sensitivity.json")


def sensitivity_types(paths: Paths) -> tuple[str, ...]:
    """Return the types to measure: those of the settings, or types that fit the goals."""
    config = paths.config
    if config.sensitivity.types:
        return tuple(type_by_name(name).name for name in config.sensitivity.types)
    goals = [t.target.goal for t in config.goals if t.target.goal is not None]
    return types_for(goals, config.runtime, paths.model.weights)


def types_for(goals: Iterable[Goal], runtime: str, weights: int) -> tuple[str, ...]:
    """Return the names of types to measure for goals, smallest first; ``weights``: number of the model's weights."""
    selection: set[TensorType] = set()
    ladder = [type_by_name(name) for name in _LADDERS[runtime]]
    for goal in goals:
        for bpw in _bits(goal, weights):
            matches = [t for t in ladder if _BELOW * bpw <= t.bpw <= _ABOVE * bpw]
            selection |= set(matches or _nearest(ladder, bpw))
    return tuple(t.name for t in ladder if t in selection)


def _bits(goal: Goal, weights: int) -> Sequence[float]:
    """Return the bits per weight that a goal may lead to."""
    if goal.kind == "bpw":
        return (goal.value,)
    bpw = 8 * goal.value / max(1, weights)
    return {"size": (bpw,), "fit": (min(bpw, _MOST),)}.get(goal.kind, _ANY)


def _nearest(ladder: Sequence[TensorType], bpw: float) -> Sequence[TensorType]:
    return sorted(ladder, key=lambda t: abs(t.bpw - bpw))[:2]


def _has_feedback(paths: Paths) -> bool:
    """Return whether sensitivities are also measured with error feedback."""
    return paths.config.sensitivity.feedback and any(t.target.feedback for t in paths.config.goals)


def sensitivity_step(paths: Paths) -> Step:
    """Return the measurement of the sensitivities."""
    settings, model = paths.config.sensitivity, paths.model
    out, ctx = sensitivity_path(paths), settings.ctx or model.ctx
    types, feedback = sensitivity_types(paths), _has_feedback(paths)
    inputs = {"the model": paths.source, "the text": paths.sensitivity_text}
    if paths.imatrix is not None:
        inputs["the importance matrix"] = paths.imatrix
    if feedback:
        inputs["the covariances"] = paths.covariance
    options: dict[str, object] = {
        "types": list(types),
        "groups": settings.groups,
        "ctx": ctx,
        "chunks": settings.chunks,
        "activations": paths.config.check.activations,
        "proxies_only": settings.proxies_only,
        "feedback": feedback,
    }
    if settings.full_runs is not None:
        options["full_runs"] = settings.full_runs

    def run(progress: StepProgress) -> Facts:
        result = sensitivity(
            paths.source,
            out,
            [paths.sensitivity_text],
            options=SensitivityOptions(
                types=types,
                imatrix=paths.imatrix,
                groups=settings.groups,
                feedback=paths.covariance if feedback else None,
                n_ctx=ctx,
                chunks=settings.chunks,
                activations=paths.config.check.activations,
                full_runs=settings.full_runs,
                proxies_only=settings.proxies_only,
                threads=paths.threads or None,
                max_ram=paths.config.max_ram,
                cache=paths.cache,
                cache_size=paths.config.cache_size,
                resume=True,
                overwrite=True,
            ),
            progress=lambda now: progress(now.current, now.total, now.text),
        )
        for note in result.settings.get("notes", ()):
            progress.note(note)
        return {"groups": len(result.groups), "types": list(types), "measured": len(result.costs)}

    def estimate_cost() -> StepEstimate:
        tokens = paths.evaluation_tokens(paths.sensitivity_text, ctx, settings.chunks)
        pass_seconds = estimate.forward_seconds(model.active, tokens, paths.threads)
        encoding = sum(
            estimate.type_seconds(type_by_name(name), model.weights, paths.threads, feedback=with_feedback)
            for name in types
            for with_feedback in {False, feedback}
        )
        # A full run of a pair computes the layers from the group on: half of them on average.
        full = full_runs_of(settings.full_runs, len(types)) or len(types)
        groups = _CLASSES_PER_LAYER * model.n_layers + 2
        pairs = groups * (1 if settings.proxies_only else min(full, len(types)) * (1 + feedback))
        return StepEstimate(None, pass_seconds * (1 + pairs / 2) + encoding)

    return Step(
        "sensitivity",
        f"sensitivity of each group of tensors to {len(types)} types",
        inputs,
        options,
        (out,),
        run,
        estimate_cost,
        is_complete=lambda: not journal_path(out).exists(),
    )


def candidates_step(paths: Paths) -> Step:
    """Return the computation of base logits on the text on which candidate recipes are compared."""
    settings = paths.config.sensitivity
    return logits_step(
        paths,
        "candidates",
        "base logits on the text used to compare recipes",
        paths.sensitivity_text,
        paths.candidate_logits,
        settings.ctx,
        settings.chunks,
        "auto",
    )


def search_step(paths: Paths, settings: TargetSettings) -> Step:
    """Return the search for a recipe that meets a goal."""
    config, label = paths.config, settings.label
    goal = settings.target.goal
    assert goal is not None
    limits = config.search
    out, result_path = recipe_path(paths, label), search_result_path(paths, label)
    inputs = {"the sensitivity": sensitivity_path(paths), "the model": paths.source}
    if limits.candidates > 1:
        inputs["the base logits"] = paths.candidate_logits
    if paths.imatrix is not None:
        inputs["the importance matrix"] = paths.imatrix
    if settings.target.feedback:
        inputs["the covariances"] = paths.covariance
    step_options: dict[str, object] = {
        "goal": [goal.kind, goal.value],
        "runtime": config.runtime,
        "merge_up_gate": config.merge_up_gate,
        **asdict(limits),
    }
    devices: dict[str, Any] = {"fit": goal.devices, **asdict(config.fit)} if goal.kind == "fit" else {}
    step_options |= devices

    def run(progress: StepProgress) -> Facts:
        options = SearchOptions(
            target_size=int(goal.value) if goal.kind == "size" else None,
            target_bpw=goal.value if goal.kind == "bpw" else None,
            target_kld=goal.value if goal.kind == "kld" else None,
            types=limits.types,
            runtime=_RUNTIMES[config.runtime],
            same=limits.same,
            allow=limits.allow,
            at_least=limits.at_least,
            at_most=limits.at_most,
            merge_up_gate=config.merge_up_gate,
            imatrix=paths.imatrix,
            feedback=paths.covariance if settings.target.feedback else None,
            time_limit=limits.time_limit,
            **devices,
        )
        check = None
        if limits.candidates > 1:
            check = Check(
                limits.candidates,
                paths.candidate_logits,
                threads=paths.threads or None,
                cache=paths.cache,
                folder=paths.config.work,
            )
        result = search(
            sensitivity_path(paths), paths.source, options, check=check, progress=lambda now: progress.note(now.text)
        )
        for note in (*result.notes, *_command_of(result)):
            progress.note(note)
        return _write_search(paths, settings, result)

    def estimate_cost() -> StepEstimate:
        sensitivity = config.sensitivity
        tokens = paths.evaluation_tokens(paths.sensitivity_text, sensitivity.ctx or paths.model.ctx, sensitivity.chunks)
        seconds = limits.candidates * estimate.forward_seconds(paths.model.active, tokens, paths.threads)
        return StepEstimate(None, seconds if limits.candidates > 1 else 1.0)

    return Step(
        f"search {label}",
        f"the types of {paths.output(label).name}",
        inputs,
        step_options,
        (out, result_path),
        run,
        estimate_cost,
        is_complete=lambda: True,
    )


def _command_of(result: SearchResult) -> list[str]:
    """Return the command that runs the file on the devices that it fits, if it was searched for some."""
    return [] if result.best.fit is None else [f"run the file: {result.best.fit.command}"]


def _write_search(paths: Paths, settings: TargetSettings, result: SearchResult) -> Facts:
    """Write the recipe and the other results; return the latter."""
    best, label = result.best, settings.label
    kld = None if best.check is None else best.check.sums.kld.mean
    facts: Facts = {
        "type": best.type_name,
        "rules": best.options.rules,
        "nbytes": best.nbytes,
        "bpw": best.bpw,
        "predicted": best.kld,
        "measured": None if kld is None else kld.as_dict(),
        "candidates": len(result.allocations),
    }
    comments = [
        f"quantkit cook, target {settings.target.text}: {best.nbytes} bytes, {best.bpw:.4f} bits per weight,",
        f"predicted divergence {best.kld:.5f}; quantkit quantize -r {label}.recipe IN OUT {best.type_name}",
        *_command_of(result),
    ]
    with atomic_write(search_result_path(paths, label)) as part:
        part.write_text(json.dumps(facts, indent=2) + "\n")
    with atomic_write(recipe_path(paths, label)) as part:
        part.write_text(text_of([(rule.pattern, rule.type) for rule in best.rules], comments, "ours"))
    return facts
