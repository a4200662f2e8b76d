"""The verb ``logits``: a model's logits, for comparison by other programs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from quantkit.arguments import checked
from quantkit.errors import QuantkitError
from quantkit.evaluate.passes import F32, LoadOptions, Model, loaded_model, path_of, text_tokens
from quantkit.formats.outputs import Output, atomic_write, check_apart
from quantkit.formats.ranges import reserve
from quantkit.progress import Progress, ProgressCallback


@checked
def logits(
    model: str | Path | Model,
    text: str | bytes | None = None,
    *,
    tokens: npt.ArrayLike | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    n_ctx: int | None = None,
    n_batch: int = 2048,
    progress: ProgressCallback | None = None,
    **load: Unpack[LoadOptions],
) -> F32:
    """Return the logits after each of the tokens of a text, or of tokens [n]: float32 [n, n_vocab], from position 0.

    With ``output`` they are written to that .npy, which appears when complete; the result maps it, so memory does not
    grow with the number of tokens.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: the context that rope factors are chosen for; None: that of training.
        progress: called with the tokens of each batch.

    Raises:
        QuantkitError: no tokens, tokens outside the vocabulary, or an output that exists.
    """
    with ExitStack() as stack:
        path = None
        if output is not None:
            check_apart([output], [path_of(model)])
            path = stack.enter_context(Output(output, overwrite=overwrite)).path
        loaded = stack.enter_context(loaded_model(model, n_ctx, load))
        ids = text_tokens(loaded, text, tokens)
        if ids.size == 0:
            raise QuantkitError("the text has no tokens", "QK-E121")
        shape = (len(ids), loaded.n_vocab)
        if path is None:
            out = np.empty(shape, np.float32)
            _compute(loaded, ids, out, n_batch, progress)
            return out
        with atomic_write(path) as part:
            memmap = np.lib.format.open_memmap(part, "w+", np.float32, shape)
            # a full disk is an error here, but a fatal signal when writing to the mapping
            reserve(part, part.stat().st_size)
            _compute(loaded, ids, memmap, n_batch, progress)
            memmap.flush()
        mapped: F32 = np.load(path, mmap_mode="r")
        return mapped


def _compute(
    model: Model, ids: npt.NDArray[np.int32], out: F32, n_batch: int, progress: ProgressCallback | None
) -> None:
    session = model.session(len(ids))
    for begin in range(0, len(ids), n_batch):

        def keep(index: int, block: F32, begin: int = begin) -> None:
            out[begin + index : begin + index + len(block)] = block

        session.decode(ids[begin : begin + n_batch], 0, None, consume=keep)
        if progress is not None:
            progress(Progress(min(begin + n_batch, len(ids)), len(ids), "logits"))
