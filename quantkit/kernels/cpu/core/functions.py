"""Vector functions (exp, sigmoid, softplus, tanh, erf, rounding to f16) and partial vectors at the end of a row.

exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2: r by Cody and Waite's two-part constant, e^r by a
minimax polynomial of degree 6 (error 0.06 ulp), 2^n in two factors so that denormal results are right. Within 1 ulp
of the true value; 0 below -104, infinity above 88.8, NaN stays NaN.

All use ``muladd``, one instruction where the machine has FMA and two elsewhere.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import (
    _call,
    _from_half,
    _pointer,
    _splat,
    _suffix,
    _to_half,
    cast,
    emits,
    f32x16,
    i32x16,
    load,
    make_polynomial,
    muladd,
    select,
    store,
    vabs,
    vmax,
    vmin,
)


@emits(lambda x: x(x))
def round_f16(b, sig, x):
    """Round to f16, nearest even, and widen back."""
    return _from_half(b, _to_half(b, x))


# ---------------------------------------------------------------- the end of a row


def _lanes_below(b: ir.IRBuilder, n: ir.Value, lanes: int) -> ir.Value:
    """Return the mask of the first n of ``lanes`` lanes."""
    numbers = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))
    return b.icmp_signed("<", numbers, _splat(b, b.trunc(n, ir.IntType(32)), lanes))


@emits(lambda vt, buffer, offset, n: vt.instance_type(vt, buffer, types.intp, types.intp))
def load_part(b, sig, vt, buffer, offset, n):
    """load_part(f32x16, buffer, byte, n): load n lanes and zero the rest; touches no byte beyond them."""
    t, lanes = sig.return_type.ll, sig.return_type.lanes
    mask, zeros = _lanes_below(b, n, lanes), ir.Constant(t, [0] * lanes)
    p = _pointer(b, buffer, offset, t)
    return _call(b, f"llvm.masked.load.{_suffix(t)}.p0", t, [p, ir.IntType(32)(1), mask, zeros])


@emits(lambda buffer, offset, value, n: types.void(buffer, types.intp, value, types.intp))
def store_part(b, sig, buffer, offset, value, n):
    """store_part(buffer, byte, v, n): write the first n lanes."""
    t, p = value.type, _pointer(b, buffer, offset, value.type)
    name = f"llvm.masked.store.{_suffix(t)}.p0"
    _call(b, name, ir.VoidType(), [value, p, ir.IntType(32)(1), _lanes_below(b, n, t.count)])


@inline
def load_up_to(buffer, byte, n):
    """Return 16 values, or the n that are left, zero-padded."""
    if n >= 16:
        return load(f32x16, buffer, byte)
    return load_part(f32x16, buffer, byte, n)


@inline
def store_up_to(buffer, byte, x, n):
    """Write 16 values, or the n that are left."""
    if n >= 16:
        store(buffer, byte, x)
    else:
        store_part(buffer, byte, x, n)


# ---------------------------------------------------------------- functions

#: e^r is 1 + r + r^2 times this.
_exp = make_polynomial(
    (0.4999999403953552, 0.16666515171527863, 0.04166845604777336, 0.008369418792426586, 0.0013813142431899905), "exp.p"
)
#: (tanh(x) / x - 1) / x^2 in powers of x^2, |x| < 0.625.
_tanh = make_polynomial(
    (-0.33333271741867065, 0.13331152498722076, -0.05371410399675369, 0.020551711320877075, -0.00560390530154109),
    "tanh.p",
)
#: (atanh(x) / x - 1) / x^2 in powers of x^2, |x| < 1/3.
_atanh = make_polynomial((0.3333320617675781, 0.20010896027088165, 0.13999086618423462, 0.1401381939649582), "atanh.p")
#: erf(x) / x in powers of x^2, |x| < 1.
_erf_near = make_polynomial(
    (
        1.1283791065216064,
        -0.3761262595653534,
        0.11283600330352783,
        -0.026854444295167923,
        0.005189535208046436,
        -0.0008020841050893068,
        7.889119297033176e-05,
    ),
    "erf.near",
)
#: -log(1 - erf(x)) in powers of x, 1 <= x <= 4.
_erf_far = make_polynomial(
    (
        -0.00018804024148266762,
        1.1295784711837769,
        0.6332198977470398,
        0.10841857641935349,
        -0.025208257138729095,
        0.004204561933875084,
        -0.0004413363931234926,
        2.1686850232072175e-05,
    ),
    "erf.far",
)


@inline
def exp(x):
    """e^x of an f32x16."""
    x = vmax(-104.0, vmin(89.0, x))
    shifted = muladd(x, 1.4426950408889634, 12582912.0)  # 1.5 * 2^23: the integer part in the low bits
    n = shifted - 12582912.0
    r = muladd(n, -0.693145751953125, x)
    r = muladd(n, -1.4286068202862268e-06, r)
    p = muladd(_exp(r), r * r, r) + 1.0
    exponent = cast(i32x16, shifted) - 0x4B400000
    half = exponent >> 1
    p = p * cast(f32x16, (half + 127) << 23)
    return p * cast(f32x16, (exponent - half + 127) << 23)


@inline
def sigmoid(x):
    """1 / (1 + e^-x)"""
    return 1.0 / (exp(-x) + 1.0)


@inline
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + y), y = e^-|x|; log(1 + y) = 2 atanh(y / (2 + y))."""
    y = exp(-vabs(x))
    z = y / (y + 2.0)
    twice, s = z + z, z * z
    return vmax(0.0, x) + muladd(twice * s, _atanh(s), twice)


@inline
def tanh(x):
    """1 - 2 / (e^2|x| + 1) with the sign of x; a polynomial near zero, where that cancels."""
    a = vabs(x)
    outer = 1.0 - 2.0 / (exp(a + a) + 1.0)
    outer = select(x < 0.0, -outer, outer)
    s = x * x
    return select(a < 0.625, muladd(x * s, _tanh(s), x), outer)


@inline
def erf(x):
    """Error function: x times a polynomial in x^2 for |x| < 1, 1 - e^-polynomial(|x|) above."""
    inner, a = _erf_near(x * x), vmin(4.0, vabs(x))
    outer = 1.0 - exp(-_erf_far(a))
    return select(a < 1.0, x * inner, select(x < 0.0, -outer, outer))
