"""config.json from the metadata of a GGUF file: the key rules of an architecture, inverted.

What a class gives a key of many names is the one that its configuration has (``class_defaults``). Whatever is made here
is read by the way here again (``check_keys``), so a key that it does not carry is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.checkpoint.class_defaults import DEFAULTS
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata, plain
from quantkit.checkpoint.export.llama3_rope import FREQUENCIES, llama3_rope
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.models import llama
from quantkit.checkpoint.row import Architecture, Copied, HfClass
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile
from quantkit.formats.gguf.rules import short
from quantkit.version import __version__

#: Key -> names in config.json, as in ``keys.set_base_keys``; of several the first that the class knows.
_USUAL = {
    ".block_count": "num_hidden_layers n_layer",
    ".context_length": "max_position_embeddings n_positions",
    ".embedding_length": "hidden_size n_embd",
    ".feed_forward_length": "intermediate_size n_inner",
    ".attention.head_count": "num_attention_heads n_head",
    ".attention.head_count_kv": "num_key_value_heads",
    ".rope.freq_base": "rope_theta",
    ".rope.freq_base_swa": "rope_local_base_freq",
    ".attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    ".attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon",
    ".expert_count": "num_local_experts num_experts n_routed_experts",
    ".expert_used_count": "num_experts_per_tok num_experts_per_token top_k_experts",
    ".expert_group_count": "n_group",
    ".expert_group_used_count": "topk_group",
    ".attention.key_length": "head_dim",
    ".attention.sliding_window": "sliding_window",
    ".attention.kv_lora_rank": "kv_lora_rank",
    ".attention.q_lora_rank": "q_lora_rank",
    ".attention.clamp_kqv": "clip_qkv",
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
    ".expert_feed_forward_length": "moe_intermediate_size",
    ".expert_shared_count": "n_shared_experts",
    ".expert_weights_norm": "norm_topk_prob",
    ".expert_weights_scale": "routed_scaling_factor",
    ".leading_dense_block_count": "first_k_dense_replace",
    ".nextn_predict_layers": "num_nextn_predict_layers",
    ".embedding_length_per_layer_input": "hidden_size_per_layer_input",
    ".full_attention_interval": "full_attention_interval",
    ".rope.scaling.original_context_length": "original_max_position_embeddings",
    ".use_parallel_residual": "use_parallel_residual",
}
_GATING = ".expert_gating_func"
#: Keys that the class says by itself, or no runtime reads.
_IGNORED_KEYS = frozenset((".vocab_size", ".attention.causal"))
#: Special tokens of config.json -> their GGUF keys.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "sep": "seperator", "mask": "mask"}
_ALWAYS_IN_CONFIG = ("bos", "eos", "pad")
_MOST_LAYERS = 1 << 16


def make_config(meta: ModelMetadata, name: str, row: Architecture, hf_class: HfClass, dtype: str) -> Json:
    """Return the configuration of the text model of a file as the class ``name``; values have the dtype ``dtype``."""
    for key in (".block_count", ".n_deepstack_layers"):
        if isinstance(count := meta.get(key), int) and count > _MOST_LAYERS:
            raise FormatError(
                f"{meta.path}: key {meta.arch}{key} is {count}: more layers than any model has", "QK-E123"
            )
    class_defaults = DEFAULTS.get(hf_class.model_type, {})
    config: Json = {"architectures": [name], "model_type": hf_class.model_type}
    copied = {key.key: key.names for key in row.keys if isinstance(key, Copied)}
    for key, names in {**_USUAL, **copied, **hf_class.keys}.items():
        if key != _GATING and names and (value := meta.get(key)) is not None:
            config[_known_name(names, class_defaults)] = value
    if (
        (width := meta.get(".rope.dimension_count")) is not None
        and llama.set_rope_width in row.keys
        and (width != meta.head_width)
    ):
        config.setdefault("head_dim", width)
    gating_key = hf_class.keys.get(_GATING, _known_name("scoring_func score_function score_func", class_defaults))
    _set_gating(config, gating_key, meta.get(_GATING))
    if (scaling := _rope_scaling(meta, row, config)) is not None:
        config["rope_scaling"] = scaling
    config["vocab_size"] = _vocab_size(meta.model)
    config["tie_word_embeddings"] = not meta.has("output.weight")
    config = {**hf_class.defaults, **config}
    for derive in hf_class.config_setters:
        derive(meta, config)
    config = {**token_ids(meta.model), **config} | {"torch_dtype": dtype, "quantkit_version": __version__}
    return {key: value for key, value in config.items() if value is not None or key not in hf_class.not_null}


def token_ids(model: GGUFFile) -> Json:
    """Return the ids of special tokens that a configuration names; of those that every class has, null for none."""
    ids = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    return {
        f"{name}_token_id": number for name, number in ids.items() if number is not None or name in _ALWAYS_IN_CONFIG
    }


def nest_text_config(config: Json, hf_class: HfClass) -> Json:
    """Return config.json: the configuration of the text model, or that within one of a whole."""
    if not hf_class.text_key:
        return config
    outer_keys = ("architectures", "torch_dtype", "quantkit_version", "vision_config", "backbone_hidden_size")
    outer = {key: config.pop(key) for key in outer_keys if key in config}
    outer |= hf_class.outer | {"tie_word_embeddings": config["tie_word_embeddings"], hf_class.text_key: config}
    return outer


def _known_name(names: str, class_defaults: Mapping[str, Any]) -> str:
    candidates = names.split()
    return next((name for name in candidates if name in class_defaults), candidates[0])


def _vocab_size(model: GGUFFile) -> int:
    embeddings = model.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise FormatError(f"{model.paths[0]}: it has no token_embd.weight, so it is no whole model", "QK-E105")
    return embeddings.shape[1]


def _set_gating(config: Json, key: str, number: Any) -> None:
    name = next((name for name, value in GATING.items() if value == number), None)
    if key and name is not None:
        config[key] = name


def _rope_scaling(meta: ModelMetadata, row: Architecture, config: Json) -> Json | None:
    get = meta.get
    kind, rope = get(".rope.scaling.type"), None
    if kind in ("linear", "yarn"):
        yarn_keys = {
            "factor": ".rope.scaling.factor",
            "original_max_position_embeddings": ".rope.scaling.original_context_length",
            "extrapolation_factor": ".rope.scaling.yarn_ext_factor",
            "attention_factor": ".rope.scaling.yarn_attn_factor",
            "beta_fast": ".rope.scaling.yarn_beta_fast",
            "beta_slow": ".rope.scaling.yarn_beta_slow",
        }
        values = {name: get(key) for name, key in yarn_keys.items()}
        rope = {"rope_type": kind, **{name: value for name, value in values.items() if value is not None}}
    elif kind not in (None, "none", "longrope"):
        raise TypeNotSupported(f"{meta.path}: rope scaled by {short(kind)} is not exported by this version", "QK-E305")
    elif meta.has(FREQUENCIES) and get(".attention.key_length_swa") is None:
        rope = llama3_rope(meta, row, config)
    if (sections := get(".rope.dimension_sections")) is not None:
        rope = {"rope_type": "default", **(rope or {}), "mrope_section": sections[:3]}
    return rope


def check_keys(model: GGUFFile, row: Architecture, config: Config) -> list[str]:
    """Convert a configuration back to keys; return notes on keys that the file does not have.

    Raises TypeNotSupported for keys of the architecture that it does not say, or says otherwise.
    """
    keys = Keys(row.arch, config.path)
    for write in row.head_keys:
        write(keys, config)
    row.base(keys, config, row.layers(config), 0)
    for write in row.keys:
        write(keys, config)
    arch_fields = {key: field for key, field in model.fields.items() if key.startswith(f"{row.arch}.")}
    missing_keys = [key for key in arch_fields if not _has_value(key, arch_fields[key], keys.fields, row.arch)]
    causal = f"{row.arch}.attention.causal"
    if config.architecture.endswith("ForCausalLM") and model.get(causal) is False:
        missing_keys.append(causal)
    if missing_keys:
        raise TypeNotSupported(
            f"{model.paths[0]}: key {missing_keys[0]} = {short(plain(arch_fields[missing_keys[0]].value))} cannot "
            "be said in config.json of "
            f"{config.architecture}{_list_rest(missing_keys[1:])}; the checkpoint would compute something else",
            "QK-E305",
        )
    added = [key for key in keys.fields if key.startswith(f"{row.arch}.") and key not in arch_fields]
    return [f"converted again, it also says {', '.join(sorted(added))}"] if added else []


def _has_value(key: str, field: Field, meta: Mapping[str, Field], arch: str) -> bool:
    if key.removeprefix(arch) in _IGNORED_KEYS:
        return True
    converted = meta.get(key)
    if converted is None:
        return False
    return bool(_flat(plain(converted.value)) == _flat(plain(field.value)))


def _flat(value: Any) -> Any:
    """Return a list of one value repeated, one for each layer, as that value."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def _list_rest(keys: Iterable[str]) -> str:
    first_keys = list(keys)
    return f" (nor {', '.join(first_keys[:4])})" if first_keys else ""
