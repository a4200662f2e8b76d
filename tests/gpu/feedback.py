"""Compare whole files with error feedback, written by GPUs and by the CPU; run by scripts/gpu_check.

    feedback    a small MoE by `quantize --feedback --backend cuda` and by the CPU: the same bytes, the same losses of
                every matrix; seconds of both

Needs numba beside numpy and CuPy. Of the experts some saw enough tokens, some few, and some too few for feedback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import make_moe
import numpy as np

from gpu.encoding import both_ways, is_first, machine
from quantkit.cpus import available_cpus
from quantkit.formats.gguf import Field, ValueType, write_gguf
from quantkit.formats.imatrix import write_imatrix
from quantkit.types import BY_NAME, TensorType

if TYPE_CHECKING:
    from gpu.run import Run

#: Recipes by TYPE, and whether with an importance matrix: levels that are chosen one by one, and points of a grid.
RECIPES = {"Q4_K_M": False, "IQ2_XS": True}
#: What shares inputs, and tokens of experts for each column of them, one expert after the other.
_SHARED = {"attn_q": ("attn_k", "attn_v"), "ffn_up_exps": ("ffn_gate_exps",), "attn_output": (), "ffn_down_exps": ()}
_TOKENS = (5.0, 2.0, 0.5)


@dataclass
class File:
    """The file that is quantized; tests of this script make it small."""

    shapes: make_moe.Model = make_moe.Model(1, 8, 2, 2048, 768, 16, 4, 128, 4096)


FILE = File()


def _covariances(model: make_moe.Model) -> Iterator[tuple[str, tuple[int, ...], TensorType, bytes]]:
    """Yield the tensors of a file of covariances, of columns that depend on their neighbours."""
    f32 = BY_NAME["F32"]
    for name, shape in model.tensors().items():
        kind = name.split(".")[-2]
        if kind not in _SHARED:
            continue
        n, matrices = shape[0], math.prod(shape[2:])
        counts = np.array([_TOKENS[i % len(_TOKENS)] * n for i in range(matrices)], np.float32)
        sums = np.empty((matrices, n, n), np.float32)
        for i in range(matrices):
            rng = make_moe.generator(2, len(name), i)
            x = rng.standard_normal((n + n // 4, n), np.float32) * np.exp(rng.standard_normal(n, np.float32))
            x[:, 1:] += np.float32(0.7) * x[:, :-1]
            sums[i] = x.T @ x
        yield f"{name}.cov", (n, n, matrices), f32, sums.tobytes()
        yield f"{name}.counts", (matrices,), f32, counts.tobytes()


def _source(folder: Path) -> tuple[Path, Path, Path]:
    """Return the model, its covariances and its importance matrix; written once."""
    path, cov, imatrix = (folder / f"fed{suffix}.gguf" for suffix in ("", "-cov", "-imatrix"))
    if not imatrix.exists():
        model = FILE.shapes
        make_moe.write_model(path, model, "f16", make_moe.tokenizer_fields(None), 1, available_cpus())
        lines = [
            f"blk.{i}.{kind}.weight: " + " ".join(f"blk.{i}.{other_kind}.weight" for other_kind in shared_kinds)
            for i in range(model.layers)
            for kind, shared_kinds in _SHARED.items()
        ]
        field = Field.of("quantkit.covariance.inputs", lines, ValueType.ARRAY, ValueType.STRING)
        write_gguf(cov, [Field.of("general.type", "covariance"), field], list(_covariances(model)))
        write_imatrix(imatrix, make_moe.random_imatrix(imatrix, model, 1))
    return path, cov, imatrix


def feedback(run: Run) -> None:
    """Whole files with error feedback: GPUs and CPU write the same bytes, and report the same losses."""
    todo = run.todo("feedback", [name for name in RECIPES if name.removesuffix("_M") in run.types])
    if not todo:
        return
    if run.lacks_numba("feedback"):
        return
    from quantkit.pipeline.feedback_report import feedback_report
    from quantkit.quantize import QuantizeOptions

    weights = sum(math.prod(shape) for shape in FILE.shapes.tensors().values())

    def of_recipe(name: str) -> None:
        source, cov, imatrix = _source(run.folder)
        if is_first(run, "feedback"):
            run.say(f"\nerror feedback: a MoE of {weights / 1e6:.1f} M weights, F16, with covariances; {machine()}")
        options = QuantizeOptions(feedback=cov, imatrix=imatrix if RECIPES[name] else None)
        both = both_ways(run, f"feedback: {name}", source, name, options, weights)
        on_gpus, on_cpu = (feedback_report(result.plan, result.run.losses) for result in both)
        run.check(f"feedback: {name}, losses that differ from the CPU's", on_cpu is None or on_gpus != on_cpu, 0)

    run.for_each("feedback", todo, of_recipe, needs=90)
