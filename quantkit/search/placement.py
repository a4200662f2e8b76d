"""The choices of a space in one layout of ``fit``: bytes and time to read by device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from quantkit.fit.layout import Layout
from quantkit.fit.weights import Weights as ModelWeights
from quantkit.fit.weights import weights_of
from quantkit.options.search import SearchOptions
from quantkit.pipeline.facts import half_names
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.search.solve import Weights
from quantkit.search.space import Space

_EMBEDDINGS = "token_embd.weight"


class Rates:
    """Bytes per second at which devices read weights: as stated, of the host also by type, as measured."""

    def __init__(self, options: SearchOptions) -> None:
        n_gpus = len(options.fit) - 1
        self.gpus = options.bandwidth[:n_gpus]
        self.host = options.bandwidth[n_gpus] if len(options.bandwidth) > n_gpus else None
        self.speeds: Mapping[str, float] = options.speeds
        self.is_known = options.has_bandwidths

    def rate(self, device: int, type_name: str) -> float:
        """Return the bytes per second of a device, 0 being the host; a type that was not measured is the slowest."""
        if device:
            return float(self.gpus[device - 1])
        if self.host is not None:
            return float(self.host)
        return 1e9 * self.speeds.get(type_name, min(self.speeds.values()))

    def pooled(self, shares: Sequence[int]) -> Rates:
        """Return the rates of one device in place of all GPUs, each with its share of the weights."""
        pool = object.__new__(Rates)
        pool.__dict__ |= self.__dict__
        if self.gpus:
            pool.gpus = (round(sum(shares) / sum(n / rate for n, rate in zip(shares, self.gpus, strict=True))),)
        return pool

    def __str__(self) -> str:
        stated = [f"GPU {i} {rate / 1e9:g} GB/s" for i, rate in enumerate(self.gpus, 1)]
        host = "by type, as measured" if self.host is None else f"{self.host / 1e9:g} GB/s"
        return ", ".join([*stated, f"memory {host}"])


class Placement:
    """Bytes of each device and seconds per token of all choices in a layout; ``fixed``: of the other tensors.

    ``nbytes``: by device, the host first, an array of int64 [n_choices] for each choice group. ``seconds``: an array of
    float64 for each choice group, 0 if the speed of a device is unknown.
    """

    def __init__(self, space: Space, layout: Layout, rates: Rates) -> None:
        self.space, self.layout, self.rates = space, layout, rates
        self.n_devices = len(layout.counts) + 1
        self.is_tied = "output.weight" not in space.source.tensors
        rows = [[self._sums(choice.tensors) for choice in group.choices] for group in space.choice_groups]
        self.nbytes: list[list[Weights]] = [
            [np.array([sums[device] for sums, _ in row], np.int64) for row in rows] for device in range(self.n_devices)
        ]
        self.seconds: list[Weights] = [np.array([seconds for _, seconds in row]) for row in rows]
        self.fixed_bytes, self.fixed_seconds = self._sums(space.fixed_tensors)

    def total_seconds(self, picks: Sequence[int]) -> float:
        """Return the seconds of a token."""
        return self.fixed_seconds + float(sum(row[pick] for row, pick in zip(self.seconds, picks, strict=True)))

    def _sums(self, tensors: Iterable[PlannedTensor]) -> tuple[list[int], float]:
        sums, seconds = [0] * self.n_devices, 0.0
        for tensor in tensors:
            for device, nbytes, read in self._copies(tensor):
                sums[device] += nbytes
                seconds += read / self.rates.rate(device, tensor.type.name) if self.rates.is_known else 0.0
        return sums, seconds

    def _copies(self, tensor: PlannedTensor) -> Iterator[tuple[int, int, int]]:
        """Yield device, bytes, and bytes read per token of a tensor; tied embeddings may be on two devices."""
        device, read = self.layout.device_of(tensor.name), self.space.read_bytes(tensor)
        if device is None:
            return
        output = self.layout.devices[-1]
        if tensor.name == _EMBEDDINGS and self.is_tied and output:
            yield device, tensor.nbytes, read - tensor.nbytes
            yield output, tensor.nbytes, tensor.nbytes
        else:
            yield device, tensor.nbytes, read


def model_weights(space: Space, picks: Sequence[int], n_layer: int) -> ModelWeights:
    """Return the weights of an answer as ``fit`` counts them."""
    choices = [group.choices[pick].tensors for group, pick in zip(space.choice_groups, picks, strict=True)]
    tensors = [tensor for part in (*choices, space.fixed_tensors) for tensor in part]
    return weights_of((pair for tensor in tensors for pair in _source_sizes(tensor)), n_layer)


def _source_sizes(tensor: PlannedTensor) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of a tensor; of merged experts those of the halves, which the graph of the source names."""
    halves = half_names(tensor.name) if len(tensor.parts) > 1 else None
    if not halves:
        yield tensor.name, tensor.nbytes
        return
    for half in halves:
        yield half, tensor.nbytes // len(halves)
