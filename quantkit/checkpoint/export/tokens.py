"""The vocabulary of a file, and the parts of a tokenizer.json that all kinds have."""

from __future__ import annotations

from typing import Any

from quantkit.checkpoint.vocab.special import KINDS
from quantkit.checkpoint.vocab.tokenizer import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short

Json = dict[str, Any]

#: Keys of ids whose name is not that of the kind.
ID_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
#: SentencePiece's replacement of a space.
META = "\u2581"


class Tokens:
    """The vocabulary of a file."""

    def __init__(self, model: GGUFFile) -> None:
        self.model, self.where = model, model.paths[0]
        self.notes: list[str] = []
        #: Types of tokens that tokenizer.json lists beside the model's.
        self.added_types: tuple[int, ...] = (CONTROL, USER_DEFINED, UNKNOWN)
        self.texts: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.texts)
        if len(self.types) != len(self.texts):
            raise FormatError(
                f"{self.where}: {len(self.texts)} tokens, but {len(self.types)} types of tokens", "QK-E123"
            )

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.model.get(f"tokenizer.ggml.{key}")
        if values is None:
            return []
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        if not all(isinstance(value, kind) for value in values):
            raise FormatError(f"{self.where}: key tokenizer.ggml.{key} is not a list of {kind.__name__}", "QK-E123")
        return values

    def octets(self, key: str) -> list[int]:
        """Return a list of bytes."""
        return self._list(key, int)

    def scores(self) -> list[float]:
        scores = [float(score) for score in self._list("scores", float)] or [0.0] * len(self.texts)
        if len(scores) != len(self.texts):
            raise FormatError(f"{self.where}: {len(self.texts)} tokens, but {len(scores)} scores", "QK-E123")
        return scores

    def merges(self) -> list[str]:
        return self._list("merges", str)

    def flag(self, name: str) -> bool | None:
        value = self.model.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, bool) else None

    def text_of(self, kind: str) -> str | None:
        """Return the text of a special token, None if the file has none."""
        number = self.model.get(f"tokenizer.ggml.{ID_NAMES.get(kind, kind)}_token_id")
        return self.texts[number] if isinstance(number, int) and number < len(self.texts) else None

    def special(self) -> dict[str, str]:
        """Return the texts of special tokens by kind; an id of a plain token is in config.json only."""
        ids = {}
        for kind in KINDS:
            number = self.model.get(f"tokenizer.ggml.{ID_NAMES.get(kind, kind)}_token_id")
            if isinstance(number, int) and number < len(self.texts) and self.types[number] not in (NORMAL, UNUSED):
                ids[kind] = self.texts[number]
        return ids

    def is_filler(self, number: int) -> bool:
        """Return whether a token only pads the vocabulary to the length of the embeddings."""
        return self.types[number] == UNUSED and self.texts[number] == f"[PAD{number}]"

    def added_tokens(self) -> list[Json]:
        """Return the added tokens, as tokenizer.json lists them."""
        return [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": kind != USER_DEFINED}
            for i, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in self.added_types
        ]

    def vocab(self, without: tuple[int, ...] = ()) -> dict[str, int]:
        """Return ids by text, except padding and tokens of some types."""
        numbers: dict[str, int] = {}
        for i, text in enumerate(self.texts):
            if self.is_filler(i) or self.types[i] in without:
                continue
            if text in numbers:
                raise TypeNotSupported(
                    f"{self.where}: the tokens {numbers[text]} and {i} are both {short(text)}, which tokenizer.json "
                    "cannot express: use --no-tokenizer",
                    "QK-E305",
                )
            numbers[text] = i
        return numbers


def template(
    tokens: Tokens, defaults: tuple[bool, bool], *, words: bool = False, separates: bool | None = None
) -> Json | None:
    """Return the post-processor that adds BOS and EOS, if the metadata, or else ``defaults``, enable them.

    They may be plain tokens, without special meaning within a text. ``words``: for WordPiece, whose texts end with a
    separator and always have both. ``separates``: another one separates two texts, unless the file sets it.
    """
    affixes = []
    for kind, default in zip(("bos", "eos"), defaults, strict=True):
        flag = True if words else tokens.flag(f"add_{kind}_token")
        text = tokens.text_of("sep" if words and kind == "eos" else kind)
        affixes.append(text if (default if flag is None else flag) else None)
    if not any(affixes):
        return None

    def token(text: str, type_id: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def sequence_with_affixes(sequence: str, type_id: int) -> list[Json]:
        before, after = ([token(text, type_id)] if text else [] for text in affixes)
        return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

    # A file has this key only if a separator is added between the two texts of a pair.
    meta = tokens.flag("add_sep_token")
    second = sequence_with_affixes("B", 1)
    used = [text for text in affixes if text]
    separates = separates if meta is None else meta
    if separates is None:
        second = [{"Sequence": {"id": "B", "type_id": 1}}]
    elif affixes[1] is not None:  # BERT's [CLS] A [SEP] B [SEP]; RoBERTa's has two separators in between
        between = tokens.text_of("sep") or affixes[1]
        second = [*[token(between, 1)] * separates, *second[1 if affixes[0] else 0 :]]
        used.append(between)
    pair = sequence_with_affixes("A", 0) + second
    special_tokens = {text: {"id": text, "ids": [tokens.texts.index(text)], "tokens": [text]} for text in used}
    return {
        "type": "TemplateProcessing",
        "single": sequence_with_affixes("A", 0),
        "pair": pair,
        "special_tokens": special_tokens,
    }


def tokenizer_json(tokens: Tokens, **parts: Any) -> Json:
    """Return a tokenizer.json of ``parts``; the model defaults to BPE."""
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens.added_tokens()}
    return tokenizer | parts | {"model": model | parts["model"]}


def unknown(tokens: Tokens) -> str | None:
    """Return the text of the unknown token."""
    texts = (text for text, kind in zip(tokens.texts, tokens.types, strict=True) if kind == UNKNOWN)
    return tokens.special().get("unk") or next(texts, None)
