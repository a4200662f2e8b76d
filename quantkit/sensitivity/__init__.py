"""How much each group of tensors costs in each type: measured on held-out text, one group quantized at a time.

encode     groups of a model, and their rows in every type, as quantize writes them
variants   a model with one group changed: only what depends on it runs
scores     divergence and change of likelihood, with the base's logits in memory
experts    how often experts are chosen, and what of the error falls on rare ones
proxies    costs guessed from errors of weights, and how well that predicts
layer_errors  costs guessed from errors where layers end
measure    a run, layer by layer; journal: what it has measured so far
file       the file that search, reports and cooks read
"""

from __future__ import annotations

from quantkit.sensitivity.file import Cost, Group, Sensitivity, read_sensitivity
from quantkit.sensitivity.measure import SensitivityOptions, SensitivityProgress, sensitivity

__all__ = [
    "Cost",
    "Group",
    "Sensitivity",
    "SensitivityOptions",
    "SensitivityProgress",
    "read_sensitivity",
    "sensitivity",
]
