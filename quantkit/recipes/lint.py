"""What is wrong with a recipe, before hours go into it: rules without effect, types a runtime lacks, loose regexes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.patterns import Pattern
from quantkit.pipeline.facts import n_dims
from quantkit.pipeline.importance import must_have_importance
from quantkit.pipeline.recipe import Rule, and_more, lint_rules
from quantkit.recipes.contents import Contents, Model, contents_of_rules, read_model
from quantkit.recipes.dialects import Recipe, read_rules, tree_of
from quantkit.recipes.portable import NotPortable, Theirs
from quantkit.types import TensorType

#: Findings that make a rule or a file useless; the others are worth a look.
_ERRORS = {"QK-W001", "QK-W002", "QK-W004", "QK-W013", "QK-W020", "QK-W026", "QK-W028"}
_TREES = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}
#: A layer's number, or a group of numbers, behind blk.; a dot that is neither escaped, repeated nor in a set.
_NUMBER = re.compile(r"(blk\\?\.(?:\d+|\((?:[\d|\[\]-]|\?:)+\)))(?![\d*+?{])")
_DOT = re.compile(r"(\\.|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]])*\])|\.(?![*+?{])")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a recipe: ``severity`` is "error" or "warning"."""

    code: str
    severity: str
    message: str


def lint(
    path: Path,
    *,
    model: Path | None = None,
    dialect: str | None = None,
    runtime: str | None = None,
    title: str = "COPY",
    imatrix: bool = False,
) -> list[Finding]:
    """Return what is wrong with the recipe ``path``, for ``model`` if given. Raises RecipeError if it cannot be read.

    ``runtime``: "mainline" or "ik", where it must work; by default that of its dialect. ``imatrix``: there will be one.
    """
    recipe = read_rules(path, dialect)
    return findings(recipe, None if model is None else read_model(model), runtime, title, imatrix=imatrix)


def findings(
    recipe: Recipe, model: Model | None, runtime: str | None = None, title: str = "COPY", *, imatrix: bool = False
) -> list[Finding]:
    """Return the findings about rules, in the order of their codes' families.

    Beside those of recipe.lint_rules: QK-W020 a type that the runtime, or any, lacks; QK-W021 rows do not divide into
    blocks; QK-W022 a type needs an importance matrix; QK-W023 a rule matches only tensors that are never quantized;
    QK-W024 a layer's number also matches longer ones; QK-W025 a bare dot matches more than a dot; QK-W026 a rule stands
    twice; QK-W028 the dialect's program does not read a rule.
    """
    said = [*_twice(recipe.rules), *_unread(recipe), *_lacking(recipe, runtime or tree_of(recipe.dialect))]
    if model is None:
        said += [] if imatrix else _needy(recipe.rules)
    else:
        names = list(model.tensors)
        said += [(found.code, found.message) for found in lint_rules(recipe.rules, names)]
        said += _loose(recipe.rules, names)
        given = contents_of_rules(recipe.rules, model, title)
        said += _beaten(recipe.rules, given)
        said += _misfits(given)
        said += [] if imatrix else _needed(given)
    return [Finding(code, "error" if code in _ERRORS else "warning", text) for code, text in said]


_Said = Iterator[tuple[str, str]]


def _twice(rules: Sequence[Rule]) -> _Said:
    seen: dict[str, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.pattern, rule)
        if first is not rule:
            what = "again" if first.type is rule.type else f"with another type than {first}, which decides"
            yield "QK-W026", f"{rule} stands there {what}"


def _unread(recipe: Recipe) -> _Said:
    for rule in recipe.rules if recipe.dialect != "ours" else ():
        try:
            Theirs(rule.pattern, recipe.dialect, rule.origin)
        except NotPortable as e:
            yield "QK-W028", f"{rule} does not work in {recipe.dialect}: {e}"


def _lacking(recipe: Recipe, runtime: str | None) -> _Said:
    if runtime not in (None, *_TREES):
        raise RecipeError(f"there is no runtime {runtime!r}: write mainline or ik")
    for t, rule in {rule.type: rule for rule in reversed(recipe.rules)}.items():
        if runtime is not None and t.trees not in (runtime, "both"):
            yield "QK-W020", f"{rule}: {_TREES[runtime]} has no type {t}"
    of = {tree: next((r for r in recipe.rules if r.type.trees == tree), None) for tree in _TREES}
    if runtime is None and (mainline := of["mainline"]) and (ik := of["ik"]):
        yield "QK-W020", f"no runtime loads both {ik} and {mainline}"


def _needy(rules: Sequence[Rule]) -> _Said:
    for t, rule in {rule.type: rule for rule in reversed(rules)}.items():
        if t.imatrix == "required" or t.needs_imatrix:
            yield "QK-W022", f"{rule}: {t} needs an importance matrix (--imatrix)"


def _needed(given: Contents) -> _Said:
    found: dict[TensorType, list[str]] = {}
    for t in given.tensors:
        if t.by == "rule" and must_have_importance(t.name, t.type, ik=t.type.trees == "ik"):
            found.setdefault(t.type, []).append(t.name)
    for kind, names in found.items():
        yield "QK-W022", f"{and_more(names)}: {kind} needs an importance matrix (--imatrix)"


def _misfits(given: Contents) -> _Said:
    found: dict[tuple[TensorType, TensorType, int], list[str]] = {}
    for t in given.tensors:
        if t.rows_refuse is not None:
            found.setdefault((t.rows_refuse, t.type, t.shape[0]), []).append(t.name)
    for (wanted, got, n), names in found.items():
        why = f"rows of {n} do not divide into blocks of {wanted.block}"
        why = why if n % wanted.block else "rows do not divide into its groups"
        yield "QK-W021", f"{and_more(names)}: {wanted} becomes {got}: {why}"


def _beaten(rules: Sequence[Rule], given: Contents) -> _Said:
    """Yield rules that decide nothing since what they match is kept as it is; F32 for a vector says what is."""
    won = {id(t.rule) for t in given.tensors if t.by == "rule"}
    for rule in rules:
        lost = [t for t in given.tensors if t.rule is rule and t.type is not rule.type]
        if lost and id(rule) not in won:
            what = "vectors" if all(n_dims(t.shape) < 2 for t in lost) else "tensors that are never quantized"
            yield "QK-W023", f"{rule} matches only {what}: {and_more([t.name for t in lost])}"


def _loose(rules: Sequence[Rule], names: Sequence[str]) -> _Said:
    for rule in rules:
        hits = [name for name in names if rule.matches(name)]
        if hits and (more := _lost(rule, hits, lambda text: _NUMBER.sub(r"\1(?![0-9])", text))):
            yield "QK-W024", f"{rule} also matches {and_more(more)}: end the layer's number with \\."
        elif hits and (more := _lost(rule, hits, lambda text: _DOT.sub(lambda m: m[1] or r"\.", text))):
            yield "QK-W025", f"{rule} also matches {and_more(more)}: write \\. for a dot"


def _lost(rule: Rule, hits: Sequence[str], stricter: Callable[[str], str]) -> list[str]:
    """Return what a stricter pattern does not match; nothing if it is the same, or would match nothing."""
    text = stricter(rule.pattern)
    if text == rule.pattern:
        return []
    try:
        strict = Pattern(text, rule.origin, ignore_case=True)
    except RecipeError:
        return []
    lost = [name for name in hits if strict.search(name) is None]
    return lost if len(lost) < len(hits) else []
