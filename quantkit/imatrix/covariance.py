"""Full covariances of what weights multiply: sums of x x^T, for encoders that feed rounding errors forward.

A file is a GGUF of general.type "covariance"; W is the first of the weights that share an input, the others are
listed in quantkit.covariance.inputs ("W: W2 W3"). All tensors are F32, raw sums, accumulated in float64::

    W.cov         [n, n, n_mat]   sum of x x^T; n_mat: experts, else 1       W.counts  [n_mat]  tokens
    W.cov_router  [n, n, n_mat]   of experts: sum of w^2 x x^T, w the        W.weight  [n_mat]  sum of w^2
                                  token's router weight for the expert

The output of a layer has an expert's result times w, so that an error of its down projection counts with w^2. n^2
float64 an input and expert do not fit into memory at once: as many of them as ``max_ram`` allows make a pass over the
text, which runs the layers up to the last one wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError, RecipeError, ResourceError
from quantkit.evaluate.passes import LoadOptions, bos_of, run_windows
from quantkit.formats.gguf import Field, ValueType, layout_gguf
from quantkit.formats.ranges import sync
from quantkit.helpers import format_size
from quantkit.imatrix.collect import Options, parts_of
from quantkit.imatrix.texts import Chunks, cut
from quantkit.model.engine import Model, load
from quantkit.model.fusion import Fusion
from quantkit.model.observers import Input, Wanted, covariances, every_token, inputs, up_to_layer
from quantkit.model.ops import Covariance, Graph
from quantkit.types import BY_NAME

#: What a token counts for an expert: 1, its router weight squared, or both are recorded.
Weighting = Literal["tokens", "router", "both"]

INPUTS_KEY = "quantkit.covariance.inputs"


@dataclass(frozen=True)
class CovarianceFile:
    """A file of covariances that was written."""

    path: Path
    n_inputs: int
    n_passes: int
    n_chunks: int


@dataclass(frozen=True)
class _Unit:
    """Some experts of an input: what a pass takes or leaves."""

    of: Input
    experts: tuple[int, int]
    nbytes: int


def covariance(
    model: str | Path,
    files: Sequence[str | Path],
    output: str | Path,
    *,
    chat: Sequence[str | Path] = (),
    tokens: npt.ArrayLike | None = None,
    options: Options | None = None,
    weighting: Weighting = "both",
    without: Collection[int] = (),
    passed: Callable[[int, int, str], None] | None = None,
    **run: Unpack[LoadOptions],
) -> CovarianceFile:
    """Record the covariance of every weight's input, per expert, in ``output``.

    Args:
        model, files, chat, tokens, options: as for ``imatrix``; of the options the text's and process_output count.
        without: chunks that are left out, counted from 0: those that an imatrix run dropped.
        passed: is told of every pass, of how many, and what it recorded.
        run: as quantkit.load takes it; ``max_ram`` also limits the sums (without it: half of the free memory).

    Raises:
        ResourceError: one matrix alone does not fit max_ram.
        QuantkitError: the output exists, or a chunk brings values that are no numbers.
    """
    options = options or Options()
    path = Path(output)
    if weighting not in get_args(Weighting):
        raise RecipeError(f"no weighting {weighting!r}; there are {', '.join(get_args(Weighting))}")
    if path.exists() and not options.overwrite:
        raise QuantkitError(f"{path} exists; give another name, or --overwrite to replace it")
    run["fusion"] = Fusion.none()
    budget = run.get("max_ram") or _free_memory() // 2
    with load(model, n_ctx=options.n_ctx, **run) as loaded:
        text = cut(parts_of(loaded, files, chat, tokens, options), options.n_ctx, options.from_chunk, options.chunks)
        found = inputs(every_token(loaded.graph), process_output=options.process_output)
        passes = _passes(found, weighting, budget)
        target = _Target(path, loaded, found, weighting)
    try:
        for number, units in enumerate(passes, 1):
            _run(model, text, options, weighting, without, units, target, run)
            if passed is not None:
                names = (units[0].of.names[0], units[-1].of.names[0])
                passed(number, len(passes), f"{names[0]} to {names[1]}")
        target.finish()
    finally:
        target.close()
    return CovarianceFile(path, len(found), len(passes), len(text.windows) - len(set(without)))


def _free_memory() -> int:
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _passes(found: Sequence[Input], weighting: Weighting, budget: int) -> list[list[_Unit]]:
    """Cut the inputs, in order, into passes whose sums fit the budget."""
    passes: list[list[_Unit]] = [[]]
    left = budget
    for item in found:
        each = 8 * item.x.width**2 * (2 if weighting == "both" and item.ids is not None else 1)
        first = 0
        while first < item.n_mat:
            fits = min(left // each, item.n_mat - first)
            if fits == 0:
                if not passes[-1]:
                    raise ResourceError(
                        f"the covariance of the input of {item.names[0]} takes {format_size(each)}, --max-ram leaves "
                        f"{format_size(budget)}"
                    )
                passes.append([])
                left = budget
                continue
            passes[-1].append(_Unit(item, (first, first + fits), fits * each))
            left -= fits * each
            first += fits
    return passes


def _run(
    model: str | Path,
    text: Chunks,
    options: Options,
    weighting: Weighting,
    without: Collection[int],
    units: Sequence[_Unit],
    target: _Target,
    run: LoadOptions,
) -> None:
    """Run the text once for some units, and write what comes of it."""
    wanted = [Wanted(unit.of.names[0], unit.experts) for unit in units]
    last = max(unit.of.at.layer for unit in units)

    def rewrite(graph: Graph) -> Graph:
        seen = covariances(
            graph,
            wanted,
            process_output=options.process_output,
            plain=weighting != "router",
            weighted=weighting != "tokens",
        )
        return up_to_layer(seen, last) if last < graph.ops[-1].layer else seen

    chosen = [c for c in range(len(text.windows)) if c not in without]
    with load(model, n_ctx=options.n_ctx, rewrite=rewrite, **run) as loaded:
        session = loaded.session(options.n_ctx, min(len(chosen), max(1, options.n_batch // options.n_ctx)))

        def done(begin: int, end: int) -> None:
            for where in session.take_not_finite():
                raise QuantkitError(
                    f"chunk {chosen[begin + where.sequence] + 1}, position {where.position}: the input of "
                    f"{where.of.split()[0]} is NaN or infinite; leave the chunk out (quantkit imatrix does by itself)"
                )

        run_windows(
            loaded,
            text.windows[chosen],
            options.n_ctx - 1,
            lambda *_: None,
            done,
            n_batch=options.n_batch,
            bos=bos_of(loaded, []),
            threads=run.get("threads"),
            session=session,
        )
        for op in loaded.graph.ops:
            if isinstance(op, Covariance):
                target.write(op, session.accumulators[op.of])


class _Target:
    """The file in the making: all offsets are known before the first pass."""

    def __init__(self, path: Path, model: Model, found: Sequence[Input], weighting: Weighting) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        weighted = set(_weighted(model.graph, found)) if weighting != "tokens" else set()
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for item in found:
            name, n, n_mat = item.names[0], item.x.width, item.n_mat
            routed = name in weighted
            if weighting != "router" or not routed:
                tensors.append((f"{name}.cov", (n, n, n_mat)))
            if routed:
                tensors += [(f"{name}.cov_router", (n, n, n_mat)), (f"{name}.weight", (n_mat,))]
            tensors.append((f"{name}.counts", (n_mat,)))
        lines = [f"{item.names[0]}: {' '.join(item.names[1:])}".rstrip() for item in found]
        fields = [
            Field.of("general.type", "covariance"),
            Field.of(INPUTS_KEY, lines, ValueType.ARRAY, ValueType.STRING),
        ]
        f32 = BY_NAME["F32"]
        layout = layout_gguf(fields, [(name, shape, f32) for name, shape in tensors])
        self.offsets = {name: offset for (name, _), offset in zip(tensors, layout.offsets, strict=True)}
        self.file = self.part.open("wb")
        self.file.write(layout.header)
        self.file.truncate(layout.nbytes)

    def write(self, op: Covariance, found: dict[str, npt.NDArray[Any]]) -> None:
        """Write the sums of some experts."""
        name, first, n = op.names[0], op.experts[0], op.x.width
        for suffix, array, size in (
            ("cov", found.get("sums"), n * n),
            ("cov_router", found.get("weighted"), n * n),
            ("weight", found.get("weight"), 1),
            ("counts", found["counts"], 1),
        ):
            if array is not None:
                self.file.seek(self.offsets[f"{name}.{suffix}"] + 4 * size * first)
                for row in array:
                    self.file.write(np.asarray(row, "<f4").tobytes())

    def finish(self) -> None:
        """Let the file appear."""
        self.file.flush()
        sync(self.part)
        os.replace(self.part, self.path)
        sync(self.path.parent)

    def close(self) -> None:
        self.file.close()
        self.part.unlink(missing_ok=True)


def _weighted(graph: Graph, found: Sequence[Input]) -> list[str]:
    """Return the inputs that have router weights to count by."""
    wanted = [Wanted(item.names[0], (0, item.n_mat)) for item in found if item.ids is not None]
    seen = covariances(graph, wanted, process_output=True)
    return [op.names[0] for op in seen.ops if isinstance(op, Covariance) and op.weights is not None]
