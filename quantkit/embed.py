"""The verb ``embed``: a model's embeddings of texts, as llama-embedding computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from quantkit.activations import RUNTIME
from quantkit.arguments import checked
from quantkit.errors import FormatError, QuantkitError, RecipeError, TypeNotSupported
from quantkit.evaluate.passes import LoadOptions
from quantkit.formats.gguf import open_model
from quantkit.formats.tokenizer import Tokenizer
from quantkit.model.embeddings import pooled_rows
from quantkit.model.encoder import POOLINGS
from quantkit.model.engine import Model, load
from quantkit.model.graph import build_embeddings
from quantkit.model.hparams import HParams
from quantkit.progress import Progress, ProgressCallback

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of texts, float32 [texts, width], not normalized, and how they were computed.

    pooling: of encoder.POOLINGS. n_cut: the texts that were longer than the model's context.
    """

    model: Path
    rows: F32
    pooling: str
    n_cut: int
    activations: str
    notes: tuple[str, ...]


@checked
def embed(
    model: str | Path | Model,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    normalize: bool = True,
    truncate: bool = False,
    progress: ProgressCallback | None = None,
    **load: Unpack[LoadOptions],
) -> F32:
    """Return a model's embeddings of texts, float32 [texts, width].

    Encoders and decoders have embeddings: the rows of a text's tokens after the last norm, pooled, and multiplied by
    the model's head, if it has one. Each text has the tokens that begin and end a sequence ([CLS], [SEP], BOS).

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load, keys and values in f32),
            or a loaded encoder.
        texts: at least one token each.
        pooling: mean, cls, last or rank (the scores of a classifier); None: the file's, or mean if it has none.
        normalize: divide each embedding by its length, as llama-embedding does; scores of a classifier never are.
        truncate: cut texts that are longer than the model's context, keeping the token that ends a sequence.
        progress: called with the number of finished texts.

    Raises:
        RecipeError: a text is empty or too long, or the pooling does not exist.
        QuantkitError: an embedding is zero, NaN or infinite. Errors of ``quantkit.load``.
    """
    result = embeddings_of(model, texts, pooling=pooling, truncate=truncate, progress=progress, **load)
    return normalize_rows(result) if normalize and result.pooling != "rank" else result.rows


def embeddings_of(
    model: str | Path | Model,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    truncate: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[LoadOptions],
) -> Embeddings:
    """Return the embeddings of texts before they are normalized; see ``embed``."""
    if not texts:
        raise RecipeError("no texts: give at least one", "QK-E203")
    if pooling is not None and pooling not in POOLINGS[1:]:
        raise RecipeError(f"unknown pooling {pooling!r}: choose {', '.join(POOLINGS[1:])}", "QK-E203")
    if not isinstance(model, (str, Path)):
        return _of_loaded(model, texts, pooling, truncate, progress)
    with open_model(model) as file:
        tokens, _ = _tokens(Tokenizer.from_gguf(file), texts, HParams(file).n_ctx_train, file.paths[0], truncate)
    longest = max(map(len, tokens))
    settings: LoadOptions = {"kv_type": "f32", **options}
    settings["n_ubatch"] = max(longest, settings.get("n_ubatch", 512))
    build = partial(build_embeddings, pooling=pooling or "")
    with load(model, n_ctx=longest, build=build, **settings) as loaded:
        return _of_loaded(loaded, texts, None, truncate, progress)


def _of_loaded(
    model: Model, texts: Sequence[str], pooling: str | None, truncate: bool, progress: ProgressCallback | None
) -> Embeddings:
    kind = model.unfused.pooling
    if kind is None:
        raise TypeNotSupported(
            f"{model.path} is loaded to compute logits; give its path, and quantkit.embed loads it without", "QK-E306"
        )
    if pooling not in (None, kind.kind):
        raise RecipeError(
            f"{model.path} is loaded with the pooling {kind.kind}; give its path to choose {pooling}", "QK-E201"
        )
    tokens, n_cut = _tokens(model.tokenizer, texts, model.n_ctx_train, model.path, truncate)

    def finish(n_done: int) -> None:
        if progress is not None:
            progress(Progress(n_done, len(texts), "texts"))

    rows = pooled_rows(model, tokens, finish)
    if (bad := np.flatnonzero(~np.isfinite(rows).all(1))).size:
        raise QuantkitError(f"{model.path}: the embedding of text {int(bad[0])} is NaN or infinite", "QK-E108")
    choice = f"{model.path.name} names no pooling: the {kind.kind} of the tokens' rows is taken"
    default = [] if kind.stated or pooling else [choice]
    truncation = [f"{n_cut} of {len(texts)} texts were cut to {model.n_ctx_train} tokens"] if n_cut else []
    notes = (*model.notes, *default, *truncation)
    return Embeddings(model.path, rows, kind.kind, n_cut, getattr(model, "activations", RUNTIME), notes)


def normalize_rows(embeddings: Embeddings) -> F32:
    """Return the embeddings divided by their lengths. Raises QuantkitError for one of length 0."""
    rows = embeddings.rows.astype(np.float64)
    lengths = np.sqrt((rows * rows).sum(1, keepdims=True))
    if (zero := np.flatnonzero(lengths == 0)).size:
        raise QuantkitError(f"{embeddings.model}: the embedding of text {int(zero[0])} is zero", "QK-E108")
    unit: F32 = (rows / lengths).astype(np.float32)
    return unit


def _tokens(
    tokenizer: Tokenizer, texts: Sequence[str], n_ctx: int, path: Path, truncate: bool
) -> tuple[list[I32], int]:
    """Return the tokens of each text, and how many texts were cut to ``n_ctx`` tokens."""
    result, n_cut = list[I32](), 0
    for i, text in enumerate(texts):
        ids = np.asarray(tokenizer.encode(text, parse_special=False), np.int32)
        if not text.strip() or not len(ids):
            raise RecipeError(f"text {i} is empty: omit it", "QK-E203")
        if len(ids) > n_ctx:
            if not truncate:
                raise FormatError(
                    f"text {i} has {len(ids)} tokens, more than the {n_ctx} of {path}'s context: divide it, or "
                    "pass truncate=True",
                    "QK-E203",
                )
            ids, n_cut = ids[:n_ctx], n_cut + 1
            if tokenizer.closing is not None:
                ids[-1] = tokenizer.closing
        result.append(ids)
    return result, n_cut
