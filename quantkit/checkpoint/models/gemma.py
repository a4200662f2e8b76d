"""Gemma 1, 2, 3, 3n and 4 (text), embeddings and drafts.

Facts of llama.cpp b11434, conversion/gemma.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.dense_modules import dense_tensors, set_dense_widths
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Shaped, Zeros, concatenate, stack, take
from quantkit.checkpoint.key_rows import (
    BLOCK_COUNT,
    FILE_TYPE,
    WINDOW,
    WINDOW_PATTERN,
    Computed,
    Copied,
    FromFile,
    SetKeys,
    Where,
    number_or,
    set_layer_types,
)
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.pooling import set_pooling
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import AssignKind, Drop, Rename, StackExperts, Transform, identity, minus_one, plus_one
from quantkit.checkpoint.tensors import Context, InverseContext, Rule, Tensor
from quantkit.checkpoint.vocab.bpe import llama_hf_tokens, write_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import USER_DEFINED, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Norms multiply by 1 + weight.
NORM_PLUS_ONE = Transform(r"norm\.weight$", plus_one, minus_one)
#: The head is the embedding; some tools store it a second time.
DROP_HEAD = Drop(r"^lm_head\.weight$")


GEMMA_BASE: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_position_embeddings", required=True),
    Copied(".embedding_length", "hidden_size", required=True),
    BLOCK_COUNT,
    Copied(".feed_forward_length", "intermediate_size", required=True),
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Copied(
        ".attention.head_count_kv",
        "num_key_value_heads num_attention_heads",
        required=True,
        exported="num_key_value_heads",
    ),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True),
    Copied(".attention.key_length", "head_dim", required=True),
    Copied(".attention.value_length", "head_dim", required=True),
    FILE_TYPE,
)


GEMMA2_KEYS: tuple[SetKeys, ...] = (
    Copied(".attn_logit_softcapping", "attn_logit_softcapping", "f32", required=True),
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", required=True),
    WINDOW,
)


def refuse_softcapping(keys: Keys, config: Config) -> None:
    """Refuse a soft cap of attention logits, which Gemma 3 does not have."""
    if config.get("attn_logit_softcapping") is not None:
        raise FormatError(f"{config.path}: attn_logit_softcapping, which this architecture does not have", "QK-E305")


def _has_window(config: Config) -> bool:
    return bool(config.get("sliding_window_pattern") != 1)


def _rope_base(config: Config) -> float:
    base: float = config.full_rope.get("rope_theta", 1e6)
    return base


#: Some of the base keys have other defaults.
GEMMA3_KEYS: tuple[SetKeys, ...] = (
    Copied(".context_length", "max_position_embeddings", default=131072),
    Copied(".attention.head_count", "num_attention_heads", default=8),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", default=1e-6),
    Copied(".attention.key_length", "head_dim", default=256),
    Copied(".attention.value_length", "head_dim", default=256),
    Computed(".rope.freq_base", _rope_base, "f32", names="rope_theta"),
    refuse_softcapping,
    Copied(".final_logit_softcapping", "final_logit_softcapping", "f32", unless_zero=True),
    Where(_has_window, (WINDOW,)),
    Copied(".attention.head_count_kv", "num_key_value_heads", "count", default=4),
)


def drop_unknown_tokens(tensor: Tensor, context: Context) -> Expression:
    """Drop embedding rows without a token (Gemma3Model.modify_tensors)."""
    config = context.config
    folder = config.path.parent
    tokenizer = {} if (folder / "tokenizer.model").exists() else optional_json(folder / "tokenizer.json") or {}
    model = tokenizer.get("model")
    if isinstance(model, dict):
        n = len(model.get("vocab") or ()) + len(tokenizer.get("added_tokens") or ())
    else:
        n = config.find("vocab_size_per_layer_input", "vocab_size")
    return take(tensor.x, 0, range(n)) if isinstance(n, int) and 0 < n < tensor.x.shape[0] else tensor.x


DROP_UNKNOWN_TOKENS = Transform(r"embed_tokens\.weight", drop_unknown_tokens, identity)

#: Parameters that are stored without a suffix.
GEMMA4_STORED = (
    Rename(r"(per_dim_scale|layer_scalar)$", r"\1.weight"),
    Rename(r"^(.*\.experts\.(?!.*\.(weight|(weight|input)_\w+|g_idx|q\w+|scales)$).*)$", r"\1.weight"),
)

#: Experts stored separately, as quantizers write them.
_GEMMA4_EXPERTS = StackExperts(
    name="model.layers.{layer}.experts.{expert}.{weight}.weight",
    merged="model.layers.{layer}.mlp.experts.{weight}.weight",
)

GEMMA4_RULES = (
    DROP_UNKNOWN_TOKENS,
    _GEMMA4_EXPERTS,
    AssignKind(r"router\.scale$", "*ffn_gate_inp", ".scale", "model.layers.*.router.scale"),
    AssignKind(r"\.per_expert_scale", "*ffn_down_exps", ".scale", "model.layers.*.router.per_expert_scale"),
)


def gemma4_rope(config: Config) -> Iterable[Tensor]:
    """Yield rope factors for full attention with partial rotation: ggml rotates the rest by almost 0."""
    rope = config.full_rope
    if rope.get("rope_type") != "proportional":
        raise FormatError(f"{config.path}: rope of full attention is {short(rope)}, not a proportional one", "QK-E305")
    width = _full_head(config)
    turned = int(width * config.rotary_part(1.0, rope=rope) / 2)
    factors = (1.0,) * turned + (1e30,) * (width // 2 - turned)
    yield Tensor("rope_freqs.weight", Constant(factors), None, "rope_freqs.weight")


def _slides(config: Config) -> list[bool]:
    kinds, layers = config["layer_types"], config.layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list of {layers} kinds", "QK-E112")
    return [kind == "sliding_attention" for kind in kinds]


def _wide_layers(config: Config) -> list[int] | None:
    """Return the feed-forward width of each layer, doubled in layers that share keys and values."""
    if not config.get("use_double_wide_mlp", False):
        return None
    width, layers, shared = config.number("intermediate_size"), config.layers, config.number("num_kv_shared_layers")
    return [width if i < layers - shared else 2 * width for i in range(layers)]


def _kv_heads(config: Config) -> list[int] | None:
    heads = config.get("num_key_value_heads")
    full_heads = _of_full_layer(config, "num_global_key_value_heads", "num_key_value_heads")
    if heads is None or full_heads is None:
        return None
    return [heads if slide else full_heads for slide in _slides(config)]


def _sliding_width(config: Config) -> int:
    return config.number("head_dim")


#: The widths, heads, rope and feed-forward of both kinds of attention layers.
GEMMA4_KEYS: tuple[SetKeys, ...] = (
    *GEMMA3_KEYS,
    Copied(".attention.shared_kv_layers", "num_kv_shared_layers", required=True),
    number_or(".embedding_length_per_layer_input", "hidden_size_per_layer_input", 0),
    Computed(".attention.sliding_window_pattern", _slides, "array", inverse=set_layer_types),
    Computed(".attention.key_length", lambda config: _full_head(config), names="global_head_dim"),
    Computed(".attention.value_length", lambda config: _full_head(config), names="global_head_dim"),
    Computed(".attention.key_length_swa", _sliding_width, names="head_dim"),
    Computed(".attention.value_length_swa", _sliding_width, names="head_dim"),
    Copied(
        ".expert_feed_forward_length",
        "expert_intermediate_size moe_intermediate_size",
        exported="moe_intermediate_size",
    ),
    Computed(".feed_forward_length", _wide_layers, "array", names="intermediate_size"),
    Computed(".attention.head_count_kv", _kv_heads, "array", names="num_key_value_heads"),
    Computed(".rope.dimension_count", lambda config: _full_head(config)),
    Computed(".rope.dimension_count_swa", lambda config: int(_sliding_width(config) * config.rotary_part(1.0))),
)
#: Draft models, which share keys and values with their target model.
ASSISTANT_STORED = (Drop(r"masked_embedding"), *GEMMA4_STORED)
ASSISTANT_KEYS: tuple[SetKeys, ...] = (
    *GEMMA4_KEYS,
    Copied(".embedding_length_out", "backbone_hidden_size", required=True),
    FromFile(".nextn_predict_layers", "layers"),
)
#: Parameters that are stored without a suffix.
GEMMA3N_STORED = (Rename(r"_scale$", "_scale.weight"),)


def pad_vocabulary(tensor: Tensor, context: Context) -> Expression:
    """Add rows of zeros for image and audio tokens."""
    n, (rows, width) = context.config.number("vocab_size"), tensor.x.shape
    return concatenate([tensor.x, Zeros((n - rows, width), tensor.x.type)]) if rows < n else tensor.x


@dataclass(frozen=True)
class StackProjections(Rule):
    """Stack three projections into one tensor."""

    pattern: str = r"(altup_(unembed_)?projections)\.([012])\.weight$"

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.search(self.pattern, tensor.name)
        if match is None:
            return None
        parts = context.gather(self, match[1], match[3], tensor, 3)
        if parts is None:
            return ()
        return (replace(tensor, name=f"model.{match[1]}.weight", x=stack([parts[i].x for i in "012"])),)

    def invert(self, tensor: Tensor, context: InverseContext) -> Iterable[Tensor] | None:
        """Return the separate projections."""
        match = re.fullmatch(r"model\.(altup_(?:unembed_)?projections)\.weight", tensor.name)
        if match is None:
            return None
        return [
            replace(
                tensor,
                name=f"model.{match[1]}.{i}.weight",
                x=Shaped(take(tensor.x, 0, range(i, i + 1)), tensor.x.shape[1:]),
            )
            for i in range(tensor.x.shape[0])
        ]


GEMMA3N_RULES = (Transform(r"embed_tokens(\.weight|_per_layer)", pad_vocabulary, identity), StackProjections())


def refuse_inputs(keys: Keys, config: Config) -> None:
    """Refuse a number of AltUp inputs that llama.cpp does not support."""
    if config["altup_num_inputs"] != 4:
        raise FormatError(
            f"{config.path}: altup_num_inputs is {short(config['altup_num_inputs'])}; only 4 is supported", "QK-E305"
        )


def _sparsity_scales(config: Config) -> list[float]:
    return [NormalDist().inv_cdf(part) if part else -math.inf for part in config["activation_sparsity_pattern"]]


def _set_sparsity(meta: ModelMetadata, config: Json) -> None:
    normal = NormalDist()

    def scale(part: float) -> float:
        return normal.inv_cdf(part) if 0 < part < 1 else -math.inf

    scales = meta.get(".activation_sparsity_scale") or []
    parts = [0.0 if math.isinf(item) else config_values.shortest_argument(normal.cdf(item), scale) for item in scales]
    config["activation_sparsity_pattern"] = parts


GEMMA3N_KEYS: tuple[SetKeys, ...] = (
    *GEMMA3_KEYS,
    refuse_inputs,
    Copied(".altup.active_idx", "altup_active_idx", required=True),
    Copied(".altup.num_inputs", "altup_num_inputs", required=True),
    Copied(".embedding_length_per_layer_input", "hidden_size_per_layer_input", required=True),
    Copied(".attention.shared_kv_layers", "num_kv_shared_layers", required=True),
    Computed(".activation_sparsity_scale", _sparsity_scales, "array", inverse=_set_sparsity),
    WINDOW_PATTERN,
)


def _of_full_layer(config: Config, name: str, key: str) -> Any:
    """Return a value of the full-attention layers: ``name``, or ``key`` of the first of them in per_layer_config."""
    if (value := config.get(name)) is not None:
        return value
    layers, kinds = config.get("per_layer_config") or {}, config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise FormatError(f"{config.path}: layer_types is {short(kinds)}, not a list", "QK-E112")
    if not isinstance(layers, dict) or not all(str(n).isdecimal() and isinstance(v, dict) for n, v in layers.items()):
        raise FormatError(f"{config.path}: per_layer_config is {short(layers)}, not a table by layer", "QK-E112")
    of_kind = (v for n, v in layers.items() if int(n) < len(kinds) and kinds[int(n)] == "full_attention")
    return next((v[key] for v in of_kind if key in v), None)


def _full_head(config: Config) -> int:
    width = _of_full_layer(config, "global_head_dim", "head_dim")
    if not isinstance(width, int) or isinstance(width, bool) or not 0 < width < 1 << 20:
        raise FormatError(f"{config.path}: global_head_dim, the head width of full attention, is missing", "QK-E112")
    if width > 1 << 16:
        raise FormatError(f"{config.path}: heads of {width} values", "QK-E112")
    return width


def _set_suppressed_tokens(keys: Keys, config: Config) -> None:
    path = config.path.with_name("generation_config.json")
    suppressed = (optional_json(path) or {}).get("suppress_tokens")
    if suppressed is not None:
        with keys.blame(path):
            keys.array("tokenizer.ggml.suppress_tokens", suppressed)


UNIFIED_KEYS: tuple[SetKeys, ...] = (*GEMMA4_KEYS, _set_suppressed_tokens)

#: Tokens of Gemma 4 that a chat parser needs.
_VISIBLE = frozenset(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)


def write_gemma(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary without a space before texts (Gemma2Model); Gemma 3 may only have a
    tokenizer.json."""
    if v.has("tokenizer.model"):
        write_sentencepiece(v)
        v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    else:
        write_bpe(v)


