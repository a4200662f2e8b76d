"""``search --fit``: the best allocation whose weights fit GPUs and host memory beside caches and compute buffers.

A layout of ``fit`` decides where each tensor is, so that each device is a limit of the integer program. There are few
layouts: a mixture of experts has those with the experts of the first k layers in memory, other models those with k
layers on the GPUs. Layouts are solved in the order of their linear relaxations, until the relaxation of the next is no
better than the best answer, which is then that of all layouts.

Compute buffers depend on the types of experts in memory, which a GPU copies for large batches: an answer that is too
large with its own buffers is solved again with these.

Several GPUs are first solved as one of the same size in total. If no division of its answer into whole layers fits, the
division with the least excess is solved with a limit for each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from quantkit.errors import RecipeError
from quantkit.fit import FitOptions
from quantkit.fit.accuracy import GPU_NOTE, accuracy_note
from quantkit.fit.command import command_line
from quantkit.fit.estimate import estimator_of
from quantkit.fit.layout import Device, Estimator, Layout
from quantkit.fit.options import MARGIN
from quantkit.fit.weights import Weights as ModelWeights
from quantkit.search.allocation import Allocation, DeviceFit
from quantkit.search.bounds import Bounds
from quantkit.search.finder import MAX_TANGENTS, Finder
from quantkit.search.placement import Placement, Rates, TensorTable, model_weights
from quantkit.search.solve import F64, Answer, Exclusion, Limit, Program, Weights
from quantkit.units import format_size

#: Default bound of the divergence of --aim speed and balance, in divergences of --aim quality.
_LOSS = 1.5
#: Maximum number of solutions of a layout, each with the buffers or the division of layers of the one before.
_ROUNDS = 16
#: Relative difference of costs that counts.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Goal:
    """Weights of divergence, in nats, and time, in seconds, of the sum to minimize, and the maximum divergence."""

    kld: float = 1.0
    seconds: float = 0.0
    max_kld: float = math.inf


@dataclass(frozen=True)
class FitAnswer:
    """An answer that fits: its layout, the placement that was solved, and the bytes of devices."""

    answer: Answer
    value: float
    placement: Placement
    layout: Layout
    devices: tuple[Device, ...]

    @property
    def picks(self) -> tuple[int, ...]:
        return self.answer.picks


class DeviceFinder:
    """Solver for allocations of a space that fit devices."""

    def __init__(self, finder: Finder) -> None:
        self.finder, self.space, self.options = finder, finder.space, finder.options
        self.notes = finder.notes
        options = self.options
        self.rates = Rates(options)
        self.table = TensorTable(self.space)
        #: Answers of least divergence by placement, limits and exclusions, which all aims begin with.
        self._least: dict[tuple[Placement, tuple[float, ...], tuple[Exclusion, ...]], Answer | None] = {}
        self.fit_options = FitOptions(
            ctx=options.ctx,
            ctk=options.ctk,
            ctv=options.ctv,
            vram=options.fit[:-1],
            ram=options.fit[-1],
            margin=MARGIN if options.margin is None else options.margin,
            parallel=options.parallel,
            ubatch=options.ubatch,
            runtime="ik" if options.runtime == "ik" else "llama.cpp",
        )
        self.model = estimator_of(self.space.source, self.fit_options)
        n_ctx = options.ctx or self.model.h.n_ctx_train * options.parallel
        self.context = self.fit_options.context(n_ctx)

    def best(self, count: int) -> Iterator[Allocation]:
        """Yield up to ``count`` allocations for the aim, best first, all for the layout of the first."""
        goal, best = self._aim()
        exclusions: list[Exclusion] = []
        result: FitAnswer | None = best
        while result is not None:
            allocation = self._allocation(result)
            if not exclusions:
                self.finder.note_limits(allocation)
                self.notes.extend(self._notes())
            yield allocation
            exclusions.append(Exclusion(result.picks, self.finder.min_difference))
            if len(exclusions) == count:
                return
            result = self._solve_placement(best.placement, goal, exclusions)

    def _notes(self) -> Iterator[str]:
        if self.rates.is_known:
            yield (
                f"tokens per second are a prediction: the time to read the weights of a token ({self.rates}), "
                "without caches, computation and transfers"
            )
        if self.model.gpus:
            yield GPU_NOTE
        if (note := accuracy_note(self.model.h.arch)) is not None:
            yield note

    def _aim(self) -> tuple[Goal, FitAnswer]:
        """Return the goal of --aim, and its best answer."""
        options, quality = self.options, self._best(Goal())
        if quality is None:
            raise self._too_little_memory()
        if options.aim == "quality":
            return Goal(), quality
        least = self.space.kld(quality.picks)
        max_kld = _LOSS * least if options.max_kld is None else options.max_kld
        if least > max_kld:
            raise RecipeError(
                f"--max-kld {max_kld:g}: the lowest predicted divergence that fits is {least:.4g}", "QK-E213"
            )
        goal = Goal(0.0, 1.0, max_kld)
        speed = self._best(goal) or quality
        if options.aim == "speed":
            return goal, speed
        # Each loss as a share of the difference between the two aims.
        more_kld = self.space.kld(speed.picks) - least
        more_seconds = quality.placement.total_seconds(quality.picks) - speed.placement.total_seconds(speed.picks)
        if more_kld <= 0 or more_seconds <= 0:
            return goal, speed
        goal = Goal(1 / more_kld, 1 / more_seconds, max_kld)
        return goal, self._best(goal) or speed

    # --- layouts ---

    @cached_property
    def _placements(self) -> list[Placement]:
        """The placements of all layouts, several GPUs as one, those with most on the GPUs first."""
        weights, n = self._smallest_weights, self.model.weights.n_layer
        if not self.model.gpus:
            return [Placement(self.table, Layout(n), self.rates)]
        rates = self.rates.pool(self.model.gpus) if len(self.model.gpus) > 1 else self.rates
        layouts = [Layout(n, (n + 1,), 0)]
        if weights.has_experts:
            layouts += [Layout(n, (n + 1,), k) for k in range(1, n + 1) if weights.experts[k - 1]]
        if not weights.has_experts or not self._fits_gpus(layouts[-1]):
            cpu_moe = n if weights.has_experts else 0
            layouts += [Layout(n, (gpu_layers,), cpu_moe) for gpu_layers in range(n, -1, -1)]
        return [Placement(self.table, layout, rates) for layout in layouts]

    def _fits_gpus(self, layout: Layout) -> bool:
        devices = self._pool.with_weights(self._smallest_weights).devices(layout, self.context)
        return all(device.fits for device in devices[1:])

    @cached_property
    def _pool(self) -> Estimator:
        """The model on one GPU with the memory of all."""
        gpus = self.model.gpus
        return self.model.with_gpus((sum(gpus),)) if len(gpus) > 1 else self.model

    @cached_property
    def _smallest_weights(self) -> ModelWeights:
        return self._weights([0] * len(self.space.choice_groups))

    def _weights(self, picks: Sequence[int]) -> ModelWeights:
        return model_weights(self.space, picks, self.model.weights.n_layer)

    def _best(self, goal: Goal) -> FitAnswer | None:
        """Return the best answer of all layouts; None if none fits."""
        max_kld = min(goal.max_kld, self._max_kld)
        floor = self.finder.kld_floor(max_kld)
        # In quadrature, the floor is far below the divergence; sums of divergences rank layouts better.
        klds = self.finder.klds if self.space.quadrature else floor
        programs, constants = [], []
        for placement in self._placements:
            limits = [*self._limits(placement, self._smallest_reserve(placement)), Limit(floor, max_kld)]
            programs.append(Program(_weigh(goal, klds, placement.seconds), limits))
            constants.append(goal.seconds * placement.fixed_seconds)
        best: FitAnswer | None = None
        tangents = Bounds()
        for bound, number in Bounds().rank(programs, constants):
            placement = self._placements[number]
            if best is not None and not self.space.quadrature and bound >= best.value * (1 - _TOLERANCE):
                break
            if best is not None and self.space.quadrature and not self._may_improve(placement, goal, best, tangents):
                continue
            result = self._solve_placement(placement, goal)
            if result is not None and (best is None or result.value < best.value * (1 - _TOLERANCE)):
                best = result
        return best

    @cached_property
    def _max_kld(self) -> float:
        """The divergence of the worst answer."""
        return math.fsum(max(choice.kld for choice in group.choices) for group in self.space.choice_groups)

    def _may_improve(self, placement: Placement, goal: Goal, best: FitAnswer, bounds: Bounds) -> bool:
        """Return whether the relaxation with the tangent of the divergence at the best answer is better than that.

        In quadrature, a lower bound is too weak to omit layouts. The tangent is above the divergence, by the square of
        the difference of the roots: (r - r0)^2 / (2 r0), half a percent of r0 for roots that differ by 10 %.
        """
        finder, picks = self.finder, best.picks
        limits = self._limits(placement, self._smallest_reserve(placement))
        limits += [] if math.isinf(goal.max_kld) else [finder.kld_limit(goal.max_kld, picks)]
        gradient = finder.kld_gradient(picks)
        constant = self.space.kld(picks) - math.fsum(row[i] for row, i in zip(gradient, picks, strict=True))
        most = best.value * (1 - _TOLERANCE) - goal.kld * constant - goal.seconds * placement.fixed_seconds
        program = Program(_weigh(goal, gradient, placement.seconds), limits)
        if bounds.estimate(program) >= most:
            return False
        cost = bounds.relax(program)
        return cost is not None and cost < most

    # --- one layout ---

    def _solve_placement(
        self, placement: Placement, goal: Goal, exclusions: Sequence[Exclusion] = ()
    ) -> FitAnswer | None:
        """Return the best answer in a layout; None if none fits."""
        is_pool = len(placement.layout.counts) < len(self.model.gpus)
        answer = self._solve_limits(placement, goal, exclusions, exact=not is_pool)
        if answer is not None and is_pool:
            # A good answer is enough for a division, unless it fits.
            layout = self._divide(placement.layout, answer.picks)
            if self._devices_that_fit(layout, answer.picks) is not None:
                answer = self._solve_limits(placement, goal, exclusions)
        if answer is None or not is_pool:
            return None if answer is None else self._fit_answer(answer, goal, placement)
        for _ in range(_ROUNDS):
            layout = self._divide(placement.layout, answer.picks)
            if self._devices_that_fit(layout, answer.picks) is not None:
                return self._fit_answer(answer, goal, Placement(self.table, layout, self.rates))
            divided = Placement(self.table, layout, self.rates)
            answer = self._solve_limits(divided, goal, exclusions)
            if answer is None:
                return None
            if self._devices_that_fit(layout, answer.picks) is not None:
                return self._fit_answer(answer, goal, divided)
        return None

    def _solve_limits(
        self, placement: Placement, goal: Goal, exclusions: Sequence[Exclusion], *, exact: bool = True
    ) -> Answer | None:
        """Return the best answer of a placement within the limits, with buffers of its own types, or a good one."""
        reserve = self._smallest_reserve(placement)
        for _ in range(_ROUNDS):
            answer = self._solve_goal(placement, self._limits(placement, reserve), goal, exclusions, exact)
            if answer is None:
                return None
            own_reserve = self._reserve(placement, self._weights(answer.picks))
            if all(n <= r for n, r in zip(own_reserve, reserve, strict=True)):
                return answer
            larger = [max(pair) for pair in zip(own_reserve, reserve, strict=True)]
            if all(limit.total(answer.picks) <= limit.most for limit in self._limits(placement, larger)):
                return answer
            reserve = larger
        return None

    def _solve_goal(
        self, placement: Placement, limits: list[Limit], goal: Goal, exclusions: Sequence[Exclusion], exact: bool
    ) -> Answer | None:
        answer = self._start(placement, limits, goal, exclusions, exact)
        if answer is None or not goal.seconds:
            return answer
        # The divergence is concave in sums of costs: the optimum for its tangent at an answer is no worse than that.
        # Good answers lead to the last tangent, of which the optimum is proven.
        for is_exact in (False, True) if exact else (False,):
            for _ in range(MAX_TANGENTS):
                costs = _weigh(goal, self.finder.kld_gradient(answer.picks), placement.seconds)
                within = [] if math.isinf(goal.max_kld) else [self.finder.kld_limit(goal.max_kld, answer.picks)]
                better = self.finder.solve(costs, [*limits, *within], exclusions, exact=is_exact)
                value = self._value(placement, answer.picks, goal)
                if better is None or self._value(placement, better.picks, goal) >= value * (1 - _TOLERANCE):
                    break
                is_close = self.finder.is_close(answer.picks, better.picks)
                answer = better
                if is_close:
                    break
        return answer

    def _start(
        self, placement: Placement, limits: list[Limit], goal: Goal, exclusions: Sequence[Exclusion], exact: bool
    ) -> Answer | None:
        """Return the answer of least divergence, or, for a goal of time, a good one; None beyond the goal's bound."""
        key = placement, tuple(limit.most for limit in limits), tuple(exclusions)
        for is_exact in (False, True) if (goal.seconds or not exact) and key not in self._least else (True,):
            if is_exact and key not in self._least:
                self._least[key] = self.finder.solve_least(limits, exclusions)
            answer = self._least[key] if is_exact else self.finder.solve_least(limits, exclusions, exact=False)
            if answer is None or self.space.kld(answer.picks) <= goal.max_kld * (1 + _TOLERANCE):
                return answer
        return None

    def _value(self, placement: Placement, picks: Sequence[int], goal: Goal) -> float:
        return goal.kld * self.space.kld(picks) + goal.seconds * placement.total_seconds(picks)

    def _limits(self, placement: Placement, reserve: Sequence[int]) -> list[Limit]:
        """Return a limit for each device; ``reserve``: its bytes for all but weights."""
        gpus = self.model.gpus if len(placement.layout.counts) == len(self.model.gpus) else self._pool.gpus
        capacities = (self.fit_options.host, *gpus[: placement.n_devices - 1])
        limits = []
        for device, (most, fixed, reserve_bytes) in enumerate(
            zip(capacities, placement.fixed_bytes, reserve, strict=True)
        ):
            assert most is not None
            limits.append(Limit(placement.nbytes[device], most - fixed - reserve_bytes))
        return limits

    def _smallest_reserve(self, placement: Placement) -> list[int]:
        if placement not in self._reserves:
            self._reserves[placement] = self._reserve(placement, self._smallest_weights)
        return self._reserves[placement]

    @cached_property
    def _reserves(self) -> dict[Placement, list[int]]:
        return {}

    def _reserve(self, placement: Placement, weights: ModelWeights) -> list[int]:
        """Return the bytes of each device that are not weights; each of several GPUs has a buffer."""
        is_pool = len(placement.layout.counts) < len(self.model.gpus)
        model = (self._pool if is_pool else self.model).with_weights(weights)
        copies = len(self.model.gpus) if is_pool else 1
        devices = model.devices(placement.layout, self.context)
        return [d.cache + d.companions + d.compute * (copies if i else 1) for i, d in enumerate(devices)]

    def _devices_that_fit(self, layout: Layout, picks: Sequence[int]) -> tuple[Device, ...] | None:
        devices = self.model.with_weights(self._weights(picks)).devices(layout, self.context)
        return devices if all(device.fits for device in devices) else None

    def _divide(self, layout: Layout, picks: Sequence[int]) -> Layout:
        """Return the layout on several GPUs, each filled in turn, with the least bytes beyond the memory of any."""
        if not layout.gpu_layers:
            return replace(layout, counts=(0,) * len(self.model.gpus))
        model = self.model.with_weights(self._weights(picks))
        devices = self._pool.with_weights(model.weights).devices(layout, self.context)
        sizes = list(model.layer_bytes(layout.gpu_layers, layout.cpu_moe, self.context))
        low, high = 0, sum(sizes)
        while low < high:
            middle = (low + high) // 2
            fits = _fill(sizes, [gpu - devices[1].compute + middle for gpu in model.gpus]) is not None
            low, high = (low, middle) if fits else (middle + 1, high)
        counts = _fill(sizes, [gpu - devices[1].compute + low for gpu in model.gpus])
        return replace(layout, counts=tuple(cast("list[int]", counts)))

    # --- results ---

    def _fit_answer(self, answer: Answer, goal: Goal, placement: Placement) -> FitAnswer | None:
        """Return an answer with the layout that ``fit`` chooses for its file, if that fits, too."""
        devices = self._devices_that_fit(placement.layout, answer.picks)
        if devices is None:
            return None
        layout, value = placement.layout, self._value(placement, answer.picks, goal)
        fit_layout = self.model.with_weights(self._weights(answer.picks)).best_layout(self.context)
        if fit_layout != layout and (better := self._devices_that_fit(fit_layout, answer.picks)) is not None:
            layout, devices = fit_layout, better
        return FitAnswer(answer, value, placement, layout, devices)

    def _allocation(self, result: FitAnswer) -> Allocation:
        allocation = self.finder.allocation(result.answer)
        placement = Placement(self.table, result.layout, self.rates)
        fit = DeviceFit(
            self.context.n_ctx,
            result.layout.gpu_layers,
            result.layout.cpu_moe,
            result.layout.counts if len(result.layout.counts) > 1 else (),
            result.devices,
            command_line(Path("OUT.gguf"), result.layout, self.context, self.fit_options),
            placement.total_seconds(result.picks) if self.rates.is_known else None,
        )
        return replace(allocation, fit=fit)

    def _too_little_memory(self) -> RecipeError:
        """Return the error for devices that no allocation fits, with the layout of least excess."""
        model = self._pool.with_weights(self._smallest_weights)
        choices = [model.devices(placement.layout, self.context) for placement in self._placements]
        devices = min(choices, key=lambda devices: sum(max(0, d.nbytes - cast(int, d.limit)) for d in devices))
        needs = " and ".join(
            f"{format_size(d.nbytes)} of {format_size(cast(int, d.limit))} {_place(d, len(self.model.gpus))}"
            for d in reversed(devices)
        )
        total = sum(d.nbytes for d in devices)
        return RecipeError(
            f"--fit: the smallest allocation of these types takes {total} bytes with a context of "
            f"{self.context.n_ctx}, {needs}: allow smaller types, a shorter context (-c) or more memory",
            "QK-E213",
        )


def _place(device: Device, n_gpus: int) -> str:
    if device.name == "memory":
        return "in memory"
    return "on the GPU" if n_gpus == 1 else f"on {n_gpus} GPUs"


def _weigh(goal: Goal, klds: Sequence[Weights], seconds: Sequence[Weights]) -> list[F64]:
    return [(goal.kld * k + goal.seconds * s).astype(np.float64) for k, s in zip(klds, seconds, strict=True)]


def _fill(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Return the number of layers of each GPU, each filled in turn; None if they do not fit."""
    counts, gpu, used = [0] * len(capacities), 0, 0
    for size in sizes:
        while gpu < len(capacities) and used + size > capacities[gpu]:
            gpu, used = gpu + 1, 0
        if gpu == len(capacities):
            return None
        counts[gpu] += 1
        used += size
    return counts
