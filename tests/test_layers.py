"""Imports flow one way, down the list in the design; two wings do not know each other; there are no circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from guide import step

ROOT = Path(__file__).parent.parent / "quantkit"

#: What each part may import, besides itself.
FLOOR = {
    *("version", "types", "errors", "arguments", "extras", "units", "names", "cpus", "foreign", "patterns"),
    *("activations", "mapping", "process", "progress", "records", "html_table"),
}
#: Modules of their own kind, neither floor nor verbs.
STANDALONE = {"cluster"}
ALLOWED = {
    "quantkit": {"version", "verbs", "errors", "formats", "kernels", "model", "progress"},
    "version": set(),
    "types": {"errors"},
    "errors": set(),
    **dict.fromkeys(("activations", "units", "names", "cpus", "mapping", "process", "progress", "html_table"), set()),
    "extras": {"errors"},
    "arguments": {"errors", "types"},
    "foreign": {"errors", "names", "units"},
    "records": {"types"},
    "patterns": {"errors", "foreign", "names", "process"},
    "cluster": {"version", "errors", "mapping", "process"},
    "formats": FLOOR,
    "kernels": FLOOR,
    "checkpoint": FLOOR | {"formats", "kernels"},
    "loaders": FLOOR | {"formats"},
    "pipeline": FLOOR | {"cluster", "formats", "kernels", "loaders"},
    "model": FLOOR | {"formats", "kernels"},
    "verbs": FLOOR | {"cluster", "formats", "kernels", "checkpoint", "pipeline", "model"},
    "cli": FLOOR | {"cluster", "formats", "kernels", "checkpoint", "pipeline", "model", "verbs"},
}
PACKAGES = ("formats", "kernels", "loaders", "checkpoint", "pipeline", "model", "cli")

_BLOCK = {"builder", "ops"}

#: What each module or package within a package may import of the same package, besides itself and the package.
WITHIN: dict[str, dict[str, set[str]]] = {
    "quantkit": {
        **dict.fromkeys(("bench", "cache", "catalog", "tensors"), set[str]()),
        "doctor": {"bench"},
        "edit": {"options"},
        "hash": set(),
        "fit": {"options", "quantize"},
        "upload": {"hash"},
        "chat": set(),
        "generate": {"chat", "evaluate"},
        "score": {"evaluate"},
        "embed": {"evaluate"},
        "drift": {"embed", "evaluate", "score"},
        "split": {"quantize"},
        "stitch": {"hash"},
        "prune": set(),
        "texts": set(),
        "calibration": {"texts"},
        "compare": set(),
        "inspect": set(),
        "quantize": {"calibration", "options", "sequential"},
        "evaluate": {"calibration", "chat"},
        "imatrix": {"calibration", "chat", "evaluate", "options"},
        "sequential": {"evaluate", "imatrix", "options"},
        "merge": {"imatrix"},
        "options": set(),
        "convert": {"unsupported_settings", "options", "quantize"},
        "unsupported_settings": set(),
        "export": {"options", "quantize"},
        "lora": {"convert", "options", "quantize"},
        "recipes": {"quantize"},
        "sensitivity": {"calibration", "evaluate", "imatrix", "options", "quantize", "sequential"},
        "search": {"calibration", "evaluate", "fit", "options", "quantize", "recipes", "sensitivity"},
        "report": {
            "bench",
            "calibration",
            "compare",
            "evaluate",
            "imatrix",
            "inspect",
            "recipes",
            "score",
            "sensitivity",
        },
        "cook": {
            *(
                "calibration",
                "convert",
                "evaluate",
                "imatrix",
                "inspect",
                "quantize",
                "recipes",
                "report",
                "score",
                "search",
            ),
            *("options", "sensitivity"),
        },
    },
    "quantkit.model": {
        **dict.fromkeys(("ops", "batch", "arch", "hparams", "kv_types", "sources"), set()),
        **dict.fromkeys(("fusion", "placement", "observers", "saliency", "scale_sites", "selection"), {"ops"}),
        "cost": {"kv_types", "ops"},
        "stages": {"observers", "ops"},
        "activations": {"observers", "ops", "stages"},
        "check": {"batch", "ops"},
        "builder": {"arch", "hparams", "ops"},
        **dict.fromkeys(("attention", "feed_forward", "hyper_connections", "indexer", "recurrent"), _BLOCK),
        "mla": _BLOCK | {"attention", "indexer"},
        "deepseek4": _BLOCK | {"attention", "indexer", "recurrent"},
        "gemma4": _BLOCK | {"attention", "feed_forward"},
        "gemma3n": _BLOCK | {"gemma4"},
        **dict.fromkeys(("delta_net", "short_convolution"), _BLOCK | {"attention", "recurrent"}),
        "rwkv": _BLOCK | {"recurrent"},
        "mamba": _BLOCK | {"attention", "feed_forward", "recurrent"},
        "kimi": _BLOCK | {"attention", "mla", "recurrent"},
        "lightning": _BLOCK | {"attention", "delta_net", "recurrent"},
        "residual_attention": _BLOCK,
        "encoder": _BLOCK | {"attention"},
        "graph": _BLOCK
        | {"arch", "attention", "check", "deepseek4", "delta_net", "encoder", "feed_forward", "gemma3n", "gemma4"}
        | {"hparams"}
        | {"hyper_connections", "kimi", "lightning", "mamba", "mla", "residual_attention", "rwkv", "short_convolution"},
        "nextn": _BLOCK | {"check", "graph", "hparams"},
        # Backends know operations, not architectures.
        "backends": {"batch", "check", "fusion", "kv_types", "ops"},
        "engine": {"activations", "backends", "batch", "check", "fusion", "graph", "hparams", "kv_types", "ops"}
        | {"placement"}
        | {"selection", "sources"},
        "embeddings": {"backends", "batch", "engine", "ops"},
    },
    "quantkit.model.backends": {
        "accumulators": set(),
        "arena": set(),
        "reference": {"accumulators", "distance_bias"},
        "distance_bias": set(),
        "lowering": {"arena", "distance_bias"},
        "boundary": {"arena", "lowering"},
        "slots": {"arena", "lowering"},
        **dict.fromkeys(("cpu", "cuda"), {"accumulators", "arena", "boundary", "distance_bias", "lowering", "slots"}),
        "registry": {"cpu", "cuda", "reference"},
    },
    "quantkit.model.backends.cuda": {
        **dict.fromkeys(("fuse", "sums", "weights"), set()),
        "lowering": {"sums", "weights"},
        **dict.fromkeys(("cublas", "observe"), {"lowering"}),
        "lower_fused": {"fuse", "lowering"},
        "products": {"cublas", "fuse", "lowering"},
        "ops": {"fuse", "lower_fused", "lowering", "observe", "products"},
        "backend": {"lowering", "ops", "sums", "weights"},
    },
}


def part_of(module: str) -> str:
    """Return the part a dotted name below quantkit belongs to."""
    names = module.split(".")
    if len(names) == 1:
        return "quantkit"
    first = names[1]
    if first in PACKAGES or first in FLOOR | STANDALONE:
        return first
    verb = (ROOT / f"{first}.py").exists() or (ROOT / first / "__init__.py").exists()
    return "verbs" if verb else "quantkit"


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements of a module, those within others too; no expressions, which are most of it."""
    for kind in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, kind, ()):
            yield child
            yield from statements(child)


