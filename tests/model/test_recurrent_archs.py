"""Recurrent models: wrong metadata and shapes, sequences in pieces, and states too large for CUDA.

Their logits are llama.cpp's in test_engine_zoo.py, transformers' in test_convert_goldens.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_mamba
from refusals import refuses

from libllama import nmse
from quantkit.errors import FormatError, QuantkitError, TypeNotSupported
from quantkit.formats.gguf import GGUFFile, TensorInfo, open_gguf, write_gguf
from quantkit.model.engine import load
from quantkit.model.graph import build_graph
from quantkit.model.placement import ALL_LAYERS, Placement
from zoo import NAMES, ZOO, expected, write_zoo

ARCHS = ("bailingmoe3", "falcon-h1", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2")
ARCHS += ("minimax-01", "nemotron_h", "nemotron_h_moe", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
MODELS = [name for name in NAMES if name.rpartition("-")[0] in ARCHS]
#: Nothing is there yet to be mixed (Kimi K3), or for values to be drawn to (RWKV 7).
UNREAD = {"blk.0.attn_res_score.weight", *(f"blk.0.time_mix_v{i}.weight" for i in range(3))}
#: Metadata of which a layer's shapes follow, or its place in the model.
KEYS = (
    *("ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "kda.head_dim"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.kv_lora_rank"),
    *("attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count", "feed_forward_length"),
    *("attn_res.block_size", "kda.gate_lower_bound", "residual_scale", "activation.situ_beta", "embedding_length"),
    *("attention.recurrent_layers", "full_attention_interval", "swiglu_clamp_exp", "block_count"),
    *("wkv.head_size", "rescale_every_n_layers"),
)


class Changed:
    """A model whose metadata or tensors are others."""

    def __init__(self, source: GGUFFile, changed: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
        self.source, self.changed = source, changed
        self.tensors = tensors or source.tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.changed.get(key.partition(".")[2], self)
        if value is self:
            return self.source.get(key, default)
        return default if value is None else value


def refusals(source: GGUFFile, changed_files: Iterator[Changed]) -> int:
    """Build the graph of each; return how many are refused, all of them by an error that is shown as it is."""
    refused = 0
    for changed_file in changed_files:
        try:
            build_graph(changed_file)  # type: ignore[arg-type]
        except QuantkitError:
            refused += 1
    return refused


@pytest.mark.parametrize("name", MODELS)
def test_contradictory_metadata_are_refused_or_harmless(name: str) -> None:
    with open_gguf(ZOO / "headers" / f"{name}.head", header_only=True) as source:
        keys = (key for key in KEYS if source.get(f"{source.get('general.architecture')}.{key}") is not None)
        values = (None, 0, 1, -1, 3, 7, 1 << 40, 0.5, float("nan"), [], [0, 0], [1, -2, 0, 3, 1], "x")
        changed_files = (Changed(source, {key: value}) for key in keys for value in values)
        assert refusals(source, changed_files) > 20


@pytest.mark.parametrize("name", MODELS)
def test_wrong_shapes_are_refused(name: str) -> None:
    with open_gguf(ZOO / "headers" / f"{name}.head", header_only=True) as source:
        for tensor in source.tensors.values():
            if tensor.name in UNREAD:
                continue
            first, *remainder = tensor.shape
            shapes = [(first + 1, *remainder), (*tensor.shape[:-1], tensor.shape[-1] * 2)]
            tensor_dicts = ({**source.tensors, tensor.name: replace(tensor, shape=shape)} for shape in shapes)
            assert refusals(source, (Changed(source, {}, tensors_of_file) for tensors_of_file in tensor_dicts)) >= 1, (
                tensor.name
            )


@pytest.mark.parametrize("name", MODELS)
def test_split_and_parallel_sequences_equal_one_batch(name: str, tmp_path: Path) -> None:
    tokens, logits = expected(name)
    with load(write_zoo(name, tmp_path / "model.gguf"), kv_type="f32", threads=2) as model:
        session = model.session(48)
        parts = [session.decode(part) for part in np.split(tokens[:40], (9, 10, 11, 27))]
        assert nmse(np.concatenate(parts), logits[:40]) <= 1e-8


def test_old_files_have_separate_vectors_of_rwkv_6(tmp_path: Path) -> None:
    """That mix a row with the one before it."""
    tokens, logits = expected("rwkv6-dense")
    with open_gguf(write_zoo("rwkv6-dense", tmp_path / "new.gguf")) as model:
        tensors = [(t.name, t.shape, t.type, model.data(t).tobytes()) for t in model.tensors.values()]
        for name, shape, kind, data in [t for t in tensors if "lerp_fused" in t[0]]:
            tensors.remove((name, shape, kind, data))
            size = len(data) // 5
            parts = [data[i * size : (i + 1) * size] for i in range(5)]
            one = (shape[0], 1, 1)
            tensors += [(name.replace("fused", c), one, kind, x) for c, x in zip("wkvrg", parts, strict=True)]
        write_gguf(tmp_path / "old.gguf", list(model.fields.values()), tensors)
    with load(tmp_path / "old.gguf", kv_type="f32", threads=2) as old:
        assert nmse(old.forward(tokens[:8]), logits[:8]) <= 1e-8


def test_a_state_too_large_for_cuda_is_refused(tmp_path: Path, cuda_devices: tuple[str, ...]) -> None:
    path = test_mamba.hybrid(tmp_path / "model.gguf", {"ssm.state_size": 288}, d_state=288)
    with load(path, kv_type="f32") as model:
        assert np.isfinite(model.forward([1, 2, 3])).all()
    with refuses(TypeNotSupported, "QK-E306 288 CUDA --gpu-layers 0"):
        load(path, kv_type="f32", placement=Placement(ALL_LAYERS, (), ("CUDA0",))).forward([1, 2, 3])


def test_more_decaying_rows_than_supported_are_refused() -> None:
    head, n = 264, 4
    with open_gguf(ZOO / "headers" / "kimi-linear-moe.head", header_only=True) as source:
        tensors = {name: wider(tensor, n * 32, n * head) for name, tensor in source.tensors.items()}
        tensors |= {name: wider(t, 32, head) for name, t in tensors.items() if "ssm_norm" in name}
        with refuses(FormatError, "QK-E106 256"):
            build_graph(Changed(source, {"kda.head_dim": head}, tensors))  # type: ignore[arg-type]


def wider(tensor: TensorInfo, old: int, new: int) -> TensorInfo:
    """Return a tensor of delta attention with other dimensions."""
    is_wide = re.search(r"attn_[qkv]\.|attn_output|ssm_", tensor.name) and not tensor.name.startswith("blk.1.")
    return replace(tensor, shape=tuple(new if n == old else n for n in tensor.shape)) if is_wide else tensor
