"""``write_recipe``: tensor types as a few readable rules that give exactly these types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.recipes.dialects import DIALECTS, find_differences, text_of, tree_of
from quantkit.types import TensorType

_LAYERED = re.compile(r"(.*?\.|)(0|[1-9]\d*)(\..+)", re.DOTALL)
_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}/]")
_FIELD = re.compile(r"(\.)(\w+)((?:\.\w+)*)")


@checked
def write_recipe(
    types: Mapping[str, TensorType],
    comments: Sequence[str] = (),
    dialect: str = "ours",
    *,
    other_names: Iterable[str] = (),
) -> str:
    """Return the text of a recipe that gives every tensor of ``types`` its type, with few anchored rules.

    ``dialect``: "ours", "llama.cpp", "ik" or "thireus". ``comments``: lines before the rules (not for llama.cpp).
    ``other_names``: names of the model's other tensors, which no rule may match. The rules are verified by
    matching as the program of the dialect does. Raises RecipeError if it lacks a type, or cannot distinguish two names.
    """
    return text_of(rules_for(types, dialect, other_names=other_names), comments, dialect)


def rules_for(
    types: Mapping[str, TensorType], dialect: str = "ours", *, other_names: Iterable[str] = ()
) -> list[tuple[str, TensorType]]:
    """Return the rules of ``write_recipe``: pattern and type; errors as there."""
    if dialect not in DIALECTS:
        raise RecipeError(f"unknown recipe dialect {dialect!r}: choose one of {', '.join(DIALECTS)}", "QK-E203")
    tree = tree_of(dialect)
    if missing := [name for name, t in types.items() if tree is not None and not t.is_in(tree)]:
        raise RecipeError(f"{dialect} has no type {types[missing[0]]} (for {missing[0]})", "QK-E203")
    expected: dict[str, TensorType | None] = {**dict.fromkeys(other_names), **types}
    rules = _merge_rules(types, expected, dialect)
    differences = find_differences(expected, rules, dialect)
    if differences:  # names that differ in capitals, or in characters that no rule can name
        name, (expected_type, given_type) = next(iter(differences.items()))
        raise RecipeError(
            f"cannot write rules of {dialect} that give {name!r} {expected_type or 'no type'}: they give "
            f"{given_type or 'none'}"
        )
    return rules


def _merge_rules(types: Mapping[str, TensorType], names: Iterable[str], dialect: str) -> list[tuple[str, TensorType]]:
    """Return anchored rules: one for a class in all layers, one for classes with the same layers and type."""
    all_layers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _LAYERED.fullmatch(name):
            all_layers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    layers: dict[tuple[str, str, TensorType], set[int]] = {}
    rules: list[tuple[str, TensorType]] = []
    for name, t in types.items():
        if match := _LAYERED.fullmatch(name):
            layers.setdefault((match[1], match[3], t), set()).add(int(match[2]))
        else:
            rules.append((f"^{_literal_pattern(name, dialect)}$", t))
    shared: dict[tuple[str, str, TensorType], list[str]] = {}
    for (head, tail, t), numbers in layers.items():
        pattern = "[0-9]+" if numbers == all_layers[head, tail] and len(numbers) > 1 else numbers_pattern(numbers)
        shared.setdefault((head, pattern, t), []).append(tail)
    for (head, pattern, t), tails in shared.items():
        rules += [
            (f"^{_literal_pattern(head, dialect)}{pattern}{_tails_pattern(group, dialect)}$", t)
            for group in _group_tails(tails)
        ]
    return rules


def _group_tails(tails: Sequence[str]) -> list[list[str]]:
    """Return tails in groups that differ only in their second part: ``.attn_q.weight`` and ``.attn_k.weight``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for tail in tails:
        match = _FIELD.fullmatch(tail)
        kind = match[2].partition("_")[0] if match else tail
        groups.setdefault((kind, match[3] if match else ""), []).append(tail)
    return list(groups.values())


def _tails_pattern(tails: Sequence[str], dialect: str) -> str:
    if len(tails) == 1:
        return _literal_pattern(tails[0], dialect)
    parts = [match for tail in tails if (match := _FIELD.fullmatch(tail))]
    names = [match[2] for match in parts]
    begin = _common_prefix(names)
    end = _common_prefix([name[len(begin) :][::-1] for name in names])[::-1]
    end = end[end.index("_") :] if "_" in end else ""
    middle = "|".join(_literal_pattern(name[len(begin) : len(name) - len(end)], dialect) for name in names)
    head, tail, last = (_literal_pattern(text, dialect) for text in (begin, end, parts[0][3]))
    return f"\\.{head}({middle}){tail}{last}"


def _common_prefix(names: Sequence[str]) -> str:
    """Return the common start of names, up to an underscore."""
    least, most = min(names), max(names)
    n = next((i for i, c in enumerate(least) if most[i : i + 1] != c), len(least))
    return least[: least.rfind("_", 0, n) + 1]


def _literal_pattern(text: str, dialect: str) -> str:
    """Return a pattern for a text; characters that a dialect cannot write match any."""
    return "".join(_character_pattern(c, dialect) for c in text)


def _character_pattern(c: str, dialect: str) -> str:
    if c in "=,#" or c.isspace() or not c.isprintable():
        return "."
    if not c.isascii():
        return "." * (1 if dialect == "ours" else len(c.encode("utf-8", "surrogateescape")))
    if c.isupper() and dialect == "llama.cpp":
        return "."
    if c == "/":
        return c
    return _SPECIAL.sub(r"\\\g<0>", c)


def numbers_pattern(numbers: Iterable[int]) -> str:
    """Return a regular expression for numbers: ``([0-9]|1[0-9]|2[0-3])``; for one number the number."""
    texts = [str(n) for n in sorted(set(numbers))]
    if len(texts) == 1:
        return texts[0]
    parts = _fold_numbers([(text[:-1], text[-1]) for text in texts])
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _fold_numbers(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Return patterns for numbers, each given as its last digit and the digits before."""
    ends = [(head, _digit_pattern([end for _, end in group])) for head, group in groupby(texts, key=lambda x: x[0])]
    parts: list[str] = []
    by_end: dict[tuple[int, str], list[str]] = {}
    for head, digits in ends:  # 1[0-9], 2[0-9] become [12][0-9]
        by_end.setdefault((len(head), digits if len(digits) > 1 else f"{head}{digits}"), []).append(head)
    for (length, digits), heads in by_end.items():
        if length == 0 or len(digits) == length + 1 and digits.isdecimal():
            parts.append(digits)
        elif length == 1:
            parts.append(_digit_pattern(heads) + digits)
        else:
            parts += [part + digits for part in _fold_numbers([(head[:-1], head[-1]) for head in heads])]
    return parts


def _digit_pattern(digits: Sequence[str]) -> str:
    """Return a pattern for sorted digits: 3, [12], [3-7], [0-25]."""
    if len(digits) == 1:
        return digits[0]
    runs: list[list[str]] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    return f"[{''.join(f'{r[0]}-{r[-1]}' if len(r) > 2 else ''.join(r) for r in runs)}]"
