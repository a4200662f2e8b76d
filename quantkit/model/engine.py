"""Running models: ``load`` opens one, ``Model.forward`` returns logits, ``Session`` decodes sequences.

``Model.hidden`` and ``Model.covariances`` return activations.

load -> graph (graph.py) -> fused (fusion.py) -> segments by device (placement.py) -> fused by the backend, checked
(check.py) -> one program a segment (backends/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quantkit.activations import ACTIVATIONS, EXACT, RUNTIME
from quantkit.arguments import checked
from quantkit.cpus import available_cpus
from quantkit.errors import FormatError, QuantkitError, RecipeError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile, open_model
from quantkit.formats.override import parse_overrides
from quantkit.formats.remote import locate
from quantkit.model.activations import InputCovariance, covariance_graph, residual_stream
from quantkit.model.backends import Backend, Limits, Observer, Options, Program
from quantkit.model.backends.accumulators import Accumulator, NotFinite
from quantkit.model.backends.registry import backend_of
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.check import check_ops
from quantkit.model.fusion import Decision, Fusion, fuse, summary
from quantkit.model.graph import build_graph, unused_notes
from quantkit.model.hparams import HParams
from quantkit.model.kv_types import STORED, has_blocks, is_rounded
from quantkit.model.ops import Attention, Embed, Graph, LightningIndexer, Value
from quantkit.model.placement import Placement, Segment, check_devices, place_ops, split_segments
from quantkit.model.selection import without_selection
from quantkit.model.sources import CopiedSource, MergedSource, PlainSource, plain_source
from quantkit.units import format_size

#: Called with the index of a block's first output and its logits [k, n_vocab], valid during the call.
LogitsConsumer = Callable[[int, Floats], None]


@checked
def load(
    path: str | Path,
    *,
    threads: int | None = None,
    n_ctx: int | None = None,
    n_ubatch: int = 512,
    kv_type: str = "f16",
    fusion: Fusion | None = None,
    merge_up_gate: bool = False,
    placement: Placement | None = None,
    mmap: bool = True,
    max_ram: int | None = None,
    max_vram: int | None = None,
    cublas: bool = False,
    activations: str = RUNTIME,
    override_kv: Sequence[str] = (),
    observer: Observer | None = None,
    rewrite: Callable[[Graph], Graph] | None = None,
    build: Callable[[GGUFFile, int], Graph] = build_graph,
    wrap: Callable[[GGUFFile], Any] | None = None,
) -> Model:
    """Return a model to run; its weights stay in the mapped file, except interleaved ones (sources.py).

    Args:
        path: a GGUF file, or any shard of a split one.
        threads: worker threads; None: all available CPUs.
        n_ctx: the context that rope factors are chosen for (some models have two sets); None: that of training.
        n_ubatch: tokens of one pass through the layers.
        kv_type: the type of keys and values in the cache, such as f16, or K/V, such as q8_0/q4_0 (kv_types.py).
        fusion: the operations to fuse; None: all, or with an observer those that hide nothing from it.
        merge_up_gate: merge up and gate experts in memory while loading.
        placement: the device of each tensor; None: the CPU.
        mmap: read weights from the mapped file; False: copy them to memory.
        max_ram: bytes of weights to keep in memory; None: the system decides.
        max_vram: bytes of weights to keep on each CUDA device; others are uploaded for every batch, of experts only
            those in use.
        cublas: on CUDA devices compute prompts by cuBLAS on weights unpacked to bf16: less exact, for comparison.
        activations: runtime: rounded to the format by which llama.cpp and ik_llama.cpp multiply a weight's type, int8
            for quantized weights; exact: f32, times decoded weights, on the CPU. The type of caches is kv_type in both.
        override_kv: metadata to use instead of the file's, KEY=TYPE:VALUE, as of llama.cpp's option.
        observer: called with the inputs of Observe operations.
        rewrite: transforms the graph before fusion, to add observing operations (observers.py).
        build: graph builder; nextn.build_nextn for prediction layers.
        wrap: returns a view of the opened file with the same tensors, whose bytes may differ
            (sensitivity/variants.py).

    Raises:
        FormatError: the file is damaged, or lacks required tensors or keys.
        TypeNotSupported: the architecture or a tensor's type is not supported.
        ResourceError: a device is unavailable.
    """
    if n_ubatch < 1:
        raise RecipeError(f"a batch of {n_ubatch} tokens: must be at least 1", "QK-E203")
    fusion = fusion or (Fusion() if observer is None else Fusion().for_observers())
    if observer is not None and fusion != fusion.for_observers():
        raise RecipeError("a run with an observer cannot fuse operations: omit the fusion switches", "QK-E201")
    if not mmap and max_ram is not None:
        raise RecipeError(
            "--no-mmap copies all weights to memory, but --max-ram leaves some in the file: omit one of them", "QK-E201"
        )
    placement = placement or Placement()
    check_activations(activations, placement)
    options = Options(threads or available_cpus(), fusion, max_ram, max_vram, cublas, observer, activations)
    model = Model(path, options, n_ubatch, kv_type, merge_up_gate, mmap, wrap, override_kv)
    graph = build(model.source, n_ctx or 0)
    model.prepare(graph if rewrite is None else rewrite(graph), placement)
    return model


def check_activations(activations: str, placement: Placement) -> None:
    """Raise RecipeError for activations that do not exist, or that a device of the placement cannot multiply."""
    if activations not in ACTIVATIONS:
        raise RecipeError(f"unknown activations {activations!r}: choose {' or '.join(ACTIVATIONS)}", "QK-E203")
    gpus = sorted(device for device in placement.requested_devices() if device.startswith("CUDA"))
    if activations == EXACT and gpus:
        raise RecipeError(
            f"exact activations need the CPU, but the model is placed on {', '.join(gpus)}, which multiply quantized "
            "weights by int8: choose --activations runtime, or run without -ngl, -dev, -ot and --backend cuda",
            "QK-E303",
        )


class Model:
    """An open model, returned by ``load``; as a context manager it closes its file."""

    #: The operations before and after fusion.
    unfused: Graph
    graph: Graph
    decisions: tuple[Decision, ...]
    segments: list[Segment]

    def __init__(
        self,
        path: str | Path,
        options: Options,
        n_ubatch: int,
        kv_type: str,
        merge_up_gate: bool,
        mmap: bool,
        wrap: Callable[[GGUFFile], Any] | None = None,
        override_kv: Sequence[str] = (),
    ) -> None:
        self.path = locate(path)
        self.threads = options.threads
        self.activations = options.activations
        self.n_ubatch = n_ubatch
        self.kv_type = kv_type
        self._options = options
        self.overrides = tuple(override_kv)
        overrides = parse_overrides(override_kv)
        file = open_model(path)
        file.fields = {**file.fields, **overrides}
        is_mapped = mmap and not file.big_endian
        opened = plain_source(file if is_mapped else CopiedSource(file))  # type: ignore[arg-type]
        plain: GGUFFile = MergedSource(opened) if merge_up_gate else opened  # type: ignore[assignment]
        self.source = plain if wrap is None else wrap(plain)
        self.h = HParams(self.source)
        self.arch = self.h.arch
        self.n_embd = self.h.n_embd
        self.n_layer = self.h.n_layer
        self.n_ctx_train = self.h.n_ctx_train
        self._backends: dict[str, Backend] = {}

    def prepare(self, graph: Graph, placement: Placement) -> None:
        """Fuse a graph, split it into segments, and fuse and check these."""
        tables = (op.weight.n_out for op in graph.ops if isinstance(op, Embed) and not op.by_position)
        self.n_vocab = graph.logits.width if graph.pooling is None else next(tables)
        check_devices(placement)
        self.unfused, self._placement = graph, placement
        self.graph, placed, decisions = self._place(graph, self._options)
        self._placed_segments = placed
        self.segments, device_decisions = self._fuse_segments(placed, self.kv_type, self._options)
        self.decisions = (*decisions, *device_decisions)

    def _place(self, graph: Graph, options: Options) -> tuple[Graph, list[Segment], tuple[Decision, ...]]:
        """Return the fused graph, its segments, and the decisions."""
        before = place_ops(graph, self._placement, self.n_layer)
        fused, decisions = fuse(graph, options.fusion, lambda op: before[id(op)])
        return fused, split_segments(fused, place_ops(fused, self._placement, self.n_layer)), decisions

    def _segments_for(self, n_ctx: int, kv_type: str) -> list[Segment]:
        """Return the segments for sequences of n_ctx tokens and a cache type."""
        graph = without_selection(self.unfused, n_ctx)
        if graph is not self.unfused:
            return self._fuse_segments(self._place(graph, self._options)[1], kv_type, self._options)[0]
        if kv_type == self.kv_type:
            return self.segments
        return self._fuse_segments(self._placed_segments, kv_type, self._options)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fuse_segments(
        self, placed: Sequence[Segment], kv_type: str, options: Options
    ) -> tuple[list[Segment], list[Decision]]:
        """Return segments fused by their backends for a cache type, with every operation checked."""
        segments, decisions = list[Segment](), list[Decision]()
        for segment in placed:
            row = backend_of(segment.device)
            ops, segment_decisions = row.fuse(segment.ops, segment.leaves, options, kv_type)
            segments.append(replace(segment, ops=list(ops)))
            decisions += segment_decisions
        check_ops(op for segment in segments for op in segment.ops)
        return segments, decisions

    def close(self) -> None:
        """Close the file and free devices' memory; sessions must not be used afterwards."""
        for backend in self._backends.values():
            backend.close()
        self.source.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: on fusion, merged and ignored tensors, and memory."""
        lines = [line for line in summary([d for d in self.decisions if not d.by_user]) if " not: " in line]
        plain = self.source.source if isinstance(self.source, MergedSource) else self.source
        if isinstance(plain, PlainSource):
            lines += plain.notes
        if isinstance(self.source, MergedSource):
            lines += [f"{name} is not merged: {reason}" for name, reason in self.source.refused.items()]
        return (*lines, *self._block_notes(), *unused_notes(self.source), *self._memory_notes())

    def _block_notes(self) -> list[str]:
        """Return a note on block selection (MiniMax M3), which is not applied."""
        if not any(".indexer.q_proj." in name for name in self.source.tensors):
            return []
        exact = self.h.int("attention.indexer.top_k", 0) * self.h.int("attention.indexer.block_size", 0)
        return [
            "every token attends to all earlier tokens, as in llama.cpp without flash attention; the original model "
            f"selects blocks of them beyond {exact} tokens"
        ]

    def _memory_notes(self) -> list[str]:
        return [*self._ram_notes(), *self._vram_notes()]

    def _vram_notes(self) -> list[str]:
        lines, max_vram = [], self._options.max_vram
        for device in sorted({s.device for s in self.segments if s.device.startswith("CUDA")}):
            ops = [op for s in self.segments if s.device == device for op in s.ops]
            total = sum({m.tensor.name: m.tensor.nbytes for op in ops for m in op.matrices()}.values())
            if max_vram is not None and total > max_vram:
                lines.append(
                    f"the weights on {device} need {format_size(total)}, more than --max-vram "
                    f"{format_size(max_vram)}: weights that do not fit are uploaded for every batch, which is slow"
                )
        return lines

    def _ram_notes(self) -> list[str]:
        max_ram = self._options.max_ram
        if max_ram is None:
            return []
        sizes = [sum(m.tensor.nbytes for m in set(op.matrices())) for op in self.graph.ops if not isinstance(op, Embed)]
        total, largest = sum(sizes), max(sizes, default=0)
        if total <= max_ram:
            return []
        budget = format_size(max_ram)
        lines = [f"the weights need {format_size(total)}, more than --max-ram {budget}: every pass reads them again"]
        if largest > max_ram:
            lines.append(f"one operation reads {format_size(largest)} of weights, more than {budget}")
        return lines

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the file; FormatError if it has none."""
        from quantkit.formats.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self.source)

    @cached_property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to later ones."""
        return any(isinstance(op, Attention) and op.mask in ("whole", "symmetric") for op in self.graph.ops)

    @property
    def is_encoder(self) -> bool:
        """Whether the output is a row of each token, to be pooled, and not the logits of the next."""
        return self.unfused.pooling is not None

    def forward(self, tokens: Sequence[int] | Ints) -> Floats:
        """Return the logits after each token of a new sequence, float32 [n, n_vocab]; of an encoder [n, n_embd], the
        rows that are pooled."""
        ids = np.asarray(tokens, np.int32)
        logits = self.session(max(len(ids), 1)).decode(ids)
        assert logits is not None
        return logits

    def session(self, n_ctx: int, n_seq: int = 1, kv_type: str | None = None) -> Session:
        """Return a session of ``n_seq`` sequences of up to ``n_ctx`` tokens each. Raises RecipeError."""
        kv = kv_type or self.kv_type
        self._check_kv_type(kv)
        if n_ctx < 1 or n_seq < 1:
            raise RecipeError(f"{n_seq} sequences of {n_ctx} tokens: both must be at least 1", "QK-E203")
        for op in self.graph.ops:
            if isinstance(op, Embed) and op.by_position and n_ctx > op.weight.n_out:
                raise RecipeError(
                    f"sequences of {n_ctx} tokens: this model has embeddings for {op.weight.n_out} positions: choose "
                    "a smaller context",
                    "QK-E203",
                )
        limits = Limits(n_ctx, n_seq, min(self.n_ubatch, n_ctx * n_seq), kv)
        return Session(self, limits, self._segments_for(n_ctx, kv))

    def _check_kv_type(self, kv_type: str) -> None:
        """Raise RecipeError for a type that caches of this model cannot have."""
        blocks = has_blocks(kv_type)
        for op in self.graph.ops if blocks else ():
            heads: tuple[int, ...] = (op.head_k, op.head_v) if isinstance(op, Attention) else ()
            heads = (op.head, op.head) if isinstance(op, LightningIndexer) else heads
            if any(head % 32 for head in heads):
                raise RecipeError(
                    f"a {kv_type.upper()} cache needs heads of a multiple of 32 values, but this model has {heads[0]} "
                    f"and {heads[1]}: choose f16",
                    "QK-E303",
                )
        gpus = sorted({s.device for s in self.segments if s.device.startswith("CUDA")})
        if is_rounded(kv_type) and gpus:
            raise RecipeError(
                f"a cache of {kv_type} needs the CPU, but layers are on {', '.join(gpus)}: choose {', '.join(STORED)} "
                "for both keys and values, or run without -ngl, -dev and --backend cuda",
                "QK-E303",
            )

    def hidden_states(self, tokens: Sequence[int] | Ints, layers: Sequence[int] | None = None) -> Floats:
        """Return the residual stream after layers, for every token of a new sequence.

        Args:
            tokens: int32 [n], ids below n_vocab.
            layers: numbers of layers, from 0, in any order; None: all.

        Returns:
            float32 [layers, n, n_embd]: the input of the next layer, or of the final norm. With several streams
            (hyper-connections), a row has all of them.

        Raises:
            RecipeError: there is no such layer.
            FormatError: a token does not exist.
        """
        ids = self._checked_tokens(tokens)
        graph, values = residual_stream(without_selection(self.unfused, len(ids)), layers)
        widths = {value.per * value.width for value in values} or {self.n_embd}
        out = np.empty((len(values), len(ids), max(widths)), np.float32)
        programs = self.part(graph, self._limits(len(ids)))
        for start, batch in self._batches(ids):
            programs.run(batch, {})
            for row, value in zip(out, values, strict=True):
                row[start : start + len(batch.tokens)] = programs.read(value).reshape(len(batch.tokens), -1)
        return out

    def covariances(
        self, tokens: Sequence[int] | Sequence[Sequence[int]] | Ints, names: Sequence[str] | None = None
    ) -> dict[str, InputCovariance]:
        """Return the covariances of the inputs of weights over tokens, by expert: sums of x x^T.

        ``quantkit.covariance`` writes those of a whole text to a file, in passes that fit memory; here they are held:
        8 n^2 bytes for an input of n columns, times the experts.

        Args:
            tokens: int32 [n], one sequence, or [sequences, n].
            names: of tensors, such as "blk.0.ffn_down_exps.weight"; None: all that multiply an input, except the output
                matrix.

        Returns:
            A record for each name; weights with one input (q, k and v) share its arrays.

        Raises:
            RecipeError: a tensor multiplies no input.
            FormatError: a token does not exist.
            QuantkitError: an input is NaN or infinite.
        """
        windows = np.atleast_2d(np.asarray(tokens, np.int32))
        for window in windows:
            self._checked_tokens(window)
        n_ctx = windows.shape[1]
        observed = covariance_graph(without_selection(self.unfused, n_ctx), names)
        programs = self.part(observed.graph, self._limits(n_ctx), self._options.fusion.for_observers())
        for window in windows:
            programs.clear()
            for _, batch in self._batches(window):
                programs.run(batch, {})
        for where in programs.take_not_finite():
            raise QuantkitError(
                f"{self.path}: at position {where.position} the input of {where.label.split()[0]} is NaN or infinite",
                "QK-E108",
            )
        sums = programs.accumulators
        records = {
            label: InputCovariance(sums[label]["sums"], sums[label]["counts"]) for label in observed.labels.values()
        }
        return {name: records[label] for name, label in observed.labels.items()}

    def _checked_tokens(self, tokens: Sequence[int] | Ints) -> Ints:
        """Return tokens as int32 [n]. Raises FormatError if there are none, or one does not exist."""
        ids = np.asarray(tokens, np.int32).reshape(-1)
        if not len(ids):
            raise FormatError("no tokens: give at least one", "QK-E203")
        check_tokens(ids, self.n_vocab, self.path)
        return ids

    def _limits(self, n_ctx: int) -> Limits:
        """Return the limits of a run over one sequence, in one batch if its tokens attend to later ones."""
        return Limits(n_ctx, 1, n_ctx if self.is_bidirectional else min(self.n_ubatch, n_ctx), self.kv_type)

    def _batches(self, ids: Ints) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of a sequence without outputs, with the index of their first token."""
        step, nothing = self._limits(len(ids)).n_ubatch, np.empty(0, np.int32)
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            positions = np.arange(start, start + len(part), dtype=np.int32)
            yield start, Batch(part, positions, np.zeros(len(part), np.int32), nothing)

    def part(self, graph: Graph, limits: Limits, fusion: Fusion | None = None) -> Programs:
        """Return programs of a part of this model's graph, with its ``inputs`` and ``leaves``.

        fusion: other switches than the model's.
        """
        options = self._options if fusion is None else replace(self._options, fusion=fusion)
        placed, _ = self._place(graph, options)[1:]
        self._check_kv_type(limits.kv_type)
        return Programs(self, limits, self._fuse_segments(placed, limits.kv_type, options)[0])

    def backend(self, device: str) -> Backend:
        """Return the backend of a device."""
        if device not in self._backends:
            self._backends[device] = backend_of(device).make(self.source, device, self._options)
        return self._backends[device]


