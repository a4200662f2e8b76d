"""Mamba, Falcon Mamba and Mamba 2.

Facts of llama.cpp b11434, conversion/mamba.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import PIECE, Expression, Shaped, read_f32, size_of
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, Always, Computed, Copied, SetKeys, number_or
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
    """Drops an output matrix equal to the embeddings, which it follows."""

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


def _width(config: Config) -> int:
    return config.number("hidden_size", "d_model")


def _inner_size(config: Config) -> int:
    """Return the inner size of Mamba, which must be twice the width."""
    width = _width(config)
    inner = config.find("intermediate_size", "d_inner") or 2 * width
    if inner != 2 * width:
        raise FormatError(
            f"{config.path}: the inner size is {short(inner)}, but llama.cpp supports only twice the width of {width}",
            "QK-E305",
        )
    return 2 * width


def _unused_keys(names: str) -> tuple[SetKeys, ...]:
    """Return rows of keys that runtimes require and Mamba does not use; ``names``: of the width."""
    return (
        Always(".context_length", 1 << 20),
        Copied(".embedding_length", names, required=True),
        Always(".feed_forward_length", 0),
        Always(".attention.head_count", 0),
    )


_KERNEL = number_or(".ssm.conv_kernel", "conv_kernel d_conv", 4)
_EPSILON = number_or(".attention.layer_norm_rms_epsilon", "layer_norm_epsilon rms_norm_eps", 1e-5, kind="f32")

MAMBA_BASE: tuple[SetKeys, ...] = (
    *_unused_keys("hidden_size d_model"),
    BLOCK_COUNT,
    _KERNEL,
    Computed(".ssm.inner_size", _inner_size),
    number_or(".ssm.state_size", "state_size d_state", 16),
    Computed(
        ".ssm.time_step_rank",
        lambda config: config.find("time_step_rank", "dt_rank") or -(_width(config) // -16),
        names="time_step_rank",
    ),
    _EPSILON,
    Computed(".ssm.dt_b_c_rms", lambda config: config.get("model_type") == "falcon_mamba", "flag"),
    FILE_TYPE,
)

DT_BIAS = Rename(r"\.dt_bias$", ".dt_proj.bias")


def _is_equal(a: Expression, b: Expression) -> bool:
    n = size_of(a)
    pieces = ((start, min(PIECE, n - start)) for start in range(0, n, PIECE))
    return a.shape == b.shape and all((read_f32(a, *piece) == read_f32(b, *piece)).all() for piece in pieces)


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


def _inner_size_2(config: Config) -> int:
    """Return the inner size of Mamba 2, a multiple of the head width that follows from the hidden size."""
    width, expand = config.number("hidden_size", "d_model", "dim"), config.find("mamba_expand", "expand") or 2
    inner: int = config.find("mamba_d_ssm", "intermediate_size", "d_inner") or expand * width
    head = _head_width(config)
    if inner != expand * width or inner % head:
        raise FormatError(
            f"{config.path}: the inner size {short(inner)} is not a multiple of heads of {short(head)}, or does not "
            "match the width",
            "QK-E112",
        )
    return inner


def _head_width(config: Config) -> int:
    return config.find("mamba_d_head", "head_dim") or 64


MAMBA2_BASE: tuple[SetKeys, ...] = (
    *_unused_keys("hidden_size d_model dim"),
    BLOCK_COUNT,
    _KERNEL,
    Computed(".ssm.inner_size", _inner_size_2),
    number_or(".ssm.state_size", "state_size d_state", 128),
    Computed(".ssm.time_step_rank", lambda config: _inner_size_2(config) // _head_width(config)),
    number_or(".ssm.group_count", "n_groups", 1),
    _EPSILON,
    FILE_TYPE,
)


def write_mamba(v: Vocabulary) -> None:
    """Write either kind of vocabulary, padded to a multiple of pad_vocab_size_multiple tokens (Mamba2Model)."""
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


_MAMBA = Architecture("mamba", rules=MAMBA_RULES, base=MAMBA_BASE, vocab=write_mamba1)

ARCHITECTURES: dict[str, Architecture] = {
    "MambaForCausalLM": _MAMBA,
    "MambaLMHeadModel": _MAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": Architecture(
        "mamba2", stored=MAMBA2_STORED, rules=MAMBA2_RULES, base=MAMBA2_BASE, vocab=write_mamba
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


_MAMBA_CLASS = HfClass(
    "mamba",
    "backbone.embeddings backbone.norm_f backbone.layers.*.norm "
    + " ".join(
        f"backbone.layers.*.mixer.{name}"
        for name in ("A_log", "D", "conv1d", "dt_proj", "in_proj", "out_proj", "x_proj", "norm")
    ),
    config_setters=(set_mamba_sizes,),
)

CLASSES: dict[str, HfClass] = {
    "FalconMambaForCausalLM": replace(_MAMBA_CLASS, model_type="falcon_mamba", matches=has_key("ssm.dt_b_c_rms")),
    "MambaForCausalLM": _MAMBA_CLASS,
    "Mamba2ForCausalLM": replace(
        _MAMBA_CLASS,
        model_type="mamba2",
    ),
}
