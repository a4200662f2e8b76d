"""Base logits while they are computed: options, and sinks that keep or write the rows of windows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.arguments import Options, option
from quantkit.cluster import NodeRefusal
from quantkit.errors import FormatError, RecipeError
from quantkit.evaluate.passes import F32, I32, Model, activations_of
from quantkit.evaluate.scores import Softmax, most_probable
from quantkit.formats.gguf import open_gguf
from quantkit.formats.logits import (
    CLIPS,
    CODECS,
    Chunks,
    CompactRows,
    CompactWriter,
    LlamaSharer,
    LlamaWriter,
    join_rows,
)
from quantkit.formats.remote import locate

#: Heading of --help.
BASE_LOGITS = "Base logits for quantkit kld"


@dataclass(frozen=True)
class SaveLogits(Options):
    """Options to write the logits of all scored positions to ``path``, as a base for ``kld``.

    Each option is declared here alone. ``format`` "compact" keeps the ``top_k`` most probable tokens of a position, or
    fewer whose residual mass is at most ``residual``.
    """

    path: str | Path
    format: str = option(
        "compact",
        "Format: compact has the most probable tokens exactly, and the total probability of all others; llama.cpp has "
        "the whole vocabulary in 16 bits, clipped.",
        BASE_LOGITS,
        choices=("compact", "llama.cpp"),
        flags=("--logits-format",),
    )
    clip: float = option(
        16,
        "Range below the top token in nats, in format llama.cpp; 24 as in ik_llama.cpp.",
        BASE_LOGITS,
        kind="number",
        choices=tuple(map(str, CLIPS.values())),
    )
    top_k: int = option(4096, "Maximum number of tokens per position, in format compact.", BASE_LOGITS, least=1)
    residual: float = option(
        1e-5, "Probability that may be omitted, in format compact.", BASE_LOGITS, kind="share below 1"
    )
    codec: str = option(
        "zlib",
        "Compression of format compact; zstd decompresses faster, but needs an optional extra.",
        BASE_LOGITS,
        choices=tuple(CODECS),
    )
    overwrite: bool = False


class LlamaSink:
    """A sink that writes rows at once, in llama.cpp's format."""

    def __init__(self, writer: LlamaWriter) -> None:
        self.writer = writer

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        # The exponentials are no longer needed.
        self.writer.write(window, row, logits, parts.log_total, scratch=parts.exps)

    def take(self, window: int) -> None:
        """Wait until all rows of a window are on disk."""
        if isinstance(self.writer, LlamaSharer):
            self.writer.sync()

    def save(self, rows: CompactRows) -> None:
        """Do nothing: rows are already written."""

    def finish(self) -> None:
        self.writer.finish()

    def node_sink(self) -> Callable[[], LlamaSink]:
        """Return a constructor of sinks on nodes, which write to the same file."""
        return partial(_shared_sink, self.writer.path.absolute(), self.writer.chunks, self.writer.clip)


def _shared_sink(path: Path, chunks: Chunks, clip: float) -> LlamaSink:
    try:
        return LlamaSink(LlamaSharer(path, chunks, clip))
    except (OSError, FormatError) as e:
        raise NodeRefusal(f"{path} cannot be written on this node: {e}") from None


class CompactSink:
    """A sink that collects rows until their chunk is complete; writer: None on nodes, which return them."""

    def __init__(self, top_k: int, residual: float, writer: CompactWriter | None) -> None:
        self.top_k = top_k
        self.residual = residual
        self.writer = writer
        self.parts: dict[int, dict[int, CompactRows]] = {}

    def write(self, window: int, row: int, logits: F32, parts: Softmax, following: I32) -> None:
        rows = most_probable(logits, parts, following, self.top_k, self.residual)
        self.parts.setdefault(window, {})[row] = rows

    def take(self, window: int) -> CompactRows:
        """Return and remove the rows of a window."""
        parts = self.parts.pop(window)
        return join_rows([parts[row] for row in sorted(parts)])

    def save(self, rows: CompactRows) -> None:
        """Write the rows of the next window."""
        if self.writer is not None:
            self.writer.write(rows)

    def finish(self) -> None:
        """Do nothing: chunks were written in order."""

    def node_sink(self) -> Callable[[], CompactSink]:
        """Return a constructor of sinks on nodes, whose rows this sink writes."""
        return partial(CompactSink, self.top_k, self.residual, None)


Sink = LlamaSink | CompactSink


def open_sink(model: Model, windows: I32, save: SaveLogits, path: Path, stack: ExitStack) -> Sink:
    """Return the sink that writes the logits of windows, int32 [n, n_ctx], to ``path``; ``stack`` closes it.

    Raises RecipeError for invalid options.
    """
    chunks = Chunks(model.n_vocab, windows)
    if save.format == "llama.cpp":
        return LlamaSink(LlamaWriter(path, chunks, save.clip, activations_of(model)))
    if save.format != "compact":
        raise RecipeError(f"unknown format of base logits {save.format!r}; choose llama.cpp or compact", "QK-E203")
    if save.top_k < 1 or not 0 <= save.residual < 1:
        raise RecipeError(
            f"top-k {save.top_k} must be greater than 0, and residual {save.residual} within [0, 1)", "QK-E203"
        )
    with open_gguf(model.path) as source:
        fingerprint = source.fingerprint()
    name = locate(model.path).name
    top_k = min(save.top_k, model.n_vocab)
    activations = activations_of(model)
    writer = CompactWriter(
        path, chunks, top_k=top_k, codec=save.codec, model=name, fingerprint=fingerprint, activations=activations
    )
    return CompactSink(top_k, save.residual, stack.enter_context(writer))
