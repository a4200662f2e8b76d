"""Explicit SIMD for numba: LLVM vectors as ordinary values of ordinary kernels.

A kernel says ``load(f32x16, buffer, byte)``, ``a * b + c``, ``select(m, a, b)``, ``store(buffer, byte, v)``; each
is one LLVM instruction on a 64-byte logical vector, which LLVM splits on narrower machines. Only the few ops that
LLVM cannot find by itself (table lookups) have target code, with a portable form beside it. Buffers are numpy
arrays or raw addresses; offsets count bytes, and nothing needs alignment.

Arithmetic is strict IEEE f32: no contraction, no reordering; ``hsum`` alone has an order of its own (a tree).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, models, overload, register_model

# ---------------------------------------------------------------- the target


def target_features() -> frozenset[str]:
    """Return the CPU features that numba generates code for (NUMBA_CPU_NAME and NUMBA_CPU_FEATURES honoured)."""
    if config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+"))
    if config.CPU_NAME is not None and llvm.get_host_cpu_name() != config.CPU_NAME:
        return frozenset()
    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


FEATURES = target_features()

# ---------------------------------------------------------------- the types

_LL: dict[Any, ir.Type] = {
    types.boolean: ir.IntType(1),
    types.int8: ir.IntType(8),
    types.uint8: ir.IntType(8),
    types.int16: ir.IntType(16),
    types.uint16: ir.IntType(16),
    types.int32: ir.IntType(32),
    types.uint32: ir.IntType(32),
    types.int64: ir.IntType(64),
    types.uint64: ir.IntType(64),
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
}


class VecType(types.Type):
    """The numba type of a vector of ``lanes`` elements."""

    def __init__(self, elem: Any, lanes: int) -> None:
        self.elem, self.lanes = elem, lanes
        super().__init__(name=f"vec<{lanes}x{elem}>")

    @property
    def key(self) -> tuple[Any, int]:
        return (self.elem, self.lanes)

    @property
    def ll(self) -> ir.VectorType:
        return ir.VectorType(_LL[self.elem], self.lanes)

    @property
    def is_float(self) -> bool:
        return isinstance(self.elem, types.Float)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VecType) -> None:
        super().__init__(dmm, fe_type, fe_type.ll)


u8x64, i8x64 = VecType(types.uint8, 64), VecType(types.int8, 64)
u8x32, i8x32 = VecType(types.uint8, 32), VecType(types.int8, 32)
u8x16, i8x16 = VecType(types.uint8, 16), VecType(types.int8, 16)
u8x8, i8x8 = VecType(types.uint8, 8), VecType(types.int8, 8)
u16x32, i16x32 = VecType(types.uint16, 32), VecType(types.int16, 32)
u16x16, i16x16 = VecType(types.uint16, 16), VecType(types.int16, 16)
u16x8, i16x8 = VecType(types.uint16, 8), VecType(types.int16, 8)
u32x16, i32x16, f32x16 = VecType(types.uint32, 16), VecType(types.int32, 16), VecType(types.float32, 16)
u32x8, i32x8, f32x8 = VecType(types.uint32, 8), VecType(types.int32, 8), VecType(types.float32, 8)
u32x4, i32x4, f32x4 = VecType(types.uint32, 4), VecType(types.int32, 4), VecType(types.float32, 4)
u64x8, i64x8, f64x8 = VecType(types.uint64, 8), VecType(types.int64, 8), VecType(types.float64, 8)
u64x2 = VecType(types.uint64, 2)
mask64, mask32, mask16 = VecType(types.boolean, 64), VecType(types.boolean, 32), VecType(types.boolean, 16)

# ---------------------------------------------------------------- LLVM IR helpers


def _call(b: ir.IRBuilder, name: str, ret: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    signature = ir.FunctionType(ret, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), list(args))


def _shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value | None, lanes: Sequence[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined) if y is None else y, mask)


def _splat(b: ir.IRBuilder, x: ir.Value, lanes: int) -> ir.Value:
    one = b.insert_element(ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined), x, ir.IntType(32)(0))
    return _shuffle(b, one, None, [0] * lanes)


def _suffix(t: ir.VectorType) -> str:
    name = {"float": "f32", "double": "f64", "half": "f16"}.get(str(t.element), str(t.element))
    return f"v{t.count}{name}"


def _split(b: ir.IRBuilder, fn: Callable[..., ir.Value], parts: int, args: Sequence[ir.Value]) -> ir.Value:
    """Apply fn to ``parts`` equal slices of every vector and join the results."""
    if parts == 1:
        return fn(b, *args)
    low = [_shuffle(b, a, None, range(a.type.count // 2)) for a in args]
    high = [_shuffle(b, a, None, range(a.type.count // 2, a.type.count)) for a in args]
    x, y = _split(b, fn, parts // 2, low), _split(b, fn, parts // 2, high)
    return _shuffle(b, x, y, range(2 * x.type.count))


def _address(cgctx: Any, b: ir.IRBuilder, buffer_type: types.Type, buffer: ir.Value, offset: ir.Value) -> ir.Value:
    data = cgctx.make_array(buffer_type)(cgctx, b, buffer).data if isinstance(buffer_type, types.Array) else buffer
    byte = ir.IntType(8).as_pointer()
    data = b.inttoptr(data, byte) if isinstance(data.type, ir.IntType) else b.bitcast(data, byte)
    return b.gep(data, [offset])


def _pointer(cgctx: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value], t: ir.Type, at: int) -> ir.Value:
    """Return a typed pointer made of the buffer and byte offset at argument ``at``."""
    return b.bitcast(_address(cgctx, b, sig.args[at], args[at], args[at + 1]), t.as_pointer())


def _like(t: ir.Type, element: ir.Type) -> ir.Type:
    """Return ``element``, or a vector of as many of them as ``t`` has lanes."""
    return ir.VectorType(element, t.count) if isinstance(t, ir.VectorType) else element


def _const(t: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)


def _from_half(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Widen f16, given as i16, to f32. Without F16C LLVM would call a library function that is not there."""
    f32, i32 = _like(bits.type, ir.FloatType()), _like(bits.type, ir.IntType(32))
    if "f16c" in FEATURES:
        return b.fpext(b.bitcast(bits, _like(bits.type, ir.HalfType())), f32)
    wide = b.zext(bits, i32)
    magnitude = b.shl(b.and_(wide, _const(i32, 0x7FFF)), _const(i32, 13))
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, f32), _const(f32, 2.0**112)), i32)
    special = b.icmp_unsigned(">=", magnitude, _const(i32, 0x7C00 << 13))
    value = b.select(special, b.or_(magnitude, _const(i32, 0x7F800000)), scaled)
    return b.bitcast(b.or_(value, b.shl(b.and_(wide, _const(i32, 0x8000)), _const(i32, 16))), f32)


