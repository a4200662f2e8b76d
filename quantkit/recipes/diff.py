"""``diff_recipe``: tensors whose types differ between two recipes or files, with their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.names import tensor_class
from quantkit.recipes.contents import Contents, is_gguf, read_contents, read_model
from quantkit.recipes.dialects import Recipe, read_rules


@dataclass(frozen=True)
class TypeChange:
    """A tensor whose type differs; "": a side lacks the tensor."""

    name: str
    a: str
    b: str
    a_bytes: int
    b_bytes: int

    @property
    def group(self) -> str:
        return tensor_class(self.name)


@dataclass(frozen=True)
class RecipeDiff(HtmlTable):
    """Differences of two recipes; ``by_model`` False: of their rules, and ``reordered`` the common ones."""

    changes: tuple[TypeChange, ...] = ()
    n_same: int = 0
    a_bytes: int = 0
    b_bytes: int = 0
    by_model: bool = True
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    reordered: bool = False

    @property
    def identical(self) -> bool:
        return not (self.changes or self.only_a or self.only_b or self.reordered)

    def as_table(self) -> Table:
        """Return the tensors whose types differ; without a model, the rules that only one recipe has."""
        if not self.by_model:
            rules = [*((rule, "A") for rule in self.only_a), *((rule, "B") for rule in self.only_b)]
            return table_of("rule, only in", rules, f"{self.n_same} rules are in both")
        rows = ((c.name, c.a or None, c.b or None, c.a_bytes, c.b_bytes) for c in self.changes)
        return table_of("tensor, type A, type B, bytes A, bytes B", rows, f"{self.n_same} tensors have the same type")


@checked
def diff_recipe(a: str | Path, b: str | Path, *, model: str | Path | None = None, title: str = "COPY") -> RecipeDiff:
    """Compare two recipes or GGUF files: by the types of a model's tensors, or rule by rule.

    ``model``: by default a GGUF file among the two. ``title``: TYPE of tensors that no rule matches.
    Raises RecipeError for a file that is neither a recipe nor a model.
    """
    files = [path for path in (a, b) if is_gguf(path)]
    if model is None and not files:
        return _by_rules(read_rules(a), read_rules(b))
    header = read_model(model if model is not None else files[0])
    return compare_contents(read_contents(a, header, title), read_contents(b, header, title))


def compare_contents(a: Contents, b: Contents) -> RecipeDiff:
    """Compare the types of all tensors."""
    of_a, of_b = ({t.name: t for t in side.tensors} for side in (a, b))
    changes = []
    for name in dict.fromkeys((*of_a, *of_b)):
        x, y = of_a.get(name), of_b.get(name)
        if x is None or y is None or x.type is not y.type:
            changes.append(
                TypeChange(
                    name, str(x.type) if x else "", str(y.type) if y else "", x.nbytes if x else 0, y.nbytes if y else 0
                )
            )
    a_bytes, b_bytes = (sum(t.nbytes for t in side.tensors) for side in (a, b))
    return RecipeDiff(tuple(changes), len(of_a.keys() | of_b.keys()) - len(changes), a_bytes, b_bytes)


def _by_rules(a: Recipe, b: Recipe) -> RecipeDiff:
    rules_a, rules_b = ([f"{rule.pattern} = {rule.type}" for rule in recipe.rules] for recipe in (a, b))
    only_a, only_b = [r for r in rules_a if r not in set(rules_b)], [r for r in rules_b if r not in set(rules_a)]
    both = [[r for r in side if r in set(opposite)] for side, opposite in ((rules_a, rules_b), (rules_b, rules_a))]
    return RecipeDiff(
        n_same=len(both[0]), by_model=False, only_a=tuple(only_a), only_b=tuple(only_b), reordered=both[0] != both[1]
    )
