"""Types of all tensors, from a recipe and the header of a model, or from the header of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError, os_error_code
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, open_gguf
from quantkit.formats.remote import locate
from quantkit.pipeline.choose import ModelFacts, Request, choose_types, iteration_order
from quantkit.pipeline.presets import preset_by_name
from quantkit.pipeline.recipe import Rule
from quantkit.quantize import QuantizeOptions, plan_quantize
from quantkit.recipes.dialects import Recipe, read_rules
from quantkit.recipes.write import rules_for
from quantkit.types import TensorType


@dataclass(frozen=True)
class Model:
    """The header of a GGUF file with all its shards."""

    path: Path
    architecture: str
    tensors: Mapping[str, TensorInfo]
    n_layer: int
    #: Experts of a layer, and those that a token uses; 0 without experts.
    experts: int
    experts_used: int
    file_bytes: int
    fields: Mapping[str, Field]

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are also the output matrix."""
        return "output.weight" not in self.tensors


@dataclass(frozen=True)
class TypedTensor:
    """A tensor with its type.

    ``decided_by``, ``reason``: as in ``pipeline.choose.Choice``; ``refused_type``: a type whose blocks do not fit
    its rows.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    nbytes: int
    decided_by: str
    reason: str
    rule: Rule | None = None
    refused_type: TensorType | None = None


@dataclass(frozen=True)
class Contents:
    """All tensors of a model with their types. ``exact``: ``file_bytes`` is the exact size of the file."""

    model: Model
    tensors: tuple[TypedTensor, ...]
    file_bytes: int
    exact: bool

    @property
    def types(self) -> dict[str, TensorType]:
        return {t.name: t.type for t in self.tensors}


def is_gguf(path: str | Path) -> bool:
    """Return whether a file starts with GGUF's magic; pipes are not read."""
    path = locate(path)
    try:
        if not path.is_file() and path.exists():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as e:
        raise RecipeError(f"{path}: {e.strerror or e}", os_error_code(e)) from None


def read_model(path: str | Path) -> Model:
    """Return the header of a model, whose data may be missing. Raises RecipeError."""
    path = locate(path)
    with open_gguf(path, header_only=True) as file:
        architecture = file.get("general.architecture")
        if not isinstance(architecture, str) or not file.tensors:
            raise RecipeError(f"{path} is not a model: it has no general.architecture, or no tensors", "QK-E123")
        return Model(
            path=path,
            architecture=architecture,
            tensors=dict(file.tensors),
            n_layer=_read_count(file, f"{architecture}.block_count"),
            experts=_read_count(file, f"{architecture}.expert_count"),
            experts_used=_read_count(file, f"{architecture}.expert_used_count"),
            file_bytes=sum(shard.stat().st_size for shard in file.paths),
            fields=dict(file.fields),
        )


def _read_count(file: GGUFFile, key: str) -> int:
    """Return a positive value of the metadata; 0 if it is missing or of another kind."""
    value = file.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def contents_of_file(model: Model) -> Contents:
    """Return the tensors of a file with their types."""
    tensors = tuple(
        TypedTensor(t.name, t.shape, t.type, t.nbytes, "file", "in the file") for t in model.tensors.values()
    )
    return Contents(model, tensors, model.file_bytes, exact=True)


def contents_of_rules(
    rules: Sequence[Rule], model: Model, title: str = "COPY", *, imatrix: str | Path | None = None
) -> Contents:
    """Return the types that ``quantize`` gives the tensors of a model by rules, and by TYPE ``title`` without a match.

    Without the importance matrix that a type needs, the size is approximate, with the header of the source.
    """
    imatrix_path = None if imatrix is None else locate(imatrix)
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
    tensors_with_types = tuple(
        TypedTensor(
            c.name, t.shape, c.type, c.type.tensor_bytes(t.shape), c.step, c.reason_text, c.rule, c.fallback_from
        )
        for t, c in zip(tensors, choices, strict=True)
    )
    options = QuantizeOptions(
        ready_rules=tuple(rules), rules=tree, allow_requantize=True, ignore_imatrix_rules=True, imatrix=imatrix_path
    )  # fmt: skip
    try:
        return Contents(
            model, tensors_with_types, plan_quantize(model.path, Path("out.gguf"), title, options).nbytes, exact=True
        )
    except RecipeError:  # a type that needs an importance matrix
        header = model.file_bytes - sum(t.nbytes for t in model.tensors.values())
        return Contents(
            model, tensors_with_types, max(0, header) + sum(t.nbytes for t in tensors_with_types), exact=False
        )


def read_contents(
    path: str | Path, model: Model | None, title: str = "COPY", *, dialect: str | None = None
) -> Contents:
    """Return the types of a recipe on a model, or of a GGUF file. Raises RecipeError for a recipe without a model."""
    if is_gguf(path):
        return contents_of_file(read_model(path))
    if model is None:
        raise RecipeError(f"{path} is a recipe: give its model with -m", "QK-E202")
    return contents_of_rules(effective_rules(read_rules(path, dialect), model), model, title)


def effective_rules(recipe: Recipe, model: Model) -> list[Rule]:
    """Return the rules of a recipe for quantkit: exact ones if the program of the dialect gives other types."""
    if recipe.dialect == "ours":
        return list(recipe.rules)
    dialect_types, own_types = (
        recipe.types(model.tensors),
        Recipe(recipe.name, "ours", recipe.rules).types(model.tensors),
    )
    if dialect_types == own_types:
        return list(recipe.rules)
    types = {name: t for name, t in dialect_types.items() if t is not None}
    other_names = [name for name, t in dialect_types.items() if t is None]
    rules = rules_for(types, other_names=other_names)
    return [Rule(pattern, t, f"{recipe.name}, as {recipe.dialect} reads it") for pattern, t in rules]
