"""``search``: the allocations of least predicted divergence."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.activations import RUNTIME
from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError
from quantkit.extras import SEARCH, check_extras
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.options.search import SearchOptions
from quantkit.progress import Progress, ProgressCallback
from quantkit.search.allocation import Allocation, Check, measure
from quantkit.search.devices import DeviceFinder
from quantkit.search.finder import Finder
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity, read_sensitivity


@dataclass(frozen=True)
class SearchResult(HtmlTable):
    """Result of ``search``: allocations, the best first (as measured, if they were checked), and notes."""

    allocations: tuple[Allocation, ...]
    space: Space
    seconds: float
    notes: tuple[str, ...]

    @property
    def best(self) -> Allocation:
        return self.allocations[0]

    def as_table(self) -> Table:
        """Return the allocations, the best first; divergences in nats per token."""
        rows = (
            (a.nbytes, a.bpw, a.kld, None if a.check is None else a.check.mean.value, len(a.rules))
            for a in self.allocations
        )
        return table_of("bytes, bpw, predicted divergence, measured divergence, rules", rows)


@checked
def search(
    sensitivity: Sensitivity | str | Path,
    source: str | Path | None = None,
    options: SearchOptions | None = None,
    *,
    check: Check | None = None,
    progress: ProgressCallback | None = None,
) -> SearchResult:
    """Return the allocation of types to groups that has the least predicted divergence at a target.

    Args:
        sensitivity: the result of ``sensitivity``, or its file.
        source: the model to quantize, of which only the header is read; default: the measured model.
        options: target and constraints.
        check: quantize and measure the best few.
        progress: called for the solver, and with each allocation that is measured.

    Raises:
        RecipeError: no allocation reaches the target; an unknown type or class; sensitivities of another model.
        ResourceError: the solver is not installed.
    """
    start = time.monotonic()
    options = options or SearchOptions()
    options.check_target()
    check_extras(SEARCH)
    measurements = load_measurements(sensitivity)
    with open_model(path := model_path(measurements, source)) as model:
        space = Space(measurements, model, with_imatrix(options, measurements, *sensitivity_files(sensitivity), path))
        finder = DeviceFinder(Finder(space)) if options.fit else Finder(space)
        count = 1 if check is None else check.count
        report = progress or (lambda now: None)
        report(Progress(0, 1 + count, "solve"))
        measured_with = measurements.settings.get("activations", RUNTIME)
        activations = measured_with if check is None or check.activations is None else check.activations
        allocations = list(finder.best(count))
        if check is not None:
            checks = itertools.count(1)
            report(Progress(1, 1 + count, f"{len(allocations)} allocations to measure"))
            allocations = [
                replace(allocation, check=result)
                for allocation, result in measure(
                    allocations,
                    model,
                    check,
                    activations,
                    lambda line: report(Progress(1 + next(checks), 1 + count, line)),
                )
            ]
            allocations.sort(
                key=lambda allocation: math.inf if allocation.check is None else allocation.check.sums.kld.mean.value
            )
        mixed = () if activations == measured_with else (_note_mixed(measured_with, activations),)
        notes = (*mixed, *space.notes, *finder.notes, *space.runtime_lines(allocations[0].plan))
    return SearchResult(tuple(allocations), space, time.monotonic() - start, notes)


def _note_mixed(measured_with: str, activations: str) -> str:
    """Return a note on sensitivities and checks that do not compare."""
    return (
        f"the sensitivities were measured with {measured_with} activations, the allocations with {activations} ones: "
        "predicted and measured divergences differ by their rounding"
    )


def load_measurements(sensitivity: Sensitivity | str | Path) -> Sensitivity:
    """Return sensitivities, read from a file if they are a path. Raises FormatError for an invalid file."""
    measurements = sensitivity if isinstance(sensitivity, Sensitivity) else read_sensitivity(locate(sensitivity))
    if not isinstance(measurements.model, Mapping) or not isinstance(measurements.settings, Mapping):
        raise FormatError("model and settings of the sensitivities must be objects", "QK-E122")
    return measurements


def sensitivity_files(sensitivity: Sensitivity | str | Path) -> tuple[Path, ...]:
    """Return the file of sensitivities, if they are a path."""
    return () if isinstance(sensitivity, Sensitivity) else (locate(sensitivity),)


def model_path(measurements: Sensitivity, source: str | Path | None) -> Path:
    """Return the model to quantize: the one given, else the one that was measured. Raises RecipeError."""
    if source is not None:
        return locate(source)
    path = measurements.model.get("path")
    if not isinstance(path, str) or not Path(path).is_file():
        raise RecipeError(f"the measured model, {path or 'unnamed'}, does not exist: give it with -m", "QK-E401")
    return Path(path)


def with_imatrix(options: SearchOptions, measurements: Sensitivity, *neighbours: Path) -> SearchOptions:
    """Return options with the importance matrix of the sensitivities, if none is given and it exists.

    It is searched by its recorded path, and in the folders of the files ``neighbours``.
    """
    name = measurements.settings.get("imatrix")
    if options.imatrix is not None or not isinstance(name, str) or not name:
        return options
    candidates = (path for path in (Path(name), *(file.parent / name for file in neighbours)) if path.is_file())
    return replace(options, imatrix=next(candidates, None))
