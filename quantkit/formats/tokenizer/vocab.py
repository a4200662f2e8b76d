"""A vocabulary from GGUF metadata: texts, scores and attributes of tokens, special ids, flags.

Keys (tokenizer.ggml.*): tokens, scores, token_type (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte),
merges, *_token_id, add_bos_token ... Types in files are often wrong, so llama.cpp b11434 corrects them by the texts of
tokens and the names of models (llama-vocab.cpp, llama_vocab::impl::load); ids depend on these corrections, which this
module implements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError
from quantkit.formats.gguf import Field, ValueType

KEY = "tokenizer.ggml."
#: The space as most models write it.
SPACE = "\u2581"


class Metadata(Protocol):
    """The source of a vocabulary: an open GGUF file, or a checkpoint that becomes one."""

    paths: tuple[Path, ...]
    fields: dict[str, Field]

    def get(self, key: str, default: Any = None) -> Any: ...


class Attr(IntFlag):
    """Attributes of a token."""

    NONE = 0
    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 64
    RSTRIP = 128


_BY_TYPE = (Attr.NONE, Attr.NORMAL, Attr.UNKNOWN, Attr.CONTROL, Attr.USER_DEFINED, Attr.UNUSED, Attr.BYTE)
#: Default special ids, by tokenizer.ggml.model.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "gemma4": {},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "rwkv": {},
}
MODELS = tuple(_DEFAULT_IDS)
_SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
#: Texts that end a turn; the first one in a vocabulary is its end-of-turn token, unless the file sets one.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)
#: Texts of control tokens, regardless of their type.
_CONTROL = (
    *_TURN_ENDS,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
#: Fill-in-the-middle tokens by their keys: the file's token is unchanged; without one, the first text found becomes a
#: control token.
_FIM: dict[tuple[str, ...], tuple[str, ...]] = {
    ("fim_pre", "prefix"): (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    ("fim_suf", "suffix"): (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    ("fim_mid", "middle"): (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    ("fim_pad",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep",): ("<|file_sep|>",),
}


@dataclass
class Vocab:
    """The tokens of a file and their properties."""

    path: str
    model: str
    tokens: list[str]  #: decoded with "surrogateescape"
    ids: dict[str, int]
    attrs: npt.NDArray[np.uint8]  #: of Attr, as llama.cpp corrects them
    types: npt.NDArray[np.uint8]  #: of Attr, as in the file
    scores: npt.NDArray[np.float32]
    special: dict[str, int]  #: bos, eos, eot ..., if present
    source: Metadata

    def flag(self, name: str, default: bool) -> bool:
        """Return tokenizer.ggml.NAME, a boolean."""
        value = self.source.get(KEY + name, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.path}: {KEY}{name} is {value!r}, not a boolean", "QK-E123")
        return value

    def special_id(self, name: str) -> int | None:
        """Return tokenizer.ggml.NAME_token_id; None without the key, or if no token has this id."""
        value = self.source.get(f"{KEY}{name}_token_id")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise FormatError(f"{self.path}: {KEY}{name}_token_id is {value!r}, not an id", "QK-E123")
        return value if value is not None and 0 <= value < len(self.tokens) else None

    def piece(self, token: int) -> bytes:
        """Return the bytes of a normal token, with U+2581 for a space, or of a byte token, <0xXX>."""
        text = self.tokens[token]
        if self.attrs[token] & Attr.NORMAL:
            return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        return bytes([int(text[3:5], 16)])

    def ids_with(self, attr: Attr) -> list[int]:
        """Return the ids of tokens that have any of the attributes."""
        return np.flatnonzero(self.attrs & attr).tolist()


def read_vocab(source: Metadata) -> Vocab:
    """Read and correct a file's vocabulary.

    Raises FormatError for a missing, unsupported or inconsistent tokenizer; the message names it.
    """
    path = str(source.paths[0])
    model = source.get(KEY + "model")
    raw_ids = "Give token ids instead of text: --tokens 1,2,3 or --tokens @FILE.i32"
    if model in (None, "no_vocab", "none"):
        raise FormatError(
            f"{path}: the file has no tokenizer ({KEY}model is {model or 'missing'}). {raw_ids}", "QK-E123"
        )
    if model not in _DEFAULT_IDS:
        names = ", ".join(MODELS)
        raise FormatError(
            f"{path}: unsupported tokenizer {KEY}model {model!r}; supported are {names}. {raw_ids}", "QK-E123"
        )
    tokens = _texts(source, path)
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        duplicate = next(text for i, text in enumerate(tokens) if ids[text] != i)
        raise FormatError(
            f"{path}: the token {duplicate!r} occurs twice in {KEY}tokens, which llama.cpp also rejects", "QK-E114"
        )
    scores = _numbers(source, path, "scores", len(tokens), (ValueType.FLOAT32, ValueType.INT32))
    kinds = _numbers(source, path, "token_type", len(tokens), (ValueType.INT32,))
    if kinds is None:
        types = np.full(len(tokens), Attr.NORMAL, np.uint8)
    else:
        in_range = np.where((kinds < 0) | (kinds >= len(_BY_TYPE)), 0, kinds).astype(np.intp)
        types = np.array(_BY_TYPE, np.uint8)[in_range]
    zeros = np.zeros(len(tokens), np.float32)
    scores = zeros if scores is None else scores.astype(np.float32)
    vocab = Vocab(path, model, tokens, ids, types.copy(), types, scores, {}, source)
    _find_special(vocab)
    _correct(vocab)
    _strip(vocab)
    return vocab


def _texts(source: Metadata, path: str) -> list[str]:
    field = source.fields.get(KEY + "tokens")
    if field is None or field.item_type is not ValueType.STRING:
        raise FormatError(f"{path}: {KEY}tokens is {_kind(field)}, not an array of strings", "QK-E123")
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(c_strings(field.value))]


def c_strings(texts: list[str]) -> list[str]:
    """Return texts up to their first NUL, as llama.cpp reads arrays of strings."""
    return [text.partition("\0")[0] if "\0" in text else text for text in texts]


def _kind(field: Field | None) -> str:
    return "missing" if field is None else field.describe()


def _numbers(
    source: Metadata, path: str, name: str, count: int, kinds: tuple[ValueType, ...]
) -> npt.NDArray[Any] | None:
    """Return one number per token, None without the key."""
    field = source.fields.get(KEY + name)
    if field is None:
        return None
    if field.item_type not in kinds:
        raise FormatError(f"{path}: {KEY}{name} is {_kind(field)}, not an array of {kinds[0].name.lower()}", "QK-E123")
    if field.count < count:
        raise FormatError(f"{path}: {KEY}{name} has {field.count} entries for {count} tokens", "QK-E123")
    return field.array[:count]


def _find_special(vocab: Vocab) -> None:
    defaults = _DEFAULT_IDS[vocab.model]
    for name in _SPECIAL_IDS:
        token_id, default = vocab.special_id(name), defaults.get(name)
        if token_id is None and default is not None and default < len(vocab.tokens):
            token_id = default
        if token_id is not None:
            vocab.special[name] = token_id
    turn_end = _first(vocab, _TURN_ENDS)
    if "eot" not in vocab.special and turn_end is not None:
        vocab.special["eot"] = turn_end


def end_ids(vocab: Vocab) -> frozenset[int]:
    """Return the ids that end an answer: of the keys, and of texts unless ``_correct`` took their attribute.

    llama.cpp b11434, special_eog_ids.
    """
    by_text = _ids_of(vocab, *_CONTROL)
    fim = (vocab.special_id(key) or _first(vocab, _FIM[(key,)]) for key in ("fim_pad", "fim_rep", "fim_sep"))
    ids = {*by_text, *fim, *(vocab.special.get(name) for name in ("eos", "eot", "eom"))}
    return frozenset(i for i in ids if i is not None and (i not in by_text or vocab.attrs[i] & Attr.CONTROL))


def _first(vocab: Vocab, texts: Iterable[str]) -> int | None:
    return next(iter(_ids_of(vocab, *texts)), None)


def _correct(vocab: Vocab) -> None:
    """Change attributes by the texts of tokens, in llama.cpp's order."""
    ids, attrs = vocab.ids, vocab.attrs
    for keys, texts in _FIM.items():
        token_id = _first(vocab, texts)
        if token_id is not None and all(vocab.special_id(key) is None for key in keys):
            attrs[token_id] |= Attr.CONTROL
    attrs[_ids_of(vocab, *_CONTROL)] |= np.uint8(Attr.CONTROL)
    attrs[_ids_of(vocab, "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")] = Attr.USER_DEFINED
    if ids.keys() & {"<|call|>", "<|calls|>"} and ids.keys() & {"<|return|>", "<|flush|>"}:
        attrs[_ids_of(vocab, "<|end|>")] = Attr.USER_DEFINED
    plamo = _ids_of(vocab, "<|plamo:eos|>")
    if "<|tool_response>" in ids or {*plamo} & {vocab.special.get("eos"), vocab.special.get("eot")}:
        attrs[_ids_of(vocab, "</s>")] = Attr.NORMAL