def write_gemma1(v: Vocabulary) -> None:
    """Write a SentencePiece vocabulary with the tokens of CodeGemma (GemmaModel)."""
    write_sentencepiece(v)
    special = special_tokens(v.folder, kinds=("prefix", "suffix", "middle", "fsep", "eot"))
    special.set("eot", 107)
    special.template = None
    special.write(v.keys)
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)


def write_gemma4(v: Vocabulary) -> None:
    """Write Llama's pieces with their merges (Gemma4Model)."""
    tokens = llama_hf_tokens(v)
    v.keys.text("tokenizer.ggml.model", "gemma4")
    v.keys.array("tokenizer.ggml.tokens", [piece.text for piece in tokens])
    v.keys.array("tokenizer.ggml.scores", [piece.score for piece in tokens])
    types = [USER_DEFINED if piece.text in _VISIBLE else piece.type for piece in tokens]
    v.keys.array("tokenizer.ggml.token_type", types)
    special_tokens(v.folder, merges=True).write(v.keys)
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    v.keys.flag("tokenizer.ggml.add_bos_token", True)


def write_gemma3n(v: Vocabulary) -> None:
    """Write Gemma's vocabulary with all tokens, including those without per-layer embeddings (Gemma3NModel)."""
    v.config = v.config.without("vocab_size_per_layer_input")
    write_gemma(v)


