"""Models of the zoo with the widths of real ones, as headers: their weights are holes.

Widths and numbers of heads are multiplied, heads, experts and states keep their size, and the vocabulary is that of a
real model. A model has as many layers as in the zoo, so that buffers count more than in a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_gguf import write_hollow

from quantkit.formats.gguf import Field, GGUFFile, open_gguf
from zoo import write_hollow_zoo

#: Keys that count heads, or widths.
WIDTHS = frozenset(
    {
        *("embedding_length", "feed_forward_length", "expert_feed_forward_length"),
        *("expert_shared_feed_forward_length", "attention.head_count", "attention.head_count_kv"),
    }
)
#: Widths up to this are those of heads and of experts' routers.
_HEAD = 64


def write_scaled_zoo(name: str, path: Path, factor: int = 8, n_vocab: int = 65536) -> Path:
    """Write the model ``name`` with rows ``factor`` times as long, and return its path."""
    write_hollow_zoo(name, path)
    file = open_gguf(path)
    arch = str(file.get("general.architecture"))
    fields = [_scaled(field, arch, factor, n_vocab) for field in file.fields.values()]
    infos = [
        (tensor.name, _shape(file, tensor.name, tensor.shape, factor, n_vocab), tensor.type)
        for tensor in file.tensors.values()
    ]
    return write_hollow(path, fields, infos, {})


def _shape(file: GGUFFile, name: str, shape: tuple[int, ...], factor: int, n_vocab: int) -> tuple[int, ...]:
    if name.startswith(("token_embd.", "output.weight")):
        return shape[0] * factor, n_vocab
    experts = int(file.get(f"{file.get('general.architecture')}.expert_count", 0) or 0)
    wide = tuple(n * factor if n > _HEAD else n for n in shape)
    return (*wide[:2], experts) if len(shape) == 3 and experts == shape[2] else wide


def _scaled(field: Field, arch: str, factor: int, n_vocab: int) -> Field:
    key, value = field.key.removeprefix(f"{arch}."), field.value
    if key in WIDTHS:
        return _field(field, [n * factor for n in value] if isinstance(value, list) else value * factor)
    if key == "vocab_size":
        return _field(field, n_vocab)
    if key == "context_length":
        return _field(field, 131072)
    if key.startswith("tokenizer.ggml.") and isinstance(value, list) and len(value) == 128:
        values = [f"tok_{i}" for i in range(n_vocab)] if key.endswith("tokens") else value[:1] * n_vocab
        return _field(field, values)
    return field


def _field(field: Field, value: Any) -> Field:
    return Field.of(field.key, value, field.type, field.item_type)
