"""tokenizer.json of checkpoints without one, as transformers builds it from vocab.txt, or from vocab.json and
merges.txt.

Facts of transformers 4.57.6 (convert_slow_tokenizer.py, BertTokenizerFast): the classes that are WordPiece, those that
are byte-level BPE, and how each splits a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, optional_json, read_json
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text

VOCAB_TXT = "vocab.txt"
#: Classes that are WordPiece with BERT's normalizer.
CLASSES = ("Bert", "DistilBert")
#: Their special tokens, used if tokenizer_config.json lacks them.
TOKENS = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}


def normalizer(settings: Json) -> Json:
    """Return BERT's normalizer as tokenizer_config.json sets it."""
    return {
        "lowercase": settings.get("do_lower_case", True),
        "strip_accents": settings.get("strip_accents"),
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
    }


def json_from_vocab_txt(folder: Path, settings: Json) -> Json:
    """Return the tokenizer.json of a checkpoint that has only vocab.txt, one token per line; the last of equal ones
    counts.

    It has no post-processor, whose tokens may be missing from the file.
    """
    path = folder / VOCAB_TXT
    try:
        text = read_text(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8: {e}", "QK-E121") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    unknown = settings.get("unk_token")
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, **normalizer(settings)},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown.get("content") if isinstance(unknown, dict) else unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: number for number, token in enumerate(lines)},
        },
    }


MERGES_FILES = ("vocab.json", "merges.txt")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Classes that split texts as GPT-2 does.
_LIKE_GPT2 = ("GPT2", "GPTNeoX", "CodeGen", "Bart", "Roberta")


def json_from_merges(folder: Path, class_name: str, settings: Json, lists_added: bool) -> Json:
    """Return the tokenizer.json of a checkpoint that has only vocab.json and merges.txt.

    Args:
        folder: the checkpoint.
        class_name: of its tokenizer: GPT2, Qwen2, ..; others are refused.
        settings: tokenizer_config.json, with the defaults of the class.
        lists_added: tokenizer_config.json lists the added tokens, so added_tokens.json is ignored.
    """
    prefix = bool(settings.get("add_prefix_space", False))
    split: Json = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
    normalizer = None
    if class_name == "Qwen2":
        normalizer = {"type": "NFC"}
        first = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [first, split | {"use_regex": False}]}
    elif class_name not in _LIKE_GPT2:
        classes = ", ".join((*_LIKE_GPT2, "Qwen2"))
        raise FormatError(
            f"{folder}: has vocab.json and merges.txt but no tokenizer.json, and its tokenizer class is "
            f"{class_name or '(missing)'}; only {classes} are supported without tokenizer.json: save it with "
            "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            "QK-E114",
        )
    model = {"type": "BPE", "vocab": read_json(folder / MERGES_FILES[0]), "merges": _merges(folder / MERGES_FILES[1])}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [] if lists_added else _read_added(folder / "added_tokens.json"),
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": level,
        "decoder": level,
        "model": model,
    }


def _merges(path: Path) -> list[list[str]]:
    lines = read_text(path).decode("utf-8", "replace").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return [pair for pair in pairs if len(pair) == 2]


def _read_added(path: Path) -> list[Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    entries = sorted((optional_json(path) or {}).items(), key=lambda item: str(item[1]).zfill(12))
    return [{"id": number, "content": text, **flags} for text, number in entries]
