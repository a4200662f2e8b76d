"""More rows of the table of classes (``classes``): older decoders, what their rules did undone, and what is derived for
them.

Of remote code there are no facts of transformers; what a class computes is what llama.cpp (b11434, src/models/*.cpp)
does of its files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from quantkit.checkpoint.back.rules import CHANGES, Backward, undone
from quantkit.checkpoint.back.said import Said
from quantkit.checkpoint.back.spelling import Json, Spelling, has, spelled
from quantkit.checkpoint.expressions import Constant, joined, taken
from quantkit.checkpoint.families import older
from quantkit.checkpoint.tensors import Tensor, restored
from quantkit.errors import TypeNotSupported

_BLOCK = "model.layers.*."
_GPT_2 = "transformer.h.*."

# --- Baichuan, Xverse, InternLM 2 ------------------------------------------------------------------------------------


def _length(said: Said, config: Json) -> None:
    """Say for how long texts the model is made by its own name, too (Baichuan)."""
    config["model_max_length"] = said.number(".context_length")


@undone.register
def _(rule: older.GroupedHeads, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Put queries that share a key before it and its values."""
    match = re.fullmatch(r"blk\.(\d+)\.attn_([qkv])\.weight", tensor.name)
    if match is None:
        return None
    name = f"model.layers.{match[1]}.attention.wqkv.weight"
    held = back.held.setdefault((id(rule), name), {})
    held[match[2]] = tensor
    if len(held) < 3:
        return ()
    del back.held[id(rule), name]
    heads, keys = back.config.number("num_attention_heads"), back.config.number("num_key_value_heads")
    width, each = back.config.number("hidden_size") // max(1, heads), heads // max(1, keys)
    rows = [held[part].x.shape[0] for part in "qkv"]
    if not keys or heads % keys or rows != [heads * width, keys * width, keys * width]:
        raise back.context.fail(tensor, f"{rows} rows are not {heads} heads of {width}, {keys} of keys")
    x = joined([restored(held["q"], heads), restored(held["k"], keys), held["v"].x])
    starts = [(group * each, heads + group, heads + keys + group) for group in range(keys)]
    runs = [(q * width, (q + each) * width, k * width, v * width) for q, k, v in starts]
    order = [r for q, end, k, v in runs for r in (range(q, end), range(k, k + width), range(v, v + width))]
    return (replace(tensor, name=name, x=taken(x, 0, *order)),)


_INTERN_2 = Spelling(
    "internlm2",
    "model.tok_embeddings output "
    + spelled(_BLOCK, "attention_norm ffn_norm attention.wo feed_forward.w1 feed_forward.w2 feed_forward.w3"),
    kinds={f"*attn_{of}": f"blk.*.attn_{of}" for of in "qkv"},
    otherwise={"bias": False},
)

# --- JAIS ------------------------------------------------------------------------------------------------------------

CHANGES |= {
    older.scaled_embeddings: lambda tensor, context: tensor.x,
    older.scaled_output: lambda tensor, context: tensor.x,
}


