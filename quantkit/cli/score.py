"""``quantkit score``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from quantkit.activations import EXACT, MEANINGS, RUNTIME
from quantkit.cli._evaluation import (
    MODEL,
    TEXT,
    activations_option,
    claim_json,
    hub_model,
    hub_options,
    json_option,
    load_options,
    report,
    run_options,
)
from quantkit.cli._options import GroupedCommand, echo_notes, option
from quantkit.cli._paths import MODEL_FILE, TEXT_FILE
from quantkit.cli._progress import Bar
from quantkit.cli._table import table
from quantkit.cli._tasks import task_options
from quantkit.evaluate.passes import choose_activations
from quantkit.names import printable
from quantkit.score import PairedAccuracy, ScoreProgress, TaskScores, score
from quantkit.score.files import KINDS


@click.command("score", cls=GroupedCommand)
@option("-m", "--model", "models", group=MODEL, type=MODEL_FILE, multiple=True, help="GGUF file; repeatable.")
@hub_options
@option("--base-model", "base", group=MODEL, type=MODEL_FILE, metavar="FILE", help="Compare with this model (BF16).")
@option("-f", "-bf", "--file", "--binary-file", "file", group=TEXT, type=TEXT_FILE, required=True, help="Tasks.")
@task_options
@run_options
@activations_option("runtime, as llama-perplexity; exact with --base-model")
@json_option
def command(
    models: tuple[Path, ...],
    hf_repo: str | None,
    hf_file: str | None,
    base: Path | None,
    file: Path,
    kind: str | None,
    n_tasks: int | None,
    json_to: str | None,
    overwrite: bool,
    **run: Any,
) -> None:
    """Score a model on HellaSwag, WinoGrande, ARC, MMLU or TruthfulQA.

    Files, selected tasks and scores are llama-perplexity's; a JSONL file has the
    samples of lm-evaluation-harness (--log_samples), or lines with prompt, choices
    and answer. With --base-model, models are compared task by task: flips,
    McNemar's test, the interval of the difference.

    \b
    quantkit score -m model-Q4_K_M.gguf -f hellaswag_val_full.txt
    quantkit score -m a.gguf -m b.gguf --base-model bf16.gguf -f mmlu.bin
    """
    downloaded = hub_model(None, hf_repo, hf_file)
    models = (*models, *([downloaded] if downloaded is not None else []))
    if not models:
        raise click.UsageError("Missing option '-m' / '--model'.")
    paths = [*([base] if base is not None else []), *models]
    json_file = claim_json(json_to, (), [*paths, file], overwrite=overwrite)
    load, notes = choose_activations(load_options(run), RUNTIME if base is None else EXACT)
    results = []
    for path in paths:
        with closing(Bar(unit="task", desc=printable(path.name))) as bar:

            def progress(now: ScoreProgress, bar: Bar = bar) -> None:
                bar.update(now.current, now.total, now.text)

            results.append(
                score(path, file, kind=kind, n_tasks=n_tasks, n_batch=run["n_batch"], progress=progress, **load)
            )
    echo_notes(dict.fromkeys([*notes, *(note for result in results for note in result.notes)]))
    has_base = base is not None
    report(json_to, json_file, _text(file, results, has_base=has_base), _as_dict(file, results, has_base=has_base))


def _text(file: Path, results: Sequence[TaskScores], *, has_base: bool) -> str:
    first = results[0]
    lines = [f"{printable(file.name)}: {len(first.numbers):,} of {first.n_in_file:,} tasks of {KINDS[first.kind]}"]
    for metric in first.correct:
        rows = []
        for i, result in enumerate(results):
            accuracy = result.accuracies[metric]
            row = [printable(result.model.name), f"{100 * accuracy.value:.2f}", _percent_interval(*accuracy.interval())]
            rows.append(row + (_pair_cells(result.compare(first)[metric]) if has_base and i else [""] * 5 * has_base))
        heads = ["model", f"{metric} %", "95 % interval"]
        heads += ["flips", "difference", "95 % interval", "p", "tasks needed"] * has_base
        lines += ["", table(heads, rows, droppable=(2,))]
    if has_base:
        lines += [
            "",
            f"flips: answers that turn correct or wrong against {printable(first.model.name)}",
            "p: McNemar's exact test",
            "tasks needed: to detect this difference at p < 0.05 with a power of 80 %",
        ]
    lines += ["", MEANINGS[first.activations]]
    return "\n".join(lines)


def _pair_cells(pair: PairedAccuracy) -> list[str]:
    n_tasks = f"{pair.tasks_needed:,}" if pair.tasks_needed is not None else "-"
    interval = _percent_interval(*pair.interval(), sign="+")
    return [f"{pair.flips}", f"{100 * pair.difference:+.2f}", interval, f"{pair.p_value:.3f}", n_tasks]


def _percent_interval(low: float, high: float, sign: str = "") -> str:
    return f"{100 * low:{sign}.2f} to {100 * high:{sign}.2f}"


def _as_dict(file: Path, results: Sequence[TaskScores], *, has_base: bool) -> dict[str, Any]:
    return {
        "file": str(file),
        "kind": results[0].kind,
        "tasks_in_file": results[0].n_in_file,
        "tasks": results[0].numbers.tolist(),
        "activations": results[0].activations,
        "models": [_model_dict(result, results[0] if has_base and i else None) for i, result in enumerate(results)],
    }


def _model_dict(result: TaskScores, base: TaskScores | None) -> dict[str, Any]:
    metrics = {
        metric: {
            "accuracy": accuracy.value,
            "interval": list(accuracy.interval()),
            "correct": result.correct[metric].tolist(),
            "answers": result.answers[metric].tolist(),
        }
        for metric, accuracy in result.accuracies.items()
    }
    pairs = result.compare(base) if base is not None else {}
    return {
        "model": str(result.model),
        "metrics": metrics,
        "against_base": {metric: _pair_dict(pair) for metric, pair in pairs.items()},
        "log_likelihoods": [row.tolist() for row in result.likelihoods],
        "seconds": result.seconds,
    }


def _pair_dict(pair: PairedAccuracy) -> dict[str, Any]:
    return {
        "gains": pair.gains,
        "losses": pair.losses,
        "flips": pair.flips,
        "changes": pair.changes,
        "difference": pair.difference,
        "interval": list(pair.interval()),
        "p_value": pair.p_value,
        "tasks_needed": pair.tasks_needed,
    }
