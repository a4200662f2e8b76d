"""The rows of all modules in ``models``: one module a model family."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from quantkit.checkpoint import models
from quantkit.checkpoint.adapter_model import read_adapter_model
from quantkit.checkpoint.config import Config, read_config, read_native
from quantkit.checkpoint.hf_encoders import HfEncoders
from quantkit.checkpoint.mmproj import Mmproj
from quantkit.checkpoint.row import Architecture, HfClass, Layout
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

_MODULES = [import_module(f"{models.__name__}.{module.name}") for module in iter_modules(models.__path__)]
#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    name: row for module in _MODULES for name, row in getattr(module, "ARCHITECTURES", {}).items()
}
#: Model class -> how transformers has it, for export; those with a condition first.
CLASSES: dict[str, HfClass] = dict(
    sorted(
        (item for module in _MODULES for item in getattr(module, "CLASSES", {}).items()),
        key=lambda item: item[1].matches is None,
    )
)
#: Model class -> how its encoders are converted to an mmproj file.
MMPROJ: dict[str, Mmproj] = {name: row for module in _MODULES for name, row in getattr(module, "MMPROJ", {}).items()}
#: Model class -> how transformers has it with its encoders, for export.
HF_ENCODERS: dict[str, HfEncoders] = {
    name: row for module in _MODULES for name, row in getattr(module, "HF_ENCODERS", {}).items()
}

#: Classes that are known by files of the checkpoint.
LAYOUTS: tuple[Layout, ...] = tuple(layout for module in _MODULES for layout in getattr(module, "LAYOUTS", ()))
#: The rows of Mistral's own format, and those of its encoders.
NATIVE: dict[str, Architecture] = {
    name: row for module in _MODULES for name, row in getattr(module, "NATIVE", {}).items()
}
NATIVE_MMPROJ: dict[str, Mmproj] = {
    name: row for module in _MODULES for name, row in getattr(module, "NATIVE_MMPROJ", {}).items()
}


def read_model(folder: Path, native: bool = False, base: Path | None = None) -> Config:
    """Return the configuration of a checkpoint, of the class that its files are of. Raises FormatError.

    Args:
        folder: the checkpoint.
        native: it is in Mistral's own format (--mistral-format).
        base: of a model that is an adapter, the checkpoint of its base; None for the one that it names.
    """
    if native:
        return read_native(folder)
    layout = next((layout for layout in LAYOUTS if layout.matches(folder)), None)
    if layout is not None and layout.adapter:
        return read_adapter_model(folder, layout.adapter, base)
    return read_config(folder) if layout is None or layout.read is None else layout.read(folder)


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = (NATIVE if config.is_native else ARCHITECTURES).get(config.architecture)
    if row is not None:
        return row.dispatch(config) or row
    if config.architecture in MMPROJ:
        raise TypeNotSupported(
            f"{config.path}: of the class {short(config.architecture)} only the encoders are converted, as by "
            "llama.cpp: use --mmproj-only; its text model is a checkpoint of its own, or text_config names its class",
            "QK-E304",
        )
    similar = get_close_matches(config.architecture, ARCHITECTURES, 3)
    like = f"; similar classes: {', '.join(similar)}" if similar else ""
    raise TypeNotSupported(
        f"{config.path}: the class {short(config.architecture)} is not supported by this version{like}; see `quantkit "
        "convert --list`",
        "QK-E304",
    )


def find_mmproj(config: Config) -> Mmproj:
    """Return the row of the encoders of a configuration. Raises TypeNotSupported if its class has none."""
    name = encoder_class(config)
    row = (NATIVE_MMPROJ if config.is_native else MMPROJ).get(name)
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
    return described and encoder_class(config) in MMPROJ


def encoder_class(config: Config) -> str:
    """Return the class of the encoders: that of vision_config, or that of the model (get_model_architecture)."""
    if config.is_native:
        return next(iter(NATIVE_MMPROJ))
    vision = config.outer.get("vision_config")
    for values in (vision if isinstance(vision, dict) else {}, config.outer):
        names = values.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
    return config.architecture
