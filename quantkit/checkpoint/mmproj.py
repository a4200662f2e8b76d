"""Vision and audio encoders of a checkpoint as an mmproj file: rows of classes, and their configuration.

Facts of llama.cpp b11434, conversion/base.py (MmprojModel). A model class has a row in the module of its family
(``models``), which ``registry.MMPROJ`` collects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.class_defaults import with_encoder_defaults
from quantkit.checkpoint.config import Config, Json, optional_json
from quantkit.checkpoint.expressions import TYPE_F16, TYPE_F32
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.tensors import Rule, Tensor
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.types import TensorType

#: The architecture of mmproj files.
CLIP = "clip"
#: Names of the number of layers in config.json.
LAYER_COUNTS = "n_layers num_hidden_layers n_layer num_layers depth layers encoder_layers vt_num_hidden_layers"
#: Sizes of images in configurations; a runtime divides by them, or allocates for them.
_IMAGE_SIZES = [
    "image_size",
    "max_image_size",
    "min_pixels",
    "max_pixels",
    "longest_edge",
    "shortest_edge",
    "in_patch_limit",
]
#: The number of layers that names may have where a file has several encoders.
MAX_LAYERS = 128


class MmprojConfig(Config):
    """The configuration of the encoders. Its own values are those of the vision encoder, or of the only one.

    ``outer`` is config.json, in which ``vision`` and ``audio`` lie, so a change to the values of one is a change to
    both. ``preprocessor``: preprocessor_config.json, and processor_config.json, which takes precedence. ``text_width``:
    the embedding length of the text model.
    """

    def __init__(self, config: Config, row: Mmproj) -> None:
        super().__init__(config.path, with_encoder_defaults(deepcopy(row.read_config(config))))
        self.text_width = self._text_width()
        self.outer.setdefault("text_config", {})
        self.outer.setdefault("audio_config", {})
        self._vision = row.vision_config(self.outer) if row.vision else None
        self._audio = row.audio_config(self.outer) if row.audio else None
        for name, part in (("vision_config", self._vision), ("audio_config", self._audio)):
            if part is not None and not isinstance(part, dict):
                raise FormatError(f"{self.path}: {name} is {short(part)}, not an object", "QK-E112")
        encoder = self._vision or self._audio
        if not encoder:
            raise FormatError(f"{self.path}: has no vision_config or audio_config: no encoders to convert", "QK-E206")
        self.values = encoder
        self.preprocessor = self._part(read_preprocessor(self.path.parent), "preprocessor_config.json")
        for config in (self.vision, self.preprocessor):
            _check_image_sizes(config)

    @property
    def vision(self) -> Config:
        """The configuration of the vision encoder."""
        return self._part(self._vision)

    @property
    def audio(self) -> Config:
        """The configuration of the audio encoder."""
        return self._part(self._audio)

    @property
    def model(self) -> Config:
        """The whole of config.json."""
        return self._part(self.outer)

    def _part(self, values: Json | None, file: str = "config.json") -> Config:
        part: Config = copy(self)
        part.values, part.path = {} if values is None else values, self.path.with_name(file)
        return part

    def _text_width(self) -> int:
        names = ("hidden_size", "n_embd")
        width = self.find(*names)
        if not isinstance(width, int) or isinstance(width, bool) or not 0 < width < 1 << 31:
            raise FormatError(
                f"{self.path}: the text model has no {' or '.join(names)}, which an mmproj file states", "QK-E112"
            )
        return width


def _check_image_sizes(config: Config) -> None:
    """Raise FormatError for the size of an image, or a limit of its pixels, that is not positive."""
    size = config.get("size")
    sizes = {**config.values, **(size if isinstance(size, dict) else {})}
    for name in _IMAGE_SIZES:
        value = sizes.get(name)
        if isinstance(value, bool) or (isinstance(value, (int, float)) and not value > 0):
            raise FormatError(f"{config.path}: {name} is {short(value)}, and must be positive", "QK-E112")


def read_preprocessor(folder: Path) -> Json:
    """Return the settings of preprocessor_config.json and processor_config.json, the latter's first."""
    values: Json = {}
    for file, inner in (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor")):
        settings = optional_json(folder / file) or {}
        nested = settings.get(inner, {})
        values |= {**settings, **(nested if isinstance(nested, dict) else {})}
    return values


#: Writes keys of an mmproj file.
SetMmprojKeys = Callable[[Keys, MmprojConfig], None]
#: Where a part of the configuration lies.
FindPart = Callable[[Json], Any]


@dataclass(frozen=True)
class Key:
    """A key whose value ``compute`` returns; none if it is None."""

    key: str
    compute: Callable[[MmprojConfig], Any]
    kind: str = "u32"

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        if (value := self.compute(config)) is not None:
            getattr(keys, self.kind)(self.key, value)


@dataclass(frozen=True)
class EncoderKey:
    """A key of an encoder: the first of ``names`` in its configuration, else ``default``, else an error.

    ``section``: the part of the configuration: vision, audio, model, preprocessor. ``positive``: a runtime divides by
    it.
    """

    key: str
    names: str
    kind: str = "u32"
    section: str = "vision"
    default: Any = None
    optional: bool = False
    positive: bool = False

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        part: Config = getattr(config, self.section)
        name = next((name for name in self.names.split() if name in part), None)
        if name is None and self.default is None:
            if self.optional:
                return
            raise FormatError(
                f"{part.path}: the {self.section} has no {self.names.replace(' ', ' or ')}, which "
                f"{keys.arch}{self.key} states",
                "QK-E112",
            )
        value = self.default if name is None else part[name]
        if value is None:
            raise FormatError(f"{part.path}: {name} of the {self.section} encoder is null", "QK-E112")
        if self.positive and isinstance(value, (int, float)) and not value > 0:
            raise FormatError(
                f"{part.path}: {name} of the {self.section} encoder is {short(value)}, and must be positive", "QK-E112"
            )
        getattr(keys, self.kind)(self.key, value)


@dataclass(frozen=True)
class Projector:
    """The key of a projector's type."""

    name: str
    key: str = "clip.projector_type"

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        """The types that each key may have."""
        return {self.key: (self.name,)}

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        keys.text(self.key, self.name)


def projector(name: str, key: str = "clip.projector_type") -> Projector:
    """Return the row of a projector's type."""
    return Projector(name, key)


def constant(key: str, value: Any, kind: str = "u32") -> Key:
    """Return the row of a key that has the same value in all files."""
    return Key(key, lambda config: value, kind)


USE_GELU = constant("clip.use_gelu", True, "flag")
USE_SILU = constant("clip.use_silu", True, "flag")
MERGE_SIZE = EncoderKey(".vision.spatial_merge_size", "spatial_merge_size", optional=True)
SCALE_FACTOR = ".vision.projector.scale_factor"


def inverse_scale(ratio: str, section: str = "vision") -> Key:
    """Return the row of a projector's scale: the inverse of ``ratio``, rounded down."""

    def compute(config: MmprojConfig) -> int:
        part: Config = getattr(config, section)
        value = part[ratio]
        if not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise FormatError(f"{part.path}: {ratio} is {short(value)}, not a part of 1", "QK-E112")
        return int(1.0 / value)

    return Key(SCALE_FACTOR, compute)


@dataclass(frozen=True)
class Activation:
    """The flag of a vision encoder's activation; ``default``: where hidden_act is absent.

    Of others than those of ``gelu`` and SiLU none is written with ``lenient``; else they are an error.
    """

    gelu: tuple[str, ...] = ("gelu",)
    silu: tuple[str, ...] = ("silu",)
    default: str | None = None
    lenient: bool = False

    def __call__(self, keys: Keys, config: MmprojConfig) -> None:
        name = config.vision["hidden_act"] if self.default is None else config.vision.get("hidden_act", self.default)
        if self.default is not None:
            name = str(name).lower()
        if name in self.gelu:
            USE_GELU(keys, config)
        elif name in self.silu:
            USE_SILU(keys, config)
        elif not self.lenient:
            raise FormatError(
                f"{config.path}: hidden_act of the vision encoder is {short(name)}; supported are "
                f"{', '.join((*self.gelu, *self.silu))}",
                "QK-E305",
            )


#: Of classes that write no flag for other activations.
OPTIONAL_ACTIVATION = Activation(default="", lenient=True)

#: The fewest and the most pixels of an image.
PIXELS = tuple(
    EncoderKey(f".vision.image_{name}", name, section="preprocessor") for name in ("min_pixels", "max_pixels")
)


def layer_norm_epsilon(names: str, default: float | None = None, section: str = "vision") -> EncoderKey:
    """Return the row of the epsilon of an encoder's norms."""
    encoder = "audio" if section == "audio" else "vision"
    return EncoderKey(f".{encoder}.attention.layer_norm_epsilon", names, "f32", section=section, default=default)


def channel_values(name: str) -> Key:
    """Return the row of a setting of the preprocessor with a number for each channel of an image, by which llama.cpp
    shifts (image_mean) or divides (image_std)."""

    def compute(config: MmprojConfig) -> list[float]:
        part = config.preprocessor
        values = part.get(name)
        if not isinstance(values, list) or len(values) < 3 or any(type(value) not in (int, float) for value in values):
            raise FormatError(
                f"{part.path}: {name} is {short(values)}, not a number for each of three channels; the file comes with "
                "the checkpoint",
                "QK-E112",
            )
        if name == "image_std" and not all(value > 0 for value in values):
            raise FormatError(f"{part.path}: image_std is {short(values)}: all must be positive", "QK-E112")
        return values

    return Key(f".vision.{name}", compute, "array")


#: Keys of a vision encoder (MmprojModel.set_gguf_parameters).
VISION_KEYS: tuple[SetMmprojKeys, ...] = (
    constant(".has_vision_encoder", True, "flag"),
    Key(".vision.projection_dim", lambda config: config.text_width),
    EncoderKey(".vision.image_size", "image_size"),
    EncoderKey(".vision.patch_size", "patch_size", positive=True),
    EncoderKey(".vision.embedding_length", "hidden_size width vt_hidden_size"),
    EncoderKey(".vision.feed_forward_length", "intermediate_size vt_intermediate_size"),
    EncoderKey(".vision.block_count", LAYER_COUNTS),
    EncoderKey(".vision.attention.head_count", "num_attention_heads num_heads heads vt_num_attention_heads"),
    channel_values("image_mean"),
    channel_values("image_std"),
)

#: Keys of an audio encoder.
AUDIO_KEYS: tuple[SetMmprojKeys, ...] = (
    constant(".has_audio_encoder", True, "flag"),
    Key(".audio.projection_dim", lambda config: config.text_width),
    EncoderKey(".audio.embedding_length", "hidden_size", section="audio"),
    EncoderKey(".audio.feed_forward_length", "intermediate_size", section="audio"),
    EncoderKey(".audio.block_count", LAYER_COUNTS, section="audio"),
    EncoderKey(".audio.attention.head_count", "num_attention_heads", section="audio"),
)


def _vision_config(outer: Json) -> Any:
    return outer.get("vision_config")


def _audio_config(outer: Json) -> Any:
    return outer.get("whisper_config" if "whisper_config" in outer else "audio_config")


@dataclass(frozen=True)
class Mmproj:
    """The conversion of a class's encoders to an mmproj file."""

    #: Keys after those of the encoders.
    keys: tuple[SetMmprojKeys, ...]
    #: The stored names that belong to the encoders, as a regular expression; those of the language model never do.
    tensors: str = ""
    #: Applied to names of stored tensors: they may only rename and drop.
    stored: tuple[Rule, ...] = ()
    #: Applied to tensors, in order.
    rules: tuple[Rule, ...] = ()
    #: The encoders that the class has.
    vision: bool = True
    audio: bool = False
    vision_config: FindPart = _vision_config
    audio_config: FindPart = _audio_config
    #: The values of config.json, if they are not those of the file.
    read_config: Callable[[Config], Json] = field(default=lambda config: config.outer)
    #: Files in other folders of the checkpoint that decide metadata.
    files: tuple[str, ...] = ()
    #: Changes to the configuration before anything else.
    patch_config: Callable[[MmprojConfig], None] = field(default=lambda config: None)
    #: All keys up to ``keys``; None: those of the encoders.
    base: tuple[SetMmprojKeys, ...] | None = None
    #: Keys before the type of the file.
    first: tuple[SetMmprojKeys, ...] = ()
    #: Tensors that are not stored; they come first.
    synthetic: Callable[[MmprojConfig], Iterable[Tensor]] = field(default=lambda config: ())
    #: Parts of names in the file, and the type of such tensors in files of all types; None: F16 in F16 files, else F32.
    forced: tuple[tuple[str, TensorType | None], ...] = ()
    #: Another row for some configurations of the class.
    dispatch: Callable[[Json], Mmproj | None] = field(default=lambda outer: None)
    #: The rows that ``dispatch`` returns.
    variants: tuple[Mmproj, ...] = ()

    @property
    def base_keys(self) -> tuple[SetMmprojKeys, ...]:
        """The keys of the encoders."""
        if self.base is not None:
            return self.base
        return (*(VISION_KEYS if self.vision else ()), *(AUDIO_KEYS if self.audio else ()))

    @property
    def projectors(self) -> tuple[str, ...]:
        """The projector types of its files; several for several encoders, or configurations."""
        types: dict[str, tuple[str, ...]] = {}
        for write in (*self.first, *self.base_keys, *self.keys):
            types |= getattr(write, "projectors", {})  # a key that occurs twice has its last value
        names = [name for names in types.values() for name in names]
        return tuple(dict.fromkeys([*names, *(name for row in self.variants for name in row.projectors)]))

    def layers(self, config: MmprojConfig) -> int:
        """Return the number of layers that names of tensors may have."""
        if self.vision and self.audio:
            return MAX_LAYERS
        return min(config.number(*LAYER_COUNTS.split()), 1 << 16)


#: The convolutions of patches are in full precision.
_FULL = ((".patch_embd.weight", None), (".patch_merger.weight", None))


def forced_type(row: Mmproj, name: str, outtype: TensorType) -> TensorType | None:
    """Return the type of the tensor ``name`` of an mmproj file whatever the file's; None for that of the file."""
    for part, forced in (*row.forced, *_FULL):
        if part in name:
            return forced or (TYPE_F16 if outtype is TYPE_F16 else TYPE_F32)
    return None
