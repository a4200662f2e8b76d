"""MiniMax Text 01, M1, M2 and M3, and the encoders of M3.

Facts of llama.cpp b11434, conversion/minimax.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.encoder_rules import SplitFrames
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, read_f32, take
from quantkit.checkpoint.hf_encoders import USUAL_COUNTS, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.key_rows import Always, Computed, Copied, SetKeys
from quantkit.checkpoint.mmproj import USE_GELU, Key, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.row import LAYER, Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import KeepF32, StackExperts, Transform, minus_one, plus_one
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import template_file
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError

STACK_EXPERTS = StackExperts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.block_sparse_moe.experts.{weight}.weight",
)

M2_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "intermediate_size"),
    Copied(".rope.dimension_count", "rotary_dim"),
)

M3_RULES = (Transform(r"norm\.weight$", plus_one, minus_one), KeepF32(r"\.self_attn\.index(er\.|_)"), STACK_EXPERTS)


def _indexer_row(key: str, name: str) -> Copied:
    return Copied(f".attention.indexer.{key}", f"sparse_attention_config.{name}", required=True)


def _dense_layers(config: Config) -> int:
    return len(list(takewhile(lambda frequency: frequency == 0, config["moe_layer_freq"])))


def _set_layer_frequencies(meta: ModelMetadata, config: Json) -> None:
    """Set which layers have sparse attention, and which experts."""
    dense, layers = meta.number(".leading_dense_block_count"), range(meta.number(".block_count"))
    sparse = [int(f"blk.{i}.indexer.q_proj.weight" in meta.model.tensors) for i in layers]
    config["sparse_attention_config"]["sparse_attention_freq"] = sparse
    config["moe_layer_freq"] = [int(i >= dense) for i in layers]


M3_KEYS: tuple[SetKeys, ...] = (
    *M2_KEYS,
    Copied(".expert_shared_count", "n_shared_experts", required=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", required=True),
    Always(".expert_weights_norm", True, "flag"),
    _indexer_row("head_count", "sparse_num_index_heads"),
    _indexer_row("key_length", "sparse_index_dim"),
    _indexer_row("top_k", "sparse_topk_blocks"),
    _indexer_row("block_size", "sparse_block_size"),
    _indexer_row("local_blocks", "sparse_local_block"),
    Computed(".leading_dense_block_count", _dense_layers, inverse=_set_layer_frequencies),
)


@dataclass(frozen=True)
class FindSilentTokens(OneWayRule):
    """Record added tokens with zero embeddings in the configuration: the model must not generate them."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name != "model.embed_tokens.weight" or len(tensor.x.shape) != 2:
            return None
        tokenizer = optional_json(context.config.path.parent / "tokenizer.json") or {}
        model = tokenizer.get("model")
        first = len(model.get("vocab") or ()) if isinstance(model, dict) else 0
        rows, width = tensor.x.shape
        zero_rows = [row for row in range(first, rows) if not read_f32(tensor.x, row * width, width).any()]
        context.config.values["_silent"] = zero_rows
        return None


M1_RULES = (FindSilentTokens(), STACK_EXPERTS)


def _residual_scale(config: Config) -> float:
    """Return the scale of the residual stream."""
    parts = ("full_attention", "linear_attention", "mlp")
    alphas, betas = ({config[f"layernorm_{part}_{letter}"] for part in parts} for letter in ("alpha", "beta"))
    if len(alphas) > 1 or betas != {1.0}:
        raise FormatError(f"{config.path}: several residual scales; only one is supported", "QK-E305")
    scale: float = alphas.pop()
    return scale


def _set_residual_scales(meta: ModelMetadata, config: Json) -> None:
    for part in ("full_attention", "linear_attention", "mlp"):
        config |= {f"layernorm_{part}_alpha": meta.get(".residual_scale"), f"layernorm_{part}_beta": 1.0}


M1_KEYS: tuple[SetKeys, ...] = (
    Computed("tokenizer.ggml.suppress_tokens", lambda config: config.get("_silent") or [], "array"),
    Computed(".residual_scale", _residual_scale, "f32", inverse=_set_residual_scales),
    Copied(".rope.dimension_count", "rotary_dim", required=True),
)


