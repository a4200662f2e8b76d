"""Full covariances of what weights multiply: sums of x x^T, for encoders that feed rounding errors forward.

One covariance per input of weights, per expert, or per head for weights by head (latent attention's k_b and v_b, in the
form the file has), as described in ``covariance_file.py``. A layer's output has an expert's result times its router
weight w, so an error of its down projection counts with w^2: experts' tokens are also summed with that weight.

n^2 float64 per input and expert do not all fit into memory: a pass over the text takes as many as ``max_ram`` allows
and runs the layers up to the last one needed. A finished pass is in OUT.part; OUT.state lists the finished passes and
holds the sums of the current one, so that an interrupted run resumes to the file of an uninterrupted one. These sums
are large: they are saved every ``output_frequency`` chunks, unless that takes more than a twentieth of the time.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, get_args

import numpy.typing as npt

from quantkit.errors import ClusterError, QuantkitError, RecipeError, ResourceError
from quantkit.evaluate.on_nodes import There, without_nodes
from quantkit.evaluate.passes import EvaluationOptions, LoadOptions, bos_of
from quantkit.formats.gguf import open_model
from quantkit.formats.outputs import Output, check_apart, check_free, end_of_links, part_path
from quantkit.imatrix.checkpoint import Checkpoint, Progress, clear, state_of
from quantkit.imatrix.collect import ImatrixOptions, chunks_of, fingerprint_of
from quantkit.imatrix.covariance_file import Target, layout
from quantkit.imatrix.covariance_pass import Recording, Shared, Unit, available, run_on_nodes
from quantkit.imatrix.texts import Chunks
from quantkit.model.arch import arch_by_name
from quantkit.model.engine import Model, load
from quantkit.model.fusion import Fusion
from quantkit.model.graph import build_graph
from quantkit.model.observers import (
    Input,
    every_token,
    inputs,
    with_latent,
)
from quantkit.model.ops import Graph
from quantkit.units import format_size

#: What a token counts for an expert: 1, its router weight squared, or both are recorded.
Weighting = Literal["tokens", "router", "both"]

#: Saving sums may take this share of the time.
_SAVING = 0.05


@dataclass(frozen=True)
class CovarianceFile:
    """A finished file of covariances; passes and chunks that an earlier run did; what happened to nodes."""

    path: Path
    n_inputs: int
    n_passes: int
    n_chunks: int
    resumed: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


class CovarianceProgress(NamedTuple):
    """Chunks done and in total; number of the pass, from 1, and passes in total; what it records."""

    chunk: int
    n_chunks: int
    number: int
    n_passes: int
    what: str


def covariance(
    model: str | Path,
    files: Sequence[str | Path],
    output: str | Path,
    *,
    chat: Sequence[str | Path] = (),
    prompt: str | None = None,
    tokens: npt.ArrayLike | None = None,
    options: ImatrixOptions | None = None,
    weighting: Weighting = "both",
    without: Collection[int] | None = None,
    progress: Callable[[CovarianceProgress], None] | None = None,
    **run: Unpack[EvaluationOptions],
) -> CovarianceFile:
    """Record the covariance of every weight's input, per expert, in ``output``.

    Args:
        model, files, chat, prompt, tokens, options: as for ``imatrix``; the options used are the text's,
            process_output, output_frequency, resume and overwrite.
        without: chunks to leave out, counted from 0, as dropped by an imatrix run; None: those of the resumed run,
            or none.
        progress: called after every chunk of every pass.
        run: options of quantkit.load; ``max_ram`` also limits the sums (None: half of the free memory). nodes: those
            of a cluster, each of which takes whole passes.

    Raises:
        ResourceError: one matrix alone does not fit max_ram, or the file the disk.
        QuantkitError: the output exists, or a chunk yields NaN or Inf.
    """
    options = options or ImatrixOptions()
    path = end_of_links(output)
    check_apart([path, state_of(path)], [model, *files, *chat])
    with Output(path, overwrite=True):
        finished = check_covariance(model, path, options, weighting, run.get("max_ram"))
        if finished is not None:
            return finished
        nodes, own = without_nodes(run)
        own["fusion"] = (own.get("fusion") or Fusion()).observed()
        with load(model, n_ctx=options.n_ctx, **own) as loaded:
            text = chunks_of(loaded, files, chat, prompt, tokens, options)
            found = _inputs(loaded.graph, loaded.arch, options)
            checkpoint = Checkpoint(path, _identity(loaded, text, options, weighting))
            target = Target(path, loaded.graph, found, loaded.source.tensors, weighting)
        there = None if nodes is None else There.of(model, nodes, own)
        recorder = _Recorder(model, text, options, weighting, found, target, checkpoint, own, there)
        recorder.begin(without)
        with target.opened():
            return recorder.record(progress)


def check_covariance(
    model: str | Path, path: Path, options: ImatrixOptions, weighting: str, max_ram: int | None
) -> CovarianceFile | None:
    """Raise, before any work, what ``covariance`` raises for lack of memory or disk, or for existing files.

    Returns the existing file if a run is to be resumed and this is its result.
    """
    if weighting not in get_args(Weighting):
        raise RecipeError(f"no weighting {weighting!r}; there are {', '.join(get_args(Weighting))}")
    path = end_of_links(path)
    state = state_of(path)
    if state.exists() and not (options.resume or options.overwrite):
        raise QuantkitError(
            f"{state} is the state of an interrupted run: go on with --resume, or start over with --overwrite"
        )
    with open_model(model) as source:
        graph, arch = build_graph(source), str(source.get("general.architecture", ""))
        found = _inputs(graph, arch, options)
        made = layout(graph, found, source.tensors, weighting)
    resumes = options.resume and not options.overwrite and not state.exists()
    if resumes and path.is_file() and made.is_of(path):
        return CovarianceFile(path, len(found), 0, 0)
    check_free(path, overwrite=options.overwrite)
    nbytes = made.nbytes
    _passes(_sizes(found, weighting), _budget(max_ram))
    part = part_path(path)
    free = shutil.disk_usage(path.parent).free + (part.stat().st_blocks * 512 if part.exists() else 0)
    if nbytes > free:
        raise ResourceError(
            f"{path} would take {format_size(nbytes)}, there are {format_size(free)} left: choose another disk, or "
            "record less (--covariance-of tokens)"
        )
    return None


def _inputs(graph: Graph, arch: str, options: ImatrixOptions) -> list[Input]:
    """Return all inputs to record, in order of layers."""
    graph = every_token(graph)
    found = inputs(graph, process_output=options.process_output)
    if arch_by_name(arch).attention == "mla":
        found += with_latent(graph)[1]
    return sorted(found, key=lambda item: item.at.layer)


def _identity(model: Model, text: Chunks, options: ImatrixOptions, weighting: str) -> str:
    """Return what must agree to resume from a state."""
    digest = hashlib.sha256(text.windows.tobytes())
    o = options
    what = (o.n_ctx, o.n_batch, model.n_ubatch, model.kv_type, bos_of(model, []), o.process_output, weighting)
    digest.update(repr((what, fingerprint_of(model))).encode())
    return digest.hexdigest()


def _budget(max_ram: int | None) -> int:
    """Return the bytes that sums may take: ``max_ram``, or half of the available memory."""
    return available() // 2 if max_ram is None else max_ram


def _sizes(found: Iterable[Input], weighting: str) -> dict[Unit, int]:
    """Return the inputs to record, in order, and the bytes of the sums of one expert of each."""
    return {
        Unit(item.names[0], 0, item.n_mat): 8 * item.n**2 * (2 if weighting == "both" and item.ids is not None else 1)
        for item in found
    }


def _passes(units: Mapping[Unit, int], budget: int) -> list[list[Unit]]:
    """Cut units, in order, into passes whose sums fit the budget."""
    passes: list[list[Unit]] = [[]]
    left = budget
    for (name, first, end), each in units.items():
        while first < end:
            fits = min(left // each, end - first)
            if fits == 0:
                if not passes[-1]:
                    raise ResourceError(
                        f"the covariance of the input of {name} takes {format_size(each)}, --max-ram leaves "
                        f"{format_size(budget)}"
                    )
                passes.append([])
                left = budget
                continue
            passes[-1].append(Unit(name, first, first + fits))
            left -= fits * each
            first += fits
    return passes


class _Recorder:
    """A run over passes: what is done, what is left, and the state that records it."""

    def __init__(
        self,
        model: str | Path,
        text: Chunks,
        options: ImatrixOptions,
        weighting: Weighting,
        found: Sequence[Input],
        target: Target,
        checkpoint: Checkpoint,
        run: LoadOptions,
        there: There | None,
    ) -> None:
        self.model, self.text, self.options = model, text, options
        self.target, self.checkpoint, self.run, self.there = target, checkpoint, run, there
        self.sizes = _sizes(found, weighting)
        layers = {item.names[0]: item.at.layer for item in found}
        self.recording = Recording(text.windows, options.n_batch, options.process_output, weighting, layers, target)
        #: Units in the file; units of the pass whose sums the state has; chunks left out.
        self.written: list[Unit] = []
        self.current: list[Unit] = []
        self.without: list[int] = []
        self.n_written = self.n_resumed = 0
        #: What happened to nodes.
        self.notes: list[str] = []

    def begin(self, without: Collection[int] | None) -> None:
        """Read what an earlier run has done. Raises QuantkitError if the state is of another run and must be kept."""
        state = self.checkpoint.about() if self.options.resume else None
        if state is None or not self.target.part.exists():
            if self.options.resume and self.checkpoint.path.exists() and not self.options.overwrite:
                raise QuantkitError(
                    f"{self.checkpoint.path} is the state of another run: model, text or options differ; start over "
                    "with --overwrite, without --resume"
                )
            self.without = sorted(set(without or ()))
            self.target.begin()
            self._save({}, Progress())
            return
        self.without = list(state["without"])
        if without is not None and sorted(set(without)) != self.without:
            raise QuantkitError(f"{self.checkpoint.path} is the state of a run that left out other chunks")
        self.written = [Unit(*unit) for unit in state["written"]]
        self.current = [Unit(*unit) for unit in state["current"]]
        self.n_written = state["n_written"]

    def _save(self, sums: Any, progress: Progress) -> None:
        about = {"n_written": self.n_written, "written": self.written, "current": self.current}
        self.checkpoint.save(sums, progress, {**about, "without": self.without})

    def record(self, progress: Callable[[CovarianceProgress], None] | None) -> CovarianceFile:
        """Run the remaining passes and finish the file."""
        earlier, self.n_resumed = self.n_written, 0
        try:
            if self.there is not None:
                total = self._on_nodes(self.there, progress)
            else:
                passes = self._left()
                total = earlier + len(passes)
                for units in passes:
                    self._pass(units, total, progress)
            self.target.finish()
            self.checkpoint.remove()
        except ClusterError:
            raise  # what is done is kept
        except QuantkitError:
            self.target.discard()  # another attempt would end the same way
            self.checkpoint.remove()
            raise
        n = len(self.text.windows) - len(self.without)
        resumed = (earlier, self.n_resumed)
        return CovarianceFile(self.target.path, len(self.sizes), total, n, resumed, tuple(self.notes))

    def _on_nodes(self, there: There, progress: Callable[[CovarianceProgress], None] | None) -> int:
        """Let the nodes of a cluster run what is left; return the number of all passes."""
        self.current = []  # half a pass is of no use to them
        sizes, chunks, earlier = {unit.name: size for unit, size in self.sizes.items()}, self._chosen(), self.n_written
        passes: list[list[Unit]] = []

        def made(nodes: int) -> list[list[Unit]]:
            passes.extend(self._left(nodes))
            return passes

        def done(units: list[Unit]) -> None:
            self._finished(units)
            if progress is not None:
                total = earlier + len(passes)
                progress(CovarianceProgress(len(chunks), len(chunks), self.n_written, total, _what(units)))

        run_on_nodes(Shared(there, self.recording, tuple(chunks), sizes), made, done, self.notes.append)
        return earlier + len(passes)

    def _left(self, nodes: int = 1) -> list[list[Unit]]:
        """Return the passes to run: first the one with saved sums, if they fit the memory; some for each node."""
        budget = _budget(self.run.get("max_ram"))
        each = {unit.name: size for unit, size in self.sizes.items()}
        if sum(each[name] * (end - first) for name, first, end in self.current) > budget:
            self.current = []
        done: dict[str, list[tuple[int, int]]] = {}
        for name, first, end in (*self.written, *self.current):
            done.setdefault(name, []).append((first, end))
        left = {
            Unit(unit.name, first, end): size
            for unit, size in self.sizes.items()
            for first, end in _gaps(unit.end, done.get(unit.name, ()))
        }
        if nodes > 1 and left:
            whole = sum(size * (unit.end - unit.first) for unit, size in left.items())
            budget = min(budget, max(-(-whole // nodes), *left.values()))
        return [units for units in (self.current, *_passes(left, budget)) if units]

    def _pass(self, units: list[Unit], total: int, progress: Callable[[CovarianceProgress], None] | None) -> None:
        """Run the text once for some units, and write the results."""
        chosen = self._chosen()
        rewrite = self.recording.rewrite(units)
        with load(self.model, n_ctx=self.options.n_ctx, rewrite=rewrite, **self.run) as loaded:
            session = self.recording.session(loaded, len(chosen))
            begun = self._resumed(units, session.accumulators)
            saver = _Saver(self.options.output_frequency)

            def done(begin: int, end: int) -> None:
                if progress is not None:
                    n = self.n_written + 1
                    progress(CovarianceProgress(begun + end, len(chosen), n, total, _what(units)))
                if end < len(left):
                    saver.save(begin, end, lambda: self._save(session.accumulators, Progress(begun + end)))

            left = chosen[begun:]
            if left:
                self.recording.run(loaded, session, left, self.run.get("threads"), done)
            self.recording.write(loaded, session.accumulators)
        self._finished(units)

    def _chosen(self) -> list[int]:
        return [c for c in range(len(self.text.windows)) if c not in self.without]

    def _finished(self, units: list[Unit]) -> None:
        """Note a pass whose results are in the file."""
        self.written += units
        self.current = []
        self.n_written += 1
        self._save({}, Progress())

    def _resumed(self, units: list[Unit], sums: Any) -> int:
        """Restore the sums of a state, if they are of these units; return the chunks they include."""
        if units != self.current:
            self.current = units
            return 0
        found = self.checkpoint.load(sums)
        if found is None:
            clear(sums)
        self.n_resumed = 0 if found is None else found.done
        return self.n_resumed


def _what(units: Sequence[Unit]) -> str:
    """Return what a pass records."""
    return " to ".join(dict.fromkeys((units[0].name, units[-1].name)))


class _Saver:
    """Saves every ``often`` chunks, unless that takes more than a share of the time."""

    def __init__(self, often: int) -> None:
        self.often, self.due, self.last = often, False, time.perf_counter()
        self.took = 0.0

    def save(self, before: int, now: int, save: Callable[[], None]) -> None:
        """Save if it is due after chunks ``before`` to ``now``."""
        self.due |= bool(self.often) and now // self.often > before // self.often
        start = time.perf_counter()
        if not self.due or start - self.last < self.took / _SAVING:
            return
        save()
        self.due, self.last = False, time.perf_counter()
        self.took = self.last - start


def _gaps(n: int, done: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of 0..n outside the disjoint ranges ``done``."""
    edges = [0, *(edge for part in sorted(done) for edge in part), n]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


__all__ = ["CovarianceFile", "CovarianceProgress", "Weighting", "check_covariance", "covariance"]