_GEMMA = Architecture("gemma", stored=(DROP_HEAD,), rules=(NORM_PLUS_ONE,), base=GEMMA_BASE, vocab=write_gemma1)

_GEMMA3 = Architecture("gemma3", rules=(DROP_UNKNOWN_TOKENS, NORM_PLUS_ONE), keys=GEMMA3_KEYS, vocab=write_gemma)

_GEMMA4 = Architecture(
    "gemma4",
    stored=GEMMA4_STORED,
    rules=GEMMA4_RULES,
    keys=GEMMA4_KEYS,
    vocab=write_gemma4,
    synthetic=gemma4_rope,
)

_GEMMA4_ASSISTANT = replace(_GEMMA4, arch="gemma4-assistant", stored=ASSISTANT_STORED, keys=ASSISTANT_KEYS)

_GEMMA_3N = Architecture(
    "gemma3n",
    stored=GEMMA3N_STORED,
    rules=GEMMA3N_RULES,
    keys=GEMMA3N_KEYS,
    vocab=write_gemma3n,
)

ARCHITECTURES: dict[str, Architecture] = {
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(_GEMMA, arch="gemma2", keys=GEMMA2_KEYS, vocab=write_gemma),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma3TextModel": replace(
        _GEMMA3,
        arch="gemma-embedding",
        keys=(*_GEMMA3.keys, set_dense_widths, set_pooling),
        synthetic=dense_tensors,
        dense_modules=True,
    ),
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA4, keys=UNIFIED_KEYS),
    "Gemma4AssistantForCausalLM": _GEMMA4_ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _GEMMA4_ASSISTANT,
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": _GEMMA_3N,
}


