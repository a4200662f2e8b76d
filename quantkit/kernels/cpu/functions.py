"""Functions of vectors: exp, sigmoid, tanh, erf, rounding to half precision; and vectors cut off at a row's end.

exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2: r by Cody and Waite's two-part constant, e^r by a
polynomial of degree 6 fitted for the smallest largest error (0.06 ulp of its own), 2^n in two factors so that
denormal results come out right. Within 1 ulp of the true value; 0 below -104, infinity above 88.8, NaN stays NaN.

All are written with ``muladd``, which is one instruction where the machine has it and two where it has not.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from quantkit.kernels.cpu.jit import inline
from quantkit.kernels.cpu.simd import (
    _address,
    _from_half,
    _suffix,
    _to_half,
    cast,
    f32x16,
    i32x16,
    muladd,
    select,
    splat,
    vabs,
    vmax,
    vmin,
)

__all__ = ["erf", "exp", "load_part", "muladd", "round_f16", "sigmoid", "store_part", "tanh"]


@intrinsic
def round_f16(tyctx: Any, x: Any) -> Any:
    """Round to half precision, nearest even, and back."""
    return x(x), lambda cgctx, b, sig, args: _from_half(b, _to_half(b, args[0]))


# ---------------------------------------------------------------- the end of a row


def _lanes_below(b: ir.IRBuilder, n: ir.Value, lanes: int) -> ir.Value:
    """Return the mask of the first n of ``lanes`` lanes."""
    i32 = ir.IntType(32)
    t = ir.VectorType(i32, lanes)
    one = b.insert_element(ir.Constant(t, ir.Undefined), b.trunc(n, i32), i32(0))
    wide = b.shuffle_vector(one, one, ir.Constant(t, [0] * lanes))
    return b.icmp_signed("<", ir.Constant(t, list(range(lanes))), wide)


@intrinsic
def load_part(tyctx: Any, vt: Any, buffer: Any, offset: Any, n: Any) -> Any:
    """load_part(f32x16, buffer, byte, n): the first n lanes from memory, zeros behind; no byte beyond is touched."""
    rt = vt.instance_type

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        p = b.bitcast(_address(cgctx, b, sig.args[1], args[1], args[2]), rt.ll.as_pointer())
        mask = _lanes_below(b, args[3], rt.lanes)
        rest = ir.Constant(rt.ll, [0] * rt.lanes)
        i32 = ir.IntType(32)
        signature = ir.FunctionType(rt.ll, [p.type, i32, mask.type, rt.ll])
        name = f"llvm.masked.load.{_suffix(rt.ll)}.p0"
        return b.call(cgutils.get_or_insert_function(b.module, signature, name), [p, i32(1), mask, rest])

    return rt(vt, buffer, types.intp, types.intp), cg


@intrinsic
def store_part(tyctx: Any, buffer: Any, offset: Any, value: Any, n: Any) -> Any:
    """store_part(buffer, byte, v, n): write the first n lanes."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        t = args[2].type
        p = b.bitcast(_address(cgctx, b, sig.args[0], args[0], args[1]), t.as_pointer())
        mask = _lanes_below(b, args[3], t.count)
        i32 = ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [t, p.type, i32, mask.type])
        name = f"llvm.masked.store.{_suffix(t)}.p0"
        b.call(cgutils.get_or_insert_function(b.module, signature, name), [args[2], p, i32(1), mask])
        return cgctx.get_dummy_value()

    return types.void(buffer, types.intp, value, types.intp), cg


# ---------------------------------------------------------------- functions


@inline
def exp(x):
    """e^x of an f32x16."""
    x = vmax(-104.0, vmin(89.0, x))
    shifted = muladd(x, 1.4426950408889634, 12582912.0)  # 1.5 * 2^23: the integer part in the low bits
    n = shifted - 12582912.0
    r = muladd(n, -0.693145751953125, x)
    r = muladd(n, -1.4286068202862268e-06, r)
    p = splat(f32x16, 0.0013813142431899905)
    p = muladd(p, r, 0.008369418792426586)
    p = muladd(p, r, 0.04166845604777336)
    p = muladd(p, r, 0.16666515171527863)
    p = muladd(p, r, 0.4999999403953552)
    p = muladd(p, r * r, r) + 1.0
    whole = cast(i32x16, shifted) - 0x4B400000
    half = whole >> 1
    p = p * cast(f32x16, (half + 127) << 23)
    return p * cast(f32x16, (whole - half + 127) << 23)


@inline
def sigmoid(x):
    """1 / (1 + e^-x)"""
    return 1.0 / (exp(-x) + 1.0)


@inline
def tanh(x):
    """1 - 2 / (e^2|x| + 1) with the sign of x; near zero, where that would cancel, a polynomial."""
    a = vabs(x)
    far = 1.0 - 2.0 / (exp(a + a) + 1.0)
    far = select(x < 0.0, -far, far)
    s = x * x
    p = splat(f32x16, TANH[4])
    p = muladd(p, s, TANH[3])
    p = muladd(p, s, TANH[2])
    p = muladd(p, s, TANH[1])
    p = muladd(p, s, TANH[0])
    return select(a < 0.625, muladd(x * s, p, x), far)


@inline
def erf(x):
    """The error function: x times a polynomial in x^2 below 1, above it 1 - e^-polynomial(|x|)."""
    s = x * x
    near = splat(f32x16, ERF_NEAR[6])
    near = muladd(near, s, ERF_NEAR[5])
    near = muladd(near, s, ERF_NEAR[4])
    near = muladd(near, s, ERF_NEAR[3])
    near = muladd(near, s, ERF_NEAR[2])
    near = muladd(near, s, ERF_NEAR[1])
    near = muladd(near, s, ERF_NEAR[0])
    a = vmin(4.0, vabs(x))
    far = splat(f32x16, ERF_FAR[7])
    far = muladd(far, a, ERF_FAR[6])
    far = muladd(far, a, ERF_FAR[5])
    far = muladd(far, a, ERF_FAR[4])
    far = muladd(far, a, ERF_FAR[3])
    far = muladd(far, a, ERF_FAR[2])
    far = muladd(far, a, ERF_FAR[1])
    far = muladd(far, a, ERF_FAR[0])
    far = 1.0 - exp(-far)
    return select(a < 1.0, x * near, select(x < 0.0, -far, far))


#: (tanh(x) / x - 1) / x^2 in powers of x^2, |x| < 0.625.
TANH = (
    -0.33333271741867065,
    0.13331152498722076,
    -0.05371410399675369,
    0.020551711320877075,
    -0.00560390530154109,
)
#: erf(x) / x in powers of x^2, |x| < 1.
ERF_NEAR = (
    1.1283791065216064,
    -0.3761262595653534,
    0.11283600330352783,
    -0.026854444295167923,
    0.005189535208046436,
    -0.0008020841050893068,
    7.889119297033176e-05,
)
#: -log(1 - erf(x)) in powers of x, 1 <= x <= 4.
ERF_FAR = (
    -0.00018804024148266762,
    1.1295784711837769,
    0.6332198977470398,
    0.10841857641935349,
    -0.025208257138729095,
    0.004204561933875084,
    -0.0004413363931234926,
    2.1686850232072175e-05,
)
