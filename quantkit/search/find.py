"""The allocations of least divergence: ``search``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError, RecipeError, ResourceError
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import located
from quantkit.search.allocation import Allocation
from quantkit.search.check import Check, measured
from quantkit.search.options import SearchOptions
from quantkit.search.solve import Answer, Apart, Limit, Weights, check_solver, solve
from quantkit.search.space import Space
from quantkit.sensitivity.file import Sensitivity, read_sensitivity
from quantkit.units import format_size, round_up

#: How often the header, which names the rules, may turn out longer than was allowed for.
_ROUNDS = 16
#: Share of the units in which allocations that are checked must differ.
_DIFFER = 0.05
#: Tangents of the sum of what routers flip; three are nearly always enough.
_TANGENTS = 8


@dataclass(frozen=True)
class SearchResult:
    """What ``search`` found: allocations, the best first (as measured, if they were checked), and notes."""

    allocations: tuple[Allocation, ...]
    space: Space
    seconds: float
    notes: tuple[str, ...]

    @property
    def best(self) -> Allocation:
        return self.allocations[0]


def search(
    sensitivity: Sensitivity | str | Path,
    source: str | Path | None = None,
    options: SearchOptions | None = None,
    *,
    check: Check | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Return the allocation of types to groups that has the least predicted divergence at a target.

    Args:
        sensitivity: what ``sensitivity`` measured, or its file.
        source: the model that will be quantized; of it only the header is read. By default that which was measured.
        options: target and constraints.
        check: quantize the best few, and measure them.
        progress: told of each step.

    Raises:
        RecipeError: no allocation reaches the target, with what is possible; a type or class that there is not; costs
            of another model. ResourceError: there is no solver.
    """
    began = time.monotonic()
    options = options or SearchOptions()
    options.one_target()
    check_solver()
    known = known_of(sensitivity)
    with open_model(path := model_of(known, source)) as opened:
        space = Space(known, opened, with_imatrix(options, known, *files_of(sensitivity), path))
        finder = Finder(space)
        found = list(finder.best(1 if check is None else check.count))
        if check is not None:
            progress(f"{len(found)} allocations to measure")
            found = [replace(each, check=one) for each, one in measured(found, opened, check, progress)]
            found.sort(key=lambda each: math.inf if each.check is None else each.check.sums.kld.mean.value)
        notes = (*space.notes, *finder.notes, *space.loads(found[0].plan))
    return SearchResult(tuple(found), space, time.monotonic() - began, notes)


def known_of(given: Sensitivity | str | Path) -> Sensitivity:
    """Return what was measured, from its file if need be. Raises FormatError for facts that are none."""
    known = given if isinstance(given, Sensitivity) else read_sensitivity(Path(given))
    if not isinstance(known.model, Mapping) or not isinstance(known.settings, Mapping):
        raise FormatError("model and settings of the sensitivities must be objects")
    return known


def files_of(given: Sensitivity | str | Path) -> tuple[Path, ...]:
    """Return the file of what was measured, if it is one."""
    return () if isinstance(given, Sensitivity) else (Path(given),)


def model_of(known: Sensitivity, given: str | Path | None) -> Path:
    """Return the model that is quantized: the one given, else the one that was measured. Raises RecipeError."""
    if given is not None:
        return located(given)
    path = known.model.get("path")
    if not isinstance(path, str) or not Path(path).is_file():
        raise RecipeError(f"the model that was measured, {path or 'unnamed'}, is not there: name it with -m")
    return Path(path)


def with_imatrix(options: SearchOptions, known: Sensitivity, *beside: Path) -> SearchOptions:
    """Return options with the importance matrix that was measured with, where none is given.

    It is looked for where it is said to be, in the folder of ``beside`` files and in that of the model.
    """
    name = known.settings.get("imatrix")
    if options.imatrix is not None or not isinstance(name, str) or not name:
        return options
    found = (path for path in (Path(name), *(each.parent / name for each in beside)) if path.is_file())
    return replace(options, imatrix=next(found, None))


