"""Names of pre-tokenizers by the SHA-256 of the ids of one text, and the nearest name for unknown hashes.

Facts of llama.cpp b11434 (conversion/base.py, get_vocab_base_pre).
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

from quantkit.formats.tokenizer.pre import PRE
from quantkit.formats.tokenizer.split import Splitter

#: The text whose ids are hashed.
TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d"
    "\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 "
    "33333 333333 3333333 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796"
    "\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1"
    "314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b"
    "\u0433\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told h"
    "e's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)

#: Hash -> name, and the model whose tokenizer was hashed: scripts/make_pre_hashes.py makes it.
PRE_HASHES: dict[str, tuple[str, str]] = json.loads((Path(__file__).parent / "pre_hashes.json").read_bytes())

#: Maximum number of suggested names.
_MAX_ALTERNATIVES = 4


def nearest(ends: set[int], ignore_merges: bool) -> tuple[float, list[str]]:
    """Return the highest share of words with equal ends, and the pre-tokenizers that reach it.

    Among equal shares, those that look up whole words like the tokenizer (``ignore_merges``) come first.
    """
    shares: dict[tuple[str, ...], float] = {}
    for pre in PRE.values():
        if pre.patterns not in shares:
            boundaries = set(accumulate(map(len, Splitter(pre.patterns).words(TEXT))))
            shares[pre.patterns] = len(boundaries & ends) / len(boundaries | ends)
    highest = max(shares.values())
    names = [name for name, pre in PRE.items() if shares[pre.patterns] == highest and name not in ("", "default")]
    return highest, sorted(names, key=lambda name: PRE[name].ignore_merges != ignore_merges)


def advice(ends: set[int], ignore_merges: bool) -> str:
    """Suggest a --pre, as the end of an error message. ``ends``: the offsets where words of the check text end."""
    share, (first, *similar) = nearest(ends, ignore_merges)
    alternatives = ", ".join(similar[:_MAX_ALTERNATIVES]) + (", .." if len(similar) > _MAX_ALTERNATIVES else "")
    if share == 1:
        return (
            f"try --pre {first}, which splits the test text in the same "
            f"way{alternatives and f' (as do {alternatives})'}"
        )
    return f"the closest is --pre {first}, which agrees on {share:.0%} of the word ends of the test text"
