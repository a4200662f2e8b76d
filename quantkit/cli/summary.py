"""What a quantization prints: plan, progress and summary."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import click
from tqdm import tqdm

from quantkit.cli.feedback_report import feedback_lines
from quantkit.cli.options import echo_notes
from quantkit.cli.table import folded, table
from quantkit.errors import QuantkitError
from quantkit.formats.outputs import part_path
from quantkit.names import printable, tensor_class
from quantkit.pipeline.cache.use import CacheUse
from quantkit.pipeline.feedback_report import feedback_report
from quantkit.pipeline.jobs import ErrorSums
from quantkit.pipeline.plan import Plan
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.run import RunResult
from quantkit.pipeline.runtimes import Runtime, runtimes
from quantkit.quantize import QuantizeResult
from quantkit.units import format_count, format_seconds, format_size


def _source_type(plan: Plan, tensor: PlannedTensor) -> str:
    """Return the type of a tensor's source, or the types of its parts: F16, F16+BF16."""
    return "+".join(dict.fromkeys(str(plan.source.stored(part.source).type) for part in tensor.parts))


def _row(plan: Plan, tensor: PlannedTensor) -> tuple[str, str, str, str, str]:
    """Return name, shape, type, size and reason."""
    change = str(tensor.type) if tensor.is_copy else f"{_source_type(plan, tensor)} -> {tensor.type}"
    shape = " x ".join(map(str, tensor.shape))
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
        measured = [sums[t.name] for t in tensors if t.name in sums and not t.is_copy]
        total = None
        if measured:
            total = ErrorSums()
            for entry in measured:
                total = total + entry
        values, nbytes = sum(t.n_values for t in tensors), sum(t.nbytes for t in tensors)
        copied = all(t.is_copy for t in tensors)
        groups.append(_Group(name, type_name, len(tensors), values, nbytes, copied, total))
    return sorted(groups, key=lambda g: -g.nbytes)


def _totals(plan: Plan) -> str:
    parts = [p for t in plan.tensors for p in t.parts]
    source = sum(plan.source.stored(p.source).nbytes * p.rows // p.source_rows for p in parts)
    target = sum(t.nbytes for t in plan.tensors)
    types = Counter(str(t.type) for t in plan.tensors)
    mix = ", ".join(f"{n} {name}" for name, n in types.most_common())
    before = 8 * source / max(1, plan.n_values)
    what = f"{format_count(plan.n_values)} weights in {len(plan.tensors)} tensors: {mix}"
    return (
        f"{folded(what, 2)}\n"
        f"{format_size(source)} ({before:.2f} bits per weight) -> {format_size(target)} ({plan.bpw:.2f})"
    )


def _total_error(groups: list[_Group]) -> str:
    """Return the relative error of all encoded tensors, as the end of a line."""
    sums = [g.sums for g in groups if g.sums is not None]
    square = sum(s.square for s in sums)
    return f", relative error {100 * math.sqrt(sum(s.error for s in sums) / square):.3f} %" if square else ""


def _runtimes(plan: Plan) -> tuple[Runtime, ...]:
    """Return what the runtimes do with the output; nothing if it is no model."""
    architecture = plan.source.get("general.architecture")
    if not isinstance(architecture, str):
        return ()
    return runtimes(architecture, ((t.name, t.type) for t in plan.tensors))


def _runtime_lines(plan: Plan) -> list[str]:
    return [folded(f"{runtime.name}: {runtime}", 2) for runtime in _runtimes(plan)]


def dry_run_line(refused: str | None) -> str:
    """Return the last line of a dry run; ``refused``: why the run itself would not begin."""
    would = f"; the run itself would refuse: {printable(refused)}" if refused is not None else ""
    return f"dry run: nothing was written{would}"


def cache_lines(cache: CacheUse | None, *, dry: bool = False) -> list[str]:
    """Return what a cache did for a run, or would do, in a line; none without one, or with nothing to encode."""
    if cache is None or not cache.tensors:
        return []
    where = printable(str(cache.folder))
    if dry:
        unread = f"; of {cache.unread} it can only be told by reading them" if cache.unread else ""
        return [f"from the cache {where}: {cache} that would be encoded{unread}"]
    kept = f"; kept {cache.kept} for other runs, {format_size(cache.kept_bytes)}" if cache.kept else ""
    return [f"{cache} from the cache {where}, {format_size(cache.taken_bytes)}{kept}"]


def cache_dict(cache: CacheUse | None) -> dict[str, Any]:
    """Return the same for programs: an empty dictionary without a cache."""
    return {} if cache is None else {"cache": {**asdict(cache), "folder": str(cache.folder)}}


class DryRunReport:
    """The plan, for people and programs."""

    def __init__(self, plan: Plan, refused: str | None = None, cache: CacheUse | None = None) -> None:
        self.plan, self.refused, self.cache = plan, refused, cache

    def text(self) -> str:
        files = [f"{printable(str(shard.path))}: {shard.layout.nbytes} bytes" for shard in self.plan.shards]
        tensors = (_row(self.plan, t) for t in self.plan.tensors)
        plan = table(["tensor", "shape", "type", "size", "why"], list(tensors), left=(0, 2, 4), spare=(1,))
        lines = [plan, "", _totals(self.plan), *_runtime_lines(self.plan), *files, *cache_lines(self.cache, dry=True)]
        return "\n".join([*lines, dry_run_line(self.refused)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.plan.title,
            "rules": self.plan.rules,
            "files": [{"path": str(s.path), "bytes": s.layout.nbytes} for s in self.plan.shards],
            "weights": self.plan.n_values,
            "bits_per_weight": self.plan.bpw,
            "notes": list(self.plan.notes),
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
                    "imatrix_entry": t.found.entry if t.found else None,
                }
                for t in self.plan.tensors
            ],
        }


