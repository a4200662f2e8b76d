"""vocab.json and merges.txt without a tokenizer.json: the tokenizer.json that transformers 4.57.6 makes of them.

Facts of convert_slow_tokenizer.py: the classes that are byte-level BPE, and how each splits a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, optional_json, read_json
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text

FILES = ("vocab.json", "merges.txt")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Classes that split texts as GPT-2 does.
_LIKE_GPT2 = ("GPT2", "GPTNeoX", "CodeGen", "Bart", "Roberta")


def made_json(folder: Path, class_name: str, settings: Json, listed: bool) -> Json:
    """Return the tokenizer.json of a checkpoint that has only vocab.json and merges.txt.

    Args:
        folder: the checkpoint.
        class_name: of its tokenizer: GPT2, Qwen2, ..; others are refused.
        settings: of its tokenizer_config.json, with what the class has.
        listed: that file lists the added tokens, so added_tokens.json does not count.
    """
    prefix = bool(settings.get("add_prefix_space", False))
    split: Json = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
    normalizer = None
    if class_name == "Qwen2":
        normalizer = {"type": "NFC"}
        first = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [first, split | {"use_regex": False}]}
    elif class_name not in _LIKE_GPT2:
        known = ", ".join((*_LIKE_GPT2, "Qwen2"))
        raise FormatError(
            f"{folder}: it has vocab.json and merges.txt but no tokenizer.json, and its tokenizer is of the class "
            f"{class_name or '(none is named)'}; only for {known} it is known how these split a text: "
            "save it with transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    model = {"type": "BPE", "vocab": read_json(folder / FILES[0]), "merges": _merges(folder / FILES[1])}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [] if listed else _added(folder / "added_tokens.json"),
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


def _added(path: Path) -> list[Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    found = sorted((optional_json(path) or {}).items(), key=lambda item: str(item[1]).zfill(12))
    return [{"id": number, "content": text, **flags} for text, number in found]
