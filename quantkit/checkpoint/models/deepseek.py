"""DeepSeek 1 to V3.2 and OCR, and classes that are DeepSeek V3 under another name; the encoders of Youtu-VL.

Facts of llama.cpp b11434, conversion/deepseek.py, conversion/youtuvl.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import DropUnknown
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.clip_metadata import ClipMetadata, without_null
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Shaped, Transposed, concatenate, take
from quantkit.checkpoint.hf_encoders import REMOTE_NOTE, USUAL_COUNTS, HfEncoders, add_token_ids, image_values
from quantkit.checkpoint.key_rows import BASE, VOCAB_SIZE, Always, Computed, Copied, SetKeys, WithConfig
from quantkit.checkpoint.mmproj import Activation, EncoderKey, Key, Mmproj, MmprojConfig, layer_norm_epsilon, projector
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.nextn import NEXTN_KEY, layers_with_nextn, nextn_layers
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.checkpoint.rules import TIED_OUTPUT, Drop, StackExperts
from quantkit.checkpoint.tensors import Context, InverseContext, OneWayRule, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe, write_sentencepiece_or_bpe
from quantkit.checkpoint.vocab.tiktoken import KIMI, write_ranks
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError


def latent_widths(config: Config, layer: int | None) -> tuple[int, int, int]:
    """Return the heads of a layer, and the widths of their keys without rope and of their values."""
    return config.number("num_key_value_heads"), config.number("qk_nope_head_dim"), config.number("v_head_dim")


@dataclass(frozen=True)
class SplitLatentHeads(Rule):
    """Split kv_b_proj, which maps the latent to keys and values, into k_b_proj, transposed per head, and v_b_proj."""

    widths: Callable[[Config, int | None], tuple[int, int, int]] = latent_widths

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith("kv_b_proj.weight"):
            return None
        heads, nope, v = self.widths(context.config, tensor.layer)
        if len(tensor.x.shape) != 2 or not heads or tensor.x.shape[0] != heads * (nope + v):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not {heads} heads of {nope} + {v} rows")
        by_head = Shaped(tensor.x, (heads, nope + v, tensor.x.shape[1]))
        parts = (
            ("k_b_proj", Transposed(take(by_head, 1, range(nope)))),
            ("v_b_proj", take(by_head, 1, range(nope, nope + v))),
        )
        return [replace(tensor, name=tensor.name.replace("kv_b_proj", name), x=x) for name, x in parts]

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Merge the key and value matrices of the latent, head by head."""
        match = re.fullmatch(r"(.*\.)([kv])_b_proj\.weight", tensor.name)
        if match is None:
            return None
        if len(tensor.x.shape) != 3:
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not a multiple of the heads")
        joined_name = f"{match[1]}kv_b_proj.weight"
        parts = context.gather(self, joined_name, match[2], tensor, 2)
        if parts is None:
            return ()
        key, value = Transposed(parts["k"].x), parts["v"].x
        if (key.shape[0], key.shape[2]) != (value.shape[0], value.shape[2]):
            raise context.fail(tensor, f"its key part is {list(key.shape)}, its value part {list(value.shape)}")
        by_head = concatenate((key, value), 1)
        heads, rows, rank = by_head.shape
        return (replace(tensor, name=joined_name, x=Shaped(by_head, (heads * rows, rank))),)


LATENT_RULES = (TIED_OUTPUT, StackExperts(), SplitLatentHeads())


def _with_epsilon(config: Config) -> Config:
    """Return a configuration with an epsilon, which it may lack."""
    return config.with_values({"rms_norm_eps": config.get("rms_norm_eps", 1e-6)})


def with_one_head(config: Config) -> Config:
    """Return a configuration with one KV head, the latent."""
    return _with_epsilon(config).with_values({"num_key_value_heads": 1})


LATENT_BASE: tuple[SetKeys, ...] = (WithConfig(BASE, with_one_head),)


def _latent_rank(config: Config) -> int:
    return config.number("kv_lora_rank") if "kv_lora_rank" in config else 512


