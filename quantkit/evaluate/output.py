"""The logits themselves: for other programs to compare with, and for looking at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from quantkit.errors import QuantkitError
from quantkit.evaluate.passes import F32, LoadOptions, Model, opened, text_tokens
from quantkit.formats.ranges import sync


def logits(
    model: str | Path | Model,
    text: str | bytes | None = None,
    *,
    tokens: npt.ArrayLike | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    n_ctx: int | None = None,
    n_batch: int = 2048,
    **load: Unpack[LoadOptions],
) -> F32:
    """Return the logits after each of the tokens of a text, or of tokens [n]: float32 [n, n_vocab], from position 0.

    With ``output`` they go to that .npy, which appears when it is complete, and what is returned maps it: then
    memory does not grow with the number of tokens.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        n_ctx: the context that the model is set up for, which matters where rope factors depend on it; without, the
            one it was trained on.

    Raises:
        QuantkitError: no tokens, tokens outside the vocabulary, or an output that exists.
    """
    path = Path(output) if output is not None else None
    if path is not None and path.exists() and not overwrite:
        raise QuantkitError(f"{path} exists; give another name, or --overwrite to replace it")
    with opened(model, n_ctx, load) as loaded:
        ids = text_tokens(loaded, text, tokens)
        if ids.size == 0:
            raise QuantkitError("the text has no tokens")
        shape = (len(ids), loaded.n_vocab)
        if path is None:
            out = np.empty(shape, np.float32)
            _compute(loaded, ids, out, n_batch)
            return out
        part = path.with_name(path.name + ".part")
        try:
            into = np.lib.format.open_memmap(part, "w+", np.float32, shape)
            _compute(loaded, ids, into, n_batch)
            into.flush()
            sync(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    mapped: F32 = np.load(path, mmap_mode="r")
    return mapped


def _compute(model: Model, ids: npt.NDArray[np.int32], out: F32, n_batch: int) -> None:
    session = model.session(len(ids))
    for begin in range(0, len(ids), n_batch):

        def keep(index: int, block: F32, begin: int = begin) -> None:
            out[begin + index : begin + index + len(block)] = block

        session.decode(ids[begin : begin + n_batch], 0, None, each=keep)