def write_minimax_m1(v: Vocabulary) -> None:
    """Write a BPE vocabulary; chat_template.jinja takes precedence.

    Without one, the reference writes a template of llama.cpp, quantkit that of the tokenizer (MiniMaxText01Model).
    """
    write_bpe(v)
    if v.has("chat_template.jinja"):
        v.keys.text("tokenizer.chat_template", template_file(v.folder))


_MINIMAX_M3 = Architecture("minimax-m3", rules=M3_RULES, keys=M3_KEYS)
_MINIMAX_M1 = Architecture("minimax-01", rules=M1_RULES, keys=M1_KEYS, vocab=write_minimax_m1)

ARCHITECTURES: dict[str, Architecture] = {
    "MiniMaxM2ForCausalLM": Architecture("minimax-m2", rules=(STACK_EXPERTS,), keys=M2_KEYS),
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3,
    "MiniMaxM1ForCausalLM": _MINIMAX_M1,
    "MiniMaxText01ForCausalLM": _MINIMAX_M1,
}


def _set_shared_width(meta: ModelMetadata, config: Json) -> None:
    """Set the width of the shared expert (MiniMax M3)."""
    shared = next((t for name, t in meta.model.tensors.items() if name.endswith(".ffn_up_shexp.weight")), None)
    if shared is not None:
        config["shared_intermediate_size"] = shared.shape[1]


_SPARSE_NAMES = " ".join(
    f"model.layers.*.block_sparse_moe.{name}"
    for name in ("gate", "e_score_correction", "experts.w1", "experts.w2", "experts.w3")
)

_IMAGE_SIZES = {"image_size": 28, "patch_size": 14}


def _set_lightning_layers(meta: ModelMetadata, config: Json) -> None:
    """Name the layers of lightning attention, which fuse queries, keys and values."""
    linear = set(meta.layers_with("attn_qkv.weight"))
    config["attn_type_list"] = [int(i not in linear) for i in range(meta.number(".block_count"))]


def _rename_full_output(config: Config, name: str) -> str:
    """Rename the output matrix of full attention, which differs from that of lightning attention."""
    match = re.fullmatch(r"(model\.layers\.(\d+)\.self_attn\.)out_proj(\..*)", name)
    return name if match is None or not config["attn_type_list"][int(match[2])] else f"{match[1]}o_proj{match[3]}"


