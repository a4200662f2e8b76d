"""Models of a few thousand random weights with the shapes of a test: latent attention and delta nets.

Fields are the minimum that llama.cpp b11434 loads; there is no tokenizer, ids are below 128. ``tests/lib/zoo.py``
generates the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import Field, open_gguf, write_gguf
from quantkit.model.backends import Limits
from quantkit.model.backends.reference import Reference
from quantkit.model.batch import Batch
from quantkit.model.graph import build_graph
from quantkit.types import BY_NAME
from zoo import TABLE, draw

N_EMBD = 64
Shapes = dict[str, tuple[int, ...]]
Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def write(
    path: Path,
    arch: str,
    fields: Mapping[str, Any],
    shapes: Shapes,
    seed: int = 1,
    extra_fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model; a field that is None is omitted; ``extra_fields`` has further fields."""
    common = {"context_length": 256, "embedding_length": N_EMBD, "feed_forward_length": 48, "vocab_size": 128}
    common |= {"attention.layer_norm_rms_epsilon": 1e-5}
    values = {f"{arch}.{key}": value for key, value in (common | dict(fields)).items() if value is not None}
    general = [Field.of("general.architecture", arch), Field.of("tokenizer.ggml.model", "no_vocab")]
    arrays = {
        name: extra_fields[name] if extra_fields and name in extra_fields else draw(name, ne, seed)
        for name, ne in shapes.items()
    }
    kinds = {name: ("I32", "<i4") if name.endswith(TABLE) else ("F32", "<f4") for name in shapes}
    tensors = [
        (name, ne, BY_NAME[kinds[name][0]], np.ascontiguousarray(arrays[name], kinds[name][1]).tobytes())
        for name, ne in shapes.items()
    ]
    write_gguf(path, [*general, *(Field.of(key, value) for key, value in values.items())], tensors)
    return path


def ends() -> Shapes:
    return {"token_embd.weight": (N_EMBD, 128), "output_norm.weight": (N_EMBD,), "output.weight": (N_EMBD, 128)}


def ids(n: int, seed: int = 1) -> Ids:
    """Return n token ids."""
    return np.random.default_rng(seed).integers(0, 128, n).astype(np.int32)


def logits(path: Path, tokens: Ids, splits: tuple[int, ...] = ()) -> Logits:
    """Return the reference backend's logits after every token, computed in batches of these sizes."""
    with open_gguf(path) as source:
        graph = build_graph(source)
        program = Reference(source).compile(graph.ops, Limits(len(tokens)))
        rows, start = [], 0
        for n in splits or (len(tokens),):
            positions = np.arange(n, dtype=np.int32)
            program.run(Batch(tokens[start : start + n], start + positions, np.zeros(n, np.int32), positions))
            rows.append(program.read(graph.logits))
            start += n
        return np.concatenate(rows)


def logits_of_two(path: Path, first: Ids, second: Ids) -> tuple[Logits, Logits]:
    """Return the logits of two sequences of equal length with alternating tokens, in two batches of odd size."""
    n = len(first)
    tokens, positions = np.stack([first, second], 1).reshape(-1), np.repeat(np.arange(n, dtype=np.int32), 2)
    sequences = np.tile(np.arange(2, dtype=np.int32), n)
    with open_gguf(path) as source:
        graph = build_graph(source)
        program = Reference(source).compile(graph.ops, Limits(n, n_seq=2))
        rows = []
        for part in (slice(0, n | 1), slice(n | 1, 2 * n)):
            outputs = np.arange(len(tokens[part]), dtype=np.int32)
            program.run(Batch(tokens[part], positions[part], sequences[part], outputs))
            rows.append(program.read(graph.logits))
        y = np.concatenate(rows)
    return y[0::2], y[1::2]


def experts(layer: int, n_expert: int, width: int, shared: int) -> Shapes:
    """Return the shapes of a layer's router, experts and shared expert."""
    e, prefix = N_EMBD, f"blk.{layer}."
    return {
        f"{prefix}ffn_gate_inp.weight": (e, n_expert),
        f"{prefix}ffn_gate_exps.weight": (e, width, n_expert),
        f"{prefix}ffn_up_exps.weight": (e, width, n_expert),
        f"{prefix}ffn_down_exps.weight": (width, e, n_expert),
        f"{prefix}ffn_gate_shexp.weight": (e, shared),
        f"{prefix}ffn_up_shexp.weight": (e, shared),
        f"{prefix}ffn_down_shexp.weight": (shared, e),
    }


def dense(layer: int, gate: bool = True) -> Shapes:
    """Return the shapes of a dense feed-forward layer."""
    prefix = f"blk.{layer}."
    up = {f"{prefix}ffn_up.weight": (N_EMBD, 48), f"{prefix}ffn_down.weight": (48, N_EMBD)}
    return up | ({f"{prefix}ffn_gate.weight": (N_EMBD, 48)} if gate else {})
