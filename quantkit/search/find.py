"""``search``: the allocations of least predicted divergence."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from quantkit.activations import RUNTIME
from quantkit.arguments import checked
from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.extras import SEARCH, check_extras
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import located
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.options.search import SearchOptions
from quantkit.progress import Progress, ProgressCallback
from quantkit.search.allocation import Allocation, Check, measure
from quantkit.search.solve import Answer, Exclusion, Limit, Weights, solve
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity, read_sensitivity
from quantkit.units import format_size, round_up

#: How often the size limit for data is reduced because the header, which contains the rules, is too long.
_MAX_ROUNDS = 16
#: Share of the choice groups in which checked allocations must differ.
_MIN_DIFFERENCE = 0.05
#: Tangents of the root of the summed squares of flips; three are nearly always enough.
_MAX_TANGENTS = 8


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
        finder = Finder(space)
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
    measurements = sensitivity if isinstance(sensitivity, Sensitivity) else read_sensitivity(located(sensitivity))
    if not isinstance(measurements.model, Mapping) or not isinstance(measurements.settings, Mapping):
        raise FormatError("model and settings of the sensitivities must be objects", "QK-E122")
    return measurements


def sensitivity_files(sensitivity: Sensitivity | str | Path) -> tuple[Path, ...]:
    """Return the file of sensitivities, if they are a path."""
    return () if isinstance(sensitivity, Sensitivity) else (located(sensitivity),)


def model_path(measurements: Sensitivity, source: str | Path | None) -> Path:
    """Return the model to quantize: the one given, else the one that was measured. Raises RecipeError."""
    if source is not None:
        return located(source)
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


class Finder:
    """Solver for allocations of a space."""

    def __init__(self, space: Space) -> None:
        self.space, self.options = space, space.options
        self.notes: list[str] = []
        self._errors: list[Weights] = [np.array([c.error for c in group.choices]) for group in space.choice_groups]
        self._klds: list[Weights] = [np.array([c.kld for c in group.choices]) for group in space.choice_groups]
        self._smooth: list[Weights] = [
            np.array([c.kld - c.flips for c in group.choices]) for group in space.choice_groups
        ]
        self._squares: list[Weights] = [np.array([c.squares for c in group.choices]) for group in space.choice_groups]

    def best(self, count: int) -> Iterator[Allocation]:
        """Yield up to ``count`` allocations for the target, best first.

        Each differs from those before it in a twentieth of the choice groups. They are optimal in turn for the rule of
        combination (combine.py), for the other rule there, and for plain sums: the most accurate of these differs
        between sizes, so all are worth measuring.
        """
        free_groups = sum(len(group.choices) > 1 for group in self.space.choice_groups)
        min_difference = max(1, round(_MIN_DIFFERENCE * free_groups))
        exclusions: list[Exclusion] = []
        objectives: list[Sequence[Weights] | None] = [None]
        if self.options.target_kld is None:
            has_kink, quadrature = self.space.combination.kink > 0, self.space.quadrature
            objectives += [self._errors] if has_kink and quadrature else []
            objectives += [self._klds] if has_kink or quadrature else []
        while len(exclusions) < count:
            allocation = self._best_for_target(exclusions, objectives[len(exclusions) % len(objectives)])
            if allocation is None:
                if not exclusions:
                    raise self._target_error()
                return
            if not exclusions:
                self._note_limits(allocation)
            exclusions.append(Exclusion(allocation.picks, min_difference))
            yield allocation

    def _best_for_target(
        self, exclusions: Sequence[Exclusion], costs: Sequence[Weights] | None = None
    ) -> Allocation | None:
        if self.options.target_kld is not None:
            return self._smallest_for_kld(self.options.target_kld, exclusions)
        if self.options.target_bpw is not None:
            values = sum(math.prod(t.shape) for t in self.space.source.tensors.values())
            most = math.floor(self.options.target_bpw * values / 8)
            answer = self._solve_least([self._limit("data", most)], exclusions, costs)
            return None if answer is None else self.allocation(answer)
        assert self.options.target_size is not None
        return self.best_for_size(self.options.target_size, exclusions, costs)

    def best_for_size(
        self, target: int, exclusions: Sequence[Exclusion] = (), costs: Sequence[Weights] | None = None
    ) -> Allocation | None:
        """Return the best allocation with a file of at most ``target`` bytes, by ``costs`` or predicted divergence.

        The header contains the rules, so its size is known only afterwards; if the file is too large, the problem is
        solved again with fewer bytes for tensors.
        """
        budget = target - self.header_bytes - self.space.fixed.padded
        for _ in range(_MAX_ROUNDS):
            answer = self._solve_least([Limit(self._amounts("padded"), budget)], exclusions, costs)
            if answer is None:
                return None
            allocation = self.allocation(answer)
            if allocation.nbytes <= target:
                return allocation
            budget = allocation.footprint.padded - self.space.fixed.padded - (allocation.nbytes - target)
        return None

    def _smallest_for_kld(self, target: float, exclusions: Sequence[Exclusion]) -> Allocation | None:
        """Return the smallest allocation with a predicted divergence of at most ``target``, the best of equal sizes."""
        answer = self._solve_smallest(target, exclusions)
        if answer is None:
            return None
        better = self._solve_least([self._limit("padded", self.space.total(answer.picks).padded)], exclusions)
        return self.allocation(better if better is not None and self.space.kld(better.picks) <= target else answer)

    def _solve_smallest(self, target: float, exclusions: Sequence[Exclusion]) -> Answer | None:
        """Return the smallest answer of at most ``target`` predicted divergence.

        In quadrature, the root of summed squares is concave: a tangent is an upper bound, so that answers within it are
        within the target. From the answer of least divergence on, each tangent allows a smaller answer.
        """
        sizes, space = self._amounts("padded"), self.space
        if not space.quadrature:
            return self._solve(sizes, [Limit(self._errors, space.combination.inverse(target))], exclusions)
        answer = self._solve_least([], exclusions)
        if answer is None or space.kld(answer.picks) > target:
            return None
        for _ in range(_MAX_TANGENTS):
            most = target - self._flips_root(answer.picks) / 2
            smaller = self._solve(sizes, [Limit(self._tangent_costs(answer.picks), most)], exclusions)
            if smaller is None or space.total(smaller.picks).padded >= space.total(answer.picks).padded:
                break
            answer = smaller
        return answer

    def smallest(self) -> Allocation:
        """Return the smallest allocation. Raises RecipeError if constraints on speed allow none."""
        answer = self._solve(self._amounts("padded"), [])
        if answer is None:
            raise self._speed_error()
        return self.allocation(answer)

    def least_kld(self) -> Allocation:
        """Return the allocation of least divergence at any size; of equals the smallest."""
        answer = self._solve_least([])
        if answer is None:
            raise self._speed_error()
        costs = self._tangent_costs(answer.picks)
        most = _sum(costs, answer.picks) * (1 + 1e-9)
        smaller = self._solve(self._amounts("padded"), [Limit(costs, most)])
        return self.allocation(smaller or answer)

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of a file without tensors and rules."""
        plan = self.space.baseline_plan()
        alignment = int(self.space.source.get("general.alignment", 32))
        return plan.nbytes - sum(round_up(t.nbytes, alignment) for t in plan.tensors)

    def allocation(self, answer: Answer) -> Allocation:
        """Return the allocation of an answer, with a plan that has exactly its types."""
        space, picks = self.space, answer.picks
        rules, title = space.rules(picks), space.main_type(picks)
        plan = space.plan(title, rules)
        types = {
            g.name: u.choices[pick].type for u, pick in zip(space.choice_groups, picks, strict=True) for g in u.groups
        }
        if sum(t.nbytes for t in plan.tensors) != space.total(picks).data:  # a bug in quantkit
            raise ResourceError("the rules of this allocation do not give the types that the search assigned")
        kld, options = space.kld(picks), space.quantize_options(title, rules)
        return Allocation(types, kld, space.total(picks), rules, title, options, plan, answer.gap, picks)

    # --- objectives ---

    def _solve_least(
        self, limits: Sequence[Limit], exclusions: Sequence[Exclusion] = (), costs: Sequence[Weights] | None = None
    ) -> Answer | None:
        """Return the answer of least ``costs``, by default of least predicted divergence.

        In quadrature, the root of summed squares is not additive, but concave, so nowhere above its tangents: the
        optimum for the tangent at an answer is no worse than that answer, and its own tangent is next.
        """
        if costs is not None or not self.space.quadrature:
            return self._solve(costs or self._errors, limits, exclusions)
        answer = self._solve(self._klds, limits, exclusions)
        for _ in range(_MAX_TANGENTS if answer is not None else 0):
            assert answer is not None
            better = self._solve(self._tangent_costs(answer.picks), limits, exclusions)
            if better is None or self.space.kld(better.picks) >= self.space.kld(answer.picks):
                break
            answer = better
        return answer

    def _flips_root(self, picks: Sequence[int]) -> float:
        """Return the root of the summed squares of flips."""
        return math.sqrt(_sum(self._squares, picks))

    def _tangent_costs(self, picks: Sequence[int]) -> list[Weights]:
        """Return additive costs that rank answers near ``picks`` as the rule does: in quadrature its tangent there."""
        if not self.space.quadrature:
            return self._errors
        root = self._flips_root(picks)
        if not root:
            return self._klds
        return [smooth + squares / (2 * root) for smooth, squares in zip(self._smooth, self._squares, strict=True)]

    # --- limits ---

    def _solve(
        self, costs: Sequence[Weights], limits: Sequence[Limit], exclusions: Sequence[Exclusion] = ()
    ) -> Answer | None:
        all_limits = [*limits, *self._speed_limits]
        floats = [cost.astype(np.float64) for cost in costs]
        return solve(
            floats, all_limits, exclusions=exclusions, time_limit=self.options.time_limit, gap=self.options.gap
        )

    def _amounts(self, name: str) -> list[Weights]:
        return [np.array([getattr(c.footprint, name) for c in group.choices]) for group in self.space.choice_groups]

    def _limit(self, name: str, most: float) -> Limit:
        return Limit(self._amounts(name), most - getattr(self.space.fixed, name))

    @property
    def _speed_limits(self) -> list[Limit]:
        limits = []
        if self.options.max_read is not None:
            limits.append(self._limit("read", self.options.max_read))
        if self.options.min_speed is not None:
            limits.append(self._limit("seconds", 1 / self.options.min_speed))
        return limits

    # --- messages ---

    def _note_limits(self, allocation: Allocation) -> None:
        """Add notes on limits of an allocation other than its target."""
        if allocation.gap:
            total = allocation.kld if self.space.quadrature else _sum(self._errors, allocation.picks)
            share = allocation.gap / total if total else 0.0
            self.notes.append(
                f"the search stopped after {self.options.time_limit:g} s: the optimum may have {100 * share:.2g} % "
                "less divergence; raise --time-limit"
            )
        has_size = self.options.target_size is not None or self.options.target_bpw is not None
        costs = self._tangent_costs(allocation.picks) if has_size else []
        if has_size and all(row[pick] == row.min() for row, pick in zip(costs, allocation.picks, strict=True)):
            self.notes.append(
                f"no larger allocation of these types is better than this one of {format_size(allocation.nbytes)}"
            )

    def _target_error(self) -> RecipeError:
        """Return the error for a target that no allocation reaches."""
        smallest = self.smallest()
        if self.options.target_kld is not None:
            least = self.least_kld()
            return RecipeError(
                f"--target-kld {self.options.target_kld:g}: the lowest predicted divergence is {least.kld:.4g}, in "
                f"{format_size(least.nbytes)} ({least.nbytes} bytes)",
                "QK-E213",
            )
        if self.options.target_bpw is not None:
            option, smallest_size = f"--target-bpw {self.options.target_bpw:g}", f"{smallest.bpw:.4f} bpw"
        else:
            option, smallest_size = f"--target-size {self.options.target_size}", f"{smallest.nbytes} bytes"
        return RecipeError(
            f"{option}: the smallest allocation of these types has {smallest_size} ({format_size(smallest.nbytes)}, "
            f"predicted divergence {smallest.kld:.4g}): allow smaller types, or raise the target",
            "QK-E213",
        )

    def _speed_error(self) -> RecipeError:
        """Return the error for constraints on speed that no allocation meets."""
        fixed = self.space.fixed
        read = fixed.read + sum(int(row.min()) for row in self._amounts("read"))
        text = f"the minimum read per token is {format_size(read)} ({read} bytes)"
        if self.options.min_speed is not None:
            seconds = fixed.seconds + sum(float(row.min()) for row in self._amounts("seconds"))
            text += f", the maximum tokens per second {1 / seconds:.4g}" if seconds else ""
        option = "--max-read" if self.options.max_read is not None else "--min-speed"
        both = self.options.max_read is not None and self.options.min_speed is not None
        return RecipeError(f"{'--max-read and --min-speed' if both else option}: {text}", "QK-E213")


def _sum(costs: Sequence[Weights], picks: Sequence[int]) -> float:
    """Return the sum of the costs of an answer."""
    return math.fsum(row[pick] for row, pick in zip(costs, picks, strict=True))
