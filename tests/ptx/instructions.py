"""The PTX instructions of quantkit's kernels, each with all of its modifiers, and the types of its operands.

An instruction that computes a value from values is a function of machine.h whose name is the opcode with underscores.
What is not in this table, or has another modifier, is an error: no modifier is ever passed over. .ftz (flush denormals)
is known of two approximations only, which CUDA's own expf and tanhf are made of.
"""

from __future__ import annotations


def _all(forms: dict[str, str], signature: str) -> dict[str, tuple[str, ...]]:
    """Return opcode -> types (result first); T in a signature is the form's last part."""
    table = {}
    for base, suffixes in forms.items():
        for suffix in suffixes.split():
            kind = suffix.split(".")[-1]
            table[f"{base}.{suffix}"] = tuple(kind if t == "T" else t for t in signature.split())
    return table


CONVERSIONS = """
    f32.f16 f64.f32 rmi.f32.f32 rn.f16.f32 rn.f32.f64 rn.f32.s16 rn.f32.s32 rn.f32.u16 rn.f64.s32 rn.f64.s64
    rni.f32.f32 rni.s32.f32 rni.s32.f64 rzi.f32.f32 rzi.s32.f32 rzi.s32.f64 s16.s8 s32.s8 s32.s16 s64.s32
    sat.f32.f32 u16.u32 u16.u64 u32.u16 u32.u64 u64.u16 u64.u32
"""

#: opcode -> types of the result and of the sources.
VALUES: dict[str, tuple[str, ...]] = {
    **_all(
        {
            "mov": "b16 u16 b32 u32 b64 u64 f32 f64 pred",
            "abs": "f32 f64",
            "neg": "f32 f64 s32 s64",
            "not": "b32 b64 pred",
            "brev": "b32",
            "rcp": "rn.f32 rn.f64 approx.ftz.f32",
            "ex2": "approx.ftz.f32",
            "sqrt": "rn.f64 rn.f32",
            "cvta.local": "u64",
            "cvta.shared": "u64",
            "cvta.global": "u64",
            "cvta.to.local": "u64",
            "cvta.to.global": "u64",
            "cvta.to.shared": "u64",
        },
        "T T",
    ),
    **_all(
        {
            "add": "s16 s32 u32 s64 u64 rn.f32 rz.f32 rn.f64 cc.u32",
            "addc": "u32 cc.u32",
            "sub": "s32 s64 rn.f32 rn.f64 cc.u32",
            "subc": "u32 cc.u32",
            "mul": "lo.s32 lo.u32 lo.s64 hi.s32 hi.u32 rn.f32 rn.f64",
            "div": "s32 u32 s64 rn.f32 rn.f64",
            "rem": "s32 u32 s64",
            "min": "s32 u32 s64 f32 f64",
            "max": "s32 u32 s64 u64 f32",
            "and": "b16 b32 b64 pred",
            "or": "b16 b32 b64 pred",
            "xor": "b16 b32 pred",
            "copysign": "f32",
        },
        "T T T",
    ),
    **_all({"fma": "rn.f32 rn.sat.f32 rm.f32 rn.f64", "mad": "lo.s32 lo.cc.u32", "prmt": "b32"}, "T T T T"),
    **_all({"madc": "hi.u32 hi.cc.u32 lo.cc.u32", "dp4a.s32": "s32", "dp4a.u32": "s32"}, "T T T T"),
    **_all({"dp2a.lo.s32": "s32", "dp2a.hi.s32": "s32", "dp2a.lo.u32": "u32", "dp2a.hi.u32": "u32"}, "T T T T"),
    **_all({"shf": "l.wrap.b32 r.wrap.b32 r.clamp.b32"}, "T T T u32"),
    **_all({"shl": "b16 b32 b64", "shr": "s16 u16 s32 u32 s64 u64"}, "T T u32"),
    **_all({"bfi": "b32 b64"}, "T T T u32 u32"),
    "lop3.b32": ("b32", "b32", "b32", "b32", "u32"),
    **_all({"popc": "b32", "clz": "b32 b64", "bfind.shiftamt": "u32"}, "u32 T"),
    **_all({"mul.wide": "u16"}, "u32 T T"),
    **_all({"mul.wide": "s32"}, "s64 T T"),
    **_all({"mul.wide": "u32"}, "u64 T T"),
    "mad.wide.u32": ("u64", "u32", "u32", "u64"),
    **_all({"selp": "b16 u16 b32 u32 s32 b64 u64 f32 f64"}, "T T T pred"),
    **_all(
        {
            "setp.eq": "b16 s16 b32 b64 s32 s64 f32 f64",
            "setp.ne": "s16 s32 s64",
            "setp.lt": "s32 u32 s64 u64 f32 f64",
            "setp.le": "s32 u32 s64 u64 f32 f64",
            "setp.gt": "s16 s32 u32 s64 u64 f32 f64",
            "setp.ge": "s32 u32 s64 u64 f32 f64",
            "setp.neu": "f32 f64",
            "setp.ltu": "f32 f64",
            "setp.leu": "f32 f64",
            "setp.gtu": "f32 f64",
            "setp.geu": "f32 f64",
            "setp.nan": "f32",
            "setp.num": "f32",
        },
        "pred T T",
    ),
    "cvt.rn.f16x2.f32": ("b32", "f32", "f32"),
    "sub.rn.f16x2": ("b32", "b32", "b32"),
    "mul.rn.f16x2": ("b32", "b32", "b32"),
    **{f"cvt.{form}": tuple(form.split(".")[-2:]) for form in CONVERSIONS.split()},
}

