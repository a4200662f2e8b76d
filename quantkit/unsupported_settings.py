"""Settings of a checkpoint that change the model's results and that no GGUF key represents.

llama.cpp's converter ignores them, and llama.cpp uses the value in its graph of the architecture (b11434,
src/models/*.cpp; most of it is in ``model.arch``). ``SETTINGS`` is the table: names in config.json, and what the
runtime assumes. Only values in config.json count, not defaults of a configuration class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint.config import Config, raw_config
from quantkit.checkpoint.keys import GATING
from quantkit.checkpoint.open import VALUE_ERRORS
from quantkit.formats.gguf.rules import short
from quantkit.model.arch import ARCHS, Arch, Window

#: Any value: the runtime applies the setting.
ANY = object()
#: Activations of config.json by ggml's function; ggml's tanh GELU serves for all forms of GELU.
_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish", "swiglu"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_10", "geglu"), "gelu"),
    **dict.fromkeys(("relu2", "relu_squared", "squared_relu", "relu_sqr"), "relu_sqr"),
    **dict.fromkeys(("relu", "xielu"), None),
}
#: Names of the activation other than hidden_act -> architectures of classes that read them.
_ACTIVATION_NAMES = {
    "hidden_activation": (
        "gemma2",
        "gemma3",
        "gemma-embedding",
        "gemma3n",
        "gemma4",
        "gemma4-assistant",
        "modern-bert",
    ),
    "activation_function": ("gpt2", "starcoder", "codeshell", "jais", "nomic-bert", "nomic-bert-moe"),
    "mlp_hidden_act": ("nemotron_h", "nemotron_h_moe"),
    "activation": ("falcon",),
}
#: Architectures whose classes have one activation, regardless of their configurations.
_SINGLE_ACTIVATION = frozenset(
    {"refact", "gpt-oss", "minimax-m3", "kimi-k3", "grok", "mpt", "bloom", "plm", "smallthinker"}
)
#: Architectures whose models may have windows that llama.cpp lacks; in others the key has no effect.
# fmt: off
_WINDOWS_UNSUPPORTED = frozenset({
    "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "qwen3next", "qwen35", "qwen35moe",
    "phi3", "phimoe", "starcoder2", "dots1", "smollm3", "mistral3", "dream",
})
# fmt: on
#: Architectures with tied embeddings, regardless of their configurations.
_TIED = frozenset({"gemma4-assistant", "mpt", "openelm", "plamo2"})
#: Architectures with rope of many kinds, whose converters derive it from alpha.
_SCALED_BY_ALPHA = frozenset({"hunyuan-dense", "hunyuan-moe", "hunyuan_vl"})


@dataclass(frozen=True)
class Model:
    """A checkpoint under conversion: its config.json, and the metadata that a runtime reads."""

    config: Config
    opened: Checkpoint

    @property
    def arch(self) -> str:
        return str(self.opened.get("general.architecture"))

    @cached_property
    def row(self) -> Arch | None:
        return ARCHS.get(self.arch)

    def key(self, name: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture."""
        return self.opened.get(f"{self.arch}.{name}", default)

    @property
    def context(self) -> int:
        return int(self.key("context_length", 1 << 31))

    @property
    def head(self) -> int:
        return int(self.key("attention.key_length", 0)) or self.key("embedding_length") // self.heads

    @property
    def heads(self) -> int:
        count = self.key("attention.head_count", 1)
        return int(max(count) if isinstance(count, list) else count) or 1


@dataclass(frozen=True)
class Setting:
    """A setting of config.json and the value that a runtime assumes: ``assumed`` returns it, ANY for any value.

    ``names``: the first one present counts. ``archs``: the architectures concerned, all if empty. ``interpret``:
    returns the meaning of a value, None if it has none in this model. ``null`` is also a value.
    """

    names: str
    assumed: Callable[[Model], object]
    archs: frozenset[str] = frozenset()
    interpret: Callable[[Any, Model], object] = lambda value, model: value
    null: bool = False

    def describe_loss(self, model: Model) -> str | None:
        """Return a description of the loss, or None if the runtime computes the same."""
        if self.archs and model.arch not in self.archs:
            return None
        name = next((name for name in self.names.split() if name in model.config), None)
        if name is None or (model.config[name] is None and not self.null):
            return None
        setting = f"{name} is {short(model.config[name])}"
        try:
            value, assumed = self.interpret(model.config[name], model), self.assumed(model)
        except VALUE_ERRORS:
            return f"{setting}: llama.cpp does not support this value"
        if assumed is ANY or (value is None and not self.null) or _is_equal(value, assumed):
            return None
        return f"{setting} is lost: llama.cpp uses {_format(assumed)}"


