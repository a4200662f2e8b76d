"""What a recipe gives on a model: sizes by class, layer, type and device, and bytes read per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.model.placement import Placement, parse_rules
from quantkit.names import tensor_class
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, layer_of
from quantkit.pipeline.runtimes import Runtime, runtimes
from quantkit.recipes.contents import (
    Contents,
    Given,
    Model,
    contents_of_file,
    contents_of_rules,
    effective,
    is_gguf,
    read_model,
)
from quantkit.recipes.dialects import read_rules

#: The experts, as llama.cpp's --cpu-moe names them (common/common.h, LLM_FFN_EXPS_REGEX).
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True)
class Sum:
    """Tensors counted together; ``token_bytes``: what generating a token reads of them."""

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
class Shown:
    """All sums. ``unnamed``: tensors that might be quantized and that no rule names."""

    contents: Contents
    by_class: tuple[Sum, ...]
    by_layer: tuple[Sum, ...]
    by_type: tuple[Sum, ...]
    by_device: tuple[Sum, ...]
    total: Sum
    unnamed: tuple[str, ...]
    runtimes: tuple[Runtime, ...]
    notes: tuple[str, ...]


def show(
    path: Path,
    *,
    model: Path | None = None,
    title: str = "COPY",
    dialect: str | None = None,
    imatrix: Path | None = None,
    gpu_layers: int = 0,
    devices: Sequence[str] = ("CUDA0",),
    overrides: Sequence[str] = (),
    cpu_moe: bool = False,
    n_cpu_moe: int = 0,
) -> Shown:
    """Show what a recipe gives on ``model``, or what a GGUF file has.

    ``title``: TYPE where no rule matches. ``gpu_layers``, ``overrides`` (REGEX=DEVICE), ``cpu_moe`` and ``n_cpu_moe``
    place tensors as -ngl, -ot, --cpu-moe and --n-cpu-moe do, the first rule first. Raises RecipeError.
    """
    if cpu_moe and n_cpu_moe:
        raise RecipeError("--cpu-moe and --n-cpu-moe exclude each other: give only one of them")
    notes: list[str] = []
    if is_gguf(path):
        if model is not None:
            raise RecipeError(f"{path} is a model that has its types: leave -m away")
        found = contents_of_file(read_model(path))
    else:
        if model is None:
            raise RecipeError(f"{path} is a recipe: give the model it is for with -m")
        recipe, known = read_rules(path, dialect), read_model(model)
        found = contents_of_rules(effective(recipe, known), known, title, imatrix=imatrix)
        notes += [f"{path.name} is read as {recipe.dialect}"] if dialect is None else []
    rules = [*parse_rules(overrides)]
    rules += [(rf"blk\.{i}{_EXPERTS}", "CPU") for i in range(min(n_cpu_moe, found.model.n_layer))]
    rules += [(_EXPERTS, "CPU")] if cpu_moe else []
    placement = Placement(gpu_layers, tuple(rules), tuple(devices))
    return summed(found, placement, notes)


def summed(found: Contents, placement: Placement, notes: Sequence[str] = ()) -> Shown:
    """Return all sums over the tensors, placed on devices."""
    model, tensors = found.model, found.tensors

    def place(t: Given) -> str:
        return placement.of_tensor(t.name, _layer(t.name, model), model.n_layer)

    by_class, by_layer, by_type, by_device = (
        _grouped(tensors, model, lambda t: tensor_class(t.name)),
        _grouped(tensors, model, lambda t: f"{n}" if (n := layer_of(t.name)) >= 0 else "none", by_size=False),
        _grouped(tensors, model, lambda t: str(t.type)),
        _grouped(tensors, model, place),
    )
    unnamed = tuple(t.name for t in tensors if t.by in ("COPY", "preset"))
    where = runtimes(model.architecture, ((t.name, t.type) for t in tensors))
    return Shown(
        found, by_class, by_layer, by_type, by_device, _sum("total", tensors, model), unnamed, where, tuple(notes)
    )


def _layer(name: str, model: Model) -> int:
    """Return the layer a tensor is placed with: -1 for embeddings, the number of layers for the output."""
    return n if (n := layer_of(name)) >= 0 else -1 if name in TOKEN_EMBD_NAMES else model.n_layer


def _grouped(
    tensors: Iterable[Given], model: Model, key: Callable[[Given], str], *, by_size: bool = True
) -> tuple[Sum, ...]:
    members: dict[str, list[Given]] = {}
    for t in tensors:
        members.setdefault(key(t), []).append(t)
    sums = [_sum(name, group, model) for name, group in members.items()]
    if by_size:
        return tuple(sorted(sums, key=lambda s: (-s.nbytes, s.name)))
    return tuple(sorted(sums, key=lambda s: (s.name.isdecimal(), int(s.name) if s.name.isdecimal() else 0)))


def _sum(name: str, tensors: Sequence[Given], model: Model) -> Sum:
    sizes: dict[str, int] = {}
    for t in tensors:
        sizes[str(t.type)] = sizes.get(str(t.type), 0) + t.nbytes
    return Sum(
        name,
        tuple(sorted(sizes, key=lambda each: -sizes[each])),
        len(tensors),
        sum(math.prod(t.shape) for t in tensors),
        sum(t.nbytes for t in tensors),
        sum(_read_by_token(t, model) for t in tensors),
    )


def _read_by_token(t: Given, model: Model) -> int:
    """Return the bytes a token reads: of experts those it uses, of embeddings a row unless they are the output, too."""
    if t.name in TOKEN_EMBD_NAMES and not (model.tied and t.name == "token_embd.weight"):
        return t.nbytes // max(1, math.prod(t.shape[1:]))
    if "_exps." in t.name and 0 < model.experts_used <= model.experts:
        return t.nbytes * model.experts_used // model.experts
    return t.nbytes
