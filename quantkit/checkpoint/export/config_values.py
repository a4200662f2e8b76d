"""Values of config.json that are more than copies of keys, set by a file's metadata (``HfClass.config_setters``).

Values of only one family are in its module. Some are not in any file, because llama.cpp (b11434, src/models/*.cpp) has
them in its code; they are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quantkit.checkpoint.config import Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata


def shortest_argument(value: float, function: Callable[[float], float]) -> float:
    """Return the argument with the fewest digits for which ``function`` gives float32 ``value``."""
    inverse = value
    for digits in range(17):
        inverse = float(f"{value:.{digits}e}")
        if np.float32(function(inverse)) == np.float32(function(value)):
            return inverse
    return inverse


def set_head_norms(meta: ModelMetadata, config: Json) -> None:
    config["use_qk_norm"] = meta.has("attn_q_norm.weight")


def set_long_rope(meta: ModelMetadata, config: Json) -> None:
    """Set the rope factors for long and short texts from their tensors."""
    if not meta.has("rope_factors_long.weight"):
        config["rope_scaling"] = None
        return
    rope: Json = {"type": "longrope"}
    for name in ("long", "short"):
        rope[f"{name}_factor"] = meta.values(f"rope_factors_{name}.weight")
    config["rope_scaling"] = rope


def set_rope_parameters(meta: ModelMetadata, config: Json) -> None:
    """Set rope as transformers 5 has it: in one object."""
    rope: Json = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
    rope["rope_theta"] = config.pop("rope_theta", 10000.0)
    if (part := config.pop("partial_rotary_factor", None)) is not None:
        rope["partial_rotary_factor"] = part
    config["rope_parameters"] = rope


def interleave_sections(meta: ModelMetadata, config: Json) -> None:
    """Set interleaved positions of several dimensions (Qwen3-VL and later)."""
    if "mrope_section" in (config.get("rope_scaling") or {}):
        config["rope_scaling"]["mrope_interleaved"] = True


def add_deepstack_tower(meta: ModelMetadata, config: Json) -> None:
    """Describe a vision tower, which files of text models lack, as small as possible (Qwen3-VL)."""
    n = meta.get(".n_deepstack_layers") or 0
    config["vision_config"] = {
        "depth": max(1, n),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": meta.number(".embedding_length"),
        "deepstack_visual_indexes": list(range(n)),
    }


@dataclass(frozen=True)
class AddTower:
    """Describe a vision tower, which files of text models lack, as small as possible.

    ``settings``: those that differ from other towers. ``out``: the name of its output width.
    """

    settings: Json
    out: str = ""

    def __call__(self, meta: ModelMetadata, config: Json) -> None:
        tower = {"hidden_size": 64, "intermediate_size": 64, **self.settings}
        config["vision_config"] = tower | ({self.out: meta.number(".embedding_length")} if self.out else {})


def set_dense_layers(meta: ModelMetadata, config: Json) -> None:
    """Name the layers without experts (Qwen)."""
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in meta.model.tensors]
    config["decoder_sparse_step"] = 1


def set_mlp_layer_types(meta: ModelMetadata, config: Json) -> None:
    """Set which layers have experts."""
    layers = range(config["num_hidden_layers"])
    sparse = (f"blk.{i}.ffn_gate_inp.weight" in meta.model.tensors for i in layers)
    config["mlp_layer_types"] = ["sparse" if item else "dense" for item in sparse]


@dataclass(frozen=True)
class SetEveryFourthFull:
    """Name the layers with a window, if there is one: all but every fourth, from the first on or the ``last``."""

    last: bool = False

    def __call__(self, meta: ModelMetadata, config: Json) -> None:
        slides = bool(meta.get(".attention.sliding_window"))
        places = (i + self.last for i in range(config["num_hidden_layers"]))
        config["layer_types"] = ["sliding_attention" if slides and i % 4 else "full_attention" for i in places]


def set_two_ropes(meta: ModelMetadata, config: Json) -> None:
    """Set rope of layers with and without a window."""
    theta = config.pop("rope_theta", 10000.0)
    full: Json = {"rope_type": "default", **(config.pop("rope_scaling", None) or {}), "rope_theta": theta}
    sliding: Json = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", theta)}
    for rope, key in ((full, ".rope.dimension_count"), (sliding, ".rope.dimension_count_swa")):
        if (turned := meta.get(key)) is not None:
            rope["partial_rotary_factor"] = turned / meta.head_width
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
