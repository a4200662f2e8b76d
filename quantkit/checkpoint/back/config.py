"""config.json of what a GGUF file says: the keys of a row (``keys``), read backwards.

What a class gives a key of many names is the one that its configuration has (``class_defaults``). Whatever is made here
is read by the way here again (``check_keys``), so a key that it does not carry is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.back.said import Said, plain
from quantkit.checkpoint.back.spelling import Spelling
from quantkit.checkpoint.class_defaults import DEFAULTS
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.expressions import read_f32
from quantkit.checkpoint.families import llama
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import Architecture, Copied
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
_UNSAID = frozenset((".vocab_size", ".attention.causal"))
#: Special tokens of config.json -> what their keys are called.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "sep": "seperator"}
_EVERY = ("bos", "eos", "pad")
#: Rope of Llama 3: what released models have of low_freq_factor, high_freq_factor and the original context. The last is
#: Step 3.5's.
_ROPE_FACTORS = (
    *((low, high, length) for length in (8192, 4096, 32768) for low, high in ((1, 4), (1, 1), (1, 2))),
    (1, 32, 131072),
)
_MOST_LAYERS = 1 << 16
_FREQUENCIES = "rope_freqs.weight"


def make_config(said: Said, name: str, row: Architecture, spelling: Spelling, dtype: str) -> Json:
    """Return the configuration of the text model of a file as the class ``name``; values have the dtype ``dtype``."""
    for key in (".block_count", ".n_deepstack_layers"):
        if isinstance(count := said.get(key), int) and count > _MOST_LAYERS:
            raise FormatError(f"{said.where}: key {said.arch}{key} is {count}: more layers than any model has")
    known = DEFAULTS.get(spelling.model_type, {})
    config: Json = {"architectures": [name], "model_type": spelling.model_type}
    copied = {each.key: each.names for each in row.keys if isinstance(each, Copied)}
    for key, names in {**_USUAL, **copied, **spelling.keys}.items():
        if key != _GATING and names and (value := said.get(key)) is not None:
            config[_known(names, known)] = value
    if (
        (width := said.get(".rope.dimension_count")) is not None
        and llama.set_rope_width in row.keys
        and (width != said.head)
    ):
        config.setdefault("head_dim", width)
    how = spelling.keys.get(_GATING, _known("scoring_func score_function score_func", known))
    _set_gating(config, how, said.get(_GATING))
    if (scaling := _rope_scaling(said, row, config)) is not None:
        config["rope_scaling"] = scaling
    config["vocab_size"] = _vocab_size(said.model)
    config["tie_word_embeddings"] = not said.has("output.weight")
    for flag in spelling.biases:
        parts = ("attn_q", "attn_output") if flag == "attention_bias" else ("ffn_up",)
        config[flag] = any(said.has(f"{part}.bias") for part in parts)
    config = {**spelling.otherwise, **config}
    for derive in spelling.derived:
        derive(said, config)
    config = {**token_ids(said.model), **config} | {"torch_dtype": dtype, "quantkit_version": __version__}
    return {key: value for key, value in config.items() if value is not None or key not in spelling.not_null}


def token_ids(model: GGUFFile) -> Json:
    """Return the ids of special tokens that a configuration names; of those that every class has, null for none."""
    found = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    return {f"{name}_token_id": number for name, number in found.items() if number is not None or name in _EVERY}


def nested(config: Json, spelling: Spelling) -> Json:
    """Return config.json: the configuration of the text model, or that within one of a whole."""
    if not spelling.inside:
        return config
    apart = ("architectures", "torch_dtype", "quantkit_version", "vision_config", "backbone_hidden_size")
    outer = {key: config.pop(key) for key in apart if key in config}
    outer |= spelling.beside | {"tie_word_embeddings": config["tie_word_embeddings"], spelling.inside: config}
    return outer


def _known(names: str, known: Mapping[str, Any]) -> str:
    listed = names.split()
    return next((name for name in listed if name in known), listed[0])


def _vocab_size(model: GGUFFile) -> int:
    embeddings = model.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise FormatError(f"{model.paths[0]}: it has no token_embd.weight, so it is no whole model")
    return embeddings.shape[1]


def _set_gating(config: Json, key: str, number: Any) -> None:
    name = next((name for name, value in GATING.items() if value == number), None)
    if key and name is not None:
        config[key] = name


def _rope_scaling(said: Said, row: Architecture, config: Json) -> Json | None:
    get = said.get
    kind, found = get(".rope.scaling.type"), None
    if kind in ("linear", "yarn"):
        given = {
            "factor": ".rope.scaling.factor",
            "original_max_position_embeddings": ".rope.scaling.original_context_length",
            "extrapolation_factor": ".rope.scaling.yarn_ext_factor",
            "attention_factor": ".rope.scaling.yarn_attn_factor",
            "beta_fast": ".rope.scaling.yarn_beta_fast",
            "beta_slow": ".rope.scaling.yarn_beta_slow",
        }
        values = {name: get(key) for name, key in given.items()}
        found = {"rope_type": kind, **{name: value for name, value in values.items() if value is not None}}
    elif kind not in (None, "none", "longrope"):
        raise TypeNotSupported(f"{said.where}: rope scaled by {short(kind)} is not exported by this version")
    elif said.has(_FREQUENCIES) and get(".attention.key_length_swa") is None:
        found = _llama3_rope(said, row, config)
    if (sections := get(".rope.dimension_sections")) is not None:
        found = {"rope_type": "default", **(found or {}), "mrope_section": sections[:3]}
    return found


def _llama3_rope(said: Said, row: Architecture, config: Json) -> Json:
    """Return the parameters that make just these factors (``row.extra``)."""
    values = said.model.data(_FREQUENCIES).view(np.float32)
    factor = float(values.max())
    for low, high, length in _ROPE_FACTORS:
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": float(low),
            "high_freq_factor": float(high),
            "original_max_position_embeddings": length,
        }
        tried = {"rope_theta": 10000.0, "head_dim": 2 * values.size, **config, "rope_scaling": rope}
        made = [t.x for t in row.extra(Config(Path("config.json"), tried)) if t.name_in_file == _FREQUENCIES]
        if made and np.array_equal(read_f32(made[0], 0, values.size), values):
            return rope
    raise TypeNotSupported(
        f"{said.where}: tensor {_FREQUENCIES}: its factors are none that config.json of Llama 3 can say"
    )


def check_keys(model: GGUFFile, row: Architecture, config: Config) -> list[str]:
    """Read a configuration as the way here does, and return what it says beyond the file, as notes.

    Raises TypeNotSupported for keys of the architecture that it does not say, or says otherwise.
    """
    keys = Keys(row.arch, config.path)
    for write in row.early:
        write(keys, config)
    row.base(keys, config, row.layers(config), 0)
    for write in row.keys:
        write(keys, config)
    own = {key: field for key, field in model.fields.items() if key.startswith(f"{row.arch}.")}
    lost = [key for key in own if not _is_said(key, own[key], keys.fields, row.arch)]
    causal = f"{row.arch}.attention.causal"
    if config.architecture.endswith("ForCausalLM") and model.get(causal) is False:
        lost.append(causal)
    if lost:
        raise TypeNotSupported(
            f"{model.paths[0]}: key {lost[0]} = {short(plain(own[lost[0]].value))} cannot be said in config.json of "
            f"{config.architecture}{_more(lost[1:])}; the checkpoint would compute something else"
        )
    added = [key for key in keys.fields if key.startswith(f"{row.arch}.") and key not in own]
    return [f"converted again, it also says {', '.join(sorted(added))}"] if added else []


def _is_said(key: str, field: Field, said: Mapping[str, Field], arch: str) -> bool:
    if key.removeprefix(arch) in _UNSAID:
        return True
    found = said.get(key)
    if found is None:
        return False
    return bool(_flat(plain(found.value)) == _flat(plain(field.value)))


def _flat(value: Any) -> Any:
    """Return a list of one value repeated, one for each layer, as that value."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _more(keys: Iterable[str]) -> str:
    rest = list(keys)
    return f" (nor {', '.join(rest[:4])})" if rest else ""
