"""config.json of what a GGUF file says: the keys of a row (``keys``), read backwards.

What a class gives a key of many names is the one that its configuration has (``class_defaults``). Whatever is made here
is read by the way here again (``check_keys``), so a key that it does not carry is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.back.classes import Spelling
from quantkit.checkpoint.class_defaults import DEFAULTS, with_defaults
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.families import llama
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.checkpoint.row import Architecture, Copied
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile, ValueType
from quantkit.formats.gguf.rules import short
from quantkit.version import __version__

#: Key -> names in config.json, as in ``keys.set_base_keys``; of several the first that the class knows.
_BASE = {
    ".block_count": "num_hidden_layers",
    ".context_length": "max_position_embeddings",
    ".embedding_length": "hidden_size",
    ".feed_forward_length": "intermediate_size",
    ".attention.head_count": "num_attention_heads",
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
}
#: Keys that the class says by itself, or no runtime reads.
_UNSAID = frozenset((".vocab_size", ".attention.causal"))
#: Rope of Llama 3: what released models have of low_freq_factor, high_freq_factor and the original context.
_ROPE_FACTORS = [(low, high, length) for length in (8192, 4096, 32768) for low, high in ((1, 4), (1, 1), (1, 2))]


def plain(value: Any, kind: ValueType | None = None) -> Any:
    """Return a value as JSON has it; a float of a file by the shortest digits that mean it."""
    if isinstance(value, np.ndarray):
        return [plain(each, kind) for each in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each, kind) for each in value]
    if isinstance(value, (float, np.floating)):
        return float(str(np.float32(value)))
    return value.item() if isinstance(value, np.generic) else value


def make_config(model: GGUFFile, name: str, row: Architecture, spelling: Spelling, dtype: str) -> Json:
    """Return config.json of a file as the class ``name``; values have the dtype ``dtype``."""
    arch, known = row.arch, DEFAULTS.get(spelling.model_type, {})

    def get(key: str) -> Any:
        found = model.fields.get(f"{arch}{key}")
        return None if found is None else plain(found.value)

    config: Json = {"architectures": [name], "model_type": spelling.model_type}
    copied = {each.key: each.names for each in row.keys if isinstance(each, Copied)}
    for key, names in {**_BASE, **copied}.items():
        if (value := get(key)) is not None:
            config[_known(names, known)] = value
    if (width := get(".rope.dimension_count")) is not None and llama.set_rope_width in row.keys:
        config.setdefault("head_dim", width)
    if spelling.model_type in ("mistral", "mixtral"):
        config.pop("head_dim", None)
    _set_gating(config, get(".expert_gating_func"), known)
    if (scaling := _rope_scaling(model, get, known)) is not None:
        config["rope_scaling"] = scaling
    config["vocab_size"] = _vocab_size(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    for flag in spelling.biases:
        parts = ("attn_q", "attn_output") if flag == "attention_bias" else ("ffn_up",)
        config[flag] = any(f"blk.0.{part}.bias" in model.tensors for part in parts)
    _set_dense_layers(config, model, get, known)
    config |= spelling.always
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if isinstance(number := model.get(f"tokenizer.ggml.{key}_token_id"), int):
            config[f"{kind}_token_id"] = number
    return config | {"torch_dtype": dtype, "quantkit_version": __version__}


def _known(names: str, known: Mapping[str, Any]) -> str:
    listed = names.split()
    return next((name for name in listed if name in known), listed[0])


def _vocab_size(model: GGUFFile) -> int:
    embeddings = model.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise FormatError(f"{model.paths[0]}: it has no token_embd.weight, so it is no whole model")
    return embeddings.shape[1]


def _set_gating(config: Json, number: Any, known: Mapping[str, Any]) -> None:
    name = next((name for name, value in GATING.items() if value == number), None)
    if name is not None:
        config[_known("scoring_func score_function score_func", known)] = name


def _set_dense_layers(config: Json, model: GGUFFile, get: Callable[[str], Any], known: Mapping[str, Any]) -> None:
    """Name the layers without experts, where the class has a list of them."""
    if "decoder_sparse_step" in known or config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        layers = range(int(get(".block_count") or 0))
        config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in model.tensors]
        config["decoder_sparse_step"] = 1


def _rope_scaling(model: GGUFFile, get: Callable[[str], Any], known: Mapping[str, Any]) -> Json | None:
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
    elif kind not in (None, "none"):
        raise TypeNotSupported(f"{model.paths[0]}: rope scaled by {short(kind)} is not exported by this version")
    elif "rope_freqs.weight" in model.tensors:
        found = _llama3_rope(model, get)
    if (sections := get(".rope.dimension_sections")) is not None:
        found = {"rope_type": "default", **(found or {}), "mrope_section": sections[:3]}
    return found


def _llama3_rope(model: GGUFFile, get: Callable[[str], Any]) -> Json:
    """Return the parameters that make just these factors (``llama.rope_factors``)."""
    values = model.data("rope_freqs.weight").view(np.float32)
    factor = float(values.max())
    for low, high, length in _ROPE_FACTORS:
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": float(low),
            "high_freq_factor": float(high),
            "original_max_position_embeddings": length,
        }
        config = {"architectures": ["LlamaForCausalLM"], "rope_scaling": rope, "head_dim": 2 * values.size}
        config["rope_theta"] = get(".rope.freq_base") or 10000.0
        made = next(iter(llama.rope_factors(Config(Path("config.json"), config)))).x
        same = np.empty(values.nbytes, np.uint8)
        made.read(0, same)
        if np.array_equal(same.view(np.float32), values):
            return rope
    raise TypeNotSupported(
        f"{model.paths[0]}: tensor rope_freqs.weight: its factors are none that config.json of Llama 3 can say"
    )


def check_keys(model: GGUFFile, row: Architecture, values: Json, where: Path) -> list[str]:
    """Read a configuration as the way here does, and return what it says beyond the file, as notes.

    Raises TypeNotSupported for keys of the architecture that it does not say, or says otherwise.
    """
    config = Config(where, with_defaults(values))
    row.prepare(config)
    keys = Keys(row.arch, where)
    for write in row.early:
        write(keys, config)
    row.base(keys, config, row.layers(config), 0)
    for write in row.keys:
        write(keys, config)
    own = {key: field for key, field in model.fields.items() if key.startswith(f"{row.arch}.")}
    lost = [key for key in own if not _is_said(key, own[key], keys.fields, row.arch)]
    if lost:
        raise TypeNotSupported(
            f"{model.paths[0]}: key {lost[0]} = {short(plain(own[lost[0]].value))} cannot be said in config.json of "
            f"{values['architectures'][0]}{_more(lost[1:])}; the checkpoint would compute something else"
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
