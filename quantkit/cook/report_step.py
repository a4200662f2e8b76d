"""The last step: a page about all files of a cook, and a card for model hubs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from quantkit.cook.engine import Facts, Step, Tell
from quantkit.cook.search_steps import sensitivity_path
from quantkit.cook.steps import Places
from quantkit.cook.target_steps import check_path, checked, first_file
from quantkit.report import ReportOptions, report


def page_path(places: Places) -> Path:
    """Return the page."""
    return places.config.output / "report.html"


def card_path(places: Places) -> Path:
    """Return the card, which hubs look for under this name."""
    return places.config.output / "README.md"


def report_step(places: Places) -> Step:
    """Return the report on all targets, with what their checks found, if there are any."""
    config, model = places.config, places.model
    page, numbers = page_path(places), places.work("report.json")
    card = card_path(places) if config.report.card else None
    inputs: dict[str, Path | Callable[[], Path]] = {s.called: partial(first_file, places, s) for s in config.targets}
    inputs["the model"] = places.source
    if config.check.run:
        inputs |= {"the model's predictions": places.base, "the text": places.check_text}
        inputs |= {f"the check of {s.called}": check_path(places, s.called) for s in config.targets}
    if places.imatrix is not None:
        inputs["the importance matrix"] = places.imatrix
    if config.goals:
        inputs["the sensitivities"] = sensitivity_path(places)
    ctx = config.check.ctx or model.ctx

    def run(tell: Tell) -> Facts:
        options = ReportOptions(
            base=places.source,
            text=places.check_text if config.check.run else None,
            logits=places.base if config.check.run else None,
            n_ctx=ctx,
            chunks=config.check.chunks,
            imatrix=places.imatrix,
            sensitivity=sensitivity_path(places) if config.goals else None,
            title=config.name,
            load=places.evaluation(),
        )
        files = [first_file(places, settings) for settings in config.targets]
        if config.check.run:
            found = [checked(places, settings.called) for settings in config.targets]
            options = replace(options, known=dict(zip(files, found, strict=True)))
        report(
            files,
            page,
            card=card,
            data=numbers,
            options=options,
            overwrite=True,
            progress=lambda what, done, todo: tell(done, todo, what),
        )
        return {"files": len(files)}

    outputs = tuple(path for path in (page, card, numbers) if path is not None)
    return Step(
        "report",
        f"what can be said of these files: {page.name}" + (f", {card.name}" if card else ""),
        inputs,
        {"chunks": config.check.chunks, "ctx": ctx, "title": config.name},
        outputs,
        run,
        after=tuple(f"quantize {settings.called}" for settings in config.targets),
    )
