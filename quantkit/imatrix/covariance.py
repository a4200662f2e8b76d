"""Covariances of weight inputs: sums of x x^T, for encoders with error feedback.

One covariance per input of weights, per expert, or per head for weights by head (latent attention's k_b and v_b, in the
file's form); see ``covariance_file.py``. An expert's output is multiplied by its router weight w, so an error of its
down projection counts with w^2: experts' tokens are also summed with that weight.

n^2 float64 per input and expert do not all fit into memory: a pass over the text takes as many as ``max_ram`` allows
and runs the layers up to the last one needed. Finished passes are in OUT.part; OUT.state lists them and holds the sums
of the current one, so that an interrupted run resumes to the file of an uninterrupted one. These sums are large: they
are saved every ``output_frequency`` chunks, unless that takes more than a twentieth of the time.
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

from quantkit.arguments import checked
from quantkit.cpus import available_memory
from quantkit.errors import ClusterError, QuantkitError, RecipeError, ResourceError
from quantkit.evaluate.on_nodes import NodeModel, split_nodes
from quantkit.evaluate.passes import EvaluationOptions, LoadOptions, bos_of
from quantkit.formats.gguf import open_model
from quantkit.formats.outputs import Output, check_apart, check_free, part_path, resolve_links
from quantkit.imatrix.collect import chunks_of
from quantkit.imatrix.covariance_file import NO_DIGEST, Target, layout
from quantkit.imatrix.covariance_pass import CovarianceRecording, PassContext, Unit, run_on_nodes
from quantkit.imatrix.snapshot import RunState, Snapshot, clear, snapshot_path
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
from quantkit.options.imatrix import ImatrixOptions
from quantkit.pipeline.content import FileRecord
from quantkit.units import format_size

#: Weight of a token for an expert: 1, its squared router weight, or both, recorded separately.
Weighting = Literal["tokens", "router", "both"]

#: Maximum share of the time that saving sums may take.
_SAVE_SHARE = 0.05


@dataclass(frozen=True)
class CovarianceFile:
    """A finished file of covariances; passes and chunks of an earlier run; notes on nodes."""

    path: Path
    n_inputs: int
    n_passes: int
    n_chunks: int
    resumed: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()


class CovarianceProgress(NamedTuple):
    """Finished chunks and their total; number of the pass, from 1, and of passes; inputs of the pass."""

    chunk: int
    n_chunks: int
    number: int
    n_passes: int
    inputs: str

    @property
    def current(self) -> int:
        return (self.number - 1) * self.n_chunks + self.chunk

    @property
    def total(self) -> int:
        return self.n_passes * self.n_chunks

    @property
    def text(self) -> str:
        return f"pass {self.number} of {self.n_passes}: {self.inputs}"


@checked
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
        without: chunks to skip, counted from 0, as dropped by an imatrix run; None: those of the resumed run, or none.
        progress: called after every chunk of every pass.
        run: options of quantkit.load; ``max_ram`` also limits the sums (None: half of the free memory). nodes: a
            cluster, whose nodes take whole passes.

    Raises:
        ResourceError: one matrix alone does not fit max_ram, or the file does not fit the disk.
        QuantkitError: the output exists, or a chunk yields NaN or Inf.
    """
    options = options or ImatrixOptions()
    path = resolve_links(output)
    check_apart([path, snapshot_path(path)], [model, *files, *chat])
    with Output(path, overwrite=True):
        existing = check_covariance(model, path, options, weighting, run.get("max_ram"))
        if existing is not None:
            return existing
        nodes, engine_options = split_nodes(run)
        engine_options["fusion"] = (engine_options.get("fusion") or Fusion()).for_observers()
        with load(model, n_ctx=options.n_ctx, **engine_options) as loaded:
            text = chunks_of(loaded, files, chat, prompt, tokens, options)
            weight_inputs = _inputs(loaded.graph, loaded.arch, options)
            snapshot = Snapshot(path, _identity(loaded, text, options, weighting), loaded.source.inputs)
            digest = snapshot.model.record().digest
            target = Target(path, loaded.graph, weight_inputs, loaded.source.tensors, weighting, digest)
        remote = None if nodes is None else NodeModel.from_path(model, nodes, engine_options)
        recorder = _Recorder(model, text, options, weighting, weight_inputs, target, snapshot, engine_options, remote)
        recorder.begin(without)
        with target.hold_open():
            return recorder.record(progress)


