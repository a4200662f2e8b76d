"""Activation functions and gated linear units on the device: functions.cuh (what fused products include), glu.cu."""

from __future__ import annotations

from quantkit.kernels.parameters import Activation

#: The numbers of functions.cuh, for the macro ACTIVATION.
ACTIVATIONS = {
    kind: number
    for number, kind in enumerate(
        ("silu", "gelu", "gelu_erf", "gelu_quick", "relu", "relu_sqr", "sigmoid", "softplus", "swiglu_oai")
    )
}
#: Those that may gate: softplus stands in Activate only.
GATES = tuple(kind for kind in ACTIVATIONS if kind != "softplus")


def limits(activation: Activation) -> dict[str, float]:
    """Return the slots alpha, gate_limit, act_limit and up_limit of an activation; a limit of 0 is off."""
    return {name: getattr(activation, name) for name in ("alpha", "gate_limit", "act_limit", "up_limit")}
