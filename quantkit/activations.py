"""Activations of matrix products, by which figures of quality compare or do not.

``runtime``: rounded to the format that the runtimes multiply a weight's type by, int8 for quantized weights. Two files
then diverge by that rounding, too, also if their weights are equal. ``exact``: f32, times decoded weights, so that a
divergence is that of the weights alone.
"""

from __future__ import annotations

RUNTIME, EXACT = ACTIVATIONS = ("runtime", "exact")

#: What figures of a mode are, in outputs.
MEANINGS = {
    RUNTIME: "activations rounded as by the runtime, to int8 for quantized weights",
    EXACT: "exact activations: differences are those of the weights alone",
}
