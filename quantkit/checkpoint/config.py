"""config.json as convert_hf_to_gguf.py (b11434) reads it: with the defaults of transformers' configuration classes.

It loads the file through AutoConfig, so defaults of a class become metadata: see ``class_defaults``. For a model type
unknown to AutoConfig, it reads the plain JSON, and so does quantkit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantkit.checkpoint.class_defaults import with_defaults
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.outputs import read_whole

Json = dict[str, Any]

#: Maximum size in bytes of a tokenizer's file, and of other JSON files: objects take thirty times as much memory.
MAX_JSON, _MAX_SMALL = 1 << 28, 1 << 26
#: The configuration of a checkpoint in Mistral's own format.
NATIVE_FILE = "params.json"
#: Architectures that are kept although their text_config names another (get_model_architecture).
_OUTER = {
    "StepVLForConditionalGeneration",
    "Sarashina2VisionForCausalLM",
    "Exaone4_5_ForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
}


def read_json(path: Path, max_bytes: int = _MAX_SMALL) -> Json:
    """Return the object in a JSON file of limited size. Raises FormatError."""
    try:
        value = json.loads(read_whole(path, max_bytes).decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: not JSON: {e}", "QK-E111") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: not a JSON object but {short(value)}", "QK-E111")
    return value


def large_json(path: Path) -> Json:
    """Return the object in a JSON file that is read several times: a shared object, which must not be changed."""
    stat = path.stat()
    return _read_cached(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _read_cached(path: Path, changed: int, size: int) -> Json:
    return read_json(path, MAX_JSON)


def optional_json(path: Path) -> Json | None:
    """Return the object in a JSON file, or None if there is no such file."""
    return read_json(path) if path.exists() else None


class Config:
    """The hyperparameters of a text model: those of text_config, if present, take precedence."""

    def __init__(self, path: Path, values: Json) -> None:
        self.path = path
        #: As AutoConfig gives them, nested.
        self.outer = values
        text = values.get("text_config")
        if "text_config" in values and not isinstance(text, dict):
            raise FormatError(f"{path}: text_config is {short(text)}, not an object", "QK-E112")
        self.architecture = _architecture(path, values)
        self.values: Json = {**values, **(text or {})}
        self.rope = self._rope()

    @property
    def is_native(self) -> bool:
        """Whether it is that of Mistral's own format."""
        return self.path.name == NATIVE_FILE

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise FormatError(f"{self.path}: has no {key}", "QK-E112")
        return self.values[key]

    def replace_values(self, values: Json) -> None:
        """Set all values, and the parameters of rope that follow from them."""
        self.values = values
        self.rope = self._rope()

    def with_values(self, values: Json) -> Config:
        """Return a copy with other values."""
        changed = copy(self)
        changed.values = {**self.values, **values}
        return changed

    def without(self, *keys: str) -> Config:
        """Return a copy without some keys."""
        changed = copy(self)
        changed.values = {key: value for key, value in self.values.items() if key not in keys}
        return changed

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, which may be null, or ``default`` if the key is missing."""
        return self.values.get(key, default)

    def use_text(self, text: Json) -> None:
        """Let ``text`` take precedence over the values of config.json, as text_config does."""
        self.values = {**self.outer, **text}
        self.rope = self._rope()

    def find(self, *keys: str) -> Any:
        """Return the value of the first key present, None if all are absent."""
        return next((self.values[key] for key in keys if key in self.values), None)

    def table(self, key: str) -> Json:
        """Return an object. Raises FormatError."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}: {key} is {short(value)}, not an object", "QK-E112")
        return value

    def number(self, *keys: str) -> int:
        """Return the integer of the first key present. Raises FormatError if all are absent."""
        value = self.find(*keys)
        if value is None:
            raise FormatError(f"{self.path}: has no {' or '.join(keys)}", "QK-E112")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise FormatError(
                f"{self.path}: {next(k for k in keys if k in self)} is {short(value)}, not a count", "QK-E112"
            )
        return value

    @property
    def layers(self) -> int:
        """The number of layers in the configuration."""
        n = self.number("n_layers", "num_hidden_layers", "n_layer", "num_layers")
        if n > 1 << 16:
            raise FormatError(f"{self.path}: {n} layers", "QK-E112")
        return n

    @property
    def head_dim(self) -> int:
        """The width of a head: head_dim, or hidden_size / num_attention_heads."""
        heads = self.number("num_attention_heads") if self.get("head_dim") is None else 1
        if not heads:
            raise FormatError(f"{self.path}: num_attention_heads is 0", "QK-E112")
        width = self.number("hidden_size") // heads if self.get("head_dim") is None else self.number("head_dim")
        if width > 1 << 16:
            raise FormatError(f"{self.path}: heads of {width} values", "QK-E112")
        return width

    @property
    def full_rope(self) -> Json:
        """The rope parameters of full-attention layers."""
        rope = self.rope.get("full_attention", self.rope)
        return rope if isinstance(rope, dict) else {}

    def rotary_part(self, default: float | None, key: str = "partial_rotary_factor", rope: Json | None = None) -> float:
        """Return the share of a head that rope rotates, from its parameters ``rope``; ``default`` without a value."""
        part = (self.rope if rope is None else rope).get(key, default)
        part = default if part is None and default is not None else part
        if not isinstance(part, (int, float)) or not math.isfinite(part) or not 0 <= part <= 1:
            raise FormatError(f"{self.path}: {key} is {short(part)}, not a part of a head", "QK-E112")
        return part

    def _rope(self) -> Json:
        """Return the rope parameters, with top-level ones mirrored into them (TextModel.__init__)."""
        key = "rope_parameters" if "rope_parameters" in self else "rope_scaling"
        rope_values = self.get(key) or {}
        if not isinstance(rope_values, dict):
            raise FormatError(f"{self.path}: {key} is {short(rope_values)}, not an object", "QK-E112")
        rope = dict(rope_values)
        if "full_attention" in rope or "sliding_attention" in rope:
            return rope
        theta = self.find(
            "global_rope_theta", "rope_global_theta", "rope_theta_global", "rope_theta", "rotary_emb_base"
        )
        local = self.find(
            "local_rope_theta", "rope_local_theta", "rope_theta_local", "swa_rope_theta", "rope_local_base_freq"
        )
        if local is not None:
            rope["sliding_attention"] = {"rope_theta": local}
        mirrored = {
            "rope_theta": theta,
            "rope_type": rope.get("type"),
            "partial_rotary_factor": self.find("partial_rotary_factor", "rope_pct", "rope_percent"),
            "original_max_position_embeddings": self.find("original_max_position_embeddings"),
        }
        return rope | {k: v for k, v in mirrored.items() if v is not None and k not in rope}


