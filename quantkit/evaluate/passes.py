"""Evaluation of windows of a text: several sequences a pass, logits consumed in blocks.

A window is one context of tokens, whose first token is replaced by BOS if the model has one, and the positions whose
predictions are scored: in a text from ``first`` to the last but one. No array of context x vocabulary exists: the
engine delivers blocks of logits, which are cut into tiles and scored by threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from quantkit.activations import EXACT, MEANINGS, RUNTIME
from quantkit.calibration.heldout import calibration_warning
from quantkit.calibration.overlap import SKETCH_KEYS
from quantkit.cpus import available_cpus
from quantkit.errors import ArgumentError, FormatError, QuantkitError, RecipeError
from quantkit.evaluate.scores import TILE
from quantkit.formats.remote import locate

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUFFile
    from quantkit.model.fusion import Fusion
    from quantkit.model.placement import Placement

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

#: Called with (window, row, logits f32 [rows, n_vocab], the tokens that follow int32 [rows]); from several threads at
#: once.
Score = Callable[[int, int, F32, I32], None]


class Tokenizer(Protocol):
    """The interface of tokenizers that evaluation uses."""

    bos: int | None
    add_bos: bool

    def encode(self, text: str | bytes) -> I32: ...

    def decode(self, ids: I32) -> str: ...


class Session(Protocol):
    """The interface of sessions that evaluation uses."""

    def decode(
        self,
        tokens: I32,
        sequences: I32 | int = 0,
        outputs: npt.NDArray[np.bool_] | None = None,
        consume: Callable[[int, F32], None] | None = None,
    ) -> F32 | None: ...

    def clear(self, sequence: int | None = None) -> None: ...


class Model(Protocol):
    """The interface of models that evaluation uses; quantkit.load returns one."""

    path: Path
    n_vocab: int
    n_ctx_train: int

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def session(self, n_ctx: int, n_seq: int = 1) -> Session: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Nodes:
    """The nodes of the cluster at ``address``, to run on.

    Each node places the model itself: ``backend`` is cpu, cuda or auto (cuda if there is a GPU); ``gpu_layers`` and
    ``rules`` as for ``placement_of``. threads: the largest number of CPUs of a node.
    """

    address: str = "auto"
    backend: str = "auto"
    gpu_layers: int | None = None
    rules: tuple[str, ...] = ()
    threads: int | None = None

    @property
    def uses_gpus(self) -> bool:
        """Whether a node may use GPUs."""
        return self.backend != "cpu" or bool(self.gpu_layers)


class LoadOptions(TypedDict, total=False):
    """The options of quantkit.load; all but ``threads`` are refused for a model that is already loaded."""

    threads: int | None
    n_ubatch: int
    kv_type: str
    mmap: bool
    max_ram: int | None
    max_vram: int | None
    cublas: bool
    activations: str
    fusion: Fusion
    merge_up_gate: bool
    placement: Placement | None
    override_kv: Sequence[str]


class EvaluationOptions(LoadOptions, total=False):
    """The options of quantkit.load, and the nodes of a cluster to run on instead of this machine."""

    nodes: Nodes | None


def uses_gpus(options: LoadOptions, nodes: Nodes | None = None) -> bool:
    """Return whether a model with these options may run on GPUs."""
    placement = options.get("placement")
    devices = set() if placement is None else placement.requested_devices()
    return any(name.startswith("CUDA") for name in devices) or (nodes is not None and nodes.uses_gpus)


def choose_activations(options: LoadOptions, default: str, nodes: Nodes | None = None) -> tuple[LoadOptions, list[str]]:
    """Return options with activations, ``default`` unless they choose some, and notes; runtime's on GPUs.

    Raises RecipeError for exact ones on nodes with GPUs; those of this machine are refused by ``load``.
    """
    mode = options.get("activations")
    if mode == EXACT and nodes is not None and nodes.uses_gpus:
        raise RecipeError("exact activations need the CPU: choose --backend cpu, or --activations runtime", "QK-E303")
    gpus = mode is None and default == EXACT and uses_gpus(options, nodes)
    notes = [f"on GPUs, {MEANINGS[RUNTIME]}: the CPU measures with exact ones"] if gpus else []
    return {**options, "activations": mode or (RUNTIME if gpus else default)}, notes


def activations_of(model: Model) -> str:
    """Return the activations of a loaded model."""
    return getattr(model, "activations", RUNTIME)


@contextmanager
def loaded_model(model: str | Path | Model, n_ctx: int | None, options: LoadOptions) -> Iterator[Model]:
    """Load a model from its path for contexts of ``n_ctx``; yield a loaded model unchanged.

    Raises ArgumentError for options other than ``threads`` of a loaded model, TypeNotSupported for an encoder.
    """
    from quantkit.model.engine import check_next_token, load

    if not isinstance(model, (str, Path)):
        if extra := [name for name in options if name != "threads"]:
            raise ArgumentError(f"{extra[0]}: {model.path} is already loaded; pass this argument to quantkit.load")
        check_next_token(model)
        yield model
        return
    loaded = load(model, n_ctx=n_ctx, **options)
    try:
        check_next_token(loaded)
        yield loaded
    finally:
        loaded.close()


def path_of(model: str | Path | Model) -> Path:
    """Return the path of a model's file."""
    return locate(model) if isinstance(model, (str, Path)) else model.path


