"""Placement of a model: layers on GPUs, experts or whole layers in host memory, as in llama.cpp.

``-ngl`` counts layers from the last; the output is one more. ``-ncmoe`` keeps the experts of the first layers in
memory. ``-ts`` has the number of layers of each GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from quantkit.fit.buffers import Schedule, compute_bytes, schedule
from quantkit.fit.caches import CacheShapes, Context, LayerMemory, cache_shapes, layer_memory
from quantkit.fit.weights import Part, Weights, is_expert, part_of
from quantkit.model.hparams import HParams
from quantkit.model.ops import Embed, Graph, Lookup, Op


@dataclass(frozen=True)
class Layout:
    """Layers by device. ``counts``: layers of each GPU, the output being the last layer."""

    n_layer: int
    counts: tuple[int, ...] = ()
    cpu_moe: int = 0

    @property
    def gpu_layers(self) -> int:
        return sum(self.counts)

    @property
    def all_on_gpus(self) -> bool:
        return self.gpu_layers > self.n_layer and not self.cpu_moe

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each layer and of the output; 0 is the CPU."""
        order = [0] * (self.n_layer + 1 - self.gpu_layers)
        for gpu, count in enumerate(self.counts, 1):
            order += [gpu] * count
        return tuple(order)

    def device_of(self, name: str) -> int | None:
        """Return the device of a tensor; None if it is not loaded. Tied embeddings are also on the output's device."""
        part, layer = part_of(name, self.n_layer)
        if part is Part.UNLOADED:
            return None
        if part is Part.INPUTS or part is Part.EXPERTS and layer < self.cpu_moe:
            return 0
        return self.devices[-1 if part is Part.OUTPUT else layer]


@dataclass(frozen=True)
class Device:
    """A device and the memory of it that a model takes, in bytes."""

    name: str
    weights: int
    cache: int
    compute: int
    #: The mmproj file and the draft model.
    companions: int
    #: The bytes that the model may have; None: any number.
    limit: int | None

    @property
    def nbytes(self) -> int:
        return self.weights + self.cache + self.compute + self.companions

    @property
    def fits(self) -> bool:
        return self.limit is None or self.nbytes <= self.limit