def check_covariance(
    model: str | Path, path: Path, options: ImatrixOptions, weighting: str, max_ram: int | None
) -> CovarianceFile | None:
    """Check memory, disk and existing files before any work; raises as ``covariance``.

    Returns the existing file if a resumed run would produce it.
    """
    if weighting not in get_args(Weighting):
        raise RecipeError(f"unknown weighting {weighting!r}; choose one of {', '.join(get_args(Weighting))}", "QK-E203")
    path = resolve_links(path)
    state = snapshot_path(path)
    if state.exists() and not (options.resume or options.overwrite):
        raise QuantkitError(
            f"{state} is the snapshot of an interrupted run: continue with --resume, or start over with --overwrite",
            "QK-E408",
        )
    with open_model(model) as source:
        graph, arch = build_graph(source), str(source.get("general.architecture", ""))
        weight_inputs = _inputs(graph, arch, options)
        may_be_done = options.resume and not options.overwrite and not state.exists() and path.is_file()
        digest = FileRecord.read(source.inputs).digest if may_be_done else NO_DIGEST
        file_layout = layout(graph, weight_inputs, source.tensors, weighting, digest)
    if may_be_done and file_layout.matches(path):
        return CovarianceFile(path, len(weight_inputs), 0, 0)
    check_free(path, overwrite=options.overwrite)
    nbytes = file_layout.nbytes
    _passes(_sizes(weight_inputs, weighting), _budget(max_ram))
    part = part_path(path)
    free = shutil.disk_usage(path.parent).free + (part.stat().st_blocks * 512 if part.exists() else 0)
    if nbytes > free:
        raise ResourceError(
            f"{path} needs {format_size(nbytes)}, but only {format_size(free)} are free: choose another disk, or "
            "record less (--covariance-of tokens)",
            "QK-E406",
        )
    return None


def _inputs(graph: Graph, arch: str, options: ImatrixOptions) -> list[Input]:
    """Return all inputs to record, by layer."""
    graph = every_token(graph)
    weight_inputs = inputs(graph, process_output=options.process_output)
    if arch_by_name(arch).attention == "mla":
        weight_inputs += with_latent(graph)[1]
    return sorted(weight_inputs, key=lambda item: item.reader.layer)


def _identity(model: Model, text: Chunks, options: ImatrixOptions, weighting: str) -> str:
    """Return a digest of the settings, model apart, that a snapshot must share to be resumed."""
    digest = hashlib.sha256(text.windows.tobytes())
    o = options
    settings = (o.n_ctx, o.n_batch, model.n_ubatch, model.kv_type, bos_of(model, []), o.process_output, weighting)
    digest.update(repr((*settings, *model.overrides)).encode())
    return digest.hexdigest()


def _budget(max_ram: int | None) -> int:
    """Return the memory for sums, in bytes: ``max_ram``, or half of the available memory."""
    return available_memory() // 2 if max_ram is None else max_ram


def _sizes(weight_inputs: Iterable[Input], weighting: str) -> dict[Unit, int]:
    """Return the inputs to record, in order, with the bytes of the sums of one expert."""
    return {
        Unit(item.names[0], 0, item.n_mat): 8 * item.n**2 * (2 if weighting == "both" and item.ids is not None else 1)
        for item in weight_inputs
    }


