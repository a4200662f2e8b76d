"""The rows of all modules in ``models``: one module a model family."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from quantkit.checkpoint import models
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.row import Architecture, HfClass
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf.rules import short

_MODULES = [import_module(f"{models.__name__}.{module.name}") for module in iter_modules(models.__path__)]
#: Model class -> how it is converted.
ARCHITECTURES: dict[str, Architecture] = {
    name: row for module in _MODULES for name, row in module.ARCHITECTURES.items()
}
#: Model class -> how transformers has it, for export; those with a condition first.
CLASSES: dict[str, HfClass] = dict(
    sorted(
        (item for module in _MODULES for item in getattr(module, "CLASSES", {}).items()),
        key=lambda item: item[1].matches is None,
    )
)


def find_architecture(config: Config) -> Architecture:
    """Return the row of a configuration's class. Raises TypeNotSupported if there is none."""
    row = ARCHITECTURES.get(config.architecture)
    if row is not None:
        return row.dispatch(config) or row
    similar = get_close_matches(config.architecture, ARCHITECTURES, 3)
    like = f"; similar classes: {', '.join(similar)}" if similar else ""
    raise TypeNotSupported(
        f"{config.path}: the class {short(config.architecture)} is not supported by this version{like}; see `quantkit "
        "convert --list`",
        "QK-E304",
    )