class Estimator:
    """The memory of one model in any layout and context."""

    def __init__(
        self,
        graph: Graph,
        h: HParams,
        weights: Weights,
        gpus: tuple[int, ...],
        host: int | None,
        companions: int = 0,
        runtime: str = "llama.cpp",
    ) -> None:
        self.h, self.weights, self.gpus, self.host = h, weights, gpus, host
        #: Bytes of an mmproj file and of a draft, on the first GPU, or in memory without GPUs.
        self.companions = companions
        self.n_stored = h.n_stored
        self.shapes: CacheShapes = cache_shapes(graph, h)
        self.plan: Schedule = schedule(graph, h.arch, runtime)
        self._computed: dict[tuple[Context, Layout], dict[int, int]] = {}

    def with_weights(self, weights: Weights) -> Estimator:
        """Return an estimator of the same model with tensors of other types."""
        return self._with(weights=weights)

    def with_gpus(self, gpus: tuple[int, ...]) -> Estimator:
        """Return an estimator of the same model for other GPUs."""
        return self._with(gpus=gpus)

    def _with(self, **changes: object) -> Estimator:
        variant = object.__new__(Estimator)
        variant.__dict__ |= {**self.__dict__, "_computed": {}, **changes}
        return variant

    def layers(self, context: Context) -> list[LayerMemory]:
        """Return the memory of the context by layer."""
        return layer_memory(self.shapes, context)

    def devices(self, layout: Layout, context: Context) -> tuple[Device, ...]:
        """Return the CPU and each GPU with their bytes."""
        weights, cache = [0] * (len(self.gpus) + 1), [0] * (len(self.gpus) + 1)
        for layer, device in enumerate(layout.devices[:-1]):
            weights[device] += self.weights.dense[layer]
            weights[0 if layer < layout.cpu_moe else device] += self.weights.experts[layer]
        weights[0] += self.weights.inputs
        last = layout.devices[-1]
        weights[last] += self.weights.output + (self.weights.tied if last else 0)
        for part in self.layers(context):
            cache[layout.devices[part.layer % self.n_stored]] += part.nbytes
        compute = self._compute(layout, context)
        limits = (self.host, *self.gpus)
        home = 1 if self.gpus else 0
        return tuple(
            Device(
                f"GPU {i}" if i else "memory",
                weights[i],
                cache[i],
                compute.get(i, 0),
                self.companions if i == home else 0,
                limit,
            )
            for i, limit in enumerate(limits)
        )

    def fits(self, layout: Layout, context: Context) -> bool:
        return all(device.fits for device in self.devices(layout, context))

    def _compute(self, layout: Layout, context: Context) -> dict[int, int]:
        key = context, layout
        if key not in self._computed:
            self._computed[key] = self._replay(layout, context)
        return self._computed[key]

    def _replay(self, layout: Layout, context: Context) -> dict[int, int]:
        if not layout.gpu_layers:
            return compute_bytes(self.plan, self.shapes, self.h, context)
        first = next(device for device in layout.devices if device)

        def device_of(op: Op) -> int:
            if isinstance(op, Embed | Lookup):
                return 0
            layer = min(max(op.layer, 0), self.h.n_layer)
            layer = layout.n_layer if layer == self.h.n_layer else layer % self.n_stored
            # A GPU also computes large batches of layers that are in memory, from copies of their weights.
            return layout.devices[layer] or (first if op.matrices() else 0)

        on_host = {name: nbytes for name, nbytes in self.weights.tensors.items() if self._is_on_host(name, layout)}
        pipeline = layout.all_on_gpus and sum(map(bool, layout.counts)) > 1
        return compute_bytes(self.plan, self.shapes, self.h, context, device_of, on_host, pipeline=pipeline)

    def _is_on_host(self, name: str, layout: Layout) -> bool:
        if is_expert(name, layout.cpu_moe):
            return True
        number = name.split(".")[1] if name.startswith("blk.") else ""
        return number.isdecimal() and int(number) < layout.n_layer and not layout.devices[int(number)]

    # ------------------------------------------------ search

    def best_layout(self, context: Context) -> Layout:
        """Return the layout with most on the GPUs; one that does not fit if none does."""
        n = self.weights.n_layer
        if not self.gpus:
            return Layout(n)
        everything = self.split(n + 1, 0, context)
        if everything is not None:
            return everything
        if self.weights.has_experts and (layout := self._fewest_host_experts(context)) is not None:
            return layout
        return self._most_layers(context)

    def _fewest_host_experts(self, context: Context) -> Layout | None:
        n = self.weights.n_layer
        best = self.split(n + 1, n, context)
        low, high = 0, n  # the experts of ``low`` layers in memory are too few, those of ``high`` fit
        while best is not None and high - low > 1:
            middle = (low + high) // 2
            layout = self.split(n + 1, middle, context)
            low, high, best = (middle, high, best) if layout is None else (low, middle, layout)
        return best

    def _most_layers(self, context: Context) -> Layout:
        n = self.weights.n_layer
        cpu_moe = n if self.weights.has_experts else 0
        best, low, high = Layout(n), 0, n + 1
        while high - low > 1:
            middle = (low + high) // 2
            layout = self.split(middle, cpu_moe, context)
            low, high, best = (low, middle, best) if layout is None else (middle, high, layout)
        return best

    def split(self, gpu_layers: int, cpu_moe: int, context: Context) -> Layout | None:
        """Return the layout with this many layers on the GPUs, each filled in turn; None if it does not fit them."""
        n = self.weights.n_layer
        single = Layout(n, (gpu_layers, *[0] * (len(self.gpus) - 1)), cpu_moe)
        compute = max(size for device, size in self._compute(single, context).items() if device)
        counts = [0] * len(self.gpus)
        gpu, used = 0, compute + self.companions
        for nbytes in self.layer_bytes(gpu_layers, cpu_moe, context):
            while gpu < len(self.gpus) and used + nbytes > self.gpus[gpu]:
                gpu, used = gpu + 1, compute
            if gpu == len(self.gpus):
                return None
            counts[gpu] += 1
            used += nbytes
        layout = Layout(n, tuple(counts), cpu_moe)
        return layout if all(device.fits for device in self.devices(layout, context)[1:]) else None

    def layer_bytes(self, gpu_layers: int, cpu_moe: int, context: Context) -> Iterator[int]:
        """Yield the bytes of each layer on the GPUs, weights and cache; the output is the last."""
        n = self.weights.n_layer
        cache = [0] * n
        for part in self.layers(context):
            cache[part.layer % self.n_stored] += part.nbytes
        for layer in range(n + 1 - gpu_layers, n):
            yield self.weights.dense[layer] + cache[layer] + (self.weights.experts[layer] if layer >= cpu_moe else 0)
        yield self.weights.output + self.weights.tied

    def longest(self, context: Context, step: int, layout: Layout | None = None) -> int:
        """Return the longest context, a multiple of ``step``, that fits in a layout; without one, all on the GPUs."""
        steps = max(1, self.h.n_ctx_train * (1 if context.kv_unified else context.n_parallel) // step)

        def fits(count: int) -> bool:
            longer = context.with_length(count * step)
            if layout is not None:
                return self.fits(layout, longer)
            return self.split(self.weights.n_layer + 1, 0, longer) is not None

        if fits(steps):
            return steps * step
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * step