def imports(path: Path) -> set[str]:
    names = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module} | {f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {m for m in names if m.split(".")[0] == "quantkit"}


def dotted(path: Path) -> str:
    return ".".join(("quantkit", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {dotted(p): p for p in sorted(ROOT.rglob("*.py"))}


@cache
def imported(name: str) -> set[str]:
    """Return the quantkit modules that a module imports, by their longest names."""
    return {m for m in imports(MODULES[name]) if m in MODULES} - {name}


def test_imports_flow_one_way() -> None:
    upward = {}
    for name in MODULES.keys() - {"quantkit.__main__"}:
        part = part_of(name)
        used = {part_of(module) for module in imported(name) if module != "quantkit"} - {part}
        upward[name] = used - ALLOWED[part]
    assert not {name: parts for name, parts in upward.items() if parts}


@pytest.mark.parametrize("package", WITHIN)
def test_imports_within_a_package(package: str) -> None:
    """Every module has a row, and imports no more than it says."""

    def child(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""

    rows = WITHIN[package]
    within = {child(name) for name in MODULES} - {""}
    advice = f"rows of WITHIN[{package!r}] are its modules"
    if package == "quantkit":
        within = {name for name in within if part_of(f"quantkit.{name}") == "verbs"} - {"__main__"}
        advice = step("Add a command", 3)
    assert rows.keys() == within, f"{rows.keys() ^ within}: {advice}"
    for name in MODULES:
        child_package = child(name)
        used = {child(module) for module in imported(name)} & rows.keys() - {child_package}
        assert child_package not in rows or used <= rows[child_package], f"{name} imports {used - rows[child_package]}"


def test_there_are_no_import_cycles() -> None:
    left = {name: {m for m in imported(name) if m != "quantkit" and not name.startswith(f"{m}.")} for name in MODULES}
    while free := [name for name, dependencies in left.items() if not dependencies & left.keys()]:
        for name in free:
            del left[name]
    assert not left
