"""Tokens of an image, and the embedding length of fitting text models, by the projector of an mmproj file.

Facts of llama.cpp b11434, tools/mtmd/clip.cpp: clip_n_output_tokens, clip_n_mmproj_embd, load_hparams; mtmd.cpp
(init_vision) and mtmd-image.cpp: how images are resized or cut into tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.formats.gguf.reader import TensorInfo

#: Keys of the patches along a side that become one token.
_SCALE, _SPATIAL = "projector.scale_factor", "spatial_merge_size"


@dataclass(frozen=True)
class _Images:
    """Images of a projector.

    ``fit``: "square", images are resized to the image size; "tiles", and cut into tiles of it; "budget", resized to a
    number of tokens between ``least`` and ``most``, or to a number of pixels in the file if these are 0. ``merge`` and
    ``key``: patches along a side that become one token, and the key that may state it. ``only_merge``: any other
    number of merged patches makes another number of tokens than the budget.
    """

    fit: str
    merge: int = 1
    key: str = ""
    least: int = 0
    most: int = 0
    only_merge: bool = False


_QWEN = _Images("budget", 2, _SPATIAL, 8, 4096, only_merge=True)
_PIXELS = _Images("budget", 2, _SPATIAL, only_merge=True)
#: Projector -> its images; of others the number of tokens depends on the image in another way.
_PROJECTORS = {
    **dict.fromkeys(("mlp", "mlp_norm", "janus_pro", "cogvlm", "ldp", "ldpv2", "adapter"), _Images("square")),
    "gemma3": _Images("square", 4, _SCALE),
    "gemma3nv": _Images("square"),
    "nemotron_v2_vl": _Images("square", 1, _SCALE),
    **dict.fromkeys(("idefics3", "internvl", "llama4"), _Images("tiles", 1, _SCALE)),
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o", "qwen3vl_merger", "ling3vl", "glm4v"), _QWEN),
    **dict.fromkeys(("mimovl", "exaone4_5", "glm5v"), _PIXELS),
    "minimax_m3": _Images("budget", 2, _SPATIAL, 8, 576, only_merge=True),
    "kimivl": _Images("budget", 1, _SCALE, 8, 1024),
    "kimik25": _Images("budget", 1, _SCALE, 2, 4096),
    "pixtral": _Images("budget", 1, _SPATIAL, 8, 1024),
    **dict.fromkeys(("gemma4v", "gemma4uv"), _Images("budget", 3, _SCALE, 70, 1120)),
    "phi4": _Images("budget"),
    "dots_ocr": _Images("budget", 1, _SCALE),
    "dots3note_v": _Images("budget", 1, _SPATIAL),
    "paddleocr": _Images("budget", 2),
}
#: A tensor of the projector, and the axis of it that is the embedding length of the text model.
_OUTPUTS = {
    "vision": {
        **dict.fromkeys(("gemma3", "gemma3nv"), ("mm.input_projection.weight", 0)),
        **dict.fromkeys(("gemma4v", "gemma4uv"), ("mm.input_projection.weight", 1)),
        **dict.fromkeys(("internvl", "nemotron_v2_vl"), ("mm.model.mlp.3.weight", 1)),
        **dict.fromkeys(
            ("idefics3", "llama4", "step3vl", "hunyuanvl", "deepseekocr", "deepseekocr2"), ("mm.model.fc.weight", 1)
        ),
        **dict.fromkeys(("minicpmv4_6", "glm4v", "glm5v", "cogvlm"), ("mm.down.weight", 1)),
        "granite4_vision": ("v.proj_blk.0.linear.weight", 1),
        "minimax_m3": ("mm.merger.fc2.weight", 1),
        "resampler": ("resampler.proj.weight", 0),
        "adapter": ("adapter.linear.dense_4h_to_h.weight", 1),
        "janus_pro": ("mm.1.weight", 1),
        "mlp_norm": ("mm.3.bias", 0),
        "ldp": ("mm.model.mb_block.1.block.2.1.bias", 0),
        "ldpv2": ("mm.model.peg.0.bias", 0),
        **dict.fromkeys(
            (
                *("mlp", "phi4", "pixtral", "lightonocr", "dots_ocr", "dots3note_v", "muse-glimmer", "lfm2", "kimivl"),
                *("kimik25", "paddleocr", "yasa2", "deepseek4v", "qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o"),
                *("qwen3vl_merger", "ling3vl", "exaone4_5", "youtuvl", "mimovl"),
            ),
            ("mm.2.weight", 1),
        ),
    },
    "audio": {
        **dict.fromkeys(("qwen2a", "qwen2.5o"), ("mm.a.fc.weight", 1)),
        **dict.fromkeys(("gemma4a", "gemma4ua"), ("mm.a.input_projection.weight", 1)),
        **dict.fromkeys(("ultravox", "voxtral", "musicflamingo", "glma", "qwen3a"), ("mm.a.mlp.2.weight", 1)),
        "granite_speech": ("a.proj_linear.weight", 1),
        **dict.fromkeys(("meralion", "lfm2a"), ("mm.a.mlp.3.weight", 1)),
    },
}
#: What the number of tokens is where it depends on the image.
BY_SIZE = "by size"


def projector_type(metadata: Mapping[str, Any], encoder: str) -> str:
    """Return the projector type of an encoder, "vision" or "audio"; "" without one."""
    if not metadata.get(f"clip.has_{encoder}_encoder"):
        return ""
    return str(metadata.get("clip.projector_type") or metadata.get(f"clip.{encoder}.projector_type") or "")


def image_tokens(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int | str | None:
    """Return the tokens of an image: a number, one per tile, a range, or "by size"; None without a vision encoder.

    A range is that to which llama.cpp resizes images; very narrow ones may have a few more or fewer.
    """
    name = projector_type(metadata, "vision")
    if not name:
        return None

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"clip.vision.{key}", default)
        return value if isinstance(value, int) else default

    size, patch = number("image_size"), number("patch_size")
    if name == "resampler":
        count = metadata.get("clip.minicpmv_query_num") or (64 if metadata.get("clip.minicpmv_version", 2) > 2 else 96)
        return f"{count} per tile"
    if name == "yasa2":
        return 64
    images = _PROJECTORS.get(name)
    if images is None or patch <= 0 or (size <= 0 and images.fit != "budget"):
        return BY_SIZE
    if name == "gemma3nv":
        return size // patch
    merge = (number(images.key, images.merge) if images.key else images.merge) or 1
    if images.fit == "budget":
        return _budget(name, images, metadata, merge, patch, tensors)
    tokens = (size // patch) ** 2 // merge**2
    if name in ("ldp", "ldpv2", "adapter"):
        tokens = tokens // 4 + 2 * ("adapter.boi" in tensors)
    if name == "cogvlm":
        tokens += 2
    return f"{tokens} per tile" if images.fit == "tiles" or metadata.get("clip.vision.image_grid_pinpoints") else tokens


def _budget(
    name: str, images: _Images, metadata: Mapping[str, Any], merge: int, patch: int, tensors: Mapping[str, TensorInfo]
) -> str:
    """Return the range of tokens of images that are resized to a budget."""
    if (images.only_merge and merge != images.merge) or "v.token_embd.img_break" in tensors:
        return BY_SIZE
    least, most = images.least, images.most
    fewest, largest = (metadata.get(f"clip.vision.image_{end}_pixels") for end in ("min", "max"))
    if isinstance(fewest, int) and isinstance(largest, int) and fewest > 0 and (not most or name == "kimik25"):
        area = (patch * merge) ** 2
        least, most = max(1, -(-fewest // area)), largest // area
    return f"{least} to {most}, {BY_SIZE}" if 0 < least <= most else BY_SIZE


def text_width(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int | None:
    """Return the embedding length of the text models that a file fits; None if its projector does not show it."""
    for encoder, outputs in _OUTPUTS.items():
        name, axis = outputs.get(projector_type(metadata, encoder), ("", 0))
        tensor = tensors.get(name)
        if tensor is not None and len(tensor.shape) > axis:
            return tensor.shape[axis]
    return None
