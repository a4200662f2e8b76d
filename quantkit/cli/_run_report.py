"""Plan, progress and summary of a quantization."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import click
from tqdm import tqdm

from quantkit.cli._feedback_report import feedback_lines
from quantkit.cli._options import echo_notes
from quantkit.cli._progress import BAR_FORMAT, has_bar
from quantkit.cli._table import fold, table
from quantkit.errors import QuantkitError, os_error_code
from quantkit.formats.outputs import part_path
from quantkit.names import printable, tensor_class
from quantkit.pipeline.cache.run_cache import CacheUse
from quantkit.pipeline.completeness import identifies_source
from quantkit.pipeline.encoding import Action
from quantkit.pipeline.exactness import ExactTensor, exact_tensors
from quantkit.pipeline.fallback import fallback_line, fallbacks
from quantkit.pipeline.feedback_report import feedback_report
from quantkit.pipeline.grid import KEEP_GRID, grid_note
from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.run import RunResult
from quantkit.pipeline.runtimes import Runtime, runtimes
from quantkit.process import interruptible
from quantkit.quantize import QuantizeResult
from quantkit.units import format_count, format_seconds, format_shape, format_size


def _source_type(plan: Plan, tensor: PlannedTensor) -> str:
    """Return the type of a tensor's source, or the types of its parts: F16, F16+BF16."""
    return "+".join(dict.fromkeys(str(plan.source.stored_tensor(part.source).type) for part in tensor.parts))


def _row(plan: Plan, tensor: PlannedTensor) -> tuple[str, str, str, str, str]:
    """Return name, shape, type, size and reason."""
    change = str(tensor.type) if tensor.is_copy else f"{_source_type(plan, tensor)} -> {tensor.type}"
    shape = format_shape(tensor.shape)
    return printable(tensor.name), shape, change, format_size(tensor.nbytes), tensor.reason


@dataclass(frozen=True)
class _Group:
    """Tensors of one class and type."""

    name: str
    type: str
    tensors: int
    values: int
    nbytes: int
    copied: bool
    sums: ErrorSums | None

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / max(1, self.values)

    def errors(self) -> tuple[float, float] | None:
        """Return the relative RMS error, plain and weighted by importance; None if it was not measured."""
        if self.sums is None or self.sums.square <= 0:
            return None
        plain = math.sqrt(self.sums.error / self.sums.square)
        return plain, math.sqrt(
            self.sums.weighted_error / self.sums.weighted_square
        ) if self.sums.weighted_square else plain


