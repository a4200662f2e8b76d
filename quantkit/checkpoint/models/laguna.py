"""Laguna.

Facts of llama.cpp b11434, conversion/laguna.py.
"""

from __future__ import annotations

from itertools import takewhile

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.key_rows import VOCAB_SIZE, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import LAYER, Architecture, HfClass
from quantkit.checkpoint.rules import STACK_GATE_FIRST
from quantkit.checkpoint.vocab.bpe import write_bpe
from quantkit.checkpoint.vocab.special import template_file
from quantkit.checkpoint.vocab.tokenizer import CONTROL, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _heads(config: Config) -> list[int]:
    layers = config.layers
    heads: list[int] = config.get("num_attention_heads_per_layer") or [config.number("num_attention_heads")] * layers
    if len(heads) != layers:
        raise FormatError(
            f"{config.path}: num_attention_heads_per_layer is {short(heads)}, not of {layers} layers", "QK-E112"
        )
    return heads


def refuse_gates(keys: Keys, config: Config) -> None:
    """Refuse gates whose kind is ambiguous: per-element gates must be named as such."""
    meta, kinds = config.get("gating"), config.get("gating_types")
    gating = str(meta).replace("_", "-")
    if gating not in ("per-element", "per-head") and meta is not True and not kinds:
        raise FormatError(f"{config.path}: gating is {short(meta)}; supported are per-head and per-element", "QK-E305")
    if kinds and any("element" in str(kind) for kind in kinds) and gating != "per-element":
        raise FormatError(f"{config.path}: gating_types has gates per element, but gating is {short(meta)}", "QK-E112")


def _dense_layers(config: Config) -> int:
    return len(list(takewhile(lambda kind: kind == "dense", config["mlp_layer_types"])))


def _rotary_width(config: Config) -> int:
    return int(config.number("head_dim") * config.rotary_part(1.0, rope=config.rope["full_attention"]))


def _sliding_rotary_width(config: Config) -> int | None:
    rope = config.rope.get("sliding_attention")
    return None if rope is None else int(config.number("head_dim") * config.rotary_part(1.0, rope=rope))


KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Computed(".attention.head_count", _heads, "array"),
    refuse_gates,
    Copied(".attention.sliding_window", "sliding_window", unless_zero=True),
    Copied(".expert_feed_forward_length", "moe_intermediate_size", required=True),
    Copied(".expert_shared_feed_forward_length", "shared_expert_intermediate_size", required=True),
    Always(".expert_weights_norm", True, "flag"),
    Copied(".expert_weights_scale", "moe_routed_scaling_factor", "f32", required=True),
    Always(".expert_gating_func", GATING["sigmoid"]),
    Computed(".leading_dense_block_count", _dense_layers),
    Computed(".rope.dimension_count", _rotary_width),
    Computed(".rope.dimension_count_swa", _sliding_rotary_width),
)


def write_laguna(v: Vocabulary) -> None:
    """Write a BPE vocabulary in which </assistant> is a control token (LagunaModel)."""
    write_bpe(v)
    if v.owner is v.config:  # the reference does not, for a draft with this vocabulary
        _end_turns(v)
    if v.has("chat_template.jinja"):
        v.keys.text("tokenizer.chat_template", template_file(v.folder))
    ends, bos = v.config.get("eos_token_id"), v.config.get("bos_token_id")
    if isinstance(ends, list) and (end_tokens := [end for end in ends if end != bos]):
        v.keys.u32("tokenizer.ggml.eot_token_id", end_tokens[0])


def _end_turns(v: Vocabulary) -> None:
    tokens, types = (list(v.keys.fields[f"tokenizer.ggml.{key}"].value) for key in ("tokens", "token_type"))
    turned = [CONTROL if text == "</assistant>" else kind for text, kind in zip(tokens, types, strict=True)]
    v.keys.array("tokenizer.ggml.token_type", turned)


ARCHITECTURES: dict[str, Architecture] = {
    "LagunaForCausalLM": Architecture("laguna", rules=(STACK_GATE_FIRST,), keys=KEYS, vocab=write_laguna),
}


def set_heads_per_layer(meta: ModelMetadata, config: Json) -> None:
    """Set the heads of each layer, and whether gates are of heads or single values (Laguna)."""
    heads = meta.get(".attention.head_count")
    heads_of_layers = heads if isinstance(heads, list) else [heads] * meta.number(".block_count")
    config |= {"num_attention_heads": heads_of_layers[0], "num_attention_heads_per_layer": heads_of_layers}
    gate = meta.model.tensors.get("blk.0.attn_gate.weight")
    config["gating"] = "per-head" if gate is not None and gate.shape[1] == heads_of_layers[0] else "per-element"


def set_two_eos(meta: ModelMetadata, config: Json) -> None:
    """Set the two end tokens, of a turn and of a text (Laguna)."""
    ids = [meta.model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eos")]
    if None not in ids:
        config["eos_token_id"] = ids


CLASSES: dict[str, HfClass] = {
    "LagunaForCausalLM": HfClass(
        "laguna",
        f"{LAYER}self_attn.g_proj {LAYER}mlp.experts.e_score_correction "
        + " ".join(f"{LAYER}mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down")),
        keys={".expert_count": "num_experts"},
        config_setters=(
            config_values.SetEveryFourthFull(),
            config_values.set_mlp_layer_types,
            set_heads_per_layer,
            config_values.set_two_ropes,
            set_two_eos,
        ),
    ),
}
