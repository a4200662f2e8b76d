"""One random damage of a model, which a runtime's loader should detect.

    python tests/lib/damage.py NAME [SEED ...]

prints the damages of a model of tests/lib/sparse_models.py. A damage is one change, determined by the model's name and
a seed: a tensor or a key is missing, misspelt, or has another shape, type or value. Many damages are harmless to a
runtime.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.fields import SIZES
from quantkit.types import TYPES, type_by_id
from sparse_models import NAMES, Model, Tensor, model

#: A damage: the changed model with a description, or None if the model has nothing to change in this way.
Change = tuple[Model, str]
Damage = Callable[[Model, random.Random], Change | None]


def damage(model: Model, seed: int) -> tuple[Model, str, str]:
    """Return the model with one damage, its kind and a line of description."""
    rng = random.Random(f"{model.name} {seed}")
    kinds, weights = zip(*DAMAGES.items(), strict=True)
    while True:
        kind = rng.choices(kinds, weights)[0]
        change = kind(model, rng)
        if change is not None and change[0].layout() != model.layout():
            return change[0], kind.__name__, change[1]


def _with_tensors(model: Model, tensors: Sequence[Tensor]) -> Model:
    return replace(model, tensors=tuple(tensors))


def _with_tensor(model: Model, old: Tensor, *new: Tensor) -> Model:
    """Return the model with a tensor replaced by others, or removed."""
    index = model.tensors.index(old)
    return _with_tensors(model, [*model.tensors[:index], *new, *model.tensors[index + 1 :]])


def _with_field(model: Model, old: Field, *new: Field) -> Model:
    index = model.fields.index(old)
    return replace(model, fields=(*model.fields[:index], *new, *model.fields[index + 1 :]))


def remove_tensor(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    return _with_tensor(model, tensor), f"without {tensor}"


def remove_tensors_of_a_kind(model: Model, rng: random.Random) -> Change | None:
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", t.name) for t in model.tensors if ".0." in t.name or ".1." in t.name})
    if not kinds:
        return None
    kind = rng.choice(kinds)
    remainder = [t for t in model.tensors if re.sub(r"\.\d+\.", ".*.", t.name) != kind]
    return _with_tensors(model, remainder), f"without all {kind}"


def remove_layer(model: Model, rng: random.Random) -> Change | None:
    layers = sorted({m[0] for t in model.tensors if (m := re.match(r".*?blk\.\d+\.", t.name))})
    if not layers:
        return None
    layer = rng.choice(layers)
    remainder = [t for t in model.tensors if not t.name.startswith(layer)]
    return _with_tensors(model, remainder), f"without the layer {layer}"


def misspell_tensor(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    name = _misspelt(tensor.name, rng)
    if name in {t.name for t in model.tensors}:
        return None
    return _with_tensor(model, tensor, replace(tensor, name=name)), f"{tensor.name} is called {name}"


def _misspelt(text: str, rng: random.Random) -> str:
    """Return a text with one typo: a letter missing, doubled, exchanged with the next, or of the other case."""
    if not text:
        return "x"
    index = rng.randrange(len(text))
    return rng.choice(
        [
            text[:index] + text[index + 1 :],
            text[:index] + text[index] + text[index:],
            text[:index] + text[index : index + 2][::-1] + text[index + 2 :],
            text[:index] + text[index].swapcase() + text[index + 1 :],
        ]
    )


def add_tensor(model: Model, rng: random.Random) -> Change | None:
    """Add a tensor: with an unknown name, a bias or a scale for a weight, or a tensor of other models."""
    if not model.tensors:
        return None
    like = rng.choice(model.tensors)
    embeddings = next((t.shape for t in model.tensors if t.name == "token_embd.weight"), (64, 128))
    new = rng.choice(
        [
            Tensor("blk.0.unknown.weight", like.shape, 0),
            Tensor(re.sub(r"\.\d+\.", ".99.", like.name), like.shape, like.type),
            Tensor(like.name.removesuffix(".weight") + ".bias", like.shape[-1:], 0),
            Tensor(like.name.removesuffix(".weight") + ".scale", (1,), 0),
            Tensor(like.name.removesuffix(".weight") + ".input_scale", (1,), 0),
            Tensor("rope_freqs.weight", (32,), 0),
            Tensor("output.weight", embeddings, 0),
            Tensor("output.bias", embeddings[-1:], 0),
            Tensor("output_norm.bias", embeddings[:1], 0),
            Tensor("position_embd.weight", (embeddings[0], 64), 0),
            Tensor("blk.0." + "x" * 70, (32,), 0),
        ]
    )
    if new.name in {t.name for t in model.tensors}:
        return None
    return _with_tensors(model, [*model.tensors, new]), f"with {new}"


def repeat_tensor(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    return _with_tensors(model, [*model.tensors, tensor]), f"{tensor.name} twice"


def change_dimension(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    i, shape = rng.randrange(len(tensor.shape)), list(tensor.shape)
    shape[i] = rng.choice([shape[i] + 1, shape[i] - 1, 2 * shape[i], shape[i] // 2, shape[i] + 32])
    if shape[i] < 1:
        return None
    return _with_shape(model, tensor, shape)


def change_rank(model: Model, rng: random.Random) -> Change | None:
    """Exchange two dimensions, or add or remove one."""
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    shape = list(tensor.shape)
    variants = [[*shape, 1], [*shape, 2], shape[:-1], shape[::-1], [1, *shape], [math.prod(shape)]]
    new = rng.choice(variants)
    return _with_shape(model, tensor, new) if 0 < len(new) <= 4 else None


def _with_shape(model: Model, tensor: Tensor, shape: Sequence[int]) -> Change:
    new = replace(tensor, shape=tuple(shape))
    return _with_tensor(model, tensor, new), f"{tensor} is {list(shape)}"


#: Ids that neither project has, removed ones, and types that are not for weights.
STRANGE_TYPES = (4, 5, 31, 36, 24, 25, 26, 27, 28, 999)


def change_type(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    tensor = rng.choice(model.tensors)
    usual = [0, 1, 30, 8, 2, 12, 14]
    new = rng.choice([rng.choice(usual), rng.choice([t.id for t in TYPES]), rng.choice(STRANGE_TYPES)])
    kind = _type_name(new)
    return _with_tensor(model, tensor, replace(tensor, type=new)), f"{tensor} has the type {kind}"


def _type_name(number: int) -> str:
    try:
        return type_by_id(number).name
    except TypeNotSupported:
        return str(number)


def move_data(model: Model, rng: random.Random) -> Change | None:
    """Insert a gap between two tensors."""
    if not model.tensors:
        return None
    tensor, gap = rng.choice(model.tensors), rng.choice([32, 64, 8])
    return _with_tensor(model, tensor, replace(tensor, gap=gap)), f"{gap} bytes before the data of {tensor.name}"


def cut_data(model: Model, rng: random.Random) -> Change | None:
    if not model.tensors:
        return None
    header, nbytes = model.layout()
    n_bytes = rng.choice([1, 32, (nbytes - len(header)) // 2])
    return replace(model, n_missing=n_bytes), f"the last {n_bytes} bytes are missing"


# --- keys


def _key(model: Model, rng: random.Random) -> Field:
    """Return a field: of the architecture, of the tokenizer, or another."""
    arch = [f for f in model.fields if f.key.startswith(f"{model.architecture}.")]
    vocab = [f for f in model.fields if f.key.startswith("tokenizer.")]
    general = [f for f in model.fields if f not in arch and f not in vocab]
    groups = [(group, weight) for group, weight in ((arch, 6), (vocab, 3), (general, 1)) if group]
    return rng.choice(rng.choices([g for g, _ in groups], [w for _, w in groups])[0])


def remove_key(model: Model, rng: random.Random) -> Change | None:
    item = _key(model, rng)
    return _with_field(model, item), f"without the key {item.key}"


def misspell_key(model: Model, rng: random.Random) -> Change | None:
    item = _key(model, rng)
    key = _misspelt(item.key, rng)
    if not key or key in {f.key for f in model.fields}:
        return None
    return _with_field(model, item, replace(item, key=key)), f"the key {item.key} is called {key}"


def repeat_key(model: Model, rng: random.Random) -> Change | None:
    item = _key(model, rng)
    return _with_field(model, item, item, item), f"the key {item.key} twice"


def change_kind(model: Model, rng: random.Random) -> Change | None:
    """Convert a value to the nearest one of another kind."""
    item = _key(model, rng)
    value = item.value
    if item.type is ValueType.ARRAY:
        assert item.item_type is not None
        kinds = [kind for kind in (*SIZES, ValueType.STRING) if kind is not item.item_type]
        if value and rng.random() < 0.25:
            first = Field.of(item.key, value[0], item.item_type)
            return _with_field(model, item, first), f"{item.key} is its first item"
        kind = rng.choice(kinds)
        new = _field(item.key, kind, [_as(kind, v) for v in value], array=True)
        return _with_field(model, item, new), f"{item.key}, {item.describe()}, is an array of {kind.name}"
    if rng.random() < 0.2:
        new = _field(item.key, item.type, [value] * rng.choice([0, 1, 2, 3]), array=True)
        return _with_field(model, item, new), f"{item.key}, {item.describe()}, is {new.describe()}"
    kind = rng.choice([kind for kind in (*SIZES, ValueType.STRING) if kind is not item.type])
    return _with_field(model, item, _field(item.key, kind, [_as(kind, value)])), (
        f"{item.key} = {str(value)[:40]!r}, {item.describe()}, is {kind.name}"
    )


def _as(kind: ValueType, value: Any) -> Any:
    """Return a value converted to another kind."""
    if kind is ValueType.STRING:
        return str(value)
    number = len(value) % 100 if isinstance(value, str) else value
    if kind is ValueType.BOOL:
        return bool(number)
    if kind in (ValueType.FLOAT32, ValueType.FLOAT64):
        return float(number)
    bits = 8 * SIZES[kind]
    number = int(number) if math.isfinite(number) else 0
    return number % (1 << bits - 1)


def _field(key: str, kind: ValueType, values: Sequence[Any], *, array: bool = False) -> Field:
    if array:
        return Field.of(key, list(values), ValueType.ARRAY, kind)
    return Field.of(key, values[0], kind)


def change_value(model: Model, rng: random.Random) -> Change | None:
    """Give a key another value of its kind."""
    item = _key(model, rng)
    if item.type is ValueType.ARRAY:
        return _change_array(model, item, rng)
    value = _other_value(model, item, rng)
    new = Field.of(item.key, value, item.type)
    return _with_field(model, item, new), f"{item.key} = {str(value)[:40]!r}, not {str(item.value)[:40]!r}"


#: Other values of keys with string values.
WORDS = {
    "general.architecture": ("llama", "qwen2", "qwen3moe", "gemma3", "bert", "mamba", "t5", "deepseek2", "nonsense"),
    "tokenizer.ggml.model": ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "nonsense"),
    "tokenizer.ggml.pre": ("default", "llama-bpe", "qwen2", "gpt-2", "deepseek-v3", "tekken", "nonsense", ""),
    "rope.scaling.type": ("none", "linear", "yarn", "longrope", "nonsense"),
}


def _other_value(model: Model, item: Field, rng: random.Random) -> Any:
    value = item.value
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        words = next((words for end, words in WORDS.items() if item.key.endswith(end)), ())
        return rng.choice(words) if words else _misspelt(value, rng)
    if isinstance(value, float):
        return rng.choice([0.0, -value, 2 * value, math.nan, math.inf])
    bits = 8 * SIZES[item.type] - (item.type.name.startswith("INT"))
    values = [value + 1, value - 1, 2 * value, value // 2, 0, 1, value + 64]
    return rng.choice([n for n in values if 0 <= n < 1 << bits] or [value])


def _change_array(model: Model, item: Field, rng: random.Random) -> Change | None:
    assert item.item_type is not None
    values = list(item.value)
    n = len(values)
    change = rng.choice(["shorter", "half", "empty", "longer", "changed", "repeated"])
    if change == "changed" and n:
        i = rng.randrange(n)
        single = Field.of(item.key, values[i], item.item_type)
        values[i] = _other_value(model, single, rng)
    elif change == "repeated" and n > 1:
        values[rng.randrange(n)] = values[0]
    else:
        values = {"shorter": values[:-1], "half": values[: n // 2], "empty": [], "longer": [*values, *values[-1:]]}.get(
            change, values
        )
    new = _field(item.key, item.item_type, values, array=True)
    return _with_field(model, item, new), f"{item.key}, {item.describe()}, is {change}: {new.describe()}"


#: Keys of some models; a dot begins those without the architecture's prefix.
ADDITIONAL_KEYS: tuple[tuple[str, Any, ValueType], ...] = (
    ("split.count", 2, ValueType.UINT16),
    (".expert_count", 4, ValueType.UINT32),
    (".expert_used_count", 2, ValueType.UINT32),
    (".rope.scaling.type", "yarn", ValueType.STRING),
    (".rope.scaling.type", "nonsense", ValueType.STRING),
    (".rope.scaling.factor", 0.0, ValueType.FLOAT32),
    (".rope.dimension_count", 6, ValueType.UINT32),
    (".attention.sliding_window", 8, ValueType.UINT32),
    (".attention.causal", False, ValueType.BOOL),
    (".attention.key_length", 24, ValueType.UINT32),
    (".attention.value_length", 24, ValueType.UINT32),
    (".vocab_size", 7, ValueType.UINT32),
    (".nextn_predict_layers", 1, ValueType.UINT32),
    (".pooling_type", 1, ValueType.UINT32),
    (".leading_dense_block_count", 1, ValueType.UINT32),
    (".embedding_length_out", 16, ValueType.UINT32),
    ("tokenizer.ggml.bos_token_id", 1 << 20, ValueType.UINT32),
    ("tokenizer.ggml.precompiled_charsmap", "nonsense", ValueType.STRING),
    ("tokenizer.chat_template", "{% nonsense", ValueType.STRING),
    ("general.type", "nonsense", ValueType.STRING),
    ("general.file_type", 9999, ValueType.UINT32),
)


def add_key(model: Model, rng: random.Random) -> Change | None:
    key, value, kind = rng.choice(ADDITIONAL_KEYS)
    key = model.architecture + key if key.startswith(".") else key
    if key in {f.key for f in model.fields}:
        return None
    return replace(model, fields=(*model.fields, Field.of(key, value, kind))), f"with the key {key} = {value!r}"


#: Every kind of damage, and its frequency.
DAMAGES: dict[Damage, int] = {
    remove_tensor: 10,
    remove_tensors_of_a_kind: 5,
    remove_layer: 3,
    misspell_tensor: 6,
    add_tensor: 7,
    repeat_tensor: 1,
    change_dimension: 10,
    change_rank: 5,
    change_type: 8,
    move_data: 1,
    cut_data: 1,
    remove_key: 10,
    misspell_key: 3,
    repeat_key: 1,
    change_kind: 9,
    change_value: 16,
    add_key: 4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument("seeds", nargs="*", type=int, default=range(20), metavar="SEED")
    options = parser.parse_args()
    original = model(options.name)
    for seed in options.seeds:
        print(seed, *damage(original, seed)[1:], sep="\t")


if __name__ == "__main__":
    main()