def nodes_line(result: RunResult) -> list[str]:
    """Return the line that says which node of a cluster wrote how much; none without a cluster."""
    if not result.nodes:
        return []
    shares = (f"{printable(node.name)} {format_size(node.nbytes)}" for node in result.nodes)
    count = f"{len(result.nodes)} node{'' if len(result.nodes) == 1 else 's'}"
    return [folded(f"{count}: {', '.join(shares)}", 2)]


class RunReport:
    """The progress of a run (a bar on a terminal, otherwise a line per tensor), and its summary."""

    def __init__(self, plan: Plan, *, quiet: bool) -> None:
        self.plan, self.quiet = plan, quiet
        self._bar: tqdm | None = None
        self._count = 0
        #: When the first stage of a calibration in this run began, and which.
        self._began: tuple[float, int] | None = None

    @contextmanager
    def shown(self, failed: str) -> Iterator[None]:
        """Show the bar during the run; one that ends early says how to continue, ``failed`` after an OSError."""
        part = part_path(self.plan.shards[0].path)
        total = sum(t.nbytes for t in self.plan.tensors)
        if not self.quiet and sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=self.plan.title)
        try:
            with nullcontext() if self._bar is None else closing(self._bar):
                yield
        except KeyboardInterrupt:
            click.echo(f"\ninterrupted; continue with the same command and --resume ({printable(part)})", err=True)
            sys.exit(130)
        except OSError as e:
            raise QuantkitError(f"{e.filename or part}: {e.strerror or e}; {failed}") from e

    def resumed(self, tensors: int, nbytes: int) -> None:
        """Print how much an earlier run did."""
        self._count += tensors
        if self._bar is not None:
            self._bar.update(nbytes)
        if not self.quiet:
            click.echo(f"resumed: {tensors} tensors ({format_size(nbytes)}) were already done", err=True)

    def wrote(self, nbytes: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def finished(self, tensor: PlannedTensor) -> None:
        """Print the tensor's line, or its name beside the bar."""
        self._count += 1
        if self._bar is not None:
            self._bar.set_postfix_str(printable(tensor.name), refresh=False)
        elif not self.quiet:
            name, _, change, size, reason = _row(self.plan, tensor)
            done = f"[{self._count:4d}/{len(self.plan.tensors)}]"
            click.echo(f"{done} {name:<30} {change:<14} {size:>10}  {reason}", err=True)

    def said(self, text: str) -> None:
        """Print what happens to nodes."""
        with tqdm.external_write_mode(file=sys.stderr):
            echo_notes([text])

    def ran(self, stage: int, stages: int, tokens: int, total: int) -> None:
        """Say how far a calibration is: beside the bar, or a line a stage."""
        at = time.monotonic()
        self._began = self._began or (at, stage)
        done = stage - self._began[1] + tokens / total
        left = (at - self._began[0]) / done * (stages - self._began[1] - done)
        text = f"stage {stage + 1} of {stages}: {tokens} tokens"
        text += f", about {format_seconds(left)} left" if left else ""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=True)
        elif not self.quiet and tokens == total:
            click.echo(text, err=True)

    def text(self, result: QuantizeResult) -> str:
        """Return the summary: a table of classes, totals, time, files."""
        groups = _groups(self.plan, result.run.sums)
        measured = any(g.errors() for g in groups)
        weighted = measured and any(t.found is not None for t in self.plan.tensors)
        header = ["class", "type", "tensors", "weights", "size", "bpw", "rel. error", "weighted"]
        rows = []
        for g in groups:
            size, bpw, errors = format_size(g.nbytes), f"{g.bpw:.2f}", g.errors()
            shown = [f"{100 * v:.3f} %" for v in errors] if errors else ["copied" if measured and g.copied else "", ""]
            rows.append([g.name, g.type, g.tensors, format_count(g.values), size, bpw, shown[0], shown[1] * weighted])
        seconds = result.run.seconds
        rate = self.plan.n_values / max(seconds, 1e-9)
        return "\n".join(
            [
                table(header, rows, left=2),
                *feedback_lines(feedback_report(self.plan, result.run.losses)),
                "",
                _totals(self.plan) + _total_error(groups),
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
        fed = feedback_report(self.plan, result.run.losses)
        return {
            **DryRunReport(self.plan).as_dict(),
            **({} if fed is None else {"feedback": fed.as_dict()}),
            "classes": classes,
            "seconds": result.run.seconds,
            "threads": result.threads,
            "resumed_tensors": result.run.resumed,
            **cache_dict(result.run.cache),
            "nodes": [asdict(node) for node in result.run.nodes],
        }
