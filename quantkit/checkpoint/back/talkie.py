"""Talkie's row of the table of classes (``classes``), and what its rules did undone."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.checkpoint.back.rules import CHANGES, Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Spelling, spelled
from quantkit.checkpoint.expressions import Constant, Shaped
from quantkit.checkpoint.families import talkie
from quantkit.checkpoint.tensors import Tensor

_BLOCK = "model.blocks.*."

CHANGES |= {
    talkie.turned: talkie.turned,
    talkie.by_head: lambda tensor, context: Shaped(tensor.x, tensor.x.shape[:1]),
}


@undone.register
def _(rule: talkie.Gains, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


def _gain(said: Said) -> Iterable[Tensor]:
    """Make the factor of logits."""
    yield Tensor("lm_head_gain.w_g", Constant((float(said.get(".logit_scale") or 1.0),)), None)


TALKIE = {
    "TalkieForCausalLM": Spelling(
        "talkie",
        "model.embed lm_head "
        + spelled(_BLOCK, "attn.attn_query attn.attn_key attn.attn_value attn.attn_resid attn.head_gain.head_g")
        + " "
        + spelled(_BLOCK, "mlp.mlp_gate mlp.mlp_linear mlp.mlp_resid embed_skip.a_g"),
        kinds={"*attn_output.scale": f"{_BLOCK}attn_gain.a_g", "*ffn_down.scale": f"{_BLOCK}mlp_gain.a_g"},
        keys={".logit_scale": "", ".attention.layer_norm_rms_epsilon": ""},
        renamed=((r"\.(head_g|a_g)\.weight$", r".\1"), (r"^lm_head\.weight$", "lm_head")),
        tensors=_gain,
    )
}
