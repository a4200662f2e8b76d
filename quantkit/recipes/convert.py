"""A recipe of one dialect in another, proved on a model; or the recipe of a file that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.pipeline.facts import n_dims
from quantkit.pipeline.presets import is_target
from quantkit.pipeline.recipe import Rule, and_more
from quantkit.recipes.contents import Model, is_gguf, read_model
from quantkit.recipes.dialects import DIALECTS, Recipe, check_same, read_rules, text_of, tree_of
from quantkit.recipes.portable import READERS, NotPortable, Theirs, rewritten
from quantkit.recipes.write import rules_for
from quantkit.types import TensorType


@dataclass(frozen=True)
class Converted:
    """The text of the recipe made, notes, and the rules it lacks. ``proved``: tensors whose types are the same."""

    text: str
    source: str
    dialect: str
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    proved: int | None
    rules: int


def convert(
    path: Path,
    to: str,
    *,
    dialect: str | None = None,
    model: Path | None = None,
    replace: Mapping[TensorType, TensorType] | None = None,
) -> Converted:
    """Convert the recipe ``path`` to the dialect ``to``, or extract that of a GGUF file.

    With ``model`` every tensor's type is the same as each program finds it, by exact names where rules cannot say it.
    ``replace``: types for those that the other tree lacks. Raises RecipeError for what cannot be read or said.
    """
    if to not in DIALECTS:
        raise RecipeError(f"there is no dialect {to!r} of recipes: write {', '.join(DIALECTS)}")
    if is_gguf(path):
        return _extracted(read_model(path), to, replace or {})
    return converted(read_rules(path, dialect), to, None if model is None else read_model(model), replace or {})


def _extracted(model: Model, to: str, replace: Mapping[TensorType, TensorType]) -> Converted:
    """Return the recipe of a file: of the weights, without vectors, which no program asks rules about."""
    weights = {t.name: t.type for t in model.tensors.values() if n_dims(t.shape) > 1 and is_target(t.type)}
    types, lost = _replaced(weights, to, replace)
    others = [name for name in model.tensors if name not in types]
    rules = rules_for(types, to, others=others)
    notes = [_lacks(t, to, f"{and_more(names)} left out") for t, names in lost.items()]
    left = tuple(name for names in lost.values() for name in names)
    text = text_of(rules, [f"the types of {model.path.name}"], to)
    return Converted(text, "GGUF", to, tuple(notes), left, len(model.tensors), len(rules))


def _replaced(
    types: Mapping[str, TensorType], to: str, replace: Mapping[TensorType, TensorType]
) -> tuple[dict[str, TensorType], dict[TensorType, list[str]]]:
    """Return the types a dialect has, by name, and the names of those it has not, by type."""
    kept: dict[str, TensorType] = {}
    lost: dict[TensorType, list[str]] = {}
    for name, t in types.items():
        found = replace.get(t, t)
        if _has(to, found):
            kept[name] = found
        else:
            lost.setdefault(found, []).append(name)
    return kept, lost


def _has(dialect: str, t: TensorType) -> bool:
    return t.trees in (tree_of(dialect) or t.trees, "both")


def _lacks(t: TensorType, to: str, what: str) -> str:
    return f"{READERS[to]} has no {t}: {what}; --replace {t}=TYPE names another"


def converted(recipe: Recipe, to: str, model: Model | None, replace: Mapping[TensorType, TensorType]) -> Converted:
    """Convert rules; see ``convert``."""
    notes: list[str] = []
    left: list[str] = []
    rules: list[tuple[str, TensorType]] = []
    for rule in recipe.rules:
        t = replace.get(rule.type, rule.type)
        if not _has(to, t):
            notes.append(_lacks(t, to, f"{rule} left out"))
            left.append(str(rule))
            continue
        try:
            rules.append((_in_dialect(rule, recipe.dialect, to, notes), t))
        except NotPortable as e:
            if model is None:
                notes.append(f"{READERS[to]} cannot say {rule}: {e}; left out, give -m MODEL to write exact names")
                left.append(str(rule))
    proved = None
    if model is not None:
        rules, proved = _proved(recipe, rules, to, model, replace, notes)
    if to == "llama.cpp" and recipe.comments:
        notes.append("llama.cpp's files have no comments: they are left out")
    comments = () if to == "llama.cpp" else recipe.comments
    text = text_of(rules, comments, to)
    return Converted(text, recipe.dialect, to, tuple(dict.fromkeys(notes)), tuple(left), proved, len(rules))


def _in_dialect(rule: Rule, source: str, to: str, notes: list[str]) -> str:
    """Return a rule's pattern in another dialect; notes say where it is only the same for names without capitals."""
    pattern = rule.pattern
    if source == to:
        return pattern
    if source == "llama.cpp":
        pattern = pattern.lower()
    if to == "ours":
        if source in ("ik", "thireus") and pattern != pattern.lower():
            notes.append(f"{rule}: capitals find small letters in quantkit, too, but not in {READERS[source]}")
        return pattern
    made = rewritten(pattern, to)
    Theirs(made, to, rule.origin)  # raises where the rewriting does not suffice
    if made != pattern:
        notes.append(f"{rule} is written {made}")
    return made


def _proved(
    recipe: Recipe,
    rules: list[tuple[str, TensorType]],
    to: str,
    model: Model,
    replace: Mapping[TensorType, TensorType],
    notes: list[str],
) -> tuple[list[tuple[str, TensorType]], int]:
    """Return rules that give every tensor of a model the same type as the source's: rewritten where they do not."""
    found = recipe.types(model.tensors)
    named = {name: t for name, t in found.items() if t is not None}
    types, lost = _replaced(named, to, replace)
    gone = {name for names in lost.values() for name in names}
    wanted = {name: types.get(name) for name in model.tensors if name not in gone}
    wrong = check_same(wanted, rules, to)
    if not wrong:
        return rules, len(wanted)
    first = {name: t for name, (t, _) in wrong.items() if t is not None}
    exact = rules_for(first, to, others=[name for name in wanted if name not in first])
    if not check_same(wanted, [*exact, *rules], to):
        notes.append(
            f"{len(exact)} rules are added in front, for {and_more(list(wrong))}: there, the rules alone differ"
        )
        return [*exact, *rules], len(wanted)
    notes.append(f"the rules are written anew, by exact names: {and_more(list(wrong))} would differ")
    return rules_for(types, to, others=[name for name in wanted if name not in types]), len(wanted)
