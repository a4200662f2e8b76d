"""What layers that remember a sequence share: their states, and the short convolution."""

from __future__ import annotations

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Convolve, State, Value


def new_state(b: Builder, name: str, width: int) -> State:
    """Return memory of the current layer, ``width`` values a sequence."""
    state = State(f"{name}_{b.layer}", width)
    b.states.append(state)
    return state


def convolved(b: Builder, x: Value, *, bias: bool = False) -> Value:
    """Return silu of the causal convolution with ``ssm_conv1d``; bias: with the one that the file may have."""
    weight = b.matrix("ssm_conv1d.weight")
    if weight.n_out != x.width or weight.n_in < 2:
        raise FormatError(
            f"{b.source.paths[0]}: {weight.tensor.name} is {weight.tensor.shape}, wanted one row for each of "
            f"{x.width} columns"
        )
    out, state = b.value("convolved", x.width, x), new_state(b, "convolution", (weight.n_in - 1) * x.width)
    added = b.maybe("ssm_conv1d.bias") if bias else None
    b.add(Convolve(out=out, x=x, weight=weight, bias=added, state=state))
    return activated(b, out, "silu")


def activated(b: Builder, x: Value, kind: str) -> Value:
    """Return an activation of x."""
    y = b.value(f"{x.name.split('.')[-1]}_{kind}", x.width, x)
    b.add(Activate(out=y, x=x, activation=Activation(kind)))
    return y


def check_width(b: Builder, x: Value, width: int) -> None:
    """Raise FormatError unless x has as many columns as the metadata say."""
    if x.width != width:
        raise FormatError(
            f"{b.source.paths[0]}: {x.name} has {x.width} columns, by the metadata {width}: the shapes of this model "
            "do not fit together"
        )
