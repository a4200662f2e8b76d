"""Talkie: norms without weights, separate factors of matrices, heads that rotate in the opposite direction.

Facts of llama.cpp b11434, conversion/talkie.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Mapped, Shaped, concatenate, read_f32, size_of, take
from quantkit.checkpoint.key_rows import Always, Copied, SetKeys
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Transform
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor

#: Output factors of a layer's parts -> the kind of tensor that gets it as ``.scale``.
_GAINS = {"attn_gain": "attn_output", "mlp_gain": "ffn_down"}


def negate_second_halves(tensor: Tensor, context: Context) -> Expression:
    """Negate the second half of every head, which reverses the direction of rotation."""
    head, (rows, width) = context.config.number("head_dim"), tensor.x.shape
    heads = Shaped(tensor.x, (rows // head, head, width))
    first, second = take(heads, 1, range(head // 2)), take(heads, 1, range(head // 2, head))
    return Shaped(concatenate((first, Mapped(second, "negative")), 1), tensor.x.shape)


def as_rows(tensor: Tensor, context: Context) -> Expression:
    """Reshape one factor per head to one row per head."""
    return Shaped(tensor.x, (*tensor.x.shape, 1))


@dataclass(frozen=True)
class ReadGains(OneWayRule):
    """Convert the gains of layers to scales of their last matrices, and the gain of logits to a key."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name == "lm_head_gain.w_g":
            if size_of(tensor.x) != 1:
                raise context.fail(tensor, "a factor of more than one value")
            context.config.values["lm_head_gain"] = float(read_f32(tensor.x, 0, 1)[0])
            return ()
        for name, kind in _GAINS.items():
            if tensor.layer is not None and tensor.name == f"model.blocks.{tensor.layer}.{name}.a_g":
                return (replace(tensor, name_in_file=f"blk.{tensor.layer}.{kind}.scale"),)
        return None


def as_vector(tensor: Tensor, context: Context) -> Expression:
    """Return one factor per head, without the dimension of its values."""
    return Shaped(tensor.x, tensor.x.shape[:1])


RULES = (
    ReadGains(),
    Transform(r"\.attn\.attn_(query|key)\.weight$", negate_second_halves, negate_second_halves),
    Transform(r"\.head_gain\.head_g(\.weight)?$", as_rows, as_vector),
    Rename(r"^(.*)(?<!\.weight)$", r"\1.weight", foreign=True),
)

#: PyTorch's default epsilon.
KEYS: tuple[SetKeys, ...] = (Always(".attention.layer_norm_rms_epsilon", float(np.finfo(np.float32).eps), "f32"),)


#: The factor of logits.
GAIN = Copied(".logit_scale", "lm_head_gain", "f32")

ARCHITECTURES: dict[str, Architecture] = {
    "TalkieForCausalLM": Architecture("talkie", rules=RULES, keys=KEYS, head_keys=(GAIN,)),
}

_LAYER = "model.blocks.*."


def _make_gain(meta: ModelMetadata) -> Iterable[Tensor]:
    """Restore the factor of logits."""
    yield Tensor("lm_head_gain.w_g", Constant((float(meta.get(".logit_scale") or 1.0),)), None)


CLASSES: dict[str, HfClass] = {
    "TalkieForCausalLM": HfClass(
        "talkie",
        "model.embed lm_head "
        + add_prefix(_LAYER, "attn.attn_query attn.attn_key attn.attn_value attn.attn_resid attn.head_gain.head_g")
        + " "
        + add_prefix(_LAYER, "mlp.mlp_gate mlp.mlp_linear mlp.mlp_resid embed_skip.a_g"),
        kinds={"*attn_output.scale": f"{_LAYER}attn_gain.a_g", "*ffn_down.scale": f"{_LAYER}mlp_gain.a_g"},
        renames=((r"\.(head_g|a_g)\.weight$", r".\1"), (r"^lm_head\.weight$", "lm_head")),
        synthetic=_make_gain,
    ),
}
