"""Plan, progress and summary of an export, in the terms of transformers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import click

from quantkit.cli._run_report import RunReport, dry_run_line
from quantkit.cli._table import fold, table
from quantkit.export import ExportPlan
from quantkit.names import printable
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.pipeline.run import RunResult
from quantkit.units import format_count, format_seconds, format_size

#: Maximum number of files that are listed one by one.
_MAX_FILES = 4


def _star_numbers(text: str) -> str:
    """Return a name with a star for each number, so that those of all layers and experts agree."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", text)


@dataclass(frozen=True)
class ExportReport:
    """The plan of an export, for people and programs."""

    export: ExportPlan

    def text(self, refused: str | None) -> str:
        """Return the output of a dry run: files, and tensors with one line for all layers and experts."""
        rows = [
            (name, shape, type_name, len(tensors), format_size(sum(t.nbytes for t in tensors)), reason)
            for (name, shape, type_name, reason), tensors in self._group_tensors().items()
        ]
        lines = [
            table(["tensor", "shape", "type", "number", "size", "why"], rows, left=(0, 1, 2, 5), droppable=(5, 1)),
            "",
        ]
        return "\n".join(
            [*lines, self._totals(), *self._files(""), self._target_line("will be"), dry_run_line(refused)]
        )

    def summary(self, run: RunResult, threads: int) -> str:
        """Return the summary of a finished export."""
        if run.was_complete:
            return f"{printable(self.export.folder)}: already complete"
        rate = format_count(self.export.plan.n_values / max(run.seconds, 1e-9))
        lines = [
            self._totals(),
            f"{format_seconds(run.seconds)} on {threads} threads: {rate} weights per second",
            *self._files("wrote "),
            self._target_line("is"),
        ]
        return "\n".join(lines)

    def as_dict(self, refused: str | None = None) -> dict[str, Any]:
        """Return the plan for programs; shapes are the outermost dimension first."""
        plan, opened = self.export.plan, self.export.opened
        return {
            "class": self.export.architecture,
            "dtype": opened.dtype,
            "source": {"files": [str(path) for path in plan.source.paths], "bytes": self._source_bytes()},
            "files": [
                *({"path": str(s.path), "bytes": s.layout.nbytes} for s in plan.shards),
                *({"path": str(self.export.folder / n), "bytes": len(b)} for n, b in self.export.files.items()),
            ],
            "weights": plan.n_values,
            "bits_per_weight": plan.bpw,
            "notes": list(plan.notes),
            "refused": refused,
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(opened.expressions[t.name].shape),
                    "dtype": str(t.type),
                    "bytes": t.nbytes,
                    "file": plan.shards[t.shard].path.name,
                    "offset": t.offset,
                    "sources": [part.name for part in opened.origins[t.name]],
                    "source_types": [part.dtype for part in opened.origins[t.name]],
                }
                for t in plan.tensors
            ],
        }

    def _group_tensors(self) -> dict[tuple[str, str, str, str], list[PlannedTensor]]:
        groups: dict[tuple[str, str, str, str], list[PlannedTensor]] = {}
        for t in self.export.plan.tensors:
            shape = str(list(self.export.opened.expressions[t.name].shape))
            key = (printable(_star_numbers(t.name)), shape, str(t.type), printable(_star_numbers(t.reason)))
            groups.setdefault(key, []).append(t)
        return groups

    def _source_bytes(self) -> int:
        opened = self.export.opened
        files = [opened.model] if opened.mmproj is None else [opened.model, opened.mmproj]
        return sum(t.nbytes for file in files for t in file.tensors.values())

    def _totals(self) -> str:
        plan, before = self.export.plan, self._source_bytes()
        types = ", ".join(f"{n} {name}" for name, n in Counter(str(t.type) for t in plan.tensors).most_common())
        content = f"{format_count(plan.n_values)} weights in {len(plan.tensors)} tensors: {types}"
        bits = 8 * before / max(1, plan.n_values)
        sizes = f"{format_size(before)} ({bits:.2f} bits per weight) -> {format_size(plan.nbytes)} ({plan.bpw:.2f})"
        return f"{fold(content, 2)}\n{sizes}"

    def _target_line(self, verb: str) -> str:
        return f"{printable(self.export.folder)} {verb} a checkpoint of {self.export.architecture}"

    def _files(self, before: str) -> list[str]:
        """Return a line for each file of weights, or one for many, and one for the small ones."""
        shards = self.export.plan.shards
        lines = [f"{before}{printable(shard.path)} ({shard.layout.nbytes} bytes)" for shard in shards]
        if len(shards) > _MAX_FILES:
            nbytes = sum(shard.layout.nbytes for shard in shards)
            ends = f"{printable(shards[0].path)} to {printable(shards[-1].path.name)}"
            lines = [f"{before}{ends} ({len(shards)} files, {nbytes} bytes)"]
        small = ", ".join(map(printable, self.export.files))
        return [*lines, fold(f"beside {'it' if len(shards) == 1 else 'them'}: {small}", 2)]


class ExportProgress(RunReport):
    """A bar on a terminal, otherwise a line per percent: with experts there are ten thousands of tensors."""

    _bytes = 0
    _last = -1

    def on_resume(self, tensors: int, nbytes: int) -> None:
        self._bytes += nbytes
        super().on_resume(tensors, nbytes)

    def on_tensor(self, tensor: PlannedTensor) -> None:
        self._bytes += tensor.nbytes
        if self._bar is not None or self.quiet:
            super().on_tensor(tensor)
            return
        percent = 100 * self._bytes // max(1, sum(t.nbytes for t in self.plan.tensors))
        if percent > self._last:
            self._last = percent
            click.echo(f"[{percent:3d} %] {printable(tensor.name)}  {printable(tensor.reason)}", err=True)
