"""Converted recipes in the programs that read them: each gives every tensor the type that the recipe says here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from header_models import DENSE, MLA, MOE, SHARED, Tensor, build_model, write_sparse
from test_choose import dry_run as llama_quantize
from test_choose_ik import dry_run as ik_quantize

from quantkit.recipes import convert_recipe, write_recipe
from quantkit.recipes.contents import read_model
from quantkit.types import TensorType, type_by_name

MODELS = {
    "qwen3moe": ("qwen3moe", (48, 32, 8, 128), MOE),
    "llama": ("llama", (80, 64, 8, 0), DENSE),
    "deepseek2": ("deepseek2", (61, 8, 1, 64), MLA),
    "glm4moe": ("glm4moe", (47, 48, 8, 16), SHARED),
}
#: Types of both trees, and those only one has.
BOTH = ("Q2_K", "IQ3_XXS", "Q4_K", "IQ4_XS", "Q5_K", "Q6_K", "Q8_0")
TREE_TYPES = {"llama.cpp": ("TQ2_0",), "ik": ("IQ4_KS", "IQ2_KL", "Q6_0")}


def make_model(name: str, folder: Path, tree_types: tuple[str, ...]) -> tuple[Path, dict[str, TensorType]]:
    """Write a model, and return it with a type for each of its matrices: by class and layer, as cooks give them."""
    arch, sizes, parts = MODELS[name]
    metadata, tensors = build_model(arch, sizes, parts, global_names=())
    write_sparse(folder / "model.gguf", metadata, tensors)
    rng, types = random.Random(name), list(map(type_by_name, (*BOTH, *tree_types)))
    quantizable = [tensor for tensor in tensors if is_asked(tensor)]
    return folder / "model.gguf", {
        t.name: rng.choice(types) if rng.random() < 0.1 else types[number_of(t) % len(types)] for t in quantizable
    }


def number_of(tensor: Tensor) -> int:
    """Return a number that most layers of a class share."""
    part, layer = tensor.name.split(".")[-2], tensor.name.split(".")[1]
    return sum(map(ord, part)) + (int(layer) // 9 if layer.isdecimal() else 0)


def is_asked(tensor: Tensor) -> bool:
    """Return whether both programs apply rules to a tensor, which they do not for vectors and routers."""
    is_quantizable = len(tensor.shape) > 1 and tensor.name.endswith("weight")
    return is_quantizable and not any(part in tensor.name for part in ("norm", "ffn_gate_inp"))


def converted(types: dict[str, TensorType], model: Path, dialect: str) -> str:
    """Return a quantkit recipe, converted to a dialect and verified on the model."""
    recipe = model.with_name("ours.recipe")
    remainder = [name for name in read_model(model).tensors if name not in types]
    recipe.write_text(write_recipe(types, ["types of a test"], "ours", other_names=remainder))
    result = convert_recipe(recipe, dialect, model=model)
    assert result.proved_tensors
    return result.text


@pytest.mark.peer
@pytest.mark.parametrize("name", MODELS)
def test_llama_quantize_gives_the_types(name: str, llama_bin: Path, tmp_path: Path) -> None:
    model, types = make_model(name, tmp_path, TREE_TYPES["llama.cpp"])
    rules = tmp_path / "rules"
    rules.write_text(converted(types, model, "llama.cpp"))
    actual = llama_quantize(llama_bin, model, "Q4_K_M", "--tensor-type-file", str(rules))
    assert {name: actual[name] for name in types} == types


@pytest.mark.peer
@pytest.mark.parametrize("name", ["qwen3moe", "llama"])
def test_iks_llama_quantize_gives_the_types(name: str, ik_bin: Path, tmp_path: Path) -> None:
    model, types = make_model(name, tmp_path, TREE_TYPES["ik"])
    lines = converted(types, model, "ik").splitlines()
    rules = [word for line in lines if not line.startswith("#") for word in ("--custom-q", line)]
    actual = ik_quantize(ik_bin, model, "Q4_K_M", *rules)
    assert {name: actual[name] for name in types} == {name: t.ggml_name for name, t in types.items()}
