"""PLaMo 1, whose heads are stored in another order, 2, with layers of Mamba, and 3 (conversion/plamo.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Added, Expression, Unadded, taken
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Renamed, Tensor, negative_exp, squeezed
from quantkit.errors import FormatError

# --- PLaMo 1 ---------------------------------------------------------------------------------------------------------

#: Of the one model there is: heads of queries that share a key, keys, the width of heads.
_SHARING, _KEYS, _WIDTH = 8, 5, 128


@dataclass(frozen=True)
class Reordered:
    """Orders heads, along ``axis``, so that those that share a key are behind each other: stored, they are apart."""

    axis: int
    undoing: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        n = _SHARING * _KEYS * _WIDTH
        if tensor.x.shape != (n, n):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not [{n}, {n}]")
        outer, inner = (_SHARING, _KEYS) if self.undoing else (_KEYS, _SHARING)
        heads = [i * outer + j for j in range(outer) for i in range(inner)]
        return taken(tensor.x, self.axis, *(range(head * _WIDTH, (head + 1) * _WIDTH) for head in heads))

    def back(self) -> Reordered:
        return replace(self, undoing=not self.undoing)


PLAMO_RULES = (
    Changed(r"\.self_attn\.q_proj\.weight$", Reordered(0)),
    Changed(r"\.self_attn\.o_proj\.weight$", Reordered(1)),
)


def set_plamo_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of PLaMo 1; those of its heads of keys in config.json are wrong."""
    keys.u32(".context_length", 4096)
    keys.u32(".embedding_length", config["hidden_size"])
    keys.u32(".feed_forward_length", config["intermediate_size"])
    keys.u32(".block_count", layers)
    keys.u32(".attention.head_count", config["num_attention_heads"])
    keys.u32(".attention.head_count_kv", _KEYS)
    keys.f32(".attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    keys.u32("general.file_type", file_type)


# --- PLaMo 2 and 3 ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plus:
    """Adds what a norm adds to its weights."""

    value: float
    undoing: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        return (Unadded if self.undoing else Added)(tensor.x, self.value)

    def back(self) -> Plus:
        return replace(self, undoing=not self.undoing)


#: What norms add to their weights.
_NORMS = (
    Changed(r"\.post_mixer_norm\.weight$", Plus(1.0 / 5)),
    Changed(r"\.post_mlp_norm\.weight$", Plus(1.0 / 5**1.5)),
)
PLAMO2_RULES = (
    Changed(r"\.A_log$", negative_exp),
    Changed(r"\.conv1d\.weight$", squeezed),
    Changed(r"\.(pre_mixer_norm|pre_mlp_norm|norm)\.weight$", Plus(1.0)),
    *_NORMS,
    Renamed(r"\.dt_bias$", ".dt_proj.bias"),
    Renamed(r"\.(dt_norm|B_norm|C_norm|k|q)_weight$", r".\1.weight"),
)
PLAMO3_RULES = (Changed(r"\.(pre_mixer_norm|pre_mlp_norm|mixer\.[qk]_norm|norm)\.weight$", Plus(1.0)), *_NORMS)


def _is_mamba(config: Config, layer: int, layers: int) -> bool:
    step = config.get("mamba_step", 2)
    if not isinstance(step, int) or step < 1:
        raise FormatError(f"{config.path}: mamba_step is {step!r}")
    return layer != layers - 1 if layers <= step // 2 else layer % step != step // 2


def set_plamo2_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of PLaMo 2: an order of their own."""
    get, width = config.get, config.get("hidden_size_per_head", 128)
    keys.u32(".vocab_size", config["vocab_size"])
    if get("mamba_enabled", True):
        attends = [not _is_mamba(config, layer, layers) for layer in range(layers)]
        for key, name, default in (("_kv", "num_key_value_heads", 4), ("", "num_attention_heads", 32)):
            keys.array(f".attention.head_count{key}", [get(name, default) if each else 0 for each in attends])
    keys.u32(".context_length", get("max_position_embeddings", 2048))
    keys.u32(".embedding_length", get("hidden_size", 4096))
    keys.u32(".attention.key_length", width)
    keys.u32(".attention.value_length", width)
    keys.u32(".block_count", layers)
    keys.f32(".attention.layer_norm_rms_epsilon", get("rms_norm_eps", 1e-6))
    keys.f32(".rope.freq_base", config.rope.get("rope_theta", 10000))
    keys.u32(".ssm.state_size", get("mamba_d_state", 64))
    keys.u32(".ssm.conv_kernel", get("mamba_d_conv", 4))
    heads = get("mamba_num_heads", 64)
    keys.u32(".ssm.time_step_rank", heads)
    keys.u32(".ssm.inner_size", heads * width)
    keys.u32(".ssm.group_count", 0)
    keys.u32(".feed_forward_length", get("intermediate_size", 13312))
    keys.u32("general.file_type", file_type)


def scale_rope(config: Config) -> None:
    """Say that rope is scaled by YaRN, which the configuration spells by single keys (Plamo3Model)."""
    factor = config.get("rope_scaling_factor", 1)
    if factor != 1 and "rope_type" not in config.rope:
        config.rope |= {
            **{"rope_type": "yarn", "factor": float(factor), "beta_fast": 32.0, "beta_slow": 1.0},
            "original_max_position_embeddings": int(config["initial_context_length"]),
        }


def _set_windows(keys: Keys, config: Config) -> None:
    if (window := config.find("window_size", "sliding_window")) is not None:
        pattern = config["sliding_window_pattern"]
        keys.u32(".attention.sliding_window", window)
        (keys.array if isinstance(pattern, list) else keys.u32)(".attention.sliding_window_pattern", pattern)


PLAMO3_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", needed=True), _set_windows)
