"""``show_imatrix`` and ``diff_imatrix``: the contents of a file of an importance matrix, and two files compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.formats.gguf import open_model
from quantkit.formats.imatrix import Imatrix, read_imatrix
from quantkit.html_table import HtmlTable, Table
from quantkit.imatrix.coverage import HARDLY, Coverage, coverage
from quantkit.imatrix.difference import Difference, difference
from quantkit.imatrix.rows import expert_counts
from quantkit.imatrix.statistics import Statistics, statistics


@dataclass(frozen=True, eq=False)
class ImatrixContents(HtmlTable):
    """An importance matrix, its coverage of a model (or of its own entries), and llama-imatrix's statistics."""

    imatrix: Imatrix
    coverage: Coverage
    statistics: Statistics

    def as_table(self) -> Table:
        """Return the table of its coverage."""
        table = self.coverage.as_table()
        return table._replace(caption=f"{self.imatrix.path.name}: {len(self.imatrix.entries)} entries, {table.caption}")


@checked
def show_imatrix(
    path: str | Path, *, model: str | Path | None = None, process_output: bool = False, hardly: int = HARDLY
) -> ImatrixContents:
    """Return contents, gaps and statistics of an importance matrix.

    Args:
        path: a GGUF or .dat file; its sums are not checked, so that damaged ones can be shown.
        model: a GGUF file, to list its weights without an entry.
        process_output: also expect an entry for the output; with ``model``.
        hardly: experts with fewer tokens count as hardly hit.

    Raises FormatError for a file that is damaged or is no importance matrix.
    """
    matrix = read_imatrix(path, check=False)
    return ImatrixContents(matrix, _coverage(matrix, model, process_output, hardly), statistics(matrix))


@checked
def diff_imatrix(a: str | Path, b: str | Path, *, model: str | Path | None = None, min_tokens: int = 1) -> Difference:
    """Compare two importance matrices, of either format, as an encoder sees them: by mean squares.

    Args:
        a, b: files; ``a`` is the reference.
        model: a GGUF file, for the numbers of experts of a .dat.
        min_tokens: experts with fewer tokens in either file are left out.

    Raises FormatError for a file that is damaged or is no importance matrix.
    """
    one, two = (read_imatrix(path, check=False) for path in (a, b))
    experts = experts_of(model, one.entries.keys() | two.entries.keys())
    return difference(one, two, min_tokens=min_tokens, experts=experts)


def _coverage(imatrix: Imatrix, model: str | Path | None, process_output: bool, hardly: int) -> Coverage:
    """Return the coverage of a model by an importance matrix, or without one of its own entries."""
    if model is None:
        return coverage(imatrix, hardly=hardly)
    with open_model(model) as file:
        arch = str(file.get("general.architecture", ""))
        return coverage(imatrix, file.tensors.values(), arch=arch, process_output=process_output, hardly=hardly)


def experts_of(model: str | Path | None, entries: Iterable[str]) -> dict[str, int]:
    """Return the number of experts of each entry, according to a model's file."""
    if model is None:
        return {}
    with open_model(model) as file:
        return expert_counts(entries, file.tensors.values())
