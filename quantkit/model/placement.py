"""Where every operation runs: ``--backend``, ``-ngl`` and ``-ot`` give each a device; the list is cut into segments.

A tensor lies where the first ``-ot`` rule that matches its name says, else where its layer lies: the last ``-ngl``
layers (the output counts as one) on accelerators, split evenly in order, the rest on the CPU. An operation
runs where its weights lie; one without weights where its first input was made, so that values travel only when they
must; attention and recurrent layers, which own memory, and the choice of outputs run where their layer lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from quantkit.errors import RecipeError, ResourceError
from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value
from quantkit.patterns import Pattern

#: Operations that own memory of a layer, and the choice of its rows.
_OF_LAYER = (
    *(ops.Attention, ops.BlockWrite, ops.CacheWrite, ops.LightningIndexer, ops.WindowAndBlocks),
    *(ops.ColumnScan, ops.Compress, ops.Convolve, ops.DeltaNet, ops.Previous, ops.SelectOutputs, ops.SsmScan, ops.Wkv),
)

#: Operations whose weights are so small that they go with their input.
_LIGHT = (ops.Bonus, ops.Lerp, ops.MultiplyBy, ops.RopeTable, ops.Route, ops.StreamWeights)


#: More layers than any model has.
ALL_LAYERS = 1 << 20


@dataclass(frozen=True)
class Placement:
    """``gpu_layers`` of the model on ``accelerators``; ``rules``: (regular expression, device), first match.

    embeddings: the token embeddings lie on the first accelerator, too.
    """

    gpu_layers: int = 0
    rules: tuple[tuple[str, str], ...] = ()
    accelerators: tuple[str, ...] = ("CUDA0",)
    embeddings: bool = False

    def wanted(self) -> set[str]:
        """Return the devices asked for."""
        return {device for _, device in self.rules} | (set(self.accelerators) if self.gpu_layers else set())

    def check(self, available: Sequence[str], why: str = "") -> None:
        """Raise ResourceError for a device that does not exist here; why: the reason, if known."""
        missing = sorted(self.wanted() - set(available))
        if missing:
            raise ResourceError(
                f"there is no device {', '.join(missing)} here; there are: {', '.join(available)}. "
                f"{f'{why}. ' if why else ''}Leave --backend cuda, -ngl and -ot away, or name one of these"
            )

    def of_tensor(self, name: str, layer: int, n_layer: int) -> str:
        """Return the device of a tensor of a layer."""
        found = (device for pattern, device in self._patterns if pattern.search(name))
        return next(found, None) or self.of_layer(layer, n_layer)

    @cached_property
    def _patterns(self) -> tuple[tuple[Pattern, str], ...]:
        return tuple((Pattern(text, f"-ot {text}={device}"), device) for text, device in self.rules)

    def of_layer(self, layer: int, n_layer: int) -> str:
        """Return the device of a layer; n_layer is the output, -1 the embeddings."""
        if layer < 0:
            return self.accelerators[0] if self.embeddings else "CPU"
        n = min(self.gpu_layers, n_layer + 1)
        nth = layer - (n_layer + 1 - n)
        return self.accelerators[nth * len(self.accelerators) // n] if nth >= 0 and n else "CPU"


def placement_of(backend: str, gpu_layers: int | None, rules: Sequence[str], cuda_devices: Sequence[str]) -> Placement:
    """Return the placement that --backend, -ngl and -ot ask for.

    ``cuda`` takes the whole model, embeddings included, unless -ngl says how many layers; without devices it
    names the first one anyway, and ``check`` says what is missing.
    """
    cuda = backend == "cuda"
    layers = gpu_layers if gpu_layers is not None else ALL_LAYERS if cuda else 0
    whole = cuda and gpu_layers is None
    return Placement(layers, parse_rules(rules), tuple(cuda_devices) or ("CUDA0",), embeddings=whole)


def parse_rules(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``-ot`` values: ``regex=DEVICE``, several divided by commas. RecipeError for a bad one."""
    rules = []
    for text in texts:
        for part in text.split(","):
            pattern, equals, device = part.rpartition("=")
            if not equals or not pattern or not device:
                raise RecipeError(f"-ot {part}: give REGEX=DEVICE, such as '_exps=CPU'")
            Pattern(pattern, f"-ot {part}")  # an error now, not when a tensor is placed
            rules.append((pattern, device.upper()))
    return tuple(rules)


def devices_of(graph: Graph, placement: Placement, n_layer: int) -> dict[int, str]:
    """Return the device of every operation, by its identity."""
    made_on: dict[Value, str] = {}
    device: dict[int, str] = {}
    for op in graph.ops:
        matrices = op.matrices()
        inputs = op.inputs()
        if isinstance(op, _OF_LAYER):
            where = placement.of_layer(op.layer, n_layer)
        elif matrices and not isinstance(op, _LIGHT):
            where = placement.of_tensor(matrices[0].tensor.name, op.layer, n_layer)
        elif inputs and inputs[0] in made_on:
            where = made_on[inputs[0]]
        else:
            where = placement.of_layer(op.layer, n_layer)
        device[id(op)] = where
        made_on.update(dict.fromkeys(op.outputs(), where))
    return device


@dataclass
class Segment:
    """Neighbouring operations of one device, and the values they take from, and leave to, other segments."""

    device: str
    ops: list[Op] = field(default_factory=list)
    takes: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)


def cut(graph: Graph, device: dict[int, str]) -> list[Segment]:
    """Cut a graph into segments, in order.

    Every segment has caches of its own: one that attends to what another keeps keeps it, too.
    """
    segments: list[Segment] = []
    made_in: dict[Value, Segment] = {}
    writes = graph.cache_writes()
    kept = set[tuple[int, type[Op], Cache | None]]()

    def put(op: Op) -> None:
        here = segments[-1]
        if isinstance(op, ops.CacheWrite | ops.BlockWrite):
            kept.add((len(segments), type(op), op.cache))
        read = op.cache if isinstance(op, ops.Attention | ops.LightningIndexer) else None
        for write in writes[read] if read is not None else ():
            if (len(segments), type(write), read) not in kept:
                put(replace(write, layer=op.layer))
        here.ops.append(op)
        for value in op.inputs():
            maker = None if value in graph.given else made_in[value]
            if maker is not here:
                if value not in here.takes:
                    here.takes.append(value)
                if maker is not None and value not in maker.leaves:
                    maker.leaves.append(value)
        made_in.update(dict.fromkeys(op.outputs(), here))

    for op in graph.ops:
        if not segments or segments[-1].device != device[id(op)]:
            segments.append(Segment(device[id(op)]))
        put(op)
    for value in (*graph.leaves, *((graph.logits,) if graph.logits in made_in else ())):
        if value not in made_in[value].leaves:
            made_in[value].leaves.append(value)
    return segments
