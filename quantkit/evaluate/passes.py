"""Windows of a text through a model: several sequences a pass, logits consumed as they come.

A window is one context of tokens; BOS takes the place of its first token where the model wants one. The predictions
from position ``first`` to the last but one of each window are scored. Nothing of size context times vocabulary is ever
held: the engine hands over logits in blocks, which are cut into tiles and scored by threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from quantkit.calibration.heldout import calibrated_on
from quantkit.calibration.overlap import SKETCH_KEYS
from quantkit.cpus import available_cpus
from quantkit.errors import FormatError, QuantkitError
from quantkit.evaluate.scores import TILE

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUFFile
    from quantkit.model.fusion import Fusion
    from quantkit.model.placement import Placement

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

#: Takes (window, row, logits f32 [rows, n_vocab], the tokens that follow int32 [rows]); from several threads at once.
Score = Callable[[int, int, F32, I32], None]


class Tokenizer(Protocol):
    """What evaluation needs of a tokenizer."""

    bos: int | None
    add_bos: bool

    def encode(self, text: str | bytes) -> I32: ...

    def decode(self, ids: I32) -> str: ...


class Session(Protocol):
    """Sequences in progress."""

    def decode(
        self,
        tokens: I32,
        sequences: I32 | int = 0,
        outputs: npt.NDArray[np.bool_] | None = None,
        each: Callable[[int, F32], None] | None = None,
    ) -> F32 | None: ...

    def clear(self, sequence: int | None = None) -> None: ...


class Model(Protocol):
    """What evaluation needs of a model; quantkit.load returns one."""

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
    """Where to run: the nodes of the cluster at ``address``.

    Each places the model by itself: ``backend`` is cpu, cuda or auto, which is cuda where there is a card; with
    ``gpu_layers`` and ``rules`` as for ``placement_of``. ``threads``: at most so many CPUs of a node.
    """

    address: str = "auto"
    backend: str = "auto"
    gpu_layers: int | None = None
    rules: tuple[str, ...] = ()
    threads: int | None = None

    @property
    def uses_cards(self) -> bool:
        """Whether a node may use cards."""
        return self.backend != "cpu" or bool(self.gpu_layers)


class LoadOptions(TypedDict, total=False):
    """The options of quantkit.load; ignored for a model that is already loaded."""

    threads: int | None
    n_ubatch: int
    kv_type: str
    mmap: bool
    max_ram: int | None
    max_vram: int | None
    cublas: bool
    fusion: Fusion
    merge_up_gate: bool
    placement: Placement | None


class EvaluationOptions(LoadOptions, total=False):
    """The options of quantkit.load, and the nodes of a cluster to run on instead of this machine."""

    nodes: Nodes | None


@contextmanager
def opened(model: str | Path | Model, n_ctx: int | None, options: LoadOptions) -> Iterator[Model]:
    """Load a model from its path for contexts of ``n_ctx``; a loaded model is taken as it is."""
    if not isinstance(model, (str, Path)):
        yield model
        return
    from quantkit.model.engine import load

    loaded = load(model, n_ctx=n_ctx, **options)
    try:
        yield loaded
    finally:
        loaded.close()


def path_of(model: str | Path | Model) -> Path:
    """Return the path of a model's file."""
    return Path(model) if isinstance(model, (str, Path)) else model.path


def bos_of(model: Model, notes: list[str]) -> int | None:
    """Return the token that begins every window, or None; adds a note if the file does not say."""
    try:
        tokenizer = model.tokenizer
    except FormatError as e:
        notes.append(f"windows begin without BOS, as there is no tokenizer: {e.message}")
        return None
    return tokenizer.bos if tokenizer.add_bos else None


def note_context(model: Model, n_ctx: int, notes: list[str]) -> None:
    """Note a context longer than the model's."""
    if n_ctx > model.n_ctx_train:
        notes.append(f"the model was trained on {model.n_ctx_train} tokens of context, {n_ctx} are used")