def check_next_token(model: Any) -> None:
    """Raise TypeNotSupported for an encoder, whose tokens have no logits."""
    if getattr(model, "is_encoder", False):
        raise TypeNotSupported(
            f"{model.path}: an encoder ({model.arch}) has no next token: use quantkit drift to compare two files, or "
            "quantkit.embed for its output",
            "QK-E306",
        )


def check_tokens(ids: Ints, n_vocab: int, path: Path) -> None:
    """Raise FormatError for a token that a model does not have."""
    if len(ids) and (ids.min() < 0 or ids.max() >= n_vocab):
        bad = int(ids[(ids < 0) | (ids >= n_vocab)][0])
        raise FormatError(f"token {bad} is out of range: {path} has {n_vocab}, from 0", "QK-E203")


class Programs:
    """Compiled segments, with the caches and states they own."""

    def __init__(self, model: Model, limits: Limits, segments: Sequence[Segment]) -> None:
        self._source, self._segments = model.source, segments
        self._programs: list[Program] = [
            model.backend(segment.device).compile(segment.ops, limits, segment.leaves) for segment in segments
        ]
        self._producers = {
            value: program
            for segment, program in zip(segments, self._programs, strict=True)
            for value in segment.leaves
        }

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """The sums of observing operations over all runs so far, live (see accumulators.py)."""
        return {label: accumulator for program in self._programs for label, accumulator in program.accumulators.items()}

    def take_not_finite(self) -> list[NotFinite]:
        """Return and clear the reports of values that are not finite, in the order of the layers."""
        reports = [where for program in self._programs for where in program.not_finite]
        for program in self._programs:
            program.not_finite.clear()
        return reports

    def clear(self, sequence: int | None = None) -> None:
        """Reset the states of a sequence, or of all."""
        for program in self._programs:
            program.clear(sequence)

    def run(self, batch: Batch, inputs: Mapping[Value, Any]) -> None:
        """Run all operations for a batch of at most ``n_ubatch`` tokens; inputs: those of the graph.

        Raises FormatError if the model's file has changed.
        """
        for segment, program in zip(self._segments, self._programs, strict=True):
            for value in segment.takes:
                program.write(value, inputs[value] if value in inputs else self._producers[value].read(value))
            program.run(batch)
        self._source.check()

    def read(self, value: Value) -> Any:
        """Return a value that leaves its segment, [rows, width], valid until the next run."""
        return self._producers[value].read(value)


