"""Metadata of a converted model: an ordered list of keys, and those that every text model has.

Order, types and what is left out are those of convert_hf_to_gguf.py (b11434: gguf_writer.py, TextModel.
set_gguf_parameters): a key that is set again keeps its place, empty strings and lists are not written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Config
from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import Field, ValueType
from quantkit.formats.gguf.rules import short

#: expert_gating_func, by the name in a configuration.
GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


class Keys:
    """The keys of an output in the making; those beginning with a dot belong to the architecture."""

    def __init__(self, arch: str, where: Path) -> None:
        self.arch, self.where = arch, where
        self.fields: dict[str, Field] = {}
        #: What was to become keys and cannot.
        self.omissions: list[str] = []
        self.text("general.architecture", arch)

    @contextmanager
    def blaming(self, path: Path) -> Iterator[None]:
        """Name ``path`` in errors about the values set in this context."""
        self.where, before = path, self.where
        try:
            yield
        finally:
            self.where = before

    def _set(self, key: str, value: Any, kind: ValueType, item: ValueType | None = None) -> None:
        name = f"{self.arch}{key}" if key.startswith(".") else key
        try:
            self.fields[name] = Field.of(name, value, kind, item)
        except (RecipeError, struct.error) as e:
            raise FormatError(f"{self.where}: {e}", "QK-E112") from None

    def u32(self, key: str, value: Any) -> None:
        """Set a count; a bool counts as 0 or 1."""
        self._set(key, int(value) if isinstance(value, bool) else value, ValueType.UINT32)

    def i32(self, key: str, value: Any) -> None:
        self._set(key, int(value) if isinstance(value, bool) else value, ValueType.INT32)

    def f32(self, key: str, value: Any) -> None:
        """Set a number, which NaN is not."""
        if isinstance(value, float) and math.isnan(value):
            raise FormatError(f"{self.where}: key {key}: NaN is no value", "QK-E112")
        self._set(key, float(value) if isinstance(value, bool) else value, ValueType.FLOAT32)

    def flag(self, key: str, value: Any) -> None:
        self._set(key, bool(value), ValueType.BOOL)

    def text(self, key: str, value: Any) -> None:
        """Set a string, unless it is empty."""
        if value:
            if not isinstance(value, str):
                raise FormatError(
                    f"{self.where}: key {key}: {short(value)} is not a text; correct the model card", "QK-E112"
                )
            self._set(key, value, ValueType.STRING)

    def array(self, key: str, values: Sequence[Any]) -> None:
        """Set a list, unless it is empty; its item type is that of the first."""
        if not len(values):
            return
        first = values[0]
        kinds = ((bool, ValueType.BOOL), (str, ValueType.STRING), (int, ValueType.INT32), (float, ValueType.FLOAT32))
        item = next((kind for python, kind in kinds if isinstance(first, python)), None)
        if item is None or set(map(type, values)) != {type(first)}:
            raise FormatError(f"{self.where}: key {key}: {short(list(values))} is no list of one type", "QK-E112")
        self._set(key, list(values), ValueType.ARRAY, item)

    def counts(self, key: str, values: Sequence[int]) -> None:
        """Set a list of counts, all >= 0."""
        self._set(key, list(values), ValueType.ARRAY, ValueType.UINT32)

    def octets(self, key: str, values: bytes) -> None:
        """Set a list of bytes, unless it is empty."""
        if values:
            self._set(key, list(values), ValueType.ARRAY, ValueType.UINT8)

    def remove(self, key: str) -> None:
        """Remove a key, if present."""
        self.fields.pop(f"{self.arch}{key}" if key.startswith(".") else key, None)

    def count(self, key: str, value: Any) -> None:
        """Set a count, or a list of counts: one for each layer."""
        if isinstance(value, (list, tuple)):
            self.array(key, list(value))
        else:
            self.u32(key, value)


def layers_in_file(keys: Keys) -> int:
    """Return the number of layers in the file, of keys that have it already."""
    return int(keys.fields[f"{keys.arch}.block_count"].value)


def set_base_keys(keys: Keys, config: Config, layers: int, file_type: int) -> None:
    """Set the keys common to all text models with ``layers`` layers; ``file_type`` is llama.cpp's number."""
    keys.u32(".block_count", layers)
    copied_keys = (
        (
            ".context_length",
            keys.u32,
            "max_position_embeddings n_ctx n_positions max_length max_sequence_length model_max_length",
        ),
        (".embedding_length", keys.u32, "hidden_size n_embd dim"),
        (
            ".feed_forward_length",
            keys.count,
            "prefix_dense_intermediate_size dense_intermediate_size intermediate_size n_inner hidden_dim",
        ),
        (".attention.head_count", keys.count, "num_attention_heads n_head n_heads"),
        (".attention.head_count_kv", keys.count, "num_key_value_heads n_kv_heads"),
    )
    for key, write, names in copied_keys:
        if (value := config.find(*names.split())) is not None:
            write(key, value)
    if config.get("is_causal") is False:
        keys.flag(".attention.causal", False)
    set_rope_scaling(keys, config)
    _set_rope(keys, config)
    for key, names in (
        (".attention.layer_norm_rms_epsilon", "rms_norm_eps norm_eps"),
        (".attention.layer_norm_epsilon", "layer_norm_eps layer_norm_epsilon norm_epsilon"),
    ):
        if (value := config.find(*names.split())) is not None:
            keys.f32(key, value)
    _set_experts(keys, config)
    if (width := config.get("head_dim")) is not None:
        keys.u32(".attention.key_length", width)
        keys.u32(".attention.value_length", width)
    keys.u32("general.file_type", file_type)


