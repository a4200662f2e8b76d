"""LFM 2: short convolutions between layers of attention; also with experts.

Facts of llama.cpp b11434, conversion/lfm2.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Stored
from quantkit.checkpoint.families.qwen import set_pooling
from quantkit.checkpoint.keys import GATING, Keys, set_base_keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Dropped, Experts, Renamed, Tensor, squeezed
from quantkit.errors import FormatError
from quantkit.formats.safetensors import read_header

#: Of the models that also hear.
STORED = (
    Dropped(r"audio|codebook|conformer|depth_embedding|depthformer|depth_linear"),
    Renamed(r"lfm\.", "model.", foreign=True),
)
CONVOLUTIONS = Changed(r"conv\.conv", squeezed)
EXPERTS = Experts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.feed_forward.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.feed_forward.experts.{weight}.weight",
)


def set_hybrid_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """The base keys; layers of convolutions have no heads of keys."""
    heads = config.number("num_key_value_heads")
    each = [0 if kind == "conv" else heads for kind in config["layer_types"]]
    set_base_keys(keys, config.with_values({"num_key_value_heads": each}), layers, file_type)


def _set_width(keys: Keys, config: Config) -> None:
    width = config.number("block_ff_dim", "intermediate_size")
    if config["block_auto_adjust_ff_dim"]:
        width, of = int(2 * width / 3), config.number("block_multiple_of")
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            width = int(factor * width)
        width = of * ((width + of - 1) // of)
    keys.u32(".feed_forward_length", width)


KEYS: tuple[SetKeys, ...] = (
    Copied(".vocab_size", "vocab_size", needed=True),
    Copied(".shortconv.l_cache", "conv_L_cache", needed=True),
    Copied(".attention.layer_norm_rms_epsilon", "norm_eps", "f32", needed=True),
    _set_width,
)
MOE_KEYS: tuple[SetKeys, ...] = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", needed=True),
    Copied(".leading_dense_block_count", "num_dense_layers", needed=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    *KEYS[:2],
)


# --- embeddings of LFM 2 ---------------------------------------------------------------------------------------------

#: The layer behind the others, in a file of its own.
_DENSE = "dense_2.weight"
BARE = (Renamed(r"^lfm2\.", ""), Renamed(r"^(?!dense_2)", "model.", foreign=True))


def _dense(config: Config) -> Stored | None:
    path = config.path.parent / "1_Dense" / "model.safetensors"
    if not path.is_file():
        return None
    found = read_header(path).get("linear.weight")
    if found is None:
        raise FormatError(f"{path}: it has no linear.weight")
    return Stored(found)


def dense_layer(config: Config) -> Iterable[Tensor]:
    """The layer that makes embeddings narrower, if there is one (LFM2ColBertModel)."""
    if (x := _dense(config)) is not None:
        yield Tensor(_DENSE, x, None, _DENSE)


def set_dense_width(keys: Keys, config: Config) -> None:
    """Set how wide embeddings are behind that layer."""
    if (x := _dense(config)) is not None:
        keys.u32(".embedding_length_out", x.shape[0])


def _set_direction(keys: Keys, config: Config) -> None:
    if config.architecture != "Lfm2Model":
        keys.flag(".attention.causal", False)


EMBEDDING_KEYS: tuple[SetKeys, ...] = (*KEYS, _set_direction, set_pooling)
