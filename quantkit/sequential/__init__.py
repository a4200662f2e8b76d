"""Quantization layer by layer, each calibrated on what the layers before it, quantized, make of a text.

Two streams go through the model at once: x, as it is, and y, as its quantized weights make it. A weight W is rounded
to Q so that Q y is near to W x: with H = sum of y y^T and C = sum of (x - y) y^T over all tokens, Q is the rounding, in
the metric of H, of W + W C H^-1. So a layer also corrects, as far as it can, what those before it got wrong (an
asymmetric calibration as GPTAQ's: Li et al. 2025, arXiv:2504.02692). What is added to the residual stream makes up for
some of what is wrong there, too: with R = sum of r y^T, r what the stream lacks, by R H^-1. Experts see the tokens that
the quantized router sends them, each with the square of its router weight; routers, which stay as they are otherwise,
are corrected, too.

    graph is cut into stages (model/stages.py), each of which ends with the inputs of some weights
    a stage runs, in both streams, over all tokens (streams.py); what later ones need goes to files (spill.py)
    H and C of a matrix are summed up when it is encoded (inputs.py), by the jobs of the plan (executor.py)
"""

from __future__ import annotations

from quantkit.sequential.calibrate import Calibration, Foreseen

__all__ = ["Calibration", "Foreseen"]
