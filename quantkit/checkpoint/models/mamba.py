"""Mamba, Falcon Mamba and Mamba 2.

Facts of llama.cpp b11434, conversion/mamba.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import PIECE, Expression, Shaped, read_f32, size_of
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass, has_key
from quantkit.checkpoint.rules import (
    Rename,
    Transform,
    flatten,
    log_of_negative,
    negative_exp,
    squeeze,
    unsqueeze_channels,
)
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.bpe import write_bpe, write_sentencepiece_or_bpe
from quantkit.checkpoint.vocab.sentencepiece import write_sentencepiece
from quantkit.checkpoint.vocab.tokenizer import Vocabulary, checked_size
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short


@dataclass(frozen=True)
class DropTiedOutput(OneWayRule):
    """An output matrix that has the values of the embeddings is left out; it follows them."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name == "backbone.embeddings.weight":
            context.config.values["_embeddings"] = tensor.x
        embeddings = context.config.get("_embeddings")
        return (
            ()
            if tensor.name == "lm_head.weight" and embeddings is not None and _is_equal(tensor.x, embeddings)
            else None
        )


MAMBA_RULES = (
    DropTiedOutput(),
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    Transform(r"\.mixer\.conv1d\.weight$", squeeze, unsqueeze_channels),
)


def set_mamba_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of Mamba, in the converter's order."""
    width = config.number("hidden_size", "d_model")
    inner = config.find("intermediate_size", "d_inner") or 2 * width
    if inner != 2 * width:
        raise FormatError(
            f"{config.path}: an inner size of {short(inner)}; llama.cpp runs twice the width of {width} only", "QK-E305"
        )
    _set_unused(keys, width)
    keys.u32(".block_count", layers)
    keys.u32(".ssm.conv_kernel", config.find("conv_kernel", "d_conv") or 4)
    keys.u32(".ssm.inner_size", inner)
    keys.u32(".ssm.state_size", config.find("state_size", "d_state") or 16)
    keys.u32(".ssm.time_step_rank", config.find("time_step_rank", "dt_rank") or -(width // -16))
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-5)
    keys.flag(".ssm.dt_b_c_rms", config.get("model_type") == "falcon_mamba")
    keys.u32("general.file_type", file_type)


DT_BIAS = Rename(r"\.dt_bias$", ".dt_proj.bias")


def _is_equal(a: Expression, b: Expression) -> bool:
    n = size_of(a)
    pieces = ((start, min(PIECE, n - start)) for start in range(0, n, PIECE))
    return a.shape == b.shape and all((read_f32(a, *piece) == read_f32(b, *piece)).all() for piece in pieces)


def _set_unused(keys: Keys, width: int) -> None:
    """Set keys that runtimes require though Mamba does not use them."""
    keys.u32(".context_length", 1 << 20)
    keys.u32(".embedding_length", width)
    keys.u32(".feed_forward_length", 0)
    keys.u32(".attention.head_count", 0)


MAMBA2_STORED = (Rename(r"^model\.(backbone|lm_head)", r"\1", foreign=True), DT_BIAS)


def as_column(tensor: Tensor, context: Context) -> Expression:
    return Shaped(tensor.x, (size_of(tensor.x), 1))


def reshape_groups(tensor: Tensor, context: Context) -> Expression:
    n = context.config.find("n_groups", "num_groups") or 1
    return Shaped(tensor.x, (n, size_of(tensor.x) // n))


MAMBA2_RULES = (
    Transform(r"\.mixer\.conv1d\.weight$", squeeze, unsqueeze_channels),
    Transform(r"\.mixer\.(A_log|D)$", as_column, flatten),
    Transform(r"\.mixer\.norm\.weight$", reshape_groups, flatten),
    Transform(r"\.A_log$", negative_exp, log_of_negative),
)


def set_mamba2_base(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the base keys of Mamba 2, in the converter's order."""
    width, expand = config.number("hidden_size", "d_model", "dim"), config.find("mamba_expand", "expand") or 2
    inner = config.find("mamba_d_ssm", "intermediate_size", "d_inner") or expand * width
    head = config.find("mamba_d_head", "head_dim") or 64
    if inner != expand * width or inner % head:
        raise FormatError(
            f"{config.path}: an inner size of {short(inner)} makes no heads of {short(head)}, or is not the width's",
            "QK-E112",
        )
    _set_unused(keys, width)
    keys.u32(".block_count", layers)
    keys.u32(".ssm.conv_kernel", config.find("conv_kernel", "d_conv") or 4)
    keys.u32(".ssm.inner_size", inner)
    keys.u32(".ssm.state_size", config.find("state_size", "d_state") or 128)
    keys.u32(".ssm.time_step_rank", inner // head)
    keys.u32(".ssm.group_count", config.find("n_groups") or 1)
    keys.f32(".attention.layer_norm_rms_epsilon", config.find("layer_norm_epsilon", "rms_norm_eps") or 1e-5)
    keys.u32("general.file_type", file_type)


def write_mamba(v: Vocabulary) -> None:
    """Either kind, filled up to a multiple of pad_vocab_size_multiple tokens (Mamba2Model)."""
    size, multiple = v.config["vocab_size"], v.config.get("pad_vocab_size_multiple", 16)
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise FormatError(f"{v.config.path}: pad_vocab_size_multiple is {multiple!r}", "QK-E112")
    v.config.values["vocab_size"] = -(checked_size(v, size, 0) // -multiple) * multiple
    write_sentencepiece_or_bpe(v)


def write_mamba1(v: Vocabulary) -> None:
    """Write tokenizer.json's vocabulary, else SentencePiece, padded to pad_vocab_size_multiple (MambaModel)."""
    size, multiple = v.config["vocab_size"], v.config.get("pad_vocab_size_multiple", 8)
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise FormatError(f"{v.config.path}: pad_vocab_size_multiple is {multiple!r}", "QK-E112")
    v.config.values["vocab_size"] = -(checked_size(v, size, 0) // -multiple) * multiple
    if v.has("tokenizer.json") or not v.has("tokenizer.model"):
        write_bpe(v)
    else:
        write_sentencepiece(v)


_MAMBA = Architecture("mamba", rules=MAMBA_RULES, base=set_mamba_base, vocab=write_mamba1)

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    "MambaForCausalLM": _MAMBA,
    "MambaLMHeadModel": _MAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": Architecture(
        "mamba2", stored=MAMBA2_STORED, rules=MAMBA2_RULES, base=set_mamba2_base, vocab=write_mamba
    ),
}


def set_mamba_sizes(meta: ModelMetadata, config: Json) -> None:
    """Set the sizes of Mamba layers in models without other layers."""
    inner, width = meta.number(".ssm.inner_size"), meta.number(".embedding_length")
    config |= {"expand": inner // max(1, width), "intermediate_size": inner}
    heads = meta.get(".ssm.time_step_rank")
    if meta.get(".ssm.group_count") is not None:
        config |= {"num_heads": heads, "head_dim": inner // max(1, heads)}
        config.pop("intermediate_size")
    config["use_conv_bias"] = meta.has("ssm_conv1d.bias")
    config["use_bias"] = meta.has("ssm_in.bias")


_MAMBA_CLASS = HfClass(
    "mamba",
    "backbone.embeddings backbone.norm_f backbone.layers.*.norm "
    + " ".join(
        f"backbone.layers.*.mixer.{name}"
        for name in ("A_log", "D", "conv1d", "dt_proj", "in_proj", "out_proj", "x_proj", "norm")
    ),
    keys={
        ".context_length": "",
        ".feed_forward_length": "",
        ".attention.head_count": "",
        ".ssm.conv_kernel": "conv_kernel",
        ".ssm.state_size": "state_size",
        ".ssm.time_step_rank": "time_step_rank",
        ".attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    config_setters=(set_mamba_sizes,),
)

#: Model class -> how transformers has it.
CLASSES: dict[str, HfClass] = {
    "FalconMambaForCausalLM": replace(_MAMBA_CLASS, model_type="falcon_mamba", matches=has_key("ssm.dt_b_c_rms")),
    "MambaForCausalLM": _MAMBA_CLASS,
    "Mamba2ForCausalLM": replace(
        _MAMBA_CLASS,
        model_type="mamba2",
        keys={**_MAMBA_CLASS.keys, ".ssm.group_count": "n_groups", ".ssm.time_step_rank": ""},
    ),
}
