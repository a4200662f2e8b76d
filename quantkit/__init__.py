"""quantkit: quantize, convert and validate GGUF models, offline and byte-exact.

Every command is a function of the same name: ``quantkit quantize`` is ``quantkit.quantize(...)``. Functions are
imported on first use, so that the command line starts at once and can be interrupted at any time.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit.bench import bench, sweep_bench
    from quantkit.cache import prune_cache, show_cache, verify_cache
    from quantkit.calibration import calibration
    from quantkit.compare import compare
    from quantkit.convert import ConvertOptions, convert, plan_convert
    from quantkit.cook import cook, plan_cook
    from quantkit.errors import QuantkitError
    from quantkit.evaluate import kld, logits, perplexity
    from quantkit.export import export, plan_export
    from quantkit.imatrix import imatrix
    from quantkit.inspect import inspect
    from quantkit.lora import convert_lora, plan_convert_lora
    from quantkit.merge import merge_up_gate, split_up_gate
    from quantkit.model.engine import load
    from quantkit.options.export import ExportOptions
    from quantkit.options.imatrix import ImatrixOptions
    from quantkit.options.search import SearchOptions
    from quantkit.options.sensitivity import SensitivityOptions
    from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
    from quantkit.recipes import write_recipe
    from quantkit.report import ReportOptions, report
    from quantkit.search import search, search_front
    from quantkit.sensitivity import read_sensitivity, sensitivity

__all__ = [
    "ConvertOptions",
    "ExportOptions",
    "ImatrixOptions",
    "QuantizeOptions",
    "QuantkitError",
    "ReportOptions",
    "SearchOptions",
    "SensitivityOptions",
    "__version__",
    "bench",
    "calibration",
    "compare",
    "convert",
    "convert_lora",
    "cook",
    "export",
    "imatrix",
    "inspect",
    "kld",
    "load",
    "logits",
    "merge_up_gate",
    "perplexity",
    "plan_convert",
    "plan_convert_lora",
    "plan_cook",
    "plan_export",
    "plan_quantize",
    "prune_cache",
    "quantize",
    "report",
    "read_sensitivity",
    "search",
    "search_front",
    "sensitivity",
    "show_cache",
    "split_up_gate",
    "sweep_bench",
    "verify_cache",
    "write_recipe",
]

#: The module of every name above.
_HOME = {
    "ConvertOptions": "options.convert",
    "ExportOptions": "options.export",
    "ImatrixOptions": "options.imatrix",
    "QuantizeOptions": "options.quantize",
    "QuantkitError": "errors",
    "ReportOptions": "report",
    "SearchOptions": "options.search",
    "SensitivityOptions": "options.sensitivity",
    "bench": "bench",
    "calibration": "calibration",
    "compare": "compare",
    "convert": "convert",
    "convert_lora": "lora",
    "cook": "cook",
    "export": "export",
    "imatrix": "imatrix",
    "inspect": "inspect",
    "kld": "evaluate",
    "load": "model.engine",
    "logits": "evaluate",
    "merge_up_gate": "merge",
    "perplexity": "evaluate",
    "plan_convert": "convert",
    "plan_convert_lora": "lora",
    "plan_cook": "cook",
    "plan_export": "export",
    "plan_quantize": "quantize",
    "prune_cache": "cache",
    "quantize": "quantize",
    "report": "report",
    "read_sensitivity": "sensitivity",
    "search": "search",
    "search_front": "search",
    "sensitivity": "sensitivity",
    "show_cache": "cache",
    "split_up_gate": "merge",
    "sweep_bench": "bench",
    "verify_cache": "cache",
    "write_recipe": "recipes",
}


class _Package(ModuleType):
    """The package module: an attribute with the name of both a verb and its module is the verb."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        member = getattr(importlib.import_module(f"quantkit.{_HOME[name]}"), name)
        setattr(self, name, member)
        return member

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of the module quantkit.quantize would put it where the function quantkit.quantize belongs.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


sys.modules[__name__].__class__ = _Package