@dataclass(frozen=True)
class SetQueryScale:
    """Set the number whose root divides queries: the width of a head, another for models with ``wide`` layers."""

    wide: int

    def __call__(self, meta: ModelMetadata, config: Json) -> None:
        width = meta.head_width
        if meta.number(".block_count") == self.wide:
            width = meta.number(".embedding_length") // meta.number(".attention.head_count")
        config["query_pre_attn_scalar"] = width


def set_gemma4_layers(meta: ModelMetadata, config: Json) -> None:
    """Set the layers of both kinds of attention (Gemma 4)."""
    kinds, shared = config["layer_types"], meta.number(".attention.shared_kv_layers")
    heads, width = meta.get(".attention.head_count_kv"), meta.get(".feed_forward_length")
    if isinstance(heads, list):
        of_kind = dict(zip(kinds, heads, strict=True))
        config["num_key_value_heads"] = of_kind.get("sliding_attention", heads[0])
        config["num_global_key_value_heads"] = of_kind.get("full_attention", heads[0])
    if isinstance(width, list):
        config |= {"intermediate_size": width[0], "use_double_wide_mlp": len(set(width)) > 1}
    own_layers = range(meta.number(".block_count") - shared)
    config["attention_k_eq_v"] = any(f"blk.{i}.attn_v.weight" not in meta.model.tensors for i in own_layers)
    config["enable_moe_block"] = meta.get(".expert_count") is not None
    if (table := meta.model.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[1]


def set_proportional_rope(meta: ModelMetadata, config: Json) -> None:
    """Set rope of layers with both kinds of attention (Gemma 4)."""
    factors = meta.values("rope_freqs.weight")
    full = {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}
    config["rope_parameters"] = {
        "full_attention": {**full, "rope_theta": config.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 10000.0)},
    }
    config.pop("rope_scaling", None)


