"""tokenizer.* keys as the files of a tokenizer that transformers loads: tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2") has its tokens and merges in the file; its pre-tokenizer follows from the name
(``pre_tokenizers``). Of SentencePiece ("llama") the file has pieces and scores: tokenizer.json gets the merges they
stand for, as transformers derives them (convert_slow_tokenizer.py, 4.57.6), and tokenizer.model the pieces themselves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from quantkit.checkpoint.back.pre_tokenizers import pre_tokenizer
from quantkit.checkpoint.vocab.special import KINDS
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short
from quantkit.formats.tokenizer.pre import PRE

Json = dict[str, Any]

#: Keys of ids whose name is not that of the kind.
_ID_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
#: The score of tokens that were added to a tokenizer.model.
_ADDED = -1000.0
_META = "\u2581"


class _Tokens:
    """The vocabulary of a file."""

    def __init__(self, model: GGUFFile) -> None:
        self.model, self.where = model, model.paths[0]
        self.notes: list[str] = []
        #: Types of tokens that tokenizer.json lists beside the model's.
        self.added_types: tuple[int, ...] = (CONTROL, USER_DEFINED, UNKNOWN)
        self.texts: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.texts)
        if len(self.types) != len(self.texts):
            raise FormatError(f"{self.where}: {len(self.texts)} tokens, but {len(self.types)} types of tokens")

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self.model.get(f"tokenizer.ggml.{key}")
        found = [] if found is None else found.tolist() if hasattr(found, "tolist") else list(found)
        if not all(isinstance(each, kind) for each in found):
            raise FormatError(f"{self.where}: key tokenizer.ggml.{key} is no list of {kind.__name__}")
        return found

    def scores(self) -> list[float]:
        scores = [float(each) for each in self._list("scores", float)] or [0.0] * len(self.texts)
        if len(scores) != len(self.texts):
            raise FormatError(f"{self.where}: {len(self.texts)} tokens, but {len(scores)} scores")
        return scores

    def merges(self) -> list[str]:
        return self._list("merges", str)

    def flag(self, name: str) -> bool | None:
        found = self.model.get(f"tokenizer.ggml.{name}")
        return found if isinstance(found, bool) else None

    def text_of(self, kind: str) -> str | None:
        """Return the text of the token of a kind, None if there is none."""
        number = self.model.get(f"tokenizer.ggml.{_ID_NAMES.get(kind, kind)}_token_id")
        return self.texts[number] if isinstance(number, int) and number < len(self.texts) else None

    def special(self) -> dict[str, str]:
        """Return the texts of special tokens by kind; an id of a plain token is in config.json only."""
        found = {}
        for kind in KINDS:
            number = self.model.get(f"tokenizer.ggml.{_ID_NAMES.get(kind, kind)}_token_id")
            if isinstance(number, int) and number < len(self.texts) and self.types[number] not in (NORMAL, UNUSED):
                found[kind] = self.texts[number]
        return found

    def is_filler(self, number: int) -> bool:
        """Tell a token that only makes the vocabulary as long as the embeddings."""
        return self.types[number] == UNUSED and self.texts[number] == f"[PAD{number}]"

    def added(self) -> list[Json]:
        """Return tokens that are not of the model, as tokenizer.json lists them."""
        return [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": kind != USER_DEFINED}
            for i, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in self.added_types
        ]

    def vocab(self, without: tuple[int, ...] = ()) -> dict[str, int]:
        """Return ids by text, but for fillers and tokens of some types."""
        found: dict[str, int] = {}
        for i, text in enumerate(self.texts):
            if self.is_filler(i) or self.types[i] in without:
                continue
            if text in found:
                raise TypeNotSupported(
                    f"{self.where}: the tokens {found[text]} and {i} are both {short(text)}; no tokenizer.json can say "
                    "that: --no-tokenizer leaves the tokenizer out"
                )
            found[text] = i
        return found


def tokenizer_files(model: GGUFFile) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a tokenizer by name, and notes. Raises TypeNotSupported, FormatError."""
    kind = model.get("tokenizer.ggml.model")
    write = _WRITERS.get(str(kind))
    if write is None:
        raise TypeNotSupported(
            f"{model.paths[0]}: the vocabulary {short(kind)} is not exported by this version (there are "
            f"{', '.join(_WRITERS)}); --no-tokenizer leaves the tokenizer out: take that of the original model"
        )
    tokens = _Tokens(model)
    made, more = write(tokens)
    config = _config(tokens) | _OF_KIND.get(str(kind), _nothing)(tokens)
    added = {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in tokens.added()}
    if str(kind) == "llama":
        scores = tokens.scores()
        added = {number: entry for number, entry in added.items() if scores[int(number)] == _ADDED}
    if added:
        config = {"added_tokens_decoder": added, **config}
    files = {"tokenizer.json": _dumped(made), "tokenizer_config.json": _dumped(config), **more}
    return files, tokens.notes


