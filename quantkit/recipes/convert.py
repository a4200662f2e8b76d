"""``convert``: a recipe in another dialect, verified on a model, or the recipe of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.formats.gguf.rules import n_dims
from quantkit.pipeline.presets import is_target
from quantkit.pipeline.recipe import Rule, abbreviate
from quantkit.recipes.contents import Model, is_gguf, read_model
from quantkit.recipes.dialects import DIALECTS, Recipe, find_differences, read_rules, text_of, tree_of
from quantkit.recipes.portable import READERS, DialectPattern, NotPortable, rewrite
from quantkit.recipes.write import rules_for
from quantkit.types import TensorType


@dataclass(frozen=True)
class ConvertedRecipe:
    """A converted recipe.

    ``omitted``: rules, or tensors, without an equivalent; ``proved_tensors``: number of tensors with verified types,
    None without a model; ``rules``: their number.
    """

    text: str
    source: str
    dialect: str
    notes: tuple[str, ...]
    omitted: tuple[str, ...]
    proved_tensors: int | None
    rules: int


@checked
def convert_recipe(
    path: str | Path,
    to: str,
    *,
    dialect: str | None = None,
    model: str | Path | None = None,
    replace: Mapping[TensorType, TensorType] | None = None,
) -> ConvertedRecipe:
    """Convert the recipe ``path`` to the dialect ``to``, or extract that of a GGUF file.

    With ``model`` the program of each dialect gives every tensor the same type, by exact names where rules have no
    equivalent. ``replace``: types for those that the other project lacks. Raises RecipeError.
    """
    if to not in DIALECTS:
        raise RecipeError(f"unknown recipe dialect {to!r}: choose one of {', '.join(DIALECTS)}", "QK-E203")
    if is_gguf(path):
        return _extract(read_model(path), to, replace or {})
    return convert_rules(read_rules(path, dialect), to, None if model is None else read_model(model), replace or {})


def _extract(model: Model, target: str, replace: Mapping[TensorType, TensorType]) -> ConvertedRecipe:
    """Return the recipe of a file, of its matrices: no program applies rules to vectors."""
    weights = {t.name: t.type for t in model.tensors.values() if n_dims(t.shape) > 1 and is_target(t.type)}
    types, missing = _replace_types(weights, target, replace)
    other_names = [name for name in model.tensors if name not in types]
    rules = rules_for(types, target, other_names=other_names)
    notes = [_missing_type_note(t, target, f"{abbreviate(names)} omitted") for t, names in missing.items()]
    omitted = tuple(name for names in missing.values() for name in names)
    text = text_of(rules, [f"the types of {model.path.name}"], target)
    return ConvertedRecipe(text, "GGUF", target, tuple(notes), omitted, len(model.tensors), len(rules))


def _replace_types(
    types: Mapping[str, TensorType], target: str, replace: Mapping[TensorType, TensorType]
) -> tuple[dict[str, TensorType], dict[TensorType, list[str]]]:
    """Return the types that a dialect supports, by tensor name, and the tensors of other types, by type."""
    result: dict[str, TensorType] = {}
    missing: dict[TensorType, list[str]] = {}
    for name, t in types.items():
        replacement = replace.get(t, t)
        if _has_type(target, replacement):
            result[name] = replacement
        else:
            missing.setdefault(replacement, []).append(name)
    return result, missing


def _has_type(dialect: str, t: TensorType) -> bool:
    tree = tree_of(dialect)
    return tree is None or t.is_in(tree)


def _missing_type_note(t: TensorType, target: str, effect: str) -> str:
    return f"{READERS[target]} has no {t}: {effect}; choose another with --replace {t}=TYPE"


def convert_rules(
    recipe: Recipe, target: str, model: Model | None, replace: Mapping[TensorType, TensorType]
) -> ConvertedRecipe:
    """Convert the rules of a recipe; see ``convert_recipe``."""
    notes: list[str] = []
    omitted: list[str] = []
    rules: list[tuple[str, TensorType]] = []
    for rule in recipe.rules:
        t = replace.get(rule.type, rule.type)
        if not _has_type(target, t):
            notes.append(_missing_type_note(t, target, f"{rule} omitted"))
            omitted.append(str(rule))
            continue
        try:
            rules.append((_rewrite_rule(rule, recipe.dialect, target, notes), t))
        except NotPortable as e:
            if model is None:
                notes.append(
                    f"{READERS[target]} has no equivalent of {rule}: {e}; omitted (give -m MODEL to write exact names)"
                )
                omitted.append(str(rule))
    proved_tensors = None
    if model is not None:
        rules, proved_tensors = _prove_rules(recipe, rules, target, model, replace, notes)
    if target == "llama.cpp" and recipe.comments:
        notes.append("llama.cpp's recipe files have no comments: omitted them")
    comments = () if target == "llama.cpp" else recipe.comments
    text = text_of(rules, comments, target)
    return ConvertedRecipe(
        text, recipe.dialect, target, tuple(dict.fromkeys(notes)), tuple(omitted), proved_tensors, len(rules)
    )


def _rewrite_rule(rule: Rule, source: str, target: str, notes: list[str]) -> str:
    """Return a rule's pattern in another dialect; append a note if it is equivalent only for lower-case names."""
    pattern = rule.pattern
    if source == target:
        return pattern
    if source == "llama.cpp":
        pattern = pattern.lower()
    if target == "ours":
        if source in ("ik", "thireus") and pattern != pattern.lower():
            notes.append(f"{rule}: quantkit also matches lower case with capital letters, {READERS[source]} does not")
        return pattern
    result = rewrite(pattern, target)
    DialectPattern(result, target, rule.origin)  # raises NotPortable
    if result != pattern:
        notes.append(f"{rule} becomes {result}")
    return result


def _prove_rules(
    recipe: Recipe,
    rules: list[tuple[str, TensorType]],
    target: str,
    model: Model,
    replace: Mapping[TensorType, TensorType],
    notes: list[str],
) -> tuple[list[tuple[str, TensorType]], int]:
    """Return rules that give a model the types of ``recipe``, partly by exact names, and the number of tensors."""
    source_types = recipe.types(model.tensors)
    matches = {name: t for name, t in source_types.items() if t is not None}
    types, missing = _replace_types(matches, target, replace)
    missing_names = {name for names in missing.values() for name in names}
    expected = {name: types.get(name) for name in model.tensors if name not in missing_names}
    differences = find_differences(expected, rules, target)
    if not differences:
        return rules, len(expected)
    corrections = {name: t for name, (t, _) in differences.items() if t is not None}
    exact = rules_for(corrections, target, other_names=[name for name in expected if name not in corrections])
    if not find_differences(expected, [*exact, *rules], target):
        notes.append(
            f"added {len(exact)} rules in front, for {abbreviate(list(differences))}, which would get other types"
        )
        return [*exact, *rules], len(expected)
    notes.append(f"replaced all rules by exact names: {abbreviate(list(differences))} would get other types")
    return rules_for(types, target, other_names=[name for name in expected if name not in types]), len(expected)
