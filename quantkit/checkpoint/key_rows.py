"""Rows of keys: config.json to metadata, and back for export.

A row writes one key or several of them (``__call__``), and sets the values of config.json that they represent
(``invert``). Rows are in the order of convert_hf_to_gguf.py (b11434), which is the order of keys in files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.keys import GATING, Keys
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short

#: Sets keys of an architecture: a row, or a function without an inverse.
SetKeys = Callable[[Keys, Config], None]
#: Sets values of config.json by a file's metadata.
SetConfig = Callable[[ModelMetadata, Json], None]


class KeyNames:
    """The names of keys in a class's config.json.

    ``names`` are those of rows and class ("": none), ``defaults`` the values of its configuration class: among several
    names, the first it has.
    """

    def __init__(self, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self.names, self.defaults = names, defaults

    def find(self, key: str) -> str:
        """Return the name of a key, "" for none."""
        candidates = self.names[key].split()
        return next((name for name in candidates if name in self.defaults), candidates[0] if candidates else "")

    def copy(self, key: str, meta: ModelMetadata, config: Json) -> None:
        """Set a value of config.json to that of a key, unless an earlier row has set it."""
        value, name = meta.get(key), self.find(key)
        if value is None or not name:
            return
        *outer, inner = name.split(".")
        for part in outer:
            config = config.setdefault(part, {})
        config.setdefault(inner, value)


class KeyRow(ABC):
    """A row of keys; see the module's docstring."""

    #: The key that the row writes, "" for several.
    key: str
    #: Its names in config.json, "" if no value there is that of the key.
    names: str

    @property
    def exported_names(self) -> str:
        """The names used by export."""
        return self.names

    @abstractmethod
    def __call__(self, keys: Keys, config: Config) -> None:
        """Write the keys."""

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        """Set the values of config.json that a file's keys imply; default: copy the key's value."""
        if self.key:
            names.copy(self.key, meta, config)


@dataclass(frozen=True)
class Copied(KeyRow):
    """A key copied from config.json: the first of ``names`` that is present; ``object.name`` is nested.

    ``kind`` is the method of ``Keys`` that writes it. ``required``: an error without it; ``unless_zero``: only if not
    zero; ``default``: the value if config.json has none of the names. Null counts as missing, except for keys that are
    required or have a default. ``exported``: the names used by export, if they differ.
    """

    key: str
    names: str
    kind: str = "u32"
    required: bool = False
    unless_zero: bool = False
    default: Any = None
    exported: str = ""

    def __call__(self, keys: Keys, config: Config) -> None:
        name = next((name for name in self.names.split() if _has(config, name)), None)
        if name is None and self.required:
            raise FormatError(f"{config.path}: has no {self.names.replace(' ', ' or ')}", "QK-E112")
        value = self.default if name is None else _value(config, name)
        is_optional = not self.required and self.default is None
        if (value is not None or not is_optional) and (value or not self.unless_zero):
            getattr(keys, self.kind)(self.key, value)

    @property
    def exported_names(self) -> str:
        return self.exported or self.names


def _has(config: Config, name: str) -> bool:
    """Return whether config.json has a name, which may be nested."""
    outer, _, inner = name.rpartition(".")
    return inner in config.table(outer) if outer else name in config


def _value(config: Config, name: str) -> Any:
    outer, _, inner = name.rpartition(".")
    return config.table(outer)[inner] if outer else config[name]


@dataclass(frozen=True)
class SwigluLimits(Copied):
    """The activation limit of each layer, 0 for none: null, or a layer beyond the list."""

    def __call__(self, keys: Keys, config: Config) -> None:
        if (limits := config.get(self.names)) is not None:
            numbers = [0.0 if limit is None else float(limit) for limit in limits]
            keys.array(self.key, [*numbers, *[0.0] * keys.layers][: keys.layers])


@dataclass(frozen=True)
class Always(KeyRow):
    """A key that has the same value in all files; ``names``: the names in config.json that export sets to it."""

    key: str
    value: Any
    kind: str = "u32"
    names: str = ""

    def __call__(self, keys: Keys, config: Config) -> None:
        getattr(keys, self.kind)(self.key, self.value)


@dataclass(frozen=True)
class Computed(KeyRow):
    """A key whose value follows from others of config.json; none if it is None.

    ``inverse`` sets these; without one, the value of ``names`` is used unchanged.
    """

    key: str
    compute: Callable[[Config], Any]
    kind: str = "u32"
    inverse: SetConfig | None = None
    names: str = ""

    def __call__(self, keys: Keys, config: Config) -> None:
        if (value := self.compute(config)) is not None:
            getattr(keys, self.kind)(self.key, value)

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        if self.inverse is None:
            super().invert(meta, config, names)
        else:
            self.inverse(meta, config)


