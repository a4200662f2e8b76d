"""``show``: sizes of a recipe on a model by class, layer, type and device, and bytes read per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.arguments import checked
from quantkit.errors import RecipeError
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.model.placement import Placement, parse_rules
from quantkit.names import tensor_class
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, layer_of
from quantkit.pipeline.runtimes import Runtime, runtimes
from quantkit.recipes.contents import (
    Contents,
    Model,
    TypedTensor,
    contents_of_file,
    contents_of_rules,
    effective_rules,
    is_gguf,
    read_model,
)
from quantkit.recipes.dialects import read_rules
from quantkit.recipes.portable import READERS
from quantkit.units import format_size

#: Experts, as in llama.cpp's --cpu-moe (common/common.h, LLM_FFN_EXPS_REGEX).
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True)
class Sum:
    """Sums over tensors; ``token_bytes``: bytes that the generation of a token reads."""

    name: str
    types: tuple[str, ...]
    tensors: int
    values: int
    nbytes: int
    token_bytes: int

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / max(1, self.values)


@dataclass(frozen=True)
class RecipeSummary(HtmlTable):
    """All sums. ``unnamed``: tensors that can be quantized and that no rule matches."""

    contents: Contents
    by_class: tuple[Sum, ...]
    by_layer: tuple[Sum, ...]
    by_type: tuple[Sum, ...]
    by_device: tuple[Sum, ...]
    total: Sum
    unnamed: tuple[str, ...]
    runtimes: tuple[Runtime, ...]
    notes: tuple[str, ...]

    def as_table(self) -> Table:
        """Return tensors, weights, bytes and bits per weight by class."""
        groups = (*self.by_class, self.total)
        rows = ((g.name, ", ".join(g.types), g.tensors, g.values, g.nbytes, g.bpw, g.token_bytes) for g in groups)
        header = "class, types, tensors, weights, bytes, bpw, bytes per token"
        return table_of(header, rows, f"file of {format_size(self.contents.file_bytes)}")


@checked
def show_recipe(
    path: str | Path,
    *,
    model: str | Path | None = None,
    title: str = "COPY",
    dialect: str | None = None,
    imatrix: str | Path | None = None,
    gpu_layers: int = 0,
    devices: Sequence[str] = ("CUDA0",),
    overrides: Sequence[str] = (),
    cpu_moe: bool = False,
    n_cpu_moe: int = 0,
) -> RecipeSummary:
    """Return the sums of a recipe on ``model``, or of a GGUF file.

    ``title``: TYPE of tensors that no rule matches. ``gpu_layers``, ``overrides`` (REGEX=DEVICE), ``cpu_moe`` and
    ``n_cpu_moe`` place tensors as -ngl, -ot, --cpu-moe and --n-cpu-moe do, the first rule first. Raises RecipeError.
    """
    if cpu_moe and n_cpu_moe:
        raise RecipeError("--cpu-moe and --n-cpu-moe are mutually exclusive: omit one of them", "QK-E201")
    notes: list[str] = []
    if is_gguf(path):
        if model is not None:
            raise RecipeError(f"{path} is a model, which has its own types: omit -m", "QK-E201")
        contents = contents_of_file(read_model(path))
    else:
        if model is None:
            raise RecipeError(f"{path} is a recipe: give its model with -m", "QK-E202")
        recipe, header = read_rules(path, dialect), read_model(model)
        contents = contents_of_rules(effective_rules(recipe, header), header, title, imatrix=imatrix)
        notes += [f"{Path(path).name}: read in the format of {READERS[recipe.dialect]}"] if dialect is None else []
    rules = [*parse_rules(overrides)]
    rules += [(rf"blk\.{i}{_EXPERTS}", "CPU") for i in range(min(n_cpu_moe, contents.model.n_layer))]
    rules += [(_EXPERTS, "CPU")] if cpu_moe else []
    placement = Placement(gpu_layers, tuple(rules), tuple(devices))
    return summarize(contents, placement, notes)


def summarize(contents: Contents, placement: Placement, notes: Sequence[str] = ()) -> RecipeSummary:
    """Return the sums over tensors, which ``placement`` assigns to devices."""
    model, tensors = contents.model, contents.tensors

    def layer(t: TypedTensor) -> str:
        number = layer_of(t.name)
        return str(number) if number >= 0 else "none"

    def device(t: TypedTensor) -> str:
        return placement.tensor_device(t.name, _placement_layer(t.name, model), model.n_layer)

    return RecipeSummary(
        contents=contents,
        by_class=_group_sums(tensors, model, lambda t: tensor_class(t.name)),
        by_layer=_group_sums(tensors, model, layer, by_size=False),
        by_type=_group_sums(tensors, model, lambda t: str(t.type)),
        by_device=_group_sums(tensors, model, device),
        total=_sum("total", tensors, model),
        unnamed=tuple(t.name for t in tensors if t.decided_by in ("COPY", "preset")),
        runtimes=runtimes(model.fields, ((t.name, t.type, t.shape) for t in tensors)),
        notes=tuple(notes),
    )


def _placement_layer(name: str, model: Model) -> int:
    """Return the layer by which a tensor is placed: -1 for embeddings, the number of layers for the output."""
    layer = layer_of(name)
    if layer >= 0:
        return layer
    return -1 if name in TOKEN_EMBD_NAMES else model.n_layer


def _group_sums(
    tensors: Iterable[TypedTensor], model: Model, key: Callable[[TypedTensor], str], *, by_size: bool = True
) -> tuple[Sum, ...]:
    members: dict[str, list[TypedTensor]] = {}
    for t in tensors:
        members.setdefault(key(t), []).append(t)
    sums = [_sum(name, group, model) for name, group in members.items()]
    if by_size:
        return tuple(sorted(sums, key=lambda s: (-s.nbytes, s.name)))
    return tuple(sorted(sums, key=lambda s: (s.name.isdecimal(), int(s.name) if s.name.isdecimal() else 0)))


def _sum(name: str, tensors: Sequence[TypedTensor], model: Model) -> Sum:
    sizes: dict[str, int] = {}
    for t in tensors:
        sizes[str(t.type)] = sizes.get(str(t.type), 0) + t.nbytes
    return Sum(
        name,
        tuple(sorted(sizes, key=lambda type_name: -sizes[type_name])),
        len(tensors),
        sum(math.prod(t.shape) for t in tensors),
        sum(t.nbytes for t in tensors),
        sum(_token_bytes(t, model) for t in tensors),
    )


def _token_bytes(t: TypedTensor, model: Model) -> int:
    """Return the bytes that a token reads: of experts those used, of embeddings that are no output a row."""
    if t.name in TOKEN_EMBD_NAMES and not (model.tied and t.name == "token_embd.weight"):
        return t.nbytes // max(1, math.prod(t.shape[1:]))
    if "_exps." in t.name and 0 < model.experts_used <= model.experts:
        return t.nbytes * model.experts_used // model.experts
    return t.nbytes
