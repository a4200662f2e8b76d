"""More rows of the table of classes (``classes``): RWKV 6 and 7, and Qwens with their time mixing in place of
attention; what their rules did undone, and what is derived for them.

RWKV 7 is written as flash-linear-attention names it, which transformers loads with that package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from quantkit.checkpoint.back.rules import Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, spelled
from quantkit.checkpoint.expressions import Expression, Multiplied, Shaped, Transposed, size_of, taken
from quantkit.checkpoint.families import rwkv
from quantkit.checkpoint.tensors import Tensor

_BLOCKS = "rwkv.blocks.*."
_LAYERS = "model.layers.*."


def _vector(x: Expression) -> Expression:
    """Return what is mixed as RWKV stores it: of one text, one token."""
    return Shaped(x, (1, 1, size_of(x)))


def _apart(x: Expression, names: Sequence[str], tensor: Tensor) -> list[Tensor]:
    """Return the vectors of one tensor, each by its name."""
    return [replace(tensor, name=name, x=_vector(taken(x, 0, range(i, i + 1)))) for i, name in enumerate(names)]


# --- RWKV 6 ----------------------------------------------------------------------------------------------------------


@undone.register
def _(rule: rwkv.Mixing6, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take what is mixed apart, turn matrices back, and multiply by what every few layers were divided by."""
    stem, dot, kind = tensor.name.rpartition(".")
    if tensor.name.endswith(".time_maa_fused.weight"):
        return _apart(tensor.x, [f"{stem.removesuffix('fused')}{each}" for each in rwkv.MIXED], tensor)
    x, last = tensor.x, stem.rpartition(".")[2]
    if rule.reordered and last in ("time_maa_w1", "time_maa_w2"):
        whole = (5, size_of(x) // 5 // x.shape[-1], x.shape[-1])
        order = sorted(range(5), key=rwkv.QWEN_ORDER.__getitem__)
        x = Shaped(taken(Shaped(x, whole), 0, *(range(i, i + 1) for i in order)), x.shape)
    if last in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
        x = Transposed(x)
    elif last == "time_decay" or last.startswith("time_maa_"):
        x = _vector(x)
    every = back.config.get("rescale_every", 0)
    if every > 0 and tensor.name.endswith(("attention.output.weight", "feed_forward.value.weight")):
        doubled = (tensor.layer or 0) // every
        x = Multiplied(x, 2.0**doubled) if doubled else x
    name = stem if dot and last.startswith("time_") else tensor.name
    return (replace(tensor, name=name, x=x),)


_TIME = "time_maa_x time_maa_w1 time_maa_w2 time_decay time_decay_w1 time_decay_w2 time_faaaa"
_RWKV_6 = Spelling(
    "rwkv6",
    "rwkv.embeddings rwkv.blocks.0.pre_ln rwkv.ln_out head "
    + spelled(f"{_BLOCKS}attention.", f"{_TIME} receptance key value output gate ln_x")
    + " "
    + spelled(
        _BLOCKS,
        "ln1 ln2 feed_forward.time_maa_k feed_forward.time_maa_r feed_forward.key feed_forward.receptance "
        "feed_forward.value",
    ),
    kinds={"*time_mix_lerp_fused": f"{_BLOCKS}attention.time_maa_fused"},
    keys={
        **{".context_length": "max_context_length", ".attention.head_count": "", ".wkv.head_size": "head_size"},
        **{".rescale_every_n_layers": "rescale_every", ".attention.layer_norm_epsilon": "layer_norm_epsilon"},
    },
    otherwise={"rescale_every": 0},
)


def _heads(said: Said, config: Json) -> None:
    """Say how many heads there are, by how wide they are."""
    config["num_attention_heads"] = said.number(".embedding_length") // max(1, said.number(".wkv.head_size"))
    config |= {
        "lora_rank_tokenshift": said.number(".time_mix_extra_dim"),
        "lora_rank_decay": said.number(".time_decay_extra_dim"),
    }


_RWKV_6_QWEN = Spelling(
    "rwkv6qwen2",
    spelled(f"{_LAYERS}self_attn.", f"{_TIME} q_proj k_proj v_proj o_proj gate"),
    kinds={"*time_mix_lerp_fused": f"{_LAYERS}self_attn.time_maa_fused"},
    keys={".context_length": "max_context_length", ".attention.head_count": ""},
    derived=(_heads,),
)

# --- RWKV 7 ----------------------------------------------------------------------------------------------------------

_LOW_RANK = {"1": "_lora.lora.0.weight", "2": "_lora.lora.2.weight", "0": "_lora.lora.2.bias"}


@undone.register
def _(rule: rwkv.Mixing7, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take what is mixed apart, and give single parameters the shapes they had."""
    match = re.fullmatch(r"(model\.layers\.\d+\.)attention\.(\w+)\.weight", tensor.name)
    hybrid = back.config.get("model_type") == "rwkv_hybrid"
    if match is None:
        return None
    stem = match[1] + ("self_attn.time_mixer." if hybrid else "attn.")
    kind, x = match[2], tensor.x
    if kind == "x_fused":
        return _apart(x, [f"{stem}x_{each}" for each in ("rwkvag" if x.shape[0] == 6 else "rwkva")], tensor)
    if kind == "r_k":
        heads = size_of(x) // max(1, back.config.number("head_size" if hybrid else "head_dim"))
        return (replace(tensor, name=f"{stem}r_k", x=Shaped(x, (heads, size_of(x) // max(1, heads)))),)
    if kind in ("k_k", "k_a"):
        return (replace(tensor, name=stem + kind, x=_vector(x) if hybrid else x),)
    low_rank = re.fullmatch(r"([wavg])([012])", kind)
    if low_rank is None:
        return (replace(tensor, name=f"{stem}{kind}.weight"),)
    if tensor.layer == 0 and low_rank[1] == "v":
        return ()  # files have those of the rates twice there, and no use of them
    if not hybrid:
        return (replace(tensor, name=f"{stem}{low_rank[1]}{_LOW_RANK[low_rank[2]]}"),)
    x = _vector(x) if low_rank[2] == "0" else Transposed(x)
    return (replace(tensor, name=stem + kind, x=x),)


def _ranks(said: Said, config: Json) -> None:
    """Say of which ranks matrices are."""
    for name, key in (("decay", "decay"), ("a", "iclr"), ("v", "value_residual_mix"), ("gate", "gate")):
        config[f"{name}_low_rank_dim"] = said.get(f".attention.{key}_lora_rank")
    config |= {"norm_first": True, "norm_bias": True, "attn": None}


_MIXED_7 = " ".join(f"{each}{n}" for each in "wav" for n in (0, 1, 2)) + " g1 g2 k_k k_a r_k"
_RWKV_7 = Spelling(
    "rwkv7",
    "model.embeddings model.norm model.layers.0.pre_norm "
    + spelled(
        _LAYERS,
        "attn_norm ln2 feed_forward.key feed_forward.value feed_forward.x_k",
    )
    + " "
    + spelled(f"{_LAYERS}attention.", f"{_MIXED_7} r_proj k_proj v_proj o_proj ln_x"),
    kinds={"*time_mix_lerp_fused": f"{_LAYERS}attention.x_fused", "*attn_norm": f"{_LAYERS}attn_norm"},
    keys={
        **{".context_length": "", ".attention.head_count": "", ".wkv.head_size": "head_dim"},
        ".attention.layer_norm_epsilon": "norm_eps",
    },
    derived=(_ranks,),
    renamed=(
        (r"\.ln2\.", ".ffn_norm."),
        (r"\.feed_forward\.x_k\.weight$", ".ffn.x_k"),
        (r"\.feed_forward\.", ".ffn."),
        (r"\.attention\.ln_x\.", ".attn.g_norm."),
        (r"\.attn\.ln_x\.", ".attn.g_norm."),
    ),
)


def _hybrid(said: Said, config: Json) -> None:
    """Say whether there are gates and norms of heads, and how many heads."""
    config |= {
        "wkv_version": 7,
        "wkv_has_gate": said.some(".time_mix_g1.weight"),
        "wkv_has_group_norm": said.some(".time_mix_ln.weight"),
        "num_attention_heads": said.number(".embedding_length") // max(1, said.number(".wkv.head_size")),
    }


_RWKV_7_HYBRID = Spelling(
    "rwkv_hybrid",
    spelled(f"{_LAYERS}attention.", f"{_MIXED_7} receptance key value output ln_x"),
    kinds={"*time_mix_lerp_fused": f"{_LAYERS}attention.x_fused"},
    keys={".context_length": "", ".attention.head_count": "", ".wkv.head_size": "head_size"},
    derived=(_hybrid,),
    renamed=((r"\.attention\.ln_x\.bias$", ".self_attn.time_mixer.ln_x.bias"),),
)

#: Class of transformers -> how it spells.
RWKV: dict[str, Spelling] = {
    "Rwkv6ForCausalLM": _RWKV_6,
    "RWKV6Qwen2ForCausalLM": _RWKV_6_QWEN,
    "RWKV7ForCausalLM": _RWKV_7,
    "RwkvHybridForCausalLM": _RWKV_7_HYBRID,
}
