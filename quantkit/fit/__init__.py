"""Estimate the memory of a model on GPUs and the host: ``quantkit fit``.

Weights, caches and states are computed byte for byte as llama.cpp b11434 allocates them, compute buffers by a replay of
ggml's graph allocator on the engine's graph.
"""

from __future__ import annotations

from quantkit.fit.estimate import CacheKind, Fit, Size, fit
from quantkit.fit.layout import Device
from quantkit.fit.options import FitOptions

__all__ = ["CacheKind", "Device", "Fit", "FitOptions", "Size", "fit"]
