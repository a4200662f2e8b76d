"""quantkit: quantize, convert and validate GGUF models, offline and byte-exact.

Every command is a function: ``quantkit quantize`` is ``quantkit.quantize(...)``, ``quantkit merge-up-gate`` is
``quantkit.merge_up_gate(...)``, and a command of a group has the group's name after its own: ``quantkit recipe lint``
is ``quantkit.lint_recipe(...)``. ``__all__`` lists the whole public interface. Names are imported on first use, so that
the command line starts at once and can be interrupted at any time.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantkit.version import __version__

if TYPE_CHECKING:
    from quantkit import errors, evaluate, kernels, recipes
    from quantkit.bench import bench, sweep_bench
    from quantkit.cache import prune_cache, show_cache, verify_cache
    from quantkit.calibration import calibration
    from quantkit.catalog import presets, types
    from quantkit.compare import compare
    from quantkit.convert import ConvertOptions, convert, convert_mmproj, plan_convert, plan_mmproj
    from quantkit.cook import cook, plan_cook
    from quantkit.doctor import doctor
    from quantkit.drift import drift
    from quantkit.edit import EditOptions, edit, plan_edit
    from quantkit.embed import embed
    from quantkit.errors import QuantkitError
    from quantkit.evaluate import kld, logits, perplexity
    from quantkit.export import export, plan_export
    from quantkit.fit import FitOptions, fit
    from quantkit.formats.covariance import Covariances
    from quantkit.formats.gguf import Field, ValueType
    from quantkit.formats.imatrix import read_imatrix, write_imatrix
    from quantkit.generate import generate
    from quantkit.hash import check_sums, hash, write_sums
    from quantkit.imatrix import convert_imatrix, diff_imatrix, imatrix, merge_imatrix, show_imatrix
    from quantkit.imatrix.covariance import covariance
    from quantkit.inspect import inspect
    from quantkit.lora import convert_lora, plan_convert_lora
    from quantkit.merge import merge_up_gate, split_up_gate
    from quantkit.model.engine import load
    from quantkit.options.export import ExportOptions
    from quantkit.options.imatrix import ImatrixOptions
    from quantkit.options.search import SearchOptions
    from quantkit.options.sensitivity import SensitivityOptions
    from quantkit.progress import Progress
    from quantkit.prune import plan_prune_experts, prune_experts
    from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
    from quantkit.recipes import convert_recipe, diff_recipe, lint_recipe, parse_recipe, show_recipe, write_recipe
    from quantkit.report import ReportOptions, report
    from quantkit.score import score
    from quantkit.search import search, search_front
    from quantkit.sensitivity import read_sensitivity, sensitivity
    from quantkit.split import join, plan_join, plan_split, split
    from quantkit.stitch import plan_stitch, stitch
    from quantkit.tensors import GGUFFile, open_gguf, write_gguf
    from quantkit.texts import texts
    from quantkit.upload import plan_upload, upload

__all__ = [
    "ConvertOptions",
    "Covariances",
    "EditOptions",
    "ExportOptions",
    "Field",
    "FitOptions",
    "GGUFFile",
    "ImatrixOptions",
    "Progress",
    "QuantizeOptions",
    "QuantkitError",
    "ReportOptions",
    "SearchOptions",
    "SensitivityOptions",
    "ValueType",
    "__version__",
    "bench",
    "calibration",
    "check_sums",
    "compare",
    "convert",
    "convert_mmproj",
    "convert_imatrix",
    "convert_lora",
    "convert_recipe",
    "cook",
    "covariance",
    "diff_imatrix",
    "diff_recipe",
    "doctor",
    "drift",
    "edit",
    "embed",
    "errors",
    "evaluate",
    "export",
    "fit",
    "generate",
    "hash",
    "imatrix",
    "inspect",
    "join",
    "kernels",
    "kld",
    "lint_recipe",
    "load",
    "logits",
    "merge_imatrix",
    "merge_up_gate",
    "open_gguf",
    "parse_recipe",
    "perplexity",
    "plan_convert",
    "plan_convert_lora",
    "plan_mmproj",
    "plan_cook",
    "plan_edit",
    "plan_export",
    "plan_join",
    "plan_prune_experts",
    "plan_quantize",
    "plan_split",
    "plan_stitch",
    "plan_upload",
    "presets",
    "prune_cache",
    "prune_experts",
    "quantize",
    "read_imatrix",
    "read_sensitivity",
    "recipes",
    "report",
    "score",
    "search",
    "search_front",
    "sensitivity",
    "show_cache",
    "show_imatrix",
    "show_recipe",
    "split",
    "split_up_gate",
    "stitch",
    "sweep_bench",
    "texts",
    "types",
    "upload",
    "verify_cache",
    "write_gguf",
    "write_imatrix",
    "write_recipe",
    "write_sums",
]

#: The module of every name above; "" for a module of this package.
_HOME = {
    **dict.fromkeys(("errors", "evaluate", "kernels", "recipes"), ""),
    "ConvertOptions": "options.convert",
    "Covariances": "formats.covariance",
    "EditOptions": "options.edit",
    "ExportOptions": "options.export",
    "Field": "formats.gguf",
    "FitOptions": "fit",
    "GGUFFile": "tensors",
    "ImatrixOptions": "options.imatrix",
    "Progress": "progress",
    "QuantizeOptions": "options.quantize",
    "QuantkitError": "errors",
    "ReportOptions": "report",
    "SearchOptions": "options.search",
    "SensitivityOptions": "options.sensitivity",
    "ValueType": "formats.gguf",
    "bench": "bench",
    "calibration": "calibration",
    "check_sums": "hash",
    "compare": "compare",
    "convert": "convert",
    "convert_mmproj": "convert",
    "convert_imatrix": "imatrix",
    "convert_lora": "lora",
    "convert_recipe": "recipes",
    "cook": "cook",
    "doctor": "doctor",
    "drift": "drift",
    "edit": "edit",
    "embed": "embed",
    "covariance": "imatrix.covariance",
    "diff_imatrix": "imatrix",
    "diff_recipe": "recipes",
    "export": "export",
    "fit": "fit",
    "generate": "generate",
    "hash": "hash",
    "imatrix": "imatrix",
    "inspect": "inspect",
    "join": "split",
    "kld": "evaluate",
    "lint_recipe": "recipes",
    "load": "model.engine",
    "logits": "evaluate",
    "merge_imatrix": "imatrix",
    "merge_up_gate": "merge",
    "open_gguf": "tensors",
    "parse_recipe": "recipes",
    "perplexity": "evaluate",
    "plan_convert": "convert",
    "plan_convert_lora": "lora",
    "plan_mmproj": "convert",
    "plan_cook": "cook",
    "plan_edit": "edit",
    "plan_export": "export",
    "plan_join": "split",
    "plan_prune_experts": "prune",
    "plan_quantize": "quantize",
    "plan_split": "split",
    "plan_stitch": "stitch",
    "plan_upload": "upload",
    "presets": "catalog",
    "prune_cache": "cache",
    "prune_experts": "prune",
    "quantize": "quantize",
    "read_imatrix": "formats.imatrix",
    "read_sensitivity": "sensitivity",
    "report": "report",
    "score": "score",
    "search": "search",
    "search_front": "search",
    "sensitivity": "sensitivity",
    "show_cache": "cache",
    "show_imatrix": "imatrix",
    "show_recipe": "recipes",
    "split": "split",
    "split_up_gate": "merge",
    "stitch": "stitch",
    "sweep_bench": "bench",
    "texts": "texts",
    "types": "catalog",
    "upload": "upload",
    "verify_cache": "cache",
    "write_gguf": "tensors",
    "write_imatrix": "formats.imatrix",
    "write_recipe": "recipes",
    "write_sums": "hash",
}


class _Package(ModuleType):
    """The package module: an attribute with the name of both a function and its module is the function."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not _HOME[name]:
            return importlib.import_module(f"quantkit.{name}")
        member = getattr(importlib.import_module(f"quantkit.{_HOME[name]}"), name)
        setattr(self, name, member)
        return member

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of the module quantkit.quantize would replace the function quantkit.quantize.
        if not (_HOME.get(name) and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Package