def set_table_sizes(meta: ModelMetadata, config: Json) -> None:
    """Set the sizes that only tensors show (Gemma 3n)."""
    if (low := meta.model.tensors.get("blk.0.laurel_l.weight")) is not None:
        config["laurel_rank"] = low.shape[1]
    if (table := meta.model.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[1]


_BARE_NAMES = (r"^model\.", "")


def _set_bidirectional(meta: ModelMetadata, config: Json) -> None:
    """Set bidirectional attention."""
    config["use_bidirectional_attention"] = True
    config["sliding_window"] = config.get("sliding_window") or 0


_GEMMA_4_CLASS = HfClass(
    "gemma4_text",
    "model.layers.*.router.proj model.layers.*.experts.gate_up_proj model.layers.*.experts.down_proj",
    keys={".expert_count": "num_experts", ".expert_used_count": "top_k_experts"},
    config_setters=(set_gemma4_layers, set_proportional_rope),
    fused=True,
    renames=((r"(\.experts\.\w+)\.weight$", r"\1"),),
)

CLASSES: dict[str, HfClass] = {
    "GemmaForCausalLM": HfClass("gemma"),
    "Gemma2ForCausalLM": HfClass("gemma2", config_setters=(SetQueryScale(46),)),
    "Gemma3ForCausalLM": HfClass("gemma3_text", config_setters=(SetQueryScale(62),)),
    "Gemma4ForCausalLM": _GEMMA_4_CLASS,
    "Gemma4AssistantForCausalLM": replace(
        _GEMMA_4_CLASS,
        keys=_GEMMA_4_CLASS.keys | {".expert_count": ""},
        defaults={"vocab_size_per_layer_input": 0, "moe_intermediate_size": None},
        outer_type="gemma4_assistant",
        note="GGUF files do not contain the token cluster table of a draft model (masked_embedding)",
    ),
    "Gemma3nForCausalLM": HfClass(
        "gemma3n_text",
        f"{LAYER}pre_feedforward_layernorm {LAYER}post_attention_layernorm",
        config_setters=(set_table_sizes,),
    ),
    "Gemma3TextModel": HfClass(
        "gemma3_text", config_setters=(SetQueryScale(0), _set_bidirectional), renames=(_BARE_NAMES,)
    ),
}