def _ids_of(vocab: Vocab, *texts: str) -> list[int]:
    """Return the ids of the texts that are tokens."""
    return [vocab.ids[text] for text in texts if text in vocab.ids]


def _strip(vocab: Vocab) -> None:
    """Mark the tokens that absorb adjacent white space, known only by the model's name."""
    get, attrs = vocab.source.get, vocab.attrs
    pre, arch, name = (str(get(key, "")) for key in (KEY + "pre", "general.architecture", "general.name"))
    name = name.lower()
    if any(x in pre for x in ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")) or any(
        x in arch for x in ("nomic-bert-moe", "jina-bert-v3")
    ):
        attrs[_ids_of(vocab, "<mask>")] |= np.uint8(Attr.LSTRIP)
    elif "phi-3" in name or "phi3" in name:
        attrs[vocab.ids_with(Attr.CONTROL | Attr.USER_DEFINED | Attr.UNKNOWN)] |= np.uint8(Attr.RSTRIP)
        attrs[_ids_of(vocab, "</s>")] |= np.uint8(Attr.RSTRIP)
        attrs[_ids_of(vocab, "<unk>", "<s>", "<|endoftext|>")] &= np.uint8(0xFF ^ Attr.RSTRIP)
    elif "modern-bert" in name:
        attrs[_ids_of(vocab, "[MASK]")] |= np.uint8(Attr.LSTRIP)
