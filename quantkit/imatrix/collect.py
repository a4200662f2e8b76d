"""Collect an importance matrix: run texts through a model and accumulate the squared inputs of every weight.

As in llama-imatrix (llama.cpp b11434 tools/imatrix): chunks of n_ctx tokens, BOS in place of the first if the model
uses one, several chunks per pass, all tokens in every layer, perplexity over the second half of each chunk. Unlike
llama-imatrix, sums are exact (kernels/cpu/observe.py) and independent of the order of chunks; no fused operation hides
a weight's input; a chunk that yields NaN or Inf is dropped; a stopped run resumes to the same file.

To drop a chunk, the run returns to the last snapshot (every ``output_frequency`` chunks), so that no trace of the chunk
remains in any sum.

Memory: 32 bytes per column of every distinct input, times the number of experts for routed ones. Inputs shared by
several weights (q, k, v; gate and up) count once. Qwen3-30B-A3B, 128 experts, 48 layers: 0.55 GB.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.calibration.heldout import held_out_warning
from quantkit.calibration.overlap import sketch_of
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import NodeModel, run_on_nodes, split_nodes
from quantkit.evaluate.passes import (
    F32,
    EvaluationOptions,
    bos_of,
    note_context,
    run_windows,
    text_tokens,
    text_windows,
)
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.experts import MERGED
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, ValueType, open_model
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, format_of, read_imatrix, write_imatrix
from quantkit.formats.outputs import Output, check_apart, check_free, read_text, resolve_links
from quantkit.formats.remote import locate
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.imatrix.coverage import Coverage, coverage
from quantkit.imatrix.files import MODEL_KEY, merge, with_names
from quantkit.imatrix.fill import apply_fill
from quantkit.imatrix.nextn import HiddenRows, Predictor, nextn_file
from quantkit.imatrix.on_nodes import (
    Observe,
    PassSums,
    Recording,
    Rewrite,
    add_sums,
    batch_seconds,
    begin_recording,
    note_likelihoods,
)
from quantkit.imatrix.rows import expert_counts
from quantkit.imatrix.snapshot import RunState, Snapshot, clear, snapshot_path
from quantkit.imatrix.statistics import with_stats
from quantkit.imatrix.texts import Chunks, TokenizedText, chat_part, cut_chunks, text_of, text_part
from quantkit.kernels.first_run import working_seconds
from quantkit.model.arch import arch_by_name
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.engine import Model, Session, load
from quantkit.model.fusion import Fusion
from quantkit.model.hparams import HParams
from quantkit.model.nextn import nextn_layers
from quantkit.model.observers import ALL_EXPERTS, fewest_rows, observe, observe_hidden
from quantkit.model.observers import similarity as observe_similarity
from quantkit.model.ops import Graph, SumColumns
from quantkit.model.saliency import SALIENCY, observe_saliency
from quantkit.options.imatrix import FILLS, ImatrixOptions
from quantkit.pipeline.content import FileRecord
from quantkit.progress import Progress, ProgressCallback

#: Dropped chunks with reasons: "17: blk.3.ffn_down.weight at position 5".
DROPPED_KEY = "quantkit.imatrix.dropped"
#: Whether every token went through every expert.
ALL_EXPERTS_KEY = "quantkit.imatrix.all_experts"

#: Weights that llama.cpp loads but never uses (in layers of Gemma 4 that share caches), and a weight with the same
#: input.
_SAME_INPUT = {
    "ssm_in.weight": "attn_qkv.weight",
    "attn_k.weight": "attn_q.weight",
    "attn_v.weight": "attn_q.weight",
}

I32 = npt.NDArray[np.int32]


class Similarity(NamedTuple):
    """Mean cosine of input and output of a layer, its attention and its feed-forward part."""

    layer: int
    block: float
    attention: float
    feed_forward: float


@dataclass(frozen=True, eq=False)
class ImatrixResult(HtmlTable):
    """The result of a run: the importance matrix as written (None if not requested), and facts about it.

    ``n_chunks`` of ``n_ctx`` tokens count; ``was_complete``: a resumed run found it complete.
    """

    model: Path
    n_ctx: int
    imatrix: Imatrix | None
    path: Path | None
    coverage: Coverage | None
    ppl: Estimate | None
    n_chunks: int
    dropped: Mapping[int, str]
    similarity: tuple[Similarity, ...]
    all_experts: Path | None
    seconds: float
    notes: tuple[str, ...]
    was_complete: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens of the chunks that count."""
        return self.n_chunks * self.n_ctx

    def as_table(self) -> Table:
        """Return the coverage by class of tensors; without a file, the similarity by layer."""
        ppl = "" if self.ppl is None else f", perplexity {self.ppl.text(4)}"
        caption = f"{self.model.name}: {self.n_chunks} chunks of {self.n_ctx} tokens{ppl}"
        if self.coverage is None:
            return table_of("layer, whole, attention, feed-forward", self.similarity, caption)
        table = self.coverage.as_table()
        return table._replace(caption=f"{caption}, {table.caption}")

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        matrix = self.imatrix
        return {
            "model": str(self.model),
            "file": None if self.path is None else str(self.path),
            "sha256": None if matrix is None else matrix.sha256,
            "bytes": None if self.path is None else self.path.stat().st_size,
            "entries": None if matrix is None else len(matrix.entries),
            "datasets": [] if matrix is None else matrix.datasets,
            "n_ctx": self.n_ctx,
            "n_chunks": self.n_chunks,
            "n_tokens": self.n_tokens,
            "dropped": {str(chunk): reason for chunk, reason in self.dropped.items()},
            "ppl": None if self.ppl is None else self.ppl.as_dict(),
            "coverage": None if self.coverage is None else self.coverage.share,
            "similarity": [s._asdict() for s in self.similarity],
            "all_experts": None if self.all_experts is None else str(self.all_experts),
            "was_complete": self.was_complete,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


class Watcher:
    """A receiver of a run's progress; does nothing by default."""

    def on_start(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        """Called when the run starts with chunk ``first`` of n_chunks, n_seq at a time."""

    def on_chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        """Called after a chunk, counted from 1, with the perplexity so far."""

    def on_drop(self, chunk: int, reason: str, back_to: int) -> None:
        """Called when a chunk is dropped and the run returns to an earlier one."""


class _ProgressWatcher(Watcher):
    """Calls a function after every chunk."""

    def __init__(self, report: ProgressCallback) -> None:
        self.report = report

    def on_chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        self.report(Progress(chunk, n_chunks, "" if ppl is None else f"perplexity {ppl.value:.4f}"))


@checked
def imatrix(
    model: str | Path,
    files: Sequence[str | Path] = (),
    output: str | Path | None = "imatrix.gguf",
    *,
    chat: Sequence[str | Path] = (),
    prompt: str | None = None,
    tokens: npt.ArrayLike | None = None,
    in_files: Sequence[str | Path] = (),
    draft: str | Path | None = None,
    options: ImatrixOptions | None = None,
    progress: ProgressCallback | None = None,
    watcher: Watcher | None = None,
    **run: Unpack[EvaluationOptions],
) -> ImatrixResult:
    """Collect an importance matrix and write it to ``output`` as llama-imatrix does.

    Args:
        model: a GGUF file. files: texts. chat: conversations, JSON Lines (texts.py). prompt: the text of a prompt.
            tokens: ids, int32 [n].
        output: None collects no matrix, only ``options.layer_similarity``; fusion may then be on.
        in_files: importance matrices to merge into the result.
        draft: a file with only the model's prediction layer, which is recorded as well.
        progress: called after every chunk; watcher: receives all events, instead.
        run: options of quantkit.load; fusion must be off or unspecified. nodes: a cluster to run on.

    Raises:
        RecipeError: options that contradict each other, such as fusion.
        QuantkitError: too little text, an output that exists, or no chunk without NaN.
    """
    start_seconds = working_seconds()
    options = options or ImatrixOptions()
    path = None if output is None else resolve_links(output)
    _check(options, path, run)
    if progress is not None and watcher is not None:
        raise RecipeError("progress and watcher are mutually exclusive: omit one of them", "QK-E201")
    watcher = watcher or (Watcher() if progress is None else _ProgressWatcher(progress))
    names = [*map(str, (*files, *chat)), *["prompt"] * (prompt is not None), *["tokens"] * (tokens is not None)]
    prediction_file = None
    if path is not None:
        check_apart(_outputs(path, options), [model, *files, *chat, *in_files, draft])
        prediction_file = nextn_file(model, draft) if options.nextn or draft is not None else None
        if (result := _read_complete(path, options, [model, prediction_file], files, names)) is not None:
            return result
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(_claim_output(path, options))
        earlier = [read_imatrix(path) for path in in_files]
        nodes, engine_options = split_nodes(run)
        engine_options["fusion"] = engine_options.get("fusion") or (
            Fusion() if path is None else Fusion().for_observers()
        )
        collects, latent = path is not None, _has_latents(model)
        hidden = None if prediction_file is None else HiddenRows()
        rewrite = partial(_rewrite, options, collects, latent, hidden is not None)
        loaded = stack.enter_context(
            load(model, n_ctx=options.n_ctx, rewrite=rewrite, observer=hidden, **engine_options)
        )
        if loaded.is_encoder:
            options = replace(options, ppl=False)
        text = chunks_of(loaded, files, chat, prompt, tokens, options)
        n_seq = min(len(text.windows), max(1, options.n_batch // options.n_ctx))
        observe_layer, predictor = partial(_observe, options, latent), None
        if prediction_file is not None and hidden is not None:
            predictor = Predictor(prediction_file, hidden, options.n_ctx, n_seq, observe_layer, **engine_options)
            stack.enter_context(predictor.model)
        collector = _Collector(loaded, text, options, path, watcher, earlier, predictor)
        if nodes is not None:
            remote_models = [
                NodeModel.from_path(model_path, nodes, engine_options)
                for model_path in (loaded.path, prediction_file)
                if model_path is not None
            ]
            collector.recording = collector.on_nodes(rewrite, observe_layer, *remote_models)
        collector.run(engine_options.get("threads"))
        return collector.finish(start_seconds)


def _check(options: ImatrixOptions, path: Path | None, run: EvaluationOptions) -> None:
    fusion = run.get("fusion")
    if path is not None and fusion is not None and fusion != fusion.for_observers():
        raise RecipeError(
            "fused operations hide the inputs that an importance matrix needs, so imatrix never fuses: omit the "
            "fusion switch",
            "QK-E201",
        )
    if path is None and not options.layer_similarity:
        raise RecipeError("nothing to collect: give an output file, or request the similarity of layers", "QK-E214")
    if options.fill is not None and options.fill not in FILLS:
        raise RecipeError(f"unknown fill policy {options.fill!r}; choose one of {', '.join(FILLS)}", "QK-E203")
    if options.saliency and (path is None or (options.output_format or format_of(path)) == "dat"):
        raise RecipeError("--saliency: only a GGUF importance matrix stores it: give -o FILE.gguf", "QK-E202")
    if options.n_batch > options.n_ctx and options.n_batch % options.n_ctx:
        raise RecipeError(
            f"-b {options.n_batch} is not a multiple of -c {options.n_ctx}: a pass computes whole chunks", "QK-E203"
        )


def _outputs(path: Path, options: ImatrixOptions) -> list[Path]:
    """Return all files that a run writes; of the copies, OUT.at_N, those that exist."""
    all_experts = [_all_experts_path(path)] if options.all_experts else []
    copies = path.parent.glob(f"{glob.escape(path.name)}.at_*") if options.save_frequency else ()
    return [path, snapshot_path(path), *all_experts, *(copy for copy in copies if copy.suffix[4:].isdecimal())]


def _claim_output(path: Path, options: ImatrixOptions) -> Output:
    """Return the output, to be held. Raises ResourceError if a file exists that is not of an interrupted run."""
    resumes = options.resume and snapshot_path(path).exists()
    for output in set(_outputs(path, options)) - {path, snapshot_path(path)}:
        check_free(output, overwrite=options.overwrite or resumes and output != _all_experts_path(path))
    return Output(path, overwrite=options.overwrite or resumes)


def _read_complete(
    path: Path,
    options: ImatrixOptions,
    models: Sequence[str | Path | None],
    files: Sequence[str | Path],
    names: Sequence[str],
) -> ImatrixResult | None:
    """Return the result at ``path`` if its metadata match the resumed run's."""
    if not options.resume or options.overwrite or snapshot_path(path).exists() or not path.is_file():
        return None
    matrix, n = read_imatrix(path), len(names)
    recorded = sketch_of(matrix)
    is_same = matrix.chunk_size in (0, options.n_ctx) and matrix.datasets[-n:] in (names, names[-1:])
    if recorded is not None:
        is_same = is_same and {hashlib.sha256(read_text(file)).hexdigest() for file in files} <= set(recorded.sha256)
    with ExitStack() as stack:
        opened = [stack.enter_context(open_model(model)) for model in models if model is not None]
        source, model_digest = opened[0], matrix.extra.get(MODEL_KEY)
        is_same = is_same and (model_digest is None or model_digest.value == FileRecord.read(_files(opened)).digest)
        arch, tensors = str(source.get("general.architecture", "")), source.tensors
        if not is_same or tensors.keys().isdisjoint(matrix.entries):
            raise QuantkitError(
                f"{path} exists and is not a result of this run, and no snapshot exists to resume from: choose "
                "another name, or use --overwrite to replace it",
                "QK-E402",
            )
        covered = coverage(matrix, tensors.values(), arch=arch, process_output=options.process_output)
    model = locate(str(models[0]))
    return ImatrixResult(
        model, options.n_ctx, matrix, path, covered, None, matrix.chunk_count, {}, (), None, 0.0, (), was_complete=True
    )


def _files(models: Iterable[GGUFFile]) -> tuple[Path, ...]:
    """Return the files of models, pinned as they were opened."""
    return tuple(dict.fromkeys(path for model in models for path in model.inputs))


def _all_experts_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.all-experts{path.suffix}")


def _has_latents(model: str | Path) -> bool:
    """Return whether a file has latent attention in the form that runtimes convert to the other."""
    with open_model(model) as source:
        return arch_by_name(HParams(source).arch).attention == "mla"


def _rewrite(options: ImatrixOptions, collects: bool, latent: bool, hidden: bool, graph: Graph) -> Graph:
    """Return the graph with observing operations."""
    if collects:
        graph = _observe(options, latent, graph, options.process_output)
    graph = observe_hidden(graph) if hidden else graph
    graph = observe_similarity(graph) if options.layer_similarity else graph
    return fewest_rows(graph)


def _observe(options: ImatrixOptions, latent: bool, graph: Graph, output: bool) -> Graph:
    graph = observe(graph, process_output=output, all_experts=options.all_experts, latent=latent)
    return observe_saliency(graph) if options.saliency else graph


def chunks_of(
    model: Model,
    files: Sequence[str | Path],
    chat: Sequence[str | Path],
    prompt: str | None,
    tokens: npt.ArrayLike | None,
    options: ImatrixOptions,
) -> Chunks:
    """Return the chunks of all texts, conversations and ids. Raises RecipeError if there are none."""
    if not files and not chat and prompt is None and tokens is None:
        raise RecipeError("nothing to calibrate on: give a text (-f, -p), conversations (--chat) or tokens", "QK-E202")
    parts = [text_part(locate(file), model.tokenizer, options.parse_special) for file in files]
    parts += [chat_part(locate(file), model.tokenizer, model.source) for file in chat]
    if prompt is not None:
        parts.append(text_of("prompt", prompt.encode(errors="surrogateescape"), model.tokenizer, options.parse_special))
    if tokens is not None:
        parts.append(TokenizedText("tokens", text_tokens(model, None, tokens), None))
    return cut_chunks(parts, options.n_ctx, options.from_chunk, options.chunks)


# ---------------------------------------------------------------- the run


class _NotFiniteChunks(Exception):
    """A pass yields NaN or Inf: location by chunk."""

    def __init__(self, chunks: dict[int, str]) -> None:
        self.chunks = chunks


class _Collector:
    """A run over chunks: passes, snapshots, dropped chunks, results."""

    def __init__(
        self,
        model: Model,
        text: Chunks,
        options: ImatrixOptions,
        path: Path | None,
        watcher: Watcher,
        earlier: Sequence[Imatrix],
        predictor: Predictor | None = None,
    ) -> None:
        self.model = model
        self.text = text
        self.options = options
        self.path = path
        self.watcher = watcher
        self.earlier, self.predictor = earlier, predictor
        self.n = len(text.windows)
        self.n_seq = min(self.n, max(1, options.n_batch // options.n_ctx))
        self.session: Session = model.session(options.n_ctx, self.n_seq)
        self.notes = list(text.notes)
        note_context(model, options.n_ctx, self.notes)
        warning = None if path is None else held_out_warning(path, self._texts())
        self.notes += [] if warning is None else [warning]
        if model.is_encoder:
            self.notes.append("an encoder has no next token: no perplexity is computed")
        self.bos = bos_of(model, self.notes)
        self.progress = RunState()
        models = [model.source] if predictor is None else [model.source, predictor.model.source]
        self.snapshot = None if path is None else Snapshot(path, self._identity(), _files(models))
        self.nll: dict[int, npt.NDArray[np.float64]] = {}
        self.names = _accumulator_weights(model.graph) | (
            {} if predictor is None else _accumulator_weights(predictor.model.graph)
        )
        self._note_nextn()
        self.has_all_experts = any(name.startswith(ALL_EXPERTS) for name in self.names)
        if options.all_experts and not self.has_all_experts:
            self.notes.append(f"--all-experts: {model.path} has no experts")
        #: The chunk up to which a snapshot is saved.
        self.saved_chunk = 0
        #: Work for the nodes of a cluster; None: this machine does it.
        self.recording: Recording | None = None

    def _note_nextn(self) -> None:
        """Note a prediction layer that is not requested, or requested but missing."""
        layers = nextn_layers(self.model.source)
        if self.path is None or self.predictor is not None:
            return
        if self.options.nextn:
            self.notes.append(f"--nextn: {self.model.path} has no prediction layer")
        elif layers:
            self.notes.append(
                f"blk.{layers[0]} is a prediction layer (MTP) and is not run; use --nextn to record it as well"
            )

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """All sums, including those of the prediction layer."""
        return self.session.accumulators | ({} if self.predictor is None else self.predictor.accumulators)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The model's tensors, and those of a prediction layer in its own file."""
        tensors = dict(self.model.source.tensors)
        if self.predictor is not None:
            prefix = f"blk.{nextn_layers(self.predictor.model.source)[0]}."
            tensors |= {name: t for name, t in self.predictor.model.source.tensors.items() if name.startswith(prefix)}
        return tensors

    def _identity(self) -> str:
        """Return a digest of the settings, model apart, that a snapshot must share to be resumed."""
        o = self.options
        digest = hashlib.sha256(self.text.windows.tobytes())
        numbers = (o.n_ctx, o.n_batch, self.session.limits.n_ubatch, self.model.kv_type, self.bos, o.ppl)
        switches = (o.process_output, o.all_experts, o.layer_similarity, self.predictor is not None, o.saliency)
        digest.update(repr((numbers, switches, *self.model.overrides)).encode())
        return digest.hexdigest()

    # ------------------------------------------------ chunks

    def run(self, threads: int | None) -> None:
        """Run all chunks; those that yield NaN or Inf are dropped."""
        if self.options.resume and self.snapshot is not None:
            self._restore({})
            if self.snapshot.path.exists() and not self.saved_chunk and not self.options.overwrite:
                raise QuantkitError(
                    f"{self.snapshot.path} is the snapshot of another run: the model, text or options differ; start "
                    "over with --overwrite instead of --resume",
                    "QK-E409",
                )
        self.watcher.on_start(self.saved_chunk, self.n, self.n_seq, self.notes)
        while left := [c for c in range(self.progress.done, self.n) if c not in self.progress.dropped]:
            try:
                self._passes(left, threads)
            except _NotFiniteChunks as bad:
                self._restore(bad.chunks)
        if len(self.progress.dropped) == self.n:
            raise QuantkitError(
                f"{self.model.path}: every chunk yields NaN or infinite values, the first at "
                f"{self.progress.dropped[0]}: the file is damaged, or values exceed --kv-type f16",
                "QK-E108",
            )

    def on_nodes(
        self, rewrite: Rewrite, observe: Observe, model: NodeModel, prediction: NodeModel | None = None
    ) -> Recording:
        """Return the settings that nodes run the passes with."""
        o = self.options
        return Recording(
            model, rewrite, observe, prediction, o.n_ctx, o.n_batch, self.n_seq, self._first, o.ppl, self.bos
        )

    @property
    def _first(self) -> int:
        """The first position whose logits are needed; none without a likelihood."""
        return self.options.n_ctx // 2 if self.options.ppl else self.options.n_ctx - 1

    def _passes_on_nodes(self, recording: Recording, left: Sequence[int]) -> None:
        def take(begin: int, end: int, result: PassSums) -> None:
            chunks = left[begin:end]
            self.nll |= {chunks[window]: nll for window, nll in result.nll.items()}
            self._add_chunks(chunks, result.not_finite, result.sums)

        run_on_nodes(
            recording.model.nodes,
            begin_recording,
            recording,
            self.text.windows[left],
            self.n_seq,
            take,
            self.notes.append,
            seconds=batch_seconds(self.accumulators),
        )

    def _passes(self, left: Sequence[int], threads: int | None) -> None:
        if self.recording is not None:
            self._passes_on_nodes(self.recording, left)
            return

        def score(window: int, row: int, logits: F32, following: I32) -> None:
            self._score(left[window], row, logits, following)

        run_windows(
            self.model,
            text_windows(self.text.windows[left], self._first),
            score,
            lambda begin, end: self._finish_pass(left[begin:end]),
            n_batch=self.options.n_batch,
            bos=self.bos,
            threads=threads,
            session=self.session,
        )

    def _score(self, chunk: int, row: int, logits: F32, following: I32) -> None:
        note_likelihoods(self.nll, chunk, self.options.n_ctx, row, logits, following)

    def _finish_pass(self, chunks: Sequence[int]) -> None:
        """Add a pass. Raises _NotFiniteChunks if it must be undone."""
        not_finite = self.session.take_not_finite()
        if self.predictor is not None:
            predicted = self.predictor.run(self.text.windows[chunks])
            not_finite += [replace(where, position=where.position + 1) for where in predicted]
        self._add_chunks(chunks, not_finite)

    def _add_chunks(
        self, chunks: Sequence[int], not_finite: Sequence[NotFinite], sums: Mapping[str, Accumulator] | None = None
    ) -> None:
        """Count chunks; ``sums``: those of another node, None if already added. Raises _NotFiniteChunks."""
        bad: dict[int, str] = {}
        for where in not_finite:
            bad.setdefault(chunks[where.sequence], f"{self._input_name(where.label)} at position {where.position}")
        for chunk in chunks:
            if self.options.ppl and not np.isfinite(self.nll[chunk]).all():
                bad.setdefault(chunk, "the logits")
        if bad:
            self.nll.clear()
            raise _NotFiniteChunks(bad)
        for name, partial_sums in (sums or {}).items():
            add_sums(self.accumulators[name], partial_sums, columns=name in self.names)
        before = self.progress.done
        for chunk in chunks:
            self._count(chunk)
        # Dropped chunks are counted with the next valid one.
        self.progress.done = chunks[-1] + 1
        self._save(before)

    def _count(self, chunk: int) -> None:
        if self.options.ppl:
            sums = NllSums(self.progress.n, self.progress.total, self.progress.squares)
            sums.add(self.nll.pop(chunk))
            self.progress.n = sums.n
            self.progress.total = sums.total
            self.progress.squares = sums.squares
        self.watcher.on_chunk(chunk + 1, self.n, self.ppl)

    def _input_name(self, name: str) -> str:
        if name.startswith(SALIENCY):
            return f"the output of {name.removeprefix(SALIENCY)}"
        return (
            f"the input of {name.removeprefix(ALL_EXPERTS)}" if name in self.names else f"the input or output of {name}"
        )

    @property
    def ppl(self) -> Estimate | None:
        """The perplexity so far; None if not requested, or not yet known."""
        p = self.progress
        return NllSums(p.n, p.total, p.squares).ppl if p.n else None

    # ------------------------------------------------ states

    def _save(self, before: int) -> None:
        """Save the snapshot and the copies that fell due since chunk ``before``."""
        if self.path is None or self.snapshot is None or self.progress.done == self.n:
            return
        n_done = self.progress.done
        interval = self.options.output_frequency
        copy_interval = self.options.save_frequency
        if interval and n_done // interval > before // interval:
            self.snapshot.save(self.accumulators, self.progress)
            self.saved_chunk = n_done
            self._write(self.path, self._imatrix())
        if copy_interval and n_done // copy_interval > before // copy_interval:
            self._write(self.path.with_name(f"{self.path.name}.at_{n_done}"), with_stats(self._imatrix()))

    def _restore(self, bad: Mapping[int, str]) -> None:
        """Return to the last snapshot, without the chunks ``bad``."""
        progress = None
        if self.snapshot is not None and (self.saved_chunk or self.options.resume):
            progress = self.snapshot.load(self.accumulators)
        if progress is None:
            clear(self.accumulators)
        dropped = {**self.progress.dropped, **bad}
        self.progress = progress or RunState()
        self.progress.dropped |= dropped
        self.saved_chunk = self.progress.done
        for chunk, reason in bad.items():
            self.watcher.on_drop(chunk, reason, self.saved_chunk)

    # ------------------------------------------------ results

    def finish(self, start_seconds: float) -> ImatrixResult:
        """Write the files and return the result."""
        matrix = None
        covered = None
        all_experts = None
        if self.path is not None:
            matrix = self._complete(self._imatrix())
            covered = self._coverage(matrix)
            matrix = matrix if self.options.fill is None else apply_fill(matrix, self.options.fill)
            self._write(self.path, matrix)
            if self.has_all_experts:
                all_experts = _all_experts_path(self.path)
                self._write(all_experts, self._complete(self._all_experts()))
        if self.snapshot is not None:
            self.snapshot.remove()
        return ImatrixResult(
            locate(self.model.path),
            self.options.n_ctx,
            matrix,
            self.path,
            covered,
            self.ppl,
            self.n - len(self.progress.dropped),
            self.progress.dropped,
            self._similarity(),
            all_experts,
            working_seconds() - start_seconds,
            tuple(self.notes),
        )

    def _complete(self, matrix: Imatrix) -> Imatrix:
        """Add names and statistics."""
        merged = any(MERGED in name for name in self.tensors)
        names = self.options.names or ("both" if merged else None)
        return with_stats(matrix if names is None else with_names(matrix, names))

    def _sums(self, prefix: str = "") -> dict[str, ImatrixEntry]:
        """Return the entries of accumulators named with ``prefix``; without it, those of the real routing."""
        entries: dict[str, ImatrixEntry] = {}
        accumulators = self.accumulators
        for accumulator, (width, names) in self.names.items():
            if not accumulator.startswith(SALIENCY) and accumulator.startswith(prefix or ALL_EXPERTS) is bool(prefix):
                entries |= dict.fromkeys(names, entry_of(accumulators[accumulator], width))
        for name in with_shared_inputs(tuple(entries), self.tensors)[len(entries) :]:
            entries[name] = entries[_input_alias(name)]
        if not prefix:
            for name in [name for name in self.names if name.startswith(SALIENCY)]:
                weight = name.removeprefix(SALIENCY)
                entries[weight] = replace(entries[weight], saliency=_saliency_of(accumulators[name]))
        return dict(sorted(entries.items()))

    def _run_matrix(self) -> Imatrix:
        """Return the matrix of this run so far."""
        n_chunks = self.progress.done - sum(chunk < self.progress.done for chunk in self.progress.dropped)
        path, datasets = self.path or Path("imatrix.gguf"), list(self.text.datasets)
        n_nextn = 0 if self.predictor is None else 1
        return Imatrix(path, self._sums(), datasets, n_chunks, self.options.n_ctx, "gguf", n_nextn, extra=self._extra())

    def _imatrix(self) -> Imatrix:
        """Return the matrix of this run so far, merged with ``in_files``."""
        matrix = self._run_matrix()
        if self.earlier:
            matrix = self._merge_earlier(matrix)
        if self.snapshot is not None:
            matrix.extra[MODEL_KEY] = Field.of(MODEL_KEY, self.snapshot.model.record().digest)
        return matrix

    def _merge_earlier(self, matrix: Imatrix) -> Imatrix:
        """Merge this run's matrix with ``in_files``."""
        experts = expert_counts({n for i in self.earlier for n in i.entries}, self.tensors.values())
        merged = merge([*self.earlier, matrix], chunk_size=self.options.n_ctx, experts=experts)
        self.notes += [note for note in merged.notes if note not in self.notes]
        return replace(merged.imatrix, path=matrix.path)

    def _texts(self) -> dict[str, Field]:
        """Return the sketches of the texts, and of the held-out parts of their corpora."""
        parts = (self.text.sketch, self.text.held_out)
        return {key: field for part in parts if part is not None for key, field in part.fields().items()}

    def _extra(self) -> dict[str, Field]:
        extra = self._texts()
        if self.progress.dropped:
            lines = [f"{chunk + 1}: {reason}" for chunk, reason in sorted(self.progress.dropped.items())]
            extra[DROPPED_KEY] = Field.of(DROPPED_KEY, lines, ValueType.ARRAY, ValueType.STRING)
        return extra

    def _all_experts(self) -> Imatrix:
        """Return the matrix for which every token goes through every expert, with the entries of other weights."""
        matrix = self._run_matrix()
        for name, entry in self._sums(ALL_EXPERTS).items():
            n_mat = matrix.entries[name].counts.size
            if entry.counts.size != n_mat:  # up and gate: all experts have the same input
                in_sum = None if entry.in_sum is None else np.repeat(entry.in_sum, n_mat, axis=0)
                entry = ImatrixEntry(np.repeat(entry.sums, n_mat, axis=0), np.repeat(entry.counts, n_mat), in_sum)
            matrix.entries[name] = entry
        matrix.extra[ALL_EXPERTS_KEY] = Field.of(ALL_EXPERTS_KEY, True)
        return matrix

    def _write(self, path: Path, matrix: Imatrix) -> None:
        write_imatrix(path, matrix, self.options.output_format or format_of(path))

    def _coverage(self, matrix: Imatrix) -> Coverage:
        tensors = self.tensors.values()
        return coverage(matrix, tensors, arch=self.model.arch, process_output=self.options.process_output)

    def _similarity(self) -> tuple[Similarity, ...]:
        accumulators = self.session.accumulators

        def mean(kind: str, layer: int) -> float:
            sums = accumulators[f"{kind} {layer}"]
            return float(sums["total"][0] / sums["counts"][0])

        layers = sorted(int(name.split()[1]) for name in accumulators if name.startswith("layer "))
        return tuple(Similarity(i, *(mean(kind, i) for kind in ("layer", "attention", "feed-forward"))) for i in layers)


def _accumulator_weights(graph: Graph) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the width and the weights of every accumulator of sums."""
    return {op.label: (op.x.width, op.names) for op in graph.ops if isinstance(op, SumColumns)}


def with_shared_inputs(names: Sequence[str], tensors: Collection[str]) -> tuple[str, ...]:
    """Return the names, and those of unused weights of the model with the same inputs."""
    given_names = set(names)
    return (*names, *(name for name in tensors if name not in given_names and _input_alias(name) in given_names))


def _input_alias(name: str) -> str:
    layer, n, kind = (*name.split(".", 2), "", "")[:3]
    return f"{layer}.{n}.{_SAME_INPUT.get(kind, '')}"


def _saliency_of(accumulator: Accumulator) -> F32:
    """Return the sums of gates times norms of each expert in float32, rounded once."""
    sums = accumulator["sums"]
    total: F32 = (sums[:, 2] + sums[:, 3]).sum(axis=1).astype(np.float32)
    return total


def entry_of(accumulator: Accumulator, width: int) -> ImatrixEntry:
    """Return the sums of a SumColumns accumulator in float32, rounded once."""
    sums = accumulator["sums"][:, :, :width]
    squares, plain = (sums[:, i] + sums[:, i + 1] for i in (0, 2))
    with np.errstate(over="ignore"):
        return ImatrixEntry(squares.astype(np.float32), accumulator["counts"].copy(), plain.astype(np.float32))
