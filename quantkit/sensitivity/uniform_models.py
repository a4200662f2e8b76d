"""Models with all groups in one type, measured as a whole to show how the costs of groups combine.

Each runs in parallel with the base model, a layer at a time, so that only one layer's weights are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.model.batch import Batch
from quantkit.model.ops import Graph
from quantkit.sensitivity.activation_store import ActivationStore
from quantkit.sensitivity.encode import EncodedPair, Pair
from quantkit.sensitivity.scores import Sums
from quantkit.sensitivity.variants import Layer, Overrides, Runner, Values, reads_tensor
from quantkit.types import TensorType


class UniformModel:
    """A model whose ``groups`` have one type, run layer by layer."""

    def __init__(self, t: TensorType, groups: Sequence[str], activations: ActivationStore) -> None:
        self.type = t
        self.groups = groups
        self._activations = activations
        self._overrides: Overrides = {}

    def add(self, pair: EncodedPair) -> None:
        """Add encoded tensors that the next layers read."""
        self._overrides.update(pair.data)

    def run(self, runner: Runner, layer: Layer, batch: Batch, begin: int, count: int) -> Values:
        """Run a layer for ``count`` windows from ``begin`` on; return its outputs, valid until the next run."""
        graph = layer.stage.graph
        inputs = {value: self._activations.read(value, begin, count) for value in graph.inputs}
        values = runner.run(runner.compile(graph, self._overrides), graph, batch, inputs)
        for value in graph.leaves:
            self._activations.write(value, begin, values[value])
        return values

    def finish_layer(self, graph: Graph, layers: Sequence[Layer], number: int) -> None:
        """Drop tensors and activations that no layer after ``number`` reads."""
        ops = graph.ops[layers[number].end :]
        self._overrides = {name: override for name, override in self._overrides.items() if reads_tensor(ops, {name})}
        self._activations.keep_only(value for layer in layers[number + 1 :] for value in layer.stage.graph.inputs)


def groups_by_type(pairs: Iterable[Pair]) -> dict[TensorType, list[str]]:
    """Return the groups that each type is measured for, without error feedback."""
    groups: dict[TensorType, list[str]] = {}
    for pair in pairs:
        if not pair.feedback:
            groups.setdefault(pair.type, []).append(pair.group.name)
    return groups


def settings_row(t: TensorType, groups: Sequence[str], sums: Sums) -> Mapping[str, Any]:
    """Return a type's row of ``settings["together"]``, which search/combine.py reads."""
    statistics = zip(("kld", "kld_error", "ln_ppl", "ln_ppl_error"), sums.means(), strict=True)
    return {"types": dict.fromkeys(groups, t.name), **dict(statistics)}
