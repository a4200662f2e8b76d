"""Recipes in and out: ``quantkit recipe``. Rules of four dialects are read, checked, shown, compared and converted.

lint(path, model)        what is wrong with a recipe
show(path, model)        the types and sizes it gives, by class, layer and device
convert(path, to)        the same in another dialect; of a GGUF file, its recipe
diff(a, b, model)        the tensors whose types differ
write_recipe(types)      the text of few rules that give exactly these types
"""

from quantkit.recipes.convert import Converted, convert
from quantkit.recipes.dialects import DIALECTS, Recipe, dialect_of, parse_rules, read_rules, resolve
from quantkit.recipes.diff import RecipeDiff, diff
from quantkit.recipes.lint import Finding, lint
from quantkit.recipes.show import Shown, Sum, show
from quantkit.recipes.write import rules_for, write_recipe

__all__ = [
    "DIALECTS", "Converted", "Finding", "Recipe", "RecipeDiff", "Shown", "Sum", "convert", "dialect_of", "diff", "lint",
    "parse_rules", "read_rules", "resolve", "rules_for", "show", "write_recipe",
]  # fmt: skip
