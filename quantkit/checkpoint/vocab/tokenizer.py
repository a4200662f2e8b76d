"""The files of a checkpoint's tokenizer, read once, and its tokens as in transformers 4.57.6."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import MAX_JSON, Config, Json, large_json, optional_json
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.vocab import tokenizer_json
from quantkit.checkpoint.vocab.pre_tokenizers import PRE_HASHES, TEXT, advice
from quantkit.errors import FormatError, ResourceError
from quantkit.extras import PRE_TOKENIZER, missing_packages
from quantkit.foreign.child import Child, Limits
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

#: Token types of llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: More tokens than any vocabulary has.
MAX_TOKENS = 1 << 24
#: Maximum number of unused tokens after the vocabulary.
MAX_PADDING = 1 << 16
#: Placeholder for the id of an added token that follows all others.
_NEXT = -1
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Classes that replace the post-processor of tokenizer.json: BOS, and perhaps EOS, around the text.
_OWN_TEMPLATE = ("Llama", "CodeLlama", "Gemma", "Cohere")
_END = "<|endoftext|>"
#: Resource limits of the tokenizers package: a vocabulary of 256 Ki tokens needs some seconds, and 500 MB.
LIMITS = Limits(seconds=60, memory=4 << 30, answers=64 << 20)
#: Special tokens of classes, used if tokenizer_config.json lacks the key (null counts as present).
_CLASS_TOKENS: dict[str, Json] = {
    **dict.fromkeys(("Llama", "CodeLlama"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "Cohere": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
    **dict.fromkeys(("GPT2", "GPTNeoX", "CodeGen"), {"bos_token": _END, "eos_token": _END, "unk_token": _END}),
    "Qwen2": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    **dict.fromkeys(tokenizer_json.CLASSES, tokenizer_json.TOKENS),
    "Roberta": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Bloom": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
#: Model types with one of these classes, if tokenizer_config.json names none.
_CLASS_OF_TYPE = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "mistral3", "llama4", "llama4_text", "phi3", "phimoe"), "Llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("cohere", "cohere2"), "Cohere"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid", "starcoder2", "exaone4", "olmo3"), "GPT2"),
    **dict.fromkeys(("olmo2", "olmoe", "stablelm"), "GPTNeoX"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2"),
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
}


class Vocabulary:
    """The tokenizer of the checkpoint in ``folder``, to be written to ``keys``. ``pre`` is --pre.

    ``config``: of the model. ``owner``: of the checkpoint in ``folder``, if that is another one, a draft's target.
    """

    def __init__(
        self, folder: Path, config: Config, keys: Keys, pre: str | None = None, owner: Config | None = None
    ) -> None:
        self.folder = folder
        self.config = config
        self.owner = owner or config
        self.keys = keys
        self.pre = pre
        #: Returns the test text and its ids from the files that were read, or the reason why quantkit cannot run them;
        #: set by the writer.
        #: Of Mistral's own format: llama.cpp's chat template is used if the checkpoint has none.
        self.community_template = True
        self.source: Callable[[], tuple[str, list[int]]] | str = "quantkit cannot run its tokenizer"

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.folder / name).exists()

    @cached_property
    def tokenizer_config(self) -> Json:
        """tokenizer_config.json, {} if absent."""
        return optional_json(self.folder / "tokenizer_config.json") or {}

    @cached_property
    def json(self) -> Json:
        """tokenizer.json, or its equivalent from vocab.txt, or from vocab.json and merges.txt."""
        path = self.folder / "tokenizer.json"
        if path.exists():
            return large_json(path)
        if self._is_list:
            return tokenizer_json.json_from_vocab_txt(self.folder, self.settings)
        if all(map(self.has, tokenizer_json.MERGES_FILES)):
            lists_added = "added_tokens_decoder" in self.tokenizer_config
            return tokenizer_json.json_from_merges(self.folder, self.class_name, self.settings, lists_added)
        raise FormatError(
            f"{self.folder}: has no tokenizer.json, so the vocabulary is missing: copy the tokenizer of the original "
            "model",
            "QK-E114",
        )

    @property
    def _is_list(self) -> bool:
        """Whether its tokens are in a vocab.txt."""
        has_other = self.has("tokenizer.json") or self.class_name not in tokenizer_json.CLASSES
        return not has_other and self.has(tokenizer_json.VOCAB_TXT)

    @property
    def where(self) -> Path:
        """The file that the tokens are from, for messages."""
        path = self.folder / "tokenizer.json"
        if self._is_list:
            return self.folder / tokenizer_json.VOCAB_TXT
        return (
            path
            if path.exists() or not self.has(tokenizer_json.MERGES_FILES[0])
            else self.folder / tokenizer_json.MERGES_FILES[0]
        )

    @cached_property
    def model(self) -> Json:
        """The model of tokenizer.json."""
        model = self.json.get("model")
        if not isinstance(model, dict):
            raise FormatError(f"{self.where}: has no model", "QK-E114")
        return model

    @property
    def model_type(self) -> str:
        """The type of tokenizer.json's model: BPE, WordPiece, Unigram, ..; old files omit it for BPE."""
        return str(self.model.get("type") or "BPE")

    def check_model(self, expected: str) -> None:
        """Raise FormatError if the model of tokenizer.json is not of the requested type."""
        if self.model_type != expected:
            raise FormatError(
                f"{self.where}: its model is {short(self.model_type)}, but this class needs {expected}: copy the "
                "tokenizer of the original model",
                "QK-E114",
            )

    @cached_property
    def base(self) -> dict[str, int]:
        """The tokens of the model, without added ones."""
        vocab = self.model.get("vocab")
        if isinstance(vocab, list):  # Unigram
            pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocab)
            vocab = {text: i for i, text in enumerate(pieces) if isinstance(text, str)}
        if not isinstance(vocab, dict) or not _are_ids(vocab.values()):
            raise FormatError(f"{self.where}: model.vocab is not a table of tokens and ids", "QK-E114")
        return vocab

    @property
    def added_in_json(self) -> Iterator[AddedToken]:
        """The added tokens of tokenizer.json, in order."""
        for entry in self._entries(self.json.get("added_tokens") or [], self.where):
            number = entry.get("id")
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_TOKENS:
                raise FormatError(f"{self.where}: the added token {short(entry.get('content'))} has no id", "QK-E114")
            yield AddedToken.from_entry(number, entry, bool(entry.get("special")), bool(entry.get("normalized")))

    @cached_property
    def added(self) -> dict[str, AddedToken]:
        """Added tokens by text: from tokenizer.json, from tokenizer_config.json, and special tokens in neither."""
        tokens: dict[str, AddedToken] = {}
        next_id = len(self.base)

        def enter(token: AddedToken) -> None:
            """Keep the id of a text; a new text gets the next free one."""
            nonlocal next_id
            number_in_model = (
                tokens[token.text].number if token.text in tokens else self.base.get(token.text, token.number)
            )
            number = next_id if number_in_model == _NEXT else number_in_model
            tokens[token.text] = replace(token, number=number)
            next_id = max(next_id, number + 1)

        special = self.special_texts
        for token in self.added_in_json:
            enter(token)
        for _, entry in self.decoder_entries:
            is_special = bool(entry.get("special")) or entry["content"] in special
            normalized = bool(entry.get("normalized", not is_special))
            enter(AddedToken.from_entry(_NEXT, entry, is_special, normalized))
        for text, normalized in special.items():
            if text not in tokens:
                enter(AddedToken(_NEXT, text, True, normalized))
        tokens.pop("", None)
        return tokens

    @property
    def named_texts(self) -> set[str]:
        """Texts of the special tokens in tokenizer_config.json."""
        values = (*self.tokenizer_config.values(), *(entry for _, entry in self.decoder_entries))
        contents = (value.get("content") if isinstance(value, dict) else value for value in values)
        return {content for content in contents if isinstance(content, str)}

    @property
    def decoder_entries(self) -> list[tuple[int, Json]]:
        """Tokens that tokenizer_config.json lists, and their ids, in the order of these."""
        table = self.tokenizer_config.get("added_tokens_decoder") or {}
        where = self.folder / "tokenizer_config.json"
        if not isinstance(table, dict) or not all(str(key).isdecimal() and len(str(key)) < 10 for key in table):
            raise FormatError(f"{where}: added_tokens_decoder is not a table of tokens by id", "QK-E114")
        entries = sorted(((int(key), entry) for key, entry in table.items()), key=lambda item: item[0])
        return list(zip((number for number, _ in entries), self._entries([e for _, e in entries], where), strict=True))

    @staticmethod
    def _entries(entries: Any, where: Path) -> Iterator[Json]:
        if not isinstance(entries, list):
            raise FormatError(f"{where}: added_tokens is {short(entries)}, not a list", "QK-E114")
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise FormatError(f"{where}: the added token {short(entry)} has no content", "QK-E114")
            yield entry

    @property
    def class_name(self) -> str:
        """The tokenizer's class in transformers without suffixes: Llama, GPT2; "" if unknown."""
        name = str(self.tokenizer_config.get("tokenizer_class") or "")
        name = name or _CLASS_OF_TYPE.get(str(self.owner.outer.get("model_type")), "")
        return name.removesuffix("Fast").removesuffix("Tokenizer")

    @cached_property
    def settings(self) -> Json:
        """tokenizer_config.json over special_tokens_map.json over the defaults of the class."""
        special_tokens = optional_json(self.folder / "special_tokens_map.json") or {}
        return {**_CLASS_TOKENS.get(self.class_name, {}), **special_tokens, **self.tokenizer_config}

    @property
    def special_texts(self) -> dict[str, bool]:
        """Special tokens by their text; True: the input is normalized before the search for them."""
        config = self.settings
        extra = config.get("extra_special_tokens") or []
        additional = config.get("additional_special_tokens") or extra
        tokens = [config.get(name) for name in _TOKEN_KEYS] + (list(additional) if isinstance(additional, list) else [])
        tokens += extra.values() if isinstance(extra, dict) else []
        texts: dict[str, bool] = {}
        for token in tokens:
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                texts.setdefault(text, bool(token.get("normalized")) if isinstance(token, dict) else False)
        return texts

    @cached_property
    def by_id(self) -> dict[int, str]:
        """All tokens by their id."""
        return {**{i: text for text, i in self.base.items()}, **{t.number: t.text for t in self.added.values()}}

    def run(self) -> None:
        """Use the checkpoint's tokenizer as the source of the compared ids.

        Its process starts now and reads tokenizer.json in parallel.
        """
        self.source = self.difficult
        if not PRE_TOKENIZER.missing() and self.has("tokenizer.json"):
            self._child.start()

    @cached_property
    def _child(self) -> Child:
        """The process of ``library``, with the tokenizer of tokenizer.json loaded."""

        def data() -> bytes:
            if self.has("tokenizer.json"):
                return read_whole(self.where, MAX_JSON)
            return json.dumps(self.json).encode()

        return Child("quantkit.foreign.tokenizer:Tokenizer", str(self.where), limits=LIMITS, data=data)

    @cached_property
    def library(self) -> Child:
        """A child process with the tokenizer of the tokenizers package: a ``foreign.tokenizer.Tokenizer``."""
        if PRE_TOKENIZER.missing():
            raise missing_packages(PRE_TOKENIZER, hint=f"or set that of {self.where} with --pre")
        # tokenizers panics if a merge lacks the prefix
        if self.model_type == "BPE" and self.model.get("continuing_subword_prefix"):
            raise FormatError(
                f"{self.where}: model.continuing_subword_prefix is not empty: not a byte-level BPE", "QK-E114"
            )
        added = [(token.text, token.options) for token in self.added.values()]
        changes = (self._byte_level, self._bert_normalizer, self._affixes)
        self._child.call("adapt", added, *changes)
        return self._child

    @property
    def _byte_level(self) -> dict[str, bool] | None:
        """The pre-tokenizer of tokenizer.json, unless tokenizer_config.json overrides it."""
        state = self.json.get("pre_tokenizer")
        add_space = bool(self.tokenizer_config.get("add_prefix_space", False))
        if (
            not isinstance(state, dict)
            or state.get("type") != "ByteLevel"
            or state.get("add_prefix_space", add_space) == add_space
        ):
            return None
        return {"add_prefix_space": add_space, "use_regex": bool(state.get("use_regex", True))}

    @property
    def _bert_normalizer(self) -> dict[str, bool] | None:
        """BERT's normalizer of tokenizer.json, unless tokenizer_config.json overrides it."""
        state = self.json.get("normalizer")
        if self.class_name not in tokenizer_json.CLASSES or not isinstance(state, dict):
            return None
        normalizer = tokenizer_json.normalizer(self.settings)
        if state.get("type") != "BertNormalizer" or all(state.get(k, v) == v for k, v in normalizer.items()):
            return None
        return {"clean_text": bool(state.get("clean_text", True)), **normalizer}

    @property
    def _affixes(self) -> tuple[list[str], list[str]] | None:
        """Tokens before and after a text, which some transformers classes add regardless of tokenizer.json."""
        if self._is_list:
            names = (("cls", True), ("sep", True))
        elif self.class_name in _OWN_TEMPLATE:
            names = (("bos", True), ("eos", False))
        else:
            return None
        before, after = (self._token_around(key, default) for key, default in names)
        return before, after

    def _token_around(self, key: str, default: bool) -> list[str]:
        token = self.settings.get(f"{key}_token")
        text = token.get("content") if isinstance(token, dict) else token
        return [text] if self.tokenizer_config.get(f"add_{key}_token", default) and isinstance(text, str) else []

    @cached_property
    def pre_name(self) -> str:
        """The name of the pre-tokenizer: --pre, or the name for a hash of the ids of a reference text."""
        if self.pre is not None:
            return self.pre
        digest = sha256(str(self.ids(TEXT, add_special_tokens=True)).encode()).hexdigest()
        if digest not in PRE_HASHES and self.model_type == "WordPiece":
            raise FormatError(
                f"{self.where}: unknown pre-tokenizer (hash {digest}); llama.cpp splits all WordPiece vocabularies in "
                "the same way: use --pre jina-v2-en",
                "QK-E115",
            )
        if digest not in PRE_HASHES:
            ends = set(self.library.call("word_ends", TEXT))
            tried = advice(ends, bool(self.model.get("ignore_merges", False)))
            raise FormatError(
                f"{self.where}: unknown pre-tokenizer (hash {digest}): {tried}; if a GGUF file of the model exists, "
                "see its tokenizer.ggml.pre in `quantkit inspect`",
                "QK-E115",
            )
        return PRE_HASHES[digest][0]

    def round_trip(self, token: AddedToken) -> str:
        """Return the text of an added token after encoding and decoding, unless it is normalized."""
        try:
            return token.text if token.normalized else self._spellings[token.text]
        except ResourceError:
            if self.pre is None:
                raise
            return token.text

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """Round trip (encode, then decode) of each added token that is not normalized, by its text."""
        texts = [token.text for token in self.added.values() if not token.normalized]
        results = self.library.call("round_trips", texts)
        return {text: clean_up(result, self.tokenizer_config) for text, result in zip(texts, results, strict=True)}

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text from the tokenizers package. Raises ResourceError without it, and FormatError."""
        ids: list[int] = self.library.call("ids", text, add_special_tokens)
        return ids

    def difficult(self) -> tuple[str, list[int]]:
        """Return the test text and its ids from the tokenizers package; errors as for ``ids``.

        For BPE, the text omits characters that its tokens cannot spell, because the package and llama.cpp differ in
        when they drop these.
        """
        text = TEXT
        if self.model_type == "BPE":
            characters = sorted(set(TEXT))
            results = self.library.call("round_trips", characters)
            spellable = {c for c, result in zip(characters, results, strict=True) if c in result}
            text = "".join(c for c in TEXT if c in spellable)
        return text, self.ids(text)


def _are_ids(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {int} and 0 <= min(values, default=0) <= max(values, default=0) < MAX_TOKENS


def clean_up(text: str, config: Json) -> str:
    """Remove spaces before punctuation, as transformers does with clean_up_tokenization_spaces."""
    if config.get("clean_up_tokenization_spaces", False):
        for mark in (".", "?", "!", ","):
            text = text.replace(f" {mark}", mark)
        text = text.replace(" ' ", "'")
        for end in ("n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(f" {end}", end)
    return text


def looks_special(text: str) -> bool:
    """Return whether a token is a control token although it is not marked as one."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))  # noqa: RUF001 - DeepSeek's
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _check_named(v: Vocabulary, size: int) -> None:
    """Refuse tokens beyond the vocabulary that are only in tokenizer_config.json, which transformers adds."""
    in_json = {token.text for token in v.added_in_json}
    token = next((t for t in v.added.values() if t.number >= size and t.text not in in_json), None)
    if token is None or token.text in v.base:
        return
    where = v.folder / "tokenizer_config.json"
    problem = (
        f"which is not in {v.where.name}; its id {token.number} exceeds the {size} tokens of vocab_size in config.json"
    )
    if token.text in _CLASS_TOKENS.get(v.class_name, {}).values() and token.text not in v.named_texts:
        raise FormatError(
            f"{where}: has no special tokens, and those of {v.class_name} include {short(token.text)}, {problem}: "
            "copy the file of the original model, or add them",
            "QK-E114",
        )
    raise FormatError(
        f"{where}: has the token {short(token.text)}, {problem}: correct its spelling, or remove it", "QK-E114"
    )


