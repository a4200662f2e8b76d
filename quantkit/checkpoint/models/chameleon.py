"""Chameleon (text).

Facts of llama.cpp b11434, conversion/chameleon.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, take
from quantkit.checkpoint.key_rows import Copied
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import Drop, Transform
from quantkit.checkpoint.tensors import Context, Tensor

#: More than any model has, to bound memory.
_MAX_HEADS = 1 << 16


@dataclass(frozen=True)
class RepeatFirstHead:
    """Repeat the norm of the first head for all ``heads``, its halves interleaved."""

    heads: str

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        width = tensor.x.shape[1]
        pairs = [range(i, width, width // 2) for i in range(width // 2)]
        heads = context.config.number(self.heads, "num_attention_heads")
        if heads > _MAX_HEADS:
            raise ValueError(f"it has {heads} heads")
        first = (range(1),) * heads
        return take(take(tensor.x, 1, *pairs), 0, *first)


def join_halves(tensor: Tensor, context: Context) -> Expression:
    width = tensor.x.shape[1]
    return take(tensor.x, 1, range(0, width, 2), range(1, width, 2))


CHAMELEON_RULES = (
    Transform(r"q_norm\.(weight|bias)$", RepeatFirstHead("num_attention_heads"), join_halves),
    Transform(r"k_norm\.(weight|bias)$", RepeatFirstHead("num_key_value_heads"), join_halves),
)

CHAMELEON_STORED = (Drop(r"^model\.vqmodel"),)


#: Whether norms follow attention and feed forward (Swin).
SWIN_NORM = Copied(".swin_norm", "swin_norm", "flag", default=False)

_CHAMELEON = Architecture(
    "chameleon",
    stored=CHAMELEON_STORED,
    rules=(*llama.ROPE_PERMUTED, *CHAMELEON_RULES),
    keys=(SWIN_NORM,),
)

ARCHITECTURES: dict[str, Architecture] = {
    "ChameleonForCausalLM": _CHAMELEON,
    "ChameleonForConditionalGeneration": _CHAMELEON,
}


def _set_image_tokens(meta: ModelMetadata, config: Json) -> None:
    """Name the tokens for parts of images."""
    texts = meta.model.get("tokenizer.ggml.tokens")
    numbered = enumerate(() if texts is None else map(str, texts))
    config["vocabulary_map"] = {text: i for i, text in numbered if text == "<image>" or text.startswith("IMGIMG")}


CLASSES: dict[str, HfClass] = {
    "ChameleonForConditionalGeneration": HfClass(
        "chameleon",
        config_setters=(_set_image_tokens,),
        note=(
            "GGUF files do not contain the image tokenizer (model.vqmodel): transformers initializes it randomly; "
            "text does not use it. Of the norms of single heads, a file has only the first"
        ),
    ),
}
