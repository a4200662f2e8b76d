"""BitNet b1.58.

Facts of llama.cpp b11434, conversion/bitnet.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quantkit.checkpoint.expressions import F32, PIECE, ByValue, Expression, read_f32, size_of
from quantkit.checkpoint.key_rows import Always, SetKeys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Rename, Transform, identity
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.bpe import write_sentencepiece_or_bpe

#: In a checkpoint written by `quantkit export` weights are the effective ones, ternary or not.
AS_COMPUTED_KEY = "quantkit_weights_as_computed"


def round_to_ternary(tensor: Tensor, context: Context) -> Expression:
    return tensor.x if context.config.get(AS_COMPUTED_KEY) else Ternary(tensor.x)


BITNET_RULES = (
    # microsoft/bitnet-b1.58-2B-4T's names, as transformers has them; convert_hf_to_gguf.py supports only the older
    # ones.
    Rename(r"self_attn\.attn_sub_norm", "self_attn.inner_attn_ln"),
    Rename(r"mlp\.ffn_sub_norm", "mlp.ffn_layernorm"),
    Transform(r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight$", round_to_ternary, identity),
)


#: Rope is scaled by 1.
LINEAR_ROPE: tuple[SetKeys, ...] = (
    Always(".rope.scaling.type", "linear", "text"),
    Always(".rope.scaling.factor", 1.0, "f32"),
)


@dataclass(frozen=True)
class Ternary(ByValue):
    """Ternary weights times their mean magnitude, as the model computes them.

    The mean is that of the whole tensor, which is read once for it. torch adds in another order and in float32, so the
    last bit of the scale may differ.
    """

    @cached_property
    def _inverse(self) -> np.float32:
        n = size_of(self.x)
        pieces = (read_f32(self.x, start, min(PIECE, n - start)) for start in range(0, n, PIECE))
        total = sum(float(np.abs(piece).sum(dtype=np.float64)) for piece in pieces)
        return np.float32(np.float32(1) / np.maximum(np.float32(total / n), np.float32(1e-5)))

    def compute(self, x: F32) -> F32:
        signs: F32 = np.clip(np.rint(x * self._inverse), -1, 1)
        return signs / self._inverse


_BITNET = Architecture("bitnet", rules=BITNET_RULES, keys=LINEAR_ROPE, vocab=write_sentencepiece_or_bpe)

ARCHITECTURES: dict[str, Architecture] = {
    "BitNetForCausalLM": _BITNET,
    "BitnetForCausalLM": _BITNET,
}

CLASSES: dict[str, HfClass] = {
    "BitNetForCausalLM": HfClass(
        "bitnet",
        defaults={AS_COMPUTED_KEY: True},
        note=(
            "BitNet weights are written already quantized, and `quantkit convert` keeps them; transformers loads "
            "them as a plain model and does not round activations"
        ),
    ),
}
