"""DeepSeek 1 to V3.2 and OCR, and classes that are DeepSeek V3 under another name.

Facts of llama.cpp b11434, conversion/deepseek.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Shaped, Transposed, concatenate, take
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.nextn import NEXTN_KEY, layers_with_nextn, nextn_layers
from quantkit.checkpoint.row import Always, Architecture, Copied, HfClass, SetKeys
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
        """Make keys and values of the latent one matrix again, head by head."""
        match = re.fullmatch(r"(.*\.)([kv])_b_proj\.weight", tensor.name)
        if match is None:
            return None
        if len(tensor.x.shape) != 3:
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not one of heads")
        joined_name = f"{match[1]}kv_b_proj.weight"
        parts = context.parts.setdefault((id(self), joined_name), {})
        parts[match[2]] = tensor
        if len(parts) < 2:
            return ()
        key, value = Transposed(parts["k"].x), parts["v"].x
        del context.parts[id(self), joined_name]
        if (key.shape[0], key.shape[2]) != (value.shape[0], value.shape[2]):
            raise context.fail(tensor, f"keys are made by {list(key.shape)}, values by {list(value.shape)}")
        by_head = concatenate((key, value), 1)
        heads, rows, rank = by_head.shape
        return (replace(tensor, name=joined_name, x=Shaped(by_head, (heads * rows, rank))),)


LATENT_RULES = (TIED_OUTPUT, StackExperts(), SplitLatentHeads())


def set_latent_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of latent attention: one KV head."""
    changed = {"num_key_value_heads": 1, "rms_norm_eps": config.get("rms_norm_eps", 1e-6)}
    set_base_keys(keys, config.with_values(changed), layers, file_type)


def set_latent_keys(keys: Keys, config: Config) -> None:
    """Set the widths of the latent and of its keys and values, and the keys of experts (DeepseekV2Model)."""
    _set_leading(keys, config)
    rank = config.number("kv_lora_rank") if "kv_lora_rank" in config else 512
    rope, nope = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
    keys.u32(".attention.kv_lora_rank", rank)
    keys.u32(".attention.key_length", rank + rope)
    keys.u32(".attention.value_length", rank)
    keys.u32(".attention.key_length_mla", nope + rope)
    keys.u32(".attention.value_length_mla", config["v_head_dim"])
    _set_experts(keys, config)
    keys.u32(".rope.dimension_count", rope)
    if (scale := config.rope.get("mscale_all_dim")) is not None:
        if not isinstance(scale, (int, float)):
            raise FormatError(f"{config.path}: mscale_all_dim of rope is no number", "QK-E112")
        keys.f32(".rope.scaling.yarn_log_multiplier", 0.1 * scale)


@dataclass(frozen=True)
class DropNextnLayers(OneWayRule):
    """Layers behind num_hidden_layers, which predict more tokens, are left out (DeepseekV2Model.skip_mtp).

    ``unless_named``: only if the configuration speaks of none.
    """

    unless_named: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if self.unless_named and nextn_layers(context.config):
            return None
        match = re.match(r"model\.layers\.(\d{1,9})", tensor.name)
        return () if match and int(match[1]) >= context.config.layers else None


def set_mha_keys(keys: Keys, config: Config) -> None:
    """Set the keys of a model with multi-head attention instead of a latent (DeepSeek-OCR)."""
    _set_leading(keys, config)
    _set_experts(keys, config)
    keys.u32(".rope.dimension_count", config.number("qk_rope_head_dim"))
    if window := config.get("sliding_window_size") or config.get("sliding_window"):
        keys.u32(".attention.sliding_window", window)


