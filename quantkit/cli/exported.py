"""What an export prints: plan, progress and summary, in the words of transformers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import click

from quantkit.cli.summary import RunReport, dry_run_line
from quantkit.cli.table import folded, table
from quantkit.export import ExportPlan
from quantkit.names import printable
from quantkit.pipeline.planned import PlannedTensor
from quantkit.pipeline.run import RunResult
from quantkit.units import format_count, format_seconds, format_size

#: Files that are named one by one.
_FEW = 4


def _starred(text: str) -> str:
    """Return a name with a star for each number: those of all layers and experts are one."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", text)


@dataclass(frozen=True)
class ExportReport:
    """The plan of an export, for people and programs."""

    planned: ExportPlan

    def text(self, refused: str | None) -> str:
        """Return what a dry run prints: tensors, those of all layers and experts in a line, and files."""
        rows = [
            (name, shape, type_name, len(of), format_size(sum(t.nbytes for t in of)), why)
            for (name, shape, type_name, why), of in self._alike().items()
        ]
        lines = [table(["tensor", "shape", "type", "number", "size", "why"], rows, left=(0, 1, 2, 5), spare=(5, 1)), ""]
        return "\n".join([*lines, self._totals(), *self._files(""), self._what("will be"), dry_run_line(refused)])

    def done(self, run: RunResult, threads: int) -> str:
        """Return what is printed when all is written."""
        rate = format_count(self.planned.plan.n_values / max(run.seconds, 1e-9))
        lines = [
            self._totals(),
            f"{format_seconds(run.seconds)} on {threads} threads: {rate} weights per second",
            *self._files("wrote "),
            self._what("is"),
        ]
        return "\n".join(lines)

    def as_dict(self, refused: str | None = None) -> dict[str, Any]:
        """Return the plan for programs; shapes are the outermost dimension first."""
        plan, opened = self.planned.plan, self.planned.opened
        return {
            "class": self.planned.architecture,
            "dtype": opened.dtype,
            "source": {"files": [str(path) for path in plan.source.paths], "bytes": self._source_bytes()},
            "files": [
                *({"path": str(s.path), "bytes": s.layout.nbytes} for s in plan.shards),
                *({"path": str(self.planned.folder / n), "bytes": len(b)} for n, b in self.planned.files.items()),
            ],
            "weights": plan.n_values,
            "bits_per_weight": plan.bpw,
            "notes": list(plan.notes),
            "refused": refused,
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(opened.made[t.name].shape),
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

    def _alike(self) -> dict[tuple[str, str, str, str], list[PlannedTensor]]:
        found: dict[tuple[str, str, str, str], list[PlannedTensor]] = {}
        for t in self.planned.plan.tensors:
            shape = str(list(self.planned.opened.made[t.name].shape))
            key = (printable(_starred(t.name)), shape, str(t.type), printable(_starred(t.reason)))
            found.setdefault(key, []).append(t)
        return found

    def _source_bytes(self) -> int:
        return sum(t.nbytes for t in self.planned.opened.model.tensors.values())

    def _totals(self) -> str:
        plan, before = self.planned.plan, self._source_bytes()
        types = ", ".join(f"{n} {name}" for name, n in Counter(str(t.type) for t in plan.tensors).most_common())
        what = f"{format_count(plan.n_values)} weights in {len(plan.tensors)} tensors: {types}"
        bits = 8 * before / max(1, plan.n_values)
        sizes = f"{format_size(before)} ({bits:.2f} bits per weight) -> {format_size(plan.nbytes)} ({plan.bpw:.2f})"
        return f"{folded(what, 2)}\n{sizes}"

    def _what(self, verb: str) -> str:
        return f"{printable(self.planned.folder)} {verb} a checkpoint of {self.planned.architecture}"

    def _files(self, before: str) -> list[str]:
        """Return a line for each file of weights, or one for many, and one for the small ones."""
        shards = self.planned.plan.shards
        lines = [f"{before}{printable(shard.path)} ({shard.layout.nbytes} bytes)" for shard in shards]
        if len(shards) > _FEW:
            nbytes = sum(shard.layout.nbytes for shard in shards)
            ends = f"{printable(shards[0].path)} to {printable(shards[-1].path.name)}"
            lines = [f"{before}{ends} ({len(shards)} files, {nbytes} bytes)"]
        small = ", ".join(map(printable, self.planned.files))
        return [*lines, folded(f"beside {'it' if len(shards) == 1 else 'them'}: {small}", 2)]


class ExportProgress(RunReport):
    """A bar on a terminal, otherwise a line for each hundredth: experts make tensors by the ten thousand."""

    _bytes = 0
    _last = -1

    def resumed(self, tensors: int, nbytes: int) -> None:
        self._bytes += nbytes
        super().resumed(tensors, nbytes)

    def finished(self, tensor: PlannedTensor) -> None:
        self._bytes += tensor.nbytes
        if self._bar is not None or self.quiet:
            super().finished(tensor)
            return
        percent = 100 * self._bytes // max(1, sum(t.nbytes for t in self.plan.tensors))
        if percent > self._last:
            self._last = percent
            click.echo(f"[{percent:3d} %] {printable(tensor.name)}  {printable(tensor.reason)}", err=True)