def bos_of(model: Model, notes: list[str]) -> int | None:
    """Return the token that starts every window, or None; append a note if the file has no tokenizer."""
    try:
        tokenizer = model.tokenizer
    except FormatError as e:
        notes.append(f"windows start without BOS because the model has no tokenizer: {e.message}")
        return None
    return tokenizer.bos if tokenizer.add_bos else None


def note_context(model: Model, n_ctx: int, notes: list[str]) -> None:
    """Append a note on a context longer than the model's."""
    if n_ctx > model.n_ctx_train:
        notes.append(f"the context of {n_ctx} tokens exceeds the {model.n_ctx_train} that the model was trained on")


def note_calibration(model: Model, text: str | bytes | None, tokens: I32, notes: list[str]) -> None:
    """Append a note if the model's importance matrix was computed on this text, by the sketch in the file.

    Without a text (ids, base logits) the tokens are decoded.
    """
    source: GGUFFile | None = getattr(model, "source", None)
    if source is None or not any(key in source.fields for key in SKETCH_KEYS):
        return
    if text is None:
        try:
            text = model.tokenizer.decode(tokens)
        except FormatError as e:
            notes.append(
                "not checked whether this text was used for calibration, because the model has no tokenizer: "
                f"{e.message}"
            )
            return
    warning = calibration_warning(locate(model.path), source.fields, text)
    notes += [] if warning is None else [warning]


def text_tokens(model: Model, text: str | bytes | None, tokens: npt.ArrayLike | None) -> I32:
    """Return the tokens to evaluate, int32 [n]: ``tokens``, or those of the text, special tokens included."""
    if (text is None) == (tokens is None):
        raise QuantkitError("give either a text or tokens", "QK-E201")
    if text is not None:
        return np.asarray(model.tokenizer.encode(text), np.int32)
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise QuantkitError(
            f"tokens must be a one-dimensional array of integers, not {ids.dtype} {list(ids.shape)}", "QK-E210"
        )
    bad = np.flatnonzero((ids < 0) | (ids >= model.n_vocab))
    if bad.size:
        raise QuantkitError(
            f"token {int(bad[0])} is {ids[bad[0]]}: valid ids of {model.path} are 0 to {model.n_vocab - 1}", "QK-E203"
        )
    return ids.astype(np.int32)


class Window(NamedTuple):
    """Tokens of a context int32 [n], and the positions bool [n] whose predictions of the next token are scored."""

    tokens: I32
    is_scored: npt.NDArray[np.bool_]

    @property
    def rows(self) -> int:
        """The number of scored positions."""
        return int(self.is_scored.sum())

    @property
    def following(self) -> I32:
        """The token after each scored position, int32 [rows]."""
        return self.tokens[np.flatnonzero(self.is_scored) + 1]


