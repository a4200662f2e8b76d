"""The architectures that are converted: one row for each class of transformers.

A row says what the model is called in GGUF, by which rules its tensors change on the way (``tensors``), which keys
follow the base ones (``keys``), and what kind of vocabulary it has (``vocab.WRITERS``). Facts of llama.cpp b11434,
conversion/*.py. A class that is like another is a name of the same row; what rows cannot say is a function named in
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.config import Config, read_json
from quantkit.checkpoint.expressions import Constant
from quantkit.checkpoint.keys import Keys, set_base_keys
from quantkit.checkpoint.tensors import Changed, Experts, Renamed, Rule, Split, Tensor, key_heads, query_heads
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.outputs import read_text

#: Sets keys of one architecture.
SetKeys = Callable[[Keys, Config], None]


@dataclass(frozen=True)
class Copied:
    """A key that is a value of config.json: of the first of ``names`` that is there and not null.

    ``kind`` is the method of ``Keys`` that writes it. ``needed``: an error without it; ``unless_zero``: only if it is
    something else.
    """

    key: str
    names: str
    kind: str = "u32"
    needed: bool = False
    unless_zero: bool = False

    def __call__(self, keys: Keys, config: Config) -> None:
        value: Any = config.find(*self.names.split())
        if value is None and self.needed:
            raise FormatError(f"{config.path}: it has no {self.names.replace(' ', ' or ')}")
        if value is not None and (value or not self.unless_zero):
            getattr(keys, self.kind)(self.key, value)


@dataclass(frozen=True)
class Architecture:
    """How checkpoints of some classes become a GGUF file."""

    arch: str
    #: Applied to names of stored tensors when files are indexed: they may only rename and drop.
    stored: tuple[Rule, ...] = ()
    #: Applied to tensors, in order.
    rules: tuple[Rule, ...] = ()
    #: The keys that most have, and those that follow them; ``base`` is the whole order of those that differ.
    base: Callable[[Keys, Config, int, int], None] = set_base_keys
    keys: tuple[SetKeys, ...] = ()
    #: A row of ``vocab.WRITERS``.
    vocab: str = "bpe"
    #: The number of layers in the file.
    layers: Callable[[Config], int] = field(default=lambda config: config.layers)
    #: Changes to the configuration before anything else.
    prepare: Callable[[Config], None] = field(default=lambda config: None)
    #: Tensors that are not stored; they come first.
    extra: Callable[[Config], Iterable[Tensor]] = field(default=lambda config: ())
    #: Keys that are set before general.type.
    early: tuple[SetKeys, ...] = ()


# ---------------------------------------------------------------- functions named in rows


def set_rope_width(keys: Keys, config: Config) -> None:
    """Rope turns whole heads (LlamaModel)."""
    keys.u32(".rope.dimension_count", config.head_dim)


def rope_factors(config: Config, factor: float = 8.0) -> Iterable[Tensor]:
    """The factors of Llama 3's rope, as a tensor (LlamaModel.generate_extra_tensors).

    torch computes a scalar divided by a tensor as the reciprocal times the scalar, in float32; so do we, and powers in
    float64, rounded: equal for all released models.
    """
    rope = config.full_rope
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return
    f32 = np.float32
    try:
        base = float(rope.get("rope_theta", 10000.0))
        factor = rope.get("factor", factor)
        low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
        length = rope.get("original_max_position_embeddings", 8192)
        long_wave, short_wave = length / low, length / high
        width = config.head_dim
        exponents = np.arange(0, width, 2, dtype=f32) / f32(width)
        frequencies = f32(1) / np.power(base, exponents.astype(np.float64)).astype(f32)
        values = []
        for frequency in frequencies:
            wave = f32(1) / frequency * f32(2 * math.pi)
            if wave < short_wave:
                values.append(1.0)
            elif wave > long_wave:
                values.append(float(factor))
            else:
                smooth = (f32(1) / wave * f32(length) - f32(low)) / f32(high - low)
                inverse = (f32(1) - smooth) / f32(factor) + smooth
                values.append(float(f32(1) / inverse))
    except (TypeError, ValueError, ZeroDivisionError) as e:
        raise FormatError(f"{config.path}: rope of Llama 3 with values that are none: {e}") from None
    yield Tensor("rope_freqs.weight", Constant(tuple(values)), None, "rope_freqs.weight")


def _listed(path: Path) -> list[Any]:
    try:
        found = json.loads(read_text(path).decode())
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}") from None
    return found if isinstance(found, list) else []


_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}


def set_pooling(keys: Keys, config: Config) -> None:
    """How tokens become one embedding, where the model is made for that (TextModel._try_set_pooling_type)."""
    folder = config.path.parent
    modules = folder / "modules.json"
    listed = _listed(modules) if modules.is_file() else []
    pools = (m for m in listed if isinstance(m, dict) and str(m.get("type", "")).endswith("Pooling"))
    module = next(pools, None)
    if module is not None:
        path = folder / str(module.get("path", "")) / "config.json"
        pooling = read_json(path)
        chosen = (
            k
            for name, k in (("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "lasttoken"))
            if pooling.get(f"pooling_mode_{name}")
        )
        found = next(chosen, pooling.get("pooling_mode"))
        if found not in _POOLING:
            raise FormatError(f"{path}: only the pooling of {', '.join(_POOLING)} is known")
        keys.u32(".pooling_type", _POOLING[found])
    if (classifier := config.get("classifier_pooling")) is not None:
        if classifier not in ("cls", "mean"):
            raise FormatError(f"{config.path}: classifier_pooling is {classifier!r}; known are cls and mean")
        keys.u32(".classifier.pooling_type", _POOLING[classifier])


# ---------------------------------------------------------------- rules that several rows have

_ROPE_PERMUTED = (
    Changed(r"q_proj\.(weight|bias)$", query_heads),
    Changed(r"k_proj\.(weight|bias)$", key_heads),
)
_MIXTRAL_EXPERTS = Experts(
    weights=("w1", "w2", "w3"),
    name="model.layers.{layer}.block_sparse_moe.experts.{expert}.{weight}.weight",
    merged="layers.{layer}.feed_forward.experts.{weight}.weight",
)
#: Experts that are stored as one tensor already; gate and up in one.
_FUSED_EXPERTS = (
    Renamed(r"(mlp\.experts\.down_proj)$", r"\1.weight"),
    Split(
        r"mlp\.experts\.gate_up_proj(\.weight)?$", ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"), -2
    ),
)
#: Experts of Qwen and those like it: each on its own, or all in one.
QWEN_EXPERTS = (*_FUSED_EXPERTS, Experts())

_EXPERT_WIDTHS = (
    Copied(".expert_feed_forward_length", "moe_intermediate_size", "count"),
    Copied(".expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
_LLAMA_KEYS: tuple[SetKeys, ...] = (Copied(".vocab_size", "vocab_size", needed=True), set_rope_width)

_LLAMA = Architecture(
    "llama",
    stored=(Renamed(r"text_model\.", ""),),
    rules=(*_ROPE_PERMUTED, _MIXTRAL_EXPERTS),
    keys=_LLAMA_KEYS,
    vocab="llama",
    extra=rope_factors,
)
_QWEN2 = Architecture("qwen2", keys=(set_pooling,), vocab="sentencepiece or bpe")
_QWEN3 = Architecture("qwen3", keys=(set_pooling,), vocab="sentencepiece or bpe")

#: Class of transformers -> how it is converted.
ROWS: dict[str, Architecture] = {
    **dict.fromkeys(("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _LLAMA),
    "IQuestCoderForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", rules=QWEN_EXPERTS, keys=_EXPERT_WIDTHS),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", rules=QWEN_EXPERTS, keys=_EXPERT_WIDTHS),
}


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = ROWS.get(config.architecture)
    if row is not None:
        return row
    near = get_close_matches(config.architecture, ROWS, 3)
    like = f"; there are {', '.join(near)}" if near else ""
    raise TypeNotSupported(
        f"{config.path}: {config.architecture} is not converted by this version{like}: `quantkit convert --list` shows "
        "all that are"
    )