def _rope_width(config: Config) -> int:
    return config.number("qk_rope_head_dim")


def set_latent_widths(meta: ModelMetadata, config: Json) -> None:
    """Set the head widths of latent attention (DeepSeek)."""
    rope = meta.number(".rope.dimension_count")
    config |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": meta.number(".attention.key_length_mla") - rope,
        "v_head_dim": meta.number(".attention.value_length_mla"),
        "num_key_value_heads": meta.number(".attention.head_count"),
    }
    config.setdefault("q_lora_rank", None)
    log = meta.get(".rope.scaling.yarn_log_multiplier")
    if log is not None and "rope_scaling" in config:
        # llama.cpp reads one of the two; in released models they are equal.
        scale = config_values.shortest_argument(log * 10, lambda x: 0.1 * x)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}


def _yarn_log_multiplier(config: Config) -> float | None:
    scale = config.rope.get("mscale_all_dim")
    if scale is not None and not isinstance(scale, (int, float)):
        raise FormatError(f"{config.path}: mscale_all_dim of rope is not a number", "QK-E112")
    return None if scale is None else 0.1 * scale


@dataclass(frozen=True)
class DropNextnLayers(OneWayRule):
    """Omits prediction layers (MTP) after num_hidden_layers (DeepseekV2Model.skip_mtp).

    ``unless_named``: only if the configuration has none.
    """

    unless_named: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if self.unless_named and nextn_layers(context.config):
            return None
        match = re.match(r"model\.layers\.(\d{1,9})", tensor.name)
        return () if match and int(match[1]) >= context.config.layers else None


#: Unless the tokenizer has one.
OCR_TEMPLATE = Always("tokenizer.chat_template", "{% for m in messages %}{{m['content']}}{% endfor %}", "text")


def _dense_layers(config: Config) -> int:
    dense: int | None = config.get("first_k_dense_replace")
    if dense is None:
        return 0 if config.get("n_routed_experts") is not None else config.number("num_hidden_layers")
    return dense


_LEADING: tuple[SetKeys, ...] = (
    Computed(".leading_dense_block_count", _dense_layers, names="first_k_dense_replace"),
    VOCAB_SIZE,
    Copied(".attention.q_lora_rank", "q_lora_rank"),
)
_EXPERTS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size intermediate_size", required=True),
    Copied(".expert_count", "n_routed_experts", exported="num_local_experts num_experts n_routed_experts"),
    Copied(".expert_shared_count", "n_shared_experts", default=0),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32"),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", unless_zero=True),
)

#: The widths of the latent and of its keys and values, and the keys of experts (DeepseekV2Model).
LATENT_KEYS: tuple[SetKeys, ...] = (
    *_LEADING,
    Computed(".attention.kv_lora_rank", _latent_rank, names="kv_lora_rank"),
    Computed(".attention.key_length", lambda config: _latent_rank(config) + _rope_width(config)),
    Computed(".attention.value_length", _latent_rank),
    Computed(
        ".attention.key_length_mla",
        lambda config: config.number("qk_nope_head_dim") + _rope_width(config),
        inverse=set_latent_widths,
    ),
    Copied(".attention.value_length_mla", "v_head_dim", required=True),
    *_EXPERTS,
    Computed(".rope.dimension_count", _rope_width),
    Computed(".rope.scaling.yarn_log_multiplier", _yarn_log_multiplier, "f32"),
)


def _set_mha_widths(meta: ModelMetadata, config: Json) -> None:
    """Set the widths of multi-head attention."""
    config |= {
        "use_mla": False,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank")),
        "qk_nope_head_dim": 0,
        "v_head_dim": 0,
        "qk_rope_head_dim": meta.number(".rope.dimension_count"),
        "topk_method": "greedy",
    }
    config.pop("head_dim", None)


#: With multi-head attention instead of latent attention (DeepSeek-OCR).
MHA_KEYS: tuple[SetKeys, ...] = (
    *_LEADING,
    *_EXPERTS,
    Computed(".rope.dimension_count", _rope_width, inverse=_set_mha_widths),
    Computed(
        ".attention.sliding_window",
        lambda config: config.get("sliding_window_size") or config.get("sliding_window") or None,
        names="sliding_window",
    ),
)


