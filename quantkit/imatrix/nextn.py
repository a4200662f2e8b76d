"""The prediction layer in a collection: it runs after the model, on the model's hidden rows for the same chunks.

The layer processes n - 1 of a chunk's n tokens: the rows of tokens 0 ... n - 2 with the tokens that follow them, as in
llama-imatrix --nextn. Positions are 0 ... n - 2 here and 1 ... n - 1 there, which makes no difference with rotary
embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.gguf import open_model
from quantkit.formats.remote import locate
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.engine import Model, load
from quantkit.model.nextn import build_nextn, nextn_layers
from quantkit.model.observers import fewest_rows
from quantkit.model.ops import Graph, MulMat

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def nextn_file(model: str | Path, draft: str | Path | None) -> Path | None:
    """Return the file with the prediction layer: ``draft``, or the model's own; None if the model has none.

    Raises QuantkitError for a file that is not a draft or of another model, or if the model has its own layer.
    """
    with open_model(model) as source:
        layers = nextn_layers(source)
        arch = source.get("general.architecture")
        n_embd = _n_embd(source)
        is_draft = "blk.0.attn_norm.weight" not in source.tensors and bool(layers)
    if is_draft:
        raise QuantkitError(
            f"{model} contains only a prediction layer: give it with -md, and its model with -m", "QK-E306"
        )
    if draft is None:
        return locate(model) if layers else None
    if layers:
        raise RecipeError(
            f"{model} has its own prediction layer, blk.{layers[0]}: use --nextn instead of -md", "QK-E201"
        )
    with open_model(draft) as source:
        if not nextn_layers(source) or "blk.0.attn_norm.weight" in source.tensors:
            raise QuantkitError(f"{draft}: -md needs a file that contains only a prediction layer", "QK-E105")
        draft_shape = (source.get("general.architecture"), _n_embd(source))
    if draft_shape != (arch, n_embd):
        raise QuantkitError(
            f"{draft} is {draft_shape[0]} with rows of {draft_shape[1]}, but {model} is {arch} with {n_embd}", "QK-E207"
        )
    return locate(draft)


def _n_embd(source: object) -> object:
    get = source.get  # type: ignore[attr-defined]
    return get(f"{get('general.architecture')}.embedding_length")


def _has_own_head(graph: Graph) -> bool:
    head = next(op for op in reversed(graph.ops) if isinstance(op, MulMat))
    return ".nextn." in head.weight.tensor.name


class HiddenRows:
    """The hidden rows that a model computes during a pass; called as its observer."""

    def __init__(self) -> None:
        self._rows: list[F32] = []

    def __call__(self, name: str, x: F32, ids: object) -> None:
        """Store the rows of some tokens."""
        self._rows.append(x.copy())

    def take(self) -> F32:
        """Return the rows of the pass, float32 [tokens, n_embd], and clear them."""
        rows = np.concatenate(self._rows)
        self._rows.clear()
        return rows


class Predictor:
    """A prediction layer to record. ``observe`` adds observers, given whether the output matrix is its own."""

    def __init__(
        self,
        path: Path,
        hidden: HiddenRows,
        n_ctx: int,
        n_seq: int,
        observe: Callable[[Graph, bool], Graph],
        **run: Unpack[LoadOptions],
    ) -> None:
        self.hidden = hidden
        self.model: Model = load(
            path, n_ctx=n_ctx, build=build_nextn, rewrite=lambda g: fewest_rows(observe(g, _has_own_head(g))), **run
        )
        self.session = self.model.session(n_ctx, n_seq)

    def run(self, windows: I32) -> list[NotFinite]:
        """Run over the chunks, int32 [n, n_ctx], of the stored rows; return the locations of NaN and Inf."""
        n, n_ctx = windows.shape
        rows = self.hidden.take().reshape(n, n_ctx, -1)[:, :-1]
        self.session.clear()
        tokens = windows[:, 1:]
        inputs = {self.model.graph.inputs[0]: rows.reshape(tokens.size, -1)}
        sequences = np.repeat(np.arange(n, dtype=np.int32), n_ctx - 1)
        self.session.decode(tokens.reshape(-1), sequences, np.zeros(tokens.size, bool), inputs=inputs)
        return self.session.take_not_finite()

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        return self.session.accumulators
