"""Kimi Linear and K3: delta attention between layers of DeepSeek's attention; the encoders of Kimi-VL and K2.5.

Facts of llama.cpp b11434, conversion/kimi_linear.py, conversion/kimi_k3.py, conversion/kimivl.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Mapped, Product, Shaped, size_of, take
from quantkit.checkpoint.hf_encoders import (
    REMOTE_NOTE,
    USUAL_COUNTS,
    HfEncoders,
    add_token_ids,
    hidden_act,
    image_values,
    of_text_class,
)
from quantkit.checkpoint.key_rows import BASE, VOCAB_SIZE, Always, Computed, Copied, SetKeys, WithConfig
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.mmproj import (
    SCALE_FACTOR,
    USE_GELU,
    EncoderKey,
    Key,
    Mmproj,
    MmprojConfig,
    constant,
    layer_norm_epsilon,
    projector,
)
from quantkit.checkpoint.models import deepseek, glm, minimax
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import (
    Drop,
    Rename,
    Split,
    Transform,
    flatten,
    flatten_experts,
    log_of_negative,
    negative_exp,
)
from quantkit.checkpoint.tensor_names import file_name
from quantkit.checkpoint.tensors import Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.tiktoken import KIMI, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError


def as_convolution(tensor: Tensor, context: Context) -> Expression:
    shape = tensor.x.shape
    if len(shape) not in (2, 3):
        raise ValueError("not a depthwise convolution")
    return Shaped(tensor.x, (1, shape[0], 1, shape[-1]))


def as_three_dimensions(tensor: Tensor, context: Context) -> Expression:
    """Reshape a depthwise convolution from llama.cpp's four dimensions to three."""
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], 1, tensor.x.shape[-1]))


CONVOLUTIONS = Transform(r"\.[qkv]_conv1d\.weight$", as_convolution, as_three_dimensions)

LINEAR_RULES = (
    CONVOLUTIONS,
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    minimax.STACK_EXPERTS,
    deepseek.SplitLatentHeads(),
)


def _one_head(config: Config) -> Config:
    return config.with_values({"num_key_value_heads": 1})


#: Of a single head of keys and values.
SINGLE_BASE: tuple[SetKeys, ...] = (WithConfig(BASE, _one_head),)


def _set_delta_attention(meta: ModelMetadata, config: Json) -> None:
    """List the layers of both kinds of attention, counted from 1, and set the heads of delta attention."""
    attends = [bool(n) for n in meta.per_layer(".attention.head_count_kv")]
    beta = next((t for name, t in meta.model.tensors.items() if name.endswith(".ssm_beta.weight")), None)
    config["linear_attn_config"] = config.get("linear_attn_config", {}) | {
        "full_attn_layers": [i + 1 for i, is_full in enumerate(attends) if is_full],
        "kda_layers": [i + 1 for i, is_full in enumerate(attends) if not is_full],
        "num_heads": config["num_attention_heads"] if beta is None else beta.shape[1],
    }


def _delta_keys(*, required: bool) -> tuple[SetKeys, ...]:
    """Return the rows of delta attention; ``required``: an error without its sizes."""
    return (
        Computed(
            ".attention.head_count_kv",
            lambda config: [int(_has_latents(config, layer)) for layer in range(config.layers)],
            "array",
            inverse=_set_delta_attention,
        ),
        Copied(".ssm.conv_kernel", "linear_attn_config.short_conv_kernel_size", required=required),
        Copied(".kda.head_dim", "linear_attn_config.head_dim", required=required),
    )


def _latent_rank(config: Config) -> int:
    return config.number("kv_lora_rank", "n_lora_kv")


def _rope_width(config: Config) -> int:
    return config.number("qk_rope_head_dim", "n_rot")


_LATENT_KEYS: tuple[SetKeys, ...] = (
    Computed(".attention.kv_lora_rank", _latent_rank, names="kv_lora_rank"),
    Computed(".rope.dimension_count", _rope_width),
    Computed(".attention.key_length", lambda config: _latent_rank(config) + _rope_width(config)),
)
_MLA_KEYS: tuple[SetKeys, ...] = (
    Computed(
        ".attention.key_length_mla",
        lambda config: config.number("qk_nope_head_dim") + _rope_width(config),
        inverse=deepseek.set_latent_widths,
    ),
    Copied(".attention.value_length_mla", "v_head_dim", required=True),
)
#: The sizes of latent attention.
LATENT_KEYS: tuple[SetKeys, ...] = (*_LATENT_KEYS, *_MLA_KEYS)