def _dumped(value: Json) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # bytes of a token that are no UTF-8
        return (json.dumps(value, indent=2) + "\n").encode()


def _config(tokens: _Tokens) -> Json:
    """Return tokenizer_config.json without added tokens."""
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for kind in ("bos", "eos", "sep"):
        if (flag := tokens.flag(f"add_{kind}_token")) is not None:
            config[f"add_{kind}_token"] = flag
    if (prefix := tokens.flag("add_space_prefix")) is not None:
        config["add_prefix_space"] = prefix
    config |= {f"{kind}_token": text for kind, text in tokens.special().items()}
    length = tokens.model.get(f"{tokens.model.get('general.architecture')}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    template = tokens.model.get("tokenizer.chat_template")
    names = tokens.model.get("tokenizer.chat_templates")
    if names is not None and len(names):
        named = [(str(name), tokens.model.get(f"tokenizer.chat_template.{name}")) for name in names]
        listed = [*([("default", template)] if template else []), *named]
        config["chat_template"] = [{"name": name, "template": text} for name, text in listed if text]
    elif template:
        config["chat_template"] = template
    return config


def _template(tokens: _Tokens, defaults: tuple[bool, bool], *, words: bool = False) -> Json | None:
    """Return what is put around texts: BOS and EOS, where the file, or else ``defaults``, say so.

    They may be plain tokens, whose texts are nothing special within a text. ``words``: of WordPiece, whose texts end
    with a separator, and have both whatever the file says.
    """
    around = []
    for kind, default in zip(("bos", "eos"), defaults, strict=True):
        flag = True if words else tokens.flag(f"add_{kind}_token")
        text = tokens.text_of("sep" if words and kind == "eos" else kind)
        around.append(text if (default if flag is None else flag) else None)
    if not any(around):
        return None

    def token(text: str, type_id: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def one(sequence: str, type_id: int) -> list[Json]:
        before, after = ([token(text, type_id)] if text else [] for text in around)
        return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

    # A file says whether a separator is added only if something lies between the two texts of a pair.
    separates, second, used = tokens.flag("add_sep_token"), one("B", 1), [text for text in around if text]
    if separates is None:
        second = [{"Sequence": {"id": "B", "type_id": 1}}]
    elif around[1] is not None:  # BERT's [CLS] A [SEP] B [SEP]; RoBERTa's has two of them in between
        between = tokens.text_of("sep") or around[1]
        second = [*[token(between, 1)] * separates, *second[1 if around[0] else 0 :]]
        used.append(between)
    both = one("A", 0) + second
    named = {text: {"id": text, "ids": [tokens.texts.index(text)], "tokens": [text]} for text in used}
    return {"type": "TemplateProcessing", "single": one("A", 0), "pair": both, "special_tokens": named}


def _tokenizer(tokens: _Tokens, **parts: Any) -> Json:
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens.added()}
    return made | parts | {"model": model | parts["model"]}


def _bpe(tokens: _Tokens) -> tuple[Json, dict[str, bytes]]:
    name = str(tokens.model.get("tokenizer.ggml.pre", "default"))
    try:
        normalizer, pre = pre_tokenizer(name)
    except TypeNotSupported as e:
        raise TypeNotSupported(f"{tokens.where}: {e.message}") from None
    vocab = tokens.vocab(without=(CONTROL, USER_DEFINED, UNKNOWN))
    behind = range(len(vocab), len(vocab) + len(tokens.added()))
    if [each["id"] for each in tokens.added()] != list(behind):  # others would get the ids of these
        vocab = tokens.vocab()
    merges = tokens.merges()
    if not merges:
        raise FormatError(f"{tokens.where}: a BPE vocabulary without tokenizer.ggml.merges")
    pairs = _usable(tokens, vocab, [_pair(tokens, merge) for merge in merges])
    row = PRE[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = _tokenizer(
        tokens,
        normalizer=normalizer,
        pre_tokenizer=pre,
        post_processor=_template(tokens, (row.add_bos, False)) or {**byte_level, "trim_offsets": False},
        decoder=byte_level,
        model={"ignore_merges": row.ignore_merges, "vocab": vocab, "merges": pairs},
    )
    return made, {}


def _usable(tokens: _Tokens, vocab: dict[str, int], pairs: list[list[str]]) -> list[list[str]]:
    """Leave out merges of or to what is no token: with them the file would not load."""
    found = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    if len(found) < len(pairs):
        tokens.notes.append(f"{len(pairs) - len(found)} merges of what is no token are left out of tokenizer.json")
    return found


def _pair(tokens: _Tokens, merge: str) -> list[str]:
    left, found, right = merge.partition(" ")
    if not found or " " in right:
        raise FormatError(f"{tokens.where}: the merge {short(merge)} is no pair")
    return [left, right]


def _pieces(tokens: _Tokens) -> tuple[Json, dict[str, bytes]]:
    """SentencePiece's BPE: merges are all pairs of pieces that make a piece, the best first."""
    scores, types = tokens.scores(), tokens.types
    vocab = tokens.vocab()
    usable = {text: i for text, i in vocab.items() if types[i] in (NORMAL, UNUSED)}
    found = []
    for text, i in usable.items():
        if types[i] != NORMAL:
            continue
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(left, right) for left, right in splits if left in usable and right in usable]
        found += [(scores[i], pair) for pair in sorted(known, key=lambda p: (usable[p[0]], usable[p[1]]))]
    found.sort(key=lambda each: -each[0])
    has_bytes = BYTE in types
    prefix = tokens.flag("add_space_prefix") is not False
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": _META}, "content": " "}]
    steps += [{"type": "ByteFallback"}] * has_bytes + [{"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    made = _tokenizer(
        tokens,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _META}, escape]}
        if prefix
        else escape,
        pre_tokenizer=None,
        post_processor=_template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": steps},
        model={
            **{"unk_token": _unknown(tokens), "fuse_unk": True, "byte_fallback": has_bytes, "vocab": vocab},
            "merges": [list(pair) for _, pair in found],
        },
    )
    return made, {"tokenizer.model": _sentencepiece(tokens, scores, prefix)}