def set_ocr_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys, with an epsilon that the configuration may lack."""
    changed = config.with_values({"rms_norm_eps": config.get("rms_norm_eps", 1e-6)})
    set_base_keys(keys, changed, layers, file_type)


#: Unless the tokenizer has one.
OCR_TEMPLATE = Always("tokenizer.chat_template", "{% for m in messages %}{{m['content']}}{% endfor %}", "text")


def _set_leading(keys: Keys, config: Config) -> None:
    dense = config.get("first_k_dense_replace")
    if dense is None:
        dense = 0 if config.get("n_routed_experts") is not None else config.number("num_hidden_layers")
    keys.u32(".leading_dense_block_count", dense)
    keys.u32(".vocab_size", config["vocab_size"])
    if config.get("q_lora_rank") is not None:
        keys.u32(".attention.q_lora_rank", config["q_lora_rank"])


def _set_experts(keys: Keys, config: Config) -> None:
    for set_key in _EXPERTS:
        set_key(keys, config)
    if config.get("norm_topk_prob"):
        keys.flag(".expert_weights_norm", config["norm_topk_prob"])


def _set_shared_count(keys: Keys, config: Config) -> None:
    keys.u32(".expert_shared_count", config.get("n_shared_experts", 0))


_EXPERTS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size intermediate_size", required=True),
    Copied(".expert_count", "n_routed_experts"),
    _set_shared_count,
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32"),
)

INDEXER: tuple[SetKeys, ...] = (
    Copied(".attention.indexer.head_count", "index_n_heads", required=True),
    Copied(".attention.indexer.key_length", "index_head_dim", required=True),
    Copied(".attention.indexer.top_k", "index_topk", required=True),
)

#: Of the first DeepSeek mixture of experts, which is a Llama with experts.
MOE_KEYS: tuple[SetKeys, ...] = (
    llama.set_rope_width,
    Always(".rope.scaling.type", "none", "text"),
    Copied(".leading_dense_block_count", "first_k_dense_replace", required=True),
    Copied(".vocab_size", "vocab_size", required=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Always(".expert_weights_scale", 1.0, "f32"),
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
            f"{v.folder / 'tokenizer_config.json'}: add_bos_token is not true, but texts of this model begin with BOS: "
            "correct it",
            "QK-E114",
        )
    write_bpe(v)


LATENT = Architecture(
    "deepseek2",
    stored=(Drop(r"sam_model|qwen2_model"),),
    rules=(*LATENT_RULES,),
    base=set_latent_base,
    keys=(set_latent_keys,),
    vocab=write_deepseek,
)

_DEEPSEEK_OCR = replace(
    LATENT,
    arch="deepseek2-ocr",
    rules=(DropNextnLayers(), *LATENT.rules),
    base=set_ocr_base,
    keys=(set_mha_keys,),
    head_keys=(OCR_TEMPLATE,),
)

_DEEPSEEK = replace(
    LATENT,
    rules=_DEEPSEEK_OCR.rules,
    dispatch=lambda config: _DEEPSEEK_OCR if is_ocr(config) else None,
)

#: Model class -> how it is converted.
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


_OCR_CLASS = HfClass(
    "deepseek_v2",
    keys={".expert_count": "n_routed_experts", ".expert_gating_func": ""},
    defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    config_setters=(_set_mha_widths,),
    text_key="language_config",
    outer={"model_type": "deepseek_vl_v2"},
    note="DeepSeek-OCR's own code also has towers that see, which are in no file of a text model: only the text model "
    "is written",
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "DeepseekV2ForCausalLM": HfClass(
        "deepseek_v2",
        defaults=_LATENT_DEFAULTS,
        config_setters=(config_values.set_latent_widths, set_topk_method),
        matches=is_softmax_gated,
    ),
    "DeepseekV3ForCausalLM": HfClass(
        "deepseek_v3", defaults=LATENT_V3_DEFAULTS, config_setters=(config_values.set_latent_widths,)
    ),
    "DeepseekV32ForCausalLM": HfClass(
        "deepseek_v32",
        keys=_ROUTED_KEYS,
        defaults=LATENT_V3_DEFAULTS,
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_latent_widths,
            config_values.set_rope_parameters,
        ),
    ),
    "DeepseekForCausalLM": HfClass("deepseek", defaults={"norm_topk_prob": False}),
    "DeepseekOCRForCausalLM": _OCR_CLASS,
}