def unsupported_settings(opened: Checkpoint) -> list[str]:
    """Return the settings of a checkpoint's model that a runtime does not reproduce, in words."""
    if opened.kind == "vocab" or not (opened.paths[0] / "config.json").exists():
        return []
    model = Model(raw_config(opened.paths[0]), opened)
    losses = [*(setting.describe_loss(model) for setting in SETTINGS), *_rope_losses(model)]
    return [f"{model.config.path}: {loss}" for loss in dict.fromkeys(losses) if loss is not None]


def _is_equal(value: object, assumed: object) -> bool:
    """Return whether two values are equal; numbers as a file stores them, in float32."""
    if isinstance(value, (int, float)) and isinstance(assumed, (int, float)):
        return bool(np.float32(value) == np.float32(assumed))
    return value == assumed


def _format(value: object) -> str:
    return "none" if value is None else short(value)


def _is_tied(model: Model) -> object:
    """Return whether a language model's file lacks output weights: the embeddings are tied."""
    generates = model.config.architecture.endswith(("ForCausalLM", "LMHeadModel")) and model.arch not in _TIED
    return True if generates and "output.weight" not in model.opened.tensors else ANY


# --- experts ---------------------------------------------------------------------------------------------------------


def _routes(model: Model) -> bool:
    return model.row is not None and bool(model.key("expert_count", 0))


def _expert_norm(model: Model) -> object:
    """Return whether the weights of the selected experts are normalized to sum to one."""
    if model.row is None or not _routes(model):
        return ANY
    return bool(model.key("expert_weights_norm", False)) if model.row.moe.norm is None else model.row.moe.norm


def _gating(model: Model) -> object:
    if model.row is None or not _routes(model):
        return ANY
    moe, key = model.row.moe, model.key("expert_gating_func", 0)
    gating = next((name for name, number in GATING.items() if number == key), moe.default_gating)
    return (moe.gating or gating or ANY) if moe.gating != "softmax_weight" else "softmax"


def _expert_scale(model: Model) -> object:
    if model.row is None or not _routes(model):
        return ANY
    return model.key("expert_weights_scale", 1.0) or 1.0 if model.row.moe.scale_key else 1.0


def _group_choice(model: Model) -> object:
    """Return the selection method of expert groups: by the two best experts of each."""
    return "noaux_tc" if model.key("expert_group_count", 0) > 1 else ANY


# --- attention -------------------------------------------------------------------------------------------------------


def _clamp(model: Model) -> object:
    if model.row is None:
        return ANY
    return model.key("attention.clamp_kqv") if model.row.attention_rules.clamp_key else None


def _attention_bias(model: Model) -> object:
    """Return False if no layer has a bias of q, k or v."""
    return ANY if any(_ATTENTION_BIAS.search(name) for name in model.opened.tensors) else False


_ATTENTION_BIAS = re.compile(r"attn_(q|k|v|qkv|q_a|q_b|kv_a_mqa|kv_b)\.bias$")


def _query_scale(model: Model) -> object:
    """Return the number whose root divides q . k: width / heads in the largest Gemma 2 and 3."""
    largest = {"gemma2": 46, "gemma3": 62}.get(model.arch)
    is_largest = model.key("block_count") == largest
    return model.key("embedding_length") // model.heads if is_largest else model.head


def _attention_cap(model: Model) -> object:
    row = model.row
    if row is None:
        return ANY
    return model.key("attn_logit_softcapping", row.attention_rules.softcap) if row.attention_rules.softcap else None


def _final_cap(model: Model) -> object:
    row = model.row
    if row is None:
        return ANY
    if row.final_softcap is None or row.altup:
        return row.final_softcap
    return model.key("final_logit_softcapping", row.final_softcap) or None


def _window(model: Model) -> object:
    """Return the window of windowed layers that the runtime uses."""
    row = model.row
    if row is None:
        return ANY
    if row.window is None:
        mistral = model.config.architecture.startswith(("Mistral", "Mixtral"))
        return None if model.arch in _WINDOWS_UNSUPPORTED or mistral else ANY
    window = row.window
    if window.only_if_layers and model.key("block_count") != window.only_if_layers and not model.key(_WINDOW_KEY, 0):
        return None
    return (window.fixed or model.key(_WINDOW_KEY, window.default)) or None


_WINDOW_KEY = "attention.sliding_window"


