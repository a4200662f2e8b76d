"""What a recipe makes of a model, or what a file has: a type for every tensor, before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.formats.gguf import GGUFFile, TensorInfo, open_gguf
from quantkit.pipeline.choose import ModelFacts, Request, choose_types, iteration_order
from quantkit.pipeline.presets import preset_by_name
from quantkit.pipeline.recipe import Rule
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.recipes.dialects import Recipe, read_rules
from quantkit.recipes.write import rules_for
from quantkit.types import TensorType


@dataclass(frozen=True)
class Model:
    """The header of a GGUF file, of all its shards."""

    path: Path
    architecture: str
    tensors: Mapping[str, TensorInfo]
    n_layer: int
    #: Experts of a layer, and those a token uses; 0 without experts.
    experts: int
    experts_used: int
    file_bytes: int

    @property
    def tied(self) -> bool:
        """True if the token embeddings are the output, too."""
        return "output.weight" not in self.tensors


@dataclass(frozen=True)
class Given:
    """One tensor and the type it gets. ``by``: what decided. ``rows_refuse``: the type its rows do not allow."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    nbytes: int
    by: str
    reason: str
    rule: Rule | None = None
    rows_refuse: TensorType | None = None


@dataclass(frozen=True)
class Contents:
    """All tensors of a model with the types they get. ``exact``: the size is that of the file, to the byte."""

    model: Model
    tensors: tuple[Given, ...]
    file_bytes: int
    exact: bool

    @property
    def types(self) -> dict[str, TensorType]:
        return {t.name: t.type for t in self.tensors}


def is_gguf(path: Path) -> bool:
    """Tell whether a file begins as a GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as e:
        raise RecipeError(f"{path}: {e.strerror or e}") from None


def read_model(path: Path) -> Model:
    """Read the header of a model; its data may be missing."""
    with open_gguf(path, header_only=True) as file:
        architecture = file.get("general.architecture")
        if not isinstance(architecture, str) or not file.tensors:
            raise RecipeError(f"{path} is no model: it has no general.architecture, or no tensors")
        number = _numbers(file, architecture)
        nbytes = sum(shard.stat().st_size for shard in file.paths)
        return Model(
            path, architecture, dict(file.tensors), number("block_count"), number("expert_count"),
            number("expert_used_count"), nbytes,
        )  # fmt: skip


def _numbers(file: GGUFFile, architecture: str) -> Any:
    def number(key: str) -> int:
        value = file.get(f"{architecture}.{key}")
        return value if isinstance(value, int) and value > 0 else 0

    return number


def contents_of_file(model: Model) -> Contents:
    """Return what a file has."""
    tensors = tuple(Given(t.name, t.shape, t.type, t.nbytes, "file", "in the file") for t in model.tensors.values())
    return Contents(model, tensors, model.file_bytes, exact=True)


def contents_of_rules(
    rules: Sequence[Rule], model: Model, title: str = "COPY", *, imatrix: Path | None = None
) -> Contents:
    """Return what quantize makes of a model with these rules, and TYPE ``title`` where none matches.

    Without the imatrix that some types need the size of the header is the source's.
    """
    ik = any(rule.type.trees == "ik" for rule in rules)
    preset = preset_by_name(title)
    tree = "ik" if ik and preset.base is None else None
    tensors = [model.tensors[name] for name in iteration_order(model.tensors)]
    request = Request(
        preset, tree=tree, rules=tuple(rules), allow_requantize=True, has_imatrix=imatrix is not None
    )  # fmt: skip
    with open_gguf(model.path, header_only=True) as file:
        facts = ModelFacts.from_metadata(file.get, tensors, ik=request.ik)
    if request.ik:
        tensors = list(model.tensors.values())
    choices = choose_types(facts, tensors, request)
    given = tuple(
        Given(c.name, t.shape, c.type, c.type.tensor_bytes(t.shape), c.by, c.reason, c.rule, c.fallback_from)
        for t, c in zip(tensors, choices, strict=True)
    )
    options = QuantizeOptions(
        ready_rules=tuple(rules), rules=tree, allow_requantize=True, ignore_imatrix_rules=True, imatrix=imatrix
    )  # fmt: skip
    try:
        return Contents(model, given, plan_quantize(model.path, Path("out.gguf"), title, options).nbytes, exact=True)
    except RecipeError:  # a type that needs an importance matrix
        header = model.file_bytes - sum(t.nbytes for t in model.tensors.values())
        return Contents(model, given, max(0, header) + sum(t.nbytes for t in given), exact=False)


def contents(path: Path, model: Model | None, title: str = "COPY", *, dialect: str | None = None) -> Contents:
    """Return what a recipe makes of a model, or what a GGUF file has. RecipeError for a recipe without a model."""
    if is_gguf(path):
        return contents_of_file(read_model(path))
    if model is None:
        raise RecipeError(f"{path} is a recipe: give the model it is for with -m")
    return contents_of_rules(effective(read_rules(path, dialect), model), model, title)


def effective(recipe: Recipe, model: Model) -> list[Rule]:
    """Return the rules as ours: those of another dialect as exact ones where its program would find others."""
    if recipe.dialect == "ours":
        return list(recipe.rules)
    theirs, ours = recipe.types(model.tensors), Recipe(recipe.name, "ours", recipe.rules).types(model.tensors)
    if theirs == ours:
        return list(recipe.rules)
    named = {name: t for name, t in theirs.items() if t is not None}

    others = [name for name, t in theirs.items() if t is None]
    made = rules_for(named, others=others)
    return [Rule(pattern, t, f"{recipe.name}, as {recipe.dialect} reads it") for pattern, t in made]
