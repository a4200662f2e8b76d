"""Sequential calibration (GPTAQ): each layer is calibrated on activations of the layers already quantized.

Two streams go through the model at once: x with the original weights and y with the quantized ones. A weight W is
rounded to Q so that Q y is close to W x. With H = sum y y^T and C = sum (x - y) y^T over all tokens, Q is the rounding
of W + W C H^-1 in the metric of H. So a layer also corrects errors of earlier layers, as far as it can (asymmetric
calibration: GPTAQ, Li et al. 2025, arXiv:2504.02692). Products that are added to the residual stream also correct part
of its error: with R = sum r y^T, r the missing residual, by R H^-1. Experts see the tokens that the quantized router
sends them, each weighted by its squared router weight; routers are corrected as well, but stay unquantized.

    the graph is cut into stages (model/stages.py), each ending with the inputs of some weights
    a stage runs in both streams over all tokens (streams.py); values for later stages go to files (spill.py)
    H and C of a matrix are accumulated when it is encoded (inputs.py), by the plan's jobs (executor.py)
"""

from __future__ import annotations

from quantkit.sequential.calibrate import Calibration, CalibrationInputs

__all__ = ["Calibration", "CalibrationInputs"]
