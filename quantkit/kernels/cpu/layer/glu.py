"""Activation functions and gated linear units: out = activation(gate) * up.

``gated_activation(kind)`` is an inlined function (gate, up, alpha, gate_limit, act_limit, up_limit) -> f32x16, the
epilogue of fused mat-muls; ``activation_function(kind)`` is the same without up. A limit that is off is infinite;
``limits`` returns the four numbers of an ops.Activation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from numba.core import types

from quantkit.kernels.cpu.core.functions import erf, exp, load_part, round_f16, sigmoid, store_part, tanh
from quantkit.kernels.cpu.core.jit import inline, specialize
from quantkit.kernels.cpu.core.simd import f32x16, load, select, splat, store, vmax, vmin
from quantkit.kernels.cpu.core.tape import TapeOp, arg, batch_word, farg, first_of, operation

if TYPE_CHECKING:
    from quantkit.kernels.parameters import Activation

# ---------------------------------------------------------------- functions of one value


@inline
def silu(x, alpha):
    return x / (exp(-x) + 1.0)


@inline
def gelu(x, alpha):
    h = round_f16(x)
    y = 0.5 * h * (tanh(0.7978845608028654 * h * (0.044715 * h * h + 1.0)) + 1.0)
    return select(x <= -10.0, 0.0, select(x >= 10.0, x, round_f16(y)))


@inline
def gelu_erf(x, alpha):
    return 0.5 * x * (erf(x * 0.7071067811865476) + 1.0)


@inline
def gelu_quick(x, alpha):
    h = round_f16(x)
    return round_f16(h * (1.0 / (exp(h * -1.702) + 1.0)))


@inline
def relu(x, alpha):
    return select(x > 0.0, x, 0.0)


@inline
def relu_sqr(x, alpha):
    y = select(x > 0.0, x, 0.0)
    return y * y


@inline
def logistic(x, alpha):
    return sigmoid(x)


@inline
def linear(x, alpha):
    return x


@inline
def swish(x, alpha):
    return x / (exp(-x * alpha) + 1.0)


@inline
def as_it_is(up):
    return up


@inline
def plus_one(up):
    return up + 1.0


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "gelu_quick": gelu_quick,
    "relu": relu,
    "relu_sqr": relu_sqr,
    "sigmoid": logistic,
    "linear": linear,
    "swiglu_oai": swish,
}

#: Bound for each kind of activation.
inner: Any = None
factor: Any = None


def _activation(x, alpha, gate_limit, act_limit):
    return vmin(act_limit, inner(vmin(gate_limit, x), alpha))


def _gate(gate, up, alpha, gate_limit, act_limit, up_limit):
    activated = vmin(act_limit, inner(vmin(gate_limit, gate), alpha))
    return activated * factor(vmax(-up_limit, vmin(up_limit, up)))


def _of_kind(template: Callable[..., Any], kind: str) -> Any:
    factor = plus_one if kind == "swiglu_oai" else as_it_is
    return specialize(template, kind, inner=FUNCTIONS[kind], factor=factor)


@cache
def activation_function(kind: str) -> Any:
    """Return the inlined function (x, alpha, gate_limit, act_limit) -> f32x16 of an activation."""
    return _of_kind(_activation, kind)


@cache
def gated_activation(kind: str) -> Any:
    """Return the inlined function (gate, up, alpha, gate_limit, act_limit, up_limit) -> f32x16 of an activation."""
    return _of_kind(_gate, kind)


def limits(activation: Activation) -> dict[str, float]:
    """Return the slots alpha, gate_limit, act_limit and up_limit of an activation."""
    off = float("inf")
    return {
        "alpha": activation.alpha,
        "gate_limit": activation.gate_limit or off,
        "act_limit": activation.act_limit or off,
        "up_limit": activation.up_limit or off,
    }


# ---------------------------------------------------------------- operations

_OUT, _GATE, _UP, _WIDTH, _GATE_WIDTH, _ROWS_OF, _PER, _ALPHA, _GATE_LIMIT, _ACT_LIMIT, _UP_LIMIT = range(1, 12)
_LIMITS = "alpha:f gate_limit:f act_limit:f up_limit:f"

#: Columns of a unit of work.
PART = 1024

#: Bound for each kind of activation.
gate_up: Any = None
act: Any = None


@operation(f"batch out gate up width gate_width rows_of per {_LIMITS}")
def _glu(args, tid, nth):
    """out = activation(gate) * up; a unit of work is up to PART columns of a row."""
    width = arg(args, _WIDTH)
    gate_width = arg(args, _GATE_WIDTH)
    up = arg(args, _UP)
    alpha, gate_limit = farg(args, _ALPHA), farg(args, _GATE_LIMIT)
    act_limit, up_limit = farg(args, _ACT_LIMIT), farg(args, _UP_LIMIT)
    rows = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _PER)
    parts = (width + PART - 1) // PART
    gate_stride = 4 * gate_width if up else 8 * width
    up_stride = 4 * width if up else 8 * width
    up = up if up else arg(args, _GATE) + 4 * width
    repeat = width // gate_width
    for unit in range(first_of(rows * parts, tid, nth), first_of(rows * parts, tid + 1, nth)):
        row, first = unit // parts, unit % parts * PART
        last = min(first + PART, width)
        out = arg(args, _OUT) + 4 * row * width
        g, u = arg(args, _GATE) + row * gate_stride, up + row * up_stride
        if repeat == 1:
            for i in range(first, last - 15, 16):
                x, y = load(f32x16, g, 4 * i), load(f32x16, u, 4 * i)
                store(out, 4 * i, gate_up(x, y, alpha, gate_limit, act_limit, up_limit))
            offset, n = 4 * (last - last % 16), last % 16
            if n:
                x, y = load_part(f32x16, g, offset, n), load_part(f32x16, u, offset, n)
                store_part(out, offset, gate_up(x, y, alpha, gate_limit, act_limit, up_limit), n)
        else:
            for i in range((first + repeat - 1) // repeat, (last + repeat - 1) // repeat):
                x = splat(f32x16, load(types.float32, g, 4 * i))
                for k in range(0, repeat, 16):
                    offset, n = 4 * (i * repeat + k), min(16, repeat - k)
                    y = load_part(f32x16, u, offset, n)
                    store_part(out, offset, gate_up(x, y, alpha, gate_limit, act_limit, up_limit), n)


_X, _X_WIDTH, _X_ROWS_OF, _X_PER, _X_ALPHA, _X_GATE_LIMIT, _X_ACT_LIMIT = range(2, 9)


@operation(f"batch out x width rows_of per {_LIMITS}")
def _apply(args, tid, nth):
    """out = activation(x), 16 values at a time."""
    alpha = farg(args, _X_ALPHA)
    gate_limit = farg(args, _X_GATE_LIMIT)
    act_limit = farg(args, _X_ACT_LIMIT)
    total = batch_word(args, arg(args, _X_ROWS_OF)) * arg(args, _X_PER) * arg(args, _X_WIDTH)
    x = arg(args, _X)
    out = arg(args, _OUT)
    lines = (total + 15) // 16
    for i in range(16 * first_of(lines, tid, nth), 16 * first_of(lines, tid + 1, nth), 16):
        if i + 16 <= total:
            store(out, 4 * i, act(load(f32x16, x, 4 * i), alpha, gate_limit, act_limit))
        else:
            n = total - i
            store_part(out, 4 * i, act(load_part(f32x16, x, 4 * i, n), alpha, gate_limit, act_limit), n)


def glu(activation: Activation) -> TapeOp:
    """Return the operation of ops.Glu for this activation; its limits are slots."""
    return _glu.bind(activation.kind, gate_up=gated_activation(activation.kind))


def activate(activation: Activation) -> TapeOp:
    """Return the operation of ops.Activate for this activation."""
    return _apply.bind(activation.kind, act=activation_function(activation.kind))
