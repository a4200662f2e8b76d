"""Models with all groups in one type: measured as a whole, to show how the costs of groups combine.

Each runs beside the model itself, a layer at a time, so that of its weights only those of one layer are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.model.batch import Batch
from quantkit.model.ops import Graph
from quantkit.sensitivity.encode import Encoded, Pair
from quantkit.sensitivity.kept import Kept
from quantkit.sensitivity.scores import Sums
from quantkit.sensitivity.variants import Held, Layer, Runner, Values, uses
from quantkit.types import TensorType


class Together:
    """A model whose ``groups`` have one type, as it goes from layer to layer."""

    def __init__(self, t: TensorType, groups: Sequence[str], kept: Kept) -> None:
        self.type, self.groups, self._kept = t, groups, kept
        self._held: Held = {}

    def take(self, encoded: Encoded) -> None:
        """Take tensors that the layers from the next on read."""
        self._held.update(encoded.data)

    def run(self, runner: Runner, layer: Layer, batch: Batch, begin: int, count: int) -> Values:
        """Run a layer for ``count`` windows from ``begin`` on; return what leaves it, valid until something runs."""
        graph = layer.own.graph
        given = {value: self._kept.read(value, begin, count) for value in graph.given}
        found = runner.run(runner.compile(graph, self._held), graph, batch, given)
        for value in graph.leaves:
            self._kept.write(value, begin, found[value])
        return found

    def leave(self, graph: Graph, layers: Sequence[Layer], number: int) -> None:
        """Forget what no layer behind ``number`` reads."""
        ops = graph.ops[layers[number].end :]
        self._held = {name: own for name, own in self._held.items() if uses(ops, {name})}
        self._kept.keep_only(value for layer in layers[number + 1 :] for value in layer.own.graph.given)


def groups_in(pairs: Iterable[Pair]) -> dict[TensorType, list[str]]:
    """Return the groups that each type is measured of, without error feedback."""
    found: dict[TensorType, list[str]] = {}
    for pair in pairs:
        if not pair.feedback:
            found.setdefault(pair.type, []).append(pair.group.name)
    return found


def row_of(t: TensorType, groups: Sequence[str], sums: Sums) -> Mapping[str, Any]:
    """Return what ``settings["together"]`` says of a type: search/combine.py reads it."""
    measured = zip(("kld", "kld_error", "ln_ppl", "ln_ppl_error"), sums.means(), strict=True)
    return {"types": dict.fromkeys(groups, t.name), **dict(measured)}
