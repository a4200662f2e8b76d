"""``merge_imatrix`` and ``convert_imatrix``: files of importance matrices to one file, in either format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.arguments import checked
from quantkit.formats.imatrix import Format, Imatrix, format_of, read_imatrix, write_imatrix
from quantkit.formats.outputs import Output, check_apart
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.imatrix.files import Names, convert, merge, with_names
from quantkit.imatrix.fill import apply_fill, filled_experts, without_fill
from quantkit.imatrix.show import experts_of
from quantkit.options.imatrix import Fill


@dataclass(frozen=True, eq=False)
class ImatrixFile(HtmlTable):
    """An importance matrix in a format, its file (None: it was not written), and notes on what a conversion lost."""

    imatrix: Imatrix
    format: Format
    path: Path | None
    notes: tuple[str, ...] = ()

    def as_table(self) -> Table:
        """Return entries, chunks and tokens of a chunk."""
        matrix, name = self.imatrix, None if self.path is None else self.path.name
        row = (name, self.format, len(matrix.entries), matrix.chunk_count, matrix.chunk_size or None)
        return table_of("file, format, entries, chunks, tokens per chunk", [row])

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        matrix = self.imatrix
        return {
            "file": None if self.path is None else str(self.path),
            "format": self.format,
            "sha256": None if self.path is None else replace(matrix, path=self.path).sha256,
            "bytes": None if self.path is None else self.path.stat().st_size,
            "entries": len(matrix.entries),
            "datasets": matrix.datasets,
            "n_ctx": matrix.chunk_size or None,
            "n_chunks": matrix.chunk_count,
            "notes": list(self.notes),
        }


@checked
def merge_imatrix(
    inputs: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    model: str | Path | None = None,
    format: Format | None = None,  # noqa: A002 - the word for a file's format
    chunk_size: int | None = None,
    names: Names | None = None,
    fill: Fill | None = None,
    overwrite: bool = False,
) -> ImatrixFile:
    """Merge importance matrices of one model as if one run had seen all their texts.

    Sums and token counts are added expert by expert, so every token has the same weight.

    Args:
        inputs: GGUF or .dat files, mixed as needed.
        output: the file to write; None to return the matrix only.
        model: a GGUF file, for the numbers of experts of a .dat.
        format: "gguf" or "dat"; None: by the name of ``output``.
        chunk_size: tokens per call of a .dat; None: that of a GGUF input, or 512.
        names: names of up and gate experts: "merged", "separate" or "both"; None: unchanged.
        fill: how to fill experts without tokens: see ``ImatrixOptions``.
        overwrite: replace an existing output.

    Raises:
        FormatError: a file is damaged, or matrices have different shapes.
        ResourceError: the output exists, or is one of the inputs.
    """
    matrices = [read_imatrix(path) for path in inputs]
    experts = experts_of(model, {name for matrix in matrices for name in matrix.entries})
    merged = merge(matrices, chunk_size=chunk_size, experts=experts)
    rewriting = _Rewriting(experts, format, chunk_size, names, fill)
    return rewriting.write(merged.imatrix, merged.notes, output, [*inputs, model], overwrite=overwrite)


@checked
def convert_imatrix(
    source: str | Path,
    output: str | Path | None = None,
    *,
    model: str | Path | None = None,
    format: Format | None = None,  # noqa: A002
    chunk_size: int | None = None,
    names: Names | None = None,
    fill: Fill | None = None,
    overwrite: bool = False,
) -> ImatrixFile:
    """Convert an importance matrix between GGUF and .dat; rename or fill experts.

    Arguments and errors as for ``merge_imatrix``; ``notes`` of the result list what the other format cannot store.
    """
    matrix = read_imatrix(source)
    experts = experts_of(model, matrix.entries)
    rewriting = _Rewriting(experts, format, chunk_size, names, fill)
    return rewriting.write(matrix, (), output, [source, model], overwrite=overwrite)


@dataclass(frozen=True)
class _Rewriting:
    """A conversion of an importance matrix: tensor names, fill of empty experts, and format."""

    experts: Mapping[str, int]
    format: Format | None
    chunk_size: int | None
    names: Names | None
    fill: Fill | None

    def write(
        self,
        imatrix: Imatrix,
        notes: Sequence[str],
        output: str | Path | None,
        inputs: Sequence[str | Path | None],
        *,
        overwrite: bool,
    ) -> ImatrixFile:
        """Rename, fill and convert a matrix, and write it if there is an output."""
        check_apart([output], inputs)
        if output is None:
            kind = self.format or imatrix.format
            result, lines = self.apply(imatrix, kind)
            return ImatrixFile(result, kind, None, tuple(dict.fromkeys((*notes, *lines))))
        with Output(output, overwrite=overwrite) as target:
            path = target.path
            kind = self.format or format_of(path)
            result, lines = self.apply(imatrix, kind)
            write_imatrix(path, result, kind, chunk_size=self.chunk_size)
        return ImatrixFile(result, kind, path, tuple(dict.fromkeys((*notes, *lines))))

    def apply(self, imatrix: Imatrix, kind: Format) -> tuple[Imatrix, list[str]]:
        """Return the matrix renamed, filled and converted, and notes."""
        notes = list[str]()
        if self.fill is not None and imatrix.format == "dat":
            imatrix = self._convert(imatrix, "gguf", notes)
        if self.names is not None:
            imatrix = with_names(imatrix, self.names)
        if self.fill is not None:
            imatrix = apply_fill(imatrix, self.fill)
            notes += _fill_notes(imatrix)
        return self._convert(imatrix, kind, notes), notes

    def _convert(self, imatrix: Imatrix, kind: Format, notes: list[str]) -> Imatrix:
        result = convert(imatrix, kind, chunk_size=self.chunk_size, experts=self.experts)
        notes += result.notes
        return result.imatrix


def _fill_notes(imatrix: Imatrix) -> Iterator[str]:
    fills = filled_experts(imatrix)
    left = [n for n, e in without_fill(imatrix).entries.items() if not e.counts.any() and n not in fills]
    yield f"{sum(map(len, fills.values()))} experts without tokens filled in {len(fills)} entries"
    if left:
        yield f"nothing to fill from, since no expert has tokens: {', '.join(left)}"
