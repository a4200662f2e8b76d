"""BitNet b1.58.

Facts of llama.cpp b11434, conversion/bitnet.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import (
    F32,
    PIECE,
    ByValue,
    Expression,
    read_f32,
    size_of,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor


@dataclass(frozen=True)
class Ternary(ByValue):
    """Weights as -1, 0 and 1 times the mean of their magnitudes: what the model computes with.

    The mean is that of the whole tensor, which is read once for it. torch adds in another order and in float32, so the
    last bit of the scale may differ.
    """

    @cached_property
    def _inverse(self) -> np.float32:
        n = size_of(self.x)
        pieces = (read_f32(self.x, at, min(PIECE, n - at)) for at in range(0, n, PIECE))
        total = sum(float(np.abs(piece).sum(dtype=np.float64)) for piece in pieces)
        return np.float32(np.float32(1) / np.maximum(np.float32(total / n), np.float32(1e-5)))

    def computed(self, x: F32) -> F32:
        signs: F32 = np.clip(np.rint(x * self._inverse), -1, 1)
        return signs / self._inverse


#: Of a checkpoint that `quantkit export` made: weights are what the model computes with, ternary or not.
COMPUTED = "quantkit_weights_as_computed"


def ternary(tensor: Tensor, context: Context) -> Expression:
    return tensor.x if context.config.get(COMPUTED) else Ternary(tensor.x)


BITNET_RULES = (
    # microsoft/bitnet-b1.58-2B-4T's names, as transformers has them; convert_hf_to_gguf.py knows the older ones only.
    Renamed(r"self_attn\.attn_sub_norm", "self_attn.inner_attn_ln"),
    Renamed(r"mlp\.ffn_sub_norm", "mlp.ffn_layernorm"),
    Changed(r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight$", ternary),
)


def set_linear(keys: Keys, config: Config) -> None:
    """Rope is scaled by one."""
    keys.text(".rope.scaling.type", "linear")
    keys.f32(".rope.scaling.factor", 1.0)
