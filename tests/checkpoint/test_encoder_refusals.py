"""Encoders that llama.cpp does not compute, and values that no file can state: the errors of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import checkpoints
from quantkit.checkpoint.open_mmproj import open_mmproj
from quantkit.errors import FormatError

Json = dict[str, Any]

_SIZES: Json = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_eps": 1e-6,
}
#: Class -> a tensor of its encoder.
_TENSORS = {
    "InternVisionModel": {"vision_model.embeddings.class_embedding": (1, 1, 8)},
    "Llama4ForConditionalGeneration": {"vision_model.class_embedding": (8,)},
    "Mistral3ForConditionalGeneration": {"vision_tower.patch_conv.weight": (8, 3, 2, 2)},
    "BailingMoeV3VLForConditionalGeneration": {"linear_proj.0.weight": (8, 8)},
    "StepVLForConditionalGeneration": {"vit_large_projector.weight": (8, 8)},
    "MiniMaxM3SparseForConditionalGeneration": {
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": (8, 8)
    },
    "KimiK25ForConditionalGeneration": {"vision_tower.encoder.blocks.0.wqkv.weight": (18, 8)},
    "YoutuVLForConditionalGeneration": {"siglip2.vision_model.encoder.layers.1.layer_norm1.weight": (8,)},
    "Exaone4_5_ForConditionalGeneration": {"visual.merger.ln_q.weight": (8,)},
}


def write(folder: Path, architecture: str, vision: Json, model: Json) -> None:
    """Write a checkpoint of one tensor."""
    config: Json = {"architectures": [architecture], "hidden_size": 8, "vision_config": _SIZES | vision} | model
    (folder / "config.json").write_text(json.dumps(config))
    settings: Json = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 4, "max_pixels": 8}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    tensors = [
        (name, "F32", shape, np.ones(shape, np.float32).tobytes()) for name, shape in _TENSORS[architecture].items()
    ]
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("architecture", "vision", "model", "refusal"),
    [
        ("InternVisionModel", {"hidden_act": "relu"}, {"downsample_ratio": 0.5}, "QK-E305 relu"),
        ("InternVisionModel", {}, {"downsample_ratio": 0}, "QK-E112 downsample_ratio 0"),
        ("InternVisionModel", {"patch_size": 0}, {"downsample_ratio": 0.5}, "QK-E112 patch_size 0"),
        ("InternVisionModel", {"image_size": []}, {"downsample_ratio": 0.5}, "QK-E112 config.json"),
        ("Llama4ForConditionalGeneration", {"hidden_act": "silu", "pixel_shuffle_ratio": 0.5}, {}, "QK-E305 silu"),
        ("Mistral3ForConditionalGeneration", {"model_type": "siglip"}, {}, "QK-E305 siglip"),
        ("Mistral3ForConditionalGeneration", {"model_type": "pixtral"}, {}, "QK-E112 [IMG_BREAK]"),
        ("BailingMoeV3VLForConditionalGeneration", {"depth": 1}, {}, "QK-E305 disable_merger_proj"),
        ("StepVLForConditionalGeneration", {}, {"understand_projector_stride": 2}, "QK-E305 1536 47"),
        ("MiniMaxM3SparseForConditionalGeneration", {}, {}, "QK-E106 q_proj.weight 80"),
        ("KimiK25ForConditionalGeneration", {}, {}, "QK-E106 wqkv.weight"),
        ("YoutuVLForConditionalGeneration", {"fullatt_block_indexes": [0]}, {}, "QK-E107 layer_norm1.weight"),
        (
            "Exaone4_5_ForConditionalGeneration",
            {"depth": 1, "num_heads": 2, "fullatt_block_indexes": [1, 2]},
            {},
            "QK-E305 1 2",
        ),
    ],
)
def test_refusals_of_rows(tmp_path: Path, architecture: str, vision: Json, model: Json, refusal: str) -> None:
    write(tmp_path, architecture, vision, model)
    with refuses(FormatError, refusal):
        open_mmproj(tmp_path)


def test_tensors_that_files_do_not_have_are_dropped_from_youtu_vl(tmp_path: Path) -> None:
    write(tmp_path, "YoutuVLForConditionalGeneration", {"fullatt_block_indexes": [0]}, {})
    names = ("siglip2.vision_model.encoder.layers.0.layer_norm1.weight", "siglip2.vision_model.head.probe")
    tensors = [(name, "F32", (8,), bytes(32)) for name in names]
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors)
    assert list(open_mmproj(tmp_path).tensors) == ["v.blk.0.ln1.weight"]