def checked_size(v: Vocabulary, size: Any, highest: int) -> int:
    """Return the size of a vocabulary. Raises FormatError if its tokens exceed it."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_TOKENS:
        raise FormatError(f"{v.config.path}: vocab_size is {short(size)}", "QK-E112")
    if size - len(v.by_id) > MAX_PADDING:
        raise FormatError(
            f"{v.config.path}: vocab_size is {size}, but {v.where.name} has {len(v.by_id)} tokens", "QK-E112"
        )
    if highest >= size:
        _check_named(v, size)
        raise FormatError(
            f"{v.where}: has a token {highest}, but vocab_size of config.json is {size}: one of them belongs to "
            "another model",
            "QK-E114",
        )
    return size


def dump(value: Json) -> str:
    """Return an object as canonical JSON."""
    return json.dumps(value, sort_keys=True)


def write_none(v: Vocabulary) -> None:
    """Set that a model has no vocabulary (TextModel._set_vocab_none)."""
    v.source = "the model has no vocabulary"
    v.keys.text("tokenizer.ggml.model", "none")


@dataclass(frozen=True)
class AddedToken:
    """An added token of tokenizer.json."""

    number: int
    text: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @classmethod
    def from_entry(cls, number: int, entry: dict[str, Any], special: bool, normalized: bool) -> AddedToken:
        """Return the token of an entry of tokenizer.json or of added_tokens_decoder."""
        flags = (bool(entry.get(key)) for key in ("lstrip", "rstrip", "single_word"))
        return cls(number, entry["content"], special, normalized, *flags)

    @property
    def options(self) -> dict[str, bool]:
        """The options of tokenizers.AddedToken."""
        return {
            "special": self.special,
            "normalized": self.normalized,
            "lstrip": self.lstrip,
            "rstrip": self.rstrip,
            "single_word": self.single_word,
        }
