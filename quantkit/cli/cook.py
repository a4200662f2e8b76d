"""``quantkit cook``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import (
    SIZE,
    GroupedCommand,
    claim,
    echo_notes,
    on_command_line,
    option,
    options,
    project_names,
    setting,
    threads_option,
)
from quantkit.cli._paths import TEXT_FILE, Place
from quantkit.cli._progress import LINE_SECONDS, has_bar, seconds_left
from quantkit.cli._table import fold, table
from quantkit.errors import RecipeError
from quantkit.formats.outputs import atomic_write
from quantkit.names import printable
from quantkit.process import interruptible
from quantkit.units import PLUS_MINUS, format_seconds, format_size

if TYPE_CHECKING:
    from quantkit.cook import Config, CookPlan, CookResult, Decision, Step, StepRecord

_MODEL = "Model"
_TEXT = "Text"
_RUN = "Run"
_OUT = "Output"
_FILE = Place(dir_okay=False, exists=True)
_FOLDER = Place(file_okay=False)
#: Default output of `init`.
_CONFIG = Path("cook.toml")
#: Options that `init` shares.
_INIT = ("model", "pre", "text", "evaluation", "overwrite")

_cook_options = options(
    option(
        "-f",
        "--file",
        "text",
        group=_TEXT,
        multiple=True,
        type=Place(exists=True),
        help="Calibration text: files and directories; a part is held out for evaluation. Repeatable.",
    ),
    option("--evaluation", group=_TEXT, type=TEXT_FILE, help="Evaluation text, instead of a part of -f."),
    option("--chat", group=_TEXT, multiple=True, type=_FILE, metavar="JSONL", help="Calibration conversations."),
    option("--pre", group=_MODEL, metavar="NAME", help="Pre-tokenizer of a checkpoint, if it is not recognized."),
    option("--imatrix", group=_MODEL, type=_FILE, help="Use this importance matrix."),
    option("--no-imatrix", group=_MODEL, is_flag=True, help="Quantize without an importance matrix."),
    option(
        "--mmproj",
        group=_MODEL,
        multiple=True,
        metavar="TYPE|FILE",
        help="Type of the mmproj file (vision and audio encoders), or an existing FILE.gguf. Repeatable.  "
        "[default: f16 of a checkpoint with encoders]",
    ),
    option("--no-mmproj", group=_MODEL, is_flag=True, help="Make no mmproj file."),
    option("--merge-up-gate", group=_MODEL, is_flag=True, help="Merge up and gate experts."),
    setting(
        "--runtime",
        group=_MODEL,
        type=project_names(("llama.cpp", "ik_llama.cpp")),
        default="llama.cpp",
        help="Runtime whose types a search may use.",
    ),
    option("--no-check", group=_MODEL, is_flag=True, help="Do not measure the divergence of the outputs."),
    option("--no-report", group=_MODEL, is_flag=True, help="Do not write a report."),
    option("--base-model", group=_MODEL, metavar="ORG/NAME", help="Model card: the base model on the hub."),
    option("--license", group=_MODEL, metavar="ID", help="Model card: license of the base model."),
    option("-m", "--model", group=_MODEL, type=Place(exists=True), help="With init: model to write the settings for."),
    threads_option,
    option(
        "--max-ram",
        group=_RUN,
        type=SIZE,
        metavar="SIZE",
        help="Maximum memory for weights; the rest is streamed from the file.",
    ),
    option("-o", "--output", group=_OUT, type=_FOLDER, metavar="DIR", help="Output directory.  [default: NAME-cooked]"),
    option("--overwrite", group=_OUT, is_flag=True, help="With init: replace an existing file."),
    option("--dry-run", group=_OUT, is_flag=True, help="Print the state and time of all steps; write nothing."),
    json_option("the plan or the result"),
)


@click.command("cook", cls=GroupedCommand, extras=None)
@click.argument(
    "arguments", nargs=-1, metavar="IN TARGET... | CONFIG.toml [TARGET...] | init [CONFIG.toml]", required=True
)
@_cook_options
def command(arguments: tuple[str, ...], dry_run: bool, json_to: JsonOutput, **values: Any) -> None:
    """Cook a model: from a checkpoint or a 16-bit GGUF file to quantized files.

    Converts, builds a calibration text, an importance matrix and base logits,
    searches types where a TARGET is a goal, quantizes every TARGET, measures its
    divergence from the base and writes a report.

    A TARGET is a preset (Q4_K_M), a size (12.3G), bits per weight (4.2bpw), a
    divergence (kld=0.01) or the memory of GPUs and host (fit=24G,64G). With
    +feedback after it, quantizing is slower and the divergence lower.

    Run it again after a change, an interruption or a crash: steps that are up to
    date are skipped. Without a TOML file, options cover the usual settings;
    `quantkit cook init` writes a commented file with all of them.

    \b
    quantkit cook init -m Qwen3-30B-A3B/ -f wiki.txt   # writes cook.toml
    quantkit cook cook.toml --dry-run
    quantkit cook cook.toml
    quantkit cook model-bf16.gguf Q4_K_M IQ4_XS 3.5bpw -f wiki.txt
    """
    if arguments[0] == "init":
        if named_options := [name for name in values if name not in _INIT and on_command_line(name)]:
            raise click.UsageError(f"{_option_name(named_options[0])} is not an option of init: set it in the file")
        _init(arguments[1:], **values)
        return
    from quantkit.cook import cook, plan_cook

    config = _config(arguments, values)
    if dry_run:
        plan = plan_cook(config)
        echo_notes(plan.notes)
        json_to.print(lambda: _plan_text(plan), lambda: _plan_dict(plan))
        return
    printer = _ProgressPrinter(quiet=json_to.only)
    try:
        with interruptible():
            result = cook(config, observer=printer)
    except KeyboardInterrupt:
        printer.close()
        place = f" in {printer.step}" if printer.step else ""
        click.echo(f"\ninterrupted{place}; the same command continues from there", err=True)
        sys.exit(130)
    finally:
        printer.close()
    json_to.print(lambda: _result_text(result), lambda: _result_dict(result))


def _option_name(name: str) -> str:
    """Return the longest name of a parameter's option."""
    return next(max(p.opts, key=len) for p in click.get_current_context().command.params if p.name == name)