def _merged_pieces(tokens: _Tokens) -> tuple[Json, dict[str, bytes]]:
    """Gemma 4's: pieces of SentencePiece with merges of their own."""
    pairs = [_pair(tokens, merge) for merge in tokens.merges()]
    if not pairs:
        raise FormatError(f"{tokens.where}: a BPE vocabulary without tokenizer.ggml.merges")
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
    steps = [{"type": "Replace", "pattern": {"String": _META}, "content": " "}, {"type": "ByteFallback"}]
    made = _tokenizer(
        tokens,
        normalizer=escape,
        pre_tokenizer=None,
        post_processor=_template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]},
        model={
            **{"unk_token": _unknown(tokens), "fuse_unk": True, "byte_fallback": True, "vocab": tokens.vocab()},
            "merges": [[part.replace("\u0120", " ") for part in pair] for pair in pairs],
        },
    )
    return made, {}


_BEGINS, _CONTINUES = "\u2581", "##"


def _words(tokens: _Tokens) -> tuple[Json, dict[str, bytes]]:
    """WordPiece: in a file what begins a word is marked, in a tokenizer.json what continues one."""
    tokens.texts = [
        text if kind == CONTROL else text.removeprefix(_BEGINS) if text.startswith(_BEGINS) else _CONTINUES + text
        for text, kind in zip(tokens.texts, tokens.types, strict=True)
    ]
    tokens.added_types = (CONTROL, USER_DEFINED)
    made = _tokenizer(
        tokens,
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, **_normalized(tokens)},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=_template(tokens, (True, True), words=True),
        decoder={"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        model={},
    )
    made["model"] = {
        **{"type": "WordPiece", "unk_token": _unknown(tokens) or "[UNK]", "continuing_subword_prefix": _CONTINUES},
        **{"max_input_chars_per_word": 100, "vocab": tokens.vocab()},
    }
    return made, {}


