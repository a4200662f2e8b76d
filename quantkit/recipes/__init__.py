"""Recipes in four dialects: ``quantkit recipe``.

lint(path, model)        the problems of a recipe
show(path, model)        the types and sizes it gives, by class, layer and device
convert(path, to)        the recipe in another dialect; of a GGUF file, its recipe
diff(a, b, model)        the tensors whose types differ
write_recipe(types)      the text of a short recipe with exactly these types
"""

from quantkit.recipes.convert import ConvertedRecipe, convert
from quantkit.recipes.dialects import DIALECTS, Recipe, detect_dialect, parse_rules, read_rules, resolve
from quantkit.recipes.diff import RecipeDiff, diff
from quantkit.recipes.lint import Finding, lint
from quantkit.recipes.show import RecipeSummary, Sum, show
from quantkit.recipes.write import rules_for, write_recipe

__all__ = [
    "ConvertedRecipe",
    "DIALECTS",
    "Finding",
    "Recipe",
    "RecipeDiff",
    "RecipeSummary",
    "Sum",
    "convert",
    "detect_dialect",
    "diff",
    "lint",
    "parse_rules",
    "read_rules",
    "resolve",
    "rules_for",
    "show",
    "write_recipe",
]
