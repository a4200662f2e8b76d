"""Explicit SIMD for numba: LLVM vectors as ordinary values in kernels.

``load(f32x16, buffer, byte)``, ``a * b + c``, ``select(m, a, b)`` and ``store(buffer, byte, v)`` each emit one LLVM
instruction on a 64-byte vector, which LLVM splits on narrower machines. Only operations that LLVM cannot match from
plain IR (table lookups) have target-specific code, with a portable fallback. A buffer is a numpy array or a raw
address; offsets are in bytes, and nothing needs alignment.

Arithmetic is strict IEEE f32, with no contraction or reordering, except that ``hsum`` adds lanes as a tree.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import struct
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.types.containers import UniTuple
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

# ---------------------------------------------------------------- the target


def target_features() -> frozenset[str]:
    """Return the CPU features numba generates code for; honours NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
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
u32x16 = VecType(types.uint32, 16)
i32x16 = VecType(types.int32, 16)
f32x16 = VecType(types.float32, 16)
u32x8 = VecType(types.uint32, 8)
i32x8 = VecType(types.int32, 8)
f32x8 = VecType(types.float32, 8)
u32x4 = VecType(types.uint32, 4)
i32x4 = VecType(types.int32, 4)
f32x4 = VecType(types.float32, 4)
u64x8 = VecType(types.uint64, 8)
i64x8 = VecType(types.int64, 8)
f64x8 = VecType(types.float64, 8)
f64x16 = VecType(types.float64, 16)

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
    low, high = zip(*(_halves(b, a) for a in args), strict=True)
    x, y = _split(b, fn, parts // 2, low), _split(b, fn, parts // 2, high)
    return _shuffle(b, x, y, range(2 * x.type.count))


def _address(b: ir.IRBuilder, buffer: ir.Value, offset: ir.Value) -> ir.Value:
    byte = ir.IntType(8).as_pointer()
    start = b.inttoptr(buffer, byte) if isinstance(buffer.type, ir.IntType) else b.bitcast(buffer, byte)
    return b.gep(start, [offset])


def _pointer(b: ir.IRBuilder, buffer: ir.Value, offset: ir.Value, t: ir.Type) -> ir.Value:
    return b.bitcast(_address(b, buffer, offset), t.as_pointer())


def _halves(b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    n = x.type.count
    return _shuffle(b, x, None, range(n // 2)), _shuffle(b, x, None, range(n // 2, n))


def _like(t: ir.Type, element: ir.Type) -> ir.Type:
    """Return ``element``, or a vector of it with as many lanes as ``t``."""
    return ir.VectorType(element, t.count) if isinstance(t, ir.VectorType) else element


def _const(t: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)


def _from_half(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Widen f16, given as i16, to f32. Without F16C, LLVM would call a library function that numba does not link."""
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
    # Adding 0.5 rounds a magnitude below 2^-14 to a multiple of 2^-24, the spacing of f16 denormals.
    shifted = b.bitcast(b.fadd(b.bitcast(ax, x.type), _const(x.type, 0.5)), i32)
    small = b.icmp_unsigned("<", ax, _const(i32, 0x38800000))
    value = b.select(small, b.sub(shifted, _const(i32, 0x3F000000)), normal)
    nan = b.or_(b.and_(b.lshr(ax, _const(i32, 13)), _const(i32, 0x3FF)), _const(i32, 0x7E00))
    value = b.select(b.icmp_unsigned(">", ax, _const(i32, 0x7F800000)), nan, value)
    return b.trunc(b.or_(value, b.and_(b.lshr(bits, _const(i32, 16)), _const(i32, 0x8000))), i16)


def _set_name(fn: Any, name: str) -> Any:
    """Give an intrinsic made by a factory a stable identity, or numba's cache never hits."""
    fn.__name__ = name
    fn._set_uuid(f"{fn.__module__}.{name}")
    return fn


def _value(cgctx: Any, b: ir.IRBuilder, t: Any, value: ir.Value) -> Any:
    if isinstance(t, types.Array):
        return cgctx.make_array(t)(cgctx, b, value).data
    return cgutils.unpack_tuple(b, value) if isinstance(t, UniTuple) else value


def emits(typing: Callable[..., Any], name: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Make ``emit(b, sig, *values)`` an intrinsic for the types of which ``typing(*types)`` returns a signature.

    An array arrives as the address of its data, a tuple as its items; a list that emit returns becomes a tuple.
    """

    def make(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def define(tyctx: Any, *args: Any) -> Any:
            def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
                values = [_value(cgctx, b, t, v) for t, v in zip(sig.args, args, strict=True)]
                out = emit(b, sig, *values)
                if sig.return_type is types.void:
                    return cgctx.get_dummy_value()
                return cgctx.make_tuple(b, sig.return_type, out) if isinstance(out, list) else out

            signature = typing(*args)
            return None if signature is None else (signature, cg)

        parameters = list(inspect.signature(emit).parameters.values())
        define.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
        return _set_name(intrinsic(define), name or emit.__name__)

    return make


# ---------------------------------------------------------------- memory


def _reads(vt: Any, buffer: Any, offset: Any) -> Any:
    return vt.instance_type(vt, buffer, types.intp)


def _writes(buffer: Any, offset: Any, value: Any) -> Any:
    return types.void(buffer, types.intp, value)


@emits(_reads)
def load(b, sig, vt, buffer, offset):
    """load(f32x16, buffer, byte): read a vector, or a scalar (load(types.uint32, ...)), unaligned."""
    rt = sig.return_type
    return b.load(_pointer(b, buffer, offset, rt.ll if isinstance(rt, VecType) else _LL[rt]), align=1)


@emits(_writes)
def store(b, sig, buffer, offset, value):
    """store(buffer, byte, v): write a vector or a scalar, unaligned."""
    b.store(value, _pointer(b, buffer, offset, value.type), align=1)


@emits(_reads)
def load_f16(b, sig, vt, buffer, offset):
    """load_f16(f32x16, buffer, byte): read f16 values and widen them to f32."""
    half = ir.VectorType(ir.IntType(16), sig.return_type.lanes)
    return _from_half(b, b.load(_pointer(b, buffer, offset, half), align=1))


@emits(_writes)
def store_f16(b, sig, buffer, offset, value):
    """store_f16(buffer, byte, v): write f32 lanes as f16, rounded to nearest even."""
    half = _to_half(b, value)
    b.store(half, _pointer(b, buffer, offset, half.type), align=1)


@emits(lambda st, buffer, offset: VecType(st.instance_type, 512 // st.instance_type.bitwidth)(st, buffer, types.intp))
def load_line(b, sig, st, buffer, offset):
    """load_line(np.uint16, buffer, byte): read 64 bytes as a vector of one element type."""
    return b.load(_pointer(b, buffer, offset, sig.return_type.ll), align=1)


@emits(lambda x: types.uint16(types.float32))
def f32_to_f16(b, sig, x):
    """Return the bits of one f32 rounded to f16 (nearest even), as uint16."""
    return _to_half(b, x)


@emits(lambda bits: types.float32(types.uint16))
def f16_to_f32(b, sig, bits):
    """Return the f32 value of the bits of one f16."""
    return _from_half(b, bits)


def _prefetch(name: str, locality: int) -> Any:
    @emits(lambda buffer, offset: types.void(buffer, types.intp), name)
    def fetch(b, sig, buffer, offset):
        p, i32 = _address(b, buffer, offset), ir.IntType(32)
        _call(b, "llvm.prefetch.p0", ir.VoidType(), [p, i32(0), i32(locality), i32(1)])

    return fetch


#: Prefetch the cache line at a byte offset, which may lie beyond the buffer; prefetch_l2 stops at the L2 cache: many
#: more of these can be in flight.
prefetch, prefetch_l2 = _prefetch("prefetch", 3), _prefetch("prefetch_l2", 2)


# ---------------------------------------------------------------- making and converting vectors


@emits(lambda vt, x: vt.instance_type(vt, vt.instance_type.elem))
def splat(b, sig, vt, x):
    """splat(f32x16, x): broadcast x, converted to the element type, to all lanes."""
    return _splat(b, x, sig.return_type.lanes)


@emits(lambda vt, v: vt.instance_type(vt, v))
def cast(b, sig, vt, v):
    """cast(u8x64, v): reinterpret the bits as another type."""
    return b.bitcast(v, sig.return_type.ll)


@emits(lambda vt, v: vt.instance_type(vt, v))
def convert(b, sig, vt, v):
    """convert(f32x16, v): convert every lane; float to integer truncates."""
    rt, src = sig.return_type, sig.args[1]
    signed = src.elem is not types.boolean and not src.is_float and src.elem.signed
    if src.is_float and rt.is_float:
        return (b.fpext if rt.elem.bitwidth > src.elem.bitwidth else b.fptrunc)(v, rt.ll)
    if src.is_float:
        return (b.fptosi if rt.elem.signed else b.fptoui)(v, rt.ll)
    if rt.is_float:
        return (b.sitofp if signed else b.uitofp)(v, rt.ll)
    have, want = v.type.element.width, rt.ll.element.width
    if want > have:
        return (b.sext if signed else b.zext)(v, rt.ll)
    return b.trunc(v, rt.ll) if want < have else v


def make_constant(vt: VecType, values: Sequence[float], name: str) -> Any:
    """Return an intrinsic ``c()`` that yields a constant vector."""
    return emits(lambda: vt(), name)(lambda b, sig: ir.Constant(vt.ll, list(values)))


def make_shuffle(lanes: Sequence[int], name: str) -> Any:
    """Return an intrinsic ``s(v)`` that permutes the lanes of one vector."""
    return emits(lambda v: VecType(v.elem, len(lanes))(v), name)(lambda b, sig, v: _shuffle(b, v, None, lanes))


def make_shuffle2(lanes: Sequence[int], name: str) -> Any:
    """Return an intrinsic ``s(v, w)`` that picks lanes from the concatenation of two vectors."""
    return emits(lambda v, w: VecType(v.elem, len(lanes))(v, w), name)(lambda b, sig, v, w: _shuffle(b, v, w, lanes))


@emits(lambda v, lane: v.elem(v, types.intp))
def extract(b, sig, v, lane):
    """extract(v, lane): return one element."""
    return b.extract_element(v, lane)


# ---------------------------------------------------------------- operators


def _operands(a: Any, c: Any) -> VecType | None:
    """Return the vector type of a binary operation, or None if the operands do not match; scalars are splatted."""
    if isinstance(a, VecType) and isinstance(c, VecType):
        return a if a == c else None
    if isinstance(a, VecType) and isinstance(c, types.Number):
        return a
    return c if isinstance(c, VecType) and isinstance(a, types.Number) else None


def _or_element(vt: VecType, operands: Sequence[Any]) -> list[Any]:
    """Return the types of operands: vectors as they are, scalars converted to the element type."""
    return [t if isinstance(t, VecType) else vt.elem for t in operands]


def _widen(b: ir.IRBuilder, lanes: int, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Return values with scalars splatted."""
    return [v if isinstance(v.type, ir.VectorType) else _splat(b, v, lanes) for v in values]


def _operator(op: Any, result: Callable[[VecType], VecType], emit: Callable[..., ir.Value]) -> None:
    """Give an operator a meaning for vectors: ``emit(builder, type, *values)``, without a function for each use."""

    class Typing(AbstractTemplate):
        key = op

        def generic(self, args: Any, kws: Any) -> Any:
            vt = _operands(args[0], args[-1])
            return None if vt is None else signature(result(vt), *_or_element(vt, args))

    def cg(cgctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vt: Any = _operands(sig.args[0], sig.args[-1])
        return emit(b, vt, *_widen(b, vt.lanes, args))

    infer_global(op)(Typing)
    for args in ((VecType, VecType), (VecType, types.Number), (types.Number, VecType), (VecType,)):
        lower_builtin(op, *args)(cg)


def _arithmetic(op: Any, int_op: str | None, float_op: str | None, unsigned_op: str | None = None) -> None:
    def emit(b: Any, vt: VecType, x: ir.Value, y: ir.Value) -> ir.Value:
        method: Any = int_op
        if vt.is_float:
            method = float_op
        elif unsigned_op and not vt.elem.signed:
            method = unsigned_op
        return getattr(b, method)(x, y)

    for operation in (op, getattr(operator, f"i{op.__name__.rstrip('_')}")):  # a + b, and a += b
        _operator(operation, lambda vt: vt, emit)


_arithmetic(operator.add, "add", "fadd")
_arithmetic(operator.sub, "sub", "fsub")
_arithmetic(operator.mul, "mul", "fmul")
_arithmetic(operator.truediv, None, "fdiv")
_arithmetic(operator.and_, "and_", None)
_arithmetic(operator.or_, "or_", None)
_arithmetic(operator.xor, "xor", None)
_arithmetic(operator.lshift, "shl", None)
_arithmetic(operator.rshift, "ashr", None, "lshr")


def _compare(b: ir.IRBuilder, vt: VecType, op: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return ``a op b`` as in C: NaN compares unequal, and every ordered comparison with it is false."""
    if vt.is_float:
        return (b.fcmp_unordered if op == "!=" else b.fcmp_ordered)(op, x, y)
    return (b.icmp_signed if vt.elem.signed else b.icmp_unsigned)(op, x, y)


def _comparison(op: Any, sign: str) -> None:
    _operator(op, lambda vt: VecType(types.boolean, vt.lanes), lambda b, vt, x, y: _compare(b, vt, sign, x, y))


_comparison(operator.lt, "<")
_comparison(operator.gt, ">")
_comparison(operator.le, "<=")
_comparison(operator.ge, ">=")
_comparison(operator.eq, "==")
_comparison(operator.ne, "!=")

_operator(operator.neg, lambda vt: vt, lambda b, vt, x: b.fneg(x) if vt.is_float else b.neg(x))
_operator(operator.invert, lambda vt: vt, lambda b, vt, x: b.not_(x))


def _choose(name: str, op: str) -> Any:
    """Return C's MAX / MIN, (a op b) ? a : b, which treats NaN as maxps and minps do."""

    def typing(a: Any, c: Any) -> Any:
        vt = _operands(a, c)
        return None if vt is None else vt(*_or_element(vt, (a, c)))

    @emits(typing, name)
    def pick(b, sig, a, c):
        x, y = _widen(b, sig.return_type.lanes, (a, c))
        return b.select(_compare(b, sig.return_type, op, x, y), x, y)

    return pick


vmax, vmin = _choose("vmax", ">"), _choose("vmin", "<")


def _select(m: Any, a: Any, c: Any) -> Any:
    vt = a if isinstance(a, VecType) else c
    return vt(m, *_or_element(vt, (a, c)))


@emits(_select)
def select(b, sig, m, a, c):
    """select(mask, a, c): a where the mask is set, else c. Scalars are splatted."""
    return b.select(m, *_widen(b, sig.return_type.lanes, (a, c)))


# ---------------------------------------------------------------- math


def _lanewise(b: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    return _call(b, f"llvm.{name}.{_suffix(args[0].type)}", args[0].type, args)


vsqrt = emits(lambda a: a(a), "vsqrt")(lambda b, sig, a: _lanewise(b, "sqrt", a))
vabs = emits(lambda a: a(a), "vabs")(lambda b, sig, a: _lanewise(b, "fabs", a))


def _muladd(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _lanewise(b, "fma", x, y, z) if FEATURES & {"fma", "avx512f"} else b.fadd(b.fmul(x, y), z)


@emits(lambda a, x, c: a(a, *_or_element(a, (x, c))))
def muladd(b, sig, a, x, c):
    """a * x + c, rounded once where the target has FMA. Scalars x and c are splatted."""
    return _muladd(b, a, *_widen(b, sig.args[0].lanes, (x, c)))


def make_polynomial(coefficients: Sequence[float], name: str) -> Any:
    """Return an intrinsic ``p(x)``, the polynomial of these coefficients, of x^0 first, by ``muladd``."""

    @emits(lambda x: x(x), name)
    def polynomial(b, sig, x):
        total, *lower = (_const(x.type, c) for c in reversed(coefficients))
        for c in lower:
            total = _muladd(b, total, x, c)
        return total

    return polynomial


@emits(lambda a: a.elem(a))
def hsum(b, sig, a):
    """Sum all lanes as a tree: lanes 0..n/2 plus lanes n/2..n, and so on."""
    while a.type.count > 1:
        a = (b.fadd if sig.args[0].is_float else b.add)(*_halves(b, a))
    return b.extract_element(a, ir.IntType(32)(0))


def _extreme(name: str, op: str, llvm_name: str) -> Any:
    @emits(lambda a: a.elem(a), name)
    def extreme(b, sig, x):
        t = sig.args[0]
        if not t.is_float:
            reduce = f"llvm.vector.reduce.{'s' if t.elem.signed else 'u'}{llvm_name}.{_suffix(x.type)}"
            return _call(b, reduce, x.type.element, [x])
        while x.type.count > 1:  # LLVM's own reduction handles NaN and is three times slower
            low, high = _halves(b, x)
            x = b.select(b.fcmp_ordered(op, low, high), low, high)
        return b.extract_element(x, ir.IntType(32)(0))

    return extreme


#: Largest and smallest lane of a vector without NaN; of +0 and -0, either.
hmax, hmin = _extreme("hmax", ">", "max"), _extreme("hmin", "<", "min")


@emits(lambda m: types.uint64(m))
def mask_bits(b, sig, m):
    """Return a mask of up to 64 lanes as an integer, lane 0 in bit 0."""
    bits = b.bitcast(m, ir.IntType(m.type.count))
    return b.zext(bits, ir.IntType(64)) if bits.type.width < 64 else bits


@emits(lambda m: types.boolean(m))
def any_lane(b, sig, m):
    """Return whether any lane of a mask is set."""
    bits = b.bitcast(m, ir.IntType(m.type.count))
    return b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))


@emits(lambda bits: types.intp(types.uint64))
def trailing_zeros(b, sig, bits):
    """Return the number of the lowest bit that is set; 64 if none is."""
    return _call(b, "llvm.cttz.i64", bits.type, [bits, ir.IntType(1)(0)])


def _as_i32(a: Any) -> Any:
    return VecType(types.int32, a.lanes)(a) if isinstance(a, VecType) else types.int32(types.float32)


#: Adding 1.5 * 2^23 rounds an f32 below 2^22 to nearest even, and leaves the integer in its low bits; 1.5 * 2^52 rounds
#: an f64 below 2^51.
_MAGIC, _MAGIC_F64 = 12582912.0, 1.5 * 2.0**52


@emits(_as_i32)
def nearest_int(b, sig, x):
    """ggml's nearest_int: round to nearest even into int32 by adding 1.5 * 2^23.

    Exact for |x| < 2^22; beyond that it wraps as ggml does. Takes an f32 or a vector of f32.
    """
    i32 = _like(x.type, ir.IntType(32))
    bits = b.bitcast(b.fadd(x, _const(x.type, _MAGIC)), i32)
    return b.sub(b.and_(bits, _const(i32, 0x7FFFFF)), _const(i32, 0x400000))


@emits(lambda a: a(a))
def round_even(b, sig, x):
    """Round a vector of f32 or f64 to nearest even, for |x| < 2^22 or 2^51; larger values may come back unrounded.

    One instruction with SSE4.1; then -0.5..-0 may give -0.
    """
    if FEATURES & {"sse4.1", "sse4.2", "avx", "avx512f"}:
        return _lanewise(b, "roundeven", x)
    magic = _const(x.type, _MAGIC_F64 if isinstance(x.type.element, ir.DoubleType) else _MAGIC)
    return b.fsub(b.fadd(x, magic), magic)


@emits(_as_i32)
def round_away(b, sig, x):
    """Round as C's roundf (halves away from zero) a vector of f32 to int32; |x| < 2^31."""
    # The largest f32 below one half: adding one half would round 0.49999997 up to 1.
    int_type = _like(x.type, ir.IntType(32))
    sign = b.and_(b.bitcast(x, int_type), _const(int_type, 0x80000000))
    half = b.bitcast(b.or_(sign, _const(int_type, 0x3EFFFFFF)), x.type)
    return b.fptosi(b.fadd(x, half), int_type)


# ---------------------------------------------------------------- integer products: ops with target code

#: Whether one instruction sums u8 x s8 products; without it, signed operands go through |x| and sign(y).
HAS_DOT4 = bool(FEATURES & {"avx512vnni", "avxvnni"})


def _pair_sums(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Multiply i16 by i16 and add neighbours, in a form that LLVM turns into pmaddwd."""
    n = x.type.count
    wide = ir.VectorType(ir.IntType(32), n)
    p = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(_shuffle(b, p, None, range(0, n, 2)), _shuffle(b, p, None, range(1, n, 2)))


def _dot4_portable(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """Two pmaddwd on even and odd bytes widened to i16; each i32 lane sums its four products."""
    half = ir.VectorType(ir.IntType(16), x.type.count // 2)
    x = b.bitcast(x, half)
    y = b.bitcast(y, half)
    eight = _const(half, 8)
    if signed:
        x_even, x_odd = b.ashr(b.shl(x, eight), eight), b.ashr(x, eight)
    else:
        x_even, x_odd = b.and_(x, _const(half, 255)), b.lshr(x, eight)
    y_even, y_odd = b.ashr(b.shl(y, eight), eight), b.ashr(y, eight)
    return b.add(acc, b.add(_pair_sums(b, x_even, y_even), _pair_sums(b, x_odd, y_odd)))


def _dot4_avx2(b: ir.IRBuilder, acc: ir.Value, x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """pmaddubsw and pmaddwd: a pair of products is at most 2 * 128 * 127 = 32512, which fits i16."""
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


@emits(lambda acc, x, y: acc(acc, x, y))
def dot4(b, sig, acc, x, y):
    """dot4(acc, x, y): add four byte products to every i32 lane of acc; x u8 or i8, y i8 in -127..127. Exact.

    With HAS_DOT4, x should be u8 of any value; otherwise i8, or u8 up to 127.
    """
    return _dot4(b, acc, x, y, sig.args[1].elem.signed)


@emits(lambda x, y: VecType(types.int16, x.lanes // 2)(x, y))
def maddubs(b, sig, x, y):
    """maddubs(u8x64, i8x64): sums of neighbouring byte products, as i16; the caller rules out overflow."""
    rt = sig.return_type
    for feature, width, name in (
        ("avx512bw", 32, "llvm.x86.avx512.pmaddubs.w.512"),
        ("avx2", 16, "llvm.x86.avx2.pmadd.ub.sw"),
        ("ssse3", 8, "llvm.x86.ssse3.pmadd.ub.sw.128"),
    ):
        if feature in FEATURES and rt.lanes % width == 0:
            t = ir.VectorType(ir.IntType(16), width)
            return _split(b, lambda b, *v, n=name, t=t: _call(b, n, t, v), rt.lanes // width, [x, y])
    x = b.bitcast(x, rt.ll)
    y = b.bitcast(y, rt.ll)
    eight = _const(rt.ll, 8)
    even = b.mul(b.and_(x, _const(rt.ll, 255)), b.ashr(b.shl(y, eight), eight))
    return b.add(even, b.mul(b.lshr(x, eight), b.ashr(y, eight)))


@emits(lambda acc, x, y: acc(acc, x, y))
def dot2(b, sig, acc, x, y):
    """dot2(acc, x, y): add two i16 products to every i32 lane of acc. Exact."""
    lanes = acc.type.count
    wide = "avx512vnni" in FEATURES and lanes % 16 == 0
    if wide or ("avxvnni" in FEATURES and lanes % 8 == 0) or {"avx512vnni", "avx512vl"} <= FEATURES:
        width = 16 if wide else min(lanes, 8)
        name = f"llvm.x86.avx512.vpdpwssd.{32 * width}"
        return _split(b, lambda b, *v: _call(b, name, v[0].type, v), lanes // width, [acc, x, y])
    return b.add(acc, _pair_sums(b, x, y))


@emits(lambda v: v(v))
def popcount(b, sig, v):
    """Count the bits of every lane."""
    return _call(b, f"llvm.ctpop.{_suffix(v.type)}", v.type, [v])


@emits(lambda v: v(v))
def opaque(b, sig, v):
    """Return v, opaque to LLVM: keeps it from sinking a widening below several shuffles."""
    if not FEATURES & {"avx", "avx2", "avx512f"}:
        return v
    return b.asm(ir.FunctionType(v.type, [v.type]), "", "=x,0", [v], False)


@emits(lambda count: types.int64(count) if isinstance(count, types.IntegerLiteral) else None)
def stack_bytes(b, sig, count):
    """stack_bytes(512): address of that many uninitialized, 64-aligned bytes on the caller's stack; a literal count."""
    with b.goto_entry_block():  # not cgutils.alloca_once, which zeroes the memory as one LLVM value
        space = b.alloca(ir.ArrayType(ir.IntType(8), sig.args[0].literal_value))
    space.align = 64
    return b.ptrtoint(space, ir.IntType(64))


# ---------------------------------------------------------------- table lookups: the ops with target code


def _lookup_each(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """Portable lookup: one lane at a time."""
    out = ir.Constant(ir.VectorType(table.type.element, index.type.count), ir.Undefined)
    last = ir.Constant(index.type.element, table.type.count - 1)
    for lane in range(index.type.count):
        lane_index = b.and_(b.extract_element(index, ir.IntType(32)(lane)), last)
        out = b.insert_element(out, b.extract_element(table, lane_index), ir.IntType(32)(lane))
    return out


def _looked_up(table: Any, index: Any) -> Any:
    return VecType(table.elem, index.lanes)(table, index)


@emits(_looked_up)
def lookup16(b, sig, table, index):
    """lookup16(table, index): look bytes index[i] in 0..15 up in a table of 16 bytes (pshufb).

    ``table`` has 16 lanes, ``index`` 16, 32 or 64; the result has the table's element type.
    """
    return _lookup16(b, table, index)


def _lookup16(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """pshufb ignores bits 4 to 6 of an index."""
    n = index.type.count
    for feature, width, name in (
        ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
        ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
        ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ):
        if feature in FEATURES and n % width == 0:
            wide = _shuffle(b, table, None, [i % 16 for i in range(n)])
            return _split(b, lambda b, t, x, f=name: _call(b, f, t.type, [t, x]), n // width, [wide, index])
    return _lookup_each(b, table, index)


@emits(_looked_up)
def lookup64(b, sig, table, index):
    """lookup64(table, index): look 64 bytes below n up in a table of n = 32 or 64 bytes (vpermb)."""
    if "avx512vbmi" in FEATURES:
        wide = _shuffle(b, table, None, [i % table.type.count for i in range(64)])
        return _call(b, "llvm.x86.avx512.permvar.qi.512", wide.type, [wide, index])
    return _lookup_in_parts(b, table, index)


def _lookup_in_parts(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """Look up in each half of a table, then choose by the highest bit of the index."""
    if table.type.count == 16:
        return _lookup16(b, table, index)
    low, high = (_lookup_in_parts(b, half, index) for half in _halves(b, table))
    return _either(b, index, table.type.count // 2, low, high)


@emits(_looked_up)
def lookup16_f32(b, sig, table, index):
    """lookup16_f32(table, index): look 32-bit lanes index[i] in 0..15 up in a table of 16 (vpermps / vpermd)."""
    return _lookup16_f32(b, table, index, sig.args[0].is_float)


def _lookup16_f32(b: ir.IRBuilder, table: ir.Value, index: ir.Value, is_float: bool) -> ir.Value:
    if "avx512f" in FEATURES:
        wide = f"llvm.x86.avx512.permvar.{'sf' if is_float else 'si'}.512"
        return _split(b, lambda b, x: _call(b, wide, table.type, [table, x]), index.type.count // 16, [index])
    if "avx2" in FEATURES:
        return _split(b, lambda b, x: _lookup_avx2(b, table, x, is_float), index.type.count // 8, [index])
    return _lookup_each(b, table, index)


def _lookup_avx2(b: ir.IRBuilder, table: ir.Value, index: ir.Value, is_float: bool) -> ir.Value:
    """Look 8 lanes up in each half of a table of 16, then choose by bit 3 of the index."""
    fn = f"llvm.x86.avx2.perm{'ps' if is_float else 'd'}"
    low, high = (_call(b, fn, half.type, [half, index]) for half in _halves(b, table))
    return _either(b, index, 8, low, high)


def _either(b: ir.IRBuilder, index: ir.Value, bit: int, low: ir.Value, high: ir.Value) -> ir.Value:
    is_upper = b.and_(index, _const(index.type, bit))
    return b.select(b.icmp_unsigned("!=", is_upper, _const(index.type, 0)), high, low)


@emits(lambda low, high, index: VecType(low.elem, index.lanes)(low, high, index))
def lookup32_f32(b, sig, low, high, index):
    """lookup32_f32(low, high, index): look the low 5 bits of 32-bit lanes up in two vectors (vpermi2ps)."""
    return _lookup32_f32(b, low, high, index, sig.args[0].is_float)


def _lookup32_f32(b: ir.IRBuilder, low: ir.Value, high: ir.Value, index: ir.Value, is_float: bool) -> ir.Value:
    if "avx512f" in FEATURES:
        name = f"llvm.x86.avx512.vpermi2var.{'ps' if is_float else 'd'}.512"
        return _call(b, name, low.type, [low, index, high])
    x, y = (_lookup16_f32(b, half, index, is_float) for half in (low, high))
    return _either(b, index, 16, x, y)


def make_table(values: Sequence[int], name: str) -> Any:
    """Return an intrinsic ``t(index)``: the low bits of 32-bit lanes looked up in 16, 32, 64 or 128 numbers, as f32.

    The numbers are integers of at most 8 significant bits.
    """
    return emits(lambda index: f32x16(index), name)(lambda b, sig, index: _look_up(b, list(values), index))


def _look_up(b: ir.IRBuilder, values: list[int], index: ir.Value) -> ir.Value:
    if len(values) <= 32:
        low, *upper = (ir.Constant(f32x16.ll, values[i : i + 16]) for i in range(0, len(values), 16))
        return _lookup32_f32(b, low, upper[0], index, True) if upper else _lookup16_f32(b, low, index, True)
    if "avx512bw" not in FEATURES:
        return _from_memory(b, values, index)
    # Such a number fills the upper half of an f32 only: 64 of them are two vectors of 16-bit lanes (vpermi2w).
    i16 = ir.VectorType(ir.IntType(16), 32)
    word_index = b.bitcast(b.shl(index, _const(index.type, 16)), i16)
    result = _lookup_upper_halves(b, values[:64], word_index)
    if values[64:]:
        beyond = b.icmp_unsigned("!=", b.and_(word_index, _const(i16, 64)), _const(i16, 0))
        result = b.select(beyond, _lookup_upper_halves(b, values[64:], word_index), result)
    return b.bitcast(b.and_(b.bitcast(result, index.type), _const(index.type, -65536)), f32x16.ll)


def _lookup_upper_halves(b: ir.IRBuilder, values: list[int], index: ir.Value) -> ir.Value:
    """Look up the upper halves of 64 numbers as f32."""
    halves = [int.from_bytes(struct.pack("<f", v)[2:], "little") for v in values]
    low, high = (ir.Constant(index.type, halves[i : i + 32]) for i in (0, 32))
    return _call(b, "llvm.x86.avx512.vpermi2var.hi.512", index.type, [low, index, high])


def _from_memory(b: ir.IRBuilder, values: list[int], index: ir.Value) -> ir.Value:
    """Portable: load one lane at a time from a constant array."""
    array = ir.Constant(ir.ArrayType(ir.FloatType(), len(values)), values)
    # Named after its content: when modules are linked, equal names denote the same table.
    name = f"quantkit_table_{hashlib.sha256(repr(values).encode()).hexdigest()[:16]}"
    table = b.module.globals.get(name) or cgutils.global_constant(b.module, name, array)
    out = ir.Constant(ir.VectorType(ir.FloatType(), index.type.count), ir.Undefined)
    zero, last = ir.IntType(32)(0), ir.IntType(32)(len(values) - 1)
    for lane in range(index.type.count):
        lane_index = b.and_(b.extract_element(index, ir.IntType(32)(lane)), last)
        out = b.insert_element(out, b.load(b.gep(table, [zero, lane_index])), ir.IntType(32)(lane))
    return out


# ---------------------------------------------------------------- transposition


def _transpose_step(b: ir.IRBuilder, rows: list[ir.Value], step: int) -> list[ir.Value]:
    """Swap the off-diagonal step x step blocks of every 2*step block of a 16 x 16 matrix."""
    out = list(rows)
    for r in range(16):
        if r & step:
            continue
        x, y = rows[r], rows[r + step]
        out[r] = _shuffle(b, x, y, [c if not c & step else 16 + c - step for c in range(16)])
        out[r + step] = _shuffle(b, x, y, [c + step if not c & step else 16 + c for c in range(16)])
    return out


def _rows(b: ir.IRBuilder, buffer: ir.Value, offset: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Return the addresses of 16 rows."""
    start = _address(b, buffer, offset)
    return [b.gep(start, [b.mul(stride, ir.IntType(64)(r))]) for r in range(16)]


def _vector_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.bitcast(address, f32x16.ll.as_pointer())


@emits(
    lambda source, offset, stride, target, target_offset: types.void(source, types.intp, types.intp, target, types.intp)
)
def transpose16(b, sig, source, offset, stride, target, target_offset):
    """transpose16(source, byte, row_stride, target, byte): transpose 16 rows of 16 f32.

    Row r is read at offset + r * stride bytes; the result is 16 contiguous vectors of 64 bytes.
    """
    _transpose(b, source, offset, stride, target, target_offset, ir.IntType(64)(64))


@emits(lambda *args: types.void(*(t if i in (0, 3) else types.intp for i, t in enumerate(args))))
def transpose16_apart(b, sig, source, offset, stride, target, target_offset, column_stride):
    """Like transpose16, with the 16 result vectors column_stride bytes apart."""
    _transpose(b, source, offset, stride, target, target_offset, column_stride)


def _transpose(
    b: Any, source: Any, offset: Any, stride: Any, target: Any, target_offset: Any, column_stride: Any
) -> None:
    rows = [b.load(_vector_at(b, p), align=1) for p in _rows(b, source, offset, stride)]
    for step in (8, 4, 2, 1):
        rows = _transpose_step(b, rows, step)
    for row, p in zip(rows, _rows(b, target, target_offset, column_stride), strict=True):
        b.store(row, _vector_at(b, p), align=1)


def _of_rows(b: ir.IRBuilder, rows: list[ir.Value], op: str) -> ir.Value:
    """Return the smallest (<) or largest (>) lane of each of 16 rows, by a transposition that keeps the better half."""
    for step in (8, 4, 2, 1):
        moved = _transpose_step(b, rows + [ir.Constant(f32x16.ll, ir.Undefined)] * (16 - len(rows)), step)
        pairs = [(moved[r], moved[r + step]) for r in range(step)]
        rows = [b.select(b.fcmp_ordered(op, x, y), x, y) for x, y in pairs]
    return rows[0]


@emits(lambda source, offset, stride: UniTuple(f32x16, 2)(source, types.intp, types.intp))
def row_extremes(b, sig, source, offset, stride):
    """row_extremes(source, byte, row_stride): (smallest, largest) of 16 rows of 32 f32, row r in lane r.

    No NaN; of +0 and -0, either.
    """
    low, high = [], []
    for row in _rows(b, source, offset, stride):
        x, y = (b.load(_vector_at(b, p), align=1) for p in (row, b.gep(row, [ir.IntType(64)(64)])))
        low.append(b.select(b.fcmp_ordered("<", x, y), x, y))
        high.append(b.select(b.fcmp_ordered(">", x, y), x, y))
    return [_of_rows(b, low, "<"), _of_rows(b, high, ">")]
