"""Embeddings: the rows that a model gives the tokens of a text, pooled to one row, and the head of the model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from quantkit.errors import FormatError
from quantkit.model.backends import Limits
from quantkit.model.batch import Batch, Floats, Ints
from quantkit.model.engine import Model, Programs
from quantkit.model.ops import Graph


def pooled_rows(model: Model, sequences: Sequence[Ints], finish: Callable[[int], None] = lambda n_done: None) -> Floats:
    """Return the embedding of each sequence of tokens.

    Args:
        model: an encoder, or any model loaded with ``build_embeddings``.
        sequences: int32 [n] each, of at most ``model.n_ubatch`` tokens.
        finish: called with the number of finished sequences after each batch.

    Returns:
        float32 [sequences, width]: n_embd, or the width of the model's head; not normalized.

    Raises:
        FormatError: a sequence is empty or too long, or a token does not exist.
    """
    pooling = model.unfused.pooling
    assert pooling is not None
    _check_lengths(model, sequences)
    longest = max(map(len, sequences), default=1)
    n_seq = max(1, min(len(sequences), model.n_ubatch // longest))
    session = model.session(longest, n_seq)
    rows = np.empty((len(sequences), model.unfused.logits.width), np.float32)
    for batch in _batches([len(sequence) for sequence in sequences], n_seq, model.n_ubatch):
        parts = [sequences[i] for i in batch]
        session.clear()
        outputs = np.concatenate([_outputs(len(part), pooling.row) for part in parts])
        numbers = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        of_tokens = session.decode(np.concatenate(parts), numbers, outputs)
        assert of_tokens is not None
        of_rows = numbers[outputs]
        for number, i in enumerate(batch):
            rows[i] = of_tokens[of_rows == number].mean(0, dtype=np.float64)
        finish(batch[-1] + 1)
    return rows if model.unfused.head is None else _through_head(model, model.unfused.head, rows)


def _check_lengths(model: Model, sequences: Sequence[Ints]) -> None:
    for i, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= model.n_ubatch:
            raise FormatError(
                f"text {i} has {len(sequence)} tokens; {model.path} was loaded for 1 to {model.n_ubatch} at once",
                "QK-E203",
            )


def _batches(lengths: Sequence[int], n_seq: int, n_tokens: int) -> Iterator[range]:
    """Yield runs of sequences, of at most ``n_seq`` with at most ``n_tokens`` tokens together."""
    begin, total = 0, 0
    for i, length in enumerate(lengths):
        if i - begin == n_seq or total + length > n_tokens:
            yield range(begin, i)
            begin, total = i, 0
        total += length
    if begin < len(lengths):
        yield range(begin, len(lengths))


def _outputs(n: int, row: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return the tokens whose rows are pooled."""
    outputs = np.full(n, row == "mean")
    if row != "mean":
        outputs[0 if row == "cls" else -1] = True
    return outputs


def _through_head(model: Model, head: Graph, rows: Floats) -> Floats:
    """Return the head's output for pooled rows, computed in batches of ``n_ubatch``."""
    n, (pooled,) = min(len(rows), model.n_ubatch), head.inputs
    programs: Programs = model.part(head, Limits(1, 1, n, model.kv_type))
    out = np.empty((len(rows), head.logits.width), np.float32)
    nothing = np.empty(0, np.int32)
    for begin in range(0, len(rows), n):
        part = rows[begin : begin + n]
        zeros = np.zeros(len(part), np.int32)
        programs.run(Batch(zeros, zeros, zeros, nothing), {pooled: part})
        out[begin : begin + n] = programs.read(head.logits)
    return out
