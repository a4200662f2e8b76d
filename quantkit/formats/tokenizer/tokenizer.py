"""The tokenizer of a GGUF file: special tokens, then the tokenizer model on the text between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.tokenizer.bpe import Bpe, pre_of
from quantkit.formats.tokenizer.rwkv import Rwkv
from quantkit.formats.tokenizer.special import SpecialTokens
from quantkit.formats.tokenizer.spm import Spm
from quantkit.formats.tokenizer.unigram import Unigram
from quantkit.formats.tokenizer.vocab import KEY, Attr, Metadata, Vocab, end_ids, read_vocab
from quantkit.formats.tokenizer.wordpiece import WordPiece


class Model(Protocol):
    """The model (tokenizer.ggml.model) that encodes text between special tokens."""

    def encode(self, text: bytes, first: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


_MODELS: dict[str, Callable[[Vocab], Model]] = {
    **dict.fromkeys(("gpt2", "gemma4", "whitespace"), Bpe),
    "llama": Spm,
    "bert": WordPiece,
    "t5": Unigram,
    "rwkv": Rwkv,
}


class Tokenizer:
    """Text to token ids and back, as in llama.cpp b11434's llama_tokenize. Created by ``from_gguf``.

    Attributes:
        n_vocab: number of tokens.
        bos, eos, eot: the ids that begin and end a sequence and a turn, or None.
        end_ids: the ids that end an answer.
        add_bos, add_eos: whether ``encode`` adds them.
        notes: facts about the vocabulary for the user, one sentence each.
    """

    def __init__(self, vocab: Vocab, model: Model) -> None:
        self._vocab, self._model = vocab, model
        self._special = SpecialTokens(vocab)
        self.n_vocab = len(vocab.tokens)
        self.notes: tuple[str, ...] = ()
        bert, spm, t5 = (vocab.model == name for name in ("bert", "llama", "t5"))
        default_bos = bert or spm
        self._opening, self._closing = "bos", "seperator" if bert else "eos"
        if isinstance(model, Bpe):
            pre = pre_of(vocab)
            default_bos = pre.add_bos
            if pre.no_bos and vocab.special_id("bos") is None:
                vocab.special.pop("bos", None)
            if vocab.model != "gemma4" and not vocab.source.get(KEY + "pre"):
                self.notes += (
                    f"{vocab.path} has no {KEY}pre; text is split with llama.cpp's default, which probably differs "
                    "from training",
                )
        self.bos, self.eos, self.eot = (vocab.special.get(name) for name in ("bos", "eos", "eot"))
        self.end_ids = end_ids(vocab)
        self.add_bos = vocab.flag("add_bos_token", default_bos)
        self.add_eos = vocab.flag("add_eos_token", t5)
        if isinstance(model, Bpe):
            # llama.cpp always adds it for Gemma 4.
            self.add_bos |= pre.add_bos and pre.newline_words

    @classmethod
    def from_gguf(cls, source: Metadata) -> Tokenizer:
        """Create the tokenizer of an open file, of which the header is enough, or of a checkpoint.

        Raises FormatError if the file has no tokenizer, or an unknown one; the message names model and pre.
        """
        vocab = read_vocab(source)
        return cls(vocab, _MODELS[vocab.model](vocab))

    def encode(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> npt.NDArray[np.int32]:
        """Return the ids of a text, int32 [n].

        Args:
            text: bytes, UTF-8 or not, are used unchanged; a str as its UTF-8, with "surrogateescape" bytes restored.
            add_special: add the tokens that begin and end a sequence, if the model uses them.
            parse_special: treat "<|im_end|>" and the like as control tokens.

        Raises:
            RecipeError: a str with surrogates, or bytes beyond U+10FFFF, which no tokenizer accepts.
            FormatError: the vocabulary lacks a token that this text needs.
        """
        data = _utf8(text) if isinstance(text, str) else bytes(text)
        out: list[int] = [self._required_token(self._opening)] if add_special and self._adds_opening else []
        first = True
        for fragment in self._special.split(data, parse_special):
            if isinstance(fragment, bytes):
                out += self._model.encode(fragment, first)
            else:
                out.append(fragment)
            first = isinstance(fragment, int)
        if add_special and self._adds_closing:
            out.append(self._required_token(self._closing))
        return np.array(out, np.int32)

    def decode(self, ids: Iterable[int] | npt.NDArray[np.int32]) -> str:
        """Return the text of ids, special tokens by their names, invalid UTF-8 as U+FFFD.

        The space that SentencePiece puts before a text is removed; llama_detokenize also removes spaces before
        punctuation in some models. Raises RecipeError for an invalid id.
        """
        tokens = [int(i) for i in ids]
        pieces_by_id = {i: self.piece(i) for i in set(tokens)}
        pieces = [pieces_by_id[i] for i in tokens]
        if self._prefixes_space:
            first = 1 if tokens and self._adds_opening and tokens[0] == self.bos else 0
            pieces[first : first + 1] = [piece.removeprefix(b" ") for piece in pieces[first : first + 1]]
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token as llama_token_to_piece does, special tokens by their names.

        Raises RecipeError for an invalid id.
        """
        if not 0 <= token < self.n_vocab:
            raise RecipeError(f"{self._vocab.path}: no token {token}; ids are 0 to {self.n_vocab - 1}", "QK-E203")
        attr = int(self._vocab.attrs[token])
        if self._vocab.model == "rwkv":
            return self._model.piece(token)
        if attr & (Attr.CONTROL | Attr.UNKNOWN | Attr.USER_DEFINED):
            return self._vocab.tokens[token].encode("utf-8", "surrogateescape")
        return self._model.piece(token) if attr & (Attr.NORMAL | Attr.BYTE) else b""

    @property
    def closing(self) -> int | None:
        """The id that ``encode`` adds at the end of a text ([SEP], EOS), or None."""
        return self._required_token(self._closing) if self._adds_closing else None

    @property
    def _adds_opening(self) -> bool:
        return self.add_bos or self._vocab.model == "bert"

    @property
    def _adds_closing(self) -> bool:
        return self.add_eos or self._vocab.model == "bert"

    @property
    def _prefixes_space(self) -> bool:
        return self._vocab.flag("add_space_prefix", self._vocab.model == "llama")

    def _required_token(self, name: str) -> int:
        if name not in self._vocab.special:
            raise FormatError(
                f"{self._vocab.path}: the model adds a {name} token to every text, but {KEY}{name}_token_id is "
                "missing; encode with add_special=False",
                "QK-E123",
            )
        return self._vocab.special[name]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:
        raise RecipeError(
            f"character {e.start} of the text is a lone surrogate (U+{ord(text[e.start]):04X})", "QK-E121"
        ) from None
