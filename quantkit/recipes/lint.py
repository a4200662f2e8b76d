"""``lint_recipe``: problems of a recipe: rules without effect, types that runtimes lack, loose regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.formats.gguf.rules import n_dims
from quantkit.patterns import Pattern
from quantkit.pipeline.importance import importance_requirement
from quantkit.pipeline.recipe import Rule, abbreviate, lint_rules
from quantkit.recipes.contents import Contents, Model, contents_of_rules, read_model
from quantkit.recipes.dialects import Recipe, read_rules, tree_of
from quantkit.recipes.portable import DialectPattern, NotPortable
from quantkit.types import TensorType

#: Findings that make a rule or a file unusable; all others are warnings.
_ERRORS = {"QK-W001", "QK-W002", "QK-W004", "QK-W013", "QK-W020", "QK-W026", "QK-W028"}
_TREES = {"mainline": "llama.cpp", "ik": "ik_llama.cpp"}
#: A layer's number, or a group of numbers, after blk.; a dot that is neither escaped, repeated nor in a set.
_NUMBER = re.compile(r"(blk\\?\.(?:\d+|\((?:[\d|\[\]-]|\?:)+\)))(?![\d*+?{])")
_DOT = re.compile(r"(\\.|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]])*\])|\.(?![*+?{])")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a recipe: ``severity`` is "error" or "warning"."""

    code: str
    severity: str
    message: str


@checked
def lint_recipe(
    path: str | Path,
    *,
    model: str | Path | None = None,
    dialect: str | None = None,
    runtime: str | None = None,
    title: str = "COPY",
    imatrix: bool = False,
) -> list[Finding]:
    """Return the problems of the recipe ``path``, for ``model`` if given. Raises RecipeError if it cannot be read.

    ``runtime``: "mainline" or "ik", which must load the file; default: the dialect's. ``imatrix``: an importance matrix
    will be used.
    """
    recipe = read_rules(path, dialect)
    return findings(recipe, None if model is None else read_model(model), runtime, title, imatrix=imatrix)


def findings(
    recipe: Recipe, model: Model | None, runtime: str | None = None, title: str = "COPY", *, imatrix: bool = False
) -> list[Finding]:
    """Return the findings about rules.

    In addition to those of recipe.lint_rules:

    QK-W020  a type that the runtime, or any, lacks
    QK-W021  rows that are not a multiple of blocks
    QK-W022  a type that needs an importance matrix
    QK-W023  a rule that matches only tensors that are never quantized
    QK-W024  a layer number that also matches longer numbers
    QK-W025  an unescaped dot, which matches any character
    QK-W026  a rule that occurs twice
    QK-W028  a rule that the dialect's program cannot read
    """
    messages = [
        *_duplicates(recipe.rules),
        *_unreadable(recipe),
        *_missing_types(recipe, runtime or tree_of(recipe.dialect)),
    ]
    if model is None:
        messages += [] if imatrix else _rules_without_imatrix(recipe.rules)
    else:
        names = list(model.tensors)
        messages += [(finding.code, finding.message) for finding in lint_rules(recipe.rules, names)]
        messages += _loose_patterns(recipe.rules, names)
        contents = contents_of_rules(recipe.rules, model, title)
        messages += _ineffective(recipe.rules, contents)
        messages += _indivisible_rows(contents)
        messages += [] if imatrix else _tensors_without_imatrix(contents)
    return [Finding(code, "error" if code in _ERRORS else "warning", text) for code, text in messages]


_Messages = Iterator[tuple[str, str]]


def _duplicates(rules: Sequence[Rule]) -> _Messages:
    first_rules: dict[str, Rule] = {}
    for rule in rules:
        first = first_rules.setdefault(rule.pattern, rule)
        if first is not rule:
            problem = "again" if first.type is rule.type else f"but {first}, which takes precedence, gives another type"
            yield "QK-W026", f"{rule} occurs {problem}"


def _unreadable(recipe: Recipe) -> _Messages:
    for rule in recipe.rules if recipe.dialect != "ours" else ():
        try:
            DialectPattern(rule.pattern, recipe.dialect, rule.origin)
        except NotPortable as e:
            yield "QK-W028", f"{rule} does not work in {recipe.dialect}: {e}"