def _groups(plan: Plan, sums: dict[str, ErrorSums]) -> list[_Group]:
    members: dict[tuple[str, str], list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        members.setdefault((tensor_class(tensor.name), str(tensor.type)), []).append(tensor)
    groups = []
    for (name, type_name), tensors in members.items():
        tensor_sums = [sums[t.name] for t in tensors if t.name in sums and not t.is_copy]
        total = None
        if tensor_sums:
            total = ErrorSums()
            for entry in tensor_sums:
                total = total + entry
        values, nbytes = sum(t.n_values for t in tensors), sum(t.nbytes for t in tensors)
        copied = all(t.is_copy for t in tensors)
        groups.append(_Group(name, type_name, len(tensors), values, nbytes, copied, total))
    return sorted(groups, key=lambda g: -g.nbytes)


def _totals(plan: Plan) -> str:
    parts = [p for t in plan.tensors for p in t.parts]
    source = sum(plan.source.stored_tensor(p.source).nbytes * p.rows // max(1, p.source_rows) for p in parts)
    target = sum(t.nbytes for t in plan.tensors)
    types = Counter(str(t.type) for t in plan.tensors)
    type_counts = ", ".join(f"{n} {name}" for name, n in types.most_common())
    before = 8 * source / max(1, plan.n_values)
    content = f"{format_count(plan.n_values)} weights in {len(plan.tensors)} tensors: {type_counts}"
    return (
        f"{fold(content, 2)}\n"
        f"{format_size(source)} ({before:.2f} bits per weight) -> {format_size(target)} ({plan.bpw:.2f})"
    )


def _total_error(groups: list[_Group]) -> str:
    """Return the relative error of all encoded tensors, as the end of a line."""
    sums = [g.sums for g in groups if g.sums is not None]
    square = sum(s.square for s in sums)
    return f", relative error {100 * math.sqrt(sum(s.error for s in sums) / square):.3f} %" if square else ""


def _runtimes(plan: Plan) -> tuple[Runtime, ...]:
    """Return the runtimes' verdicts on the output; none if it is not a model."""
    if not isinstance(plan.source.get("general.architecture"), str):
        return ()
    return runtimes({field.key: field for field in plan.fields}, plan.entries)


def _fallback_lines(plan: Plan) -> list[str]:
    line = fallback_line(plan.tensors)
    return [fold(line, 2)] if line else []


def _runtime_lines(plan: Plan) -> list[str]:
    return [fold(f"{runtime.name}: {runtime}", 2) for runtime in _runtimes(plan)]


def _grid_lines(tensors: list[ExactTensor]) -> list[str]:
    """Return lines on the weights that are exact with --keep-grid; none without it."""
    if not tensors:
        return []
    exact, total = sum(t.exact for t in tensors), sum(t.values for t in tensors)
    line = f"--keep-grid: {exact} of {total} weights in {len(tensors)} tensors are exact ({100 * exact / total:.4g} %)"
    partial = [t for t in tensors if t.exact < t.values]
    names = [f"  {printable(t.name)}: {100 * t.exact / t.values:.4g} % exact as {t.type}" for t in partial]
    ambiguous = sum(t.ambiguous_blocks for t in tensors)
    choice = f"  {ambiguous} exact blocks allow either sign of a scale: the source may have had the other one"
    return ["", line, *names, *([choice] if ambiguous else [])]


def _grid_dict(tensors: list[ExactTensor]) -> dict[str, Any]:
    return {"exact": [asdict(t) for t in tensors]} if tensors else {}


def dry_run_line(refused: str | None) -> str:
    """Return the last line of a dry run. ``refused``: the reason why the run would fail at the start."""
    refusal = f"; the run itself would refuse: {printable(refused)}" if refused is not None else ""
    return f"dry run: nothing was written{refusal}"


def cache_lines(cache: CacheUse | None, *, dry: bool = False) -> list[str]:
    """Return one line on a cache's hits, or expected hits; none without a cache or anything to encode."""
    if cache is None or not cache.tensors:
        return []
    where = printable(str(cache.folder))
    if dry:
        unread = f"; {cache.unread} more can only be looked up by reading their data" if cache.unread else ""
        return [f"from the cache {where}: {cache} that would be encoded{unread}"]
    stored = f"; kept {cache.stored} for other runs, {format_size(cache.stored_bytes)}" if cache.stored else ""
    return [f"{cache} from the cache {where}, {format_size(cache.hit_bytes)}{stored}"]


def cache_dict(cache: CacheUse | None) -> dict[str, Any]:
    """Return the same for programs: an empty dictionary without a cache."""
    return {} if cache is None else {"cache": cache.as_dict()}


class DryRunReport:
    """The plan, for people and programs."""

    def __init__(self, plan: Plan, refused: str | None = None, cache: CacheUse | None = None) -> None:
        self.plan = plan
        self.refused = refused
        self.cache = cache

    @cached_property
    def _grid_note(self) -> str:
        """The sentence on weights that lie on a grid and are not kept on it."""
        parts = (part for tensor in self.plan.tensors if not tensor.keeps_grid for part in tensor.parts)
        lossy = [part.source for part in parts if part.encoding.action is Action.ENCODE]
        return grid_note(self.plan.source, lossy, KEEP_GRID, self.plan.rules or "mainline")

    def text(self) -> str:
        files = [f"{printable(str(shard.path))}: {shard.layout.nbytes} bytes" for shard in self.plan.shards]
        tensors = (_row(self.plan, t) for t in self.plan.tensors)
        plan = table(["tensor", "shape", "type", "size", "why"], list(tensors), left=(0, 2, 4), droppable=(1,))
        lines = [plan, "", _totals(self.plan), *_fallback_lines(self.plan), *_runtime_lines(self.plan), *files]
        lines += [fold(line, 2) for line in (self._grid_note,) if line]
        lines += cache_lines(self.cache, dry=True)
        return "\n".join([*lines, dry_run_line(self.refused)])

    def as_dict(self) -> dict[str, Any]:
        """Return the plan, and what a dry run alone finds out."""
        return {**self.plan_dict(), "grid": self._grid_note or None}

    def plan_dict(self) -> dict[str, Any]:
        return {
            "type": self.plan.title,
            "rules": self.plan.rules,
            "files": [{"path": str(s.path), "bytes": s.layout.nbytes} for s in self.plan.shards],
            "weights": self.plan.n_values,
            "bits_per_weight": self.plan.bpw,
            "notes": list(self.plan.notes),
            "fallbacks": [fallback.as_dict() for fallback in fallbacks(self.plan.tensors)],
            "runtimes": {r.name: r.as_dict() for r in _runtimes(self.plan)},
            "refused": self.refused,
            **cache_dict(self.cache),
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "sources": list(dict.fromkeys(part.source.name for part in t.parts)),
                    "source_type": _source_type(self.plan, t),
                    "type": str(t.type),
                    "bytes": t.nbytes,
                    "offset": t.offset,
                    "shard": t.shard,
                    "reason": t.reason,
                    "encoder": t.encoder or None,
                    "fallback_from": str(t.fallback_from) if t.fallback_from else None,
                    "imatrix_entry": t.importance.entry if t.importance else None,
                }
                for t in self.plan.tensors
            ],
        }


