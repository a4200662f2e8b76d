r"""tokenizer.ggml.pre as the normalizer and the pre_tokenizer of a tokenizer.json.

The patterns are those of the original tokenizers where llama.cpp's differ (see ``formats.tokenizer.pre``), else
those that llama.cpp runs. Facts of llama.cpp b11434 (src/llama-vocab.cpp quotes tokenizer.json's patterns of Tekken
and GPT-4o), of Moonshot's tokenization_kimi.py, and of the tokenizer.json files that
convert_hf_to_gguf_update.py names.
"""

from __future__ import annotations

from typing import Any

from quantkit.errors import TypeNotSupported
from quantkit.formats.tokenizer.pre import PRE

Json = dict[str, Any]

_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
    r"|{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _CASED.format(_SUFFIX, r"\p{N}{1,3}")

#: Name -> patterns of the original, if those of ``PRE`` are not in the original's regular expression syntax.
ORIGINAL: dict[str, tuple[str, ...]] = {
    "tekken": (_CASED.format("", r"\p{N}"),),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    "kimi-k2": (_KIMI,),
}
#: Vocabularies of tokenizers that first normalize text to NFC.
NFC = frozenset(("qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "command-r", "stablelm2", "mpt"))


def pre_tokenizer(name: str) -> tuple[Json | None, Json]:
    """Return normalizer and pre_tokenizer of a name. Raises TypeNotSupported for an unknown one."""
    row = PRE.get(name)
    patterns = ORIGINAL.get(name, row.patterns if row is not None else ())
    odd = row is None or row.raw or row.metaspace or row.escape_spaces
    if odd or name not in ORIGINAL and any(_is_odd(pattern) for pattern in patterns):
        raise TypeNotSupported(
            f"the pre-tokenizer {name[:40]!r} cannot be expressed in tokenizer.json; use --no-tokenizer, and copy the "
            "tokenizer of the original model",
            "QK-E305",
        )
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    splits.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "NFC"} if name in NFC else None, {"type": "Sequence", "pretokenizers": splits}


def _is_odd(pattern: str) -> bool:
    """Return whether only llama.cpp's own functions, or its collapsed text, give a pattern its meaning."""
    return pattern.startswith("threes") or r"\p{Lo}" in pattern or "NotHan" in pattern
