"""Names are the field's: nouns for things, verbs for functions, no bare participle or pronoun.

The words are those of docs/explanation/glossary.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("quantkit", "tests", "benchmarks", "scripts")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
#: Words that say nothing of the thing they name. Not here: ``out`` (numpy's buffer), ``up``, ``gate`` and ``down`` (the
#: tensors), ``before`` and ``after`` (two states), ``used`` (memory), ``merged`` (tensors), ``read`` (the verb).
FORBIDDEN = {
    # fmt: off
    "found",
    "made",
    "kept",
    "said",
    "wanted",
    "taken",
    "given",
    "seen",
    "begun",
    "there",
    "here",
    "together",
    "alike",
    "each",
    "every",
    "other",
    "others",
    "more",
    "mine",
    "ours",
    "theirs",
    "own",
    "how",
    "what",
    "which",
    "who",
    "whose",
    "this",
    "that",
    "these",
    "those",
    "held",
    "listed",
    "done",
    "gone",
    "named",
    "older",
    "newer",
    "early",
    "late",
    "beside",
    "besides",
    "behind",
    "ahead",
    "told",
    "asked",
    "put",
    "brought",
    "written",
    "shown",
    "meant",
    "known",
    "fed",
    "woven",
    "drawn",
    "chosen",
    "got",
    "gotten",
    "sent",
    "lost",
    "broken",
    "spelled",
    "undone",
    "ended",
    "cut",
    "of",
    "by",
    "to",
    "into",
    "onto",
    "upon",
    "at",
    "again",
    "never",
    "ever",
    "still",
    "plus",
    "bare",
    "much",
    "many",
    "few",
    "enough",
    "some",
    "rest",
    "whole",
    "same",
    "unlike",
    "otherwise",
    "inside",
    "outside",
    "instead",
    "meanwhile",
    "afterwards",
    "apart",
    "around",
    "across",
    "along",
    "near",
    "far",
    "away",
    "back",
    "forth",
    "thus",
    "so",
    "yet",
    "counted",
    "measured",
    "called",
    "stopped",
    "started",
    "finished",
    "planned",
    "ran",
    "failed",
    "skipped",
    "matched",
    "filled",
    "packed",
    "unpacked",
    "needed",
    "joined",
    "cooked",
    "encoded",
    "decoded",
    "stretched",
    "stretch",
    "way",
    "ways",
    "thing",
    "things",
    "stuff",
    "kitchen",
    "dish",
    "dishes",
    "stands",
    "promised",
    "grown",
    "announced",
    "mentioned",
    "positioned",
    "rooted",
    "swept",
    # fmt: on
}
#: Names that users type (options, keys of cook.toml, parameters and fields of documented functions), keys of files,
#: arguments of kernels that C++ shares or that tables name, and names of other libraries.
EXCEPTIONS = {
    "quantkit/cache.py": {"to"},
    "quantkit/cli/cache.py": {"to"},
    "quantkit/cli/recipe.py": {"to"},
    "quantkit/cook/config.py": {"same"},
    "quantkit/formats/gguf/fields.py": {"of"},
    "quantkit/imatrix/collect.py": {"done"},
    "quantkit/imatrix/coverage.py": {"never"},
    "quantkit/imatrix/snapshot.py": {"done"},
    "quantkit/kernels/cpu/layer/elementwise.py": {"by"},
    "quantkit/kernels/cpu/layer/mixing.py": {"by", "to"},
    "quantkit/kernels/cpu/layer/rope.py": {"back", "each"},
    "quantkit/kernels/cpu/layer/route.py": {"chosen"},
    "quantkit/kernels/cpu/layer/streams.py": {"across"},
    "quantkit/kernels/cuda/encode/pipeline.py": {"other"},  # of __or__
    "quantkit/kernels/cuda/feedback/groups.py": {"held"},
    "quantkit/recipes/convert.py": {"to"},
    "quantkit/report/data.py": {"made", "never"},
    "quantkit/report/measure.py": {"known"},
    "quantkit/options/search.py": {"same"},
    "quantkit/options/sensitivity.py": {"together"},
    # Rows and helpers of the tables of checkpoints, which some 250 rows spell out.
    "scripts/checkpoint_table.py": {"more"},
    "scripts/checkpoint_table_encoders.py": {"given", "more"},
    "scripts/checkpoint_table_decoders.py": {"ahead", "each", "given", "more", "named", "of", "outside", "written"},
    "scripts/checkpoint_table_mixtures.py": {"inside", "others"},
    "scripts/make_loader_tables.py": {"other"},  # of __or__
    "tests/lib/device_memory.py": {"put"},  # the verb, beside get
    "tests/lib/fake_cupy.py": {"by"},  # the y of a block, as CuPy has it
    "tests/lib/quantized_checkpoints.py": {"beside", "packed"},  # keys of tests/data/*.json
}


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module defines: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def bare_names(path: Path) -> set[str]:
    """Return the forbidden words among the names that a module defines, its own among them."""
    defined = {name.strip("_").lower() for name in names(ast.parse(path.read_text(encoding="utf-8")))}
    return (defined | {path.stem.strip("_")}) & FORBIDDEN


@pytest.fixture(scope="module")
def names_by_module() -> dict[str, set[str]]:
    """The bare names of every source."""
    return {path.relative_to(ROOT).as_posix(): bare_names(path) for path in SOURCES}


def test_names_are_nouns_and_verbs(names_by_module: dict[str, set[str]]) -> None:
    offenders = {module: names - EXCEPTIONS.get(module, set()) for module, names in names_by_module.items()}
    assert not {module: names for module, names in offenders.items() if names}


def test_exceptions_are_needed(names_by_module: dict[str, set[str]]) -> None:
    idle = {module: names - names_by_module.get(module, set()) for module, names in EXCEPTIONS.items()}
    assert not {module: names for module, names in idle.items() if names}


def test_functions_are_verbs() -> None:
    """A function whose name is one word is no participle; "checked" is a decorator, as functools has "cached"."""
    nouns = {"checked", "embed", "exceed", "feed", "seed", "speed"}
    offenders = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "quantkit")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
        if (name := node.name.strip("_")).endswith("ed") and "_" not in name and name not in nouns
    }
    assert not offenders
