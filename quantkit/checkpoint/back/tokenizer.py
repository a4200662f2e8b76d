"""tokenizer.* keys as the files of a tokenizer that transformers loads: tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2") has its tokens and merges in the file; its pre-tokenizer follows from the name
(``pre_tokenizers``). Of SentencePiece ("llama") the file has pieces and scores: tokenizer.json gets the merges they
stand for, as transformers derives them (convert_slow_tokenizer.py, 4.57.6), and tokenizer.model the pieces themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quantkit.checkpoint.back.pieces import Normalizing, model_file, pieces_of
from quantkit.checkpoint.back.pre_tokenizers import pre_tokenizer
from quantkit.checkpoint.back.tokens import META, Json, Tokens, template, tokenizer_json, unknown
from quantkit.checkpoint.back.vocabularies import plamo, ranks, rwkv, unigram, unigram_config
from quantkit.checkpoint.vocab.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.rules import short
from quantkit.formats.tokenizer.pre import PRE

#: llama.cpp's name of a template of its own, which files of RWKV have for none.
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
            f"{model.paths[0]}: the vocabulary {short(kind)} is not exported by this version (there are "
            f"{', '.join((*_WRITERS, *_LISTS))}); --no-tokenizer leaves the tokenizer out: take that of the original "
            "model"
        )
    made, more = write(tokens)
    config = _config(tokens) | _OF_KIND.get(kind, _nothing)(tokens)
    added = {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in tokens.added()}
    if kind == "llama":
        scores = tokens.scores()
        kept = {str(i) for i, score in enumerate(scores) if score == _ADDED or tokens.types[i] == USER_DEFINED}
        added = {number: entry for number, entry in added.items() if number in kept}
    if added:
        config = {"added_tokens_decoder": added, **config}
    files = {"tokenizer.json": _dumped(made), "tokenizer_config.json": _dumped(config), **more}
    if arch == "qwen":
        files |= ranks(tokens)
    if arch == "internlm2" and (beyond := _beyond(tokens)):
        files["added_tokens.json"] = _dumped(beyond)
    return files, tokens.notes


def _list_files(tokens: Tokens, kind: str) -> dict[str, bytes]:
    """Return the files of a tokenizer that only remote code reads."""
    write, class_name = _LISTS[kind]
    tokens.notes.append(
        f"only the original model's own code ({class_name}) reads such a tokenizer: its tokenization_*.py belongs "
        "beside these files"
    )
    return write(tokens) | {"tokenizer_config.json": _dumped(_config(tokens) | {"tokenizer_class": class_name})}


def _beyond(tokens: Tokens) -> Json:
    """Return tokens for which there are no embeddings, by text (InternLM 2)."""
    table = tokens.model.tensors.get("token_embd.weight")
    first = len(tokens.texts) if table is None else table.shape[-1]
    return {text: number for number, text in enumerate(tokens.texts) if number >= first}


def _dumped(value: Json) -> bytes:
    """Return an object as JSON, an entry a line: Python indents what is deeper slowly, and vocabularies are long."""
    try:
        return _lines(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # bytes of a token that are no UTF-8
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
        named = [(str(name), tokens.model.get(f"tokenizer.chat_template.{name}")) for name in names]
        listed = [*([("default", chat)] if chat else []), *named]
        config["chat_template"] = [{"name": name, "template": text} for name, text in listed if text]
    elif chat:
        config["chat_template"] = chat
    return config


def _bpe(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
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
    made = tokenizer_json(
        tokens,
        normalizer=normalizer,
        pre_tokenizer=pre,
        post_processor=template(tokens, (row.add_bos, False)) or {**byte_level, "trim_offsets": False},
        decoder=byte_level,
        model={"ignore_merges": row.ignore_merges, "vocab": vocab, "merges": pairs},
    )
    return made, {}


def _usable(tokens: Tokens, vocab: dict[str, int], pairs: list[list[str]]) -> list[list[str]]:
    """Leave out merges of or to what is no token: with them the file would not load."""
    found = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    if len(found) < len(pairs):
        tokens.notes.append(f"{len(pairs) - len(found)} merges of what is no token are left out of tokenizer.json")
    return found


def _pair(tokens: Tokens, merge: str) -> list[str]:
    left, found, right = merge.partition(" ")
    if not found or " " in right:
        raise FormatError(f"{tokens.where}: the merge {short(merge)} is no pair")
    return [left, right]


def _pieces(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
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
    if len(found) > 1 and found[0][0] == found[-1][0]:
        tokens.notes.append(
            "the file has no scores of pieces, or one for all: what is joined first is lost, and merges of "
            "tokenizer.json are in the order of ids; the original model's may have another"
        )
    has_bytes = BYTE in types
    prefix = tokens.flag("add_space_prefix") is not False
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": META}
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": META}, "content": " "}]
    steps += [{"type": "ByteFallback"}] * has_bytes + [{"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    made = tokenizer_json(
        tokens,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": META}, escape]}
        if prefix
        else escape,
        pre_tokenizer=None,
        post_processor=template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": steps},
        model={
            **{"unk_token": unknown(tokens), "fuse_unk": True, "byte_fallback": has_bytes, "vocab": vocab},
            "merges": [list(pair) for _, pair in found],
        },
    )
    return made, {"tokenizer.model": model_file(tokens, pieces_of(tokens, scores), Normalizing(prefix))}


def _merged_pieces(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """Gemma 4's: pieces of SentencePiece with merges of their own."""
    pairs = [_pair(tokens, merge) for merge in tokens.merges()]
    if not pairs:
        raise FormatError(f"{tokens.where}: a BPE vocabulary without tokenizer.ggml.merges")
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": META}
    steps = [{"type": "Replace", "pattern": {"String": META}, "content": " "}, {"type": "ByteFallback"}]
    made = tokenizer_json(
        tokens,
        normalizer=escape,
        pre_tokenizer=None,
        post_processor=template(tokens, (True, False)),
        decoder={"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]},
        model={
            **{"unk_token": unknown(tokens), "fuse_unk": True, "byte_fallback": True, "vocab": tokens.vocab()},
            "merges": [[part.replace("\u0120", " ") for part in pair] for pair in pairs],
        },
    )
    return made, {}


_BEGINS, _CONTINUES = "\u2581", "##"


def _words(tokens: Tokens) -> tuple[Json, dict[str, bytes]]:
    """WordPiece: in a file what begins a word is marked, in a tokenizer.json what continues one."""
    tokens.texts = [
        text if kind == CONTROL else text.removeprefix(_BEGINS) if text.startswith(_BEGINS) else _CONTINUES + text
        for text, kind in zip(tokens.texts, tokens.types, strict=True)
    ]
    tokens.added_types = (CONTROL, USER_DEFINED)
    made = tokenizer_json(
        tokens,
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, **_normalized(tokens)},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template(tokens, (True, True), words=True),
        decoder={"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        model={},
    )
    made["model"] = {
        **{"type": "WordPiece", "unk_token": unknown(tokens) or "[UNK]", "continuing_subword_prefix": _CONTINUES},
        **{"max_input_chars_per_word": 100, "vocab": tokens.vocab()},
    }
    return made, {}


def _normalized(tokens: Tokens) -> Json:
    """Return whether letters lose case and accents."""
    lower = tokens.flag("normalizer.lowercase")
    return {"lowercase": lower is not False, "strip_accents": tokens.flag("normalizer.strip_accents")}


def _bert_config(tokens: Tokens) -> Json:
    """Return what tokenizer_config.json says of a tokenizer of BERT's, whose first token is not called BOS."""
    how = _normalized(tokens)
    found = {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True}
    found |= {"do_lower_case": how["lowercase"], "strip_accents": how["strip_accents"]}
    first = tokens.special().get("bos")
    return found | ({} if first is None else {"cls_token": first})


def _nothing(tokens: Tokens) -> Json:
    return {}


_WRITERS: dict[str, Callable[[Tokens], tuple[Json, dict[str, bytes]]]] = {
    "gpt2": _bpe,
    "llama": _pieces,
    "gemma4": _merged_pieces,
    "bert": _words,
    "t5": unigram,
}
#: Those that are lists of their own, and the classes that read them.
_LISTS: dict[str, tuple[Callable[[Tokens], dict[str, bytes]], str]] = {
    "plamo2": (plamo, "Plamo2Tokenizer"),
    "rwkv": (rwkv, "RwkvTokenizer"),
}
#: What tokenizer_config.json says of a kind beside what all say.
_OF_KIND: dict[str, Callable[[Tokens], Json]] = {"bert": _bert_config, "t5": unigram_config}