def _window_of(value: Any, model: Model) -> object:
    """Return the window that a configuration sets; None if no layer has one or no text exceeds it."""
    config, types = model.config, model.config.get("layer_types")
    optional = model.arch.startswith("qwen") or model.arch in ("smollm3", "dots1", "dream")
    if not config.get("use_sliding_window", not optional or "sliding_attention" in (types or ())):
        return None
    if isinstance(types, list) and not any(kind in ("sliding_attention", "chunked_attention") for kind in types):
        return None
    first = config.get("max_window_layers") if types is None and optional else None
    if isinstance(first, int) and first >= model.key("block_count"):
        return None
    return value if isinstance(value, int) and 0 < value < model.context else None


def _layer_kinds(model: Model) -> object:
    """Return "full" or "sliding" for each layer, as ``_layer_kinds_of``."""
    if model.row is None or (window := model.row.window) is None or model.row.attention == "short_convolution_hybrid":
        return ANY
    if _window(model) is None:
        return ["full"] * model.key("block_count")
    pattern = model.key("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return ["sliding" if slides else "full" for slides in pattern]
    period = pattern if isinstance(pattern, int) else window.period
    if period < 2:
        return ANY
    return ["full" if _is_full(i, period, window) else "sliding" for i in range(model.key("block_count"))]


def _is_full(layer: int, period: int, window: Window) -> bool:
    return layer % period == (0 if window.dense_first else period - 1)


def _layer_kinds_of(value: Any, model: Model) -> object:
    if isinstance(value, int) and value > 0:  # sliding_window_pattern
        value = ["sliding_attention" if (i + 1) % value else "full_attention" for i in range(model.key("block_count"))]
    kinds = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "sliding"}
    if not isinstance(value, list) or not set(value) <= kinds.keys():
        return None
    assumed = _layer_kinds(model)
    n = len(assumed) if isinstance(assumed, list) else 0
    types = [kinds[kind] for kind in value]
    # Prediction layers (MTP) may be listed or omitted.
    return [*types, *(assumed[len(types) :] if isinstance(assumed, list) else ())][:n]


def _rope_layers(model: Model) -> object:
    """Return 1 for each layer with RoPE, 0 for others."""
    row = model.row
    if row is None or not row.rope_rules.skip_step or row.window is not None and _window(model) is None:
        return ANY
    n, step = model.key("block_count"), row.rope_rules.skip_step
    return [int(i % step != 0 if row.rope_rules.skip_first else (i + 1) % step != 0) for i in range(n)]


def _rope_layers_of(value: Any, model: Model) -> object:
    n = model.key("block_count")
    if isinstance(value, int):
        return [int((i + 1) % value != 0) for i in range(n)] if value > 0 else None
    return [int(bool(item)) for item in value][:n] if isinstance(value, list) and value else None


# --- rope ------------------------------------------------------------------------------------------------------------


def _position_type(model: Model) -> object:
    row = model.row
    return (
        "rope"
        if row is None or not row.rope_rules.if_finetuned or model.key("rope.scaling.finetuned", True)
        else "nope"
    )


def _rotary_width(model: Model) -> object:
    """Return the number of rotated columns of a head, where all heads are alike."""
    row = model.row
    if row is None or row.rope == "none" or row.rope_rules.half or row.attention not in ("gqa", "delta_net_hybrid"):
        return ANY
    return model.key("rope.dimension_count", model.head)


def _top_rotary_width_of(value: Any, model: Model) -> object:
    """Return the width of a setting beside the parameters of rope, which take precedence."""
    return None if "partial_rotary_factor" in model.config.full_rope else _rotary_width_of(value, model)


def _rotary_width_of(value: Any, model: Model) -> object:
    return int(model.head * value) if isinstance(value, (int, float)) else None


def _local_base(model: Model) -> object:
    if model.row is None or (window := model.row.window) is None or window.base_key or _window(model) is None:
        return ANY
    return model.key("rope.freq_base")


def _yarn(assumed: float) -> Callable[[Model], object]:
    """Return the assumed value of a YaRN parameter in architectures whose graph reads no key of it."""

    def assumed_value(model: Model) -> object:
        scaled = model.key("rope.scaling.type") == "yarn"
        return assumed if scaled and model.row is not None and not model.row.rope_rules.yarn_keys else ANY

    return assumed_value