def _init(
    arguments: Sequence[str],
    *,
    model: Path | None,
    pre: str | None,
    text: Sequence[Path],
    evaluation: Path | None,
    overwrite: bool,
    **_: Any,
) -> None:
    """Write a settings file."""
    from quantkit.cook import starter

    if len(arguments) > 1:
        raise click.UsageError(f"unexpected argument {arguments[1]!r}: expected init [CONFIG.toml] [-m MODEL]")
    path = Path(arguments[0]) if arguments else _CONFIG
    if path.suffix != ".toml":
        raise click.UsageError(f"{path}: the file name must end in .toml; give the model with -m")
    settings, notes = starter(model, path.parent, pre, texts=text, evaluation=evaluation)
    path = claim(path, model, overwrite=overwrite)
    with atomic_write(path) as part:
        part.write_text(settings, encoding="utf-8")
    echo_notes(notes)
    click.echo(f"wrote {printable(path)}: review it, then run quantkit cook {printable(path)} --dry-run")


def _config(arguments: Sequence[str], values: dict[str, Any]) -> Config:
    """Return the settings of a file, or of the command line."""
    from quantkit.cook import config_from, read_config
    from quantkit.cook.targets import parse_target

    first, targets = arguments[0], arguments[1:]
    named_options = [name for name in values if on_command_line(name)]
    if first.endswith(".toml"):
        if named_options:
            raise click.UsageError(
                f"--{named_options[0].replace('_', '-')}: all settings are in {first}: change it there"
            )
        return read_config(first, targets)
    for name, hint in (("model", "the model is the first argument"), ("overwrite", "it is an option of init")):
        if values[name]:
            raise click.UsageError(f"--{name}: {hint}")
    if not targets:
        raise RecipeError("no targets: give them after the model, such as Q4_K_M 4.2bpw 12G", "QK-E214")
    for text in targets:
        parse_target(text)
    tables: dict[str, dict[str, Any]] = {
        "calibration": {"text": _texts(values["text"]), "chat": _texts(values["chat"])},
        "imatrix": {"run": not values["no_imatrix"]},
        "check": {"run": not values["no_check"]},
        "report": {"run": not values["no_report"]},
    }
    for table_name, name, value in (
        ("calibration", "evaluation", values["evaluation"]),
        ("imatrix", "file", values["imatrix"]),
        ("report", "base_model", values["base_model"]),
        ("report", "license", values["license"]),
    ):
        if value is not None:
            tables[table_name][name] = str(value)
    if values["pre"] is not None:
        tables["convert"] = {"pre": values["pre"]}
    top: dict[str, Any] = {"model": first, "targets": list(targets), "runtime": values["runtime"], **tables}
    if values["mmproj"] and values["no_mmproj"]:
        raise click.UsageError("--mmproj and --no-mmproj are mutually exclusive: omit one of them")
    if values["mmproj"] or values["no_mmproj"]:
        top["mmproj"] = list(values["mmproj"]) or False
    for name in ("output", "threads", "max_ram"):
        if values[name] is not None:
            top[name] = str(values[name]) if name == "output" else values[name]
    return config_from({**top, "merge_up_gate": values["merge_up_gate"]}, "the command line", Path())


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]


