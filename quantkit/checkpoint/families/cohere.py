"""Command R and R7B (Cohere, Cohere 2), and the mixture of experts after them.

Facts of llama.cpp b11434, conversion/command_r.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import PIECE, read_f32, size_of
from quantkit.checkpoint.families.deepseek import predicting_layers
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class NoBias:
    """Biases are dropped, for llama.cpp adds none; so they must be zero, which is why they are read here."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".bias"):
            return None
        n = size_of(tensor.x)
        if any(read_f32(tensor.x, at, min(PIECE, n - at)).any() for at in range(0, n, PIECE)):
            raise context.fail(tensor, "a bias that is not zero, which this architecture cannot have")
        return ()


def use_longest(config: Config) -> None:
    """Command R was trained on longer texts than its max_position_embeddings."""
    if (length := config.get("model_max_length")) is not None:
        config.values["max_position_embeddings"] = length


def set_no_scaling(keys: Keys, config: Config) -> None:
    keys.text(".rope.scaling.type", "none")


def set_rope_width(keys: Keys, config: Config) -> None:
    """Set how much of a head rope turns.

    transformers does not save rotary_pct, without which convert_hf_to_gguf.py stops; its own model turns whole heads.
    """
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", int(config.rotary_part(1.0, "rotary_pct", config.values) * width))


COHERE_KEYS: tuple[SetKeys, ...] = (Copied(".logit_scale", "logit_scale", "f32", needed=True), set_no_scaling)
COHERE2_KEYS: tuple[SetKeys, ...] = (
    Copied(".logit_scale", "logit_scale", "f32", needed=True),
    Copied(".attention.sliding_window", "sliding_window", needed=True),
    Copied(".vocab_size", "vocab_size", needed=True),
    set_rope_width,
    set_no_scaling,
)


def set_slides(keys: Keys, config: Config) -> None:
    """Set which layers attend to a window."""
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])


def _set_mixture(keys: Keys, config: Config) -> None:
    width, dense = config.number("intermediate_size"), config.get("first_k_dense_replace", 0)
    if (kinds := config.get("mlp_layer_types")) is not None:
        dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".leading_dense_block_count", dense)
    keys.flag(".expert_weights_norm", config.get("norm_topk_prob", False))
    if shared := config.get("num_shared_experts", 0):
        if (how := config.get("shared_expert_combination_strategy", "average")) != "average":
            raise FormatError(f"{config.path}: shared experts are combined by {short(how)}; only average is known")
        keys.u32(".expert_shared_count", shared)
        keys.u32(".expert_shared_feed_forward_length", width * shared)
    if ahead := predicting_layers(config):
        keys.u32(".nextn_predict_layers", ahead)


COHERE2_MOE_KEYS: tuple[SetKeys, ...] = (
    *COHERE2_KEYS[:2],
    set_slides,
    Copied(".vocab_size", "vocab_size", needed=True),
    _set_mixture,
    Copied(".rope.dimension_count", "head_dim", needed=True),
    set_no_scaling,
)