def note_calibration(model: Model, text: str | bytes | None, tokens: I32, notes: list[str]) -> None:
    """Note that the model's importance matrix was computed on this text, as far as the file tells.

    Without a text (ids, base logits) the tokens are decoded.
    """
    source: GGUFFile | None = getattr(model, "source", None)
    if source is None or not any(key in source.fields for key in SKETCH_KEYS):
        return
    if text is None:
        try:
            text = model.tokenizer.decode(tokens)
        except FormatError as e:
            notes.append(f"whether this text was calibrated on cannot be told without a tokenizer: {e.message}")
            return
    warning = calibrated_on(Path(model.path), source.fields, text)
    notes += [] if warning is None else [warning]


def text_tokens(model: Model, text: str | bytes | None, tokens: npt.ArrayLike | None) -> I32:
    """Return the tokens to evaluate, int32 [n]: given ones unchanged, or those of a text with special tokens added."""
    if (text is None) == (tokens is None):
        raise QuantkitError("either a text or tokens must be given")
    if text is not None:
        return np.asarray(model.tokenizer.encode(text), np.int32)
    given = np.asarray(tokens)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise QuantkitError(f"tokens must be integers in one dimension, not {given.dtype} {list(given.shape)}")
    bad = np.flatnonzero((given < 0) | (given >= model.n_vocab))
    if bad.size:
        raise QuantkitError(
            f"token {int(bad[0])} is {given[bad[0]]}: the ids of {model.path} are 0 to {model.n_vocab - 1}"
        )
    return given.astype(np.int32)


def run_windows(
    model: Model,
    windows: I32,
    first: int,
    score: Score,
    done: Callable[[int, int], None],
    *,
    n_batch: int,
    bos: int | None,
    threads: int | None = None,
    session: Session | None = None,
) -> None:
    """Evaluate windows, int32 [n, n_ctx], and score positions ``first`` to n_ctx - 2 of each.

    max(1, n_batch // n_ctx) windows make a pass. ``done(begin, end)`` is called after each, from this thread.
    ``session``, if given, must have room for a pass.
    """
    n, n_ctx = windows.shape
    n_seq = min(n, max(1, n_batch // n_ctx))
    session = session or model.session(n_ctx, n_seq)
    wanted = np.zeros(n_ctx, bool)
    wanted[first : n_ctx - 1] = True
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        for begin in range(0, n, n_seq):
            batch = windows[begin : begin + n_seq].copy()
            if bos is not None:
                batch[:, 0] = bos
            tiles = _Tiles(pool, windows[begin : begin + n_seq], begin, first, score)
            session.clear()
            # A batch smaller than a context is part of a window, else it is whole windows.
            step = n_batch if n_batch < n_ctx else batch.size
            sequences = np.repeat(np.arange(len(batch), dtype=np.int32), n_ctx)
            outputs = np.tile(wanted, len(batch))
            for at in range(0, batch.size, step):
                part = slice(at, at + step)
                seen = int(outputs[:at].sum())
                if outputs[part].any():
                    session.decode(batch.ravel()[part], sequences[part], outputs[part], each=tiles.consumer(seen))
                else:
                    session.decode(batch.ravel()[part], sequences[part], outputs[part])
            done(begin, begin + len(batch))


class _Tiles:
    """Cuts the logits of one pass into tiles within windows, and has them scored."""

    def __init__(self, pool: ThreadPoolExecutor, windows: I32, begin: int, first: int, score: Score) -> None:
        self.pool, self.windows, self.begin, self.first, self.score = pool, windows, begin, first, score

    def consumer(self, seen: int) -> Callable[[int, F32], None]:
        """Return a consumer of the blocks of a call after ``seen`` outputs of this pass."""
        return lambda index, block: self._consume(seen + index, block)

    def _consume(self, at: int, block: F32) -> None:
        rows = self.windows.shape[1] - 1 - self.first
        step = max(1, TILE // block.shape[1])
        jobs = []
        done = 0
        while done < len(block):
            window, row = divmod(at + done, rows)
            count = min(step, rows - row, len(block) - done)
            position = self.first + row + 1
            following = self.windows[window, position : position + count]
            jobs.append(self.pool.submit(self.score, self.begin + window, row, block[done : done + count], following))
            done += count
        # The engine reuses the block when this returns, so all jobs must have ended, failed or not.
        wait(jobs)
        for job in jobs:
            job.result()