def _rope_losses(model: Model) -> list[str | None]:
    """Return descriptions of RoPE scaling that a file does not represent."""
    rope = model.config.full_rope
    kind = rope.get("rope_type", rope.get("type"))
    reason = _scaling_loss(str(kind), rope, model) if kind is not None else None
    message = f"rope scaling {short(kind)} {reason}; the file has none, and llama.cpp does not scale rope"
    return [
        None if reason is None else message,
        *(_rope_setting_loss(rope, setting, model) for setting in _ROPE_SETTINGS),
    ]


def _rope_setting_loss(rope: dict[str, Any], setting: Setting, model: Model) -> str | None:
    """Return the loss of one RoPE parameter, or None."""
    return setting.describe_loss(Model(model.config.with_values(rope), model.opened)) if rope else None


def _scaling_loss(kind: str, rope: dict[str, Any], model: Model) -> str | None:
    """Return the reason why a kind of RoPE scaling is not in the file; None if it is, or there is none."""
    if kind in ("default", "mrope", "none") or model.row is None or model.row.rope == "none":
        return None
    if model.arch in _SCALED_BY_ALPHA and rope.get("alpha"):
        return None
    if kind == "dynamic":
        return "has no key"
    if kind in ("linear", "yarn"):
        is_written = model.key("rope.scaling.type") == kind
        if is_written:
            return None
        return "has no factor" if rope.get("factor") is None else "is not written for this class"
    if kind in ("su", "longrope"):
        return None if _has(model.opened.tensors, "rope_factors_long") else "has no factors"
    if kind in ("llama3", "proportional"):
        return None if _has(model.opened.tensors, "rope_freqs") else "is not written for this class"
    return "is unknown"


def _has(names: Collection[str], stem: str) -> bool:
    return any(name.split(".")[0] == stem or f".{stem}." in name for name in names)


def _yarn_factor(model: Model) -> object:
    """Return YaRN's attention factor, m = 0.1 ln(factor) + 1, as llama.cpp computes it."""
    factor = model.key("rope.scaling.factor", 1.0)
    return _yarn(0.1 * math.log(factor) + 1 if factor > 1 else 1.0)(model)


def _yarn_factor_of(value: Any, model: Model) -> object:
    """Return the factor; the usual one if it differs only in omitted digits."""
    usual = _yarn_factor(model)
    is_usual = isinstance(value, float) and isinstance(usual, float) and abs(value - usual) < 1e-4
    return usual if is_usual else value


# --- the table -------------------------------------------------------------------------------------------------------


def _always(value: object) -> Callable[[Model], object]:
    return lambda model: value


def _activation(model: Model) -> object:
    if model.arch in _SINGLE_ACTIVATION or (model.row is not None and model.row.channel_mix):
        return ANY
    return model.row.activation if model.row is not None else ANY


def _nested_setting(name: str, setting: str, assumed: object, *archs: str) -> Setting:
    """Return a setting of an object within config.json."""
    return Setting(
        name,
        _always(assumed),
        frozenset(archs),
        lambda value, model: value.get(setting, assumed) if isinstance(value, dict) else None,
    )


def _has_chunks(model: Model) -> bool:
    return model.arch == "llama4" and _window(model) is not None


def _in_chunks(assumed: object) -> Callable[[Model], object]:
    """Return the assumed value of a Llama 4 setting for layers with chunked attention."""
    return lambda model: assumed if _has_chunks(model) else ANY


def _hidden_act(model: Model) -> object:
    """Return the activation of architectures whose configurations have no other name for it."""
    return ANY if any(model.arch in archs for archs in _ACTIVATION_NAMES.values()) else _activation(model)


def _activation_of(value: Any, model: Model) -> object:
    return (_ACTIVATIONS.get(value) or value) if isinstance(value, str) else None


_LLAMA_4, _GEMMAS = frozenset({"llama4"}), frozenset({"gemma2", "gemma3", "gemma-embedding"})
_GRANITES = frozenset({"granite", "granitemoe", "granitehybrid"})
_SCANS = frozenset({"mamba2", "nemotron_h", "nemotron_h_moe", "granitehybrid", "falcon-h1"})