def set_indexer_types(meta: ModelMetadata, config: Json) -> None:
    """List the layers with their own indexer, if the file does (GLM 5)."""
    types = meta.flags(".attention.indexer.types")
    if types is not None:
        config["indexer_types"] = ["full" if item else "shared" for item in types]


INDEXER = (
    Copied(".attention.indexer.head_count", "index_n_heads", required=True),
    Copied(".attention.indexer.key_length", "index_head_dim", required=True),
    Copied(".attention.indexer.top_k", "index_topk", required=True),
)

#: The first DeepSeek MoE is a Llama with experts.
MOE_KEYS: tuple[SetKeys, ...] = (
    llama.ROPE_WIDTH,
    Always(".rope.scaling.type", "none", "text"),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    VOCAB_SIZE,
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Always(".expert_weights_scale", 1.0, "f32", "routed_scaling_factor"),
    Copied(".expert_count", "n_routed_experts", required=True),
    Copied(".expert_shared_count", "n_shared_experts", required=True),
)

_OCR_CLASSES = ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "UnlimitedOCRForCausalLM")


def is_ocr(config: Config) -> bool:
    """Return whether a DeepSeek model is the text model of an OCR model."""
    classes = config.outer.get("architectures") or [None]
    return classes[0] in _OCR_CLASSES


def write_deepseek(v: Vocabulary) -> None:
    """Write tokenizer.json's vocabulary, else Kimi's tiktoken ranks (DeepseekV2Model)."""
    if v.has("tokenizer.json") or not v.has(KIMI.file):
        write_bpe(v)
    else:
        write_ranks(v, KIMI)


def write_deepseek_32(v: Vocabulary) -> None:
    """Write a BPE vocabulary that requires add_bos_token of tokenizer_config.json (DeepseekV32Model)."""
    if not v.tokenizer_config.get("add_bos_token", v.class_name == "Llama"):
        raise FormatError(
            f"{v.folder / 'tokenizer_config.json'}: add_bos_token must be true, because texts of this model begin "
            "with BOS",
            "QK-E114",
        )
    write_bpe(v)


LATENT = Architecture(
    "deepseek2",
    stored=(Drop(r"sam_model|qwen2_model"),),
    rules=(*LATENT_RULES,),
    base=LATENT_BASE,
    keys=LATENT_KEYS,
    vocab=write_deepseek,
)

_DEEPSEEK_OCR = replace(
    LATENT,
    arch="deepseek2-ocr",
    rules=(DropNextnLayers(), *LATENT.rules),
    base=(WithConfig(BASE, _with_epsilon),),
    keys=MHA_KEYS,
    head_keys=(OCR_TEMPLATE,),
)

_DEEPSEEK = replace(
    LATENT,
    rules=_DEEPSEEK_OCR.rules,
    dispatch=lambda config: _DEEPSEEK_OCR if is_ocr(config) else None,
)

ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    "UnlimitedOCRForCausalLM": _DEEPSEEK_OCR,
    "KimiVLForConditionalGeneration": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _DEEPSEEK,
    "YoutuForCausalLM": _DEEPSEEK,
    "YoutuVLForConditionalGeneration": _DEEPSEEK,
    "DeepseekV32ForCausalLM": replace(
        LATENT,
        arch="deepseek32",
        keys=(*LATENT.keys, NEXTN_KEY, *INDEXER),
        vocab=write_deepseek_32,
        layers=layers_with_nextn,
        nextn=True,
    ),
    "DeepseekForCausalLM": Architecture(
        "deepseek", rules=(*llama.ROPE_PERMUTED, StackExperts()), keys=MOE_KEYS, vocab=write_sentencepiece_or_bpe
    ),
}


def set_topk_method(meta: ModelMetadata, config: Json) -> None:
    """Set the expert selection method (DeepSeek V2)."""
    config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


