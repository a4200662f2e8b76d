"""Two recipes, or files, compared: the tensors whose types differ, and what that is in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.names import tensor_class
from quantkit.recipes.contents import Contents, contents, is_gguf, read_model
from quantkit.recipes.dialects import Recipe, read_rules


@dataclass(frozen=True)
class TypeChange:
    """A tensor whose type differs; "" where a side has no such tensor."""

    name: str
    a: str
    b: str
    a_bytes: int
    b_bytes: int

    @property
    def group(self) -> str:
        return tensor_class(self.name)


@dataclass(frozen=True)
class RecipeDiff:
    """What differs. Without a model: ``only_a`` and ``only_b`` are rules as text, ``moved`` whether their order is."""

    changes: tuple[TypeChange, ...] = ()
    same: int = 0
    a_bytes: int = 0
    b_bytes: int = 0
    by_model: bool = True
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    moved: bool = False

    @property
    def identical(self) -> bool:
        return not (self.changes or self.only_a or self.only_b or self.moved)


def diff(a: Path, b: Path, *, model: Path | None = None, title: str = "COPY") -> RecipeDiff:
    """Compare two recipes or GGUF files: by what they give a model's tensors, else rule by rule.

    Without ``model`` a GGUF file among them is the model the other is for. ``title``: TYPE where no rule matches.
    """
    files = [path for path in (a, b) if is_gguf(path)]
    if model is None and not files:
        return _by_rules(read_rules(a), read_rules(b))
    known = read_model(model if model is not None else files[0])
    return compared(contents(a, known, title), contents(b, known, title))


def compared(a: Contents, b: Contents) -> RecipeDiff:
    """Compare what two recipes or files give each tensor."""
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
    one, two = ([f"{rule.pattern} = {rule.type}" for rule in recipe.rules] for recipe in (a, b))
    only_a, only_b = [r for r in one if r not in set(two)], [r for r in two if r not in set(one)]
    both = [[r for r in side if r in set(other)] for side, other in ((one, two), (two, one))]
    return RecipeDiff(
        same=len(both[0]), by_model=False, only_a=tuple(only_a), only_b=tuple(only_b), moved=both[0] != both[1]
    )
