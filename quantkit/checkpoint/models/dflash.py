"""DFlash, DFlash 2 and DSpark: drafts of a block of tokens at once, for targets of any class.

Facts of llama.cpp b11434, conversion/qwen.py and conversion/gemma.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.draft import IDS, WriteTargetIds, merge_layer_config, put_ids_last, target_of
from quantkit.checkpoint.expressions import Constant, Expression, Shaped, Stored, cast, concatenate, restore_heads, take
from quantkit.checkpoint.key_rows import Always, Computed, Copied, SetKeys
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.models.qwen import QWEN3
from quantkit.checkpoint.quantized.scheme import DecodedTensors
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import AssignKind, Drop, Rename, Transform
from quantkit.checkpoint.tensors import Context, Tensor
from quantkit.checkpoint.vocab.tokenizer import Vocabulary
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor
from quantkit.formats.torch_file import read_torch_file

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "model.lm_head.weight"
_MASK_FILE = "mask_embedding.pt"


def _settings(config: Config) -> Json:
    """Return dflash_config."""
    return config.table("dflash_config") if "dflash_config" in config else {}


def _setting(config: Config, key: str) -> Any:
    """Return a value of dflash_config, or else of the root; None if both lack it."""
    settings = _settings(config)
    return settings[key] if key in settings else config.get(key)


def _from_settings(key: str, name: str, kind: str = "u32") -> Computed:
    """Return the row of a value that only dflash_config has."""
    return Computed(key, lambda config: _settings(config).get(name), kind)


def write_target_vocab(v: Vocabulary) -> None:
    """Write the vocabulary of the target as for a model of its class, and the token of masks (DFlashModel)."""
    target_of(v.config).write_vocab(v)
    if (mask := _settings(v.config).get("mask_token_id")) is not None:
        v.keys.u32("tokenizer.ggml.mask_token_id", mask)


def _rotary_width(config: Config) -> int | None:
    part = config.rope.get("partial_rotary_factor")
    return None if part is None else int(config.head_dim * config.rotary_part(None))


def _cap(config: Config) -> float | None:
    cap = _setting(config, "final_logit_softcapping")
    return float(cap) if cap is not None and float(cap) > 0 else None


def _embedding_scale(config: Config) -> float | None:
    """Return the factor of the target's embeddings: Gemma has one that its configuration does not state."""
    scale = _setting(config, "input_embedding_scale")
    target = target_of(config).config
    if scale is None and target.architecture.startswith("Gemma"):
        return math.sqrt(target.number("hidden_size"))
    return None if scale is None else float(scale)


def _target_layers(config: Config) -> list[int]:
    """Return the target's layers whose inputs are read; the configuration has those whose outputs are."""
    return [layer + 1 for layer in _setting(config, "target_layer_ids") or []]


def _write_window(keys: Keys, config: Config) -> None:
    settings = _settings(config)
    everywhere = bool(settings.get("use_swa", False))
    window = settings.get("swa_window_size") or config.get("sliding_window")
    if (config.get("use_sliding_window", False) or everywhere) and window:
        kinds = config.get("layer_types") or []
        keys.u32(".attention.sliding_window", window)
        pattern = [True] * keys.layers if everywhere else [kind == "sliding_attention" for kind in kinds]
        keys.array(".attention.sliding_window_pattern", pattern)


def _is_causal(config: Config) -> bool | None:
    causal = config.get("is_causal")
    return _settings(config).get("causal") if causal is None else causal


