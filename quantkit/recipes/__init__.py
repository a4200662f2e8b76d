"""Recipes in four dialects: ``quantkit recipe``.

lint_recipe(path, model)        the problems of a recipe
show_recipe(path, model)        the types and sizes it gives, by class, layer and device
convert_recipe(path, to)        the recipe in another dialect; of a GGUF file, its recipe
diff_recipe(a, b, model)        the tensors whose types differ
write_recipe(types)      the text of a short recipe with exactly these types
"""

from quantkit.recipes.convert import ConvertedRecipe, convert_recipe
from quantkit.recipes.dialects import DIALECTS, Recipe, detect_dialect, parse_recipe, read_rules, resolve
from quantkit.recipes.diff import RecipeDiff, diff_recipe
from quantkit.recipes.lint import Finding, lint_recipe
from quantkit.recipes.show import RecipeSummary, Sum, show_recipe
from quantkit.recipes.write import rules_for, write_recipe

__all__ = [
    "ConvertedRecipe",
    "DIALECTS",
    "Finding",
    "Recipe",
    "RecipeDiff",
    "RecipeSummary",
    "Sum",
    "convert_recipe",
    "detect_dialect",
    "diff_recipe",
    "lint_recipe",
    "parse_recipe",
    "read_rules",
    "resolve",
    "rules_for",
    "show_recipe",
    "write_recipe",
]
