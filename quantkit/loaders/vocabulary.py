"""Requirements of the loaders on the tokenizer's keys.

Source: llama_vocab::impl::load in src/llama-vocab.cpp of llama.cpp b11434 and ik_llama.cpp 8337e4cd3, which checks
fewer kinds.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.formats.gguf import Field, ValueType
from quantkit.loaders.metadata import WrongKind, read_key
from quantkit.loaders.problems import Problem, ProblemKind
from quantkit.loaders.table import table

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_SCORES, _TYPES = "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"

#: Tokenizers by the name of their model; BPE has pre-tokenizers.
_MODELS = {
    "llama.cpp": {"llama", "bert", "gpt2", "hybriddna", "whitespace", "t5", "rwkv", "test", "plamo2", "gemma4"},
    "ik_llama.cpp": {"llama", "bert", "gpt2", "t5", "rwkv", "plamo2", "gemma4"},
}
_BPE = {"gpt2", "hybriddna", "whitespace", "gemma4"}
_NONE = {"no_vocab", "none"}

#: llama.cpp's type of tokens for single bytes.
_BYTE = 6

#: Keys of special tokens: all UINT32.
# fmt: off
_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in (
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "prefix", "suffix", "middle",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
))
# fmt: on
_FLAGS = tuple(
    f"tokenizer.ggml.{name}"
    for name in ("add_space_prefix", "remove_extra_whitespaces", "add_bos_token", "add_eos_token", "add_sep_token")
)
#: Flags that only llama.cpp reads.
_NORMALIZER = ("tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary's size and problems."""

    n_tokens: int
    n_token_types: int
    problems: tuple[Problem, ...] = ()
    #: Whether the vocabulary is only a size.
    absent: bool = False


def read_vocabulary(runtime: str, arch: str, fields: Mapping[str, Field]) -> Vocabulary:
    """Return the vocabulary that a runtime reads from metadata."""
    n_types = _number(fields.get("tokenizer.ggml.token_type_count"))
    if _text(fields, _MODEL) in _NONE:
        return Vocabulary(_number(fields.get(f"{arch}.vocab_size")), n_types, absent=True)
    tokens = fields.get(_TOKENS)
    n_tokens = tokens.count if tokens is not None and tokens.type is ValueType.ARRAY else 0
    return Vocabulary(n_tokens, n_types, tuple(_problems(runtime, fields)))


def _number(field: Field | None) -> int:
    return int(field.value) if field is not None and field.type is ValueType.UINT32 else 0


def _text(fields: Mapping[str, Field], key: str) -> str | None:
    field = fields.get(key)
    return field.value if field is not None and field.type is ValueType.STRING else None


def _problem(key: str, detail: str) -> Problem:
    return Problem(ProblemKind.VOCABULARY, key, detail)


def _problems(runtime: str, fields: Mapping[str, Field]) -> Iterator[Problem]:
    """Yield the problems of a tokenizer."""
    yield from _wrong_kinds(runtime, fields)
    model = _text(fields, _MODEL)
    if model is None:
        if _MODEL not in fields:
            yield _problem(_MODEL, "missing")
        return
    if model not in _MODELS[runtime]:
        yield _problem(_MODEL, f"no tokenizer {model}")
        return
    if model in _BPE:
        yield from _bpe_problems(runtime, fields, model)
    if model == "t5":
        yield from _charsmap_problems(fields)
    if model == "plamo2":
        yield from _byte_token_problems(fields)
    yield from _token_problems(fields, strict=runtime == "llama.cpp")


def _wrong_kinds(runtime: str, fields: Mapping[str, Field]) -> Iterator[Problem]:
    flags = _FLAGS + _NORMALIZER if runtime == "llama.cpp" else _FLAGS
    kinds = dict.fromkeys(_IDS, "u32") | dict.fromkeys(flags, "bool")
    kinds |= {_MODEL: "str", _PRE: "str", "tokenizer.ggml.token_type_count": "u32"}
    for key, kind in kinds.items():
        try:
            read_key(fields, key, kind, None)
        except WrongKind as e:
            yield _problem(key, str(e))


def _bpe_problems(runtime: str, fields: Mapping[str, Field], model: str) -> Iterator[Problem]:
    pre = "gemma4" if model == "gemma4" else _text(fields, _PRE) or "default"
    merges = fields.get(_MERGES)
    if merges is None:
        if pre != "kimi-k2":
            yield _problem(_MERGES, "missing")
    elif merges.item_type is not ValueType.STRING:
        yield _problem(_MERGES, f"{merges.describe()}, not an array of STRING")
    if pre not in table(runtime).pre_tokenizers:
        yield _problem(_PRE, f"no pre-tokenizer {pre}")


def _charsmap_problems(fields: Mapping[str, Field]) -> Iterator[Problem]:
    field = fields.get(_CHARSMAP)
    if field is None:
        return
    if field.item_type not in (ValueType.UINT8, ValueType.INT8):
        yield _problem(_CHARSMAP, f"{field.describe()}, not an array of bytes")
        return
    data = field.array.tobytes()
    if len(data) < 4 or struct.unpack_from("<I", data)[0] + 4 >= len(data):
        yield _problem(_CHARSMAP, "cut off")


def _byte_token_problems(fields: Mapping[str, Field]) -> Iterator[Problem]:
    """Yield the first byte without its own token."""
    tokens, types = fields.get(_TOKENS), fields.get(_TYPES)
    if tokens is None or tokens.item_type is not ValueType.STRING:
        return
    # The byte of token 0 counts as missing, as in the loader.
    typed = types.array.tolist() if types is not None and types.item_type is ValueType.INT32 else []
    byte_tokens = {text for text, kind in zip(tokens.value[1:], typed[1:], strict=False) if kind == _BYTE}
    if missing := next((f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in byte_tokens), ""):
        yield _problem(_TOKENS, f"no token for the byte {missing}")


def _token_problems(fields: Mapping[str, Field], *, strict: bool) -> Iterator[Problem]:
    tokens = fields.get(_TOKENS)
    if tokens is None:
        yield _problem(_TOKENS, "missing")
        return
    if tokens.item_type is not ValueType.STRING:
        yield _problem(_TOKENS, f"{tokens.describe()}, not an array of STRING")
        return
    for key, types in ((_SCORES, {ValueType.FLOAT32, ValueType.INT32}), (_TYPES, {ValueType.INT32})):
        field = fields.get(key)
        if field is None:
            continue
        if field.type is not ValueType.ARRAY or (strict and field.item_type not in types):
            yield _problem(key, f"{field.describe()}, not an array of {min(types).name}")
        elif field.count < tokens.count:
            yield _problem(key, f"{field.count} items for {tokens.count} tokens")
    if repeated := _first_repeated(tokens.value):
        yield _problem(_TOKENS, f"token {repeated!r} occurs twice")
    suppressed = fields.get("tokenizer.ggml.suppress_tokens")
    if strict and suppressed is not None and suppressed.item_type is not ValueType.INT32:
        yield _problem(suppressed.key, f"{suppressed.describe()}, not an array of INT32")


def _first_repeated(tokens: list[str]) -> str:
    """Return the first token that occurs more than once, "" if none does; empty tokens are renamed by the loader."""
    if len(set(tokens)) == len(tokens):
        return ""
    counts = Counter(filter(None, tokens))
    return next((token for token, count in counts.items() if count > 1), "")
