"""Command R and R7B (Cohere, Cohere 2), and the mixture of experts after them.

Facts of llama.cpp b11434, conversion/command_r.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.expressions import PIECE, read_f32, size_of
from quantkit.checkpoint.key_rows import (
    VOCAB_SIZE,
    WINDOW,
    WINDOW_PATTERN,
    Always,
    Computed,
    Copied,
    SetKeys,
    divided_head_dim,
)
from quantkit.checkpoint.nextn import NEXTN_IF_ANY, layers_with_nextn
from quantkit.checkpoint.row import Architecture, HfClass
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
            raise context.fail(tensor, "a nonzero bias, which this architecture does not support")
        return ()


def use_longest_context(config: Config) -> None:
    """Set the context: Command R was trained on longer texts than its max_position_embeddings."""
    if (length := config.get("model_max_length")) is not None:
        config.values["max_position_embeddings"] = length


def _rope_width(config: Config) -> int:
    """Return the rotary dimensions of a head.

    transformers does not save rotary_pct, without which convert_hf_to_gguf.py stops; its model class rotates whole
    heads.
    """
    return int(config.rotary_part(1.0, "rotary_pct", config.values) * divided_head_dim(config))


_LOGIT_SCALE = Copied(".logit_scale", "logit_scale", "f32", required=True)
_NO_SCALING = Always(".rope.scaling.type", "none", "text")
COHERE_KEYS: tuple[SetKeys, ...] = (_LOGIT_SCALE, _NO_SCALING)
COHERE2_KEYS: tuple[SetKeys, ...] = (
    _LOGIT_SCALE,
    WINDOW,
    VOCAB_SIZE,
    Computed(".rope.dimension_count", _rope_width),
    _NO_SCALING,
)


def _dense_layers(config: Config) -> int:
    dense: int = config.get("first_k_dense_replace", 0)
    if (kinds := config.get("mlp_layer_types")) is not None:
        dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    return dense


def _shared_width(config: Config) -> int | None:
    """Return the width of shared experts; refuse those that are not averaged."""
    shared: int = config.get("num_shared_experts", 0)
    if shared and (strategy := config.get("shared_expert_combination_strategy", "average")) != "average":
        raise FormatError(
            f"{config.path}: shared experts are combined by {short(strategy)}; only average is supported", "QK-E305"
        )
    return config.number("intermediate_size") * shared if shared else None


COHERE2_MOE_KEYS: tuple[SetKeys, ...] = (
    _LOGIT_SCALE,
    WINDOW,
    WINDOW_PATTERN,
    VOCAB_SIZE,
    Copied(".expert_feed_forward_length", "intermediate_size", required=True),
    Computed(".leading_dense_block_count", _dense_layers),
    Copied(".expert_weights_norm", "norm_topk_prob", "flag", default=False),
    Copied(".expert_shared_count", "num_shared_experts", unless_zero=True),
    Computed(".expert_shared_feed_forward_length", _shared_width),
    NEXTN_IF_ANY,
    Copied(".rope.dimension_count", "head_dim", required=True),
    _NO_SCALING,
)

ARCHITECTURES: dict[str, Architecture] = {
    "CohereForCausalLM": Architecture("command-r", keys=COHERE_KEYS, patch_config=use_longest_context),
    "Cohere2ForCausalLM": Architecture("cohere2", rules=(DropZeroBiases(),), keys=COHERE2_KEYS),
    "Cohere2MoeForCausalLM": Architecture(
        "cohere2moe", rules=(DropZeroBiases(), StackExperts()), keys=COHERE2_MOE_KEYS, layers=layers_with_nextn
    ),
}

CLASSES: dict[str, HfClass] = {
    "CohereForCausalLM": HfClass("cohere", config_setters=(config_values.set_head_norms,)),
    "Cohere2ForCausalLM": HfClass("cohere2"),
    "Cohere2MoeForCausalLM": HfClass(
        "cohere2_moe",
        keys={
            ".feed_forward_length": "prefix_dense_intermediate_size",
            ".expert_count": "num_experts",
            ".expert_gating_func": "expert_selection_fn",
        },
        config_setters=(
            config_values.set_mlp_layer_types,
            config_values.set_rope_parameters,
        ),
    ),
}
