"""The quick tests, ``pytest -m quick``: for each module of quantkit one that runs it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quantkit"
TARGET = ROOT / "tests" / "quick.json"

_BYTES = "tests/kernels/test_kernels.py::test_golden_encoding_with_imatrix"
#: Compiled modules, whose functions Python does not call, with a test that calls the compiled code.
COMPILED = {
    "kernels/cpu/attention/cache_rounding.py": "tests/kernels/test_cache_rounding.py::test_iq4_nl_fits_one_scale",
    **{f"kernels/cpu/encode/ik_{n}.py": f"{_BYTES}[IQ4_KS]" for n in ("blocks", "levels", "scales", "search")},
    **{f"kernels/cpu/encode/ik_{n}.py": f"{_BYTES}[IQ2_KL]" for n in ("pairs", "partitions")},
    "kernels/cpu/encode/ik_parity.py": f"{_BYTES}[IQ4_KSS]",
    "kernels/cpu/encode/lattice.py": "tests/kernels/test_lattice.py::test_ternary_weights_are_found",
    "kernels/cpu/encode/fp4.py": f"{_BYTES}[MXFP4]",
    **{
        f"kernels/cpu/encode/trellis{n}.py": "tests/kernels/test_kernels.py::test_round_trip_error[IQ2_KT]"
        for n in ("", "_lists", "_search")
    },
}
#: Modules that no test calls in its own process, with the reason.
ELSEWHERE = {
    "__main__.py": "the process of a command",
    **dict.fromkeys(("foreign/grammars.py", "foreign/serve.py", "foreign/template.py"), "a child with limits"),
    **dict.fromkeys(("pipeline/ray_gpus.py", "pipeline/ray_tasks.py"), "a cluster, which takes seconds to start"),
    "kernels/cuda/core/peak.py": "needs a GPU",
}


def has_functions(path: Path) -> bool:
    """Return whether a module has functions with a body; the others are tables and protocols."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    bodies = (node.body for node in nodes if isinstance(node, ast.FunctionDef))
    return any(not all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in body) for body in bodies)


def modules() -> list[str]:
    """Return the modules that a quick test must run, as paths within the package."""
    return sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if has_functions(p))


def quick_test_of() -> dict[str, str]:
    """Return the test that calls functions of each module, as scripts/choose_quick.py entered it."""
    entries: dict[str, str] = json.loads(TARGET.read_text(encoding="utf-8"))
    return entries


def quick_tests() -> frozenset[str]:
    """Return the quick tests, without those of the table itself (test_quick.py)."""
    return frozenset({*quick_test_of().values(), *COMPILED.values()})