_MINIMAX_M3_CLASS = HfClass(
    "minimax_m3",
    " ".join(
        f"{LAYER}{name}"
        for name in (
            *(f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")),
            *(f"block_sparse_moe.shared_experts.{w}_proj" for w in ("gate", "up", "down")),
            *(f"block_sparse_moe.{item}" for item in ("gate", "e_score_correction")),
            *(f"block_sparse_moe.experts.{w}" for w in ("w1", "w2", "w3")),
        )
    ),
    keys={".feed_forward_length": "dense_intermediate_size"},
    defaults={"use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_head"},
    config_setters=(_set_shared_width,),
)

CLASSES: dict[str, HfClass] = {
    "MiniMaxM2ForCausalLM": HfClass(
        "minimax_m2",
        _SPARSE_NAMES,
        defaults={"use_qk_norm": True, "use_routing_bias": True, "qk_norm_type": "per_layer"},
    ),
    "MiniMaxM3SparseForConditionalGeneration": replace(
        _MINIMAX_M3_CLASS,
        model_type="minimax_m3_vl_text",
        config_setters=(
            *_MINIMAX_M3_CLASS.config_setters,
            config_values.AddTower({"num_hidden_layers": 1, "num_attention_heads": 2, **_IMAGE_SIZES}),
        ),
        renames=((r"^", "language_model."),),
        outer_type="minimax_m3_vl",
    ),
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3_CLASS,
    "MiniMaxM1ForCausalLM": HfClass(
        "minimax_m1",
        add_prefix(
            LAYER,
            "block_sparse_moe.gate block_sparse_moe.experts.w1 block_sparse_moe.experts.w2 block_sparse_moe.experts.w3 "
            "self_attn.norm self_attn.qkv_proj self_attn.out_proj self_attn.output_gate",
        ),
        defaults={"postnorm": True},  # as llama.cpp computes it
        config_setters=(_set_lightning_layers,),
        rename_last=_rename_full_output,
    ),
}


# --- Encoders of M3 ---------------------------------------------------------------------------------------------------

#: The width of heads, and of half the rope of each axis: time, height, width.
_HEAD_WIDTH, _HALF = 80, 13


def _permute_axes(tensor: Tensor, context: Context) -> Expression:
    """Join both halves of the rope of each axis, which are stored half by half."""
    x, heads = tensor.x, context.config.number("num_attention_heads")
    if not heads or x.shape[0] != heads * _HEAD_WIDTH:
        raise ValueError(f"{x.shape[0]} rows are not {heads} heads of {_HEAD_WIDTH}")
    runs = [range(i, i + _HALF) for axis in range(3) for i in (axis * _HALF, (axis + 3) * _HALF)]
    runs.append(range(6 * _HALF, _HEAD_WIDTH))
    starts = range(0, x.shape[0], _HEAD_WIDTH)
    return take(x, 0, *(range(start + run.start, start + run.stop) for start in starts for run in runs))


def _restore_axes(tensor: Tensor, context: Context) -> Expression:
    """Separate both halves of the rope of all axes again."""
    x, heads = tensor.x, context.config.number("num_attention_heads")
    if not heads or x.shape[0] != heads * _HEAD_WIDTH:
        raise ValueError(f"{x.shape[0]} rows are not {heads} heads of {_HEAD_WIDTH}")
    runs = [range(i, i + _HALF) for half in range(2) for i in range(half * _HALF, 6 * _HALF, 2 * _HALF)]
    runs.append(range(6 * _HALF, _HEAD_WIDTH))
    starts = range(0, x.shape[0], _HEAD_WIDTH)
    return take(x, 0, *(range(start + run.start, start + run.stop) for start in starts for run in runs))


def _frame_count(config: Config) -> int:
    """Return the number of frames of a patch."""
    compression = config.get("img_token_compression_config") or {}
    return int(compression.get("temporal_patch_size", 2))


def _merge_size(config: MmprojConfig) -> int:
    compression = config.vision.get("img_token_compression_config", {})
    return int(compression.get("spatial_merge_size", 2))


_M3_VISION = Mmproj(
    (
        projector("minimax_m3"),
        USE_GELU,
        layer_norm_epsilon("layer_norm_eps", 1e-5),
        Key(".vision.spatial_merge_size", _merge_size),
    ),
    tensors=r"^(vision_tower|multi_modal_projector|patch_merge_mlp)\.",
    rules=(
        SplitFrames(r"^vision_tower\.vision_model\.embeddings\.patch_embedding\.weight$", None, _frame_count),
        Transform(r"\.self_attn\.[qk]_proj\.(weight|bias)$", _permute_axes, _restore_axes),
    ),
)
MMPROJ: dict[str, Mmproj] = dict.fromkeys(
    ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration"), _M3_VISION
)


# --- export ----------------------------------------------------------------------------------------------------------


def _frames_of(meta: ClipMetadata) -> int:
    return sum(name.startswith("v.patch_embd.weight") for name in meta.model.tensors)


def _set_m3(meta: ClipMetadata, config: Json) -> None:
    """Describe M3's tower, a CLIP with rope of three axes."""
    vision = meta.counts(USUAL_COUNTS) | {"layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon")}
    sizes = {"spatial_merge_size": meta.number(".vision.spatial_merge_size"), "temporal_patch_size": _frames_of(meta)}
    config["vision_config"] = vision | sizes | {"img_token_compression_config": sizes, "hidden_act": "gelu"}
    config["projector_hidden_size"] = meta.shape("mm.1.weight")[0]
    add_token_ids(meta, config, image_token_id="]<]image[>[", video_token_id="]<]video[>[")


def _m3_preprocessor(meta: ClipMetadata) -> Json:
    sizes = {"patch_size": meta.number(".vision.patch_size"), "temporal_patch_size": _frames_of(meta)}
    merged = {"merge_size": meta.number(".vision.spatial_merge_size")}
    return image_values(meta, "MiniMaxM3VLImageProcessor") | sizes | merged


HF_ENCODERS: dict[str, HfEncoders] = {
    "MiniMaxM3SparseForConditionalGeneration": HfEncoders(
        "minimax_m3",
        CLASSES["MiniMaxM3SparseForConditionalGeneration"],
        "vision_tower.vision_model. multi_modal_projector. patch_merge_mlp.",
        _set_m3,
        _m3_preprocessor,
    )
}
