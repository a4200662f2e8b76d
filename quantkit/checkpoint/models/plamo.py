"""PLaMo 1, whose heads are stored in another order, 2, with layers of Mamba, and 3.

Facts of llama.cpp b11434, conversion/plamo.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import MAX_JSON, Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import Expression, Offset, OffsetInverse, take
from quantkit.checkpoint.key_rows import BLOCK_COUNT, FILE_TYPE, VOCAB_SIZE, Always, Computed, Copied, SetKeys
from quantkit.checkpoint.row import Architecture, HfClass, add_prefix
from quantkit.checkpoint.rules import Rename, Transform, log_of_negative, negative_exp, squeeze, unsqueeze_channels
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.sentencepiece import Piece, set_pieces, write_sentencepiece
from quantkit.checkpoint.vocab.special import template_file
from quantkit.checkpoint.vocab.tokenizer import (
    BYTE,
    CONTROL,
    MAX_PADDING,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    Vocabulary,
)
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole


@dataclass(frozen=True)
class AddConstant:
    """Add the constant that a norm adds to its weights."""

    value: float
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        return (OffsetInverse if self.inverse else Offset)(tensor.x, self.value)


#: The constants that norms add to their weights.
_ADD_NORM_OFFSETS = (
    Transform(r"\.post_mixer_norm\.weight$", AddConstant(1.0 / 5), AddConstant(1.0 / 5, inverse=True)),
    Transform(r"\.post_mlp_norm\.weight$", AddConstant(1.0 / 5**1.5), AddConstant(1.0 / 5**1.5, inverse=True)),
)

PLAMO2_RULES = (
    Transform(r"\.A_log$", negative_exp, log_of_negative),
    Transform(r"\.conv1d\.weight$", squeeze, unsqueeze_channels),
    Transform(r"\.(pre_mixer_norm|pre_mlp_norm|norm)\.weight$", AddConstant(1.0), AddConstant(1.0, inverse=True)),
    *_ADD_NORM_OFFSETS,
    Rename(r"\.dt_bias$", ".dt_proj.bias"),
    Rename(r"\.(dt_norm|B_norm|C_norm|k|q)_weight$", r".\1.weight"),
)


def _layer_heads(name: str, default: int) -> Callable[[Config], list[int] | None]:
    """Return the heads of each layer, 0 for Mamba layers."""

    def heads(config: Config) -> list[int] | None:
        layers = config.layers
        if not config.get("mamba_enabled", True):
            return None
        n: int = config.get(name, default)
        return [0 if _is_mamba_layer(config, layer, layers) else n for layer in range(layers)]

    return heads


def _inner_size(config: Config) -> int:
    size: int = config.get("mamba_num_heads", 64) * config.get("hidden_size_per_head", 128)
    return size


PLAMO2_BASE: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Computed(".attention.head_count_kv", _layer_heads("num_key_value_heads", 4), "array"),
    Computed(".attention.head_count", _layer_heads("num_attention_heads", 32), "array"),
    Copied(".context_length", "max_position_embeddings", default=2048),
    Copied(".embedding_length", "hidden_size", default=4096),
    Copied(".attention.key_length", "hidden_size_per_head", default=128),
    Copied(".attention.value_length", "hidden_size_per_head", default=128),
    BLOCK_COUNT,
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", default=1e-6),
    Computed(".rope.freq_base", lambda config: config.rope.get("rope_theta", 10000), "f32", names="rope_theta"),
    Copied(".ssm.state_size", "mamba_d_state", default=64),
    Copied(".ssm.conv_kernel", "mamba_d_conv", default=4),
    Copied(".ssm.time_step_rank", "mamba_num_heads", default=64),
    Computed(".ssm.inner_size", _inner_size),
    Always(".ssm.group_count", 0),
    Copied(".feed_forward_length", "intermediate_size", default=13312),
    FILE_TYPE,
)

PLAMO3_RULES = (
    Transform(
        r"\.(pre_mixer_norm|pre_mlp_norm|mixer\.[qk]_norm|norm)\.weight$",
        AddConstant(1.0),
        AddConstant(1.0, inverse=True),
    ),
    *_ADD_NORM_OFFSETS,
)


def set_rope_scaling(config: Config) -> None:
    """Set YaRN, for which the configuration has separate keys (Plamo3Model)."""
    factor = config.get("rope_scaling_factor", 1)
    if factor != 1 and "rope_type" not in config.rope:
        config.rope |= {
            "rope_type": "yarn",
            "factor": float(factor),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": int(config["initial_context_length"]),
        }


def _window_pattern(config: Config) -> Any:
    return config["sliding_window_pattern"] if config.find("window_size", "sliding_window") is not None else None


PLAMO3_KEYS: tuple[SetKeys, ...] = (
    VOCAB_SIZE,
    Copied(".attention.sliding_window", "window_size sliding_window"),
    Computed(".attention.sliding_window_pattern", _window_pattern, "count", names="sliding_window_pattern"),
)
#: Of the only released model: query heads per KV head, KV heads, head width.
_SHARING = 8
_KEYS = 5
_WIDTH = 128


@dataclass(frozen=True)
class ReorderHeads:
    """Reorder heads along ``axis`` so that those that share a KV head are adjacent."""

    axis: int
    inverse: bool = False

    def __call__(self, tensor: Tensor, context: Context) -> Expression:
        n = _SHARING * _KEYS * _WIDTH
        if tensor.x.shape != (n, n):
            raise context.fail(tensor, f"its shape {list(tensor.x.shape)} is not [{n}, {n}]")
        outer, inner = (_SHARING, _KEYS) if self.inverse else (_KEYS, _SHARING)
        heads = [i * outer + j for j in range(outer) for i in range(inner)]
        return take(tensor.x, self.axis, *(range(head * _WIDTH, (head + 1) * _WIDTH) for head in heads))


PLAMO_RULES = (
    Transform(r"\.self_attn\.q_proj\.weight$", ReorderHeads(0), ReorderHeads(0, inverse=True)),
    Transform(r"\.self_attn\.o_proj\.weight$", ReorderHeads(1), ReorderHeads(1, inverse=True)),
)


#: PLaMo 1, with its real number of KV heads: that of config.json is wrong.
PLAMO_BASE: tuple[SetKeys, ...] = (
    Computed(".context_length", lambda config: 4096, names="max_position_embeddings"),
    Copied(".embedding_length", "hidden_size", required=True),
    Copied(".feed_forward_length", "intermediate_size", required=True),
    BLOCK_COUNT,
    Copied(".attention.head_count", "num_attention_heads", required=True),
    Computed(".attention.head_count_kv", lambda config: _KEYS, names="num_key_value_heads"),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps", "f32", required=True),
    FILE_TYPE,
)


def _is_mamba_layer(config: Config, layer: int, layers: int) -> bool:
    step = config.get("mamba_step", 2)
    if not isinstance(step, int) or step < 1:
        raise FormatError(f"{config.path}: mamba_step is {step!r}", "QK-E112")
    return layer != layers - 1 if layers <= step // 2 else layer % step != step // 2


_PLAMO_TYPES = {"UNKNOWN": UNKNOWN, "CONTROL": CONTROL, "BYTE": BYTE}
_PLAMO_KINDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("sep", "seperator"), ("unk", "unknown"))


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(read_whole(path, MAX_JSON).splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise FormatError(f"{path}: line {number} is not JSON: {short(line)}", "QK-E114") from None


def _plamo_pieces(path: Path) -> list[Piece]:
    pieces = []
    for entry in _json_lines(path):
        is_scored = isinstance(entry, list) and len(entry) > 1 and isinstance(entry[0], str)
        if not is_scored or isinstance(entry[1], bool) or not isinstance(entry[1], (int, float)):
            raise FormatError(f"{path}: {short(entry)} is not a token with a score", "QK-E114")
        kind = _PLAMO_TYPES.get(entry[2] if len(entry) > 2 and isinstance(entry[2], str) else "")
        if kind is None:
            kind = CONTROL if entry[0].startswith("<|plamo:") and entry[0].endswith("|>") else NORMAL
        pieces.append(Piece(entry[0], float(entry[1]), kind))
    return pieces


def write_plamo(v: Vocabulary) -> None:
    """Tokens of a tokenizer.jsonl (TextModel._set_vocab_plamo)."""
    path = v.folder / "tokenizer.jsonl"
    if not path.exists():
        raise FormatError(f"{v.folder}: has no tokenizer.jsonl, so the vocabulary is missing", "QK-E114")
    v.source = f"{path.name} needs the checkpoint's own Python code to split text"
    pieces, size = _plamo_pieces(path), v.config.number("vocab_size")
    if size > min(MAX_TOKENS, len(pieces) + MAX_PADDING):
        raise FormatError(f"{path}: has {len(pieces)} tokens, but vocab_size of config.json is {size}", "QK-E114")
    pieces += [Piece(f"[PAD{i}]", -1000.0, UNUSED) for i in range(1, size - len(pieces) + 1)]
    set_pieces(v, pieces, "plamo2")
    texts, config = [piece.text for piece in pieces], v.tokenizer_config
    for kind, key in _PLAMO_KINDS:
        if (text := config.get(f"{kind}_token")) is not None:
            if text not in texts:
                raise FormatError(
                    f"{path}: has no token {short(text)}, the {kind}_token of tokenizer_config.json", "QK-E114"
                )
            v.keys.u32(f"tokenizer.ggml.{key}_token_id", texts.index(text))
    v.keys.u32("tokenizer.ggml.eot_token_id", 4)  # <|plamo:op|>
    v.keys.flag("tokenizer.ggml.add_space_prefix", False)
    for kind in ("bos", "eos"):
        if (adds := config.get(f"add_{kind}_token")) is not None:
            v.keys.flag(f"tokenizer.ggml.add_{kind}_token", adds)


def write_plamo3(v: Vocabulary) -> None:
    """Write PLaMo's vocabulary with a chat template; chat_template.jinja takes precedence (Plamo3Model)."""
    write_plamo(v)
    template = v.tokenizer_config.get("chat_template")
    v.keys.text("tokenizer.chat_template", template_file(v.folder) if v.has("chat_template.jinja") else template)


