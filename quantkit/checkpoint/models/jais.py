"""JAIS 1 and 2.

Facts of llama.cpp b11434, conversion/jais.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.export import config_values
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Constant, Expression, Multiplied, read_f32, size_of
from quantkit.checkpoint.key_rows import FILE_TYPE, Computed, Copied, SetKeys, block_count
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Drop, Transform, identity, transpose, transpose_stored
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


def _number(config: Config, *names: str) -> float:
    value = config.find(*names)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"{config.path}: {' or '.join(names)} is {short(value)}, not a number", "QK-E112")
    return float(value)


def scale_embeddings(tensor: Tensor, context: Context) -> Expression:
    """Multiply the embeddings by JAIS's scale."""
    return Multiplied(tensor.x, _number(context.config, "mup_embeddings_scale", "embeddings_scale"))


def scale_output(tensor: Tensor, context: Context) -> Expression:
    """Multiply the output matrix by JAIS's scale of the logits."""
    config = context.config
    if "mup_output_alpha" in config:
        scale = _number(config, "mup_output_alpha") * _number(config, "mup_width_scale")
    else:
        scale = _number(config, "width_scale")
    return Multiplied(tensor.x, scale)


@dataclass(frozen=True)
class ReadAlibiSlopes(OneWayRule):
    """Derive ALiBi's largest bias from its slopes, and store it in the configuration."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if not tensor.name.endswith("relative_pe.slopes"):
            return None
        first = float(read_f32(tensor.x, 0, 1)[0]) if size_of(tensor.x) else 0.0
        if not 0 < first < math.inf:
            raise context.fail(tensor, f"a slope of {first}")
        heads = context.config.number("n_head")
        context.config.values["_alibi"] = -round(math.log2(first) * 2 ** math.floor(math.log2(max(1, heads))))
        return ()


JAIS_STORED = (Drop(r"\.attn\.bias$"),)

JAIS_RULES = (
    ReadAlibiSlopes(),
    Transform(r"\.(c_attn|c_proj|c_fc|c_fc2)\.weight$", transpose, transpose_stored),
    Transform(r"^transformer\.wte\.weight$", scale_embeddings, identity),
    Transform(r"^lm_head\.weight$", scale_output, identity),
)


def refuse_settings(keys: Keys, config: Config) -> None:
    """Refuse settings of JAIS that llama.cpp does not support."""
    for key, required in (("activation_function", "swiglu"), ("position_embedding_type", "alibi")):
        if config.get(key) != required:
            raise FormatError(
                f"{config.path}: {key} is {short(config.get(key))}; only {required} is supported", "QK-E305"
            )


JAIS_BASE: tuple[SetKeys, ...] = (
    refuse_settings,
    block_count("n_layer"),
    Copied(".context_length", "n_positions", required=True),
    Copied(".embedding_length", "n_embd", required=True),
    Copied(".feed_forward_length", "n_inner", required=True),
    Copied(".attention.head_count", "n_head", required=True),
    Copied(".attention.layer_norm_epsilon", "layer_norm_epsilon", "f32", required=True),
    FILE_TYPE,
)
#: The largest bias of ALiBi.
ALIBI = Computed(".attention.max_alibi_bias", lambda config: float(config.get("_alibi", 8.0)), "f32")

ARCHITECTURES: dict[str, Architecture] = {
    "Jais2ForCausalLM": Architecture("jais2", keys=(llama.ROPE_WIDTH,)),
    "JAISLMHeadModel": Architecture(
        "jais",
        stored=JAIS_STORED,
        rules=JAIS_RULES,
        base=JAIS_BASE,
        head_keys=(ALIBI,),
    ),
}

_LAYER = "transformer.h.*."


def _make_alibi_slopes(meta: ModelMetadata) -> Iterable[Tensor]:
    """Restore the slopes of ALiBi from its largest bias."""
    heads, max_bias = meta.number(".attention.head_count"), float(meta.get(".attention.max_alibi_bias") or 8.0)
    if not 0 < heads <= 1 << 16:
        raise ValueError(f"{heads} heads")
    power = 1 << heads.bit_length() - 1
    slopes = [2 ** (-max_bias * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-max_bias * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    yield Tensor("transformer.relative_pe.slopes", Constant(tuple(slopes)), None)


CLASSES: dict[str, HfClass] = {
    "Jais2ForCausalLM": HfClass("jais2", config_setters=(config_values.set_rope_parameters,)),
    "JAISLMHeadModel": HfClass(
        "jais",
        "transformer.wte transformer.ln_f "
        + add_prefix(_LAYER, "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_fc2 mlp.c_proj"),
        # Scales are part of the weights; the other values are constants of llama.cpp.
        defaults={
            "activation_function": "swiglu",
            "position_embedding_type": "alibi",
            **dict.fromkeys(("embeddings_scale", "width_scale", "mup_embeddings_scale"), 1.0),
            **dict.fromkeys(("mup_output_alpha", "mup_width_scale"), 1.0),
            **dict.fromkeys(("scale_qk_dot_by_d", "mup_scale_qk_dot_by_d"), True),
        },
        synthetic=_make_alibi_slopes,
    ),
}
