"""Talkie: norms without weights, factors beside matrices, heads that turn the other way (conversion/talkie.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Mapped, Shaped, joined, read_f32, size_of, taken
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor

#: Factors of what a part of a layer gives: the kind whose ``.scale`` each is.
_GAINS = {"attn_gain": "attn_output", "mlp_gain": "ffn_down"}


def turned(tensor: Tensor, context: Context) -> Expression:
    """Negate the second half of every head, so that columns turn as in other models."""
    head, (rows, width) = context.config.number("head_dim"), tensor.x.shape
    heads = Shaped(tensor.x, (rows // head, head, width))
    first, second = taken(heads, 1, range(head // 2)), taken(heads, 1, range(head // 2, head))
    return Shaped(joined((first, Mapped(second, "negative")), 1), tensor.x.shape)


def by_head(tensor: Tensor, context: Context) -> Expression:
    """Give a factor of each head a row of its own."""
    return Shaped(tensor.x, (*tensor.x.shape, 1))


@dataclass(frozen=True)
class Gains:
    """Factors of layers' parts become scales of their last matrices; that of logits a key."""

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


RULES = (
    Gains(),
    Changed(r"\.attn\.attn_(query|key)\.weight$", turned),
    Changed(r"\.head_gain\.head_g(\.weight)?$", by_head),
    Renamed(r"^(.*)(?<!\.weight)$", r"\1.weight", foreign=True),
)
#: What PyTorch takes where no epsilon is given.
KEYS: tuple[SetKeys, ...] = (Always(".attention.layer_norm_rms_epsilon", float(np.finfo(np.float32).eps), "f32"),)


def set_gain(keys: Keys, config: Config) -> None:
    """Set the factor of logits."""
    if "lm_head_gain" in config.values:
        keys.f32(".logit_scale", config["lm_head_gain"])