class Finder:
    """Solves for allocations of a space."""

    def __init__(self, space: Space) -> None:
        self.space, self.options = space, space.options
        self.notes: list[str] = []
        self._errors: list[Weights] = [np.array([c.error for c in unit.choices]) for unit in space.units]
        self._klds: list[Weights] = [np.array([c.kld for c in unit.choices]) for unit in space.units]
        self._smooth: list[Weights] = [np.array([c.kld - c.flips for c in unit.choices]) for unit in space.units]
        self._squares: list[Weights] = [np.array([c.squares for c in unit.choices]) for unit in space.units]

    def best(self, count: int) -> Iterator[Allocation]:
        """Yield the best allocations for the target, the very best first; fewer than ``count`` if there are no more.

        Each differs from those before it in a twentieth of the units. They are in turns the best by the rule of how
        divergences combine (combine.py), by the other rule there, and for plain sums: which is nearest to the truth
        differs from size to size, so that all are worth measuring.
        """
        free = sum(len(unit.choices) > 1 for unit in self.space.units)
        least = max(1, round(_DIFFER * free))
        apart: list[Apart] = []
        ways: list[Sequence[Weights] | None] = [None]
        if self.options.target_kld is None:
            bent, squares = self.space.combination.kink > 0, self.space.by_squares
            ways += [self._errors] if bent and squares else []
            ways += [self._klds] if bent or squares else []
        while len(apart) < count:
            found = self._for_target(apart, ways[len(apart) % len(ways)])
            if found is None:
                if not apart:
                    raise self._impossible()
                return
            if not apart:
                self._note(found)
            apart.append(Apart(found.picks, least))
            yield found

    def _for_target(self, apart: Sequence[Apart], costs: Sequence[Weights] | None = None) -> Allocation | None:
        if self.options.target_kld is not None:
            return self._of_kld(self.options.target_kld, apart)
        if self.options.target_bpw is not None:
            values = sum(math.prod(t.shape) for t in self.space.source.tensors.values())
            most = math.floor(self.options.target_bpw * values / 8)
            answer = self._least([self._limit("data", most)], apart, costs)
            return None if answer is None else self.allocation(answer)
        assert self.options.target_size is not None
        return self.of_size(self.options.target_size, apart, costs)

    def of_size(
        self, target: int, apart: Sequence[Apart] = (), costs: Sequence[Weights] | None = None
    ) -> Allocation | None:
        """Return the best allocation whose file has at most ``target`` bytes: by ``costs``, or by the rule.

        The header names the rules, so how much it takes is known afterwards: where that is too much, the tensors get
        less.
        """
        room = target - self.header - self.space.fixed.padded
        for _ in range(_ROUNDS):
            answer = self._least([Limit(self._amounts("padded"), room)], apart, costs)
            if answer is None:
                return None
            found = self.allocation(answer)
            if found.nbytes <= target:
                return found
            room = found.part.padded - self.space.fixed.padded - (found.nbytes - target)
        return None

    def _of_kld(self, target: float, apart: Sequence[Apart]) -> Allocation | None:
        """Return the smallest allocation that is predicted to be no worse than ``target``, and of these the best."""
        answer = self._within(target, apart)
        if answer is None:
            return None
        better = self._least([self._limit("padded", self.space.total(answer.picks).padded)], apart)
        return self.allocation(better if better is not None and self.space.kld(better.picks) <= target else answer)

    def _within(self, target: float, apart: Sequence[Apart]) -> Answer | None:
        """Return the smallest answer that is predicted to be no worse than ``target``.

        Where flips add up as squares, what is allowed by a tangent is allowed: from the least divergence on, the
        tangent at each answer allows that answer and smaller ones.
        """
        sizes, space = self._amounts("padded"), self.space
        if not space.by_squares:
            return self._solve(sizes, [Limit(self._errors, space.combination.summed(target))], apart)
        found = self._least([], apart)
        if found is None or space.kld(found.picks) > target:
            return None
        for _ in range(_TANGENTS):
            most = target - self._root(found.picks) / 2
            smaller = self._solve(sizes, [Limit(self._costs_at(found.picks), most)], apart)
            if smaller is None or space.total(smaller.picks).padded >= space.total(found.picks).padded:
                break
            found = smaller
        return found

    def smallest(self) -> Allocation:
        """Return the smallest allocation. Raises RecipeError if the constraints on speed allow none."""
        answer = self._solve(self._amounts("padded"), [])
        if answer is None:
            raise self._too_slow()
        return self.allocation(answer)

    def least_kld(self) -> Allocation:
        """Return the allocation of least divergence, whatever its size; of equals the smallest."""
        answer = self._least([])
        if answer is None:
            raise self._too_slow()
        costs = self._costs_at(answer.picks)
        most = _sum(costs, answer.picks) * (1 + 1e-9)
        smaller = self._solve(self._amounts("padded"), [Limit(costs, most)])
        return self.allocation(smaller or answer)

    @cached_property
    def header(self) -> int:
        """Bytes of a file beside its tensors, with no rule in it."""
        plan = self.space.bare()
        alignment = int(self.space.source.get("general.alignment", 32))
        return plan.nbytes - sum(round_up(t.nbytes, alignment) for t in plan.tensors)

    def allocation(self, answer: Answer) -> Allocation:
        """Return what an answer stands for. Its plan has exactly its types."""
        space, picks = self.space, answer.picks
        rules, title = space.rules(picks), space.title(picks)
        plan = space.plan(title, rules)
        types = {g.name: u.choices[pick].type for u, pick in zip(space.units, picks, strict=True) for g in u.groups}
        if sum(t.nbytes for t in plan.tensors) != space.total(picks).data:  # a bug, which must not become a wrong size
            raise ResourceError("the rules of this allocation give other types than were counted")
        kld, options = space.kld(picks), space.quantize_options(title, rules)
        return Allocation(types, kld, space.total(picks), rules, title, options, plan, answer.gap, picks)

    # --- what is least ---

    def _least(
        self, limits: Sequence[Limit], apart: Sequence[Apart] = (), costs: Sequence[Weights] | None = None
    ) -> Answer | None:
        """Return the answer of least ``costs``, by default of least predicted divergence.

        Where flips add up as squares, the root of that sum is no sum over groups, but nowhere above its tangents. So
        what is best by the tangent at an answer is no worse than that answer, and its own tangent is next.
        """
        if costs is not None or not self.space.by_squares:
            return self._solve(costs or self._errors, limits, apart)
        found = self._solve(self._klds, limits, apart)
        for _ in range(_TANGENTS if found is not None else 0):
            assert found is not None
            better = self._solve(self._costs_at(found.picks), limits, apart)
            if better is None or self.space.kld(better.picks) >= self.space.kld(found.picks):
                break
            found = better
        return found

    def _root(self, picks: Sequence[int]) -> float:
        """Return what flips come to."""
        return math.sqrt(_sum(self._squares, picks))

    def _costs_at(self, picks: Sequence[int]) -> list[Weights]:
        """Return costs that add up, and rank answers near ``picks`` as the rule does: the tangent there, if need be."""
        if not self.space.by_squares:
            return self._errors
        root = self._root(picks)
        if not root:
            return self._klds
        return [smooth + squares / (2 * root) for smooth, squares in zip(self._smooth, self._squares, strict=True)]

    # --- limits ---

    def _solve(self, costs: Sequence[Weights], limits: Sequence[Limit], apart: Sequence[Apart] = ()) -> Answer | None:
        every = [*limits, *self._speed]
        floats = [cost.astype(np.float64) for cost in costs]
        return solve(floats, every, apart=apart, time_limit=self.options.time_limit, gap=self.options.gap)

    def _amounts(self, name: str) -> list[Weights]:
        return [np.array([getattr(c.part, name) for c in unit.choices]) for unit in self.space.units]

    def _limit(self, name: str, most: float) -> Limit:
        return Limit(self._amounts(name), most - getattr(self.space.fixed, name))

    @property
    def _speed(self) -> list[Limit]:
        limits = []
        if self.options.max_read is not None:
            limits.append(self._limit("read", self.options.max_read))
        if self.options.min_speed is not None:
            limits.append(self._limit("seconds", 1 / self.options.min_speed))
        return limits

    # --- what is said ---

    def _note(self, found: Allocation) -> None:
        """Note what limits an allocation beside its target."""
        if found.gap:
            whole = found.kld if self.space.by_squares else _sum(self._errors, found.picks)
            share = found.gap / whole if whole else 0.0
            self.notes.append(
                f"the time was up after {self.options.time_limit:g} s: the optimum may have "
                f"{100 * share:.2g} % less divergence (--time-limit)"
            )
        sized = self.options.target_size is not None or self.options.target_bpw is not None
        costs = self._costs_at(found.picks) if sized else []
        if sized and all(each[pick] == each.min() for each, pick in zip(costs, found.picks, strict=True)):
            self.notes.append(
                f"no larger allocation is better: {format_size(found.nbytes)} is the most these types are good for"
            )

    def _impossible(self) -> RecipeError:
        """Return why there is no allocation."""
        smallest = self.smallest()
        if self.options.target_kld is not None:
            least = self.least_kld()
            return RecipeError(
                f"--target-kld {self.options.target_kld:g}: the least that is predicted is {least.kld:.4g}, in "
                f"{format_size(least.nbytes)} ({least.nbytes} bytes)"
            )
        if self.options.target_bpw is not None:
            wanted, least_of = f"--target-bpw {self.options.target_bpw:g}", f"{smallest.bpw:.4f} bpw"
        else:
            wanted, least_of = f"--target-size {self.options.target_size}", f"{smallest.nbytes} bytes"
        return RecipeError(
            f"{wanted}: the smallest allocation of these types has {least_of} ({format_size(smallest.nbytes)}, "
            f"predicted divergence {smallest.kld:.4g}): allow smaller types, or raise the target"
        )

    def _too_slow(self) -> RecipeError:
        """Return how fast the fastest allocation is."""
        fixed = self.space.fixed
        read = fixed.read + sum(int(row.min()) for row in self._amounts("read"))
        text = f"the least that a token can read is {format_size(read)} ({read} bytes)"
        if self.options.min_speed is not None:
            seconds = fixed.seconds + sum(float(row.min()) for row in self._amounts("seconds"))
            text += f", the most tokens per second {1 / seconds:.4g}" if seconds else ""
        given = "--max-read" if self.options.max_read is not None else "--min-speed"
        both = self.options.max_read is not None and self.options.min_speed is not None
        return RecipeError(f"{'--max-read and --min-speed' if both else given}: {text}")


def _sum(costs: Sequence[Weights], picks: Sequence[int]) -> float:
    """Return what an answer costs."""
    return math.fsum(each[pick] for each, pick in zip(costs, picks, strict=True))