SETTINGS: tuple[Setting, ...] = (
    *(Setting(name, _activation, frozenset(archs), _activation_of) for name, archs in _ACTIVATION_NAMES.items()),
    Setting("hidden_act", _hidden_act, interpret=_activation_of),
    Setting("tie_word_embeddings", _is_tied),
    # experts
    Setting("norm_topk_prob moe_renormalize route_norm", _expert_norm),
    Setting(
        "scoring_func score_function score_func moe_router_activation_func moe_router_activation",
        _gating,
        interpret=lambda value, model: value if value in GATING else None,
    ),
    Setting("routed_scaling_factor route_scale moe_router_scaling_factor", _expert_scale),
    Setting("topk_method", _group_choice, frozenset({"deepseek2"})),
    # attention
    Setting("attention_bias qkv_bias use_qkv_bias add_qkv_bias", _attention_bias),
    Setting("clip_qkv", _clamp),
    _nested_setting("attn_config", "softmax_scale", None, "mpt"),
    _nested_setting("attn_config", "prefix_lm", False, "mpt"),
    Setting("scale_attn_weights", _always(True), frozenset({"gpt2", "starcoder", "jais"})),
    Setting("scale_attn_by_inverse_layer_idx", _always(False), frozenset({"gpt2", "jais"})),
    Setting("query_pre_attn_scalar", _query_scale, _GEMMAS),
    Setting("attn_logit_softcapping", _attention_cap, _GEMMAS | {"gemma3n", "gemma4"}),
    Setting("final_logit_softcapping", _final_cap, frozenset({"gemma3n"}), null=True),
    Setting("use_bidirectional_attention", _always(False), frozenset({"gemma3"})),
    Setting("sliding_window", _window, interpret=_window_of),
    Setting("layer_types", _layer_kinds, interpret=_layer_kinds_of),
    Setting("sliding_window_pattern _sliding_window_pattern", _layer_kinds, _GEMMAS | {"cohere2"}, _layer_kinds_of),
    Setting("attention_chunk_size", _in_chunks(8192), _LLAMA_4),
    Setting("attn_temperature_tuning", _in_chunks(True), _LLAMA_4, lambda value, model: bool(value)),
    Setting("floor_scale", _in_chunks(8192), _LLAMA_4),
    Setting("attn_scale", _in_chunks(0.1), _LLAMA_4),
    Setting("use_qk_norm", lambda model: model.key("expert_count") != 128, _LLAMA_4),
    Setting("alibi", _always(False), frozenset({"falcon"})),
    Setting("parallel_attn", _always(True), frozenset({"falcon"})),
    Setting("apply_residual_connection_post_layernorm", _always(False), frozenset({"bloom", "falcon"})),
    Setting("dual_chunk_attention_config", _always(None), frozenset({"qwen2", "qwen2moe", "qwen3", "qwen3moe"})),
    Setting("use_logn_attn", _always(False), frozenset({"qwen"})),
    Setting("relative_attention_max_distance", _always(128), frozenset({"t5", "t5encoder"})),
    Setting(
        "feed_forward_proj",
        _always("relu or gated-gelu"),
        frozenset({"t5", "t5encoder"}),
        lambda value, model: None if value in ("relu", "gated-gelu") else value,
    ),
    # positions
    Setting("position_embedding_type", _position_type, _GRANITES, lambda value, model: value or "nope", null=True),
    Setting("position_embedding_type", _always("absolute"), frozenset({"bert"})),
    Setting("no_rope_layers no_rope_layer_interval", _rope_layers, frozenset({"smollm3", "llama4"}), _rope_layers_of),
    Setting("partial_rotary_factor rotary_pct rope_pct rope_percent", _rotary_width, interpret=_top_rotary_width_of),
    Setting(
        "rope_parameters rope_local_base_freq rope_local_theta rope_theta_local local_rope_theta swa_rope_theta",
        _local_base,
        interpret=lambda value, model: model.key("rope.freq_base_swa"),
    ),
    Setting("use_dynamic_ntk", _always(False), frozenset({"qwen"})),
    Setting("rope_interleave", _always(True), frozenset({"deepseek2"})),
    # norms and scans
    Setting(
        "rms_norm_eps", lambda model: model.key("attention.layer_norm_rms_epsilon"), frozenset({"chatglm", "olmoe"})
    ),
    Setting(
        "time_step_limit mamba_dt_limit",
        _always([0.0, math.inf]),
        _SCANS,
        lambda value, model: [float(item) for item in value] if isinstance(value, (list, tuple)) else None,
    ),
    Setting(
        "mamba_norm_before_gate",
        _always(False),
        frozenset({"falcon-h1"}),
        lambda value, model: value if model.config.get("mamba_rms_norm") else None,
    ),
)
#: Settings among the parameters of rope.
_ROPE_SETTINGS = (
    Setting("partial_rotary_factor", _rotary_width, interpret=_rotary_width_of),
    Setting("beta_fast", _yarn(32)),
    Setting("beta_slow", _yarn(1)),
    Setting("truncate", _yarn(True)),
    Setting("attention_factor", _yarn_factor, interpret=_yarn_factor_of),
)