class Session:
    """Sequences being decoded; every ``decode`` continues them."""

    def __init__(self, model: Model, limits: Limits, segments: Sequence[Segment]) -> None:
        self.model, self.limits = model, limits
        self.lengths = np.zeros(limits.n_seq, np.int64)
        self._programs = Programs(model, limits, segments)

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """The sums of observing operations over all runs so far, live (see accumulators.py)."""
        return self._programs.accumulators

    def take_not_finite(self) -> list[NotFinite]:
        """Return and clear the reports of values that are not finite, in the order of the layers."""
        return self._programs.take_not_finite()

    def clear(self, sequence: int | None = None) -> None:
        """Reset a sequence, or all of them."""
        self.lengths[slice(None) if sequence is None else sequence] = 0
        self._programs.clear(sequence)

    def rewind(self, sequence: int, length: int) -> bool:
        """Shorten a sequence to its first ``length`` tokens; return False, without effect, if a layer has a state."""
        if self.model.graph.states and length:
            return False
        if not length:
            self.clear(sequence)
        self.lengths[sequence] = min(length, self.lengths[sequence])
        return True

    def decode(
        self,
        tokens: Sequence[int] | Ints,
        sequences: int | Ints = 0,
        outputs: npt.NDArray[np.bool_] | None = None,
        consume: LogitsConsumer | None = None,
        inputs: Mapping[Value, Floats] | None = None,
    ) -> Floats | None:
        """Append tokens to their sequences and return logits.

        Args:
            tokens: int32 [n], ids below n_vocab.
            sequences: int32 [n], the sequence of each token, or one for all.
            outputs: bool [n], the tokens after which logits are requested; None: all.
            consume: called with blocks of logits, in order, which are then not returned.
            inputs: float32 [n, width] for each of the graph's ``inputs``.

        Returns:
            float32 [n_out, n_vocab] in the order of the outputs, of an encoder [n_out, n_embd]; None with ``consume``.

        Raises:
            FormatError: a token or sequence does not exist, a sequence exceeds n_ctx, or a bidirectional model is given
                a sequence in parts.
        """
        ids = np.asarray(tokens, np.int32).reshape(-1)
        sequence_ids = np.empty(len(ids), np.int32)
        sequence_ids[:] = sequences
        is_output = np.ones(len(ids), bool) if outputs is None else np.asarray(outputs, bool)
        positions = self._positions(ids, sequence_ids)
        parts = self._parts(sequence_ids)
        if self.model.is_bidirectional and not self._has_whole_sequences(parts, positions, sequence_ids):
            raise FormatError(
                f"{self.model.path}: tokens also attend to later tokens (an encoder, or a diffusion model), so a "
                f"sequence must be decoded in one batch of {self.limits.n_ubatch} tokens at most",
                "QK-E203",
            )
        width = self.model.graph.logits.width
        result = None if consume is not None else np.empty((int(is_output.sum()), width), np.float32)
        n_outputs = 0
        for part in parts:
            rows = np.flatnonzero(is_output[part]).astype(np.int32)
            part_inputs = {value: rows_of[part] for value, rows_of in (inputs or {}).items()}
            logits = self._step(Batch(ids[part], positions[part], sequence_ids[part], rows), part_inputs)
            if result is not None:
                result[n_outputs : n_outputs + len(rows)] = logits
            elif consume is not None and len(rows):
                consume(n_outputs, logits)
            n_outputs += len(rows)
        return result

    def _parts(self, sequence_ids: Ints) -> list[slice]:
        """Return batches of at most n_ubatch tokens; of a bidirectional model, they end where a sequence does."""
        n, step = len(sequence_ids), self.limits.n_ubatch
        if n <= step or not self.model.is_bidirectional:
            return [slice(start, min(start + step, n)) for start in range(0, n, step)]
        parts, begin = list[slice](), 0
        ends = [*(np.flatnonzero(np.diff(sequence_ids)) + 1).tolist(), n]
        for end, following in zip(ends, [*ends[1:], n + step + 1], strict=True):
            if following - begin > step:
                parts.append(slice(begin, end))
                begin = end
        return parts

    def _has_whole_sequences(self, parts: Sequence[slice], positions: Ints, sequence_ids: Ints) -> bool:
        """Return whether every sequence begins and ends in one batch, and each fits."""
        starts = int((positions == 0).sum())
        in_parts = sum(len(set(sequence_ids[part].tolist())) for part in parts)
        fits = all(part.stop - part.start <= self.limits.n_ubatch for part in parts)
        return fits and starts == len(set(sequence_ids.tolist())) == in_parts

    def _positions(self, ids: Ints, sequence_ids: Ints) -> Ints:
        """Return the positions of tokens, and advance the sequences."""
        limits = self.limits
        check_tokens(ids, self.model.n_vocab, self.model.path)
        if len(sequence_ids) and (sequence_ids.min() < 0 or sequence_ids.max() >= limits.n_seq):
            raise FormatError(
                f"sequence {int(sequence_ids.max())} is out of range: this session has {limits.n_seq}, from 0",
                "QK-E203",
            )
        positions = np.empty(len(ids), np.int32)
        for sequence in sorted(set(sequence_ids.tolist())):  # np.unique takes ten times as long for one token
            rows = np.flatnonzero(sequence_ids == sequence)
            length = int(self.lengths[sequence])
            if length + len(rows) > limits.n_ctx:
                raise FormatError(
                    f"sequence {sequence} would have {length + len(rows)} tokens, more than {limits.n_ctx}", "QK-E203"
                )
            positions[rows] = np.arange(length, length + len(rows))
            self.lengths[sequence] += len(rows)
        return positions

    def _step(self, batch: Batch, inputs: Mapping[Value, Floats]) -> Floats:
        self._programs.run(batch, inputs)
        result: Floats = self._programs.read(self.model.graph.logits)
        return result