def _passes(units: Mapping[Unit, int], budget: int) -> list[list[Unit]]:
    """Divide units, in order, into passes whose sums fit the budget."""
    passes: list[list[Unit]] = [[]]
    left = budget
    for (name, first, end), nbytes in units.items():
        while first < end:
            fits = min(left // nbytes, end - first)
            if fits == 0:
                if not passes[-1]:
                    raise ResourceError(
                        f"the covariance of the input of {name} needs {format_size(nbytes)}, but --max-ram leaves "
                        f"{format_size(budget)}",
                        "QK-E407",
                    )
                passes.append([])
                left = budget
                continue
            passes[-1].append(Unit(name, first, first + fits))
            left -= fits * nbytes
            first += fits
    return passes


class _Recorder:
    """A run over passes: finished units, remaining ones, and the snapshot that records them."""

    def __init__(
        self,
        model: str | Path,
        text: Chunks,
        options: ImatrixOptions,
        weighting: Weighting,
        weight_inputs: Sequence[Input],
        target: Target,
        snapshot: Snapshot,
        run: LoadOptions,
        remote: NodeModel | None,
    ) -> None:
        self.model = model
        self.text = text
        self.options = options
        self.target = target
        self.snapshot = snapshot
        self.run = run
        self.remote = remote
        self.sizes = _sizes(weight_inputs, weighting)
        layers = {item.names[0]: item.reader.layer for item in weight_inputs}
        self.recording = CovarianceRecording(
            text.windows, options.n_batch, options.process_output, weighting, layers, target
        )
        #: Units in the file; units of the pass with saved sums; skipped chunks.
        self.stored_units: list[Unit] = []
        self.current_units: list[Unit] = []
        self.without: list[int] = []
        self.n_written = self.n_resumed = 0
        #: Notes on nodes.
        self.notes: list[str] = []

    def begin(self, without: Collection[int] | None) -> None:
        """Read the progress of an earlier run. Raises QuantkitError if the snapshot is of another run."""
        state = self.snapshot.read_metadata() if self.options.resume else None
        if state is None or not self.target.part.exists():
            if self.options.resume and self.snapshot.path.exists() and not self.options.overwrite:
                raise QuantkitError(
                    f"{self.snapshot.path} is the snapshot of another run: the model, text or options differ; start "
                    "over with --overwrite instead of --resume",
                    "QK-E409",
                )
            self.without = sorted(set(without or ()))
            self.target.begin()
            self._save({}, RunState())
            return
        self.without = list(state["without"])
        if without is not None and sorted(set(without)) != self.without:
            raise QuantkitError(f"{self.snapshot.path} is the snapshot of a run that skipped other chunks", "QK-E409")
        self.stored_units = [Unit(*unit) for unit in state["written"]]
        self.current_units = [Unit(*unit) for unit in state["current"]]
        self.n_written = state["n_written"]

    def _save(self, sums: Any, progress: RunState) -> None:
        about = {"n_written": self.n_written, "written": self.stored_units, "current": self.current_units}
        self.snapshot.save(sums, progress, {**about, "without": self.without})

    def record(self, progress: Callable[[CovarianceProgress], None] | None) -> CovarianceFile:
        """Run the remaining passes and finish the file."""
        earlier, self.n_resumed = self.n_written, 0
        try:
            if self.remote is not None:
                total = self._on_nodes(self.remote, progress)
            else:
                passes = self._remaining_passes()
                total = earlier + len(passes)
                for units in passes:
                    self._run_pass(units, total, progress)
            self.target.finish()
            self.snapshot.remove()
        except ClusterError:
            raise  # finished passes are kept
        except QuantkitError:
            self.target.discard()  # another attempt would fail in the same way
            self.snapshot.remove()
            raise
        n = len(self.text.windows) - len(self.without)
        resumed = (earlier, self.n_resumed)
        return CovarianceFile(self.target.path, len(self.sizes), total, n, resumed, tuple(self.notes))

    def _on_nodes(self, remote: NodeModel, progress: Callable[[CovarianceProgress], None] | None) -> int:
        """Run the remaining passes on the nodes of a cluster; return the number of all passes."""
        self.current_units = []  # half a pass is useless to the nodes
        sizes = {unit.name: size for unit, size in self.sizes.items()}
        chunks = self._chunks()
        earlier = self.n_written
        passes: list[list[Unit]] = []

        def plan_passes(nodes: int) -> list[list[Unit]]:
            passes.extend(self._remaining_passes(nodes))
            return passes

        def store_pass(units: list[Unit]) -> None:
            self._note_stored(units)
            if progress is not None:
                total = earlier + len(passes)
                progress(CovarianceProgress(len(chunks), len(chunks), self.n_written, total, _input_range(units)))

        run_on_nodes(
            PassContext(remote, self.recording, tuple(chunks), sizes), plan_passes, store_pass, self.notes.append
        )
        return earlier + len(passes)

    def _remaining_passes(self, nodes: int = 1) -> list[list[Unit]]:
        """Return the passes to run, at least one per node: first the one with saved sums, if they fit the memory."""
        budget = _budget(self.run.get("max_ram"))
        sizes = {unit.name: size for unit, size in self.sizes.items()}
        if sum(sizes[name] * (end - first) for name, first, end in self.current_units) > budget:
            self.current_units = []
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, first, end in (*self.stored_units, *self.current_units):
            ranges.setdefault(name, []).append((first, end))
        left = {
            Unit(unit.name, first, end): size
            for unit, size in self.sizes.items()
            for first, end in _gaps(unit.end, ranges.get(unit.name, ()))
        }
        if nodes > 1 and left:
            total = sum(size * (unit.end - unit.first) for unit, size in left.items())
            budget = min(budget, max(-(-total // nodes), *left.values()))
        return [units for units in (self.current_units, *_passes(left, budget)) if units]

    def _run_pass(self, units: list[Unit], total: int, progress: Callable[[CovarianceProgress], None] | None) -> None:
        """Run the text once for some units, and write the results."""
        chunks = self._chunks()
        rewrite = self.recording.rewrite(units)
        with load(self.model, n_ctx=self.options.n_ctx, rewrite=rewrite, **self.run) as loaded:
            self.snapshot.check(loaded.source.inputs)
            session = self.recording.session(loaded, len(chunks))
            n_resumed = self._restore_sums(units, session.accumulators)
            saver = _Saver(self.options.output_frequency)

            def on_chunks(begin: int, end: int) -> None:
                if progress is not None:
                    n = self.n_written + 1
                    progress(CovarianceProgress(n_resumed + end, len(chunks), n, total, _input_range(units)))
                if end < len(left):
                    saver.save(begin, end, lambda: self._save(session.accumulators, RunState(n_resumed + end)))

            left = chunks[n_resumed:]
            if left:
                self.recording.run(loaded, session, left, self.run.get("threads"), on_chunks)
            self.recording.write(loaded, session.accumulators)
        self._note_stored(units)

    def _chunks(self) -> list[int]:
        return [c for c in range(len(self.text.windows)) if c not in self.without]

    def _note_stored(self, units: list[Unit]) -> None:
        """Record a pass whose results are stored."""
        self.stored_units += units
        self.current_units = []
        self.n_written += 1
        self._save({}, RunState())

    def _restore_sums(self, units: list[Unit], sums: Any) -> int:
        """Restore saved sums of these units; return the number of chunks they include."""
        if units != self.current_units:
            self.current_units = units
            return 0
        progress = self.snapshot.load(sums)
        if progress is None:
            clear(sums)
        self.n_resumed = 0 if progress is None else progress.done
        return self.n_resumed


def _input_range(units: Sequence[Unit]) -> str:
    """Return the first and last input of a pass, as text."""
    return " to ".join(dict.fromkeys((units[0].name, units[-1].name)))


class _Saver:
    """Saves every ``interval`` chunks, unless that takes more than a share of the time."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.is_due = False
        self.last = time.perf_counter()
        self.save_seconds = 0.0

    def save(self, before: int, now: int, save: Callable[[], None]) -> None:
        """Save if it is due after chunks ``before`` to ``now``."""
        self.is_due |= bool(self.interval) and now // self.interval > before // self.interval
        start = time.perf_counter()
        if not self.is_due or start - self.last < self.save_seconds / _SAVE_SHARE:
            return
        save()
        self.is_due, self.last = False, time.perf_counter()
        self.save_seconds = self.last - start


def _gaps(n: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of 0..n outside the disjoint ``ranges``."""
    edges = [0, *(edge for part in sorted(ranges) for edge in part), n]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


__all__ = ["CovarianceFile", "CovarianceProgress", "Weighting", "check_covariance", "covariance"]
