"""Small models for tests, written by quantkit's writer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.formats.gguf import Field, layout_gguf, open_gguf, write_gguf
from quantkit.types import BY_NAME

Tensors = Mapping[str, tuple[tuple[int, ...], str]]


def llama_tensors(
    layers: int = 2, width: int = 256, ff: int = 512, vocab: int = 64
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return names, shapes and types of a dense llama."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((width, vocab), "F16"),
        "output_norm.weight": ((width,), "F32"),
        "output.weight": ((width, vocab), "F16"),
    }
    for i in range(layers):
        b = f"blk.{i}."
        tensors |= {b + f"attn_{p}.weight": ((width, width), "F16") for p in ("q", "k", "v", "output")}
        tensors |= {b + f"ffn_{p}.weight": ((width, ff), "F16") for p in ("gate", "up")}
        tensors |= {b + "ffn_down.weight": ((ff, width), "F16"), b + "attn_norm.weight": ((width,), "F32")}
    return tensors


def llama_fields(layers: int = 2, width: int = 256, ff: int = 512, **fields: Any) -> list[Field]:
    values = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 256,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **{k.replace("__", "."): v for k, v in fields.items()},
    }
    return [Field.of(k, v) for k, v in values.items()]


def write_model(path: Path, tensors: Tensors, fields: Sequence[Field] | None = None, seed: int = 1) -> Path:
    """Write a model with random values from a seed."""
    rng, data = np.random.default_rng(seed), []
    for name, (shape, type_name) in tensors.items():
        x = rng.normal(0, 0.05, shape[::-1]).astype(np.float32)
        raw = x if type_name == "F32" else x.astype(np.float16)
        data.append((name, shape, BY_NAME[type_name], raw.tobytes()))
    write_gguf(path, llama_fields() if fields is None else fields, data)
    return path


def write_with_template(source: Path, path: Path, template: str) -> Path:
    """Write a copy of a model with a chat template."""
    with open_gguf(source) as file:
        fields = [*file.fields.values(), Field.of("tokenizer.chat_template", template)]
        write_gguf(path, fields, [(t.name, t.shape, t.type, file.data(t).tobytes()) for t in file.tensors.values()])
    return path


def tensor_bytes(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return the type and the bytes of every tensor."""
    with open_gguf(path) as file:
        return {name: (t.type.name, file.data(t).tobytes()) for name, t in file.tensors.items()}


#: Shapes that image models have, innermost first: a convolution over time, empty tensors, a scalar.
ODD_SHAPES = {"conv": (3, 3, 2, 4, 5), "tag": (0,), "none": (4, 0), "scale": (), "last": (2, 1, 1)}


def write_odd_shapes(path: Path, arch: str) -> dict[str, bytes]:
    """Write F32 tensors of ``ODD_SHAPES`` and one that can be quantized; return their bytes."""
    shapes = {**ODD_SHAPES, "img.weight": (64, 8)}
    rng = np.random.default_rng(3)
    data = {name: rng.standard_normal(math.prod(shape)).astype("<f4").tobytes() for name, shape in shapes.items()}
    fields = [Field.of("general.architecture", arch)]
    layout = layout_gguf(fields, [(name, shape, BY_NAME["F32"]) for name, shape in shapes.items()], all_dims=True)
    content = bytearray(layout.header.ljust(layout.nbytes, b"\0"))
    for raw, offset in zip(data.values(), layout.offsets, strict=True):
        content[offset : offset + len(raw)] = raw
    path.write_bytes(content)
    return data
