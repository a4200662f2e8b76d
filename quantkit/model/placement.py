"""Placement of operations on devices by ``--backend``, ``-ngl`` and ``-ot``, and segments of operations of one device.

The device of a tensor is that of the first ``-ot`` rule that matches its name, else that of its layer: accelerators for
the last ``-ngl`` layers (the output counts as one), split evenly in order, the CPU for the others. An operation runs
where its weights are; without weights, where its first input is computed, so that few values are copied between
devices; attention and recurrent layers, which own memory, and SelectOutputs run on the device of their layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from quantkit.errors import RecipeError, ResourceError
from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value
from quantkit.patterns import Pattern

#: Operations with memory of their layer (caches, states), and SelectOutputs.
# fmt: off
_OF_LAYER = (
    ops.Attention, ops.BlockWrite, ops.CacheWrite, ops.LightningIndexer, ops.WindowAndBlocks,
    ops.ColumnScan, ops.Compress, ops.Convolve, ops.DeltaNet, ops.Previous, ops.SelectOutputs, ops.SsmScan, ops.Wkv,
)
# fmt: on

#: Operations with small weights, which run where their input is.
_LIGHT = (ops.Bonus, ops.Lerp, ops.MultiplyBy, ops.RopeTable, ops.Route, ops.StreamWeights)


#: More layers than any model has.
ALL_LAYERS = 1 << 20


@dataclass(frozen=True)
class Placement:
    """``gpu_layers`` of the model on ``accelerators``; ``rules``: (regular expression, device), first match.

    embeddings: also place the token embeddings on the first accelerator. shares: of the layers, for each accelerator;
    without them, equal shares.
    """

    gpu_layers: int = 0
    rules: tuple[tuple[str, str], ...] = ()
    accelerators: tuple[str, ...] = ("CUDA0",)
    embeddings: bool = False
    shares: tuple[float, ...] = ()

    def requested_devices(self) -> set[str]:
        """Return the devices of the rules and of the layers."""
        return {device for _, device in self.rules} | (set(self.accelerators) if self.gpu_layers else set())

    def check(self, available: Sequence[str], reason: str = "") -> None:
        """Raise ResourceError for an unavailable device; reason: why it is unavailable, if known."""
        missing = sorted(self.requested_devices() - set(available))
        if missing:
            raise ResourceError(
                f"no device {', '.join(missing)}; available: {', '.join(available)}. "
                f"{f'{reason}. ' if reason else ''}Omit --backend cuda, -ngl and -ot, or use one of these",
                "QK-E411",
            )

    def tensor_device(self, name: str, layer: int, n_layer: int) -> str:
        """Return the device of a tensor that belongs to ``layer``."""
        matches = (device for pattern, device in self._patterns if pattern.search(name))
        return next(matches, None) or self.layer_device(layer, n_layer)

    @cached_property
    def _patterns(self) -> tuple[tuple[Pattern, str], ...]:
        return tuple((Pattern(text, f"-ot {text}={device}"), device) for text, device in self.rules)

    def layer_device(self, layer: int, n_layer: int) -> str:
        """Return the device of a layer; layer n_layer is the output, -1 the embeddings."""
        if layer < 0:
            return self.accelerators[0] if self.embeddings else "CPU"
        n = min(self.gpu_layers, n_layer + 1)
        nth = layer - (n_layer + 1 - n)
        if nth < 0 or not n:
            return "CPU"
        if not self.shares:
            return self.accelerators[nth * len(self.accelerators) // n]
        return self.accelerators[bisect_right(self._ends, nth / n)]

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        """Where the layers of each accelerator but the last end, as shares of all (llama.cpp's splits)."""
        ends = list(accumulate(self.shares))
        return tuple(end / ends[-1] for end in ends[:-1])


def placement_of(
    backend: str,
    gpu_layers: int | None,
    rules: Sequence[str],
    cuda_devices: Sequence[str],
    shares: Sequence[float] = (),
) -> Placement:
    """Return the placement of --backend, -ngl, -ot and -ts, whose ``shares`` are one for each device.

    ``cuda`` places the whole model, embeddings included, unless -ngl limits the layers; without CUDA devices it names
    the first one anyway, which ``check`` then reports.
    """
    cuda = backend == "cuda"
    layers = ALL_LAYERS if cuda else 0
    if gpu_layers is not None:
        layers = gpu_layers
    whole_model = cuda and gpu_layers is None
    accelerators = tuple(cuda_devices) or ("CUDA0",)
    if shares and (len(shares) != len(accelerators) or min(shares) < 0 or not sum(shares)):
        raise RecipeError(
            f"-ts {','.join(f'{share:g}' for share in shares)}: give a share of 0 or more for each of "
            f"{', '.join(accelerators)}",
            "QK-E203",
        )
    return Placement(layers, parse_rules(rules), accelerators, embeddings=whole_model, shares=tuple(shares))


def parse_rules(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``-ot`` values: ``regex=DEVICE``, separated by commas. Raises RecipeError."""
    rules = []
    for text in texts:
        for part in text.split(","):
            pattern, equals, device = part.rpartition("=")
            if not equals or not pattern or not device:
                raise RecipeError(f"-ot {part}: give REGEX=DEVICE, such as '_exps=CPU'", "QK-E204")
            Pattern(pattern, f"-ot {part}")  # an error now, not when a tensor is placed
            rules.append((pattern, device.upper()))
    return tuple(rules)


def place_ops(graph: Graph, placement: Placement, n_layer: int) -> dict[int, str]:
    """Return the device of every operation, by its id()."""
    value_device: dict[Value, str] = {}
    device: dict[int, str] = {}
    for op in graph.ops:
        matrices = op.matrices()
        inputs = op.inputs()
        if isinstance(op, _OF_LAYER):
            where = placement.layer_device(op.layer, n_layer)
        elif matrices and not isinstance(op, _LIGHT):
            where = placement.tensor_device(matrices[0].tensor.name, op.layer, n_layer)
        elif inputs and inputs[0] in value_device:
            where = value_device[inputs[0]]
        else:
            where = placement.layer_device(op.layer, n_layer)
        device[id(op)] = where
        value_device.update(dict.fromkeys(op.outputs(), where))
    return device


@dataclass
class Segment:
    """Consecutive operations on one device; values that enter from (takes) and leave to (leaves) other segments."""

    device: str
    ops: list[Op] = field(default_factory=list)
    takes: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)


def split_segments(graph: Graph, device: dict[int, str]) -> list[Segment]:
    """Return the segments of a graph, in order.

    Every segment has its own caches: one that reads a cache of another segment also writes it.
    """
    segments: list[Segment] = []
    value_segment: dict[Value, Segment] = {}
    writes = graph.cache_writes()
    stored = set[tuple[int, type[Op], Cache | None]]()

    def append_op(op: Op) -> None:
        segment = segments[-1]
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            stored.add((len(segments), type(op), op.cache))
        read = op.cache if isinstance(op, ops.Attention | ops.LightningIndexer) else None
        for write in writes[read] if read is not None else ():
            if (len(segments), type(write), read) not in stored:
                append_op(replace(write, layer=op.layer))
        segment.ops.append(op)
        for value in op.inputs():
            maker = None if value in graph.inputs else value_segment[value]
            if maker is not segment:
                if value not in segment.takes:
                    segment.takes.append(value)
                if maker is not None and value not in maker.leaves:
                    maker.leaves.append(value)
        value_segment.update(dict.fromkeys(op.outputs(), segment))

    for op in graph.ops:
        if not segments or segments[-1].device != device[id(op)]:
            segments.append(Segment(device[id(op)]))
        append_op(op)
    for value in (*graph.leaves, *((graph.logits,) if graph.logits in value_segment else ())):
        if value not in value_segment[value].leaves:
            value_segment[value].leaves.append(value)
    return segments


# ---------------------------------------------------------------- devices of this machine


def available_devices() -> tuple[str, ...]:
    """Return the devices that -ot can name. REFERENCE is the numpy backend, which is slow."""
    return ("CPU", "REFERENCE", *cuda_devices())


def cuda_devices() -> tuple[str, ...]:
    """Return the names of this machine's CUDA devices."""
    from quantkit.kernels.cuda.core.device import count_devices

    return tuple(f"CUDA{i}" for i in range(count_devices()))


def check_devices(placement: Placement) -> None:
    """Raise ResourceError for an unavailable device; CuPy is imported only for CUDA devices."""
    if not any(device.startswith("CUDA") for device in placement.requested_devices()):
        placement.check(("CPU", "REFERENCE"))
        return
    from quantkit.kernels.cuda.core.device import why_none

    devices = available_devices()
    placement.check(devices, "" if len(devices) > 2 else why_none())
