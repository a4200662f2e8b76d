"""tokenizer.* keys as the files of a tokenizer that transformers loads: tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2") has its tokens and merges in the file; its pre-tokenizer follows from the name
(``pre_tokenizers``). Of SentencePiece ("llama") the file has pieces and scores: tokenizer.json gets the merges that
transformers derives from them (convert_slow_tokenizer.py, 4.57.6), and tokenizer.model the pieces themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quantkit.checkpoint.export.pre_tokenizers import pre_tokenizer
from quantkit.checkpoint.export.tokens import META, Json, Tokens, template, tokenizer_json, unknown
from quantkit.checkpoint.export.vocabularies import (
    NormalizerSettings,
    model_file,
    pieces_of,
    unigram_config,
    write_plamo,
    write_ranks,
    write_rwkv,
    write_unigram,
)
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short
from quantkit.formats.tokenizer.pre import PRE

#: llama.cpp's name of a built-in template, which RWKV files have if the model has no template.
_RWKV_WORLD = "rwkv-world"
#: The score of tokens that were added to a tokenizer.model.
_ADDED = -1000.0


def tokenizer_files(model: GGUFFile) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a tokenizer by name, and notes. Raises TypeNotSupported, FormatError."""
    kind, arch = str(model.get("tokenizer.ggml.model")), model.get("general.architecture")
    tokens = Tokens(model)
    if kind in _LISTS:
        return _list_files(tokens, kind), tokens.notes
    write = _WRITERS.get(kind)
    if write is None:
        raise TypeNotSupported(
            f"{model.paths[0]}: the vocabulary {short(kind)} is not exported by this version (supported are "
            f"{', '.join((*_WRITERS, *_LISTS))}); use --no-tokenizer, and copy the tokenizer of the original model",
            "QK-E305",
        )
    tokenizer, extra_files = write(tokens)
    config = _config(tokens) | _OF_KIND.get(kind, _no_config)(tokens)
    added = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in tokens.added_tokens()}
    if kind == "llama":
        scores = tokens.scores()
        listed_ids = {str(i) for i, score in enumerate(scores) if score == _ADDED or tokens.types[i] == USER_DEFINED}
        added = {number: entry for number, entry in added.items() if number in listed_ids}
    if added:
        config = {"added_tokens_decoder": added, **config}
    files = {"tokenizer.json": _dump(tokenizer), "tokenizer_config.json": _dump(config), **extra_files}
    if arch == "qwen":
        files |= write_ranks(tokens)
    if arch == "internlm2" and (beyond := _tokens_without_embedding(tokens)):
        files["added_tokens.json"] = _dump(beyond)
    return files, tokens.notes


def _list_files(tokens: Tokens, kind: str) -> dict[str, bytes]:
    """Return the files of a tokenizer that only remote code reads."""
    write, class_name = _LISTS[kind]
    tokens.notes.append(
        f"only the original model's code ({class_name}) reads this tokenizer: copy its tokenization_*.py to this "
        "directory"
    )
    return write(tokens) | {"tokenizer_config.json": _dump(_config(tokens) | {"tokenizer_class": class_name})}


def _tokens_without_embedding(tokens: Tokens) -> Json:
    """Return added tokens without an embedding, by text (InternLM 2)."""
    table = tokens.model.tensors.get("token_embd.weight")
    first = len(tokens.texts) if table is None else table.shape[-1]
    return {text: number for number, text in enumerate(tokens.texts) if number >= first}