def _sections(config: Config) -> list[int] | None:
    """Return the sections of a rope that has positions in time only, if the target's has several."""
    raw = target_of(config).raw
    text = raw.get("text_config", raw)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return [config.head_dim // 2, 0, 0, 0] if "mrope_section" in rope else None


DFLASH_KEYS: tuple[SetKeys, ...] = (
    *QWEN3.keys,
    Computed(".rope.dimension_count", _rotary_width),
    _from_settings(".attention.value_scale", "attention_value_scale", "f32"),
    Computed(".block_size", lambda config: 16 if (n := _setting(config, "block_size")) is None else n),
    *(_from_settings(f".{name}", name) for name in ("conv_kernel_size", "conv_group_size", "selector_rank")),
    _from_settings(".selector_top_k", "selector_top_k"),
    Computed(".logit_scale", lambda config: _setting(config, "output_multiplier"), "f32"),
    Computed(".final_logit_softcapping", _cap, "f32"),
    Computed(".embedding_scale", _embedding_scale, "f32"),
    Computed(".target_layers", _target_layers, "array"),
    _write_window,
    Computed(".attention.causal", _is_causal, "flag"),
    Computed(".rope.dimension_sections", _sections, "array"),
)


def _even_rows_first(tensor: Tensor, context: Context) -> Expression:
    """Return the rows of each head with even numbers, then those with odd ones, unless they have this order."""
    config = context.config
    if config.get("rope_is_neox_style", True):
        return tensor.x
    width, rows = config.number("head_dim"), tensor.x.shape[0]
    if width < 2 or width % 2 or rows % width:
        raise ValueError(f"its rows are not those of heads of {width}")
    return restore_heads(tensor.x, rows // width)


def _embedding_is_unused(config: Config) -> bool:
    return not config.get("has_embed_tokens", True)


# --- the vector of masks ---------------------------------------------------------------------------------------------


def read_mask(config: Config) -> StoredTensor | None:
    """Return the embedding of masks in mask_embedding.pt, which replaces that of the target; None without the file.

    Raises FormatError: the file is not one of torch.save with ``mask_token_id`` and ``embedding``, or not this model's.
    """
    path, mask_id = config.path.parent / _MASK_FILE, _settings(config).get("mask_token_id")
    if not path.is_file():
        return None
    saved = read_torch_file(path)
    vector = saved.get("embedding") if isinstance(saved, dict) else None
    if not isinstance(vector, StoredTensor) or vector.dtype not in ("F32", "F16", "BF16"):
        raise FormatError(f"{path}: has no embedding, a tensor of floats", "QK-E110")
    if type(mask_id) is not int or saved.get("mask_token_id") != mask_id:
        raise FormatError(
            f"{path}: is of token {short(saved.get('mask_token_id'))}, but mask_token_id of {config.path.name} is "
            f"{short(mask_id)}",
            "QK-E207",
        )
    if vector.shape != (config.number("hidden_size"),) or not 0 <= mask_id < config.number("vocab_size"):
        raise FormatError(
            f"{path}: its embedding of token {mask_id} has the shape {list(vector.shape)}, which does not fit "
            f"{config.path.name}",
            "QK-E106",
        )
    return replace(vector, name="embedding")


def put_mask(weights: DecodedTensors, config: Config) -> DecodedTensors:
    """Return the tensors with the target's head and its embeddings, in which masks have their own, first."""
    weights = put_ids_last(weights, config)
    if (mask := read_mask(config)) is None:
        return weights
    target, tensors, first = target_of(config), dict(weights.tensors), dict[str, Expression]()
    if _HEAD not in tensors:
        tied = target.config.get("tie_word_embeddings", False)
        first[_HEAD] = Stored(target.tensor(_EMBEDDING if tied else "lm_head.weight"))
    embeddings = tensors.pop(_EMBEDDING, None) or Stored(target.tensor(_EMBEDDING))
    rows, width = config.number("vocab_size"), config.number("hidden_size")
    if embeddings.shape != (rows, width):
        raise FormatError(
            f"{target.folder}: tensor {_EMBEDDING} has the shape {list(embeddings.shape)}, but {config.path} has "
            f"{rows} tokens of {width} values: it is another model's",
            "QK-E207",
        )
    number = _settings(config)["mask_token_id"]
    row = Shaped(cast(Stored(mask), embeddings.type), (1, width))
    parts = [take(embeddings, 0, range(number)), row, take(embeddings, 0, range(number + 1, rows))]
    first[_EMBEDDING] = concatenate([part for part in parts if part.shape[0]])
    config.values["has_embed_tokens"] = True
    return replace(weights, tensors=first | tensors)


DFLASH = Architecture(
    "dflash",
    stored=(Rename(r"^(?!model\.)", "model."), Rename(r"^(.*sink.*(?<!\.weight))$", r"\1.weight")),
    rules=(
        Drop(r"^model\.embed_tokens\.weight$", _embedding_is_unused),
        Transform(r"self_attn\.[qk]_(proj|norm)\.weight$", _even_rows_first, None),
        Rename(r"^(model\.candidate_selector\.(predecessor|successor)_codebook)$", r"\1.weight"),
    ),
    keys=DFLASH_KEYS,
    vocab=write_target_vocab,
    reorder=put_mask,
    draft=True,
)


# --- DSpark: DFlash whose tokens depend on the one before, by a table ------------------------------------------------


def _has_full_vocab(config: Config) -> bool:
    return bool((config.get("draft_vocab_size") or config.number("vocab_size")) == config.number("vocab_size"))


def _prepare_dspark(config: Config) -> None:
    """Move the settings of vLLM's speculators, and those at the root, to dflash_config (DSparkModel.__init__)."""
    from_anchor = not {"transformer_layer_config", "aux_hidden_state_layer_ids"} & config.values.keys()
    values = {"sample_from_anchor": from_anchor, **config.values}
    merge_layer_config(config)
    config.values["sample_from_anchor"] = values["sample_from_anchor"]
    if "aux_hidden_state_layer_ids" in config:
        layers = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
        settings: Json = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": layers}
    else:
        settings = {key: config[key] for key in ("target_layer_ids", "mask_token_id") if key in config}
    config.values.setdefault("dflash_config", settings)
    _refuse(config, config.get("markov_head_type", "vanilla") != "vanilla", "markov_head_type")
    size, own_size = config.number("vocab_size"), config.get("draft_vocab_size") or 0
    if own_size > size:
        raise FormatError(
            f"{config.path}: draft_vocab_size is {short(own_size)}, more than vocab_size {size}", "QK-E112"
        )


def _refuse(config: Config, condition: bool, key: str) -> None:
    """Raise TypeNotSupported for a value that runtimes do not have, if ``condition``."""
    if condition:
        raise TypeNotSupported(
            f"{config.path}: {key} is {short(_setting(config, key))}, which no runtime runs", "QK-E305"
        )


def _find_confidence(config: Config, names: Collection[str]) -> None:
    """Find out from the tensors' names whether there is a head of confidence."""
    config.values["has_confidence_head"] = any("confidence_head.proj" in name for name in names)


def _put_ids(weights: DecodedTensors, config: Config) -> DecodedTensors:
    """Return the tensors as ``put_mask`` does. Raises FormatError without the table that a reduced vocabulary needs."""
    ids = f"model.{IDS}"
    if not _has_full_vocab(config) and ids not in weights.tensors:
        raise FormatError(
            f"{config.path.parent}: has no tensor {IDS}, which maps the {config['draft_vocab_size']} tokens of "
            "draft_vocab_size to the target's",
            "QK-E105",
        )
    return put_mask(replace(weights, tensors={IDS if n == ids else n: x for n, x in weights.tensors.items()}), config)


DSPARK_KEYS: tuple[SetKeys, ...] = (
    *DFLASH_KEYS,
    Copied(".sample_from_anchor", "sample_from_anchor", "flag", required=True),
    Copied(".has_confidence_head", "has_confidence_head", "flag", required=True),
)
DSPARK = replace(
    DFLASH,
    stored=(Drop(r"^t2d$"), *DFLASH.stored),
    rules=(
        WriteTargetIds(lambda config: config.number("vocab_size")),
        Drop(r"lm_head\.weight$", _has_full_vocab),
        *DFLASH.rules,
    ),
    keys=DSPARK_KEYS,
    patch_config=_prepare_dspark,
    inspect_tensors=_find_confidence,
    reorder=_put_ids,
)


# --- Gemma 4's DSpark: keys are values, all layers have full attention -----------------------------------------------

_ACTIVATION = "gelu_pytorch_tanh"


def _prepare_gemma4(config: Config) -> None:
    """Check the settings that runtimes fix, and set the rope, which has its own defaults (Gemma4DSparkModel)."""
    _refuse(config, not config.get("attention_k_eq_v", False), "attention_k_eq_v")
    _refuse(config, config.get("layer_types") != ["full_attention"] * config.layers, "layer_types")
    _refuse(config, config.get("hidden_activation", _ACTIVATION) != _ACTIVATION, "hidden_activation")
    for key in ("attention_bias", "enable_moe_block", "final_logit_softcapping"):
        _refuse(config, bool(config.get(key, False)), key)
    _refuse(config, not _has_full_vocab(config), "draft_vocab_size")
    _refuse(config, (_setting(config, "markov_head_type") or "vanilla") != "vanilla", "markov_head_type")
    for key in ("mask_token_id", "target_layer_ids"):
        if not _setting(config, key) and _setting(config, key) != 0:
            raise FormatError(f"{config.path}: has no {key}", "QK-E112")
    rope = config.get("rope_parameters") or {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    config.rope = rope.get("full_attention", rope)
    _refuse(config, config.rope.get("rope_type") not in ("default", "proportional"), "rope_parameters")


def _find_gemma4_tensors(config: Config, names: Collection[str]) -> None:
    """Find out from the tensors' names whether there is a head of confidence, and one for tokens."""
    config.values["has_confidence_head"] = any("confidence_proj." in n or "confidence_head.proj" in n for n in names)
    if not {"lm_head.weight", _HEAD} & set(names) and config.get("tie_word_embeddings") is not True:
        raise FormatError(
            f"{config.path.parent}: has no lm_head.weight, and tie_word_embeddings is not true", "QK-E105"
        )


def _write_gemma4_vocab(v: Vocabulary) -> None:
    write_target_vocab(v)
    v.keys.u32("tokenizer.ggml.mask_token_id", _setting(v.config, "mask_token_id"))


def _gemma4_rope(config: Config) -> Iterable[Tensor]:
    """Yield rope factors of partial rotation: ggml rotates the rest by almost 0."""
    if config.rope["rope_type"] != "proportional":
        return
    width, part = config.number("global_head_dim"), config.rotary_part(0.25)
    turned = int(width * part / 2)
    if not part or width * part != 2 * turned:
        raise FormatError(f"{config.path}: partial_rotary_factor is {part}, of heads of {width}", "QK-E112")
    yield Tensor(
        "rope_freqs.weight", Constant((1.0,) * turned + (1e30,) * (width // 2 - turned)), None, "rope_freqs.weight"
    )


def _global_head(key: str) -> Copied:
    return Copied(key, "global_head_dim", required=True)


_GEMMA4 = replace(
    DFLASH,
    stored=(
        *DFLASH.stored,
        Rename(r"\.layer_scalar$", ".layer_scalar.weight"),
        Rename(r"^model\.confidence_proj\.", "model.confidence_head.proj."),
    ),
    rules=(
        AssignKind(
            r"\.post_attention_layernorm\.weight$",
            "*post_attention_norm",
            ".weight",
            "model.layers.*.post_attention_layernorm.weight",
        ),
        AssignKind(
            r"\.pre_feedforward_layernorm\.weight$",
            "*ffn_norm",
            ".weight",
            "model.layers.*.pre_feedforward_layernorm.weight",
        ),
        *DFLASH.rules,
    ),
    keys=(
        *DFLASH_KEYS,
        Copied(".attention.head_count_kv", "num_global_key_value_heads", required=True),
        *map(_global_head, (".attention.key_length", ".attention.value_length", ".rope.dimension_count")),
        Computed(".embedding_scale", lambda config: math.sqrt(config.number("hidden_size")), "f32"),
        Always(".attention.scale", 1.0, "f32"),
        Always(".hidden_activation", _ACTIVATION, "text"),
        Copied(".sample_from_anchor", "sample_from_anchor", "flag", default=True),
        Copied(".has_confidence_head", "has_confidence_head", "flag", required=True),
    ),
    vocab=_write_gemma4_vocab,
    patch_config=_prepare_gemma4,
    inspect_tensors=_find_gemma4_tensors,
    synthetic=_gemma4_rope,
    reorder=put_ids_last,
)

ARCHITECTURES: dict[str, Architecture] = {
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH,
    **dict.fromkeys(
        ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel", "LingDSparkModel"), DSPARK
    ),
    "Gemma4DSparkModel": _GEMMA4,
}
