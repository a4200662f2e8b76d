"""The last step: the report on all files of a cook, a page and a card for model hubs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from quantkit.cook.engine import Facts, Step, StepProgress
from quantkit.cook.search_steps import sensitivity_path
from quantkit.cook.steps import Paths
from quantkit.cook.target_steps import check_path, first_shard, read_check
from quantkit.report import ReportOptions, report
from quantkit.report.by_text import list_report_texts


def page_path(paths: Paths) -> Path:
    """Return the path of the page."""
    return paths.config.output / "report.html"


def card_path(paths: Paths) -> Path:
    """Return the path of the model card, with the name that hubs expect."""
    return paths.config.output / "README.md"


def report_step(paths: Paths) -> Step:
    """Return the report on all targets, with the results of their checks, if any."""
    config, model = paths.config, paths.model
    page, data = page_path(paths), paths.work("report.json")
    card = card_path(paths) if config.report.card else None
    inputs: dict[str, Path | Callable[[], Path]] = {s.label: partial(first_shard, paths, s) for s in config.targets}
    inputs["the model"] = paths.source
    if config.check.run:
        inputs |= {"the model's predictions": paths.base_logits, "the text": paths.check_text}
        inputs |= {f"the check of {s.label}": check_path(paths, s.label) for s in config.targets}
    if paths.imatrix is not None:
        inputs["the importance matrix"] = paths.imatrix
    inputs |= {f"the encoders {file.path.name}": file.path for file in paths.mmproj}
    if config.goals:
        inputs["the sensitivities"] = sensitivity_path(paths)
    inputs |= {f"the text {path.name}": path for path in list_report_texts(config.report.texts)}
    inputs |= {f"the tasks {path.name}": path for path in config.report.score}
    ctx = config.check.ctx or model.ctx

    def run(progress: StepProgress) -> Facts:
        options = ReportOptions(
            base=paths.source,
            text=paths.check_text if config.check.run else None,
            logits=paths.base_logits if config.check.run else None,
            n_ctx=ctx,
            chunks=config.check.chunks,
            texts=config.report.texts,
            score=config.report.score,
            score_tasks=config.report.score_tasks,
            imatrix=paths.imatrix,
            sensitivity=sensitivity_path(paths) if config.goals else None,
            title=config.name,
            base_model=config.report.base_model,
            license=config.report.license,
            mmproj=tuple(file.path for file in paths.mmproj),
            load=paths.measuring_options(),
        )
        files = [first_shard(paths, settings) for settings in config.targets]
        if config.check.run:
            qualities = [read_check(paths, settings.label) for settings in config.targets]
            options = replace(options, known=dict(zip(files, qualities, strict=True)))
        report(
            files,
            page,
            card=card,
            data=data,
            options=options,
            overwrite=True,
            progress=lambda now: progress(now.current, now.total, now.text),
        )
        return {"files": len(files)}

    outputs = tuple(path for path in (page, card, data) if path is not None)
    return Step(
        "report",
        f"the report on all files: {page.name}" + (f", {card.name}" if card else ""),
        inputs,
        {
            "chunks": config.check.chunks,
            "ctx": ctx,
            "activations": config.check.activations,
            "score_tasks": config.report.score_tasks,
            "title": config.name,
            "base_model": config.report.base_model,
            "license": config.report.license,
        },
        outputs,
        run,
        after=tuple(f"quantize {settings.label}" for settings in config.targets),
    )
