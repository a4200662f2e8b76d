"""The files of a checkpoint's tokenizer, read once, and its tokens as transformers 4.57.6 would have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Config, Json, large_json, optional_json
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.vocab import pairs, vocab_txt
from quantkit.checkpoint.vocab.pre_hashes import PRE_HASHES, TEXT
from quantkit.errors import FormatError, ResourceError
from quantkit.formats.gguf.rules import short

#: Token types of llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: More tokens than any vocabulary has.
MAX_TOKENS = 1 << 24
#: More unused tokens behind the others than any vocabulary has.
MAX_PADDING = 1 << 16
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Classes that replace what tokenizer.json does after encoding: BOS, and perhaps EOS, around the text.
_OWN_TEMPLATE = ("Llama", "CodeLlama", "Gemma", "Cohere")
_END = "<|endoftext|>"
#: Special tokens that classes have where tokenizer_config.json does not speak of them (null is to speak of them).
_CLASS_TOKENS: dict[str, Json] = {
    **dict.fromkeys(("Llama", "CodeLlama"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "Cohere": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
    **dict.fromkeys(("GPT2", "GPTNeoX", "CodeGen"), {"bos_token": _END, "eos_token": _END, "unk_token": _END}),
    "Qwen2": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    **dict.fromkeys(vocab_txt.CLASSES, vocab_txt.TOKENS),
    "Roberta": {
        **{"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "Bloom": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
#: Model types whose class is one of those, where tokenizer_config.json names none.
_CLASS_OF_TYPE = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "mistral3", "llama4", "llama4_text", "phi3", "phimoe"), "Llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("cohere", "cohere2"), "Cohere"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid", "starcoder2", "exaone4", "olmo3"), "GPT2"),
    **dict.fromkeys(("olmo2", "olmoe", "stablelm"), "GPTNeoX"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2"),
    **{"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta"},
}


@dataclass(frozen=True)
class AddedToken:
    """A token beside those of the model in tokenizer.json."""

    number: int
    text: str
    special: bool
    normalized: bool


class Vocabulary:
    """The tokenizer of the checkpoint in ``folder``, to be written to ``keys``. ``pre`` is --pre."""

    def __init__(self, folder: Path, config: Config, keys: Keys, pre: str | None = None) -> None:
        self.folder, self.config, self.keys, self.pre = folder, config, keys, pre

    def has(self, name: str) -> bool:
        """Tell whether there is a file."""
        return (self.folder / name).is_file()

    @cached_property
    def tokenizer_config(self) -> Json:
        """tokenizer_config.json, {} if there is none."""
        return optional_json(self.folder / "tokenizer_config.json") or {}

    @cached_property
    def json(self) -> Json:
        """tokenizer.json; without one, what vocab.txt, or vocab.json and merges.txt make."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return large_json(path)
        if self._is_list:
            return vocab_txt.made_json(self.folder, self.settings)
        if all(map(self.has, pairs.FILES)):
            listed = "added_tokens_decoder" in self.tokenizer_config
            return pairs.made_json(self.folder, self.class_name, self.settings, listed)
        raise FormatError(
            f"{self.folder}: it has no tokenizer.json, so there is no vocabulary: add that of the model it is from"
        )

    @property
    def _is_list(self) -> bool:
        """Its tokens are in a vocab.txt."""
        others = self.has("tokenizer.json") or self.class_name not in vocab_txt.CLASSES
        return not others and self.has(vocab_txt.FILE)

    @property
    def where(self) -> Path:
        """Where the tokens are from, for messages."""
        path = self.folder / "tokenizer.json"
        if self._is_list:
            return self.folder / vocab_txt.FILE
        return path if path.is_file() or not self.has(pairs.FILES[0]) else self.folder / pairs.FILES[0]

    @cached_property
    def model(self) -> Json:
        """The model of tokenizer.json."""
        found = self.json.get("model")
        if not isinstance(found, dict):
            raise FormatError(f"{self.where}: it has no model")
        return found

    @cached_property
    def base(self) -> dict[str, int]:
        """The tokens of the model, without added ones."""
        vocab = self.model.get("vocab")
        if isinstance(vocab, list):  # Unigram
            pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocab)
            vocab = {text: i for i, text in enumerate(pieces) if isinstance(text, str)}
        if not isinstance(vocab, dict) or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MAX_TOKENS for i in vocab.values()
        ):
            raise FormatError(f"{self.where}: model.vocab is no table of tokens and their ids")
        return vocab

    @property
    def added_in_json(self) -> Iterator[AddedToken]:
        """The added tokens of tokenizer.json, as they are listed."""
        for entry in self._entries(self.json.get("added_tokens") or [], self.where):
            number = entry.get("id")
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_TOKENS:
                raise FormatError(f"{self.where}: the added token {short(entry.get('content'))} has no id")
            yield AddedToken(number, entry["content"], bool(entry.get("special")), bool(entry.get("normalized")))

    @cached_property
    def added(self) -> dict[str, AddedToken]:
        """Added tokens by their text: of tokenizer.json, of tokenizer_config.json, and special ones of neither."""
        found: dict[str, AddedToken] = {}
        for token in self.added_in_json:
            self._add(found, token.text, token.special, token.normalized, token.number)
        special = self.special_texts
        for _, entry in self.listed:
            is_special = bool(entry.get("special")) or entry["content"] in special
            self._add(found, entry["content"], is_special, bool(entry.get("normalized", not is_special)))
        for text, normalized in special.items():
            if text not in found:
                self._add(found, text, True, normalized)
        return found

    @property
    def listed(self) -> list[tuple[int, Json]]:
        """Tokens that tokenizer_config.json lists, and their ids, in the order of these."""
        listed = self.tokenizer_config.get("added_tokens_decoder") or {}
        where = self.folder / "tokenizer_config.json"
        if not isinstance(listed, dict) or not all(str(key).isdecimal() and len(str(key)) < 10 for key in listed):
            raise FormatError(f"{where}: added_tokens_decoder is no table of tokens by id")
        found = sorted(((int(key), entry) for key, entry in listed.items()), key=lambda item: item[0])
        return list(zip((number for number, _ in found), self._entries([e for _, e in found], where), strict=True))

    @staticmethod
    def _entries(entries: Any, where: Path) -> Iterator[Json]:
        if not isinstance(entries, list):
            raise FormatError(f"{where}: added_tokens is {short(entries)}, not a list")
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise FormatError(f"{where}: the added token {short(entry)} has no content")
            yield entry

    def _add(
        self, found: dict[str, AddedToken], text: str, special: bool, normalized: bool, number: int | None = None
    ) -> None:
        if not text:
            return
        if text in found:
            number = found[text].number
        elif text in self.base:
            number = self.base[text]
        elif number is None:
            last = max((token.number for token in found.values()), default=-1)
            number = last + 1 if last >= len(self.base) or not self.base else len(self.base)
        found[text] = AddedToken(number, text, special, normalized)

    @property
    def class_name(self) -> str:
        """Its class in transformers, without what all are called: Llama, GPT2; "" if nothing names one."""
        name = str(self.tokenizer_config.get("tokenizer_class") or "")
        name = name or _CLASS_OF_TYPE.get(str(self.config.outer.get("model_type")), "")
        return name.removesuffix("Fast").removesuffix("Tokenizer")

    @cached_property
    def settings(self) -> Json:
        """tokenizer_config.json over special_tokens_map.json over what the class has."""
        named = optional_json(self.folder / "special_tokens_map.json") or {}
        return {**_CLASS_TOKENS.get(self.class_name, {}), **named, **self.tokenizer_config}

    @property
    def special_texts(self) -> dict[str, bool]:
        """Special tokens by their text; True: text is normalized before it is searched for them."""
        config = self.settings
        more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        tokens = [config.get(name) for name in _NAMED] + (list(more) if isinstance(more, list) else [])
        found: dict[str, bool] = {}
        for token in tokens:
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                found.setdefault(text, bool(token.get("normalized")) if isinstance(token, dict) else False)
        return found

    @cached_property
    def by_id(self) -> dict[int, str]:
        """All tokens by their id."""
        return {**{i: text for text, i in self.base.items()}, **{t.number: t.text for t in self.added.values()}}

    @cached_property
    def library(self) -> Any:
        """The tokenizer as the package tokenizers runs it, set up as transformers does."""
        try:
            import tokenizers
            from tokenizers import pre_tokenizers
        except ImportError:
            raise ResourceError(
                f"{self.where}: to tell its pre-tokenizer the package tokenizers is needed: "
                "pip install 'gguf-quantkit[convert]', or name it with --pre"
            ) from None
        is_bpe = self.model.get("type", "BPE") == "BPE"
        if is_bpe and self.model.get("continuing_subword_prefix"):  # the package panics where a merge lacks it
            raise FormatError(f"{self.where}: model.continuing_subword_prefix is not empty: no byte-level BPE")
        try:
            if self.has("tokenizer.json"):
                made = tokenizers.Tokenizer.from_buffer(self.where.read_bytes())
            else:
                made = tokenizers.Tokenizer.from_str(json.dumps(self.json))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # the package raises nothing narrower, and its panics are no Exceptions
            raise FormatError(f"{self.where}: {short(str(e))}") from None
        for token in self.added.values():
            made.add_tokens([tokenizers.AddedToken(token.text, special=token.special, normalized=token.normalized)])
        state = self.json.get("pre_tokenizer") or {}
        wanted = bool(self.tokenizer_config.get("add_prefix_space", False))
        if state.get("type") == "ByteLevel" and state.get("add_prefix_space", wanted) != wanted:
            made.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=wanted, use_regex=bool(state.get("use_regex", True))
            )
        self._set_normalizer(made)
        self._set_template(made)
        return made

    def _set_normalizer(self, made: Any) -> None:
        """Change BERT's normalizer where tokenizer_config.json says otherwise."""
        state = self.json.get("normalizer")
        if self.class_name not in vocab_txt.CLASSES or not isinstance(state, dict):
            return
        from tokenizers import normalizers

        wanted = vocab_txt.normalizer(self.settings)
        if state.get("type") == "BertNormalizer" and any(state.get(k, v) != v for k, v in wanted.items()):
            made.normalizer = normalizers.BertNormalizer(clean_text=bool(state.get("clean_text", True)), **wanted)

    def _set_template(self, made: Any) -> None:
        """Put BOS and EOS around texts, as some classes of transformers do whatever the file says."""
        if self._is_list:
            around = (("cls", True, 0), ("sep", True, 2))
        elif self.class_name in _OWN_TEMPLATE:
            around = (("bos", True, 0), ("eos", False, 2))
        else:
            return
        from tokenizers.processors import TemplateProcessing

        single, tokens = ["$A:0"], []
        for key, default, place in around:
            token = self.settings.get(f"{key}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if self.tokenizer_config.get(f"add_{key}_token", default) and isinstance(text, str):
                single.insert(place, f"{text}:0")
                tokens.append((text, made.token_to_id(text)))
        made.post_processor = TemplateProcessing(single=" ".join(single), special_tokens=tokens)

    @cached_property
    def pre_name(self) -> str:
        """The name of the pre-tokenizer: that of --pre, or of the hash of what it makes of one text."""
        if self.pre is not None:
            return self.pre
        found = sha256(str(self._ids(TEXT)).encode()).hexdigest()
        if found not in PRE_HASHES and self.model.get("type") == "WordPiece":
            raise FormatError(
                f"{self.where}: its pre-tokenizer is not known (hash {found}); it is one of words and pieces, which "
                "llama.cpp splits in one way whatever it is called: name it with --pre jina-v2-en"
            )
        if found not in PRE_HASHES:
            from quantkit.checkpoint.vocab.nearest import advice  # it loads all of llama.cpp's pre-tokenizers

            tried = advice(self.library, bool(self.model.get("ignore_merges", False)))
            raise FormatError(
                f"{self.where}: its pre-tokenizer is not known (hash {found}), and llama.cpp tokenizes by its name: "
                f"{tried}; see `quantkit inspect` on a GGUF file of the model, if there is one, for tokenizer.ggml.pre"
            )
        return PRE_HASHES[found][0]

    def spelled(self, token: AddedToken) -> str:
        """Return the text of an added token as encoding and decoding leave it."""
        if self.pre is not None:
            try:
                return self._round_trip(token.text)
            except ResourceError:
                return token.text
        return self._round_trip(token.text)

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            found: list[int] = self.library.encode(text, add_special_tokens=add_special_tokens).ids
        except (KeyboardInterrupt, SystemExit, FormatError, ResourceError):
            raise
        except BaseException as e:  # such as a token for what is unknown that the vocabulary lacks
            raise FormatError(f"{self.where}: {short(str(e))}") from None
        return found

    def _round_trip(self, text: str) -> str:
        ids = self._ids(text, add_special_tokens=False)
        return clean_up(self.library.decode(ids, skip_special_tokens=False), self.tokenizer_config)


def clean_up(text: str, config: Json) -> str:
    """Remove spaces before punctuation, as transformers does where its configuration asks for it."""
    if config.get("clean_up_tokenization_spaces", False):
        for mark in (".", "?", "!", ","):
            text = text.replace(f" {mark}", mark)
        text = text.replace(" ' ", "'")
        for end in ("n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(f" {end}", end)
    return text


def looks_special(text: str) -> bool:
    """Tell whether a token is one for control although it is not marked so."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))  # noqa: RUF001 - DeepSeek's
        or (text.startswith("<unused") and text.endswith(">"))
    )


def checked_size(v: Vocabulary, size: Any, highest: int) -> int:
    """Return the size of a vocabulary; FormatError if it does not hold its tokens."""
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_TOKENS:
        raise FormatError(f"{v.config.path}: vocab_size is {short(size)}")
    if size - len(v.by_id) > MAX_PADDING:
        raise FormatError(f"{v.config.path}: vocab_size is {size}, but {v.where.name} has {len(v.by_id)} tokens")
    if highest >= size:
        raise FormatError(
            f"{v.where}: it has a token {highest}, but vocab_size of config.json is {size}: one of them is of "
            "another model"
        )
    return size


def dump(value: Json) -> str:
    """Return an object as JSON that is the same for the same object."""
    return json.dumps(value, sort_keys=True)