LINEAR_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    *_delta_keys(required=False),
    Copied(".attention.q_lora_rank", "q_lora_rank n_lora_q"),
    *LATENT_KEYS,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_count", "num_shared_experts", required=True),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
)


def _has_latents(config: Config, layer: int) -> bool:
    """Return whether a layer has DeepSeek's attention; the configuration counts layers from one."""
    return layer + 1 in config.table("linear_attn_config")["full_attn_layers"]


@dataclass(frozen=True)
class MergeResidualScores(Rule):
    """Merge a norm and a projection to one value into their elementwise product."""

    pattern: str = r"(self_attention_res|mlp_res|output_attn_res)_(norm|proj)\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        kinds = {"self_attention_res": "*attn_res_score", "mlp_res": "*ffn_res_score"}
        kind = kinds.get(match[1], "output_res_score")
        parts = context.gather(self, tensor.name[: match.end(1)], match[2], tensor, 2)
        if parts is None:
            return ()
        norm, proj = parts["norm"], parts["proj"]
        if size_of(norm.x) != size_of(proj.x):
            raise context.fail(tensor, f"{size_of(proj.x)} values, but a norm of {size_of(norm.x)}")
        layer = tensor.layer if kind.startswith("*") else None
        name = file_name(kind, layer) + ".weight"
        return (replace(tensor, x=Product(norm.x, proj.x), name_in_file=name),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Split into a norm of ones and a projection with the product."""
        if not tensor.name.endswith("_res_proj.weight"):
            return None
        n = size_of(tensor.x)
        norm = replace(tensor, name=tensor.name.replace("_proj.", "_norm."), x=Constant((1.0,) * n))
        return norm, replace(tensor, x=Shaped(tensor.x, (1, n)))


@dataclass(frozen=True)
class AssignGateKinds(OneWayRule):
    """A common name of two gates: of DeepSeek's attention, and of delta attention."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.layer is None or not tensor.name.endswith(".self_attn.g_proj.weight"):
            return None
        kind = "*attn_gate" if _has_latents(context.config, tensor.layer) else "*ssm_g"
        return (replace(tensor, name_in_file=file_name(kind, tensor.layer) + ".weight"),)


def negative_exp_of_heads(tensor: Tensor, context: Context) -> Expression:
    """Return -exp(x), one value per head."""
    heads = min(context.config.number("num_attention_heads"), tensor.x.shape[0])
    return Mapped(take(tensor.x, 0, range(heads)), "negative exp")


K3_STORED = (Drop(r"^(vision_tower|mm_projector)\."),)


def flat_log_of_negative(tensor: Tensor, context: Context) -> Expression:
    return Mapped(flatten(tensor, context), "log of negative")


K3_RULES = (
    MergeResidualScores(),
    CONVOLUTIONS,
    Transform(r"\.A_log$", negative_exp_of_heads, flat_log_of_negative),
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    AssignGateKinds(),
    minimax.STACK_EXPERTS,
    deepseek.SplitLatentHeads(),
)


def refuse_rope(keys: Keys, config: Config) -> None:
    """Refuse rope in latent attention and other gating: llama.cpp does not support either for K3."""
    if not config.get("mla_use_nope") or config["moe_router_activation_func"] != "sigmoid":
        raise FormatError(f"{config.path}: K3 needs mla_use_nope and experts selected by sigmoid", "QK-E305")


K3_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    *_delta_keys(required=True),
    Copied(".kda.gate_lower_bound", "linear_attn_config.gate_lower_bound", "f32"),
    Copied(".attention.q_lora_rank", "q_lora_rank"),
    refuse_rope,
    *_LATENT_KEYS,
    Computed(".attention.value_length", _latent_rank),
    *_MLA_KEYS,
    *LINEAR_KEYS[-4:],
    Copied(".expert_weights_norm", "moe_renormalize", "flag", required=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    Copied(".expert_latent_length", "routed_expert_hidden_size"),
    Copied(".activation.situ_beta", "activation_situ_beta", "f32", required=True),
    Copied(".activation.situ_linear_beta", "activation_situ_linear_beta", "f32", required=True),
    Copied(".attn_res.block_size", "attn_res_block_size", required=True),
)


def write_kimi_linear(v: Vocabulary) -> None:
    """Write tokenizer.json's vocabulary, else Kimi's ranks, with the tokenizer's EOS (KimiLinearModel)."""
    if v.has("tokenizer.json") or not v.has(KIMI.file):
        write_bpe(v)
        return
    write_ranks(v, KIMI)
    end = v.tokenizer_config.get("eos_token")
    numbers = [number for number, entry in v.decoder_entries if entry["content"] == end]
    if not numbers:
        raise FormatError(
            f"{v.folder / 'tokenizer_config.json'}: its eos_token is not one of its added tokens", "QK-E114"
        )
    v.keys.u32("tokenizer.ggml.eos_token_id", numbers[0])


def write_kimi_k3(v: Vocabulary) -> None:
    """Write Kimi Linear's vocabulary with the configuration's EOS (KimiK3Model)."""
    write_kimi_linear(v)
    if (end := v.config.get("eos_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.eos_token_id", end)


_KIMI_LINEAR = Architecture(
    "kimi-linear", rules=LINEAR_RULES, base=SINGLE_BASE, keys=LINEAR_KEYS, vocab=write_kimi_linear
)

ARCHITECTURES: dict[str, Architecture] = {
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "KimiLinearModel": _KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": Architecture(
        "kimi-k3",
        stored=K3_STORED,
        rules=K3_RULES,
        base=SINGLE_BASE,
        keys=K3_KEYS,
        vocab=write_kimi_k3,
    ),
}


_MOE_NAMES = add_prefix(
    f"{LAYER}block_sparse_moe.",
    "gate gate.e_score_correction experts.w1 experts.w2 experts.w3 shared_experts.gate_proj shared_experts.up_proj "
    "shared_experts.down_proj",
)

_KIMI_KEYS = {
    ".expert_count": "num_experts",
    ".expert_used_count": "num_experts_per_token",
    ".expert_gating_func": "moe_router_activation_func",
}

_KIMI_LINEAR_CLASS = HfClass(
    "kimi_linear",
    _MOE_NAMES,
    keys=_KIMI_KEYS,
    # Constants of llama.cpp's graph.
    defaults={"moe_renormalize": True, "mla_use_nope": True, "moe_layer_freq": 1},
)

CLASSES: dict[str, HfClass] = {
    "KimiLinearForCausalLM": _KIMI_LINEAR_CLASS,
    "KimiK3ForConditionalGeneration": replace(
        _KIMI_LINEAR_CLASS,
        names=_MOE_NAMES
        + add_prefix(
            f" {LAYER}",
            "self_attn.g_proj block_sparse_moe.routed_expert_down_proj block_sparse_moe.routed_expert_up_proj",
        ),
        kinds={
            "*ssm_g": f"{LAYER}self_attn.g_proj",
            "*attn_res_score": f"{LAYER}self_attention_res_proj",
            "*ffn_res_score": f"{LAYER}mlp_res_proj",
            "output_res_score": "model.output_attn_res_proj",
        },
        defaults={"mla_use_nope": True, "hidden_act": "situ", "moe_layer_freq": 1},
        renames=((r"^", "language_model."),),
        outer_type="kimi_k3",
    ),
}


# --- Encoders of Kimi-VL, Kimi K2.5 and GLM 5V -----------------------------------------------------------------------


def _set_kimi_size(config: MmprojConfig) -> None:
    config.vision.values["image_size"] = 64 * 14


def _set_k25_size(config: MmprojConfig) -> None:
    """Derive the size of images from the height of the position embeddings."""
    vision = config.vision
    vision.values["image_size"] = vision.get("init_pos_emb_height", 64) * vision.get("patch_size", 14)


def _patch_area(config: MmprojConfig) -> int:
    side = config.vision.get("patch_size", 14)
    return int(side * side)


def _permute_k25_heads(tensor: Tensor, context: Context) -> Expression:
    """Reorder the interleaved rope pairs of both axes, in the queries and keys of a joint matrix: heights precede."""
    heads, x = context.config.get("num_attention_heads", 16), tensor.x
    part = x.shape[0] // 3
    if part * 3 != x.shape[0] or part % (4 * heads):
        raise ValueError(f"its rows are not a multiple of 3 x {heads} heads of pairs")
    width = part // heads
    starts = range(0, 2 * part, width)
    pairs = (
        range(start + row, start + row + 2) for start in starts for axis in (0, 2) for row in range(axis, width, 4)
    )
    return take(x, 0, *pairs, range(2 * part, 3 * part))


def _restore_k25_heads(tensor: Tensor, context: Context) -> Expression:
    """Interleave the pairs of both axes again."""
    heads, x = context.config.get("num_attention_heads", 16), tensor.x
    part = x.shape[0] // 3
    if part * 3 != x.shape[0] or part % (4 * heads):
        raise ValueError(f"its rows are not a multiple of 3 x {heads} heads of pairs")
    width = part // heads
    pairs = (
        range(start + axis + row, start + axis + row + 2)
        for start in range(0, 2 * part, width)
        for row in range(0, width // 2, 2)
        for axis in (0, width // 2)
    )
    return take(x, 0, *pairs, range(2 * part, 3 * part))


def _restore_grid(tensor: Tensor, context: Context) -> Expression:
    """Return position embeddings as a grid of rows and columns."""
    config, x = context.config, tensor.x
    grid = (config.number("init_pos_emb_height"), config.number("init_pos_emb_width"))
    if len(x.shape) != 2 or math.prod(grid) != x.shape[0]:
        raise ValueError(f"its {x.shape[0]} positions are not a grid of {grid[0]} x {grid[1]}")
    return Shaped(x, (*grid, x.shape[1]))


def _position_key(axis: str, default: int) -> EncoderKey:
    return EncoderKey(f"vision.pos_emb_{axis}", f"init_pos_emb_{axis}", default=default)


_KIMI_K25 = Mmproj(
    (
        projector("kimik25"),
        _position_key("height", 64),
        _position_key("width", 64),
        _position_key("time", 4),
        Key("clip.use_gelu", lambda config: config.vision.get("projector_hidden_act", "gelu") == "gelu", "flag"),
        layer_norm_epsilon("projector_ln_eps", 1e-5),
        Key(SCALE_FACTOR, lambda config: config.vision.get("merge_kernel_size", [2, 2])[0]),
        Key(".vision.image_min_pixels", lambda config: 8 * _patch_area(config)),
        Key(
            ".vision.image_max_pixels",
            lambda config: config.preprocessor.get("in_patch_limit", 16384) * _patch_area(config),
        ),
    ),
    tensors=r"vision_tower|mm_projector",
    rules=(
        Transform(r"wqkv.*(weight|bias)", _permute_k25_heads, _restore_k25_heads),
        Transform(r"pos_emb\.time_weight", flatten_experts, None),
        Rename(r"(mm_projector\.proj)\.0\.", r"\1.linear_1."),
        Rename(r"(mm_projector\.proj)\.2\.", r"\1.linear_2."),
    ),
    patch_config=_set_k25_size,
)
MMPROJ: dict[str, Mmproj] = {
    "KimiVLForConditionalGeneration": Mmproj(
        (
            projector("kimivl"),
            USE_GELU,
            constant(SCALE_FACTOR, 2),
            layer_norm_epsilon("layer_norm_eps", 1e-5),
        ),
        tensors=r"vision_tower|multi_modal_projector",
        rules=(
            Transform(r"pos_emb\.weight", flatten_experts, _restore_grid),
            Split(r"\.wqkv\.", (".wq.", ".wk.", ".wv.")),
        ),
        patch_config=_set_kimi_size,
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Glm5vForConditionalGeneration": replace(
        _KIMI_K25,
        rules=(Rename(r"^mm_projector\.linear_", "mm_projector.proj.linear_"), *_KIMI_K25.rules),
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_kimi_vl(meta: ClipMetadata, config: Json) -> None:
    """Describe MoonViT; its positions are a square."""
    side = math.isqrt(meta.shape("v.position_embd.weight")[0])
    scale = meta.number(".vision.projector.scale_factor")
    vision = {name: count for name, count in meta.counts(USUAL_COUNTS).items() if name != "image_size"}
    sizes = {"merge_kernel_size": [scale, scale], "init_pos_emb_height": side, "init_pos_emb_width": side}
    config["vision_config"] = vision | {"model_type": "moonvit"} | sizes
    add_token_ids(meta, config, media_placeholder_token_id="<|media_pad|>")


def _kimi_vl_preprocessor(meta: ClipMetadata) -> Json:
    scale = meta.number(".vision.projector.scale_factor")
    sizes = {"patch_size": meta.number(".vision.patch_size"), "merge_kernel_size": [scale, scale]}
    return image_values(meta, "KimiVLImageProcessor") | sizes


def _set_k25(meta: ClipMetadata, config: Json) -> None:
    """Describe MoonViT of K2.5, whose positions in time are computed, by the names of remote code and of transformers.

    Of remote code's names transformers 5.18.0 reads none: sizes of a released model are its defaults. The
    converter permutes heads by num_attention_heads, which is not among remote code's: both assume 16.
    """
    height, width = meta.shape("v.position_embd.weight")[:2]
    scale = meta.number(".vision.projector.scale_factor")
    time = meta.model.get("vision.pos_emb_time", 4)
    counts = {name: count for name, count in meta.counts(USUAL_COUNTS).items() if name != "image_size"}
    heads = counts.pop("num_attention_heads")
    patch = counts.pop("patch_size")
    epsilon = meta.get(".vision.attention.layer_norm_epsilon")
    config["vision_config"] = (
        counts
        | {f"vt_{name}": count for name, count in {**counts, "num_attention_heads": heads}.items()}
        | {"pos_emb_height": height, "pos_emb_width": width, "pos_emb_time": time}
        | {"init_pos_emb_height": height, "init_pos_emb_width": width, "init_pos_emb_time": time}
        | {
            "patch_size": patch,
            "merge_kernel_size": [scale, scale],
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": hidden_act(meta),
            "projector_ln_eps": epsilon,
            "mm_hidden_size": counts["hidden_size"],
            "text_hidden_size": meta.number(".vision.projection_dim"),
        }
    )
    config |= {"projection_hidden_size": counts["hidden_size"], "projection_layer_norm_eps": epsilon}
    add_token_ids(meta, config, media_placeholder_token_id="<|media_pad|>", image_token_id="<|media_pad|>")


def _k25_preprocessor(meta: ClipMetadata) -> Json:
    patch, scale = meta.number(".vision.patch_size"), meta.number(".vision.projector.scale_factor")
    limit = meta.number(".vision.image_max_pixels") // max(1, patch**2)
    media = {"patch_size": patch, "merge_kernel_size": scale, "in_patch_limit": limit}
    return {"media_proc_cfg": image_values(meta, "KimiK25VisionProcessor") | media}


_TEXT = deepseek.CLASSES["DeepseekV3ForCausalLM"]
_TOWER = "vision_tower.encoder.blocks. vision_tower.encoder.final_layernorm vision_tower.patch_embed."
_K25_ENCODERS = HfEncoders(
    "kimik25",
    of_text_class(
        _TEXT,
        "kimi_k25",
        note=(
            "transformers 5.18 has KimiK25ForConditionalGeneration as Kimi_K25ForConditionalGeneration; older versions "
            f"have none: it {REMOTE_NOTE}"
        ),
    ),
    f"{_TOWER} mm_projector.",
    _set_k25,
    _k25_preprocessor,
    {"mm.input_norm": "mm_projector.pre_norm"},
)
HF_ENCODERS: dict[str, HfEncoders] = {
    "KimiVLForConditionalGeneration": HfEncoders(
        "kimivl",
        of_text_class(_TEXT, "kimi_vl", note=f"KimiVLForConditionalGeneration {REMOTE_NOTE}"),
        f"{_TOWER} multi_modal_projector.",
        _set_kimi_vl,
        _kimi_vl_preprocessor,
        {"mm.input_norm": "multi_modal_projector.pre_norm"},
    ),
    "KimiK25ForConditionalGeneration": _K25_ENCODERS,
    "Glm5vForConditionalGeneration": replace(
        _K25_ENCODERS,
        text=of_text_class(
            glm.CLASSES["GlmMoeDsaForCausalLM"], "glm5v", note=f"Glm5vForConditionalGeneration {REMOTE_NOTE}"
        ),
        kinds={"mm.1": "mm_projector.linear_1", "mm.2": "mm_projector.linear_2", **_K25_ENCODERS.kinds},
        text_class="GlmMoeDsaForCausalLM",
    ),
}