_PLAMO_2 = Architecture("plamo2", rules=PLAMO2_RULES, base=PLAMO2_BASE, vocab=write_plamo)
_PLAMO_3 = Architecture(
    "plamo3", rules=PLAMO3_RULES, keys=PLAMO3_KEYS, vocab=write_plamo3, patch_config=set_rope_scaling
)

ARCHITECTURES: dict[str, Architecture] = {
    "PlamoForCausalLM": Architecture("plamo", rules=PLAMO_RULES, base=PLAMO_BASE, vocab=write_sentencepiece),
    "Plamo2ForCausalLM": _PLAMO_2,
    "PLaMo2ForCausalLM": _PLAMO_2,
    "Plamo3ForCausalLM": _PLAMO_3,
    "PLaMo3ForCausalLM": _PLAMO_3,
}

_LAYER = "model.layers.layers.*."


def _attention_layers(step: int, layers: int) -> list[bool]:
    """Return which layers have attention if one of ``step`` does."""
    if layers <= step // 2:
        return [i == layers - 1 for i in range(layers)]
    return [i % step == step // 2 for i in range(layers)]


def _set_mamba_step(meta: ModelMetadata, config: Json) -> None:
    """Set the period of layers with attention, and the sizes of both kinds (PLaMo 2)."""
    layers = meta.number(".block_count")
    attends = [bool(n) for n in meta.per_layer(".attention.head_count_kv")]
    has_mamba = meta.get(".attention.head_count_kv") is not None and not all(attends)
    first = attends.index(True) if True in attends else layers
    # The first attention layer is in the middle of the period; in models with fewer layers only the last has attention.
    steps = [
        step for step in (2 * first, 2 * first + 1, 2 * layers) if step and attends == _attention_layers(step, layers)
    ]
    if has_mamba and not steps:
        attention_layers = [i for i, is_attention in enumerate(attends) if is_attention]
        raise TypeNotSupported(
            f"{meta.path}: layers {attention_layers} have attention; config.json can only express a period",
            "QK-E305",
        )
    step = steps[0] if has_mamba else 2
    config |= {
        "mamba_enabled": has_mamba,
        "mamba_step": step,
        "num_attention_heads": max(meta.per_layer(".attention.head_count")),
        "num_key_value_heads": max(meta.per_layer(".attention.head_count_kv")),
        "attention_window_size": meta.number(".context_length"),  # llama.cpp has no window here
    }


def _set_rope_scaling_names(meta: ModelMetadata, config: Json) -> None:
    """Set the separate keys of rope scaling (PLaMo 3)."""
    rope = config.pop("rope_scaling", None) or {}
    config["rope_scaling_factor"] = rope.get("factor", 1)
    config["initial_context_length"] = rope.get("original_max_position_embeddings", meta.number(".context_length"))


CLASSES: dict[str, HfClass] = {
    "PlamoForCausalLM": HfClass(
        "plamo",
        add_prefix(
            _LAYER,
            "norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
            "mlp.down_proj",
        ),
        defaults={"n_shared_head": 8},
    ),
    "Plamo2ForCausalLM": HfClass(
        "plamo2",
        add_prefix(
            _LAYER,
            "pre_mixer_norm pre_mlp_norm post_mixer_norm.weight post_mlp_norm.weight mlp.gate_up_proj mlp.down_proj "
            "mixer.in_proj mixer.conv1d mixer.bcdt_proj mixer.dt_proj mixer.dt_norm.weight mixer.A_log mixer.D "
            "mixer.B_norm.weight mixer.C_norm.weight mixer.out_proj mixer.qkv_proj mixer.o_proj mixer.q mixer.k",
        ),
        config_setters=(_set_mamba_step,),
    ),
    "Plamo3ForCausalLM": HfClass(
        "plamo3",
        add_prefix(
            _LAYER,
            "pre_mixer_norm pre_mlp_norm post_mixer_norm.weight post_mlp_norm.weight mlp.gate_up_proj mlp.down_proj "
            "mixer.qkv_proj mixer.o_proj mixer.q_norm mixer.k_norm",
        ),
        keys={".rope.freq_base_swa": "rope_local_theta"},
        config_setters=(_set_rope_scaling_names,),
    ),
}
