"""The steps of targets that are goals: sensitivity, base logits of candidates, the search of each recipe."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.cook import estimate
from quantkit.cook.config import TargetSettings
from quantkit.cook.engine import Expected, Facts, Step, Tell
from quantkit.cook.ladder import types_for
from quantkit.cook.steps import Places, logits_step
from quantkit.cook.target_steps import chosen_path, recipe_path
from quantkit.formats.outputs import written
from quantkit.pipeline.run import journal_path
from quantkit.recipes.dialects import text_of
from quantkit.search import Check, SearchOptions, SearchResult, search
from quantkit.sensitivity import SensitivityOptions, sensitivity
from quantkit.sensitivity.measure import full_runs_of
from quantkit.types import type_by_name

#: Classes of tensors of a layer, about.
_KINDS = 7
#: What a search calls a runtime.
_RUNTIMES = {"llama.cpp": "mainline", "ik_llama.cpp": "ik"}


def sensitivity_path(places: Places) -> Path:
    """Return the file of what groups of tensors cost."""
    return places.work("sensitivity.json")


def types_of(places: Places) -> tuple[str, ...]:
    """Return the types to measure: those that are named, or those that fit the goals."""
    config = places.config
    if config.sensitivity.types:
        return tuple(type_by_name(name).name for name in config.sensitivity.types)
    goals = [t.target.goal for t in config.goals if t.target.goal is not None]
    return types_for(goals, config.runtime, places.model.weights)


def _is_fed(places: Places) -> bool:
    """Tell whether costs are also measured with error feedback."""
    return places.config.sensitivity.feedback and any(t.target.feedback for t in places.config.goals)


def sensitivity_step(places: Places) -> Step:
    """Return the measurement of what each group costs in each type."""
    settings, model, out = places.config.sensitivity, places.model, sensitivity_path(places)
    types, ctx, fed = types_of(places), settings.ctx or model.ctx, _is_fed(places)
    inputs = {"the model": places.source, "the text": places.sensitivity_text}
    if places.imatrix is not None:
        inputs["the importance matrix"] = places.imatrix
    if fed:
        inputs["the covariances"] = places.covariance

    def run(tell: Tell) -> Facts:
        found = sensitivity(
            places.source,
            out,
            [places.sensitivity_text],
            options=SensitivityOptions(
                types=types,
                imatrix=places.imatrix,
                groups=settings.groups,
                feedback=places.covariance if fed else None,
                n_ctx=ctx,
                chunks=settings.chunks,
                full_runs=settings.full_runs,
                proxies_only=settings.proxies_only,
                threads=places.threads or None,
                max_ram=places.config.max_ram,
                cache=places.cache,
                cache_size=places.config.cache_size,
                resume=True,
                overwrite=True,
            ),
            progress=lambda now: tell(now.done, now.total, now.text),
        )
        for note in found.settings.get("notes", ()):
            tell.note(note)
        return {"groups": len(found.groups), "types": list(types), "measured": len(found.costs)}

    def expected() -> Expected:
        tokens = places.measured_tokens(places.sensitivity_text, ctx, settings.chunks)
        once = estimate.forward_seconds(model.active, tokens, places.threads)
        encoding = sum(
            estimate.encoded_seconds(type_by_name(name), model.weights, places.threads, fed=each)
            for name in types
            for each in {False, fed}
        )
        # Each pair that runs to the end runs the layers behind the group, half of them in the mean.
        full = full_runs_of(settings.full_runs, len(types)) or len(types)
        groups = _KINDS * model.n_layers + 2
        pairs = groups * (1 if settings.proxies_only else min(full, len(types)) * (1 + fed))
        return Expected(None, once * (1 + pairs / 2) + encoding)

    return Step(
        "sensitivity",
        f"what each group of tensors costs in {len(types)} types",
        inputs,
        {
            **{"types": list(types), "groups": settings.groups, "ctx": ctx, "chunks": settings.chunks},
            **{"proxies_only": settings.proxies_only, "feedback": fed},
            **({} if settings.full_runs is None else {"full_runs": settings.full_runs}),
        },
        (out,),
        run,
        expected,
        whole=lambda: not journal_path(out).exists(),
    )


def candidates_step(places: Places) -> Step:
    """Return the computation of the model's own logits on the text that recipes are chosen by."""
    settings = places.config.sensitivity
    return logits_step(
        places,
        "candidates",
        "what the model itself predicts on the text to choose by",
        places.sensitivity_text,
        places.candidates,
        settings.ctx,
        settings.chunks,
        "auto",
    )


def search_step(places: Places, settings: TargetSettings) -> Step:
    """Return the search of a recipe that meets a goal."""
    config, goal, called = places.config, settings.target.goal, settings.called
    assert goal is not None
    limits = config.search
    out, chosen = recipe_path(places, called), chosen_path(places, called)
    inputs = {"the sensitivity": sensitivity_path(places), "the model": places.source}
    if limits.candidates > 1:
        inputs["the base logits"] = places.candidates
    if places.imatrix is not None:
        inputs["the importance matrix"] = places.imatrix
    if settings.target.feedback:
        inputs["the covariances"] = places.covariance
    given: dict[str, object] = {
        "goal": [goal.kind, goal.value],
        "runtime": config.runtime,
        "merge_up_gate": config.merge_up_gate,
        **{
            n: getattr(limits, n) for n in ("types", "same", "allow", "at_least", "at_most", "candidates", "time_limit")
        },
    }

    def run(tell: Tell) -> Facts:
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
            imatrix=places.imatrix,
            feedback=places.covariance if settings.target.feedback else None,
            time_limit=limits.time_limit,
        )
        check = None
        if limits.candidates > 1:
            check = Check(
                limits.candidates,
                places.candidates,
                threads=places.threads or None,
                cache=places.cache,
                folder=places.config.work,
            )
        found = search(sensitivity_path(places), places.source, options, check=check, progress=tell.note)
        for note in found.notes:
            tell.note(note)
        return _write(places, settings, found)

    def expected() -> Expected:
        settings = config.sensitivity
        tokens = places.measured_tokens(places.sensitivity_text, settings.ctx or places.model.ctx, settings.chunks)
        measured = limits.candidates * estimate.forward_seconds(places.model.active, tokens, places.threads)
        return Expected(None, measured if limits.candidates > 1 else 1.0)

    return Step(
        f"search {called}",
        f"the types of {places.output(called).name}",
        inputs,
        given,
        (out, chosen),
        run,
        expected,
        whole=lambda: True,
    )


def _write(places: Places, settings: TargetSettings, found: SearchResult) -> Facts:
    """Write the recipe, and what else is to be told of it."""
    best, called = found.best, settings.called
    measured = None if best.check is None else best.check.sums.kld.mean
    facts: Facts = {
        "type": best.type_name,
        "rules": best.options.rules,
        "nbytes": best.nbytes,
        "bpw": best.bpw,
        "predicted": best.kld,
        "measured": None if measured is None else measured.as_dict(),
        "candidates": len(found.allocations),
    }
    comments = [
        f"quantkit cook, target {settings.target.text}: {best.nbytes} bytes, {best.bpw:.4f} bits per weight,",
        f"predicted divergence {best.kld:.5f}; quantkit quantize -r {called}.recipe IN OUT {best.type_name}",
    ]
    with written(chosen_path(places, called)) as part:
        part.write_text(json.dumps(facts, indent=2) + "\n")
    with written(recipe_path(places, called)) as part:
        part.write_text(text_of([(rule.pattern, rule.type) for rule in best.rules], comments, "ours"))
    return facts
