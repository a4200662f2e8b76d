"""Models with all groups in one type, measured as a whole to show how the costs of groups combine.

Each runs in parallel with the base model, a layer at a time, so that only one layer's weights are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.errors import ResourceError
from quantkit.formats.ranges import reserve
from quantkit.model.batch import Batch
from quantkit.model.ops import Graph, Value
from quantkit.sensitivity.encode import EncodedPair, Pair
from quantkit.sensitivity.scores import Sums
from quantkit.sensitivity.variants import Layer, Overrides, Runner, Values, reads_tensor
from quantkit.types import TensorType


class ActivationStore:
    """Activations of one run of a model that later layers read, in files: memory does not grow with the text.

    ``rows``: scored positions of a window.
    """

    def __init__(self, folder: Path, windows: int, n_ctx: int, rows: int) -> None:
        self._folder = folder
        self._windows = windows
        self._n_ctx = n_ctx
        self._rows = rows
        self._files: dict[Value, npt.NDArray[Any]] = {}
        self._count = 0
        folder.mkdir(exist_ok=True)

    def _window_rows(self, value: Value) -> int:
        return (self._rows if value.outputs else self._n_ctx) * value.per

    def write(self, value: Value, window: int, rows: npt.NDArray[Any]) -> None:
        """Store the rows of the windows from ``window`` on."""
        if value not in self._files:
            self._files[value] = self._file((self._windows * self._window_rows(value), value.width), rows.dtype)
        begin = window * self._window_rows(value)
        self._files[value][begin : begin + len(rows)] = rows

    def _file(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        path = self._folder / f"value-{self._count}"
        self._count += 1
        try:
            # without space on the disk, writing to a mapping would kill the process
            reserve(path, shape[0] * shape[1] * dtype.itemsize)
        except OSError as e:
            raise ResourceError(f"{path}: {e.strerror or e}; the run can be resumed", "QK-E406") from e
        return np.memmap(path, dtype, "r+", shape=shape)

    def read(self, value: Value, window: int, count: int) -> npt.NDArray[Any]:
        """Return the rows of ``count`` windows from ``window`` on."""
        per = self._window_rows(value)
        return self._files[value][window * per : (window + count) * per]

    def keep_only(self, values: Iterable[Value]) -> None:
        """Remove all values but these."""
        keep = frozenset(values)
        for value in [v for v in self._files if v not in keep]:
            Path(str(self._files.pop(value).filename)).unlink()  # type: ignore[attr-defined]


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
