"""Activation functions and gated linear units on the device: functions.cuh (which fused products include), glu.cu.

    glu(activation, ...)       gate up out width gate_width rows alpha gate_limit act_limit up_limit
                               up 0: gate's rows hold both halves, 2 * width columns, the gate first (gate_width: width)
    activate(activation, ...)  x out width rows alpha gate_limit act_limit; softplus too

A limit of 0 is off, as in an Activation. Values begin at multiples of 16 bytes; out may be up, or x.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer.elementwise import over_all, over_rows
from quantkit.kernels.parameters import Activation

_KINDS = (
    "silu",
    "gelu",
    "gelu_erf",
    "gelu_quick",
    "relu",
    "relu_sqr",
    "sigmoid",
    "softplus",
    "swiglu_oai",
    "linear",
)
#: The numbers of functions.cuh, for the macro ACTIVATION.
ACTIVATIONS = {kind: number for number, kind in enumerate(_KINDS)}
#: Activations of a gate: softplus is only in Activate.
GATES = tuple(kind for kind in ACTIVATIONS if kind != "softplus")


def limits(activation: Activation) -> dict[str, float]:
    """Return the slots alpha, gate_limit, act_limit and up_limit of an activation; a limit of 0 is off."""
    return {name: getattr(activation, name) for name in ("alpha", "gate_limit", "act_limit", "up_limit")}


def _kernel(name: str, kind: str) -> Kernel:
    return Kernel("layer/glu.cu", name).bind(ACTIVATION=ACTIVATIONS[kind])


def glu(activation: Activation, width: int, rows: int) -> Shape:
    """Return the kernel and grid that gate ``rows`` of ``width`` columns of out."""
    return over_rows(_kernel("glu", activation.kind), width, rows)


def activate(activation: Activation, width: int, rows: int) -> Shape:
    """Return the kernel and grid that apply an activation to ``rows``."""
    return over_all(_kernel("activate", activation.kind), width, rows)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    for kind in ACTIVATIONS:
        for name in ("glu", "activate"):
            yield _kernel(name, kind)
