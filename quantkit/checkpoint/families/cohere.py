"""Command R and R7B (Cohere, Cohere 2).

Facts of llama.cpp b11434, conversion/command_r.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import PIECE, read_f32, size_of
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Copied, SetKeys
from quantkit.checkpoint.tensors import Context, Tensor


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
