"""Recipes in and out: ``quantkit recipe``. Rules of four dialects are read, checked, shown, compared and converted.

write_recipe(types)      the text of few rules that give exactly these types
read_rules(path)         the rules of a file, of any dialect
"""

from quantkit.recipes.dialects import DIALECTS, Recipe, dialect_of, parse_rules, read_rules, resolve
from quantkit.recipes.write import rules_for, write_recipe

__all__ = ["DIALECTS", "Recipe", "dialect_of", "parse_rules", "read_rules", "resolve", "rules_for", "write_recipe"]