def _missing_types(recipe: Recipe, runtime: str | None) -> _Messages:
    if runtime not in (None, *_TREES):
        raise RecipeError(f"unknown runtime {runtime!r}: choose llama.cpp or ik", "QK-E203")
    for t, rule in {rule.type: rule for rule in reversed(recipe.rules)}.items():
        if runtime is not None and not t.is_in(runtime):
            yield "QK-W020", f"{rule}: {_TREES[runtime]} has no type {t}"
        elif t.trees == "none":
            yield "QK-W020", f"{rule}: no runtime supports the type {t}"
    examples = {tree: next((r for r in recipe.rules if r.type.trees == tree), None) for tree in _TREES}
    if runtime is None and (mainline := examples["mainline"]) and (ik := examples["ik"]):
        yield "QK-W020", f"no runtime loads both {ik} and {mainline}"


def _rules_without_imatrix(rules: Sequence[Rule]) -> _Messages:
    for t, rule in {rule.type: rule for rule in reversed(rules)}.items():
        if t.imatrix == "required" or t.needs_imatrix:
            yield "QK-W022", f"{rule}: {t} needs an importance matrix (--imatrix)"


def _tensors_without_imatrix(contents: Contents) -> _Messages:
    names_by_type: dict[TensorType, list[str]] = {}
    for t in contents.tensors:
        if t.decided_by == "rule" and importance_requirement(t.name, t.type, ik=t.type.trees == "ik"):
            names_by_type.setdefault(t.type, []).append(t.name)
    for kind, names in names_by_type.items():
        yield "QK-W022", f"{abbreviate(names)}: {kind} needs an importance matrix (--imatrix)"


def _indivisible_rows(contents: Contents) -> _Messages:
    names_by_types: dict[tuple[TensorType, TensorType, int], list[str]] = {}
    for t in contents.tensors:
        if t.refused_type is not None:
            names_by_types.setdefault((t.refused_type, t.type, t.shape[0]), []).append(t.name)
    for (requested, fallback, n), names in names_by_types.items():
        reason = f"rows of {n} are not a multiple of blocks of {requested.block}"
        reason = reason if n % requested.block else "the number of rows is not a multiple of its groups"
        yield "QK-W021", f"{abbreviate(names)}: {requested} becomes {fallback}: {reason}"


def _ineffective(rules: Sequence[Rule], contents: Contents) -> _Messages:
    """Yield rules that match only tensors that keep their type, except rules that set this very type."""
    effective = {id(t.rule) for t in contents.tensors if t.decided_by == "rule"}
    for rule in rules:
        unaffected = [t for t in contents.tensors if t.rule is rule and t.type is not rule.type]
        if unaffected and id(rule) not in effective:
            subject = "vectors" if all(n_dims(t.shape) < 2 for t in unaffected) else "tensors that are never quantized"
            yield "QK-W023", f"{rule} matches only {subject}: {abbreviate([t.name for t in unaffected])}"


def _loose_patterns(rules: Sequence[Rule], names: Sequence[str]) -> _Messages:
    for rule in rules:
        hits = [name for name in names if rule.matches(name)]
        if hits and (extra := _extra_matches(rule, hits, lambda text: _NUMBER.sub(r"\1(?![0-9])", text))):
            yield "QK-W024", f"{rule} also matches {abbreviate(extra)}: end the layer number with \\."
        elif hits and (extra := _extra_matches(rule, hits, lambda text: _DOT.sub(lambda m: m[1] or r"\.", text))):
            yield "QK-W025", f"{rule} also matches {abbreviate(extra)}: write \\. for a dot"


def _extra_matches(rule: Rule, hits: Sequence[str], stricter: Callable[[str], str]) -> list[str]:
    """Return the matches that a stricter pattern excludes; [] if it matches the same or nothing."""
    text = stricter(rule.pattern)
    if text == rule.pattern:
        return []
    try:
        strict = Pattern(text, rule.origin, ignore_case=True)
    except RecipeError:
        return []
    extra = [name for name in hits if strict.search(name) is None]
    return extra if len(extra) < len(hits) else []