# ---------------------------------------------------------------- output


class _ProgressPrinter:
    """Prints a line for each step, and its progress: a bar on a terminal, otherwise occasional lines."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet, self.step = quiet, ""
        self._bar: tqdm[Any] | None = None
        self._step_start = self._last_line = 0.0

    def plan(self, decisions: Sequence[Decision]) -> None:
        pass

    def skip(self, number: int, count: int, decision: Decision) -> None:
        self._line(f"[{number}/{count}] {decision.step.name}: up to date")

    def start(self, number: int, count: int, decision: Decision) -> None:
        self.step = decision.step.name
        reason = "" if decision.is_first else f" ({decision.reason})"
        self._line(f"[{number}/{count}] {self.step}: {decision.step.title}{reason}")
        from quantkit.kernels.first_run import working_seconds

        self._step_start = self._last_line = working_seconds()
        if not self.quiet and has_bar():
            self._bar = tqdm(total=1.0, leave=False, dynamic_ncols=True, bar_format="{l_bar}{bar}| {elapsed}{postfix}")

    def progress(self, current: float, total: float, text: str) -> None:
        from quantkit.kernels.first_run import working_seconds  # a clock that stops while kernels are compiled

        now, share = working_seconds(), current / total if total else 0.0
        left = seconds_left(now - self._step_start, share)
        words = [text] if text else []
        words += [f"about {format_seconds(left)} left"] if left > 1 else []
        if self._bar is not None:
            self._bar.set_postfix_str(printable(", ".join(words)), refresh=False)
            self._bar.update(share - self._bar.n)
        elif now - self._last_line > LINE_SECONDS:
            self._last_line = now
            self._line(f"    {100 * share:3.0f} %{''.join(f', {word}' for word in words)}")

    def note(self, text: str) -> None:
        if not self.quiet:
            with tqdm.external_write_mode(file=sys.stderr):
                echo_notes([text])

    def finish(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        self.close()
        self.step = ""
        self._line(f"    done in {format_seconds(record.seconds)}{_result_suffix(record)}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if not self.quiet:
            click.echo(fold(printable(text), 4) if text[:1] != " " else printable(text), err=True)


def _result_suffix(record: StepRecord) -> str:
    """Return the result of a step as the end of a line."""
    facts = record.facts
    if "kld" in facts:
        return f": divergence {facts['kld']['value']:.5f} ± {facts['kld']['error']:.5f} (one standard error)"
    if facts.get("ppl"):
        return f": perplexity {facts['ppl']['value']:.4f}, {facts['chunks']} chunks"
    if "predicted" in facts:
        return f": {format_size(facts['nbytes'])}, predicted divergence {facts['predicted']:.5f}"
    if "bpw" in facts:
        cached = f", {facts['from_cache']} tensors from the cache" if facts["from_cache"] else ""
        return f": {format_size(facts['nbytes'])}, {facts['bpw']:.2f} bits per weight{cached}"
    return ""


def _seconds(decision: Decision, plan: CookPlan) -> float | None:
    return None if decision.up_to_date else decision.step.estimate().seconds


def _plan_text(plan: CookPlan) -> str:
    rows = []
    total = 0.0
    unknown = False
    for decision in plan.decisions:
        seconds, nbytes = _seconds(decision, plan), decision.step.estimate().nbytes
        total += seconds or 0.0
        unknown |= seconds is None and not decision.up_to_date
        size = "" if nbytes is None else format_size(nbytes)
        about = "" if seconds is None else f"~{format_seconds(seconds)}"
        rows.append(
            (printable(decision.step.name), printable(decision.reason), size, about, printable(decision.step.title))
        )
    left = sum(not d.up_to_date for d in plan.decisions)
    lines = [table(["step", "state", "size", "time", "what"], rows, left=(0, 1, 4))]
    lines += [
        fold(printable(f"{file.path}: {file.description}, for the report and the card"), 2)
        for file in plan.paths.mmproj
        if file.type is None
    ]
    lines.append("")
    if left:
        about = f", about {format_seconds(total)}" if total else ""
        lines.append(f"{left} of {len(rows)} steps would run{about} (a rough estimate); the files go to")
    else:
        lines.append(f"all {len(rows)} steps are up to date; the files are in")
    lines[-1] += f" {printable(plan.config.output)}"
    return "\n".join([*lines, "dry run: nothing was written"])


def _plan_dict(plan: CookPlan) -> dict[str, Any]:
    return {
        "model": str(plan.config.model),
        "output": str(plan.config.output),
        "notes": list(plan.notes),
        "mmproj": [{**asdict(file), "path": str(file.path)} for file in plan.paths.mmproj],
        "steps": [
            {
                "name": d.step.name,
                "what": d.step.title,
                "stands": d.up_to_date,
                "why": d.reason,
                "outputs": [str(path) for path in d.step.static_outputs],
                "bytes": d.step.estimate().nbytes,
                "seconds": _seconds(d, plan),
            }
            for d in plan.decisions
        ],
    }


def _result_text(result: CookResult) -> str:
    rows = []
    for target in result.targets:
        kld = "" if target.kld is None else f"{target.kld:.5f} ± {target.kld_error:.5f}"
        ratio = "" if target.ppl_ratio is None else f"{target.ppl_ratio:.4f} ± {target.ppl_ratio_error:.4f}"
        rows.append((printable(target.path), format_size(target.nbytes), kld, ratio))
    rows += [(printable(file.path), format_size(file.nbytes), "", "") for file in result.mmproj]
    lines = [table(["file", "size", "KL divergence", "perplexity / model's"], rows)]
    lines += [PLUS_MINUS] if any(target.kld is not None for target in result.targets) else []
    lines += [fold(f"{printable(target.path)}: {target.fallback}", 2) for target in result.targets if target.fallback]
    lines += [f"wrote {printable(path)}" for path in result.reports]
    summary = (
        f"{len(result.executed)} steps ran, {format_seconds(result.seconds)}"
        if result.executed
        else "everything is up to date"
    )
    return "\n".join([*lines, summary])


def _result_dict(result: CookResult) -> dict[str, Any]:
    return {
        "ran": list(result.executed),
        "seconds": result.seconds,
        "reports": [str(path) for path in result.reports],
        "files": [{**asdict(target), "path": str(target.path)} for target in result.targets],
        "mmproj": [{**asdict(file), "path": str(file.path)} for file in result.mmproj],
    }
