"""The encoders of Nemotron Nano VL: the ViT of RADIO, and Parakeet's conformer.

Facts of llama.cpp b11434, conversion/nemotron.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.encoder_rules import add_axes, remove_axis
from quantkit.checkpoint.expressions import F32, TYPE_F32, Expression, Shaped, read_f32
from quantkit.checkpoint.mmproj import (
    USE_GELU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    constant,
    projector,
)
from quantkit.checkpoint.rules import Drop, Rename, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.torch_math import fma
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType


def _vision_config(outer: Json) -> object:
    """Return the configuration of the ViT, with the sizes of ViT-H, which config.json lacks."""
    vision = outer.get("vision_config")
    return vision and {
        **vision,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": outer.get("force_image_size", 512),
    }


def _patch(config: MmprojConfig) -> None:
    """Default the mean and the deviation of colours to those of ImageNet."""
    values = config.preprocessor.values
    values.setdefault("image_mean", [0.485, 0.456, 0.406])
    values.setdefault("image_std", [0.229, 0.224, 0.225])


def _scale_factor(config: MmprojConfig) -> int:
    ratio = config.model.get("downsample_ratio", 0.5)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise FormatError(f"{config.path}: downsample_ratio is {short(ratio)}, not a part", "QK-E112")
    return int(1.0 / ratio)


@dataclass(frozen=True)
class Resized:
    """Embeddings of a grid of positions, [1, positions, width], at ``side`` ** 2 positions: float32, bilinear.

    The corners of both grids have the same place. Products and sums are fused in the order of torch's kernel.
    """

    x: Expression
    side: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.side**2, self.x.shape[2])

    @property
    def type(self) -> TensorType:
        return TYPE_F32

    @cached_property
    def _values(self) -> F32:
        side, width = math.isqrt(self.x.shape[1]), self.x.shape[2]
        step = np.float32(side - 1) / np.float32(self.side - 1) if self.side > 1 else np.float32(0)
        places = step * np.arange(self.side, dtype=np.float32)
        low = np.minimum(places.astype(np.int64), side - 1)
        high = np.minimum(low + 1, side - 1)
        part = np.clip(places - low.astype(np.float32), np.float32(0), np.float32(1))
        complement = np.float32(1) - part
        values = np.empty((self.side, self.side, width), np.float32)
        for row in range(self.side):
            above, below = (
                read_f32(self.x, int(i) * side * width, side * width).reshape(side, width)
                for i in (low[row], high[row])
            )
            terms = (
                (part[row] * complement, below[low]),
                (part[row] * part, below[high]),
                (complement[row] * part, above[high]),
                (complement[row] * complement, above[low]),
            )
            total = np.zeros((self.side, width), np.float32)
            for weights, embeddings in terms:
                total = fma(weights[:, None], embeddings, total)
            values[row] = total
        return values

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        out.view(np.float32)[...] = self._values.reshape(-1)[start : start + out.size // 4]

    def parts(self) -> Iterator[StoredTensor]:
        return self.x.parts()


def _resize_positions(tensor: Tensor, context: Context) -> Expression:
    """Return the embeddings of positions of an image, from those of the largest image."""
    assert isinstance(context.config, MmprojConfig)
    vision = context.config.vision
    side = vision.number("image_size") // vision.number("patch_size")
    one, positions, width = tensor.x.shape
    stored_side = math.isqrt(positions)
    if side == stored_side:
        return tensor.x
    if one != 1 or stored_side**2 != positions or width != vision.number("hidden_size") or not side:
        raise ValueError(f"not that of a square of positions for {side} patches on a side")
    return Resized(tensor.x, side)


def _convolve_patches(tensor: Tensor, context: Context) -> Expression:
    """Return the linear layer of patches as a convolution."""
    assert isinstance(context.config, MmprojConfig)
    vision = context.config.vision
    patch = vision.number("patch_size")
    return Shaped(tensor.x, (vision.number("hidden_size"), 3, patch, patch))


def _channels_inside(tensor: Tensor, context: Context) -> Expression:
    """Return the convolution of single channels [channels, 1, width] as [1, 1, channels, width]."""
    channels, one, width = tensor.x.shape
    return Shaped(tensor.x, (1, one, channels, width))


def _bias(tensor: Tensor, context: Context) -> Expression:
    """Return the bias of a convolution as [1, channels, 1, 1]."""
    return add_axes(1, 2)(tensor, context) if len(tensor.x.shape) == 1 else tensor.x


def _squeeze_column(tensor: Tensor, context: Context) -> Expression:
    """Return a convolution of width 1 as a matrix."""
    return remove_axis(2)(tensor, context) if tensor.x.shape[2:] == (1,) else tensor.x


_NEMOTRON = Mmproj(
    (
        constant(".vision.attention.layer_norm_epsilon", 1e-6, "f32"),
        USE_GELU,
        Key(".vision.projector.scale_factor", _scale_factor),
    ),
    first=(projector("nemotron_v2_vl"),),
    tensors=r"^(vision_model\.radio_model\.model|mlp1|sound_encoder|sound_projection)\.",
    stored=(
        Drop(r"input_conditioner|radio_model\.model\.patch_generator\.video_embedder"),
        Drop(r"^(?=.*conv\.norm).*num_batches"),
        Rename(r"(patch_generator\.pos_embed.*)(?<!\.weight)$", r"\1.weight"),
    ),
    rules=(
        Transform(r"patch_generator\.pos_embed", _resize_positions, None),
        Transform(r"patch_generator\.embedder", _convolve_patches, None),
        Transform(r"depthwise_conv\.weight", _channels_inside, None),
        Transform(r"pointwise_conv.*\.weight$", _squeeze_column, None),
        Transform(r"(subsampling\.layers|pointwise_conv).*\.bias$", _bias, None),
    ),
    forced=tuple((part, TYPE_F32) for part in ("a.conv1d.", ".conv_dw.", ".conv_pw")),
    vision_config=_vision_config,
    patch_config=_patch,
)
_WITH_SOUND = replace(
    _NEMOTRON,
    first=(
        EncoderKey(".audio.num_mel_bins", "num_mel_bins", section="audio"),
        constant(".audio.attention.layer_norm_epsilon", 1e-5, "f32"),
        EncoderKey(".audio.subsampling_factor", "subsampling_factor", section="audio"),
        EncoderKey(".audio.conv_kernel_size", "conv_kernel_size", section="audio"),
        projector("parakeet", "clip.audio.projector_type"),
        projector("nemotron_v2_vl", "clip.vision.projector_type"),
    ),
    audio=True,
    audio_config=lambda outer: outer.get("sound_config"),
)
_ROW = replace(
    _NEMOTRON,
    dispatch=lambda outer: None if outer.get("sound_config") is None else _WITH_SOUND,
    variants=(_WITH_SOUND,),
)

MMPROJ: dict[str, Mmproj] = dict.fromkeys(("NemotronH_Nano_VL_V2", "RADIOModel"), _ROW)
