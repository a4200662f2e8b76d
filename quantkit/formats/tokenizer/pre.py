r"""tokenizer.ggml.pre: the split of text into words, one row per name in llama.cpp b11434.

A row has patterns that are applied in order, each to every word of the previous one: a match becomes a word, and so
does the text between matches. There are two kinds, as in llama.cpp (unicode.cpp, unicode_regex_split):

- a pattern with categories, ``\p{L}`` and the like, sees the collapsed text (unicode.py). There is no difference
  between upper and lower case beyond ASCII: ``\p{Lu}`` of the original tokenizers is ``\p{L}`` here, as there;
- a pattern without categories sees the text itself, with white space beyond ASCII as U+000B.

Where the two differ, the patterns are those of llama.cpp, not of the original tokenizers. Where llama.cpp has a
handwritten loop (gpt-2, llama3, qwen2, qwen35, kimi-k2), the pattern is equivalent to it; digits in groups of three,
for which a pattern would take quadratic time, are functions in split.py.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Digits in groups of three from the right; ``THREES_AFTER`` leaves the characters before them in the first group.
THREES_AFTER = "threes, after what lies before"
THREES_WITHIN = "threes, ASCII"

_CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CASELESS}|{_WORD}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_CASELESS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s{1}"
)
#: ASCII punctuation, then letters, as DeepSeek-V3 and its successors split.
_DEEPSEEK3_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}\~][A-Za-z]+"""
_DEEPSEEK3_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_PUNCTUATION}|{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPARK = rf"{_DEEPSEEK3_PUNCTUATION}|{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK_KANA}"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
#: The cased letters, which DeepSeek-LLM lists one by one.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cased_words(letters: str, upper: str, low: str, suffix: str, numbers: str) -> str:
    """Words of upper-case then lower-case letters, as Tekken's; ``letters`` are those without case."""
    first, last = f"[{upper}{letters}]", f"[{low}{letters}]"
    prefix = r"[^\r\n\p{L}\p{N}]?"
    return rf"{prefix}{first}*{last}+{suffix}|{prefix}{first}+{last}*{suffix}|{numbers}|{_TAIL_SLASH}"


# Letters beyond ASCII count as both cases, represented by \p{Lo}.
_TEKKEN = _cased_words(r"\p{Lo}", "A-Z", "a-z", "", r"\p{N}")
_GPT4O = _cased_words(r"\p{Lo}", "A-Z", "a-z", f"{_CASELESS}?", r"\p{N}{1,3}")
_GRANITE_MULTI = _cased_words(r"\p{Lo}\p{M}", "A-Z", "a-z", f"{_CASELESS}?", r"\p{N}{1,3}")
_TINY_AYA = _cased_words(r"\p{L}\p{M}", "", "", f"{_CASELESS}?", r"\p{N}{1,3}")
_YOUTU = _cased_words(r"\p{L}\p{M}", "", "", f"{_CASELESS}?", r"\p{N}")
_KIMI = rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}\p{{Han}}]?\p{{NotHan}}+{_CASELESS}?|\p{{N}}{{1,3}}|{_TAIL}"
_BAILING = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + (
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_CASELESS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE_MOE = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}" + (
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(?:IMGIMG)(?:[A-I]{1,4})Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-\~]",
    _GPT2,
)
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class Pre:
    """A pre-tokenizer; the flags are those that llama.cpp sets with the name."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  #: a word that is a token stays one token, regardless of merges
    add_bos: bool = False
    no_bos: bool = False  #: no default beginning-of-sequence id
    raw: bool = False  #: merges are of characters, not of GPT-2's byte letters; unknown ones become <0xXX>
    escape_spaces: bool = False  #: a space is U+2581
    newline_words: bool = False  #: a run of newlines that is a token stays one token
    metaspace: bool = False  #: every word begins with U+2581, and every U+2581 begins one


_THREES_DEEPSEEK = Pre((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3))
_CHATGLM = Pre((_LLAMA3,), no_bos=True)
_PLAIN_GPT2 = Pre((_GPT2,))
_DIGITS_GPT2 = Pre((r"\p{N}", _GPT2))
_PLAIN_LLAMA3 = Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
_PLAIN_QWEN2 = Pre((_QWEN2,))
_PLAIN_GPT4O = Pre((_GPT4O,))
_PLAIN_BLOOM = Pre((_BLOOM,))
_PLAIN_BAILING = Pre((_BAILING,))
_PLAIN_TINY_AYA = Pre((THREES_AFTER, _TINY_AYA))
_GEMMA4 = Pre((_LINES,), add_bos=True, raw=True, escape_spaces=True, newline_words=True)


def _rows(*rows: tuple[str, Pre]) -> dict[str, Pre]:
    return {name: pre for names, pre in rows for name in names.split()}


#: All names, and "" for files without one (llama.cpp then warns and uses the default).
PRE: dict[str, Pre] = {
    "": Pre((r"[\p{P}\$\+<=>\^\~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **_rows(
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _PLAIN_LLAMA3),
        ("dbrx smaug-bpe", Pre((_LLAMA3,))),
        ("chatglm-bpe", _CHATGLM),
        ("glm4 glm5", Pre((_LLAMA3,), no_bos=True, ignore_merges=True)),
        ("jais-2", Pre((_JAIS2,))),
        ("minicpm5", Pre((r"\p{N}{1,3}", rf"{_CASELESS}|{_WORD}|\p{{N}}+|{_TAIL}"), ignore_merges=True)),
        (
            "deepseek-llm",
            Pre(("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+\Z", _CJK_WIDE, r"\p{N}+")),
        ),
        ("deepseek-coder", Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}"))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _THREES_DEEPSEEK),
        ("spark2_5", Pre((r"\p{N}{1,3}", _CJK_KANA, _SPARK, r"\p{N}"))),
        ("youtu", Pre((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True)),
        ("falcon", Pre((r"[\p{P}\$\+<=>\^\~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
        ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_GPT2),
        ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", _PLAIN_GPT2),
        ("jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling", _PLAIN_GPT2),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _PLAIN_QWEN2),
        ("qwen35", Pre((_QWEN35,))),
        ("ufakzeka", Pre((rf"{_WORD}|\p{{N}}|{_TAIL}",))),
        ("laguna", Pre((_LINES, _QWEN2))),
        ("poro-chat bloom gpt3-finnish", _PLAIN_BLOOM),
        ("viking", Pre((_BLOOM, r"\p{N}"))),
        ("tekken", Pre((_TEKKEN,), ignore_merges=True, add_bos=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", _PLAIN_GPT4O),
        ("granite-embed-multi-97m", Pre((_GRANITE_MULTI,), ignore_merges=True)),
        ("tiny_aya cohere2moe", _PLAIN_TINY_AYA),
        ("chameleon", Pre(_CHAMELEON, add_bos=True)),
        ("kimi-k2", Pre((_KIMI,))),
        ("superbpe", Pre((r"\p{N}+", THREES_WITHIN))),
        ("bailingmoe bailingmoe2 llada-moe", _PLAIN_BAILING),
        ("seed-coder", Pre((_SEED,))),
        ("exaone-moe", Pre((_EXAONE_MOE,))),
        ("afmoe", Pre((THREES_AFTER, _AFMOE_SCRIPTS, _DEEPSEEK3))),
        ("gemma4 granite-embed-multi-311m", _GEMMA4),
        ("sarvam-moe", Pre((_LINES,), raw=True, escape_spaces=True)),
        ("mmbert", Pre((_LINES,), raw=True, escape_spaces=True, newline_words=True, metaspace=True)),
        ("whitespace", Pre((r"\S+",), raw=True)),
    ),
}
PRE["default"] = PRE[""]