def _dump(value: Json) -> bytes:
    """Return a JSON object with one entry per line; Python's indent is slow for long vocabularies."""
    try:
        return _lines(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # bytes of a token that are not UTF-8
        return _lines(value, ensure_ascii=True).encode()


def _lines(value: Json, *, ensure_ascii: bool) -> str:
    entries = (f"  {json.dumps(key)}: {json.dumps(part, ensure_ascii=ensure_ascii)}" for key, part in value.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _config(tokens: Tokens) -> Json:
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
    chat = tokens.model.get("tokenizer.chat_template")
    if chat == _RWKV_WORLD:
        return config
    names = tokens.model.get("tokenizer.chat_templates")
    if names is not None and len(names):
        named_templates = [(str(name), tokens.model.get(f"tokenizer.chat_template.{name}")) for name in names]
        templates = [*([("default", chat)] if chat else []), *named_templates]
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates if text]
    elif chat:
        config["chat_template"] = chat
    return config


def _write_bpe(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    name = str(tokens.model.get("tokenizer.ggml.pre", "default"))
    try:
        normalizer, pre = pre_tokenizer(name)
    except TypeNotSupported as e:
        raise TypeNotSupported(f"{tokens.where}: {e.message}", "QK-E305") from None
    vocab = tokens.vocab(without=(CONTROL, USER_DEFINED, UNKNOWN))
    added_ids = range(len(vocab), len(vocab) + len(tokens.added_tokens()))
    if [token["id"] for token in tokens.added_tokens()] != list(added_ids):  # or other tokens would get their ids
        vocab = tokens.vocab()
    merges = tokens.merges()
    if not merges:
        raise FormatError(f"{tokens.where}: a BPE vocabulary without tokenizer.ggml.merges", "QK-E123")
    pairs = _usable_merges(tokens, vocab, [_pair(tokens, merge) for merge in merges])
    row = PRE[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = tokenizer_json(
        tokens,
        normalizer=normalizer,
        pre_tokenizer=pre,
        post_processor=template(tokens, (row.add_bos, False)) or {**byte_level, "trim_offsets": False},
        decoder=byte_level,
        model={"ignore_merges": row.ignore_merges, "vocab": vocab, "merges": pairs},
    )
    return tokenizer, {}


def _usable_merges(tokens: Tokens, vocab: dict[str, int], pairs: list[list[str]]) -> list[list[str]]:
    """Return the merges whose parts and result are tokens; others would prevent the file from loading."""
    usable = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    if len(usable) < len(pairs):
        tokens.notes.append(f"omitted {len(pairs) - len(usable)} merges from tokenizer.json that do not form tokens")
    return usable


def _pair(tokens: Tokens, merge: str) -> list[str]:
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise FormatError(f"{tokens.where}: the merge {short(merge)} is not a pair", "QK-E123")
    return [left, right]


def _write_sentencepiece(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Write SentencePiece's BPE: merges are all pairs of pieces that form a piece, best first."""
    scores, types = tokens.scores(), tokens.types
    vocab = tokens.vocab()
    usable = {text: i for text, i in vocab.items() if types[i] in (NORMAL, UNUSED)}
    pieces = []
    for text, i in usable.items():
        if types[i] != NORMAL:
            continue
        splits = [(text[:position], text[position:]) for position in range(1, len(text))]
        pairs = [(left, right) for left, right in splits if left in usable and right in usable]
        pieces += [(scores[i], pair) for pair in sorted(pairs, key=lambda p: (usable[p[0]], usable[p[1]]))]
    pieces.sort(key=lambda piece: -piece[0])
    if len(pieces) > 1 and pieces[0][0] == pieces[-1][0]:
        tokens.notes.append(
            "the file has no scores of pieces, or the same for all, so the order of merges is lost: tokenizer.json "
            "has merges in the order of ids, which may differ from the original model"
        )
    has_bytes = BYTE in types
    prefix = tokens.flag("add_space_prefix") is not False
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": META}
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": META}, "content": " "}]
    steps += [{"type": "ByteFallback"}] * has_bytes + [{"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    tokenizer = tokenizer_json(
        tokens,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": META}, escape]}
        if prefix
        else escape,
        pre_tokenizer=None,
        post_processor=template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": steps},
        model={
            "unk_token": unknown(tokens),
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "vocab": vocab,
            "merges": [list(pair) for _, pair in pieces],
        },
    )
    return tokenizer, {"tokenizer.model": model_file(tokens, pieces_of(tokens, scores), NormalizerSettings(prefix))}


def _write_gemma4(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Write Gemma 4's vocabulary: SentencePiece's pieces with explicit merges."""
    pairs = [_pair(tokens, merge) for merge in tokens.merges()]
    if not pairs:
        raise FormatError(f"{tokens.where}: a BPE vocabulary without tokenizer.ggml.merges", "QK-E123")
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": META}
    steps = [{"type": "Replace", "pattern": {"String": META}, "content": " "}, {"type": "ByteFallback"}]
    tokenizer = tokenizer_json(
        tokens,
        normalizer=escape,
        pre_tokenizer=None,
        post_processor=template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]},
        model={
            "unk_token": unknown(tokens),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": tokens.vocab(),
            "merges": [[part.replace("\u0120", " ") for part in pair] for pair in pairs],
        },
    )
    return tokenizer, {}


_WORD_START, _CONTINUES = "\u2581", "##"


def _write_wordpiece(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Write a WordPiece tokenizer.json; GGUF marks the starts of words, tokenizer.json the continuations."""
    tokens.texts = [_mark_continuation(*token) for token in zip(tokens.texts, tokens.types, strict=True)]
    tokens.added_types = (CONTROL, USER_DEFINED)
    tokenizer = tokenizer_json(
        tokens,
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            **_normalizer_flags(tokens),
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template(tokens, (True, True), words=True),
        decoder={"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        model={},
    )
    tokenizer["model"] = {
        "type": "WordPiece",
        "unk_token": unknown(tokens) or "[UNK]",
        "continuing_subword_prefix": _CONTINUES,
        "max_input_chars_per_word": 100,
        "vocab": tokens.vocab(),
    }
    return tokenizer, {}


def _mark_continuation(text: str, kind: int) -> str:
    """Convert a token from GGUF's mark at the start of a word to WordPiece's mark of a continuation."""
    if kind == CONTROL:
        return text
    return text.removeprefix(_WORD_START) if text.startswith(_WORD_START) else _CONTINUES + text


def _normalizer_flags(tokens: Tokens) -> Json:
    """Return whether letters lose case and accents."""
    lower = tokens.flag("normalizer.lowercase")
    return {"lowercase": lower is not False, "strip_accents": tokens.flag("normalizer.strip_accents")}


def _bert_config(tokens: Tokens) -> Json:
    """Return tokenizer_config.json of a BERT tokenizer, with CLS as the first token, not BOS."""
    normalizer_settings = _normalizer_flags(tokens)
    config = {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True}
    config |= {"do_lower_case": normalizer_settings["lowercase"], "strip_accents": normalizer_settings["strip_accents"]}
    first = tokens.special().get("bos")
    return config | ({} if first is None else {"cls_token": first})


def _no_config(tokens: Tokens) -> Json:
    return {}


_WRITERS: dict[str, Callable[[Tokens], tuple[Json, dict[str, bytes]]]] = {
    "gpt2": _write_bpe,
    "llama": _write_sentencepiece,
    "gemma4": _write_gemma4,
    "bert": _write_wordpiece,
    "t5": write_unigram,
}
#: Vocabularies that are plain lists, and the classes that read them.
_LISTS: dict[str, tuple[Callable[[Tokens], dict[str, bytes]], str]] = {
    "plamo2": (write_plamo, "Plamo2Tokenizer"),
    "rwkv": (write_rwkv, "RwkvTokenizer"),
}
#: Entries of tokenizer_config.json by kind, besides the common ones.
_OF_KIND: dict[str, Callable[[Tokens], Json]] = {"bert": _bert_config, "t5": unigram_config}