@dataclass(frozen=True)
class KeyGroup(KeyRow):
    """Keys that depend on each other: ``write`` sets them, ``inverse`` their values in config.json."""

    write: SetKeys
    inverse: SetConfig
    key: str = ""
    names: str = ""

    def __call__(self, keys: Keys, config: Config) -> None:
        self.write(keys, config)

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        self.inverse(meta, config)


@dataclass(frozen=True)
class WithConfig:
    """Rows that read the configuration that ``change`` returns."""

    rows: tuple[SetKeys, ...]
    change: Callable[[Config], Config]

    def __call__(self, keys: Keys, config: Config) -> None:
        write_rows(self.rows, keys, self.change(config))


@dataclass(frozen=True)
class Where:
    """Rows that apply only if ``condition`` is true."""

    condition: Callable[[Config], bool]
    rows: tuple[SetKeys, ...]

    def __call__(self, keys: Keys, config: Config) -> None:
        if self.condition(config):
            write_rows(self.rows, keys, config)


@dataclass(frozen=True)
class FromFile(KeyRow):
    """A key derived from the tensors: an attribute of ``Keys``. ``names``: its names in config.json."""

    key: str
    attribute: str
    names: str = ""

    def __call__(self, keys: Keys, config: Config) -> None:
        keys.u32(self.key, getattr(keys, self.attribute))


def write_rows(rows: Iterable[SetKeys], keys: Keys, config: Config) -> None:
    """Write the keys of rows, in order."""
    for row in rows:
        row(keys, config)


def flat_rows(rows: Iterable[SetKeys]) -> Iterator[KeyRow]:
    """Yield all rows that have an inverse, in order."""
    for row in rows:
        if isinstance(row, (WithConfig, Where)):
            yield from flat_rows(row.rows)
        elif isinstance(row, KeyRow):
            yield row


