"""The tokens of an image, and the embedding length of text models, by the projector of an mmproj file."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.formats.gguf import TensorInfo
from quantkit.formats.gguf.projectors import image_tokens, text_width
from quantkit.types import type_by_name


def metadata(projector: str, size: int = 448, patch: int = 14, **vision: Any) -> dict[str, Any]:
    """Return the metadata of an mmproj file with a vision encoder."""
    keys = {f"clip.vision.{key.replace('__', '.')}": value for key, value in vision.items()}
    sizes = {"clip.vision.image_size": size, "clip.vision.patch_size": patch}
    return {"clip.has_vision_encoder": True, "clip.projector_type": projector, **sizes, **keys}


def tensors(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    """Return tensors of F32, whose names have __ for a point."""
    infos = ((name.replace("__", "."), shape) for name, shape in shapes.items())
    return {name: TensorInfo(name, shape, type_by_name("F32"), 0, 0, 0) for name, shape in infos}


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        (metadata("gemma3", 896), 256),
        (metadata("gemma3", 32, 8, projector__scale_factor=2), 4),
        (metadata("gemma3nv", 768, 3), 256),
        (metadata("mlp", 336), 576),
        (metadata("mlp", 336, image_grid_pinpoints=[336, 672]), "576 per tile"),
        (metadata("ldp", 336), 144),
        (metadata("cogvlm", 32, 8), 18),
        (metadata("janus_pro", 384, 16), 576),
        (metadata("nemotron_v2_vl", 512, 16, projector__scale_factor=2), 256),
        (metadata("idefics3", 512, 16, projector__scale_factor=4), "64 per tile"),
        (metadata("internvl", 448, projector__scale_factor=2), "256 per tile"),
        (metadata("llama4", 336, projector__scale_factor=2), "144 per tile"),
        (metadata("qwen2vl_merger", 560), "8 to 4096, by size"),
        (metadata("qwen3vl_merger", 768, 16, spatial_merge_size=2), "8 to 4096, by size"),
        (metadata("qwen3vl_merger", 768, 16, spatial_merge_size=4), "by size"),
        (metadata("qwen2vl_merger", image_min_pixels=1, image_max_pixels=10**6), "8 to 4096, by size"),
        (metadata("minimax_m3", 672), "8 to 576, by size"),
        (metadata("gemma4v", 224, 16), "70 to 1120, by size"),
        (metadata("kimik25", 448, 14, projector__scale_factor=2), "2 to 4096, by size"),
        (metadata("kimik25", 32, 4, projector__scale_factor=2, image_min_pixels=128, image_max_pixels=65536),
         "2 to 1024, by size"),
        (metadata("phi4", 48, 8, image_min_pixels=16384, image_max_pixels=230400), "256 to 3600, by size"),
        (metadata("dots_ocr", 0, 14, projector__scale_factor=2, image_min_pixels=3136, image_max_pixels=11289600),
         "4 to 14400, by size"),
        (metadata("dots_ocr", 0, 14, projector__scale_factor=2), "by size"),
        (metadata("paddleocr", 1680, 8, image_min_pixels=147384, image_max_pixels=2822400), "576 to 11025, by size"),
        (metadata("pixtral", 1540, 14, spatial_merge_size=2), "8 to 1024, by size"),
        (metadata("deepseekocr", 32, 8), "by size"),
        (metadata("hunyuanvl"), "by size"),
        (metadata("resampler") | {"clip.minicpmv_query_num": 96}, "96 per tile"),
        (metadata("resampler") | {"clip.minicpmv_version": 3}, "64 per tile"),
        (metadata("another"), "by size"),
        (metadata("gemma3", 0), "by size"),
        (metadata("gemma3", patch=0), "by size"),
        (metadata("gemma3") | {"clip.has_vision_encoder": False}, None),
    ],
)  # fmt: skip
def test_tokens_of_an_image(keys: dict[str, Any], tokens: int | str | None) -> None:
    assert image_tokens(keys, {}) == tokens


def test_a_break_of_rows_makes_the_number_depend_on_the_image() -> None:
    assert image_tokens(metadata("pixtral"), tensors(v__token_embd__img_break=(64,))) == "by size"


@pytest.mark.parametrize(
    ("projector", "shapes", "width"),
    [
        ("qwen2vl_merger", {"mm__2__weight": (5120, 3584)}, 3584),
        ("gemma3", {"mm__input_projection__weight": (2560, 1152)}, 2560),
        ("gemma4v", {"mm__input_projection__weight": (768, 1536)}, 1536),
        ("idefics3", {"mm__model__fc__weight": (12288, 576)}, 576),
        ("gemma3", {}, None),
        ("another", {"mm__2__weight": (5120, 3584)}, None),
    ],
)
def test_the_text_models_that_fit(projector: str, shapes: dict[str, tuple[int, ...]], width: int | None) -> None:
    assert text_width(metadata(projector), tensors(**shapes)) == width
