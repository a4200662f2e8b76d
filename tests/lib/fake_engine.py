"""A model without an engine: its logits are a pseudo-random function of the preceding tokens, for any batching.

It implements the interface that quantkit.evaluate uses, strictly: a block of logits is overwritten as soon as the
callee returns, contexts are limited, unknown sequences are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.errors import FormatError
from quantkit.evaluate.passes import Model, Session, Tokenizer
from quantkit.model import engine

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass
class FakeTokenizer:
    """One token per byte of UTF-8."""

    n_vocab: int
    bos: int | None = None
    add_bos: bool = False

    def encode(self, text: str | bytes) -> I32:
        ids = [b % self.n_vocab for b in (text.encode() if isinstance(text, str) else text)]
        head = [self.bos] if self.add_bos and self.bos is not None else []
        return np.array(head + ids, np.int32)


class FakeSession:
    def __init__(self, model: FakeModel, n_ctx: int, n_seq: int) -> None:
        self.model, self.n_ctx = model, n_ctx
        self.prefixes: list[list[int]] = [[] for _ in range(n_seq)]

    def decode(
        self,
        tokens: I32,
        sequences: I32 | int = 0,
        outputs: npt.NDArray[np.bool_] | None = None,
        consume: Callable[[int, F32], None] | None = None,
    ) -> F32 | None:
        assert tokens.dtype == np.int32
        keys: list[list[int]] = []
        for i, (token, sequence) in enumerate(zip(tokens, np.broadcast_to(sequences, tokens.shape), strict=True)):
            prefix = self.prefixes[sequence]
            prefix.append(int(token))
            assert len(prefix) <= self.n_ctx
            if outputs is None or outputs[i]:
                keys.append([len(prefix), sum(prefix), *prefix[-8:]])
        self.model.calls.append(len(tokens))
        if consume is None:
            return self.model.after(keys)
        offset = 0
        while offset < len(keys):  # blocks of irregular sizes
            block = self.model.after(keys[offset : offset + 1 + (7 * offset + 3) % 23])
            consume(offset, block)
            offset += len(block)
            block.fill(np.nan)
        return None

    def clear(self, sequence: int | None = None) -> None:
        for i, prefix in enumerate(self.prefixes):
            if sequence in (None, i):
                prefix.clear()


class FakeModel:
    """A model whose logits are normal numbers times ``spread``, plus other ones times ``noise``."""

    arch = "fake"
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        path: Path,
        n_vocab: int = 301,
        *,
        seed: int = 1,
        noise: float = 0.0,
        spread: float = 3.0,
        bos: int | None = None,
        tokenizer: bool = True,
        n_ctx_train: int = 4096,
    ) -> None:
        self.path, self.n_vocab, self.seed, self.noise, self.spread = path, n_vocab, seed, noise, spread
        self.n_ctx_train, self.has_tokenizer, self.closed = n_ctx_train, tokenizer, False
        self._tokenizer = FakeTokenizer(n_vocab, bos, bos is not None)
        self.calls: list[int] = []

    @property
    def tokenizer(self) -> Tokenizer:
        if not self.has_tokenizer:
            raise FormatError(f"{self.path}: no tokenizer")
        return self._tokenizer

    def after(self, keys: list[list[int]]) -> F32:
        """Return the logits after prefixes, each identified by its length, sum and last tokens: float32 [n,
        n_vocab]."""
        out = np.empty((len(keys), self.n_vocab), np.float32)
        for row, key in zip(out, keys, strict=True):
            row[:] = np.random.default_rng([self.seed, *key]).standard_normal(self.n_vocab) * self.spread
            if self.noise:
                row += np.random.default_rng([77, *key]).standard_normal(self.n_vocab) * self.noise
        return out

    def forward(self, tokens: list[int]) -> F32:
        """Return the logits after each of the tokens of a fresh context."""
        keys = [[n, sum(tokens[:n]), *tokens[max(0, n - 8) : n]] for n in range(1, len(tokens) + 1)]
        return self.after(keys)

    def session(self, n_ctx: int, n_seq: int = 1) -> Session:
        return FakeSession(self, n_ctx, n_seq)

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: pytest.MonkeyPatch, *models: FakeModel) -> list[dict[str, Any]]:
    """Patch quantkit.load to return these models, by path; the returned list collects the options of each call."""
    calls: list[dict[str, Any]] = []

    def load(path: str | Path, **options: Any) -> Model:
        calls.append(options)
        return next(m for m in models if str(m.path) == str(path))

    # Other names, too: help for a misspelt option imports all commands.
    monkeypatch.setattr(engine, "load", load)
    return calls
