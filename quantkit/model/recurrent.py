"""Helpers of recurrent layers: states, short convolutions, activations and gates."""

from __future__ import annotations

from math import prod

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Convolve, Glu, State, Value


def new_state(b: Builder, name: str, width: int) -> State:
    """Return a new state of the current layer, ``width`` values a sequence."""
    state = State(f"{name}_{b.layer}", width)
    b.states.append(state)
    return state


def convolve_silu(b: Builder, x: Value, name: str = "ssm_conv1d", *, bias: bool = False) -> Value:
    """Return silu(causal convolution of x with ``name``); bias: add ``name.bias`` if the file has it."""
    return activate(b, convolve(b, x, name, bias=bias), "silu")


def convolve(b: Builder, x: Value, name: str, *, bias: bool = False) -> Value:
    """Return the causal convolution of x with ``name``, which has a row of taps for each column."""
    weight = b.matrix(f"{name}.weight")
    if prod(weight.tensor.shape[1:]) != x.width or weight.n_in < 2:
        raise FormatError(
            f"{b.source.paths[0]}: {weight.tensor.name} is {weight.tensor.shape}, not one row for each of {x.width} "
            "columns",
            "QK-E106",
        )
    out, state = b.value(f"{name}_out", x.width, x), new_state(b, name, (weight.n_in - 1) * x.width)
    added = b.maybe(f"{name}.bias") if bias else None
    b.add(Convolve(out=out, x=x, weight=weight, bias=added, state=state))
    return out


def activate(b: Builder, x: Value, kind: str) -> Value:
    """Return activation ``kind`` of x."""
    y = b.value(f"{x.name.split('.')[-1]}_{kind}", x.width, x)
    b.add(Activate(out=y, x=x, activation=Activation(kind)))
    return y


def apply_gate(b: Builder, x: Value, gate: Value, kind: str) -> Value:
    """Return x * activation(gate), of ``kind``; ``linear`` is gate itself."""
    y = b.value(f"{x.name.split('.')[-1]}_gated", x.width, x)
    b.add(Glu(out=y, gate=gate, up=x, activation=Activation(kind)))
    return y


def check_width(b: Builder, x: Value, width: int) -> None:
    """Raise FormatError unless x has the ``width`` columns of the metadata."""
    if x.width != width:
        raise FormatError(
            f"{b.source.paths[0]}: {x.name} has {x.width} columns, but {width} by the metadata: the shapes of this "
            "model are inconsistent",
            "QK-E106",
        )
