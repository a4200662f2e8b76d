"""Models of the zoo with the widths of real ones, as headers: their weights are holes.

Widths and numbers of heads are multiplied; sizes of heads, of latent rows, of experts' routers and of states remain,
and the vocabulary is that of a real model. A model has as many layers as in the zoo, so that buffers count more than in
a real one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparse_gguf import write_hollow

from quantkit.formats.gguf import Field, GGUFFile, open_gguf
from zoo import ZOO, write_hollow_zoo

#: Keys that count heads, or widths.
WIDTHS = frozenset(
    {
        *("embedding_length", "feed_forward_length", "expert_feed_forward_length"),
        *("expert_shared_feed_forward_length", "attention.head_count", "attention.head_count_kv"),
        *("ssm.inner_size", "ssm.time_step_rank", "ssm.group_count"),
    }
)
#: Axes of tensors that do not grow: experts, ranks, taps, positions, and sizes of heads and of states.
FIXED_AXES = tuple(
    (re.compile(pattern), axis)
    for pattern, axis in (
        (r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight", 2),
        (r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.bias", 1),
        (r"blk\.\d+\.ffn_gate_inp\.weight", 1),
        (r"blk\.\d+\.(ffn_gate_inp|exp_probs_b)\.bias", 0),
        (r"blk\.\d+\.attn_(q|kv)_a_norm\.weight", 0),
        (r"blk\.\d+\.attn_(q_a|kv_a_mqa)\.weight", 1),
        (r"blk\.\d+\.attn_(q|k|v)_b\.weight", 0),
        (r"blk\.\d+\.attn_[kv]_b\.weight", 1),
        (r"blk\.\d+\.(ssm_conv1d|shortconv\.conv)\.weight", 0),
        (r"blk\.\d+\.ssm_norm\.weight", 0),
        (r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight", 0),
    )
)
#: Architectures whose published models have the biases and scales that llama.cpp does not require.
BIASED = frozenset({"gpt-oss", "qwen2", "qwen2moe", "glm4moe"})
ADDED = re.compile(r".*(\.bias|\.scale|\.input_scale|cls\.output\.weight)")
VOCABULARY = re.compile(r"(token_embd\.weight|output\.weight|output\.bias)$")
#: Norms of heads, or of all heads at once.
HEAD_NORM = re.compile(r"blk\.\d+\.attn_[qk]_norm\.(weight|bias)")
#: Matrices of each head. In the zoo, those of a single head have two axes.
BY_HEAD = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")


def write_scaled_zoo(name: str, path: Path, factor: int = 8, n_vocab: int = 65536) -> Path:
    """Write the model ``name`` with rows ``factor`` times as long, and return its path.

    It has no tokenizer, and no tensors that published models lack: ik_llama.cpp refuses both.
    """
    write_hollow_zoo(name, path)
    file = open_gguf(path)
    infos = [
        (tensor.name, tuple(_shape(file, tensor.name, tensor.shape, factor, n_vocab)), tensor.type)
        for tensor in file.tensors.values()
        if _is_published(name, file, tensor.name)
    ]
    return write_hollow(path, list(_fields(file, factor, n_vocab)), infos, {})


def _is_published(model: str, file: GGUFFile, tensor: str) -> bool:
    """Return whether published models have a tensor that the zoo's may have for completeness."""
    if file.get("general.architecture") in BIASED or not ADDED.fullmatch(tensor):
        return True
    optional = json.loads((ZOO / "optional.json").read_text())[model]
    return not any(tensor.endswith(kind) for kind in (*optional, ".scale", ".input_scale"))


def _shape(file: GGUFFile, name: str, shape: tuple[int, ...], factor: int, n_vocab: int) -> Iterator[int]:
    if BY_HEAD.match(name) and len(shape) == 2:
        shape = (*shape, 1)
    for axis, n in enumerate(shape):
        if VOCABULARY.match(name) and axis == len(shape) - 1:
            yield n_vocab
        elif any(axis == fixed_axis and pattern.fullmatch(name) for pattern, fixed_axis in FIXED_AXES):
            yield n
        else:
            yield n if HEAD_NORM.match(name) and not axis and n == _head(file) else n * factor


def _head(file: GGUFFile) -> int:
    """Return the width of a head's keys."""
    arch = file.get("general.architecture")
    n_head = file.get(f"{arch}.attention.head_count")
    n_head = max(n_head) if isinstance(n_head, list) else n_head
    return int(file.get(f"{arch}.attention.key_length") or file.get(f"{arch}.embedding_length") // n_head)


def _fields(file: GGUFFile, factor: int, n_vocab: int) -> Iterator[Field]:
    arch = file.get("general.architecture")
    for field in file.fields.values():
        key, value = field.key.removeprefix(f"{arch}."), field.value
        if key == "attention.head_count_kv" and file.get(f"{arch}.attention.kv_lora_rank"):
            yield field  # latent keys are one head
        elif key in WIDTHS:
            yield _field(field, [n * factor for n in value] if isinstance(value, list) else value * factor)
        elif key == "vocab_size":
            yield _field(field, n_vocab)
        elif key == "context_length":
            yield _field(field, 131072)
        elif key == "tokenizer.ggml.model":
            yield _field(field, "no_vocab")
        elif not key.startswith("tokenizer."):
            yield field


def _field(field: Field, value: Any) -> Field:
    return Field.of(field.key, value, field.type, field.item_type)
