"""Command R and R7B (Cohere, Cohere 2), and the mixture of experts after them.

Facts of llama.cpp b11434, conversion/command_r.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.expressions import PIECE, read_f32, size_of
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.nextn import layers_with_nextn, nextn_layers
from quantkit.checkpoint.row import Architecture, Copied, HfClass, SetKeys
from quantkit.checkpoint.rules import StackExperts
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class DropZeroBiases(OneWayRule):
    """Drop biases after checking that they are zero: llama.cpp adds none."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith(".bias"):
            return None
        n = size_of(tensor.x)
        if any(read_f32(tensor.x, start, min(PIECE, n - start)).any() for start in range(0, n, PIECE)):
            raise context.fail(tensor, "a bias that is not zero, which this architecture cannot have")
        return ()


def use_longest_context(config: Config) -> None:
    """Command R was trained on longer texts than its max_position_embeddings."""
    if (length := config.get("model_max_length")) is not None:
        config.values["max_position_embeddings"] = length


def set_no_scaling(keys: Keys, config: Config) -> None:
    keys.text(".rope.scaling.type", "none")


def set_rope_width(keys: Keys, config: Config) -> None:
    """Set the rotary dimensions of a head.

    transformers does not save rotary_pct, without which convert_hf_to_gguf.py stops; its own model turns whole heads.
    """
    width = config.number("hidden_size") // max(1, config.number("num_attention_heads"))
    keys.u32(".rope.dimension_count", int(config.rotary_part(1.0, "rotary_pct", config.values) * width))


COHERE_KEYS: tuple[SetKeys, ...] = (Copied(".logit_scale", "logit_scale", "f32", required=True), set_no_scaling)

COHERE2_KEYS: tuple[SetKeys, ...] = (
    Copied(".logit_scale", "logit_scale", "f32", required=True),
    Copied(".attention.sliding_window", "sliding_window", required=True),
    Copied(".vocab_size", "vocab_size", required=True),
    set_rope_width,
    set_no_scaling,
)


def set_window_pattern(keys: Keys, config: Config) -> None:
    """Set which layers attend to a window."""
    keys.array(".attention.sliding_window_pattern", [kind == "sliding_attention" for kind in config["layer_types"]])


def _set_moe(keys: Keys, config: Config) -> None:
    width, dense = config.number("intermediate_size"), config.get("first_k_dense_replace", 0)
    if (kinds := config.get("mlp_layer_types")) is not None:
        dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    keys.u32(".expert_feed_forward_length", width)
    keys.u32(".leading_dense_block_count", dense)
    keys.flag(".expert_weights_norm", config.get("norm_topk_prob", False))
    if shared := config.get("num_shared_experts", 0):
        if (strategy := config.get("shared_expert_combination_strategy", "average")) != "average":
            raise FormatError(
                f"{config.path}: shared experts are combined by {short(strategy)}; only average is known", "QK-E305"
            )
        keys.u32(".expert_shared_count", shared)
        keys.u32(".expert_shared_feed_forward_length", width * shared)
    if nextn := nextn_layers(config):
        keys.u32(".nextn_predict_layers", nextn)


COHERE2_MOE_KEYS: tuple[SetKeys, ...] = (
    *COHERE2_KEYS[:2],
    set_window_pattern,
    Copied(".vocab_size", "vocab_size", required=True),
    _set_moe,
    Copied(".rope.dimension_count", "head_dim", required=True),
    set_no_scaling,
)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "CohereForCausalLM": Architecture("command-r", keys=COHERE_KEYS, patch_config=use_longest_context),
    "Cohere2ForCausalLM": Architecture("cohere2", rules=(DropZeroBiases(),), keys=COHERE2_KEYS),
    "Cohere2MoeForCausalLM": Architecture(
        "cohere2moe", rules=(DropZeroBiases(), StackExperts()), keys=COHERE2_MOE_KEYS, layers=layers_with_nextn
    ),
}

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "CohereForCausalLM": HfClass("cohere", config_setters=(config_values.set_head_norms,)),
    "Cohere2ForCausalLM": HfClass("cohere2"),
    "Cohere2MoeForCausalLM": HfClass(
        "cohere2_moe",
        keys={
            ".feed_forward_length": "prefix_dense_intermediate_size",
            ".expert_count": "num_experts",
            ".expert_feed_forward_length": "intermediate_size",
            ".expert_shared_count": "num_shared_experts",
            ".leading_dense_block_count": "",
            ".expert_gating_func": "expert_selection_fn",
            ".attention.key_length": "head_dim",
        },
        config_setters=(
            config_values.subtract_nextn_layers,
            config_values.set_layer_types,
            config_values.set_mlp_layer_types,
            config_values.set_rope_parameters,
        ),
    ),
}
