"""BERT's tokenizers: vocab.txt without a tokenizer.json, and what their class sets over either.

Facts of transformers 4.57.6 (convert_slow_tokenizer.py, BertTokenizerFast).
"""

from __future__ import annotations

from pathlib import Path

from quantkit.checkpoint.config import Json
from quantkit.errors import FormatError
from quantkit.formats.outputs import read_text

FILE = "vocab.txt"
#: Classes that are WordPiece with BERT's normalizer.
CLASSES = ("Bert", "DistilBert")
#: Their special tokens, where tokenizer_config.json does not speak of them.
TOKENS = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}


def normalizer(settings: Json) -> Json:
    """Return BERT's normalizer as tokenizer_config.json sets it."""
    return {
        "lowercase": settings.get("do_lower_case", True),
        "strip_accents": settings.get("strip_accents"),
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
    }


def made_json(folder: Path, settings: Json) -> Json:
    """Return the tokenizer.json of a checkpoint that has only vocab.txt, a token a line; of equal ones the last counts.

    What is put around texts is not in it: that may be tokens which the file lacks.
    """
    path = folder / FILE
    try:
        text = read_text(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: not UTF-8: {e}") from None
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
