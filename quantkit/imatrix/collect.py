"""Collect an importance matrix: run texts through a model and sum up the input of every weight.

As llama-imatrix (llama.cpp b11434 tools/imatrix): chunks of n_ctx tokens, BOS in place of the first where the model
wants one, several chunks a pass, all tokens in every layer, perplexity over the second half of each. Unlike there, sums
are exact (kernels/cpu/observe.py) and independent of the order of chunks; no fused operation can hide a weight's
input; a chunk that yields NaN or Inf is dropped and the run goes on; a stopped run resumes to the same file.

To drop a chunk, the run returns to the last saved state (every ``output_frequency`` chunks), so that nothing of the
chunk remains in any sum.

Memory: 32 bytes for every column of every distinct input, times the experts where they route. Inputs that several
weights share (q, k, v; gate and up) count once: Qwen3-30B-A3B, 128 experts, 48 layers: 0.55 GB.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.calibration.heldout import held_out_used
from quantkit.calibration.overlap import sketch_of
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.on_nodes import There, run_on_nodes, without_nodes
from quantkit.evaluate.passes import F32, EvaluationOptions, bos_of, note_context, run_windows, text_tokens
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.experts import MERGED
from quantkit.formats.gguf import Field, TensorInfo, ValueType, open_model
from quantkit.formats.imatrix import Format, Imatrix, ImatrixEntry, format_of, read_imatrix, write_imatrix
from quantkit.formats.outputs import Output, check_apart, check_free, end_of_links, read_text
from quantkit.imatrix.checkpoint import Checkpoint, Progress, clear, state_of
from quantkit.imatrix.coverage import Coverage, coverage
from quantkit.imatrix.files import merge, with_names
from quantkit.imatrix.fill import FILLS, apply_fill
from quantkit.imatrix.nextn import Hidden, Predictor, nextn_file
from quantkit.imatrix.on_nodes import Look, Recorded, Recording, Rewrite, add, begin_recording, note_likelihoods, worth
from quantkit.imatrix.rows import expert_counts
from quantkit.imatrix.statistics import with_stats
from quantkit.imatrix.texts import Chunks, TokenizedText, chat_part, cut, text_of, text_part
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

#: Dropped chunks, and why: "17: blk.3.ffn_down.weight at position 5".
DROPPED_KEY = "quantkit.imatrix.dropped"
#: Whether every token went through every expert.
ALL_EXPERTS_KEY = "quantkit.imatrix.all_experts"

#: Weights that llama.cpp loads but never multiplies by (of Gemma 4 in layers that share caches), and the weight with
#: the same input.
_SAME_INPUT = {
    "ssm_in.weight": "attn_qkv.weight",
    "attn_k.weight": "attn_q.weight",
    "attn_v.weight": "attn_q.weight",
}

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ImatrixOptions:
    """What to collect, and how to write it.

    Args:
        n_ctx: tokens of a chunk; n_batch: of a pass, so max(1, n_batch // n_ctx) chunks run at once.
        chunks: how many (None: all), after skipping the first ``from_chunk``.
        output_frequency: chunks between writes of the output and of a state to resume from; 0: only at the end.
        save_frequency: chunks between copies, OUT.at_N; 0: none.
        names: of up and gate experts: merged, separate, both; None: both for a merged file, else as in the file.
        fill: what experts without tokens get in the files (fill.py).
        all_experts: also OUT.all-experts, in which every token went through every expert.
        nextn: also the model's prediction layer (nextn.py).
    """

    n_ctx: int = 512
    n_batch: int = 2048
    chunks: int | None = None
    from_chunk: int = 0
    output_format: Format | None = None
    output_frequency: int = 10
    save_frequency: int = 0
    process_output: bool = False
    nextn: bool = False
    parse_special: bool = False
    ppl: bool = True
    all_experts: bool = False
    layer_similarity: bool = False
    names: str | None = None
    fill: str | None = None
    resume: bool = False
    overwrite: bool = False


class Similarity(NamedTuple):
    """Mean cosine of input and output of a layer, its attention and its feed-forward part."""

    layer: int
    whole: float
    attention: float
    feed_forward: float


@dataclass(frozen=True)
class Collected:
    """The result of a run: the importance matrix as written (None if not requested), and facts about it.

    ``finished``: it was complete already when the run was resumed.
    """

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
    finished: bool = False


class Watcher:
    """Receives the progress of a run; does nothing by itself."""

    def started(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        """The run starts with chunk ``first`` of n_chunks, n_seq at a time."""

    def chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        """A chunk, counted from 1, is done; the perplexity so far."""

    def dropped(self, chunk: int, why: str, back_to: int) -> None:
        """A chunk is dropped; the run returns to an earlier one."""


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
    watcher: Watcher | None = None,
    **run: Unpack[EvaluationOptions],
) -> Collected:
    """Collect an importance matrix, written to ``output`` as llama-imatrix writes it.

    Args:
        model: a GGUF file; files: texts; chat: conversations, JSON lines (texts.py); prompt: a text itself;
            tokens: ids, int32 [n].
        output: None collects no matrix, only ``options.layer_similarity``; fusion may then be on.
        in_files: importance matrices to add this one to.
        draft: a file with the model's prediction layer alone, which is recorded as well.
        run: options of quantkit.load; fusion must be off or unspecified. nodes: those of a cluster, to run on.

    Raises:
        RecipeError: options that contradict each other, such as fusion.
        QuantkitError: too little text, an output that exists, or no chunk without NaN.
    """
    started = working_seconds()
    options = options or ImatrixOptions()
    path = None if output is None else end_of_links(output)
    _check(options, path, run)
    names = [*map(str, (*files, *chat)), *["prompt"] * (prompt is not None), *["tokens"] * (tokens is not None)]
    if path is not None:
        check_apart(_written(path, options), [model, *files, *chat, *in_files, draft])
        if (there := _finished(path, options, model, files, names)) is not None:
            return there
    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(_claimed(path, options))
        earlier = [read_imatrix(each) for each in in_files]
        nodes, own = without_nodes(run)
        own["fusion"] = own.get("fusion") or (Fusion() if path is None else Fusion().observed())
        collects, latent = path is not None, _has_latents(model)
        predicting = nextn_file(model, draft) if collects and (options.nextn or draft is not None) else None
        hidden = None if predicting is None else Hidden()
        rewrite = partial(_rewritten, options, collects, latent, hidden is not None)
        loaded = stack.enter_context(load(model, n_ctx=options.n_ctx, rewrite=rewrite, observer=hidden, **own))
        text = chunks_of(loaded, files, chat, prompt, tokens, options)
        n_seq = min(len(text.windows), max(1, options.n_batch // options.n_ctx))
        look, predictor = partial(_look, options, latent), None
        if predicting is not None and hidden is not None:
            predictor = Predictor(predicting, hidden, options.n_ctx, n_seq, look, **own)
            stack.enter_context(predictor.model)
        collector = _Collector(loaded, text, options, path, watcher or Watcher(), earlier, predictor)
        if nodes is not None:
            files_there = [There.of(each, nodes, own) for each in (loaded.path, predicting) if each is not None]
            collector.recording = collector.on_nodes(rewrite, look, *files_there)
        collector.run(own.get("threads"))
        return collector.finish(started)


def _check(options: ImatrixOptions, path: Path | None, run: EvaluationOptions) -> None:
    fusion = run.get("fusion")
    if path is not None and fusion is not None and fusion != fusion.observed():
        raise RecipeError(
            "an importance matrix needs every weight's own input, which fused operations do not show: fusion is off by "
            "itself; leave the switch away"
        )
    if path is None and not options.layer_similarity:
        raise RecipeError("nothing to collect: name an output, or ask for the similarity of layers")
    if options.fill is not None and options.fill not in FILLS:
        raise RecipeError(f"no fill policy {options.fill!r}; there are {', '.join(FILLS)}")
    if options.n_batch > options.n_ctx and options.n_batch % options.n_ctx:
        raise RecipeError(f"-b {options.n_batch} is no multiple of -c {options.n_ctx}: a pass takes whole chunks")


def _written(path: Path, options: ImatrixOptions) -> list[Path]:
    """Return everything a run writes; of the copies, OUT.at_N, those that exist."""
    everywhere = [_everywhere(path)] if options.all_experts else []
    copies = path.parent.glob(f"{glob.escape(path.name)}.at_*") if options.save_frequency else ()
    return [path, state_of(path), *everywhere, *(copy for copy in copies if copy.suffix[4:].isdecimal())]


def _claimed(path: Path, options: ImatrixOptions) -> Output:
    """Return the output, to be held. ResourceError if a file exists and does not belong to an interrupted run."""
    resumes = options.resume and state_of(path).exists()
    for each in set(_written(path, options)) - {path, state_of(path)}:
        check_free(each, overwrite=options.overwrite or resumes and each != _everywhere(path))
    return Output(path, overwrite=options.overwrite or resumes)


def _finished(
    path: Path, options: ImatrixOptions, model: str | Path, files: Sequence[str | Path], names: Sequence[str]
) -> Collected | None:
    """Return what is at ``path`` already, if it is what the run to be resumed came to, as far as the file tells."""
    if not options.resume or options.overwrite or state_of(path).exists() or not path.is_file():
        return None
    found, n = read_imatrix(path), len(names)
    known = sketch_of(found)
    same = found.chunk_size in (0, options.n_ctx) and found.datasets[-n:] in (names, names[-1:])
    if known is not None:
        same = same and {hashlib.sha256(read_text(file)).hexdigest() for file in files} <= set(known.sha256)
    with open_model(model) as source:
        arch, tensors = str(source.get("general.architecture", "")), source.tensors
        if not same or tensors.keys().isdisjoint(found.entries):
            raise QuantkitError(
                f"{path} exists, and is not what this run would make; there is no state beside it to resume from: "
                "give another name, or --overwrite to replace it"
            )
        covered = coverage(found, tensors.values(), arch=arch, process_output=options.process_output)
    return Collected(found, path, covered, None, found.chunk_count, {}, (), None, 0.0, (), finished=True)


def _everywhere(path: Path) -> Path:
    return path.with_name(f"{path.stem}.all-experts{path.suffix}")


def _has_latents(model: str | Path) -> bool:
    """Return whether a file has latent attention in a form that runtimes convert to the other."""
    with open_model(model) as source:
        return arch_by_name(HParams(source).arch).attention == "mla"


def _rewritten(options: ImatrixOptions, collects: bool, latent: bool, hidden: bool, graph: Graph) -> Graph:
    """Return the graph with what observes it."""
    if collects:
        graph = _look(options, latent, graph, options.process_output)
    graph = observe_hidden(graph) if hidden else graph
    graph = observe_similarity(graph) if options.layer_similarity else graph
    return fewest_rows(graph)


def _look(options: ImatrixOptions, latent: bool, graph: Graph, output: bool) -> Graph:
    return observe(graph, process_output=output, all_experts=options.all_experts, latent=latent)


def chunks_of(
    model: Model,
    files: Sequence[str | Path],
    chat: Sequence[str | Path],
    prompt: str | None,
    tokens: npt.ArrayLike | None,
    options: ImatrixOptions,
) -> Chunks:
    """Return the chunks of all given texts, conversations and ids. Raises RecipeError if there are none."""
    if not files and not chat and prompt is None and tokens is None:
        raise RecipeError("there is nothing to calibrate on: give a text (-f, -p), conversations (--chat) or tokens")
    parts = [text_part(Path(file), model.tokenizer, options.parse_special) for file in files]
    parts += [chat_part(Path(file), model.tokenizer, model.source) for file in chat]
    if prompt is not None:
        parts.append(text_of("prompt", prompt.encode(errors="surrogateescape"), model.tokenizer, options.parse_special))
    if tokens is not None:
        parts.append(TokenizedText("tokens", text_tokens(model, None, tokens), None))
    return cut(parts, options.n_ctx, options.from_chunk, options.chunks)


# ---------------------------------------------------------------- the run


class _Bad(Exception):
    """A pass yields NaN or Inf: chunk -> where."""

    def __init__(self, chunks: dict[int, str]) -> None:
        self.chunks = chunks


class _Collector:
    """A run over chunks: passes, states, dropped chunks, results."""

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
        self.model, self.text, self.options, self.path, self.watcher = model, text, options, path, watcher
        self.earlier, self.predictor = earlier, predictor
        self.n = len(text.windows)
        self.n_seq = min(self.n, max(1, options.n_batch // options.n_ctx))
        self.session: Session = model.session(options.n_ctx, self.n_seq)
        self.notes = list(text.notes)
        note_context(model, options.n_ctx, self.notes)
        warning = None if path is None else held_out_used(path, self._texts())
        self.notes += [] if warning is None else [warning]
        self.bos = bos_of(model, self.notes)
        self.progress = Progress()
        self.checkpoint = None if path is None else Checkpoint(path, self._identity())
        self.nll: dict[int, npt.NDArray[np.float64]] = {}
        self.names = _names(model.graph) | ({} if predictor is None else _names(predictor.model.graph))
        self._note_nextn()
        self.has_all = any(of.startswith(ALL_EXPERTS) for of in self.names)
        if options.all_experts and not self.has_all:
            self.notes.append(f"--all-experts: {model.path} has no experts; there is no file of theirs")
        #: The chunk up to which a state is saved.
        self.saved = 0
        #: What the nodes of a cluster are to do; None: this machine does it.
        self.recording: Recording | None = None

    def _note_nextn(self) -> None:
        """Note a prediction layer that is not requested, or requested but missing."""
        layers = nextn_layers(self.model.source)
        if self.path is None or self.predictor is not None:
            return
        if self.options.nextn:
            self.notes.append(f"--nextn: {self.model.path} has no prediction layer")
        elif layers:
            self.notes.append(f"blk.{layers[0]} predicts a token more and is not run: --nextn records it, too")

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """All sums, those of the prediction layer included."""
        return self.session.accumulators | ({} if self.predictor is None else self.predictor.accumulators)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The model's tensors, and those of a prediction layer in a file of its own."""
        found = dict(self.model.source.tensors)
        if self.predictor is not None:
            prefix = f"blk.{nextn_layers(self.predictor.model.source)[0]}."
            found |= {name: t for name, t in self.predictor.model.source.tensors.items() if name.startswith(prefix)}
        return found

    def _identity(self) -> str:
        """Return what must agree to resume from a state."""
        o = self.options
        digest = hashlib.sha256(self.text.windows.tobytes())
        numbers = (o.n_ctx, o.n_batch, self.session.limits.n_ubatch, self.model.kv_type, self.bos, o.ppl)
        what = (o.process_output, o.all_experts, o.layer_similarity, fingerprint_of(self.model))
        more = () if self.predictor is None else (fingerprint_of(self.predictor.model),)
        digest.update(repr((numbers, what, *more)).encode())
        return digest.hexdigest()

    # ------------------------------------------------ chunks

    def run(self, threads: int | None) -> None:
        """Run all chunks; those that yield NaN or Inf are dropped."""
        if self.options.resume and self.checkpoint is not None:
            self._go_back({})
            if self.checkpoint.path.exists() and not self.saved and not self.options.overwrite:
                raise QuantkitError(
                    f"{self.checkpoint.path} is the state of another run: model, text or options differ; start over "
                    "with --overwrite, without --resume"
                )
        self.watcher.started(self.saved, self.n, self.n_seq, self.notes)
        while left := [c for c in range(self.progress.done, self.n) if c not in self.progress.dropped]:
            try:
                self._passes(left, threads)
            except _Bad as bad:
                self._go_back(bad.chunks)
        if len(self.progress.dropped) == self.n:
            raise QuantkitError(
                f"{self.model.path}: every chunk yields NaN or infinite values, the first at "
                f"{self.progress.dropped[0]}: a broken file, or numbers too large for --kv-type f16"
            )

    def on_nodes(self, rewrite: Rewrite, look: Look, model: There, predicting: There | None = None) -> Recording:
        """Return what nodes need to do the passes of this run."""
        o = self.options
        return Recording(model, rewrite, look, predicting, o.n_ctx, o.n_batch, self.n_seq, self._first, o.ppl, self.bos)

    @property
    def _first(self) -> int:
        """The first position whose logits are needed; without a likelihood, none is."""
        return self.options.n_ctx // 2 if self.options.ppl else self.options.n_ctx - 1

    def _passes_on_nodes(self, recording: Recording, left: Sequence[int]) -> None:
        def take(begin: int, end: int, found: Recorded) -> None:
            chunks = left[begin:end]
            self.nll |= {chunks[window]: nll for window, nll in found.nll.items()}
            self._settle(chunks, found.not_finite, found.sums)

        run_on_nodes(
            recording.model.nodes,
            begin_recording,
            recording,
            self.text.windows[left],
            self.n_seq,
            take,
            self.notes.append,
            seconds=worth(self.accumulators),
        )

    def _passes(self, left: Sequence[int], threads: int | None) -> None:
        if self.recording is not None:
            self._passes_on_nodes(self.recording, left)
            return

        def score(window: int, row: int, logits: F32, following: I32) -> None:
            self._score(left[window], row, logits, following)

        run_windows(
            self.model,
            self.text.windows[left],
            self._first,
            score,
            lambda begin, end: self._done(left[begin:end]),
            n_batch=self.options.n_batch,
            bos=self.bos,
            threads=threads,
            session=self.session,
        )

    def _score(self, chunk: int, row: int, logits: F32, following: I32) -> None:
        note_likelihoods(self.nll, chunk, self.options.n_ctx, row, logits, following)

    def _done(self, chunks: Sequence[int]) -> None:
        """Add a pass; raises _Bad if it must be undone."""
        found = self.session.take_not_finite()
        if self.predictor is not None:
            seen = self.predictor.run(self.text.windows[chunks])
            found += [replace(where, position=where.position + 1) for where in seen]
        self._settle(chunks, found)

    def _settle(
        self, chunks: Sequence[int], found: Sequence[NotFinite], sums: Mapping[str, Accumulator] | None = None
    ) -> None:
        """Count chunks, whose ``sums`` were made elsewhere or are here already; raises _Bad if they must be undone."""
        bad: dict[int, str] = {}
        for where in found:
            bad.setdefault(chunks[where.sequence], f"{self._called(where.of)} at position {where.position}")
        for chunk in chunks:
            if self.options.ppl and not np.isfinite(self.nll[chunk]).all():
                bad.setdefault(chunk, "the logits")
        if bad:
            self.nll.clear()
            raise _Bad(bad)
        for of, more in (sums or {}).items():
            add(self.accumulators[of], more, columns=of in self.names)
        before = self.progress.done
        for chunk in chunks:
            self._count(chunk)
        # Dropped chunks count with the next one kept.
        self.progress.done = chunks[-1] + 1
        self._save(before)

    def _count(self, chunk: int) -> None:
        if self.options.ppl:
            sums = NllSums(self.progress.n, self.progress.total, self.progress.squares)
            sums.add(self.nll.pop(chunk))
            self.progress.n, self.progress.total, self.progress.squares = sums.n, sums.total, sums.squares
        self.watcher.chunk(chunk + 1, self.n, self.ppl)

    def _called(self, of: str) -> str:
        return f"the input of {of.removeprefix(ALL_EXPERTS)}" if of in self.names else f"what enters or leaves {of}"

    @property
    def ppl(self) -> Estimate | None:
        """The perplexity so far; None if not requested, or not known yet."""
        p = self.progress
        return NllSums(p.n, p.total, p.squares).ppl if p.n else None

    # ------------------------------------------------ states

    def _save(self, before: int) -> None:
        """Save whatever is due since chunk ``before``."""
        if self.path is None or self.checkpoint is None or self.progress.done == self.n:
            return
        done, often, copies = self.progress.done, self.options.output_frequency, self.options.save_frequency
        if often and done // often > before // often:
            self.checkpoint.save(self.accumulators, self.progress)
            self.saved = done
            self._write(self.path, self._imatrix())
        if copies and done // copies > before // copies:
            self._write(self.path.with_name(f"{self.path.name}.at_{done}"), with_stats(self._imatrix()))

    def _go_back(self, bad: Mapping[int, str]) -> None:
        """Return to the last state, without the chunks ``bad``."""
        found = None
        if self.checkpoint is not None and (self.saved or self.options.resume):
            found = self.checkpoint.load(self.accumulators)
        if found is None:
            clear(self.accumulators)
        dropped = {**self.progress.dropped, **bad}
        self.progress = found or Progress()
        self.progress.dropped |= dropped
        self.saved = self.progress.done
        for chunk, why in bad.items():
            self.watcher.dropped(chunk, why, self.saved)

    # ------------------------------------------------ results

    def finish(self, started: float) -> Collected:
        """Write the files and return the result."""
        made, covered, everywhere = None, None, None
        if self.path is not None:
            made = self._complete(self._imatrix())
            covered = self._coverage(made)
            made = made if self.options.fill is None else apply_fill(made, self.options.fill)
            self._write(self.path, made)
            if self.has_all:
                everywhere = _everywhere(self.path)
                self._write(everywhere, self._complete(self._all_experts()))
        if self.checkpoint is not None:
            self.checkpoint.remove()
        return Collected(
            made,
            self.path,
            covered,
            self.ppl,
            self.n - len(self.progress.dropped),
            self.progress.dropped,
            self._similarity(),
            everywhere,
            working_seconds() - started,
            tuple(self.notes),
        )

    def _complete(self, made: Imatrix) -> Imatrix:
        """Add names and statistics."""
        merged = any(MERGED in name for name in self.tensors)
        names = self.options.names or ("both" if merged else None)
        return with_stats(made if names is None else with_names(made, names))

    def _sums(self, prefix: str = "") -> dict[str, ImatrixEntry]:
        """Return the entries of accumulators whose names begin with ``prefix``; without it, those of real counts."""
        entries: dict[str, ImatrixEntry] = {}
        accumulators = self.accumulators
        for of, (width, names) in self.names.items():
            if of.startswith(prefix or ALL_EXPERTS) is bool(prefix):
                entries |= dict.fromkeys(names, entry_of(accumulators[of], width))
        for name in also_read(tuple(entries), self.tensors)[len(entries) :]:
            entries[name] = entries[_same(name)]
        return dict(sorted(entries.items()))

    def _alone(self) -> Imatrix:
        """Return what this run has recorded so far."""
        done = self.progress.done - sum(chunk < self.progress.done for chunk in self.progress.dropped)
        path, datasets = self.path or Path("imatrix.gguf"), list(self.text.datasets)
        n_nextn = 0 if self.predictor is None else 1
        return Imatrix(path, self._sums(), datasets, done, self.options.n_ctx, "gguf", n_nextn, extra=self._extra())

    def _imatrix(self) -> Imatrix:
        """Return what this run has recorded so far, added to ``in_files``."""
        made = self._alone()
        if not self.earlier:
            return made
        experts = expert_counts({n for i in self.earlier for n in i.entries}, self.tensors.values())
        joined = merge([*self.earlier, made], chunk_size=self.options.n_ctx, experts=experts)
        self.notes += [note for note in joined.notes if note not in self.notes]
        return replace(joined.imatrix, path=made.path)

    def _texts(self) -> dict[str, Field]:
        """Return the sketches of the texts and of what their corpora held out."""
        known = (self.text.sketch, self.text.held_out)
        return {key: field for part in known if part is not None for key, field in part.fields().items()}

    def _extra(self) -> dict[str, Field]:
        extra = self._texts()
        if self.progress.dropped:
            lines = [f"{chunk + 1}: {why}" for chunk, why in sorted(self.progress.dropped.items())]
            extra[DROPPED_KEY] = Field.of(DROPPED_KEY, lines, ValueType.ARRAY, ValueType.STRING)
        return extra

    def _all_experts(self) -> Imatrix:
        """Return what every expert sees when every token goes through it, beside the entries of other weights."""
        made = self._alone()
        for name, entry in self._sums(ALL_EXPERTS).items():
            n_mat = made.entries[name].counts.size
            if entry.counts.size != n_mat:  # up and gate: all experts see the same
                in_sum = None if entry.in_sum is None else np.repeat(entry.in_sum, n_mat, axis=0)
                entry = ImatrixEntry(np.repeat(entry.sums, n_mat, axis=0), np.repeat(entry.counts, n_mat), in_sum)
            made.entries[name] = entry
        made.extra[ALL_EXPERTS_KEY] = Field.of(ALL_EXPERTS_KEY, True)
        return made

    def _write(self, path: Path, made: Imatrix) -> None:
        write_imatrix(path, made, self.options.output_format or format_of(path))

    def _coverage(self, made: Imatrix) -> Coverage:
        tensors = self.tensors.values()
        return coverage(made, tensors, arch=self.model.arch, process_output=self.options.process_output)

    def _similarity(self) -> tuple[Similarity, ...]:
        found = self.session.accumulators

        def mean(kind: str, layer: int) -> float:
            to = found[f"{kind} {layer}"]
            return float(to["total"][0] / to["counts"][0])

        layers = sorted(int(of.split()[1]) for of in found if of.startswith("layer "))
        return tuple(Similarity(i, *(mean(kind, i) for kind in ("layer", "attention", "feed-forward"))) for i in layers)


def fingerprint_of(model: Model) -> str:
    """Return the fingerprint of a model's file on disk."""
    with open_model(model.path) as source:
        return source.fingerprint()


def _names(graph: Graph) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the width and the weights of every accumulator of sums."""
    return {op.of: (op.x.width, op.names) for op in graph.ops if isinstance(op, SumColumns)}


def also_read(names: Sequence[str], tensors: Collection[str]) -> tuple[str, ...]:
    """Return the names, and those of the model's weights with the same input that are never multiplied by."""
    known = set(names)
    return (*names, *(name for name in tensors if name not in known and _same(name) in known))


def _same(name: str) -> str:
    layer, n, kind = (*name.split(".", 2), "", "")[:3]
    return f"{layer}.{n}.{_SAME_INPUT.get(kind, '')}"


def entry_of(accumulator: Accumulator, width: int) -> ImatrixEntry:
    """Return sums in float32, rounded once, of an accumulator of SumColumns."""
    sums = accumulator["sums"][:, :, :width]
    squares, plain = (sums[:, i] + sums[:, i + 1] for i in (0, 2))
    with np.errstate(over="ignore"):
        return ImatrixEntry(squares.astype(np.float32), accumulator["counts"].copy(), plain.astype(np.float32))
