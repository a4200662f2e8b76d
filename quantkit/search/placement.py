"""The choices of a space in one layout of ``fit``: bytes and time to read by device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quantkit.fit.layout import Layout
from quantkit.fit.weights import Weights as ModelWeights
from quantkit.fit.weights import weights_of
from quantkit.options.search import SearchOptions
from quantkit.pipeline.facts import half_names
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.search.solve import F64, Weights
from quantkit.search.space import Space

_EMBEDDINGS = "token_embd.weight"
#: The name under which tied embeddings are with the output.
_TIED_OUTPUT = "token_embd.weight, output"


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

    def pool(self, shares: Sequence[int]) -> Rates:
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


class TensorTable:
    """All tensors of a space's choices as arrays, in the order of choices; the fixed tensors are one choice more.

    Tied embeddings are there twice: a row is read of the first, all of the second, which is with the output.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.counts = [len(group.choices) for group in space.choice_groups]
        parts = [choice.tensors for group in space.choice_groups for choice in group.choices]
        is_tied = "output.weight" not in space.source.tensors
        rows: list[tuple[int, str, str, int, int]] = []
        for number, tensors in enumerate((*parts, space.fixed_tensors)):
            for tensor in tensors:
                nbytes, read = tensor.nbytes, space.read_bytes(tensor)
                if is_tied and tensor.name == _EMBEDDINGS:
                    rows.append((number, _TIED_OUTPUT, tensor.type.name, nbytes, nbytes))
                    read -= nbytes
                rows.append((number, tensor.name, tensor.type.name, nbytes, read))
        self.names, self.name = np.unique([row[1] for row in rows], return_inverse=True)
        self.types, self.type = np.unique([row[2] for row in rows], return_inverse=True)
        self.choice, self.nbytes, self.read = (np.array([row[i] for row in rows], np.int64) for i in (0, 3, 4))

    def devices(self, layout: Layout) -> npt.NDArray[np.int64]:
        """Return the device of each tensor, -1 if it is not loaded."""
        places = [_device_of(str(name), layout) for name in self.names]
        return np.array(places, np.int64)[self.name]

    def rates(self, rates: Rates, n_devices: int) -> F64:
        """Return the bytes per second of each device and type, float64 [n_devices, n_types]."""
        return np.array([[rates.rate(device, str(name)) for name in self.types] for device in range(n_devices)])

    def sums(self, values: npt.NDArray[np.float64]) -> tuple[list[F64], float]:
        """Return the sums of values of all tensors by choice, float64 [n_choices] of each group, and the fixed one."""
        sums = np.bincount(self.choice, weights=values, minlength=sum(self.counts) + 1)
        return np.split(sums[:-1], np.cumsum(self.counts)[:-1]), float(sums[-1])


def _device_of(name: str, layout: Layout) -> int:
    device = layout.devices[-1] if name == _TIED_OUTPUT else layout.device_of(name)
    return -1 if device is None else device


class Placement:
    """Bytes of each device and seconds per token of all choices in a layout; ``fixed``: of the other tensors.

    ``nbytes``: by device, the host first, an array of int64 [n_choices] for each choice group. ``seconds``: an array of
    float64 for each choice group, 0 if the speed of a device is unknown.
    """

    def __init__(self, table: TensorTable, layout: Layout, rates: Rates) -> None:
        self.layout, self.n_devices = layout, len(layout.counts) + 1
        devices = table.devices(layout)
        # Tied embeddings in memory are there once.
        shared = (table.names == _TIED_OUTPUT)[table.name] & (devices == 0)
        self.nbytes: list[list[Weights]] = []
        self.fixed_bytes: list[int] = []
        for device in range(self.n_devices):
            sums, fixed = table.sums(table.nbytes * ((devices == device) & ~shared))
            self.nbytes.append([row.astype(np.int64) for row in sums])
            self.fixed_bytes.append(int(fixed))
        seconds = np.zeros(len(devices))
        if rates.is_known:
            seconds = (devices >= 0) * table.read / table.rates(rates, self.n_devices)[devices, table.type]
        self.seconds: list[Weights]
        self.seconds, self.fixed_seconds = [*table.sums(seconds)[0]], table.sums(seconds)[1]

    def total_seconds(self, picks: Sequence[int]) -> float:
        """Return the seconds of a token."""
        return self.fixed_seconds + float(sum(row[pick] for row, pick in zip(self.seconds, picks, strict=True)))


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
