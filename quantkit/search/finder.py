"""``Finder``: the solver's programs for the allocations of a space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from quantkit.errors import RecipeError, ResourceError
from quantkit.search.allocation import Allocation
from quantkit.search.solve import Answer, Exclusion, Limit, Weights, solve
from quantkit.search.space import Space
from quantkit.units import format_size, round_up

#: How often the size limit for data is reduced because the header, which contains the rules, is too long.
_MAX_ROUNDS = 16
#: Share of the choice groups in which checked allocations must differ.
_MIN_DIFFERENCE = 0.05
#: Tangents of the root of the summed squares of flips; three are nearly always enough.
MAX_TANGENTS = 8
#: Relative difference of a tangent from the divergence below which no other tangent is tried.
_CLOSE = 1e-4


class Finder:
    """Solver for allocations of a space."""

    def __init__(self, space: Space) -> None:
        self.space, self.options = space, space.options
        self.notes: list[str] = []
        self._errors: list[Weights] = [np.array([c.error for c in group.choices]) for group in space.choice_groups]
        self.klds: list[Weights] = [np.array([c.kld for c in group.choices]) for group in space.choice_groups]
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
        exclusions: list[Exclusion] = []
        objectives: list[Sequence[Weights] | None] = [None]
        if self.options.target_kld is None:
            has_kink, quadrature = self.space.combination.kink > 0, self.space.quadrature
            objectives += [self._errors] if has_kink and quadrature else []
            objectives += [self.klds] if has_kink or quadrature else []
        while len(exclusions) < count:
            allocation = self._best_for_target(exclusions, objectives[len(exclusions) % len(objectives)])
            if allocation is None:
                if not exclusions:
                    raise self._target_error()
                return
            if not exclusions:
                self.note_limits(allocation)
            exclusions.append(Exclusion(allocation.picks, self.min_difference))
            yield allocation

    @cached_property
    def min_difference(self) -> int:
        """Number of choice groups in which checked allocations differ."""
        free_groups = sum(len(group.choices) > 1 for group in self.space.choice_groups)
        return max(1, round(_MIN_DIFFERENCE * free_groups))

    def _best_for_target(
        self, exclusions: Sequence[Exclusion], costs: Sequence[Weights] | None = None
    ) -> Allocation | None:
        if self.options.target_kld is not None:
            return self._smallest_for_kld(self.options.target_kld, exclusions)
        if self.options.target_bpw is not None:
            values = sum(math.prod(t.shape) for t in self.space.source.tensors.values())
            most = math.floor(self.options.target_bpw * values / 8)
            answer = self.solve_least([self._limit("data", most)], exclusions, costs)
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
            answer = self.solve_least([Limit(self.amounts("padded"), budget)], exclusions, costs)
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
        better = self.solve_least([self._limit("padded", self.space.total(answer.picks).padded)], exclusions)
        return self.allocation(better if better is not None and self.space.kld(better.picks) <= target else answer)

    def _solve_smallest(self, target: float, exclusions: Sequence[Exclusion]) -> Answer | None:
        """Return the smallest answer of at most ``target`` predicted divergence.

        In quadrature, the root of summed squares is concave: a tangent is an upper bound, so that answers within it are
        within the target. From the answer of least divergence on, each tangent allows a smaller answer.
        """
        sizes, space = self.amounts("padded"), self.space
        if not space.quadrature:
            return self.solve(sizes, [self.kld_limit(target, ())], exclusions)
        answer = self.solve_least([], exclusions)
        if answer is None or space.kld(answer.picks) > target:
            return None
        for _ in range(MAX_TANGENTS):
            smaller = self.solve(sizes, [self.kld_limit(target, answer.picks)], exclusions)
            if smaller is None or space.total(smaller.picks).padded >= space.total(answer.picks).padded:
                break
            answer = smaller
        return answer

    def smallest(self) -> Allocation:
        """Return the smallest allocation. Raises RecipeError if constraints on speed allow none."""
        answer = self.solve(self.amounts("padded"), [])
        if answer is None:
            raise self._speed_error()
        return self.allocation(answer)

    def least_kld(self) -> Allocation:
        """Return the allocation of least divergence at any size; of equals the smallest."""
        answer = self.solve_least([])
        if answer is None:
            raise self._speed_error()
        costs = self._tangent_costs(answer.picks)
        most = _sum(costs, answer.picks) * (1 + 1e-9)
        smaller = self.solve(self.amounts("padded"), [Limit(costs, most)])
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

    def solve_least(
        self,
        limits: Sequence[Limit],
        exclusions: Sequence[Exclusion] = (),
        costs: Sequence[Weights] | None = None,
        *,
        exact: bool = True,
    ) -> Answer | None:
        """Return the answer of least ``costs``, by default of least predicted divergence; see ``solve``.

        In quadrature, the root of summed squares is not additive, but concave, so nowhere above its tangents: the
        optimum for the tangent at an answer is no worse than that answer, and its own tangent is next. Good answers
        lead to the last tangent, of which the optimum is proven.
        """
        if costs is not None or not self.space.quadrature:
            return self.solve(costs or self._errors, limits, exclusions, exact=exact)
        answer = self.solve(self.klds, limits, exclusions, exact=False)
        for is_exact in (False, True) if exact else (False,):
            for _ in range(MAX_TANGENTS if answer is not None else 0):
                assert answer is not None
                better = self.solve(self._tangent_costs(answer.picks), limits, exclusions, exact=is_exact)
                if better is None or self.space.kld(better.picks) >= self.space.kld(answer.picks):
                    # The answer is the optimum of its own tangent, as far as that is proven.
                    answer = answer if better is None else replace(answer, gap=better.gap)
                    break
                is_close = self.is_close(answer.picks, better.picks)
                answer = better
                if is_close:
                    break
        return answer

    def is_close(self, picks: Sequence[int], better: Sequence[int]) -> bool:
        """Return whether the tangent of the divergence at ``picks`` is that at ``better``, except for a ten-thousandth.

        The optimum for the one is then taken for that of the other.
        """
        gradient, kld = self.kld_gradient(picks), self.space.kld(better)
        tangent = self.space.kld(picks) + _sum(gradient, better) - _sum(gradient, picks)
        return tangent - kld <= _CLOSE * kld

    def _flips_root(self, picks: Sequence[int]) -> float:
        """Return the root of the summed squares of flips."""
        return math.sqrt(_sum(self._squares, picks))

    def _tangent_costs(self, picks: Sequence[int]) -> list[Weights]:
        """Return additive costs that rank answers near ``picks`` as the rule does: in quadrature its tangent there."""
        if not self.space.quadrature:
            return self._errors
        root = self._flips_root(picks)
        if not root:
            return self.klds
        return [smooth + squares / (2 * root) for smooth, squares in zip(self._smooth, self._squares, strict=True)]

    def kld_gradient(self, picks: Sequence[int]) -> list[Weights]:
        """Return the additive costs that are the tangent of the divergence, in nats, at an answer."""
        if self.space.quadrature:
            return self._tangent_costs(picks)
        slope = self.space.combination.slope(_sum(self._errors, picks))
        return [errors * np.float64(slope) for errors in self._errors]

    def kld_floor(self, most: float) -> list[Weights]:
        """Return additive costs that are nowhere above the divergence of an answer of at most ``most`` nats."""
        space = self.space
        if not space.quadrature:
            # A concave function is above its chord.
            slope = most / space.combination.inverse(most) if most else space.combination.scale
            return [errors * np.float64(slope) for errors in self._errors]
        root = most - math.fsum(float(row.min()) for row in self._smooth)
        if root <= 0:
            return self._smooth
        return [smooth + squares / root for smooth, squares in zip(self._smooth, self._squares, strict=True)]

    # --- limits ---

    def kld_limit(self, most: float, picks: Sequence[int]) -> Limit:
        """Return the limit of ``most`` nats; in quadrature a stricter one, exact at the answer ``picks``."""
        if not self.space.quadrature:
            return Limit(self._errors, self.space.combination.inverse(most))
        return Limit(self._tangent_costs(picks), most - self._flips_root(picks) / 2)

    def solve(
        self,
        costs: Sequence[Weights],
        limits: Sequence[Limit],
        exclusions: Sequence[Exclusion] = (),
        *,
        exact: bool = True,
    ) -> Answer | None:
        """Return the answer of least cost within limits and those on speed; not ``exact``: a good one, if any."""
        all_limits = [*limits, *self._speed_limits]
        floats = [cost.astype(np.float64) for cost in costs]
        options = self.options
        return solve(
            floats,
            all_limits,
            exclusions=exclusions,
            time_limit=options.time_limit,
            gap=options.gap,
            exact=exact,
        )

    def amounts(self, name: str) -> list[Weights]:
        return [np.array([getattr(c.footprint, name) for c in group.choices]) for group in self.space.choice_groups]

    def _limit(self, name: str, most: float) -> Limit:
        return Limit(self.amounts(name), most - getattr(self.space.fixed, name))

    @property
    def _speed_limits(self) -> list[Limit]:
        limits = []
        if self.options.max_read is not None:
            limits.append(self._limit("read", self.options.max_read))
        if self.options.min_speed is not None:
            limits.append(self._limit("seconds", 1 / self.options.min_speed))
        return limits

    # --- messages ---

    def note_limits(self, allocation: Allocation) -> None:
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
        read = fixed.read + sum(int(row.min()) for row in self.amounts("read"))
        text = f"the minimum read per token is {format_size(read)} ({read} bytes)"
        if self.options.min_speed is not None:
            seconds = fixed.seconds + sum(float(row.min()) for row in self.amounts("seconds"))
            text += f", the maximum tokens per second {1 / seconds:.4g}" if seconds else ""
        option = "--max-read" if self.options.max_read is not None else "--min-speed"
        both = self.options.max_read is not None and self.options.min_speed is not None
        return RecipeError(f"{'--max-read and --min-speed' if both else option}: {text}", "QK-E213")


def _sum(costs: Sequence[Weights], picks: Sequence[int]) -> float:
    """Return the sum of the costs of an answer."""
    return math.fsum(row[pick] for row, pick in zip(costs, picks, strict=True))