def set_rope_scaling(keys: Keys, config: Config) -> None:
    """Set rope scaling: linear, YaRN or LongRoPE; other kinds have no keys."""
    rope = config.full_rope
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind == "linear" and factor is not None:
        keys.text(".rope.scaling.type", "linear")
        keys.f32(".rope.scaling.factor", factor)
    elif kind == "yarn" and factor is not None:
        keys.text(".rope.scaling.type", "yarn")
        keys.f32(".rope.scaling.factor", factor)
        if "original_max_position_embeddings" not in rope:
            raise FormatError(f"{config.path}: YaRN without original_max_position_embeddings", "QK-E112")
        keys.u32(".rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        for key, value in (
            ("ext_factor", rope.get("extrapolation_factor")),
            ("attn_factor", rope.get("attention_factor", rope.get("attn_factor"))),
            ("beta_fast", rope.get("beta_fast")),
            ("beta_slow", rope.get("beta_slow")),
        ):
            if value is not None:
                keys.f32(f".rope.scaling.yarn_{key}", value)
    elif kind in ("su", "longrope"):
        keys.text(".rope.scaling.type", "longrope")


def _set_rope(keys: Keys, config: Config) -> None:
    if (sections := config.rope.get("mrope_section")) is not None:
        if not isinstance(sections, list):
            raise FormatError(f"{config.path}: mrope_section is {short(sections)}, not a list", "QK-E112")
        keys.array(".rope.dimension_sections", [*sections, 0, 0, 0, 0][:4])
    if (theta := config.full_rope.get("rope_theta")) is not None:
        keys.f32(".rope.freq_base", theta)
    sliding = config.rope.get("sliding_attention") or {}
    if isinstance(sliding, dict) and (theta := sliding.get("rope_theta")) is not None:
        keys.f32(".rope.freq_base_swa", theta)


def _set_experts(keys: Keys, config: Config) -> None:
    for key, names in (
        (".expert_count", "num_local_experts num_experts n_routed_experts"),
        (".expert_used_count", "num_experts_per_tok num_experts_per_token top_k_experts"),
        (".expert_group_count", "n_group"),
        (".expert_group_used_count", "topk_group"),
    ):
        if (value := config.find(*names.split())) is not None:
            keys.u32(key, value)
    name = config.find(
        "score_function",
        "scoring_func",
        "score_func",
        "moe_router_activation",
        "moe_router_activation_func",
        "expert_selection_fn",
    )
    if name is not None:
        if name not in GATING:
            raise FormatError(
                f"{config.path}: experts are chosen by {short(name)}; known are {', '.join(GATING)}", "QK-E305"
            )
        keys.u32(".expert_gating_func", GATING[name])
