"""Collect an importance matrix: run texts through a model and add up what comes into every weight.

As llama-imatrix (llama.cpp b11434 tools/imatrix): chunks of n_ctx tokens, BOS in place of the first where the model
wants one, several chunks a pass, all tokens in every layer, perplexity on the side over the second half of each. What
is better: sums do not lose digits (kernels/cpu/observers.py) and do not depend on the order of chunks; no fused
operation can hide a weight's input; a chunk that brings NaN or infinities is found and left out, and the run goes on;
a run that was stopped resumes to the very file it would have made.

A chunk is left out by going back to the last state that was saved (every ``output_frequency`` chunks), so that
nothing of it stays in any sum.

Memory: 32 bytes for every column of every distinct input, times the experts where they route. Inputs that several
weights share (q, k, v; gate and up) count once: Qwen3-30B-A3B, 128 experts, 48 layers: 0.55 GB.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from quantkit.calibration.heldout import held_out_used
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluate.passes import F32, LoadOptions, bos_of, note_context, run_windows, text_tokens
from quantkit.evaluate.scores import nll_of, softmax
from quantkit.evaluate.statistics import Estimate, NllSums
from quantkit.formats.gguf import Field, TensorInfo, ValueType, open_gguf
from quantkit.formats.imatrix import Format, Imatrix, ImatrixEntry, read_imatrix, write_imatrix
from quantkit.imatrix.checkpoint import Checkpoint, Progress, clear, state_of
from quantkit.imatrix.coverage import Coverage, coverage
from quantkit.imatrix.files import merge, with_names
from quantkit.imatrix.fill import FILLS, apply_fill
from quantkit.imatrix.nextn import Hidden, Predictor, nextn_file
from quantkit.imatrix.rows import expert_counts
from quantkit.imatrix.statistics import with_stats
from quantkit.imatrix.texts import Chunks, Part, chat_part, cut, text_of, text_part
from quantkit.model.arch import arch_by_name
from quantkit.model.backends.accumulators import Accumulator
from quantkit.model.engine import Model, Session, load
from quantkit.model.fusion import Fusion
from quantkit.model.hparams import HParams
from quantkit.model.nextn import nextn_layers
from quantkit.model.observers import ALL_EXPERTS, fewest_rows, observe, observe_hidden
from quantkit.model.observers import similarity as observe_similarity
from quantkit.model.ops import Graph, SumColumns
from quantkit.pipeline.facts import MERGED
from quantkit.pipeline.plan import source_fingerprint

#: Chunks that were left out, and why: "17: blk.3.ffn_down.weight at position 5".
DROPPED_KEY = "quantkit.imatrix.dropped"
#: Whether every token went through every expert.
ALL_EXPERTS_KEY = "quantkit.imatrix.all_experts"

#: Weights that llama.cpp loads without ever multiplying by them, and the weight that has their input.
_SAME_INPUT = {"ssm_in.weight": "attn_qkv.weight"}

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ImatrixOptions:
    """What is collected, and how it is written.

    Args:
        n_ctx: tokens of a chunk; n_batch: of a pass, so max(1, n_batch // n_ctx) chunks run at once.
        chunks: only so many (None: all), after leaving out the first ``from_chunk``.
        output_frequency: write the output and a state to resume from every so many chunks; 0: only at the end.
        save_frequency: keep a copy, OUT.at_N, every so many chunks; 0: none.
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
    """Mean cosine of what goes into and comes out of a layer, its attention and its feed-forward part."""

    layer: int
    whole: float
    attention: float
    feed_forward: float


@dataclass(frozen=True)
class Collected:
    """What a run made: the importance matrix as it was written (None if none was asked for), and what to know of it."""

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


class Watcher:
    """Is told how a run goes; does nothing by itself."""

    def started(self, first: int, n_chunks: int, n_seq: int, notes: Sequence[str]) -> None:
        """Chunks ``first`` ... of n_chunks are to be done, n_seq at a time."""

    def chunk(self, chunk: int, n_chunks: int, ppl: Estimate | None) -> None:
        """A chunk, counted from 1, is done; the perplexity so far."""

    def dropped(self, chunk: int, why: str, back_to: int) -> None:
        """A chunk is left out; the run goes back to an earlier one."""


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
    **run: Unpack[LoadOptions],
) -> Collected:
    """Collect an importance matrix, written to ``output`` as llama-imatrix writes it.

    Args:
        model: a GGUF file; files: texts; chat: conversations, JSON lines (texts.py); prompt: a text itself;
            tokens: ids, int32 [n].
        output: None collects none: then there is only ``options.layer_similarity``, and fusion may be on.
        in_files: importance matrices that this one is added to.
        draft: a file that holds the model's prediction layer alone, which is recorded, too.
        run: how the model runs, as quantkit.load takes it; fusion must be off or unsaid.

    Raises:
        RecipeError: options that contradict each other, such as fusion.
        QuantkitError: too little text, an output that exists, or no chunk without NaN.
    """
    started = time.perf_counter()
    options = options or ImatrixOptions()
    path = None if output is None else Path(output)
    _check(options, path, run)
    earlier = [read_imatrix(each) for each in in_files]
    run["fusion"] = run.get("fusion") or (Fusion() if path is None else Fusion.none())
    collects, latent = path is not None, _has_latents(model)
    predicting = nextn_file(model, draft) if collects and (options.nextn or draft is not None) else None
    hidden = None if predicting is None else Hidden()
    rewrite = _rewrite(options, collects, latent, hidden is not None)
    with load(model, n_ctx=options.n_ctx, rewrite=rewrite, observer=hidden, **run) as loaded, ExitStack() as stack:
        text = chunks_of(loaded, files, chat, prompt, tokens, options)
        n_seq = min(len(text.windows), max(1, options.n_batch // options.n_ctx))
        predictor = None
        if predicting is not None and hidden is not None:
            predictor = Predictor(predicting, hidden, options.n_ctx, n_seq, partial(_look, options, latent), **run)
            stack.enter_context(predictor.model)
        collector = _Collector(loaded, text, options, path, watcher or Watcher(), earlier, predictor)
        collector.run(run.get("threads"))
        return collector.finish(started)


def _check(options: ImatrixOptions, path: Path | None, run: LoadOptions) -> None:
    fusion = run.get("fusion")
    if path is not None and fusion is not None and fusion != Fusion.none():
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
    if path is not None and not options.overwrite:
        _check_new(path, options)
    if path is not None and not path.resolve().parent.is_dir():
        raise QuantkitError(f"{path}: its folder does not exist")


def _check_new(path: Path, options: ImatrixOptions) -> None:
    """Raise QuantkitError if something is there already that is not an interrupted run's."""
    resumes = options.resume and state_of(path).exists()
    for each in (path, *([_everywhere(path)] if options.all_experts else [])):
        if each.exists() and not (resumes and each == path):
            what = "; there is no state beside it to resume from" if options.resume and each == path else ""
            raise QuantkitError(f"{each} exists{what}; give another name, or --overwrite to replace it")


def _everywhere(path: Path) -> Path:
    return path.with_name(f"{path.stem}.all-experts{path.suffix}")


def _has_latents(model: str | Path) -> bool:
    """Tell whether a file has latent attention of which runtimes know both forms."""
    with open_gguf(model) as source:
        return arch_by_name(HParams(source).arch).attention == "mla"


def _rewrite(options: ImatrixOptions, collects: bool, latent: bool, hidden: bool = False) -> Callable[[Graph], Graph]:
    def rewrite(graph: Graph) -> Graph:
        if collects:
            graph = _look(options, latent, graph, options.process_output)
        graph = observe_hidden(graph) if hidden else graph
        graph = observe_similarity(graph) if options.layer_similarity else graph
        return fewest_rows(graph)

    return rewrite


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
    """Return the chunks of all texts, conversations and ids that are given. RecipeError if there are none."""
    if not files and not chat and prompt is None and tokens is None:
        raise RecipeError("there is nothing to calibrate on: give a text (-f, -p), conversations (--chat) or tokens")
    parts = [text_part(Path(file), model.tokenizer, options.parse_special) for file in files]
    parts += [chat_part(Path(file), model.tokenizer, model.source) for file in chat]
    if prompt is not None:
        parts.append(text_of("prompt", prompt.encode(errors="surrogateescape"), model.tokenizer, options.parse_special))
    if tokens is not None:
        parts.append(Part("tokens", text_tokens(model, None, tokens), None))
    return cut(parts, options.n_ctx, options.from_chunk, options.chunks)


# ---------------------------------------------------------------- the run


class _Bad(Exception):
    """A pass brought values that are no numbers: chunk -> where."""

    def __init__(self, chunks: dict[int, str]) -> None:
        self.chunks = chunks


class _Collector:
    """A run over chunks: passes, states, chunks that are left out, and what comes of it."""

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
        #: The chunk up to which there is a state to go back to.
        self.saved = 0

    def _note_nextn(self) -> None:
        """Note a prediction layer that nobody asked for, or that was asked for and is not there."""
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
        """Return what must agree for a state to be gone on from."""
        o = self.options
        digest = hashlib.sha256(self.text.windows.tobytes())
        numbers = (o.n_ctx, o.n_batch, self.session.limits.n_ubatch, self.model.kv_type, self.bos, o.ppl)
        what = (o.process_output, o.all_experts, o.layer_similarity, fingerprint_of(self.model))
        more = () if self.predictor is None else (fingerprint_of(self.predictor.model),)
        digest.update(repr((numbers, what, *more)).encode())
        return digest.hexdigest()

    # ------------------------------------------------ chunks

    def run(self, threads: int | None) -> None:
        """Run all chunks; those with values that are no numbers are left out."""
        if self.options.resume and self.checkpoint is not None:
            self._go_back({})
            if self.checkpoint.path.exists() and not self.saved and not self.options.overwrite:
                raise QuantkitError(
                    f"{self.checkpoint.path} is the state of another run: model, text or options differ; start over "
                    "with --overwrite, without --resume"
                )
        self.watcher.started(self.saved, self.n, self.n_seq, self.notes)
        # Without a likelihood no position is wanted.
        first = self.options.n_ctx // 2 if self.options.ppl else self.options.n_ctx - 1
        while left := [c for c in range(self.progress.done, self.n) if c not in self.progress.dropped]:
            try:
                self._passes(left, first, threads)
            except _Bad as bad:
                self._go_back(bad.chunks)
        if len(self.progress.dropped) == self.n:
            raise QuantkitError(
                f"{self.model.path}: every chunk brings values that are no numbers, the first at "
                f"{self.progress.dropped[0]}: a broken file, or numbers too large for --kv-type f16"
            )

    def _passes(self, left: Sequence[int], first: int, threads: int | None) -> None:
        def score(window: int, row: int, logits: F32, following: I32) -> None:
            self._score(left[window], row, logits, following)

        run_windows(
            self.model,
            self.text.windows[left],
            first,
            score,
            lambda begin, end: self._done(left[begin:end]),
            n_batch=self.options.n_batch,
            bos=self.bos,
            threads=threads,
            session=self.session,
        )

    def _score(self, chunk: int, row: int, logits: F32, following: I32) -> None:
        rows = self.options.n_ctx - 1 - self.options.n_ctx // 2
        nll = self.nll.setdefault(chunk, np.full(rows, np.nan))
        if np.isfinite(logits.max(axis=1)).all():
            nll[row : row + len(logits)] = nll_of(logits, softmax(logits), following)

    def _done(self, chunks: Sequence[int]) -> None:
        """Take a pass in; _Bad if it must be undone."""
        bad: dict[int, str] = {}
        found = self.session.take_not_finite()
        if self.predictor is not None:
            seen = self.predictor.run(self.text.windows[chunks])
            found += [replace(where, position=where.position + 1) for where in seen]
        for where in found:
            bad.setdefault(chunks[where.sequence], f"{self._called(where.of)} at position {where.position}")
        for chunk in chunks:
            if self.options.ppl and not np.isfinite(self.nll[chunk]).all():
                bad.setdefault(chunk, "the logits")
        if bad:
            self.nll.clear()
            raise _Bad(bad)
        before = self.progress.done
        for chunk in chunks:
            self._count(chunk)
        # Chunks that are left out come with the next one that is not.
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
        """The perplexity so far; None if it is not asked for, or there is none yet."""
        p = self.progress
        return NllSums(p.n, p.total, p.squares).ppl if p.n else None

    # ------------------------------------------------ states

    def _save(self, before: int) -> None:
        """Save what is due since ``before`` chunks were done."""
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
        """Write the files and return what is to be known."""
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
            time.perf_counter() - started,
            tuple(self.notes),
        )

    def _complete(self, made: Imatrix) -> Imatrix:
        """Add names and statistics."""
        merged = any(MERGED in name for name in self.tensors)
        names = self.options.names or ("both" if merged else None)
        return with_stats(made if names is None else with_names(made, names))

    def _sums(self, prefix: str = "") -> dict[str, ImatrixEntry]:
        """Return the entries of accumulators whose names begin with ``prefix``; without one those of real counts."""
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
        """Return what this run has recorded so far, added to the files that it was told to add to."""
        made = self._alone()
        if not self.earlier:
            return made
        experts = expert_counts({n for i in self.earlier for n in i.entries}, self.tensors.values())
        joined = merge([*self.earlier, made], chunk_size=self.options.n_ctx, experts=experts)
        self.notes += [note for note in joined.notes if note not in self.notes]
        return replace(joined.imatrix, path=made.path)

    def _texts(self) -> dict[str, Field]:
        """Return what is kept of the texts, and of what their corpora held out."""
        known = (self.text.sketch, self.text.held_out)
        return {key: field for part in known if part is not None for key, field in part.fields().items()}

    def _extra(self) -> dict[str, Field]:
        extra = self._texts()
        if self.progress.dropped:
            lines = [f"{chunk + 1}: {why}" for chunk, why in sorted(self.progress.dropped.items())]
            extra[DROPPED_KEY] = Field.of(DROPPED_KEY, lines, ValueType.ARRAY, ValueType.STRING)
        return extra

    def _all_experts(self) -> Imatrix:
        """Return what every expert would have seen of every token, beside the entries of other weights."""
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
        kind: Format = self.options.output_format or ("dat" if path.suffix.lower() == ".dat" else "gguf")
        write_imatrix(path, made, kind)

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
    """Return the fingerprint of a model's file, as it lies on the disk."""
    with open_gguf(model.path) as source:
        return source_fingerprint(source)


def _names(graph: Graph) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the width and the weights of every accumulator of sums."""
    return {op.of: (op.x.width, op.names) for op in graph.ops if isinstance(op, SumColumns)}


def also_read(names: Sequence[str], tensors: Collection[str]) -> tuple[str, ...]:
    """Return weights' names and those of weights of the model that are never multiplied and have the same input."""
    others = (name for name in tensors if name.endswith(tuple(_SAME_INPUT)) and _same(name) in names)
    return (*names, *(name for name in others if name not in names))


def _same(name: str) -> str:
    layer, _, kind = name.partition(".ssm_in")
    return f"{layer}.{_SAME_INPUT[f'ssm_in{kind}']}"


def entry_of(accumulator: Accumulator, width: int) -> ImatrixEntry:
    """Return sums in float32, rounded once, of an accumulator of SumColumns."""
    sums = accumulator["sums"][:, :, :width]
    squares, plain = (sums[:, i] + sums[:, i + 1] for i in (0, 2))
    with np.errstate(over="ignore"):
        return ImatrixEntry(squares.astype(np.float32), accumulator["counts"].copy(), plain.astype(np.float32))