def _architecture(path: Path, values: Mapping[str, Any]) -> str:
    """Return the class of the text model."""
    names: list[Iterable[object]] = []
    for config in (values, values.get("text_config") or {}):
        listed_names = config.get("architectures") or []
        if not isinstance(listed_names, list) or not all(isinstance(name, str) for name in listed_names):
            raise FormatError(f"{path}: architectures is {short(listed_names)}, not a list of names", "QK-E112")
        names.append(listed_names)
    outer, inner = (next(iter(listed_names), None) for listed_names in names)
    arch = outer if outer in _OUTER or inner is None else inner
    if arch is None and isinstance(ssm := values.get("ssm_cfg"), dict):
        arch = f"{ssm.get('layer', 'Mamba')}ForCausalLM"
    if arch is None:
        raise FormatError(f"{path}: has no architectures, so this is not a model that can be converted", "QK-E112")
    return str(arch)


def read_config(folder: Path) -> Config:
    """Return the configuration of a checkpoint. Raises FormatError."""
    path = folder / "config.json"
    if not path.exists():
        if not folder.is_dir():
            raise FormatError(f"{folder}: {_no_folder(folder)}", "QK-E401")
        if (folder / NATIVE_FILE).exists():
            raise FormatError(
                f"{folder}: has {NATIVE_FILE}, but no config.json: this is Mistral's own format; use --mistral-format",
                "QK-E101",
            )
        raise FormatError(f"{folder}: has no config.json, so this is not a checkpoint", "QK-E101")
    return Config(path, unify_text_config(with_defaults(read_json(path))))


def read_native(folder: Path) -> Config:
    """Return the configuration of a checkpoint in Mistral's own format, dense or with experts. Raises FormatError."""
    path = folder / NATIVE_FILE
    if not path.exists():
        if not folder.is_dir():
            raise FormatError(f"{folder}: {_no_folder(folder)}", "QK-E401")
        raise FormatError(
            f"{folder}: has no {NATIVE_FILE}, so it is not in Mistral's own format: omit --mistral-format", "QK-E101"
        )
    values = read_json(path)
    return Config(path, {**values, "architectures": ["moe" if values.get("moe") is not None else "dense"]})


def _no_folder(folder: Path) -> str:
    """Return why a path is not a checkpoint, and the command line to use instead."""
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return "this is a GGUF file, not a checkpoint: use quantkit quantize"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return f"no such directory; a repository of the Hugging Face Hub is hf://{folder}"
    return "no such directory"


def raw_config(folder: Path) -> Config:
    """Return the configuration of a checkpoint without class defaults. Raises FormatError."""
    path = folder / "config.json"
    return Config(path, unify_text_config(read_json(path)))


def unify_text_config(values: Json) -> Json:
    """Return a configuration with the text model's part as text_config, under any name."""
    for key, inner in (("llm_config", None), ("lm_config", None), ("thinker_config", "text_config")):
        if isinstance(values.get(key), dict):
            values["text_config"] = values[key] if inner is None else values[key].get(inner, {})
    for key in ("language_config", "lfm"):
        if isinstance(values.get(key), dict):
            values["text_config"] = values[key]
    return values