def _to_half(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Round f32 to f16, nearest even, as i16."""
    i16, i32 = _like(x.type, ir.IntType(16)), _like(x.type, ir.IntType(32))
    if "f16c" in FEATURES:
        return b.bitcast(b.fptrunc(x, _like(x.type, ir.HalfType())), i16)
    bits = b.bitcast(x, i32)
    ax = b.and_(bits, _const(i32, 0x7FFFFFFF))
    odd = b.and_(b.lshr(ax, _const(i32, 13)), _const(i32, 1))
    normal = b.sub(b.lshr(b.add(b.add(ax, odd), _const(i32, 0xFFF)), _const(i32, 13)), _const(i32, 112 << 10))
    normal = b.select(b.icmp_unsigned(">=", ax, _const(i32, 0x477FF000)), _const(i32, 0x7C00), normal)
    # Added to 0.5, a magnitude below 2^-14 is rounded at 2^-24, the step of f16's denormals.
    shifted = b.bitcast(b.fadd(b.bitcast(ax, x.type), _const(x.type, 0.5)), i32)
    small = b.icmp_unsigned("<", ax, _const(i32, 0x38800000))
    value = b.select(small, b.sub(shifted, _const(i32, 0x3F000000)), normal)
    nan = b.or_(b.and_(b.lshr(ax, _const(i32, 13)), _const(i32, 0x3FF)), _const(i32, 0x7E00))
    value = b.select(b.icmp_unsigned(">", ax, _const(i32, 0x7F800000)), nan, value)
    return b.trunc(b.or_(value, b.and_(b.lshr(bits, _const(i32, 16)), _const(i32, 0x8000))), i16)


def _named(fn: Any, name: str) -> Any:
    """Give an intrinsic made by a factory a stable identity, or numba's cache never hits."""
    fn.__name__ = name
    fn._set_uuid(f"quantkit.simd.{name}")
    return fn


# ---------------------------------------------------------------- memory


@intrinsic
def load(tyctx: Any, vt: Any, buffer: Any, offset: Any) -> Any:
    """load(f32x16, buffer, byte): read a vector, or one number (load(types.uint32, ...)), unaligned."""
    rt = vt.instance_type
    ll = rt.ll if isinstance(rt, VecType) else _LL[rt]

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(_pointer(cgctx, b, sig, args, ll, 1), align=1)

    return rt(vt, buffer, types.intp), cg


@intrinsic
def store(tyctx: Any, buffer: Any, offset: Any, value: Any) -> Any:
    """store(buffer, byte, v): write a vector, or one number of its own type, unaligned."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[2], _pointer(cgctx, b, sig, args, args[2].type, 0), align=1)
        return cgctx.get_dummy_value()

    return types.void(buffer, types.intp, value), cg


@intrinsic
def load_f16(tyctx: Any, vt: Any, buffer: Any, offset: Any) -> Any:
    """load_f16(f32x16, buffer, byte): read half floats, widened to f32."""
    rt = vt.instance_type

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        half = ir.VectorType(ir.IntType(16), rt.lanes)
        return _from_half(b, b.load(_pointer(cgctx, b, sig, args, half, 1), align=1))

    return rt(vt, buffer, types.intp), cg


@intrinsic
def store_f16(tyctx: Any, buffer: Any, offset: Any, value: Any) -> Any:
    """store_f16(buffer, byte, v): write f32 lanes as half floats, rounded to nearest even."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        half = _to_half(b, args[2])
        b.store(half, _pointer(cgctx, b, sig, args, half.type, 0), align=1)
        return cgctx.get_dummy_value()

    return types.void(buffer, types.intp, value), cg


@intrinsic
def load_line(tyctx: Any, st: Any, buffer: Any, offset: Any) -> Any:
    """load_line(np.uint16, buffer, byte): read 64 bytes as a vector of numbers of one type."""
    element = st.instance_type
    rt = VecType(element, 512 // element.bitwidth)

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(_pointer(cgctx, b, sig, args, rt.ll, 1), align=1)

    return rt(st, buffer, types.intp), cg


@intrinsic
def f32_to_f16(tyctx: Any, x: Any) -> Any:
    """Return the bits of one f32 rounded to f16 (nearest even), as uint16."""

    return types.uint16(types.float32), lambda cgctx, b, sig, args: _to_half(b, args[0])


@intrinsic
def f16_to_f32(tyctx: Any, bits: Any) -> Any:
    """Return the f32 of one f16 given by its bits."""

    return types.float32(types.uint16), lambda cgctx, b, sig, args: _from_half(b, args[0])


def _prefetch(name: str, locality: int) -> Any:
    @intrinsic
    def impl(tyctx: Any, buffer: Any, offset: Any) -> Any:
        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            p, i32 = _address(cgctx, b, sig.args[0], args[0], args[1]), ir.IntType(32)
            signature = ir.FunctionType(ir.VoidType(), [p.type, i32, i32, i32])
            fn = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
            b.call(fn, [p, i32(0), i32(locality), i32(1)])
            return cgctx.get_dummy_value()

        return types.void(buffer, types.intp), cg

    return _named(impl, name)


#: Ask for the cache line at a byte offset, which may lie beyond the buffer; prefetch_l2: not as far as the L1 cache.
prefetch, prefetch_l2 = _prefetch("prefetch", 3), _prefetch("prefetch_l2", 2)


# ---------------------------------------------------------------- making and converting vectors


@intrinsic
def splat(tyctx: Any, vt: Any, x: Any) -> Any:
    """splat(f32x16, x): x, converted to the element type, in all lanes."""
    rt = vt.instance_type
    return rt(vt, rt.elem), lambda cgctx, b, sig, args: _splat(b, args[1], rt.lanes)


@intrinsic
def cast(tyctx: Any, vt: Any, v: Any) -> Any:
    """cast(u8x64, v): the same bits under another type."""
    rt = vt.instance_type
    return rt(vt, v), lambda cgctx, b, sig, args: b.bitcast(args[1], rt.ll)


@intrinsic
def convert(tyctx: Any, vt: Any, v: Any) -> Any:
    """convert(f32x16, v): every lane converted; float to integer truncates."""
    rt = vt.instance_type

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        src, x = sig.args[1], args[1]
        signed = src.elem is not types.boolean and not src.is_float and src.elem.signed
        if src.is_float and rt.is_float:
            return (b.fpext if rt.elem.bitwidth > src.elem.bitwidth else b.fptrunc)(x, rt.ll)
        if src.is_float:
            return (b.fptosi if rt.elem.signed else b.fptoui)(x, rt.ll)
        if rt.is_float:
            return (b.sitofp if signed else b.uitofp)(x, rt.ll)
        have, want = x.type.element.width, rt.ll.element.width
        if want > have:
            return (b.sext if signed else b.zext)(x, rt.ll)
        return b.trunc(x, rt.ll) if want < have else x

    return rt(vt, v), cg


def make_constant(vt: VecType, values: Sequence[float], name: str) -> Any:
    """Return an intrinsic ``c()`` that yields a constant vector."""

    @intrinsic
    def constant(tyctx: Any) -> Any:
        return vt(), lambda cgctx, b, sig, args: ir.Constant(vt.ll, list(values))

    return _named(constant, name)


def make_shuffle(lanes: Sequence[int], name: str) -> Any:
    """Return an intrinsic ``s(v)`` that picks lanes of one vector."""

    @intrinsic
    def pick(tyctx: Any, v: Any) -> Any:
        return VecType(v.elem, len(lanes))(v), lambda cgctx, b, sig, args: _shuffle(b, args[0], None, lanes)

    return _named(pick, name)


def make_shuffle2(lanes: Sequence[int], name: str) -> Any:
    """Return an intrinsic ``s(v, w)`` that picks lanes of two vectors laid end to end."""

    @intrinsic
    def pick(tyctx: Any, v: Any, w: Any) -> Any:
        return VecType(v.elem, len(lanes))(v, w), lambda cgctx, b, sig, args: _shuffle(b, args[0], args[1], lanes)

    return _named(pick, name)


@intrinsic
def extract(tyctx: Any, v: Any, lane: Any) -> Any:
    """extract(v, lane): one element."""
    return v.elem(v, types.intp), lambda cgctx, b, sig, args: b.extract_element(args[0], args[1])


# ---------------------------------------------------------------- operators


def _operands(a: Any, c: Any) -> VecType | None:
    """Return the vector type of a binary operation, or None if it is none of ours; scalars are splatted."""
    if isinstance(a, VecType) and isinstance(c, VecType):
        return a if a == c else None
    if isinstance(a, VecType) and isinstance(c, types.Number):
        return a
    return c if isinstance(c, VecType) and isinstance(a, types.Number) else None


def _binary(python_op: Any, int_op: str | None, float_op: str | None, unsigned_op: str | None = None) -> None:
    @intrinsic
    def impl(tyctx: Any, a: Any, c: Any) -> Any:
        vt = _operands(a, c)
        if vt is None:
            return None
        method: Any = float_op if vt.is_float else unsigned_op if unsigned_op and not vt.elem.signed else int_op

        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, y = (
                v if isinstance(t, VecType) else _splat(b, v, vt.lanes) for v, t in zip(args, sig.args, strict=True)
            )
            return getattr(b, method)(x, y)

        args = tuple(t if isinstance(t, VecType) else vt.elem for t in (a, c))
        return vt(*args), cg

    _named(impl, f"binary_{python_op.__name__}")

    for op in (python_op, getattr(operator, f"i{python_op.__name__.rstrip('_')}")):  # a + b, and a += b

        @overload(op)
        def ov(a, c):
            return (lambda a, c: impl(a, c)) if _operands(a, c) is not None else None


_binary(operator.add, "add", "fadd")
_binary(operator.sub, "sub", "fsub")
_binary(operator.mul, "mul", "fmul")
_binary(operator.truediv, None, "fdiv")
_binary(operator.and_, "and_", None)
_binary(operator.or_, "or_", None)
_binary(operator.xor, "xor", None)
_binary(operator.lshift, "shl", None)
_binary(operator.rshift, "ashr", None, "lshr")


@intrinsic
def _negate(tyctx: Any, a: Any) -> Any:
    return a(a), lambda cgctx, b, sig, args: b.fneg(args[0]) if sig.args[0].is_float else b.neg(args[0])


@overload(operator.neg)
def _ov_neg(a):
    return (lambda a: _negate(a)) if isinstance(a, VecType) else None


@intrinsic
def _invert(tyctx: Any, a: Any) -> Any:
    return a(a), lambda cgctx, b, sig, args: b.not_(args[0])


@overload(operator.invert)
def _ov_invert(a):
    return (lambda a: _invert(a)) if isinstance(a, VecType) else None


def _compare(python_op: Any, op: str) -> None:
    @intrinsic
    def impl(tyctx: Any, a: Any, c: Any) -> Any:
        vt = _operands(a, c)
        if vt is None:
            return None

        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, y = (
                v if isinstance(t, VecType) else _splat(b, v, vt.lanes) for v, t in zip(args, sig.args, strict=True)
            )
            if vt.is_float:  # as in C: a NaN is unequal to everything, and neither less nor greater
                return (b.fcmp_unordered if op == "!=" else b.fcmp_ordered)(op, x, y)
            return (b.icmp_signed if vt.elem.signed else b.icmp_unsigned)(op, x, y)

        args = tuple(t if isinstance(t, VecType) else vt.elem for t in (a, c))
        return VecType(types.boolean, vt.lanes)(*args), cg

    _named(impl, f"compare_{python_op.__name__}")

    @overload(python_op)
    def ov(a, c):
        return (lambda a, c: impl(a, c)) if _operands(a, c) is not None else None


for _python_op, _op in (
    (operator.lt, "<"),
    (operator.gt, ">"),
    (operator.le, "<="),
    (operator.ge, ">="),
    (operator.eq, "=="),
    (operator.ne, "!="),
):
    _compare(_python_op, _op)


@intrinsic
def select(tyctx: Any, m: Any, a: Any, c: Any) -> Any:
    """select(mask, a, c): a where the mask is set, else c. Scalars are splatted."""
    vt = a if isinstance(a, VecType) else c

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, y = (
            v if isinstance(t, VecType) else _splat(b, v, vt.lanes) for v, t in zip(args[1:], sig.args[1:], strict=True)
        )
        return b.select(args[0], x, y)

    return vt(m, *(t if isinstance(t, VecType) else vt.elem for t in (a, c))), cg


# ---------------------------------------------------------------- math


def _unary(name: str, llvm_name: str) -> Any:
    @intrinsic
    def impl(tyctx: Any, a: Any) -> Any:
        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return _call(b, f"llvm.{llvm_name}.{_suffix(args[0].type)}", args[0].type, args)

        return a(a), cg

    return _named(impl, name)


vsqrt = _unary("vsqrt", "sqrt")
vabs = _unary("vabs", "fabs")


@intrinsic
def fma(tyctx: Any, a: Any, x: Any, c: Any) -> Any:
    """a * x + c with one rounding. Never where bytes must match the reference."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return _call(b, f"llvm.fma.{_suffix(args[0].type)}", args[0].type, args)

    return a(a, x, c), cg


def _muladd(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    if FEATURES & {"fma", "avx512f"}:
        return _call(b, f"llvm.fma.{_suffix(x.type)}", x.type, [x, y, z])
    return b.fadd(b.fmul(x, y), z)


@intrinsic
def muladd(tyctx: Any, a: Any, x: Any, c: Any) -> Any:
    """a * x + c, with one rounding where that is one instruction. Scalars x and c are splatted."""
    vectors = [isinstance(t, VecType) for t in (x, c)]

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        rest = [v if vector else _splat(b, v, a.lanes) for v, vector in zip(args[1:], vectors, strict=True)]
        return _muladd(b, args[0], *rest)

    return a(a, *(t if vector else a.elem for t, vector in zip((x, c), vectors, strict=True))), cg


def _choose(name: str, op: str) -> Any:
    """Return C's MAX / MIN, (a op b) ? a : b, which is also what maxps and minps do with NaN."""

    @intrinsic
    def impl(tyctx: Any, a: Any, c: Any) -> Any:
        vt = _operands(a, c)
        if vt is None:
            return None

        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            x, y = (
                v if isinstance(t, VecType) else _splat(b, v, vt.lanes) for v, t in zip(args, sig.args, strict=True)
            )
            compare = b.fcmp_ordered if vt.is_float else b.icmp_signed if vt.elem.signed else b.icmp_unsigned
            return b.select(compare(op, x, y), x, y)

        return vt(*(t if isinstance(t, VecType) else vt.elem for t in (a, c))), cg

    return _named(impl, name)


vmax, vmin = _choose("vmax", ">"), _choose("vmin", "<")


@intrinsic
def hsum(tyctx: Any, a: Any) -> Any:
    """Sum of all lanes, as a tree (lanes 0..n/2 added to n/2..n, and so on)."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x = args[0]
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = _shuffle(b, x, None, range(half)), _shuffle(b, x, None, range(half, 2 * half))
            x = (b.fadd if sig.args[0].is_float else b.add)(low, high)
        return b.extract_element(x, ir.IntType(32)(0))

    return a.elem(a), cg


def _extreme(name: str, op: str, largest: bool) -> Any:
    @intrinsic
    def impl(tyctx: Any, a: Any) -> Any:
        def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
            t, x = sig.args[0], args[0]
            if not t.is_float:
                reduce = ("smax" if largest else "smin") if t.elem.signed else ("umax" if largest else "umin")
                return _call(b, f"llvm.vector.reduce.{reduce}.{_suffix(x.type)}", x.type.element, [x])
            while x.type.count > 1:  # LLVM's own reduction takes care of NaN, three times slower
                half = x.type.count // 2
                low, high = _shuffle(b, x, None, range(half)), _shuffle(b, x, None, range(half, 2 * half))
                x = b.select(b.fcmp_ordered(op, low, high), low, high)
            return b.extract_element(x, ir.IntType(32)(0))

        return a.elem(a), cg

    return _named(impl, name)


#: Largest and smallest lane of a vector without NaN; among zeros of both signs, either.
hmax, hmin = _extreme("hmax", ">", True), _extreme("hmin", "<", False)


@intrinsic
def mask_bits(tyctx: Any, m: Any) -> Any:
    """Return a mask of up to 64 lanes as an integer, lane 0 in bit 0."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], ir.IntType(args[0].type.count))
        return b.zext(bits, ir.IntType(64)) if bits.type.width < 64 else bits

    return types.uint64(m), cg


@intrinsic
def any_lane(tyctx: Any, m: Any) -> Any:
    """True if any lane of a mask is set."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], ir.IntType(args[0].type.count))
        return b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(m), cg


@intrinsic
def nearest_int(tyctx: Any, a: Any) -> Any:
    """ggml's nearest_int: round to nearest even into int32 by adding 1.5 * 2^23.

    Exact for |x| < 2^22; beyond, the same wrapped bits as ggml. Takes an f32 or a vector of f32.
    """

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        x, i32 = args[0], _like(args[0].type, ir.IntType(32))
        bits = b.bitcast(b.fadd(x, _const(x.type, 12582912.0)), i32)
        return b.sub(b.and_(bits, _const(i32, 0x7FFFFF)), _const(i32, 0x400000))

    rt = VecType(types.int32, a.lanes) if isinstance(a, VecType) else types.int32
    return rt(a if isinstance(a, VecType) else types.float32), cg


@intrinsic
def nearest(tyctx: Any, a: Any) -> Any:
    """Round a vector of f32 to nearest even, as f32; |x| < 2^22 (larger values come back unrounded or rounded)."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        magic = _const(args[0].type, 12582912.0)
        return b.fsub(b.fadd(args[0], magic), magic)

    return a(a), cg


@intrinsic
def round_even(tyctx: Any, a: Any) -> Any:
    """As ``nearest``, by one instruction where there is one (SSE4.1); then -0.5..-0 may give -0."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if FEATURES & {"sse4.1", "sse4.2", "avx", "avx512f"}:
            return _call(b, f"llvm.roundeven.{_suffix(args[0].type)}", args[0].type, args)
        magic = _const(args[0].type, 12582912.0)
        return b.fsub(b.fadd(args[0], magic), magic)

    return a(a), cg


@intrinsic
def round_away(tyctx: Any, a: Any) -> Any:
    """C's roundf on a vector of f32, halves away from zero, into int32; |x| < 2^31."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        # The largest f32 below one half: adding one half itself would round 0.49999997 up to 1.
        x, it = args[0], _like(args[0].type, ir.IntType(32))
        sign = b.and_(b.bitcast(x, it), _const(it, 0x80000000))
        half = b.bitcast(b.or_(sign, _const(it, 0x3EFFFFFF)), x.type)
        return b.fptosi(b.fadd(x, half), it)

    return VecType(types.int32, a.lanes)(a), cg


# ---------------------------------------------------------------- integer products: ops with target code

#: True where u8 x s8 products are summed by one instruction; elsewhere signed operands go through |x| and sign(y).
HAS_DOT4 = bool(FEATURES & {"avx512vnni", "avxvnni"})


def _pair_sums(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """i16 x i16, neighbours added: a form that LLVM turns into pmaddwd."""
    wide = ir.VectorType(ir.IntType(32), x.type.count)
    p = b.mul(b.sext(x, wide), b.sext(y, wide))
    n = x.type.count
    return b.add(_shuffle(b, p, None, range(0, n, 2)), _shuffle(b, p, None, range(1, n, 2)))


def _dot4_portable(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """Even and odd bytes, widened to i16, by two pmaddwd; a lane of i32 holds all four products."""
    half = ir.VectorType(ir.IntType(16), x.type.count // 2)
    x, y, eight = b.bitcast(x, half), b.bitcast(y, half), _const(half, 8)
    if signed:
        x_even, x_odd = b.ashr(b.shl(x, eight), eight), b.ashr(x, eight)
    else:
        x_even, x_odd = b.and_(x, _const(half, 255)), b.lshr(x, eight)
    y_even, y_odd = b.ashr(b.shl(y, eight), eight), b.ashr(y, eight)
    return b.add(acc, b.add(_pair_sums(b, x_even, y_even), _pair_sums(b, x_odd, y_odd)))


def _dot4_avx2(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """pmaddubsw and pmaddwd: a pair of products is at most 2 * 128 * 127 = 32512, which i16 holds."""
    i16 = ir.VectorType(ir.IntType(16), 16)
    if signed:
        y = _call(b, "llvm.x86.avx2.psign.b", y.type, [y, x])
        x = _call(b, f"llvm.abs.{_suffix(x.type)}", x.type, [x, ir.IntType(1)(0)])
    pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", i16, [x, y])
    return b.add(acc, _call(b, "llvm.x86.avx2.pmadd.wd", acc.type, [pairs, _const(i16, 1)]))


def _dot4(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    lanes = acc.type.count
    if signed and HAS_DOT4:
        return _dot4_portable(b, acc, x, y, signed)
    for feature, width, name in (("avx512vnni", 16, "512"), ("avxvnni", 8, "256")):
        if feature in FEATURES and lanes % width == 0:
            full = f"llvm.x86.avx512.vpdpbusd.{name}"
            return _split(b, lambda b, *v, f=full: _call(b, f, v[0].type, v), lanes // width, [acc, x, y])
    if "avx2" in FEATURES and lanes % 8 == 0:
        return _split(b, lambda b, a, u, v: _dot4_avx2(b, a, u, v, signed), lanes // 8, [acc, x, y])
    return _dot4_portable(b, acc, x, y, signed)


@intrinsic
def dot4(tyctx: Any, acc: Any, x: Any, y: Any) -> Any:
    """dot4(acc, x, y): every i32 lane of acc plus four products of bytes; x u8 or i8, y i8 in -127..127. Exact.

    Where HAS_DOT4 x should be u8, any value; elsewhere i8, or u8 up to 127.
    """

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return _dot4(b, args[0], args[1], args[2], sig.args[1].elem.signed)

    return acc(acc, x, y), cg


@intrinsic
def maddubs(tyctx: Any, x: Any, y: Any) -> Any:
    """maddubs(u8x64, i8x64): products of bytes, neighbours added, as i16; the caller sees that no sum overflows."""
    rt = VecType(types.int16, x.lanes // 2)

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        for feature, width, name in (
            ("avx512bw", 32, "llvm.x86.avx512.pmaddubs.w.512"),
            ("avx2", 16, "llvm.x86.avx2.pmadd.ub.sw"),
            ("ssse3", 8, "llvm.x86.ssse3.pmadd.ub.sw.128"),
        ):
            if feature in FEATURES and rt.lanes % width == 0:
                t = ir.VectorType(ir.IntType(16), width)
                return _split(b, lambda b, *v, n=name, t=t: _call(b, n, t, v), rt.lanes // width, args)
        x, y, eight = b.bitcast(args[0], rt.ll), b.bitcast(args[1], rt.ll), _const(rt.ll, 8)
        even = b.mul(b.and_(x, _const(rt.ll, 255)), b.ashr(b.shl(y, eight), eight))
        return b.add(even, b.mul(b.lshr(x, eight), b.ashr(y, eight)))

    return rt(x, y), cg


@intrinsic
def dot2(tyctx: Any, acc: Any, x: Any, y: Any) -> Any:
    """dot2(acc, x, y): every i32 lane of acc plus two products of i16. Exact."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        lanes = args[0].type.count
        wide = "avx512vnni" in FEATURES and lanes % 16 == 0
        if wide or ("avxvnni" in FEATURES and lanes % 8 == 0) or {"avx512vnni", "avx512vl"} <= FEATURES:
            width = 16 if wide else min(lanes, 8)
            name = f"llvm.x86.avx512.vpdpwssd.{32 * width}"
            return _split(b, lambda b, *v: _call(b, name, v[0].type, v), lanes // width, args)
        return b.add(args[0], _pair_sums(b, args[1], args[2]))

    return acc(acc, x, y), cg


@intrinsic
def opaque(tyctx: Any, v: Any) -> Any:
    """The same vector, of which LLVM knows nothing: keeps it from moving a widening behind several shuffles."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if not FEATURES & {"avx", "avx2", "avx512f"}:
            return args[0]
        t = args[0].type
        return b.asm(ir.FunctionType(t, [t]), "", "=x,0", [args[0]], False)

    return v(v), cg


@intrinsic
def stack_bytes(tyctx: Any, count: Any) -> Any:
    """stack_bytes(512): the address of so many bytes of the caller's own, 64-aligned, undefined; a literal count."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    n = count.literal_value

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        with b.goto_entry_block():  # not cgutils.alloca_once: it fills the space with zeros, as one LLVM value
            space = b.alloca(ir.ArrayType(ir.IntType(8), n))
        space.align = 64
        return b.ptrtoint(space, ir.IntType(64))

    return types.int64(count), cg


# ---------------------------------------------------------------- table lookups: the ops with target code


def _lookup_each(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """Portable lookup: one lane at a time."""
    out = ir.Constant(ir.VectorType(table.type.element, index.type.count), ir.Undefined)
    last = ir.Constant(index.type.element, table.type.count - 1)
    for lane in range(index.type.count):
        at = b.and_(b.extract_element(index, ir.IntType(32)(lane)), last)
        out = b.insert_element(out, b.extract_element(table, at), ir.IntType(32)(lane))
    return out


@intrinsic
def lookup16(tyctx: Any, table: Any, index: Any) -> Any:
    """lookup16(table, index): bytes index[i] in 0..15 into a table of 16 bytes (pshufb).

    ``table`` has 16 lanes, ``index`` 16, 32 or 64; the result has the table's element type.
    """
    rt = VecType(table.elem, index.lanes)

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        n = index.lanes
        for feature, width, name in (
            ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
            ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
            ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
        ):
            if feature in FEATURES and n % width == 0:
                wide = _shuffle(b, args[0], None, [i % 16 for i in range(n)])
                return _split(b, lambda b, t, x, f=name: _call(b, f, t.type, [t, x]), n // width, [wide, args[1]])
        return _lookup_each(b, args[0], args[1])

    return rt(table, index), cg


@intrinsic
def lookup16_f32(tyctx: Any, table: Any, index: Any) -> Any:
    """lookup16_f32(table, index): 32-bit lanes index[i] in 0..15 into a table of 16 (vpermps / vpermd)."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        name, t = ("sf" if sig.args[0].is_float else "si"), args[0].type
        if "avx512f" in FEATURES:
            wide = f"llvm.x86.avx512.permvar.{name}.512"
            return _split(b, lambda b, x: _call(b, wide, t, [args[0], x]), index.lanes // 16, [args[1]])
        if "avx2" in FEATURES:
            return _split(b, lambda b, x: _lookup_avx2(b, args[0], x, name), index.lanes // 8, [args[1]])
        return _lookup_each(b, args[0], args[1])

    return VecType(table.elem, index.lanes)(table, index), cg


def _lookup_avx2(b: ir.IRBuilder, table: ir.Value, index: ir.Value, name: str) -> ir.Value:
    """Look 8 lanes up in 16: once in each half of the table, then choose by bit 3 of the index."""
    half = ir.VectorType(table.type.element, 8)
    fn = f"llvm.x86.avx2.perm{'ps' if name == 'sf' else 'd'}"
    low = _call(b, fn, half, [_shuffle(b, table, None, range(8)), index])
    high = _call(b, fn, half, [_shuffle(b, table, None, range(8, 16)), index])
    bit = b.and_(index, ir.Constant(index.type, [8] * 8))
    return b.select(b.icmp_unsigned("!=", bit, ir.Constant(index.type, [0] * 8)), high, low)


@intrinsic
def lookup32_f32(tyctx: Any, low: Any, high: Any, index: Any) -> Any:
    """lookup32_f32(low, high, index): 32-bit lanes, index's low 5 bits into a table of two vectors (vpermi2ps)."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        name, t = ("ps" if sig.args[0].is_float else "d"), args[0].type
        if "avx512f" in FEATURES:
            return _call(b, f"llvm.x86.avx512.vpermi2var.{name}.512", t, [args[0], args[2], args[1]])
        if "avx2" in FEATURES:
            kind = "sf" if sig.args[0].is_float else "si"
            x, y = (_split(b, lambda b, i, h=half: _lookup_avx2(b, h, i, kind), 2, [args[2]]) for half in args[:2])
        else:
            x, y = (_lookup_each(b, half, args[2]) for half in args[:2])
        bit = b.and_(args[2], _const(args[2].type, 16))
        return b.select(b.icmp_unsigned("!=", bit, _const(args[2].type, 0)), y, x)

    return VecType(low.elem, index.lanes)(low, high, index), cg


# ---------------------------------------------------------------- transposition


def _transpose_step(b: ir.IRBuilder, rows: list[ir.Value], step: int) -> list[ir.Value]:
    """Swap the off-diagonal blocks of size step in every 2*step block of a 16 x 16 matrix."""
    out = list(rows)
    for r in range(16):
        if r & step:
            continue
        x, y = rows[r], rows[r + step]
        out[r] = _shuffle(b, x, y, [c if not c & step else 16 + c - step for c in range(16)])
        out[r + step] = _shuffle(b, x, y, [c + step if not c & step else 16 + c for c in range(16)])
    return out


def _transpose(cgctx: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value], column_stride: ir.Value) -> None:
    vt, i64 = f32x16.ll, ir.IntType(64)
    start = _address(cgctx, b, sig.args[0], args[0], args[1])
    rows = []
    for r in range(16):
        p = b.gep(start, [b.mul(args[2], i64(r))])
        rows.append(b.load(b.bitcast(p, vt.as_pointer()), align=1))
    for step in (8, 4, 2, 1):
        rows = _transpose_step(b, rows, step)
    out = _address(cgctx, b, sig.args[3], args[3], args[4])
    for r in range(16):
        p = b.gep(out, [b.mul(column_stride, i64(r))])
        b.store(rows[r], b.bitcast(p, vt.as_pointer()), align=1)


@intrinsic
def transpose16(tyctx: Any, source: Any, offset: Any, stride: Any, target: Any, to: Any) -> Any:
    """transpose16(source, byte, row_stride, target, byte): 16 rows of 16 f32 become 16 columns.

    Row r is read at offset + r * stride bytes; the result is written as 16 contiguous vectors of 64 bytes.
    """

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _transpose(cgctx, b, sig, args, ir.IntType(64)(64))
        return cgctx.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp), cg


@intrinsic
def transpose16_apart(
    tyctx: Any, source: Any, offset: Any, stride: Any, target: Any, to: Any, column_stride: Any
) -> Any:
    """transpose16 whose 16 result vectors lie column_stride bytes apart."""

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        _transpose(cgctx, b, sig, args, args[5])
        return cgctx.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp), cg


@intrinsic
def row_extremes(tyctx: Any, source: Any, offset: Any, stride: Any) -> Any:
    """row_extremes(source, byte, row_stride): (smallest, largest) of 16 rows of 32 f32, row r in lane r.

    No NaN; among zeros of both signs, either.
    """

    def reduce(b: ir.IRBuilder, rows: list[ir.Value], op: str) -> ir.Value:
        for step in (8, 4, 2, 1):  # a transposition that keeps the better half at every step
            moved = _transpose_step(b, rows + [ir.Constant(f32x16.ll, ir.Undefined)] * (16 - len(rows)), step)
            pairs = [(moved[r], moved[r + step]) for r in range(step)]
            rows = [b.select(b.fcmp_ordered(op, x, y), x, y) for x, y in pairs]
        return rows[0]

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        i64, pointer = ir.IntType(64), f32x16.ll.as_pointer()
        start = _address(cgctx, b, sig.args[0], args[0], args[1])
        low, high = [], []
        for r in range(16):
            at = b.gep(start, [b.mul(args[2], i64(r))])
            x = b.load(b.bitcast(at, pointer), align=1)
            y = b.load(b.bitcast(b.gep(at, [i64(64)]), pointer), align=1)
            low.append(b.select(b.fcmp_ordered("<", x, y), x, y))
            high.append(b.select(b.fcmp_ordered(">", x, y), x, y))
        return cgctx.make_tuple(b, sig.return_type, [reduce(b, low, "<"), reduce(b, high, ">")])

    return UniTuple(f32x16, 2)(source, types.intp, types.intp), cg