def _normalized(tokens: _Tokens) -> Json:
    """Return whether letters lose case and accents."""
    lower = tokens.flag("normalizer.lowercase")
    return {"lowercase": lower is not False, "strip_accents": tokens.flag("normalizer.strip_accents")}


def _bert_config(tokens: _Tokens) -> Json:
    """Return what tokenizer_config.json says of a tokenizer of BERT's, whose first token is not called BOS."""
    how = _normalized(tokens)
    found = {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True}
    found |= {"do_lower_case": how["lowercase"], "strip_accents": how["strip_accents"]}
    first = tokens.special().get("bos")
    return found | ({} if first is None else {"cls_token": first})


def _nothing(tokens: _Tokens) -> Json:
    return {}


def _unknown(tokens: _Tokens) -> str | None:
    found = (text for text, kind in zip(tokens.texts, tokens.types, strict=True) if kind == UNKNOWN)
    return tokens.special().get("unk") or next(found, None)


def _sentencepiece(tokens: _Tokens, scores: list[float], prefix: bool) -> bytes:
    """Return a tokenizer.model, a protobuf message: pieces, and of the training only what is needed to encode."""
    size = len(tokens.texts)
    while size and (tokens.is_filler(size - 1) or tokens.types[size - 1] == UNUSED and scores[size - 1] == -10000.0):
        size -= 1
    ids = {kind: tokens.model.get(f"tokenizer.ggml.{_ID_NAMES.get(kind, kind)}_token_id") for kind in KINDS}
    unknown = next((i for i, kind in enumerate(tokens.types) if kind == UNKNOWN), 0)
    parts = [
        _bytes_field(1, _piece(tokens.texts[i], scores[i], tokens.types[i] if tokens.types[i] in range(1, 7) else 1))
        for i in range(size)
    ]
    numbers = [(3, 2), (4, size), (35, BYTE in tokens.types), (40, unknown)]
    numbers += [(at, -1 if ids[kind] is None else ids[kind]) for at, kind in ((41, "bos"), (42, "eos"), (43, "pad"))]
    trainer = b"".join(_number_field(at, int(value)) for at, value in numbers)
    normalizer = _bytes_field(1, b"identity") + _number_field(3, prefix) + _number_field(4, 0) + _number_field(5, 1)
    return b"".join((*parts, _bytes_field(2, trainer), _bytes_field(3, normalizer)))


def _piece(text: str, score: float, kind: int) -> bytes:
    data = _bytes_field(1, text.encode("utf-8", "surrogateescape"))
    return data + b"\x15" + struct.pack("<f", score) + _number_field(3, kind)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value & (1 << 64) - 1)


def _varint(value: int) -> bytes:
    return bytes(_septets(value))


def _septets(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


_WRITERS: dict[str, Callable[[_Tokens], tuple[Json, dict[str, bytes]]]] = {
    "gpt2": _bpe,
    "llama": _pieces,
    "gemma4": _merged_pieces,
    "bert": _words,
}
#: What tokenizer_config.json says of a kind beside what all say.
_OF_KIND: dict[str, Callable[[_Tokens], Json]] = {"bert": _bert_config}