def scored_range(n_ctx: int, first: int) -> npt.NDArray[np.bool_]:
    """Return a mask bool [n_ctx] of positions ``first`` to n_ctx - 2: what follows the last token is unknown."""
    is_scored = np.zeros(n_ctx, bool)
    is_scored[first : n_ctx - 1] = True
    return is_scored


def text_windows(tokens: I32, first: int) -> list[Window]:
    """Return windows of a text, int32 [n, n_ctx], whose positions ``first`` to n_ctx - 2 are scored."""
    is_scored = scored_range(tokens.shape[1], first)
    return [Window(row, is_scored) for row in tokens]


def run_windows(
    model: Model,
    windows: Sequence[Window],
    score: Score,
    finish: Callable[[int, int], None],
    *,
    n_batch: int,
    bos: int | None,
    threads: int | None = None,
    session: Session | None = None,
) -> None:
    """Evaluate windows, of any lengths, and score the positions that each selects.

    Consecutive windows of at most ``n_batch`` tokens make a pass, at least one. ``finish(begin, end)`` is called after
    each, from this thread. bos: in place of the first token of each window. session: large enough for a pass; None: a
    new one.
    """
    passes = list(_passes([len(window.tokens) for window in windows], n_batch))
    n_ctx = max(len(window.tokens) for window in windows)
    session = session or model.session(n_ctx, max(end - begin for begin, end in passes))
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        for begin, end in passes:
            part = windows[begin:end]
            _run_pass(session, part, _Tiles(pool, part, begin, score), n_batch, bos)
            finish(begin, end)


def _passes(lengths: Sequence[int], n_batch: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of each pass."""
    begin, n_tokens = 0, 0
    for i, n in enumerate(lengths):
        if i > begin and n_tokens + n > n_batch:
            yield begin, i
            begin, n_tokens = i, 0
        n_tokens += n
    yield begin, len(lengths)


def _run_pass(session: Session, windows: Sequence[Window], tiles: _Tiles, n_batch: int, bos: int | None) -> None:
    lengths = [len(window.tokens) for window in windows]
    tokens = np.concatenate([window.tokens for window in windows])
    if bos is not None:
        tokens[np.cumsum([0, *lengths[:-1]])] = bos
    sequences = np.repeat(np.arange(len(windows), dtype=np.int32), lengths)
    outputs = np.concatenate([window.is_scored for window in windows])
    session.clear()
    # Only a single window may be longer than a batch.
    for offset in range(0, tokens.size, n_batch):
        part = slice(offset, offset + n_batch)
        n_before = int(outputs[:offset].sum())
        consume = {"consume": tiles.consumer(n_before)} if outputs[part].any() else {}
        session.decode(tokens[part], sequences[part], outputs[part], **consume)


class _Tiles:
    """The logits of one pass, cut into tiles within windows, which the pool scores."""

    def __init__(self, pool: ThreadPoolExecutor, windows: Sequence[Window], begin: int, score: Score) -> None:
        self.pool = pool
        self.begin = begin
        self.score = score
        self.starts = np.cumsum([0, *(window.rows for window in windows)])
        self.following = np.concatenate([window.following for window in windows])

    def consumer(self, n_before: int) -> Callable[[int, F32], None]:
        """Return a consumer of blocks of logits, which follow ``n_before`` outputs of this pass."""
        return lambda index, block: self._consume(n_before + index, block)

    def _consume(self, index: int, block: F32) -> None:
        step = max(1, TILE // block.shape[1])
        jobs = []
        start = 0
        while start < len(block):
            output = index + start
            window = int(np.searchsorted(self.starts, output, side="right")) - 1
            count = min(step, int(self.starts[window + 1]) - output, len(block) - start)
            following = self.following[output : output + count]
            row = output - int(self.starts[window])
            jobs.append(self.pool.submit(self.score, self.begin + window, row, block[start : start + count], following))
            start += count
        # The engine reuses the block after the return, so wait for all jobs, failed ones included.
        wait(jobs)
        for job in jobs:
            job.result()
