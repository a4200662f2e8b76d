"""Sensitivity: the divergence that quantizing one group of tensors alone causes, measured on held-out text.

encode            groups of a model and their rows in every type, encoded as ``quantize`` does
variants          a model with one group replaced: runs only the operations that depend on it
scores            KL divergence and change of likelihood against base logits in memory
experts           token shares of experts, and the share of the error that falls on rare ones
proxies           predictions from weight errors, and their rank correlation with measurements
layer_errors      predictions from activation errors at the end of a layer
uniform_models    models with all groups in one type
measure           the run, layer by layer
journal           measurements of an unfinished run
file              the JSON file that search, report and cook read
"""

from __future__ import annotations

from quantkit.options.sensitivity import SensitivityOptions
from quantkit.sensitivity.file import Cost, Group, Sensitivity, read_sensitivity
from quantkit.sensitivity.measure import sensitivity

__all__ = [
    "Cost",
    "Group",
    "Sensitivity",
    "SensitivityOptions",
    "read_sensitivity",
    "sensitivity",
]
