"""config.json from the metadata of a GGUF file: the key rules of an architecture, inverted.

If a key has many names, the class uses the one of its configuration (``class_defaults``). The result is converted back
(``check_keys``), which detects keys that were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.checkpoint.class_defaults import DEFAULTS
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata, plain
from quantkit.checkpoint.export.llama3_rope import FREQUENCIES, llama3_rope
from quantkit.checkpoint.key_rows import Copied, KeyNames, flat_rows, rope_scaling, write_rows
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile
from quantkit.formats.gguf.rules import short
from quantkit.version import __version__

#: Keys that the class implies, or that no runtime reads.
_IGNORED_KEYS = frozenset((".vocab_size", ".attention.causal"))
#: Special tokens of config.json -> their GGUF keys.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "sep": "seperator", "mask": "mask"}
_ALWAYS_IN_CONFIG = ("bos", "eos", "pad")
_MOST_LAYERS = 1 << 16


def make_config(meta: ModelMetadata, name: str, row: Architecture, hf_class: HfClass, dtype: str) -> Json:
    """Return the configuration of the text model of a file as the class ``name``; values have the dtype ``dtype``."""
    for key in (".block_count", ".n_deepstack_layers"):
        if isinstance(count := meta.get(key), int) and count > _MOST_LAYERS:
            raise FormatError(f"{meta.path}: key {meta.arch}{key} is {count}, too many layers", "QK-E123")
    config: Json = {"architectures": [name], "model_type": hf_class.model_type}
    if (kind := meta.get(".rope.scaling.type")) in ("linear", "yarn"):
        config["rope_scaling"] = rope_scaling(meta)
    elif kind not in (None, "none", "longrope"):
        raise TypeNotSupported(f"{meta.path}: rope scaled by {short(kind)} is not exported by this version", "QK-E305")
    rows = list(flat_rows((*row.base, *row.keys)))
    row_names = {item.key: item.exported_names for item in rows}
    rows += [Copied(key, "") for key in hf_class.keys if key not in row_names]
    names = KeyNames({**row_names, **hf_class.keys}, DEFAULTS.get(hf_class.model_type, {}))
    for item in rows:
        item.invert(meta, config, names)
    if kind is None and meta.has(FREQUENCIES) and meta.get(".attention.key_length_swa") is None:
        config["rope_scaling"] = llama3_rope(meta, row, config)
    if (sections := meta.get(".rope.dimension_sections")) is not None:
        config["rope_scaling"] = {
            "rope_type": "default",
            **config.get("rope_scaling", {}),
            "mrope_section": sections[:3],
        }
    config["vocab_size"] = _vocab_size(meta.model)
    config["tie_word_embeddings"] = not meta.has("output.weight")
    config = {**hf_class.defaults, **config}
    for derive in hf_class.config_setters:
        derive(meta, config)
    config = {**token_ids(meta.model), **config} | {"torch_dtype": dtype, "quantkit_version": __version__}
    return {key: value for key, value in config.items() if value is not None or key not in hf_class.not_null}


def token_ids(model: GGUFFile) -> Json:
    """Return the ids of special tokens for a configuration; null for missing ones that every class has."""
    ids = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    return {
        f"{name}_token_id": number for name, number in ids.items() if number is not None or name in _ALWAYS_IN_CONFIG
    }


def nest_text_config(config: Json, hf_class: HfClass) -> Json:
    """Return config.json: the configuration of the text model, or that within one of a whole."""
    if not hf_class.outer_type:
        return config
    outer_keys = ("architectures", "torch_dtype", "quantkit_version", "vision_config", "backbone_hidden_size")
    outer = {key: config.pop(key) for key in outer_keys if key in config}
    tied = config["tie_word_embeddings"]
    nested = config
    for key in reversed(hf_class.text_key.split(".")):
        nested = {key: nested}
    return outer | {"model_type": hf_class.outer_type, "tie_word_embeddings": tied, **nested}


def text_config_of(values: Json, hf_class: HfClass) -> Json:
    """Return the configuration of the text model within config.json."""
    for key in hf_class.text_key.split(".") if hf_class.outer_type else ():
        values = values[key]
    return values


def _vocab_size(model: GGUFFile) -> int:
    embeddings = model.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise FormatError(f"{model.paths[0]}: has no token_embd.weight, so it is not a complete model", "QK-E105")
    return embeddings.shape[1]


def check_keys(model: GGUFFile, row: Architecture, config: Config) -> list[str]:
    """Convert a configuration back to keys; return notes on keys that the file does not have.

    Raises TypeNotSupported for keys of the architecture that it lacks or changes.
    """
    keys = Keys(row.arch, config.path, row.layers(config))
    write_rows((*row.head_keys, *row.base, *row.keys), keys, config)
    arch_fields = {key: field for key, field in model.fields.items() if key.startswith(f"{row.arch}.")}
    missing_keys = [key for key in arch_fields if not _has_value(key, arch_fields[key], keys.fields, row.arch)]
    causal = f"{row.arch}.attention.causal"
    if config.architecture.endswith("ForCausalLM") and model.get(causal) is False:
        missing_keys.append(causal)
    if missing_keys:
        raise TypeNotSupported(
            f"{model.paths[0]}: key {missing_keys[0]} = {short(plain(arch_fields[missing_keys[0]].value))} cannot be "
            f"expressed in config.json of {config.architecture}{_list_rest(missing_keys[1:])}; the checkpoint would "
            "give other results",
            "QK-E305",
        )
    added = [key for key in keys.fields if key.startswith(f"{row.arch}.") and key not in arch_fields]
    return [f"converting it back adds {', '.join(sorted(added))}"] if added else []


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