#: Keys of YaRN, after .rope.scaling.yarn_ -> names among the parameters of rope.
_YARN = {
    "ext_factor": "extrapolation_factor",
    "attn_factor": "attention_factor attn_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}


@dataclass(frozen=True)
class _RopeScaling(KeyRow):
    """Scaled rope: linear, YaRN or LongRoPE; other kinds have no keys. ``rope_scaling`` is the inverse."""

    key: str = ".rope.scaling.original_context_length"
    names: str = "original_max_position_embeddings"

    def __call__(self, keys: Keys, config: Config) -> None:
        rope = config.full_rope
        kind, factor = rope.get("rope_type"), rope.get("factor")
        if kind in ("su", "longrope"):
            keys.text(".rope.scaling.type", "longrope")
        if kind not in ("linear", "yarn") or factor is None:
            return
        keys.text(".rope.scaling.type", kind)
        keys.f32(".rope.scaling.factor", factor)
        if kind == "linear":
            return
        if "original_max_position_embeddings" not in rope:
            raise FormatError(f"{config.path}: YaRN without original_max_position_embeddings", "QK-E112")
        keys.u32(self.key, rope["original_max_position_embeddings"])
        for key, names in _YARN.items():
            if (value := next((rope[name] for name in names.split() if name in rope), None)) is not None:
                keys.f32(f".rope.scaling.yarn_{key}", value)


def rope_scaling(meta: ModelMetadata) -> Json:
    """Return the parameters of rope of a file with linear scaling or YaRN."""
    keys = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length"}
    keys |= {names.split()[0]: f"yarn_{key}" for key, names in _YARN.items()}
    values = {name: meta.get(f".rope.scaling.{key}") for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}


def _rope_sections(config: Config) -> list[Any] | None:
    sections = config.rope.get("mrope_section")
    if sections is not None and not isinstance(sections, list):
        raise FormatError(f"{config.path}: mrope_section is {short(sections)}, not a list", "QK-E112")
    return None if sections is None else [*sections, 0, 0, 0, 0][:4]


@dataclass(frozen=True)
class _RopeBase(KeyRow):
    """The rope base of full attention or of sliding-window layers."""

    key: str
    sliding: bool
    names: str

    def __call__(self, keys: Keys, config: Config) -> None:
        rope = (config.rope.get("sliding_attention") or {}) if self.sliding else config.full_rope
        if isinstance(rope, dict) and (theta := rope.get("rope_theta")) is not None:
            keys.f32(self.key, theta)


@dataclass(frozen=True)
class _Gating(KeyRow):
    """The gating function of experts: a name in config.json, a number in GGUF."""

    key: str = ".expert_gating_func"
    names: str = (
        "score_function scoring_func score_func moe_router_activation moe_router_activation_func expert_selection_fn"
    )

    def __call__(self, keys: Keys, config: Config) -> None:
        name = config.find(*self.names.split())
        if name is not None and name not in GATING:
            raise FormatError(
                f"{config.path}: unknown expert selection {short(name)}; supported are {', '.join(GATING)}", "QK-E305"
            )
        if name is not None:
            keys.u32(self.key, GATING[name])

    def invert(self, meta: ModelMetadata, config: Json, names: KeyNames) -> None:
        function = next((name for name, number in GATING.items() if number == meta.get(self.key)), None)
        if function is not None and (name := names.find(self.key)):
            config[name] = function

    @property
    def exported_names(self) -> str:
        return "scoring_func score_function score_func"


def block_count(names: str) -> FromFile:
    """Return the row of the number of layers, MTP layers included."""
    return FromFile(".block_count", "layers", names)


BLOCK_COUNT = block_count("num_hidden_layers n_layer")
FILE_TYPE = FromFile("general.file_type", "file_type")
#: Keys and values have the same head width.
HEAD_WIDTHS = (Copied(".attention.key_length", "head_dim"), Copied(".attention.value_length", "head_dim"))

# fmt: off
#: The keys that most text models have (TextModel.set_gguf_parameters).
BASE: tuple[SetKeys, ...] = (
    BLOCK_COUNT,
    Copied(".context_length",
           "max_position_embeddings n_ctx n_positions max_length max_sequence_length model_max_length",
           exported="max_position_embeddings n_positions"),
    Copied(".embedding_length", "hidden_size n_embd dim"),
    Copied(".feed_forward_length",
           "prefix_dense_intermediate_size dense_intermediate_size intermediate_size n_inner hidden_dim", "count",
           exported="intermediate_size n_inner"),
    Copied(".attention.head_count", "num_attention_heads n_head n_heads", "count"),
    Copied(".attention.head_count_kv", "num_key_value_heads n_kv_heads", "count"),
    Computed(".attention.causal", lambda config: False if config.get("is_causal") is False else None, "flag"),
    _RopeScaling(),
    Computed(".rope.dimension_sections", _rope_sections, "array"),
    _RopeBase(".rope.freq_base", False, "rope_theta"),
    _RopeBase(".rope.freq_base_swa", True, "rope_local_base_freq"),
    Copied(".attention.layer_norm_rms_epsilon", "rms_norm_eps norm_eps", "f32"),
    Copied(".attention.layer_norm_epsilon", "layer_norm_eps layer_norm_epsilon norm_epsilon", "f32"),
    Copied(".expert_count", "num_local_experts num_experts n_routed_experts"),
    Copied(".expert_used_count", "num_experts_per_tok num_experts_per_token top_k_experts"),
    Copied(".expert_group_count", "n_group"),
    Copied(".expert_group_used_count", "topk_group"),
    _Gating(),
    *HEAD_WIDTHS,
    FILE_TYPE,
)
# fmt: on

VOCAB_SIZE = Copied(".vocab_size", "vocab_size", required=True)
WINDOW = Copied(".attention.sliding_window", "sliding_window", required=True)
EXPERT_WIDTH = Copied(".expert_feed_forward_length", "moe_intermediate_size")


def set_layer_types(meta: ModelMetadata, config: Json) -> None:
    """Set which layers have a window, if the file lists them."""
    slides = meta.flags(".attention.sliding_window_pattern")
    if slides is not None:
        config["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]


def _window_pattern(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


#: Which layers have a window.
WINDOW_PATTERN = Computed(".attention.sliding_window_pattern", _window_pattern, "array", inverse=set_layer_types)


def set_rotary_part(meta: ModelMetadata, config: Json) -> None:
    """Set the number of rotary dimensions."""
    turned, width = meta.number(".rope.dimension_count"), meta.head_width
    config["partial_rotary_factor"] = turned / width if width else 1.0


def rotary_width(default: float | None, width: Callable[[Config], int] = lambda config: config.head_dim) -> Computed:
    """Return the row of rotary dimensions: the share of ``width`` in config.json, ``default`` if it has none."""
    return Computed(
        ".rope.dimension_count",
        lambda config: int(width(config) * config.rotary_part(default)),
        inverse=set_rotary_part,
    )


def divided_head_dim(config: Config) -> int:
    """Return the head width, hidden size / heads; head_dim is ignored."""
    return config.number("hidden_size") // max(1, config.number("num_attention_heads"))


def number_or(key: str, names: str, default: float, exported: str = "", kind: str = "u32") -> Computed:
    """Return the row of a number that is ``default`` if it is 0, null or missing in config.json."""
    return Computed(key, lambda config: config.find(*names.split()) or default, kind, names=exported or names)