_LATENT_DEFAULTS: Json = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": None}
LATENT_V3_DEFAULTS: Json = {**_LATENT_DEFAULTS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_ROUTED_KEYS = {".expert_count": "n_routed_experts"}


def is_softmax_gated(meta: ModelMetadata) -> bool:
    """Return whether the file is DeepSeek V2: experts are chosen by softmax, without biases."""
    return meta.get(".expert_gating_func") in (None, 1) and not any(
        "exp_probs_b" in name for name in meta.model.tensors
    )


CLASSES: dict[str, HfClass] = {
    "DeepseekV2ForCausalLM": HfClass(
        "deepseek_v2",
        defaults=_LATENT_DEFAULTS,
        config_setters=(set_topk_method,),
        matches=is_softmax_gated,
    ),
    "DeepseekV3ForCausalLM": HfClass("deepseek_v3", defaults=LATENT_V3_DEFAULTS),
    "DeepseekV32ForCausalLM": HfClass(
        "deepseek_v32",
        keys=_ROUTED_KEYS,
        defaults=LATENT_V3_DEFAULTS,
        config_setters=(config_values.set_rope_parameters,),
    ),
    "DeepseekForCausalLM": HfClass("deepseek", defaults={"norm_topk_prob": False}),
    "DeepseekOCRForCausalLM": HfClass(
        "deepseek_v2",
        keys={".expert_gating_func": ""},
        defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        text_key="language_config",
        outer_type="deepseek_vl_v2",
        note=(
            "DeepSeek-OCR also has vision towers, which GGUF files of text models do not contain: only the text "
            "model is written"
        ),
    ),
}


# --- Encoders of Youtu-VL ---------------------------------------------------------------------------------------------


def _default_image_size(config: MmprojConfig) -> None:
    config.vision.values.setdefault("image_size", 560)


MMPROJ: dict[str, Mmproj] = {
    "YoutuVLForConditionalGeneration": Mmproj(
        (
            projector("youtuvl"),
            layer_norm_epsilon("layer_norm_eps", 1e-6),
            Activation(
                gelu=("gelu", "gelu_pytorch_tanh", "gelu_fast", "gelu_new", "gelu_accurate"),
                default="gelu_pytorch_tanh",
            ),
            EncoderKey(".vision.spatial_merge_size", "spatial_merge_size", default=2),
            Key(".vision.window_size", lambda config: config.vision.get("window_size")),
            EncoderKey(".vision.wa_layer_indexes", "fullatt_block_indexes", "array"),
        ),
        tensors=r"^(?!lm_head\.|model\.(layers|embed_tokens|norm)\.)",
        rules=(DropUnknown(),),
        patch_config=_default_image_size,
    ),
}


# --- export ----------------------------------------------------------------------------------------------------------


def _set_youtu(meta: ClipMetadata, config: Json) -> None:
    """Describe the tower of Youtu-VL, SigLIP 2 with windows, beside the settings of the text model."""
    config["vision_config"] = (
        meta.counts(USUAL_COUNTS)
        | {
            "model_type": "siglip2_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": meta.get(".vision.attention.layer_norm_epsilon"),
            "spatial_merge_size": meta.number(".vision.spatial_merge_size"),
            "fullatt_block_indexes": meta.get(".vision.wa_layer_indexes"),
        }
        | without_null({"window_size": meta.get(".vision.window_size")})
    )
    add_token_ids(meta, config, image_token_id="<|image_pad|>")


def _youtu_preprocessor(meta: ClipMetadata) -> Json:
    return image_values(meta, "Siglip2ImageProcessorFast") | {"patch_size": meta.number(".vision.patch_size")}


HF_ENCODERS: dict[str, HfEncoders] = {
    "YoutuVLForConditionalGeneration": HfEncoders(
        "youtuvl",
        HfClass("youtu_vl", defaults=LATENT_V3_DEFAULTS, note=f"YoutuVLForConditionalGeneration {REMOTE_NOTE}"),
        "siglip2. merger.",
        _set_youtu,
        _youtu_preprocessor,
    ),
}