@undone.register
def _(rule: older.Slopes, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


def _alibi(said: Said) -> Iterable[Tensor]:
    """Make the slopes of ALiBi, of the largest of its biases."""
    heads, most = said.number(".attention.head_count"), float(said.get(".attention.max_alibi_bias") or 8.0)
    if not 0 < heads <= 1 << 16:
        raise ValueError(f"{heads} heads")
    whole = 1 << heads.bit_length() - 1
    slopes = [2 ** (-most * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-most * (2 * i + 1) / (2 * whole)) for i in range(heads - whole)]
    yield Tensor("transformer.relative_pe.slopes", Constant(tuple(slopes)), None)


_JAIS = Spelling(
    "jais",
    "transformer.wte transformer.ln_f "
    + spelled(_GPT_2, "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_fc2 mlp.c_proj"),
    keys={
        **{".block_count": "n_layer", ".context_length": "n_positions", ".embedding_length": "n_embd"},
        **{".feed_forward_length": "n_inner", ".attention.head_count": "n_head"},
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    # Scales are part of the weights; the others are what llama.cpp has in its code.
    otherwise={
        **{"activation_function": "swiglu", "position_embedding_type": "alibi"},
        **dict.fromkeys(("embeddings_scale", "width_scale", "mup_embeddings_scale"), 1.0),
        **dict.fromkeys(("mup_output_alpha", "mup_width_scale"), 1.0),
        **dict.fromkeys(("scale_qk_dot_by_d", "mup_scale_qk_dot_by_d"), True),
    },
    tensors=_alibi,
)

# --- MPT -------------------------------------------------------------------------------------------------------------


def _mpt_attention(said: Said, config: Json) -> None:
    """Say what attention has, in an object of its own."""
    bias = float(said.get(".attention.max_alibi_bias") or 0.0)
    config["attn_config"] = {
        "alibi": bias > 0,
        # Later versions of transformers take only a whole number.
        "alibi_bias_max": (int(bias) if bias.is_integer() else bias) or 8,
        "clip_qkv": said.get(".attention.clamp_kqv"),
        "qk_ln": said.has("attn_q_norm.weight"),
    }
    if (keys := said.get(".attention.head_count_kv")) is not None:
        config["attn_config"] |= {"kv_n_heads": keys, "attn_type": "grouped_query_attention"}
    config["no_bias"] = not said.has("attn_qkv.bias")
    config["expansion_ratio"] = said.number(".feed_forward_length") // max(1, said.number(".embedding_length"))


_MPT = Spelling(
    "mpt",
    "transformer.wte transformer.wpe transformer.norm_f "
    + spelled(
        "transformer.blocks.*.",
        "norm_1 norm_2 attn.Wqkv attn.out_proj attn.q_ln attn.k_ln ffn.up_proj ffn.down_proj ffn.act",
    ),
    keys={
        **{".block_count": "n_layers", ".context_length": "max_seq_len", ".embedding_length": "d_model"},
        **{".feed_forward_length": "", ".attention.head_count": "n_heads", ".attention.head_count_kv": ""},
        **{".attention.layer_norm_epsilon": "layer_norm_epsilon", ".attention.clamp_kqv": ""},
    },
    derived=(_mpt_attention,),
)

# --- OpenELM ---------------------------------------------------------------------------------------------------------


@undone.register
def _(rule: older.GateAndUp, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Put up behind gate."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up)\.weight", tensor.name)
    if match is None:
        return None
    name = f"transformer.layers.{match[1]}.ffn.proj_1.weight"
    held = back.held.setdefault((id(rule), name), {})
    held[match[2]] = tensor
    if len(held) < 2:
        return ()
    del back.held[id(rule), name]
    return (replace(tensor, name=name, x=joined([held["gate"].x, held["up"].x])),)


def _elm_layers(said: Said, config: Json) -> None:
    """Say how wide each layer is, by multipliers of the width of the model."""
    width, head = said.number(".embedding_length"), said.number(".attention.key_length")
    widths, heads = said.of_layers(".feed_forward_length"), said.of_layers(".attention.head_count")
    keys = said.of_layers(".attention.head_count_kv")
    config |= {
        "ffn_multipliers": [float(Fraction(each, max(1, width))) for each in widths],
        "ffn_dim_divisor": math.gcd(*widths) or 1,
        "num_query_heads": heads,
        "num_kv_heads": keys,
        "num_gqa_groups": heads[0] // max(1, keys[0]),
        "qkv_multipliers": [each * head / max(1, width) for each in (heads[0], heads[-1])],
        "normalize_qk_projections": said.has("attn_q_norm.weight"),
        "rope_max_length": 2 * said.number(".context_length"),
        "share_input_output_layers": not said.has("output.weight"),
    }


_ELM = Spelling(
    "openelm",
    "transformer.token_embeddings transformer.norm "
    + spelled("transformer.layers.*.", "attn_norm ffn_norm attn.q_norm attn.k_norm attn.qkv_proj attn.out_proj")
    + " transformer.layers.*.ffn.proj_2",
    kinds={f"*ffn_{of}": f"blk.*.ffn_{of}" for of in ("gate", "up")},
    keys={
        **{".block_count": "num_transformer_layers", ".context_length": "max_context_length"},
        **{".embedding_length": "model_dim", ".feed_forward_length": "", ".attention.head_count": ""},
        **{".attention.head_count_kv": "", ".rope.freq_base": "rope_freq_constant"},
        ".attention.layer_norm_rms_epsilon": "",
    },
    otherwise={"activation_fn_name": "swish", "ffn_with_glu": True, "normalization_layer_name": "rms_norm"},
    derived=(_elm_layers,),
)

# --- PLaMo -----------------------------------------------------------------------------------------------------------

_PLAMO_BLOCK = "model.layers.layers.*."


def _attending(step: int, layers: int) -> list[bool]:
    """Return which layers attend if one of ``step`` does."""
    if layers <= step // 2:
        return [i == layers - 1 for i in range(layers)]
    return [i % step == step // 2 for i in range(layers)]


def _period(said: Said, config: Json) -> None:
    """Say every how many layers one attends, and what those of both kinds have (PLaMo 2)."""
    layers = said.number(".block_count")
    attends = [bool(n) for n in said.of_layers(".attention.head_count_kv")]
    has_mamba = said.get(".attention.head_count_kv") is not None and not all(attends)
    first = attends.index(True) if True in attends else layers
    # Layers before the first that attends are half of the period; only the last attends where all are fewer.
    steps = [step for step in (2 * first, 2 * first + 1, 2 * layers) if step and attends == _attending(step, layers)]
    if has_mamba and not steps:
        found = [i for i, each in enumerate(attends) if each]
        raise TypeNotSupported(
            f"{said.where}: layers {found} have attention; config.json can only say every how many there is one"
        )
    step = steps[0] if has_mamba else 2
    heads = said.number(".ssm.time_step_rank")
    config |= {
        "mamba_enabled": has_mamba,
        "mamba_step": step,
        "mamba_num_heads": heads,
        "num_attention_heads": max(said.of_layers(".attention.head_count")),
        "num_key_value_heads": max(said.of_layers(".attention.head_count_kv")),
        "attention_window_size": said.number(".context_length"),  # llama.cpp knows of no window
    }


def _unscaled(said: Said, config: Json) -> None:
    """Say how rope is scaled by single keys (PLaMo 3)."""
    rope = config.pop("rope_scaling", None) or {}
    config["rope_scaling_factor"] = rope.get("factor", 1)
    config["initial_context_length"] = rope.get("original_max_position_embeddings", said.number(".context_length"))


_NORMS = "pre_mixer_norm post_mixer_norm pre_mlp_norm post_mlp_norm"
_PLAMO = Spelling(
    "plamo",
    spelled(
        _PLAMO_BLOCK,
        "norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
        "mlp.down_proj",
    ),
    otherwise={"n_shared_head": 8},
)
_PLAMO_2 = Spelling(
    "plamo2",
    spelled(
        _PLAMO_BLOCK,
        "pre_mixer_norm pre_mlp_norm post_mixer_norm.weight post_mlp_norm.weight mlp.gate_up_proj mlp.down_proj "
        "mixer.in_proj mixer.conv1d mixer.bcdt_proj mixer.dt_proj mixer.dt_norm.weight mixer.A_log mixer.D "
        "mixer.B_norm.weight mixer.C_norm.weight mixer.out_proj mixer.qkv_proj mixer.o_proj mixer.q mixer.k",
    ),
    keys={
        **{
            ".attention.head_count": "",
            ".attention.head_count_kv": "",
            ".attention.key_length": "hidden_size_per_head",
        },
        **{".ssm.state_size": "mamba_d_state", ".ssm.conv_kernel": "mamba_d_conv"},
    },
    derived=(_period,),
)
_PLAMO_3 = Spelling(
    "plamo3",
    spelled(
        _PLAMO_BLOCK,
        "pre_mixer_norm pre_mlp_norm post_mixer_norm.weight post_mlp_norm.weight mlp.gate_up_proj mlp.down_proj "
        "mixer.qkv_proj mixer.o_proj mixer.q_norm mixer.k_norm",
    ),
    keys={
        **{".attention.sliding_window": "window_size", ".rope.freq_base_swa": "rope_local_theta"},
        ".attention.sliding_window_pattern": "sliding_window_pattern",
    },
    derived=(_unscaled,),
)

# --- Qwen 1, Refact, ruGPT-3 XL --------------------------------------------------------------------------------------


def _first_qwen(said: Said, config: Json) -> None:
    """Say what Qwen 1 has names of its own for."""
    config |= {
        **{"seq_length": said.number(".context_length"), "kv_channels": said.head, "no_bias": True},
        **{"use_dynamic_ntk": False, "use_logn_attn": False, "scale_attn_weights": True},
    }


@undone.register
def _(rule: older.Fused, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take queries, keys and values apart."""
    match = re.fullmatch(r"(model\.layers\.\d+\.self_attn\.)qkv_proj(\.\w+)", tensor.name)
    if match is None:
        return None
    n = tensor.x.shape[0] // 3
    if tensor.x.shape[0] != 3 * n:
        raise back.context.fail(tensor, f"{tensor.x.shape[0]} rows are not those of queries, keys and values")
    parts = ((of, taken(tensor.x, 0, range(i * n, (i + 1) * n))) for i, of in enumerate("qkv"))
    return [replace(tensor, name=f"{match[1]}{of}_proj{match[2]}", x=x) for of, x in parts]


_QWEN = Spelling(
    "qwen",
    "transformer.wte transformer.ln_f " + spelled(_GPT_2, "ln_1 ln_2 attn.c_attn attn.c_proj mlp.w1 mlp.w2 mlp.c_proj"),
    keys={
        **{".rope.freq_base": "rotary_emb_base", ".attention.layer_norm_rms_epsilon": "rms_norm_eps"},
        ".attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    derived=(_first_qwen,),
)
_REFACT = Spelling(
    "gpt_refact",
    "transformer.wte ln_f "
    + spelled(
        _GPT_2,
        "ln_1 ln_2 attn.q_proj attn.k_proj attn.v_proj attn.c_proj mlp.linear_1 mlp.linear_3 mlp.c_proj",
    ),
    keys={
        **{".block_count": "n_layer", ".context_length": "n_positions", ".embedding_length": "n_embd"},
        **{".feed_forward_length": "", ".attention.head_count": "n_head", ".attention.head_count_kv": ""},
        ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    otherwise={"multi_query": True, "do_sample": True},
)

_RUGPT = Spelling(
    "rugpt3xl",
    "model.embed_tokens model.embed_positions model.norm "
    + spelled(
        _BLOCK,
        "input_layernorm post_attention_layernorm self_attn.qkv_proj self_attn.o_proj mlp.up_proj mlp.down_proj",
    ),
    keys={
        **{".context_length": "max_position_embeddings", ".block_count": "num_hidden_layers"},
        **{".embedding_length": "hidden_size", ".feed_forward_length": "intermediate_size"},
        **{".attention.head_count": "num_attention_heads", ".attention.layer_norm_epsilon": "layer_norm_eps"},
    },
    # Only files of this class say that.
    when=has("attention.head_count_kv"),
)

#: Class of transformers -> how it spells.
OLDER: dict[str, Spelling] = {
    "BaichuanForCausalLM": Spelling("baichuan", derived=(_length,)),
    "XverseForCausalLM": Spelling("xverse"),
    "InternLM2ForCausalLM": _INTERN_2,
    "RuGPT3XLForCausalLM": _RUGPT,
    "JAISLMHeadModel": _JAIS,
    "MptForCausalLM": replace(_MPT, when=lambda said: said.get(".attention.head_count_kv") is None),
    "MPTForCausalLM": _MPT,
    "OpenELMForCausalLM": _ELM,
    "PlamoForCausalLM": _PLAMO,
    "Plamo2ForCausalLM": _PLAMO_2,
    "Plamo3ForCausalLM": _PLAMO_3,
    "QWenLMHeadModel": _QWEN,
    "GPTRefactForCausalLM": _REFACT,
}