#: Instructions on which the lanes of a warp meet, for which machine.cpp has functions: types as above, the mask last.
#: shfl: the value, whether the lane is there (a second result), and as sources value, b, c.
SHUFFLES = tuple(f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx"))
VOTES = {
    "vote.sync.all.pred": ("pred", "pred"),
    "vote.sync.any.pred": ("pred", "pred"),
    "vote.sync.ballot.b32": ("b32", "pred"),
    "match.any.sync.b32": ("b32", "b32"),
    "redux.sync.min.u32": ("u32", "u32"),
}

#: opcode -> registers of d, a, b, c; of 32 bits each.
MMA = {
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32": (2, 1, 1, 2),
    "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32": (4, 2, 1, 4),
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": (4, 4, 2, 4),
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": (4, 2, 1, 4),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": (4, 4, 2, 4),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": (4, 4, 2, 4),
    "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32": (4, 2, 1, 4),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": (4, 4, 2, 4),
}

#: opcode -> how many matrices.
LDMATRIX = {
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16": 2,
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": 4,
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": 4,
}

#: State space, operation and type: d = the old value; .add [a], b; .cas [a], compare, b.
ATOMICS = {
    "atom.global.add.u32": 1,
    "atom.shared.add.u32": 1,
    "atom.shared.max.s32": 1,
    "atom.global.cas.b64": 2,
}

#: Where threads and kernels run one after another these change nothing.
NOTHING = ("membar.gl", "griddepcontrol.launch_dependents")

#: cp.async: the sizes that may be copied.
COPIES = {"cp.async.ca.shared.global": (4, 8, 16), "cp.async.cg.shared.global": (16,)}

#: %tid.x and others: expressions of the runtime's HostThread, as t.
SPECIAL = {
    **{f"%{name}.{axis}": f"thread_at->{member}.{axis}"
       for name, member in (("tid", "thread"), ("ctaid", "block"), ("ntid", "threads"), ("nctaid", "blocks"))
       for axis in "xyz"},
    "%laneid": "(thread_at->thread.x % 32)",
}  # fmt: skip

SPACES = ("global", "shared", "local", "param")


def memory_access(opcode: str) -> tuple[str, int, str] | None:
    """Return state space ("generic" if none), values and type of a load or store; None: unknown."""
    parts = opcode.split(".")
    first, kind = parts.pop(0), parts.pop()
    space, count = "generic", 1
    if parts and parts[0] in SPACES:
        space = parts.pop(0)
    if parts and parts[0] == "nc" and first == "ld" and space == "global":
        parts.pop(0)
    if parts and parts[0] in ("v2", "v4"):
        count = int(parts.pop(0)[1])
    is_known = first in ("ld", "st") and not parts and kind[1:].isdigit()
    return (space, count, kind) if is_known and kind[0] in "bsuf" and int(kind[1:]) in (8, 16, 32, 64) else None
