"""``quantkit cook``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from quantkit.cli.evaluation import TEXT_FILE
from quantkit.cli.options import SIZE, GroupedCommand, claim, echo_notes, on_command_line, option, options, setting
from quantkit.cli.table import folded, table
from quantkit.formats.outputs import written
from quantkit.names import printable
from quantkit.units import format_seconds, format_size

if TYPE_CHECKING:
    from quantkit.cook import Config, CookPlan, CookResult, Decision, Step, StepRecord

_WHAT, _TEXT, _RUN, _OUT = "What to cook", "The text", "The run", "Output"
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
#: Seconds between lines of progress where there is no terminal.
_OFTEN = 15.0
#: The share of a step that tells how long the rest will take.
_SURE = 0.02
#: Where `init` writes.
_CONFIG = Path("cook.toml")
#: What `init` takes, too.
_INIT = ("model", "pre", "text", "evaluation", "overwrite")

_cook_options = options(
    option(
        *("-f", "--file", "text"),
        group=_TEXT,
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help="Text to calibrate on: files and folders; a part is held out. Repeatable.",
    ),
    option("--evaluation", group=_TEXT, type=TEXT_FILE, help="A text to measure on; -f is then taken as it is."),
    option("--chat", group=_TEXT, multiple=True, type=_FILE, metavar="JSONL", help="Conversations to calibrate on."),
    option(
        "--pre", group=_WHAT, metavar="NAME", help="The pre-tokenizer of a checkpoint, where its hash is not known."
    ),
    option("--imatrix", group=_WHAT, type=_FILE, help="An importance matrix that is there already."),
    option("--no-imatrix", group=_WHAT, is_flag=True, help="Quantize without one."),
    option("--merge-up-gate", group=_WHAT, is_flag=True, help="Merge up and gate experts."),
    setting(
        "--runtime",
        group=_WHAT,
        type=click.Choice(["llama.cpp", "ik_llama.cpp"]),
        default="llama.cpp",
        help="Types that a search may use.",
    ),
    option("--no-check", group=_WHAT, is_flag=True, help="Do not measure the files' divergence."),
    option("--no-report", group=_WHAT, is_flag=True, help="Write no report."),
    option("-m", "--model", group=_WHAT, type=click.Path(exists=True, path_type=Path), help="With init: the model."),
    option("-t", "-j", "--threads", group=_RUN, type=click.IntRange(0), help="Threads; by default, and with 0, all."),
    option("--max-ram", group=_RUN, type=SIZE, metavar="SIZE", help="Memory for weights; the rest is streamed."),
    option("-o", "--output", group=_OUT, type=_FOLDER, metavar="DIR", help="Where the files go [NAME-cooked]."),
    option("--overwrite", group=_OUT, is_flag=True, help="With init: replace an existing file."),
    option("--dry-run", group=_OUT, is_flag=True, help="Only print the plan: what stands, what runs, how long."),
    option("--json", "as_json", group=_OUT, is_flag=True, help="Print the plan or the result as JSON."),
)


@click.command("cook", cls=GroupedCommand)
@click.argument(
    "arguments", nargs=-1, metavar="IN TARGET... | CONFIG.toml [TARGET...] | init [CONFIG.toml]", required=True
)
@_cook_options
def command(arguments: tuple[str, ...], dry_run: bool, as_json: bool, **given: Any) -> None:
    """Cook a model: everything from a checkpoint, or a GGUF file of 16 bits, to quantized files with a report.

    Converts, makes a corpus, an importance matrix and base logits, searches the best types where a TARGET is a goal,
    quantizes every TARGET, and measures how far each is from the model. A TARGET is a preset (Q4_K_M), a size (12.3G),
    bits per weight (4.2bpw) or a divergence (kld=0.01); +feedback behind it takes more time for less divergence.

    Run it again after a change, an interruption or a crash: what stands is not made again. Without TOML, the options
    say what most need; `quantkit cook init` writes a commented file with everything there is.

    \b
    quantkit cook init -m Qwen3-30B-A3B/ -f wiki.txt   # writes cook.toml
    quantkit cook cook.toml --dry-run
    quantkit cook cook.toml
    quantkit cook model-bf16.gguf Q4_K_M IQ4_XS 3.5bpw -f wiki.txt -f ~/src/project
    """
    if arguments[0] == "init":
        if said := [name for name in given if name not in _INIT and on_command_line(name)]:
            raise click.UsageError(f"{_spelled(said[0])} is no option of init: write it into the file")
        _init(arguments[1:], **given)
        return
    from quantkit.cook import cook, plan_cook

    config = _config(arguments, given)
    if dry_run:
        planned = plan_cook(config)
        echo_notes(planned.notes)
        click.echo(json.dumps(_plan_dict(planned), indent=2) if as_json else _plan_text(planned))
        return
    shown = _Shown(quiet=as_json)
    try:
        result = cook(config, observer=shown)
    except KeyboardInterrupt:
        shown.close()
        at = f" in {shown.step}" if shown.step else ""
        click.echo(f"\ninterrupted{at}; the same command goes on from there", err=True)
        sys.exit(130)
    finally:
        shown.close()
    click.echo(json.dumps(_result_dict(result), indent=2) if as_json else _result_text(result))


def _spelled(name: str) -> str:
    """Return an option as it is written, by the name of its value."""
    return next(max(p.opts, key=len) for p in click.get_current_context().command.params if p.name == name)


def _init(
    arguments: Sequence[str],
    *,
    model: Path | None,
    pre: str | None,
    text: Sequence[Path],
    evaluation: Path | None,
    overwrite: bool,
    **others: Any,
) -> None:
    """Write a file of settings."""
    from quantkit.cook import starter

    if len(arguments) > 1:
        raise click.UsageError(f"unexpected argument {arguments[1]!r}: expected init [CONFIG.toml] [-m MODEL]")
    path = Path(arguments[0]) if arguments else _CONFIG
    if path.suffix != ".toml":
        raise click.UsageError(f"{path}: the file's name ends with .toml; the model is given with -m")
    settings, notes = starter(model, path.parent, pre, texts=text, evaluation=evaluation)
    path = claim(path, model, overwrite=overwrite)
    with written(path) as part:
        part.write_text(settings)
    echo_notes(notes)
    click.echo(f"wrote {printable(path)}: look it over, then quantkit cook {printable(path)} --dry-run")


def _config(arguments: Sequence[str], given: dict[str, Any]) -> Config:
    """Return the settings of a file, or of the command line."""
    from quantkit.cook import config_from, read_config

    first, targets = arguments[0], arguments[1:]
    said = [name for name in given if on_command_line(name)]
    if first.endswith(".toml"):
        if said:
            raise click.UsageError(f"--{said[0].replace('_', '-')}: {first} says it all; change it there")
        return read_config(first, targets)
    for name, instead in (("model", "the model is the first argument"), ("overwrite", "it is an option of init")):
        if given[name]:
            raise click.UsageError(f"--{name}: {instead}")
    tables: dict[str, dict[str, Any]] = {
        "calibration": {"text": _texts(given["text"]), "chat": _texts(given["chat"])},
        "imatrix": {"run": not given["no_imatrix"]},
        "check": {"run": not given["no_check"]},
        "report": {"run": not given["no_report"]},
    }
    for table_name, name, value in (
        ("calibration", "evaluation", given["evaluation"]),
        ("imatrix", "file", given["imatrix"]),
    ):
        if value is not None:
            tables[table_name][name] = str(value)
    if given["pre"] is not None:
        tables["convert"] = {"pre": given["pre"]}
    top: dict[str, Any] = {"model": first, "targets": list(targets), "runtime": given["runtime"], **tables}
    for name in ("output", "threads", "max_ram"):
        if given[name] is not None:
            top[name] = str(given[name]) if name == "output" else given[name]
    return config_from({**top, "merge_up_gate": given["merge_up_gate"]}, "the command line", Path())


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]


# ---------------------------------------------------------------- what is printed


class _Shown:
    """Prints a line for each step, and how far it is: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet, self.step = quiet, ""
        self._bar: tqdm[Any] | None = None
        self._began = self._said = 0.0

    def planned(self, decisions: Sequence[Decision]) -> None:
        pass

    def stands(self, number: int, count: int, decision: Decision) -> None:
        self._line(f"[{number}/{count}] {decision.step.name}: stands")

    def started(self, number: int, count: int, decision: Decision) -> None:
        self.step = decision.step.name
        why = "" if decision.why == "not done yet" else f" ({decision.why})"
        self._line(f"[{number}/{count}] {self.step}: {decision.step.what}{why}")
        from quantkit.kernels.first_run import working_seconds

        self._began = self._said = working_seconds()
        if not self.quiet and sys.stderr.isatty():
            self._bar = tqdm(total=1.0, leave=False, dynamic_ncols=True, bar_format="{l_bar}{bar}| {elapsed}{postfix}")

    def progress(self, done: float, total: float, text: str) -> None:
        from quantkit.kernels.first_run import working_seconds  # a clock that stops while kernels are compiled

        at, share = working_seconds(), done / total if total else 0.0
        left = (at - self._began) * (1 - share) / share if _SURE < share <= 1 else 0.0
        words = [text] if text else []
        words += [f"about {format_seconds(left)} left"] if left > 1 else []
        if self._bar is not None:
            self._bar.set_postfix_str(printable(", ".join(words)), refresh=False)
            self._bar.update(share - self._bar.n)
        elif at - self._said > _OFTEN:
            self._said = at
            self._line(f"    {100 * share:3.0f} %{''.join(f', {each}' for each in words)}")

    def note(self, text: str) -> None:
        if not self.quiet:
            with tqdm.external_write_mode(file=sys.stderr):
                echo_notes([text])

    def finished(self, number: int, count: int, step: Step, record: StepRecord) -> None:
        self.close()
        self.step = ""
        self._line(f"    done in {format_seconds(record.seconds)}{_found(record)}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if not self.quiet:
            click.echo(folded(printable(text), 4) if text[:1] != " " else printable(text), err=True)


def _found(record: StepRecord) -> str:
    """Return what a step found, as the end of a line."""
    facts = record.facts
    if "kld" in facts:
        return f": divergence {facts['kld']['value']:.5f} ± {facts['kld']['error']:.5f}"
    if facts.get("ppl"):
        return f": perplexity {facts['ppl']['value']:.4f}, {facts['chunks']} chunks"
    if "predicted" in facts:
        return f": {format_size(facts['nbytes'])}, predicted divergence {facts['predicted']:.5f}"
    if "bpw" in facts:
        cached = f", {facts['from_cache']} tensors from the cache" if facts["from_cache"] else ""
        return f": {format_size(facts['nbytes'])}, {facts['bpw']:.2f} bits per weight{cached}"
    return ""


def _seconds(decision: Decision, planned: CookPlan) -> float | None:
    return None if decision.stands else decision.step.expected().seconds


def _plan_text(planned: CookPlan) -> str:
    rows, total, unknown = [], 0.0, False
    for decision in planned.decisions:
        seconds, nbytes = _seconds(decision, planned), decision.step.expected().nbytes
        total += seconds or 0.0
        unknown |= seconds is None and not decision.stands
        size = "" if nbytes is None else format_size(nbytes)
        about = "" if seconds is None else f"~{format_seconds(seconds)}"
        rows.append(
            (printable(decision.step.name), printable(decision.why), size, about, printable(decision.step.what))
        )
    left = sum(not d.stands for d in planned.decisions)
    lines = [table(["step", "state", "size", "time", "what"], rows, left=(0, 1, 4))]
    lines.append("")
    if left:
        about = f", about {format_seconds(total)}" if total else ""
        lines.append(f"{left} of {len(rows)} steps would run{about} (a rough figure); the files go to")
    else:
        lines.append(f"all {len(rows)} steps stand; the files are in")
    lines[-1] += f" {printable(planned.config.output)}"
    return "\n".join([*lines, "dry run: nothing was written"])


def _plan_dict(planned: CookPlan) -> dict[str, Any]:
    return {
        "model": str(planned.config.model),
        "output": str(planned.config.output),
        "notes": list(planned.notes),
        "steps": [
            {
                "name": d.step.name,
                "what": d.step.what,
                "stands": d.stands,
                "why": d.why,
                "outputs": [str(path) for path in d.step.known_outputs],
                "bytes": d.step.expected().nbytes,
                "seconds": _seconds(d, planned),
            }
            for d in planned.decisions
        ],
    }


def _result_text(result: CookResult) -> str:
    rows = []
    for dish in result.dishes:
        kld = "" if dish.kld is None else f"{dish.kld:.5f} ± {dish.kld_error:.5f}"
        ratio = "" if dish.ppl_ratio is None else f"{dish.ppl_ratio:.4f} ± {dish.ppl_ratio_error:.4f}"
        rows.append((printable(dish.path), format_size(dish.nbytes), kld, ratio))
    lines = [table(["file", "size", "KL divergence", "perplexity / model's"], rows)]
    lines += [f"wrote {printable(path)}" for path in result.reports]
    ran = f"{len(result.ran)} steps ran, {format_seconds(result.seconds)}" if result.ran else "everything stands"
    return "\n".join([*lines, ran])


def _result_dict(result: CookResult) -> dict[str, Any]:
    return {
        "ran": list(result.ran),
        "seconds": result.seconds,
        "reports": [str(path) for path in result.reports],
        "files": [{**asdict(dish), "path": str(dish.path)} for dish in result.dishes],
    }
