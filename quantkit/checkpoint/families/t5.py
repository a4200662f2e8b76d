"""T5, encoders with decoders or alone (conversion/t5.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.tensors import Context, Tensor

_EMBEDDINGS = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "shared.weight")


@dataclass(frozen=True)
class Shared:
    """Embeddings are stored under several names; the first of them counts, for both parts."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name not in _EMBEDDINGS:
            return None
        first = context.config.values.setdefault("_shared", tensor.name)
        return (replace(tensor, name="shared.weight"),) if first == tensor.name else ()


RULES = (Shared(),)


def set_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys of T5: an order of their own."""
    length, epsilon = config.get("n_positions"), config["layer_norm_epsilon"]
    both = keys.arch == "t5"
    keys.u32(".context_length", 512 if length is None else length)
    keys.u32(".embedding_length", config["d_model"])
    keys.u32(".feed_forward_length", config["d_ff"])
    keys.u32(".block_count", layers)
    if both and (n := config.get("num_decoder_layers")) is not None:
        keys.u32(".decoder_block_count", n)
    keys.u32(".attention.head_count", config["num_heads"])
    keys.u32(".attention.key_length", config["d_kv"])
    keys.u32(".attention.value_length", config["d_kv"])
    keys.f32(".attention.layer_norm_epsilon", epsilon)
    keys.u32(".attention.relative_buckets_count", config["relative_attention_num_buckets"])
    keys.f32(".attention.layer_norm_rms_epsilon", epsilon)
    if both:
        keys.u32(".decoder_start_token_id", config["decoder_start_token_id"])
    keys.u32("general.file_type", file_type)
