"""What a searched recipe gains: its divergence from the full-precision model, at the size of each preset.

    benchmarks/search_kld.py MODEL.gguf S.json IMATRIX.gguf TEXT [--skip N] [--presets Q2_K,..] [--plot FILE.svg]

The recipe that `quantkit search` finds for the size of a preset's file, and that file, both with the importance matrix,
are compared with the model on a text of which the first N chunks, those of S.json, are left out. The third is the
allocation of least error of the weights, weighted by the importance matrix and the size of tensors, as
llama.cpp PR #15550 has it, at the same size. Ratios are paired token by token, with intervals of 95 %; then how well
predictions rank all of these files, by Spearman's correlation, and a plot.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from feedback_kld import Measured, ratio
from processes import machine, work_folder

import quantkit
from quantkit.evaluate.likelihood import SaveLogits
from quantkit.quantize import QuantizeOptions, plan_quantize, run_quantize
from quantkit.search import Allocation, SearchOptions, search
from quantkit.search.weights import weight_errors
from quantkit.sensitivity.file import Sensitivity, read_sensitivity

PRESETS = "Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,IQ2_XXS,IQ3_XXS,IQ4_XS"


@dataclass(frozen=True)
class Row:
    """A file: what it is called, the divergence that was predicted, and what was measured."""

    name: str
    nbytes: int
    predicted: float
    measured: Measured


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return the correlation of the ranks."""
    ranks = [np.argsort(np.argsort(np.asarray(each))) for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


class Runs:
    """Files made, measured and removed, in a folder that has the base logits."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        with quantkit.load(given.model) as model:
            tokens = np.asarray(model.tokenize(given.text.read_text(), add_special=False))
        kept = tokens[given.skip * given.ctx :]
        base = SaveLogits(folder / "base")
        quantkit.perplexity(given.model, tokens=kept, n_ctx=given.ctx, chunks=given.chunks, save_logits=base)

    def measured(self, type_name: str, options: QuantizeOptions) -> Measured:
        path = self.folder / "out.gguf"
        plan = plan_quantize(self.given.model, path, type_name, options)
        run_quantize(plan, overwrite=True, threads=self.given.threads, cache=self.given.cache)
        sums = quantkit.kld(path, self.folder / "base", threads=self.given.threads).sums
        return Measured(np.concatenate(sums.klds), sums.same_top_p.value, sums.nll.ppl.value, 0.0)

    def searched(self, found: Allocation) -> Measured:
        return self.measured(found.type_name, found.options)