def complete_text(plan: Plan) -> str:
    """Return the lines of a run with --resume whose output is already complete."""
    lines = [f"{printable(shard.path)}: already complete, {shard.layout.nbytes} bytes" for shard in plan.shards]
    if not identifies_source(plan):
        lines.append("the headers match, but they contain no provenance, so the output may be from another source")
    return "\n".join(lines)


def nodes_line(result: RunResult) -> list[str]:
    """Return one line with the bytes that each node of a cluster wrote; none without a cluster."""
    if not result.nodes:
        return []
    shares = (f"{printable(node.name)} {format_size(node.nbytes)}" for node in result.nodes)
    count = f"{len(result.nodes)} node{'' if len(result.nodes) == 1 else 's'}"
    return [fold(f"{count}: {', '.join(shares)}", 2)]


class RunReport:
    """The progress of a run (a bar on a terminal, otherwise a line per tensor), and its summary."""

    def __init__(self, plan: Plan, *, quiet: bool) -> None:
        self.plan, self.quiet = plan, quiet
        self._bar: tqdm | None = None
        self._count = 0
        #: When the first stage of a calibration in this run began, and which.
        self._began: tuple[float, int] | None = None

    @contextmanager
    def show_progress(self, hint: str) -> Iterator[None]:
        """Show the bar during the run; an interrupted one prints how to continue, ``hint`` after an OSError."""
        part = part_path(self.plan.shards[0].path)
        total = sum(t.nbytes for t in self.plan.tensors)
        if not self.quiet and has_bar():
            self._bar = tqdm(
                total=total, unit="iB", unit_scale=True, unit_divisor=1024, desc=self.plan.title, dynamic_ncols=True
            )
        try:
            with interruptible(), nullcontext() if self._bar is None else closing(self._bar):
                yield
        except KeyboardInterrupt:
            click.echo(f"\ninterrupted; continue with the same command and --resume ({printable(part)})", err=True)
            sys.exit(130)
        except OSError as e:
            raise QuantkitError(f"{e.filename or part}: {e.strerror or e}; {hint}", os_error_code(e)) from e

    def on_resume(self, tensors: int, nbytes: int) -> None:
        """Print how much of the work an earlier run finished."""
        self._count += tensors
        if self._bar is not None:
            self._bar.update(nbytes)
        if not self.quiet:
            click.echo(f"resumed: {tensors} tensors ({format_size(nbytes)}) were already done", err=True)

    def on_write(self, nbytes: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def on_tensor(self, tensor: PlannedTensor) -> None:
        """Print the tensor's line, or its name beside the bar."""
        self._count += 1
        if self._bar is not None:
            self._bar.set_postfix_str(printable(tensor.name), refresh=False)
        elif not self.quiet:
            name, _, change, size, reason = _row(self.plan, tensor)
            counter = f"[{self._count:4d}/{len(self.plan.tensors)}]"
            click.echo(f"{counter} {name:<30} {change:<14} {size:>10}  {reason}", err=True)

    def on_note(self, text: str) -> None:
        """Print a note on nodes."""
        with tqdm.external_write_mode(file=sys.stderr):
            echo_notes([text])

    def on_stage(self, stage: int, stages: int, tokens: int, total: int) -> None:
        """Show the progress of a calibration: beside the bar, or one line per stage."""
        now = time.monotonic()
        self._began = self._began or (now, stage)
        stages_done = stage - self._began[1] + tokens / total
        left = (now - self._began[0]) / stages_done * (stages - self._began[1] - stages_done)
        text = f"stage {stage + 1} of {stages}: {tokens} tokens"
        text += f", about {format_seconds(left)} left" if left else ""
        if self._bar is not None:
            # without tqdm's remaining time, which assumes the same time for every byte
            self._bar.bar_format = BAR_FORMAT
            self._bar.set_postfix_str(text, refresh=True)
        elif not self.quiet and tokens == total:
            click.echo(text, err=True)

    def text(self, result: QuantizeResult) -> str:
        """Return the summary: a table of classes, totals, time, files."""
        if result.run.was_complete:
            return complete_text(self.plan)
        groups = _groups(self.plan, result.run.sums)
        has_errors = any(g.errors() for g in groups)
        weighted = has_errors and any(t.importance is not None for t in self.plan.tensors)
        header = ["class", "type", "tensors", "weights", "size", "bpw", "rel. error", "weighted"]
        rows = []
        for g in groups:
            size = format_size(g.nbytes)
            bpw = f"{g.bpw:.2f}"
            errors = g.errors()
            error_cells = (
                [f"{100 * v:.3f} %" for v in errors] if errors else ["copied" if has_errors and g.copied else "", ""]
            )
            rows.append(
                [
                    g.name,
                    g.type,
                    g.tensors,
                    format_count(g.values),
                    size,
                    bpw,
                    error_cells[0],
                    error_cells[1] * weighted,
                ]
            )
        seconds = result.run.seconds
        rate = self.plan.n_values / max(seconds, 1e-9)
        return "\n".join(
            [
                table(header, rows, left=2),
                *feedback_lines(feedback_report(self.plan, result.run.losses)),
                *_grid_lines(exact_tensors(self.plan, result.run.sums)),
                "",
                _totals(self.plan) + _total_error(groups),
                *_fallback_lines(self.plan),
                f"{format_seconds(seconds)} on {result.threads} threads: {format_count(rate)} weights per second",
                *cache_lines(result.run.cache),
                *nodes_line(result.run),
                *_runtime_lines(self.plan),
                *(f"wrote {printable(str(shard.path))} ({shard.layout.nbytes} bytes)" for shard in self.plan.shards),
            ]
        )

    def as_dict(self, result: QuantizeResult) -> dict[str, Any]:
        """Return the summary for programs."""
        classes = []
        for g in _groups(self.plan, result.run.sums):
            errors = g.errors()
            classes.append(
                {
                    "class": g.name,
                    "type": g.type,
                    "tensors": g.tensors,
                    "weights": g.values,
                    "bytes": g.nbytes,
                    "bits_per_weight": g.bpw,
                    "relative_error": errors[0] if errors else None,
                    "weighted_relative_error": errors[1] if errors else None,
                }
            )
        feedback = feedback_report(self.plan, result.run.losses)
        return {
            **DryRunReport(self.plan).plan_dict(),
            **({} if feedback is None else {"feedback": feedback.as_dict()}),
            **_grid_dict(exact_tensors(self.plan, result.run.sums)),
            "classes": classes,
            "seconds": result.run.seconds,
            "threads": result.threads,
            "resumed_tensors": result.run.resumed,
            "was_complete": result.run.was_complete,
            **cache_dict(result.run.cache),
            "nodes": [asdict(node) for node in result.run.nodes],
        }
