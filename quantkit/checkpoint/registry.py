"""The rows of all modules in ``models``: one module a model family."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

from quantkit.checkpoint import models
from quantkit.checkpoint.adapter_model import read_adapter_model
from quantkit.checkpoint.config import Config, read_config, read_native
from quantkit.checkpoint.hf_encoders import HfEncoders
from quantkit.checkpoint.mmproj import Mmproj
from quantkit.checkpoint.row import Architecture, HfClass, Layout
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture]
#: Model class -> how transformers has it, for export; those with a condition first.
CLASSES: dict[str, HfClass]
#: Model class -> how its encoders are converted to an mmproj file.
MMPROJ: dict[str, Mmproj]
#: Model class -> how transformers has it with its encoders, for export.
HF_ENCODERS: dict[str, HfEncoders]
#: Classes that are known by files of the checkpoint.
LAYOUTS: tuple[Layout, ...]
#: The rows of Mistral's own format, and those of its encoders.
NATIVE: dict[str, Architecture]
NATIVE_MMPROJ: dict[str, Mmproj]


class _Tables(NamedTuple):
    """The tables of this module, by their names."""

    ARCHITECTURES: dict[str, Architecture]
    CLASSES: dict[str, HfClass]
    MMPROJ: dict[str, Mmproj]
    HF_ENCODERS: dict[str, HfEncoders]
    LAYOUTS: tuple[Layout, ...]
    NATIVE: dict[str, Architecture]
    NATIVE_MMPROJ: dict[str, Mmproj]


@cache
def _tables() -> _Tables:
    """Collect the rows of all families, whose import takes longer than most commands on GGUF files."""
    modules = [import_module(f"{models.__name__}.{module.name}") for module in iter_modules(models.__path__)]

    def rows(table: str) -> dict[str, Any]:
        return {name: row for module in modules for name, row in getattr(module, table, {}).items()}

    classes = dict(sorted(rows("CLASSES").items(), key=lambda item: item[1].matches is None))
    layouts = tuple(layout for module in modules for layout in getattr(module, "LAYOUTS", ()))
    return _Tables(
        rows("ARCHITECTURES"),
        classes,
        rows("MMPROJ"),
        rows("HF_ENCODERS"),
        layouts,
        rows("NATIVE"),
        rows("NATIVE_MMPROJ"),
    )


def __getattr__(name: str) -> Any:
    """Return a table of this module when it is first used."""
    if name in _Tables._fields:
        return getattr(_tables(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def read_model(folder: Path, native: bool = False, base: Path | None = None) -> Config:
    """Return the configuration of a checkpoint, of the class that its files are of. Raises FormatError.

    Args:
        folder: the checkpoint.
        native: it is in Mistral's own format (--mistral-format).
        base: of a model that is an adapter, the checkpoint of its base; None for the one that it names.
    """
    if native:
        return read_native(folder)
    layout = next((layout for layout in _tables().LAYOUTS if layout.matches(folder)), None)
    if layout is not None and layout.adapter:
        return read_adapter_model(folder, layout.adapter, base)
    return read_config(folder) if layout is None or layout.read is None else layout.read(folder)


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = (_tables().NATIVE if config.is_native else _tables().ARCHITECTURES).get(config.architecture)
    if row is not None:
        return row.dispatch(config) or row
    if config.architecture in _tables().MMPROJ:
        raise TypeNotSupported(
            f"{config.path}: of the class {short(config.architecture)} only the encoders are converted, as by "
            "llama.cpp: use --mmproj-only; its text model is a checkpoint of its own, or text_config names its class",
            "QK-E304",
        )
    similar = get_close_matches(config.architecture, _tables().ARCHITECTURES, 3)
    like = f"; similar classes: {', '.join(similar)}" if similar else ""
    raise TypeNotSupported(
        f"{config.path}: the class {short(config.architecture)} is not supported by this version{like}; see `quantkit "
        "convert --list`",
        "QK-E304",
    )


def find_mmproj(config: Config) -> Mmproj:
    """Return the row of the encoders of a configuration. Raises TypeNotSupported if its class has none."""
    name = encoder_class(config)
    row = (_tables().NATIVE_MMPROJ if config.is_native else _tables().MMPROJ).get(name)
    if row is not None:
        return row.dispatch(config.outer) or row
    raise TypeNotSupported(
        f"{config.path}: the class {short(name)} has no vision or audio encoder that this version converts; see "
        "`quantkit convert --list`",
        "QK-E304",
    )


def has_encoders(config: Config) -> bool:
    """Return whether a configuration describes encoders, of a class that is converted."""
    outer = config.outer
    if config.is_native:
        return isinstance(outer.get("vision_encoder"), dict)
    thinker = outer.get("thinker_config")
    parts = [outer, *([thinker] if isinstance(thinker, dict) else [])]
    described = any(part.get(key) for part in parts for key in ("vision_config", "audio_config", "encoder_config"))
    return described and encoder_class(config) in _tables().MMPROJ


def encoder_class(config: Config) -> str:
    """Return the class of the encoders: that of vision_config, or that of the model (get_model_architecture)."""
    if config.is_native:
        return next(iter(_tables().NATIVE_MMPROJ))
    vision = config.outer.get("vision_config")
    for values in (vision if isinstance(vision, dict) else {}, config.outer):
        names = values.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
    return config.architecture
