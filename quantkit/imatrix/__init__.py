"""Importance matrices: collect them from texts, inspect, compare, merge, convert and fill them.

    imatrix      run texts through a model and accumulate the input of every weight (collect.py)
    statistics   moments of each weight's input and changes between layers, as llama-imatrix --show-statistics
    coverage     parts of a model that a matrix lacks: entries, experts without tokens, invalid values
    difference   compare two matrices, weight by weight
    merge        combine several calibrations as one run over all their texts
    convert      GGUF <-> .dat, merged experts <-> separate ones, with notes on what each conversion loses
    apply_fill   values for experts without tokens, marked in the file so that they are never mistaken for data

``show_imatrix``, ``diff_imatrix``, ``merge_imatrix`` and ``convert_imatrix`` do this on files, as the commands.

Raw data are sums of x^2 and token counts (quantkit.formats.imatrix); everything here is arithmetic on them, in f64.
"""

from __future__ import annotations

from quantkit.imatrix.collect import ImatrixResult, Similarity, Watcher, imatrix
from quantkit.imatrix.coverage import Coverage, CoverageGroup, TensorCoverage, coverage, expected_tensors
from quantkit.imatrix.difference import Difference, TensorDifference, difference
from quantkit.imatrix.files import MergeResult, Names, convert, merge, with_names
from quantkit.imatrix.fill import apply_fill, filled_experts, without_fill
from quantkit.imatrix.rewrite import ImatrixFile, convert_imatrix, merge_imatrix
from quantkit.imatrix.rows import expert_counts, raw
from quantkit.imatrix.show import ImatrixContents, diff_imatrix, show_imatrix
from quantkit.imatrix.statistics import LayerStatistics, Statistics, TensorStatistics, statistics, with_stats
from quantkit.options.imatrix import FILLS, Fill, ImatrixOptions

__all__ = [
    "FILLS",
    "ImatrixContents",
    "ImatrixFile",
    "ImatrixResult",
    "Coverage",
    "CoverageGroup",
    "Difference",
    "Fill",
    "LayerStatistics",
    "MergeResult",
    "Names",
    "ImatrixOptions",
    "Similarity",
    "Statistics",
    "TensorCoverage",
    "TensorDifference",
    "TensorStatistics",
    "Watcher",
    "apply_fill",
    "convert",
    "convert_imatrix",
    "coverage",
    "diff_imatrix",
    "difference",
    "expert_counts",
    "expected_tensors",
    "filled_experts",
    "imatrix",
    "merge",
    "merge_imatrix",
    "raw",
    "show_imatrix",
    "statistics",
    "with_names",
    "with_stats",
    "without_fill",
]
