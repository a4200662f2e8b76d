"""Types of tensors as few readable rules that give exactly those."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from quantkit.errors import RecipeError
from quantkit.recipes.dialects import DIALECTS, check_same, text_of, tree_of
from quantkit.types import TensorType

_LAYERED = re.compile(r"(.*?\.|)(0|[1-9]\d*)(\..+)", re.DOTALL)
_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}/]")
_FIELD = re.compile(r"(\.)(\w+)((?:\.\w+)*)")


def write_recipe(
    types: Mapping[str, TensorType], comments: Sequence[str] = (), dialect: str = "ours", *, others: Iterable[str] = ()
) -> str:
    """Return the text of a recipe that gives every tensor of ``types`` its type, by few anchored rules.

    ``dialect``: "ours", "llama.cpp", "ik" or "thireus". ``comments``: lines before the rules (llama.cpp takes none).
    ``others``: names of the model's other tensors, which no rule may match. The rules are proved as the program of the
    dialect reads them. Raises RecipeError if it has no such type, or cannot tell two names apart.
    """
    return text_of(rules_for(types, dialect, others=others), comments, dialect)


def rules_for(
    types: Mapping[str, TensorType], dialect: str = "ours", *, others: Iterable[str] = ()
) -> list[tuple[str, TensorType]]:
    """Return the rules of ``write_recipe``: pattern and type."""
    if dialect not in DIALECTS:
        raise RecipeError(f"there is no dialect {dialect!r} of recipes: write {', '.join(DIALECTS)}")
    tree = tree_of(dialect)
    if lacking := [name for name, t in types.items() if tree is not None and t.trees not in (tree, "both")]:
        raise RecipeError(f"{dialect} has no type {types[lacking[0]]} (for {lacking[0]})")
    wanted: dict[str, TensorType | None] = {**dict.fromkeys(others), **types}
    rules = _merged(types, wanted, dialect)
    wrong = check_same(wanted, rules, dialect)
    if wrong:  # names that only capitals, or characters that no rule can name, tell apart
        name, (want, found) = next(iter(wrong.items()))
        raise RecipeError(f"no rules of {dialect} give {name!r} {want or 'no type'}: they would give {found or 'none'}")
    return rules


def _merged(types: Mapping[str, TensorType], known: Iterable[str], dialect: str) -> list[tuple[str, TensorType]]:
    """Return anchored rules: a class of all layers is one rule, and classes with the same layers and type share one."""
    every: dict[tuple[str, str], set[int]] = {}
    for name in known:
        if found := _LAYERED.fullmatch(name):
            every.setdefault((found[1], found[3]), set()).add(int(found[2]))
    layers: dict[tuple[str, str, TensorType], set[int]] = {}
    rules: list[tuple[str, TensorType]] = []
    for name, t in types.items():
        if found := _LAYERED.fullmatch(name):
            layers.setdefault((found[1], found[3], t), set()).add(int(found[2]))
        else:
            rules.append((f"^{_literal(name, dialect)}$", t))
    shared: dict[tuple[str, str, TensorType], list[str]] = {}
    for (head, tail, t), some in layers.items():
        pattern = "[0-9]+" if some == every[head, tail] and len(some) > 1 else one_of(some)
        shared.setdefault((head, pattern, t), []).append(tail)
    for (head, pattern, t), tails in shared.items():
        rules += [(f"^{_literal(head, dialect)}{pattern}{_tails(group, dialect)}$", t) for group in _alike(tails)]
    return rules


def _alike(tails: Sequence[str]) -> list[list[str]]:
    """Group ``.attn_q.weight`` and ``.attn_k.weight``: tails that differ in their second part only."""
    groups: dict[tuple[str, str], list[str]] = {}
    for tail in tails:
        found = _FIELD.fullmatch(tail)
        kind = found[2].partition("_")[0] if found else tail
        groups.setdefault((kind, found[3] if found else ""), []).append(tail)
    return list(groups.values())


def _tails(tails: Sequence[str], dialect: str) -> str:
    if len(tails) == 1:
        return _literal(tails[0], dialect)
    parts = [found for tail in tails if (found := _FIELD.fullmatch(tail))]
    names = [found[2] for found in parts]
    begin = _common(names)
    end = _common([name[len(begin) :][::-1] for name in names])[::-1]
    end = end[end.index("_") :] if "_" in end else ""
    middle = "|".join(_literal(name[len(begin) : len(name) - len(end)], dialect) for name in names)
    return f"\\.{_literal(begin, dialect)}({middle}){_literal(end, dialect)}{_literal(parts[0][3], dialect)}"


def _common(names: Sequence[str]) -> str:
    """Return what all names begin with, up to an underscore."""
    least, most = min(names), max(names)
    n = next((i for i, c in enumerate(least) if most[i : i + 1] != c), len(least))
    return least[: least.rfind("_", 0, n) + 1]


def _literal(text: str, dialect: str) -> str:
    """Return a pattern for the text alone; for characters that a dialect cannot write, for any."""
    return "".join(_character(c, dialect) for c in text)


def _character(c: str, dialect: str) -> str:
    if c in "=,#" or c.isspace() or not c.isprintable():
        return "."
    if not c.isascii():
        return "." * (1 if dialect == "ours" else len(c.encode("utf-8", "surrogateescape")))
    if c.isupper() and dialect == "llama.cpp":
        return "."
    if c == "/":
        return c
    return _SPECIAL.sub(r"\\\g<0>", c)


def one_of(numbers: Iterable[int]) -> str:
    """Return a regular expression for some numbers: ``([0-9]|1[0-9]|2[0-3])``; one number is itself."""
    texts = [str(n) for n in sorted(set(numbers))]
    if len(texts) == 1:
        return texts[0]
    parts = _folded([(text[:-1], text[-1]) for text in texts])
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _folded(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Return patterns for numbers, given as all but the last digit, and that."""
    ends = [(head, _digits([end for _, end in group])) for head, group in groupby(texts, key=lambda x: x[0])]
    parts: list[str] = []
    by_end: dict[tuple[int, str], list[str]] = {}
    for head, digits in ends:  # 1[0-9], 2[0-9] become [12][0-9]
        by_end.setdefault((len(head), digits if len(digits) > 1 else f"{head}{digits}"), []).append(head)
    for (length, digits), heads in by_end.items():
        if length == 0 or len(digits) == length + 1 and digits.isdecimal():
            parts.append(digits)
        elif length == 1:
            parts.append(_digits(heads) + digits)
        else:
            parts += [part + digits for part in _folded([(head[:-1], head[-1]) for head in heads])]
    return parts


def _digits(digits: Sequence[str]) -> str:
    """Return one of some digits, in order: 3, [12], [3-7], [0-25]."""
    if len(digits) == 1:
        return digits[0]
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    return f"[{''.join(f'{r[0]}-{r[-1]}' if len(r) > 2 else ''.join(r) for r in runs)}]"
