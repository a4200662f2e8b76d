"""PTX on the CPU (tests/ptx): instructions follow the PTX ISA, and unknown ones are an error.

The families' own tests run on it as well, for sm_90 (`device` of conftest.py), and what sm_75 has of its own: smaller
mma, copies without cp.async. Every statement of inline assembly is run so. Left to `--exhaustive`: most encoders, and
products of choices for tensor cores (ptx/selection.py). Left to `--all-ptx`: two of three tests of attention, all else
for sm_75 and sm_80, whole models, translating every kernel there is, and comparing each launch with the shim's
(twin.py).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from device_memory import Memory
from ptx.device import PTXDevice, build, load, module_of, why_not
from ptx.parse import PTXError, parse
from ptx.translate import translate
from ptx.twin import TwinDevice
from test_cuda_compile import CAPABILITIES, FAMILIES, modules

pytestmark = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))

f32 = np.float32

MODULE = """
.version 8.8
.target sm_90
.address_size 64
.visible .entry quantkit_try(
    .param .align 8 .b8 quantkit_try_param_0[16]
)
.maxntid 32, 1, 1
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<32>;
    .reg .f32 %f<9>;
    .reg .b64 %rd<9>;
    .reg .f64 %fd<9>;
    ld.param.u64 %rd7, [quantkit_try_param_0];
    ld.param.u64 %rd8, [quantkit_try_param_0+8];
    mov.u32 %r30, %tid.x;
    mov.u32 %r31, %ctaid.x;
    shl.b32 %r31, %r31, 5;
    add.s32 %r31, %r31, %r30;
    mul.wide.u32 %rd6, %r31, 32;
    add.s64 %rd7, %rd7, %rd6;
    add.s64 %rd8, %rd8, %rd6;
    {body}
    ret;
}}
"""


def module(*body: str) -> str:
    return MODULE.format(body="\n    ".join(body))


def run(body: str, words: Any) -> Any:
    """Run instructions on rows of four 64-bit words at %rd7; return those at %rd8. Rows: a multiple of 32."""
    text = module(body)
    library = load(build(text, "quantkit_try"))
    memory = Memory(PTXDevice())
    x, out = memory.put(words), memory.put(np.zeros_like(words))
    grid, block = (ctypes.c_uint * 3)(len(words) // 32, 1, 1), (ctypes.c_uint * 3)(32, 1, 1)
    memory.device._runtime.host_launch(
        library.quantkit_try, b"try", grid, block, ctypes.c_uint64(0), (ctypes.c_int64 * 2)(x, out), 0
    )
    actual = memory.get(out, words.shape, np.uint64)
    memory.close()
    return actual


# ---------------------------------------------------------------- what is not known

UNKNOWN = [
    "add.sat.s32 %r1, %r2, %r3;",
    "add.rn.ftz.f32 %f1, %f2, %f3;",
    "add.f32 %f1, %f2, %f3;",
    "ld.global.cg.u32 %r1, [%rd7];",
    "ld.volatile.shared.u32 %r1, [%rd7];",
    "frobnicate.b32 %r1, %r2;",
    "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
    "shfl.bfly.b32 %r1, %r2, 1, 31;",
    "bar.sync 1;",
    "mov.u32 %r1, %clock;",
    "mov.u32 %r99, 0;",
    "mov.f32 %f1, %rd1;",
    "cp.async.cg.shared.global [%r1], [%rd1], 8;",
    "cp.async.ca.shared.global [%r1], [%rd1], 4, 0;",
    ".loc 1 2 3;",
]


@pytest.mark.parametrize("body", UNKNOWN)
def test_an_unknown_instruction_is_an_error(body: str) -> None:
    with pytest.raises(PTXError, match="line 26"):
        translate(parse(module("ret;", body)), "quantkit_try")


def test_an_unknown_directive_is_an_error() -> None:
    with pytest.raises(PTXError, match="maxnreg"):
        parse(module("").replace(".maxntid 32, 1, 1", ".maxntid 32, 1, 1\n.maxnreg 32"))
    with pytest.raises(PTXError, match="not a declaration"):
        parse(module("") + ".global .texref t;")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_translated(family: str, capability: int) -> None:
    """Of all families: --all-ptx."""
    for operation, names in modules(family):
        module = module_of(operation.file, operation.defines, capability)
        for name in names:
            assert "quantkit_" in translate(module, f"quantkit_{name}")


# ---------------------------------------------------------------- instructions

M32 = 2**32 - 1


def s(x: int, bits: int = 32) -> int:
    return (x & ((1 << bits) - 1)) - ((x >> (bits - 1) & 1) << bits)


def single(x: int) -> Any:
    return np.uint32(x & M32).view(f32)


def bits(x: Any) -> int:
    """Return the bits of a float; a NaN made by f32 arithmetic is 0x7fffffff."""
    if x.dtype == f32 and np.isnan(x):
        return 0x7FFFFFFF
    return int(x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]))


def towards(x: Fraction, direction: int) -> Any:
    """Return the f32 nearest to x (direction 1); the nearest not beyond it (0), or not above it (-1)."""
    nearest_value = nearest(x)
    actual = Fraction(float(nearest_value))
    if direction == 0 and abs(actual) > abs(x):
        return np.nextafter(nearest_value, f32(0))
    return np.nextafter(nearest_value, f32(-np.inf)) if direction == -1 and actual > x else nearest_value


def nearest(x: Fraction) -> Any:
    """Return x rounded once to f32, ties to even."""
    if x == 0:
        return f32(0)
    exponent = max(-126, math.frexp(float(abs(x)))[1] - 1)
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return np.copysign(f32(float(round(x / unit) * unit)), f32(1 if x > 0 else -1))


def exact(f: Callable[..., Fraction], direction: int) -> Callable[..., int | None]:
    def meaning(*words: int) -> int | None:
        values = [single(w) for w in words]
        if not all(np.isfinite(v) for v in values):
            return None
        result = f(*(Fraction(float(v)) for v in values))
        if result == 0 or abs(result) > Fraction(2) ** 127:
            return None  # the sign of a zero, and what overflows, is left to others
        return bits(towards(result, direction))

    return meaning


def prmt(a: int, b: int, c: int) -> int:
    source, out = (b << 32 | a).to_bytes(8, "little"), []
    for i in range(4):
        byte = source[c >> 4 * i & 7]
        out.append((255 if byte > 127 else 0) if c >> 4 * i & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def bfi(a: int, b: int, c: int, d: int, size: int) -> int:
    start, n = c & 255, d & 255
    mask = ((1 << n) - 1) << start
    return ((b & ~mask) | (a << start & mask)) & ((1 << size) - 1)


def to_s32(x: float, rounding: Callable[[float], Any]) -> int:
    if math.isnan(x):
        return 0
    return int(max(-(2**31), min(2**31 - 1, rounding(x) if math.isfinite(x) else x))) & M32


def half(x: int) -> int:
    value = single(x)
    with np.errstate(over="ignore"):
        return 0x7FFF if np.isnan(value) else bits(value.astype(np.float16))


def halves(x: int, y: int, operation: Any) -> int:
    """Return the bits of an operation on two times two halves."""
    a, b = (np.array([w & 0xFFFF, w >> 16], np.uint16).view(np.float16) for w in (x, y))
    result = operation(a, b)
    low, high = np.where(np.isnan(result), 0x7FFF, result.view(np.uint16)).tolist()
    return int(high << 16 | low)


def maximum(x: int, y: int) -> int:
    a, b = single(x), single(y)
    if np.isnan(a) or np.isnan(b):
        return bits(b if np.isnan(a) else a)
    if a == b == 0:
        return x & y & M32
    return bits(max(a, b))


def minimum(x: int, y: int) -> int:
    a, b = single(x), single(y)
    if np.isnan(a) or np.isnan(b):
        return bits(b if np.isnan(a) else a)
    if a == b == 0:
        return x | y
    return bits(min(a, b))


def dot4(a: int, b: int, c: int) -> int:
    return (c + sum(s(a >> 8 * i, 8) * s(b >> 8 * i, 8) for i in range(4))) & M32


def dot4_unsigned(a: int, b: int, c: int) -> int:
    return (c + sum((a >> 8 * i & 255) * s(b >> 8 * i, 8) for i in range(4))) & M32


def dot2(a: int, b: int, c: int) -> int:
    return (c + sum(s(a >> 16 * i, 16) * s(b >> 8 * i, 8) for i in range(2))) & M32


def dot2_unsigned(a: int, b: int, c: int) -> int:
    return (c + sum((a >> 16 * i & 65535) * (b >> 8 * i & 255) for i in range(2))) & M32


#: Instructions of 32-bit registers a, b, c (%r1 to %r3, of which d is %r4) and their results; None: anything.
MEANINGS: dict[str, Callable[[int, int, int], int | None]] = {
    "prmt.b32 %r4, %r1, %r2, %r3;": prmt,
    "dp4a.s32.s32 %r4, %r1, %r2, %r3;": dot4,
    "dp4a.u32.s32 %r4, %r1, %r2, %r3;": dot4_unsigned,
    "dp2a.lo.s32.s32 %r4, %r1, %r2, %r3;": dot2,
    "dp2a.hi.s32.s32 %r4, %r1, %r2, %r3;": lambda a, b, c: dot2(a, b >> 16, c),
    "dp2a.lo.u32.u32 %r4, %r1, %r2, %r3;": dot2_unsigned,
    "dp2a.hi.u32.u32 %r4, %r1, %r2, %r3;": lambda a, b, c: dot2_unsigned(a, b >> 16, c),
    "shf.l.wrap.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: ((b << 32 | a) << (c & 31) >> 32) & M32,
    "shf.r.wrap.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: (b << 32 | a) >> (c & 31) & M32,
    "shf.r.clamp.b32 %r4, %r1, %r2, %r3;": lambda a, b, c: (b << 32 | a) >> min(c, 32) & M32,
    "bfi.b32 %r4, %r1, %r2, %r3, 7;": lambda a, b, c: bfi(a, b, c, 7, 32),
    "lop3.b32 %r4, %r1, %r2, %r3, 202;": lambda a, b, c: (a & b | ~a & c) & M32,
    "and.b32 %r4, %r3, 63; shl.b32 %r4, %r1, %r4;": lambda a, b, c: a << (c & 63) & M32,
    "and.b32 %r4, %r3, 63; shr.u32 %r4, %r1, %r4;": lambda a, b, c: a >> (c & 63),
    "and.b32 %r4, %r3, 63; shr.s32 %r4, %r1, %r4;": lambda a, b, c: s(a) >> (c & 63) & M32,
    "brev.b32 %r4, %r1;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "popc.b32 %r4, %r1;": lambda a, b, c: a.bit_count(),
    "bfind.shiftamt.u32 %r4, %r1;": lambda a, b, c: 32 - a.bit_length() if a else M32,
    "mov.b64 %rd1, {%r1, %r2}; clz.b64 %r4, %rd1;": lambda a, b, c: 64 - (b << 32 | a).bit_length(),
    "mul.hi.s32 %r4, %r1, %r2;": lambda a, b, c: s(a) * s(b) >> 32 & M32,
    "mul.hi.u32 %r4, %r1, %r2;": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %r4, %r1, %r2, %r3;": lambda a, b, c: (a * b + c) & M32,
    "mov.b64 %rd1, {%r3, %r1}; mad.wide.u32 %rd1, %r1, %r2, %rd1; mov.b64 {%r5, %r4}, %rd1;": lambda a, b, c: (
        (a * b + (a << 32 | c)) >> 32 & M32
    ),
    "mul.wide.s32 %rd1, %r1, %r2; shr.s64 %rd1, %rd1, 7; cvt.u32.u64 %r4, %rd1;": lambda a, b, c: (
        s(a) * s(b) >> 7 & M32
    ),
    "or.b32 %r5, %r2, 1; div.s32 %r4, %r1, %r5;": lambda a, b, c: int(Fraction(s(a), s(b | 1))) & M32,
    "or.b32 %r5, %r2, 1; rem.s32 %r4, %r1, %r5;": lambda a, b, c: int(math.fmod(s(a), s(b | 1))) & M32,
    "min.s32 %r4, %r1, %r2;": lambda a, b, c: min(s(a), s(b)) & M32,
    "min.u32 %r4, %r1, %r2;": lambda a, b, c: min(a, b),
    "max.u32 %r4, %r1, %r2;": lambda a, b, c: max(a, b),
    "add.cc.u32 %r5, %r1, %r2; addc.u32 %r4, %r3, 0;": lambda a, b, c: (c + (a + b >> 32)) & M32,
    "sub.cc.u32 %r5, %r1, %r2; subc.u32 %r4, %r3, 0;": lambda a, b, c: (c - (a < b)) & M32,
    "mad.lo.cc.u32 %r5, %r1, %r2, %r3; madc.hi.u32 %r4, %r1, %r2, 0;": lambda a, b, c: a * b + c >> 32,
    "cvt.u16.u32 %rs1, %r1; cvt.s16.s8 %rs2, %rs1; mul.wide.u16 %r4, %rs2, 3;": lambda a, b, c: s(a, 8) % 2**16 * 3,
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r4, {%rs2, %rs1};": lambda a, b, c: (a << 16 | a >> 16) & M32,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r4, %r3, 5, %p1;": lambda a, b, c: c if s(a) < s(b) else 5,
    "setp.le.u32 %p1, %r1, %r2; selp.b32 %r4, %r3, 5, %p1;": lambda a, b, c: c if a <= b else 5,
    "setp.ltu.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;": lambda a, b, c: not single(a) >= single(b),
    "setp.neu.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;": lambda a, b, c: single(a) != single(b),
    "setp.gtu.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;": lambda a, b, c: not single(a) <= single(b),
    "setp.leu.f32 %p1, %f1, %f2; @!%p1 mov.u32 %r4, 9;": lambda a, b, c: 9 if single(a) > single(b) else 0,
    "setp.num.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;": lambda a, b, c: (
        not (math.isnan(single(a)) or math.isnan(single(b)))
    ),
    "setp.nan.f32 %p1, %f1, %f2; selp.b32 %r4, 1, 0, %p1;": lambda a, b, c: (
        math.isnan(single(a)) or math.isnan(single(b))
    ),
    "add.rn.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": exact(lambda a, b, c: a + b, 1),
    "add.rz.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": exact(lambda a, b, c: a + b, 0),
    "fma.rn.f32 %f4, %f1, %f2, %f3; mov.b32 %r4, %f4;": exact(lambda a, b, c: a * b + c, 1),
    "fma.rm.f32 %f4, %f1, %f2, %f3; mov.b32 %r4, %f4;": exact(lambda a, b, c: a * b + c, -1),
    "mul.rn.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": exact(lambda a, b, c: a * b, 1),
    "max.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": lambda a, b, c: maximum(a, b),
    "min.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": lambda a, b, c: minimum(a, b),
    "neg.f32 %f4, %f1; mov.b32 %r4, %f4;": lambda a, b, c: a ^ 0x80000000,
    "abs.f32 %f4, %f1; mov.b32 %r4, %f4;": lambda a, b, c: a & 0x7FFFFFFF,
    "copysign.f32 %f4, %f1, %f2; mov.b32 %r4, %f4;": lambda a, b, c: a & 0x80000000 | b & 0x7FFFFFFF,
    "cvt.rn.f16.f32 %rs1, %f1; cvt.u32.u16 %r4, %rs1;": lambda a, b, c: half(a),
    "cvt.rn.f16x2.f32 %r4, %f1, %f2;": lambda a, b, c: half(a) << 16 | half(b),
    "sub.rn.f16x2 %r4, %r1, %r2;": lambda a, b, c: halves(a, b, np.subtract),
    "mul.rn.f16x2 %r4, %r1, %r2;": lambda a, b, c: halves(a, b, np.multiply),
    "cvt.u16.u32 %rs1, %r1; cvt.f32.f16 %f4, %rs1; mov.b32 %r4, %f4;": lambda a, b, c: bits(
        np.uint16(a & 0xFFFF).view(np.float16).astype(f32)
    ),
    "cvt.rni.s32.f32 %r4, %f1;": lambda a, b, c: to_s32(float(single(a)), round),
    "cvt.rzi.s32.f32 %r4, %f1;": lambda a, b, c: to_s32(float(single(a)), math.trunc),
    "cvt.rn.f32.s32 %f4, %r1; mov.b32 %r4, %f4;": lambda a, b, c: bits(f32(s(a))),
    "cvt.sat.f32.f32 %f4, %f1; mov.b32 %r4, %f4;": lambda a, b, c: bits(
        f32(0 if np.isnan(single(a)) else min(max(single(a), f32(0)), f32(1)) + f32(0))
    ),
}


def operands() -> Any:
    """Return rows of a, b, c: random, small, the ends of ranges, floats near each other and special ones."""
    rng = np.random.default_rng(7)
    words = rng.integers(0, 2**32, (512, 4), np.uint64)
    floats = rng.standard_normal((256, 4)).astype(f32) * f32(2) ** rng.integers(-20, 20, (256, 4))
    words[:256] = floats.astype(f32).view(np.uint32)
    special = [
        0,
        1,
        31,
        32,
        33,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x80000000,
        0x7FFFFFFF,
        M32,
        0x3F800000,
        0x477FF000,
    ]
    words[384:] = rng.choice(np.array(special, np.uint64), (128, 4))
    words[256:320, 2] %= 80
    return words


def test_instructions_follow_the_isa_document() -> None:
    words = operands()
    load_all = "".join(
        f"ld.global.u32 %r{i}, [%rd7+{8 * i - 8}]; ld.global.f32 %f{i}, [%rd7+{8 * i - 8}];" for i in (1, 2, 3)
    )
    store = "mul.lo.s64 %rd5, %rd8, 1; st.global.u32 [%rd5], %r4;"
    for text, meaning in MEANINGS.items():
        actual = run(f"{load_all} mov.u32 %r4, 0; {text} {store}", words)[:, 0] & np.uint64(M32)
        with np.errstate(all="ignore"):
            for (a, b, c), result in zip(words[:, :3].tolist(), actual.tolist(), strict=True):
                want = meaning(a, b, c)
                is_same = want is None or int(want) == result or (want == 0x7FFFFFFF and np.isnan(single(result)))
                assert is_same, f"{text} {a:#x} {b:#x} {c:#x}: {result:#x}, not {want:#x}"


def test_shuffles_stay_within_segments() -> None:
    """c: the last (up: the first) lane there is, and bits of a lane's number that tell its segment."""
    words = np.arange(32, dtype=np.uint64)[:, None].repeat(4, 1)
    cases = {
        "up.b32 %r4|%p1, %r1, 3, 0": lambda i: i - 3 if i >= 3 else i,
        "down.b32 %r4|%p1, %r1, 3, 31": lambda i: i + 3 if i < 29 else i,
        "bfly.b32 %r4|%p1, %r1, 9, 31": lambda i: i ^ 9,
        "idx.b32 %r4|%p1, %r1, 5, 31": lambda i: 5,
        "idx.b32 %r4|%p1, %r1, 5, 6175": lambda i: i // 8 * 8 + 5,  # 31 | 24 << 8: segments of 8
        "up.b32 %r4|%p1, %r1, 1, 7168": lambda i: i - 1 if i % 4 else i,  # 28 << 8: of 4
    }
    for text, source in cases.items():
        body = f"ld.global.u32 %r1, [%rd7]; shfl.sync.{text}, -1; st.global.u32 [%rd8], %r4;"
        body += "selp.u32 %r5, 1, 0, %p1; st.global.u32 [%rd8+8], %r5;"
        actual = run(body, words)
        assert actual[:, 0].tolist() == [source(i) for i in range(32)], text
    vote = "ld.global.u32 %r1, [%rd7]; setp.gt.u32 %p1, %r1, 29; vote.sync.ballot.b32 %r4, %p1, -1;"
    assert set(run(vote + "st.global.u32 [%rd8], %r4;", words)[:, 0].tolist()) == {3 << 30}


def test_kernels_as_ptx_equal_the_shim() -> None:
    """One that is made of exact operations, to the last bit; any that is not the same is told."""
    from quantkit.kernels.cuda.layer import elementwise

    device = TwinDevice()
    memory = Memory(device)
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(f32)
    out = memory.allocate(x.shape)
    for make in (elementwise.scale, elementwise.softcap):
        memory.run(make(70, 3), x=memory.put(x), out=out, width=70, rows=3, by=0.37)
    assert [d.kernel.name for d in device.differences] == ["softcap"]
    device.check()
    memory.close()
