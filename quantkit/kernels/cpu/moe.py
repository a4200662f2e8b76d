"""Matrix products by expert: every (token, slot) pair's row of x with the matrix of the expert it was routed to.

``bucket`` sorts the pairs p = token * n_used + slot by expert into a *plan*, int32 words, once for all products of a
layer::

    0 experts that are used   1 pairs   2 most pairs of one expert
    16 ...                    n_expert + 1 starts: the pairs of expert e are those from starts[e] to starts[e + 1]
    then n_expert             the used experts, in order
    then tokens * n_used      the pairs, by expert

A unit of work is (used expert, 32 rows of its matrix), in the order of the experts. When every expert has few pairs
(generating) a thread takes long runs of units, for memory likes long runs, that get shorter towards the end; otherwise
one unit at a time. Per unit, few rows of x go row of weights by row of weights (dots.py), and many against the panel
of 32 rows, unpacked once (panel.py). Products of up to 64 pairs stay in scratch in the nearest cache until the
epilogue has scaled, biased, gated and written them: gate and up of the fused product never reach memory.

Operations (strides and ``*_bytes`` are bytes; addresses of biases and scales may be 0):

    bucket             batch plan ids n_expert n_used rows_of
    mul_mat_id         batch out x x_stride x_per plan n_expert n_used products w row_bytes expert_bytes n_in n_out
                       bias bias_stride scale scratch scratch_bytes
    up_gate_id(a)      batch out x x_stride x_per plan n_expert n_used products up gate row_bytes up_expert_bytes
                       gate_expert_bytes n_in n_out up_bias gate_bias up_bias_stride gate_bias_stride up_scale
                       gate_scale scratch scratch_bytes, and ``**limits(a)``

products: products_of(t), the address of a compiled function; so types and operations are compiled one by one, and not
every operation for every type. x: activations in the format of t (activations.py); x_per: n_used if x has one row a token, 1 if one a pair. out: f32
[pairs, n_out]. bias_stride: from one expert's bias to the next one's, 4 * n_out, or twice that for half of a merged
one. scale: f32 [n_expert]. scratch: threads * scratch_bytes(t, n_in),
64-aligned, shared by all operations.
The counter of units is word 8 of the batch block; it is zero before and after each operation.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from quantkit.kernels.cpu.dots import row_dots
from quantkit.kernels.cpu.functions import load_part, store_part
from quantkit.kernels.cpu.glu import gated
from quantkit.kernels.cpu.jit import inline, specialize
from quantkit.kernels.cpu.panel import ROWS, panels
from quantkit.kernels.cpu.simd import _address, f32x16, load, stack_bytes, store
from quantkit.kernels.cpu.tape import Operation, arg, batch_word, farg, operation
from quantkit.kernels.cpu.team import atomic_add, atomic_store, call_operation
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.model.ops import Activation

# ---------------------------------------------------------------- pairs by expert

_USED, _PAIRS, _MOST, _STARTS = 0, 1, 2, 16


def plan_bytes(n_expert: int, n_used: int, n_tokens: int) -> int:
    """Return the bytes of a plan for up to n_tokens tokens."""
    return 4 * (_STARTS + 2 * n_expert + 2 + n_tokens * n_used)


@intrinsic
def prefetch_l2(tyctx, address, offset):
    """Ask for the cache line at a byte offset, into the second-level cache; it may lie beyond any buffer."""

    def cg(cgctx, b, sig, args):
        p, i32 = _address(cgctx, b, sig.args[0], args[0], args[1]), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [p.type, i32, i32, i32])
        b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0"), [p, i32(0), i32(2), i32(1)])
        return cgctx.get_dummy_value()

    return types.void(types.int64, types.int64), cg


@inline
def int_at(address, index):
    """An int32 of an array, as int64."""
    return types.int64(load(types.int32, address, 4 * index))


_PLAN, _IDS, _N_EXPERT, _N_USED, _ROWS_OF = range(1, 6)


@operation("batch plan ids n_expert n_used rows_of")
def bucket(args, tid, nth):
    """Sort the pairs by expert, those of an expert in order: a counting sort, by one thread."""
    if tid != 0:
        return
    plan, ids, n_expert = arg(args, _PLAN), arg(args, _IDS), arg(args, _N_EXPERT)
    n = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _N_USED)
    starts = plan + 4 * _STARTS  # starts[e + 2] counts first, then starts[e + 1] is where the next pair of e goes
    used = starts + 4 * (n_expert + 2)
    pairs = used + 4 * n_expert
    for e in range(n_expert + 2):
        store(starts, 4 * e, types.int32(0))
    for p in range(n):
        at = 4 * (int_at(ids, p) + 2)
        store(starts, at, types.int32(load(types.int32, starts, at) + 1))
    n_of_used = most = before = 0
    for e in range(n_expert):
        count = int_at(starts, e + 2)
        if count > 0:
            store(used, 4 * n_of_used, types.int32(e))
            n_of_used += 1
            most = max(most, count)
        before += count
        store(starts, 4 * (e + 2), types.int32(before))
    for p in range(n):
        at = 4 * (int_at(ids, p) + 1)
        to = load(types.int32, starts, at)
        store(starts, at, types.int32(to + 1))
        store(pairs, 4 * types.int64(to), types.int32(p))
    store(plan, 4 * _USED, types.int32(n_of_used))
    store(plan, 4 * _PAIRS, types.int32(n))
    store(plan, 4 * _MOST, types.int32(most))


# ---------------------------------------------------------------- work

#: Pairs whose products are kept at once, and from how many pairs on panels are unpacked.
BLOCK, MIN_PANEL = 60, 8
_COUNTER = 8
#: Between the panels of gate and up.
PANEL_GAP = 128


@inline
def share(ticket, n, nth, long_runs):
    """Return (first unit, one past the last, tickets that get any) of n units among nth threads.

    One unit a ticket; or in long runs: each nth tickets together take half of what is left.
    """
    if not long_runs:
        return ticket, min(ticket + 1, n), n
    start = before = 0
    first = last = n
    while True:
        size = max(1, (n - start) // (2 * nth))
        if before <= ticket < before + nth:
            first = min(n, start + size * (ticket - before))
            last = min(n, first + size)
        if start + size * nth >= n:
            return first, last, before + (n - start + size - 1) // size
        start += size * nth
        before += nth


@inline
def next_share(batch, n, nth, long_runs):
    """Draw a ticket: the units to do, none at the end. The last thread to learn of the end resets the counter."""
    ticket = atomic_add(batch, _COUNTER, 1)
    first, last, tickets = share(ticket, n, nth, long_runs)
    if ticket == tickets + nth - 1:
        atomic_store(batch, _COUNTER, 0)
    return first, last


# ---------------------------------------------------------------- products of a unit

#: Bound anew for each type, and for each kind of activation.
dot_row: Any = None
dot_row_by_4: Any = None
unpack_panel: Any = None
multiply_tiles: Any = None
by_rows: Any = None
by_panel: Any = None
gate_up: Any = None


def multiply_rows(w, row_bytes, n_in, rows, x, x_stride, numbers, count, products):
    """products[i * ROWS + r] = row r of w times row numbers[i] of x, row by row of w."""
    for r in range(rows):
        row, to = w + r * row_bytes, products + 4 * r
        done = 0
        while count - done >= 3:
            # Three cost less as four, one of them twice, than one by one.
            x0, x1 = x + x_stride * int_at(numbers, done), x + x_stride * int_at(numbers, done + 1)
            x2, x3 = x + x_stride * int_at(numbers, done + 2), x0
            if count - done > 3:
                x3 = x + x_stride * int_at(numbers, done + 3)
            a, b, c, d = dot_row_by_4(row, x0, x1, x2, x3, n_in)
            at = 4 * ROWS * done
            store(to, at, a)
            store(to, at + 4 * ROWS, b)
            store(to, at + 8 * ROWS, c)
            if count - done > 3:
                store(to, at + 12 * ROWS, d)
            done += 4
        while done < count:
            store(to, 4 * ROWS * done, dot_row(row, x + x_stride * int_at(numbers, done), n_in))
            done += 1


def multiply_panel(panel, n_in, x, x_stride, numbers, count, products, ahead, ahead_bytes):
    """products[i * ROWS + r] = row r of the panel times row numbers[i] of x; memory is asked for what comes after."""
    i = done = 0
    while i < count:
        # A tile takes a microsecond or two: memory keeps pace with some sixty lines to each.
        part = min(ahead_bytes, done + ahead_bytes // (1 + count // 8))
        while done < part:
            prefetch_l2(ahead, done)
            done += 64
        i += multiply_tiles(panel, (n_in + 255) // 256, x, x_stride, numbers, i, count, products + 4 * ROWS * i)


_U_W, _U_ROW_BYTES, _U_N_IN, _U_ROWS, _U_X, _U_X_STRIDE, _U_NUMBERS, _U_COUNT = range(1, 9)
_U_TOTAL, _U_BEGIN, _U_PRODUCTS, _U_PANEL, _U_AHEAD, _U_AHEAD_BYTES = range(9, 15)


@operation("batch w row_bytes n_in rows x x_stride numbers count total begin products panel ahead ahead_bytes")
def unit_products(args, tid, nth):
    """products[i * ROWS + r] = row r of w times row numbers[i] of x, for ``count`` of ``total`` pairs.

    Not an entry of a tape: the operations below call it. Many pairs go by panel, unpacked for the first of them;
    then the rows that come next, ahead_bytes at ahead, are fetched meanwhile.
    """
    w, row_bytes, n_in, rows = arg(args, _U_W), arg(args, _U_ROW_BYTES), arg(args, _U_N_IN), arg(args, _U_ROWS)
    x, x_stride, numbers = arg(args, _U_X), arg(args, _U_X_STRIDE), arg(args, _U_NUMBERS)
    count, products, panel = arg(args, _U_COUNT), arg(args, _U_PRODUCTS), arg(args, _U_PANEL)
    if arg(args, _U_TOTAL) < MIN_PANEL:
        by_rows(w, row_bytes, n_in, rows, x, x_stride, numbers, count, products)
        return
    if arg(args, _U_BEGIN) == 0:
        unpack_panel(w, row_bytes, rows, n_in, panel)
    by_panel(
        panel, n_in, x, x_stride, numbers, count, products, arg(args, _U_AHEAD), arg(args, _U_AHEAD_BYTES)
    )  # fmt: skip


@inline
def fill_unit(block, row_bytes, n_in, x, x_stride, numbers):
    """What is the same for all units of an operation, in the argument block of unit_products."""
    store(block, 8 * _U_ROW_BYTES, types.int64(row_bytes))
    store(block, 8 * _U_N_IN, types.int64(n_in))
    store(block, 8 * _U_X, types.int64(x))
    store(block, 8 * _U_X_STRIDE, types.int64(x_stride))
    store(block, 8 * _U_NUMBERS, types.int64(numbers))


@inline
def call_unit(function, block, w, rows, count, total, begin, products, panel, ahead, ahead_bytes):
    """Call unit_products of a type by its address."""
    store(block, 8 * _U_W, types.int64(w))
    store(block, 8 * _U_ROWS, types.int64(rows))
    store(block, 8 * _U_COUNT, types.int64(count))
    store(block, 8 * _U_TOTAL, types.int64(total))
    store(block, 8 * _U_BEGIN, types.int64(begin))
    store(block, 8 * _U_PRODUCTS, types.int64(products))
    store(block, 8 * _U_PANEL, types.int64(panel))
    store(block, 8 * _U_AHEAD, types.int64(ahead))
    store(block, 8 * _U_AHEAD_BYTES, types.int64(ahead_bytes if begin == 0 else 0))
    call_operation(function, block, 0, 1)


@inline
def number_rows(numbers, x_per, pairs, count):
    """numbers[i] = the row of x that pair pairs[i] reads."""
    for i in range(count):
        store(numbers, 4 * i, types.int32(int_at(pairs, i) // x_per))


@inline
def finished(products, scale, bias, n):
    """Up to 16 products times the scale, plus the bias at an address, or 0."""
    v = load(f32x16, products, 0) * scale
    return v + load_part(f32x16, bias, 0, n) if bias else v


@inline
def factor_of(scale, e):
    """The scale of an expert."""
    return load(types.float32, scale, 4 * e) if scale else types.float32(1)


_OUT, _X, _X_STRIDE, _X_PER, _PLAN_, _N_EXPERT_, _N_USED_ = range(1, 8)
_PRODUCTS, _W, _ROW_BYTES, _EXPERT_BYTES, _N_IN, _N_OUT, _BIAS, _BIAS_STRIDE, _SCALE = range(8, 17)
_SCRATCH, _SCRATCH_BYTES = 17, 18


@operation(
    "batch out x x_stride x_per plan n_expert n_used products w row_bytes expert_bytes n_in n_out bias bias_stride "
    "scale scratch scratch_bytes"
)
def mul_mat_id(args, tid, nth):
    """out[p] = scale[e] * (w[e] x) + bias[e]"""
    plan, n_expert, n_in, n_out = arg(args, _PLAN_), arg(args, _N_EXPERT_), arg(args, _N_IN), arg(args, _N_OUT)
    starts = plan + 4 * _STARTS
    used = starts + 4 * (n_expert + 2)
    panels = (n_out + ROWS - 1) // ROWS
    units, few = int_at(plan, _USED) * panels, int_at(plan, _MOST) < MIN_PANEL
    scratch = arg(args, _SCRATCH) + tid * arg(args, _SCRATCH_BYTES)
    numbers, products, block = stack_bytes(512), stack_bytes(8192), stack_bytes(128)
    fill_unit(block, arg(args, _ROW_BYTES), n_in, arg(args, _X), arg(args, _X_STRIDE), numbers)
    ahead_bytes = ROWS * arg(args, _ROW_BYTES)
    first, last = next_share(arg(args, 0), units, nth, few)
    while first < last:
        first_after, last_after = next_share(arg(args, 0), units, nth, few)
        for unit in range(first, last):
            e, row = int_at(used, unit // panels), unit % panels * ROWS
            rows = min(ROWS, n_out - row)
            w = arg(args, _W) + e * arg(args, _EXPERT_BYTES) + row * arg(args, _ROW_BYTES)
            after = unit + 1 if unit + 1 < last else first_after
            ahead = arg(args, _W) + arg(args, _ROW_BYTES) * (after % panels * ROWS)
            ahead += arg(args, _EXPERT_BYTES) * int_at(used, min(after, units - 1) // panels)
            bias = arg(args, _BIAS) + e * arg(args, _BIAS_STRIDE) + 4 * row if arg(args, _BIAS) else 0
            scale = factor_of(arg(args, _SCALE), e)
            pairs, count = used + 4 * (n_expert + int_at(starts, e)), int_at(starts, e + 1) - int_at(starts, e)
            for begin in range(0, count, BLOCK):
                n, at = min(BLOCK, count - begin), pairs + 4 * begin
                number_rows(numbers, arg(args, _X_PER), at, n)
                call_unit(arg(args, _PRODUCTS), block, w, rows, n, count, begin, products, scratch, ahead, ahead_bytes)
                for i in range(n):
                    out = arg(args, _OUT) + 4 * (int_at(at, i) * n_out + row)
                    for r in range(0, rows, 16):
                        m = min(16, rows - r)
                        v = finished(products + 4 * (ROWS * i + r), scale, bias + 4 * r if bias else 0, m)
                        store_part(out, 4 * r, v, m)
        first, last = first_after, last_after


_UP, _GATE, _F_ROW_BYTES, _UP_BYTES, _GATE_BYTES, _F_IN, _F_OUT, _UP_BIAS, _GATE_BIAS = range(9, 18)
_UP_STRIDE, _GATE_STRIDE, _UP_SCALE, _GATE_SCALE, _F_SCRATCH, _F_SCRATCH_BYTES = range(18, 24)
_ALPHA, _GATE_LIMIT, _ACT_LIMIT, _UP_LIMIT = range(24, 28)


@operation(
    "batch out x x_stride x_per plan n_expert n_used products up gate row_bytes up_expert_bytes gate_expert_bytes "
    "n_in n_out up_bias gate_bias up_bias_stride gate_bias_stride up_scale gate_scale scratch scratch_bytes "
    "alpha:f gate_limit:f act_limit:f up_limit:f"
)
def gate_by_expert(args, tid, nth):
    """out[p] = activation(gate[e] x) * (up[e] x)"""
    plan, n_expert, n_in, n_out = arg(args, _PLAN_), arg(args, _N_EXPERT_), arg(args, _F_IN), arg(args, _F_OUT)
    alpha, gate_limit = farg(args, _ALPHA), farg(args, _GATE_LIMIT)
    act_limit, up_limit = farg(args, _ACT_LIMIT), farg(args, _UP_LIMIT)
    starts = plan + 4 * _STARTS
    used = starts + 4 * (n_expert + 2)
    panels = (n_out + ROWS - 1) // ROWS
    units, few = int_at(plan, _USED) * panels, int_at(plan, _MOST) < MIN_PANEL
    half = arg(args, _F_SCRATCH_BYTES) // 2
    gate_scratch = arg(args, _F_SCRATCH) + tid * arg(args, _F_SCRATCH_BYTES)
    up_scratch = gate_scratch + half
    numbers, gates, ups, block = stack_bytes(512), stack_bytes(8192), stack_bytes(8192), stack_bytes(128)
    row_bytes, function = arg(args, _F_ROW_BYTES), arg(args, _PRODUCTS)
    fill_unit(block, row_bytes, n_in, arg(args, _X), arg(args, _X_STRIDE), numbers)
    ahead_bytes = ROWS * row_bytes
    first, last = next_share(arg(args, 0), units, nth, few)
    while first < last:
        first_after, last_after = next_share(arg(args, 0), units, nth, few)
        for unit in range(first, last):
            e, row = int_at(used, unit // panels), unit % panels * ROWS
            rows = min(ROWS, n_out - row)
            after = unit + 1 if unit + 1 < last else first_after
            ahead = arg(args, _GATE) + row_bytes * (after % panels * ROWS)
            ahead += arg(args, _GATE_BYTES) * int_at(used, min(after, units - 1) // panels)
            gate = arg(args, _GATE) + e * arg(args, _GATE_BYTES) + row * row_bytes
            up = arg(args, _UP) + e * arg(args, _UP_BYTES) + row * row_bytes
            gate_bias = arg(args, _GATE_BIAS) + e * arg(args, _GATE_STRIDE) + 4 * row if arg(args, _GATE_BIAS) else 0
            up_bias = arg(args, _UP_BIAS) + e * arg(args, _UP_STRIDE) + 4 * row if arg(args, _UP_BIAS) else 0
            gate_scale, up_scale = factor_of(arg(args, _GATE_SCALE), e), factor_of(arg(args, _UP_SCALE), e)
            pairs, count = used + 4 * (n_expert + int_at(starts, e)), int_at(starts, e + 1) - int_at(starts, e)
            for begin in range(0, count, BLOCK):
                n, at = min(BLOCK, count - begin), pairs + 4 * begin
                number_rows(numbers, arg(args, _X_PER), at, n)
                call_unit(function, block, gate, rows, n, count, begin, gates, gate_scratch, up, ahead_bytes)
                call_unit(function, block, up, rows, n, count, begin, ups, up_scratch, ahead, ahead_bytes)
                for i in range(n):
                    out = arg(args, _OUT) + 4 * (int_at(at, i) * n_out + row)
                    for r in range(0, rows, 16):
                        m, k = min(16, rows - r), 4 * (ROWS * i + r)
                        g = finished(gates + k, gate_scale, gate_bias + 4 * r if gate_bias else 0, m)
                        u = finished(ups + k, up_scale, up_bias + 4 * r if up_bias else 0, m)
                        store_part(out, 4 * r, gate_up(g, u, alpha, gate_limit, act_limit, up_limit), m)
        first, last = first_after, last_after


# ---------------------------------------------------------------- of a type, of an activation


@cache
def products_of(t: TensorType) -> int:
    """Return what slot ``products`` holds for experts of type ``t``: the address of their compiled products."""
    one, four = row_dots(t)
    name, made = t.name.lower(), panels(t)
    return unit_products.bind(
        name,
        by_rows=specialize(multiply_rows, name, dot_row=one, dot_row_by_4=four),
        by_panel=specialize(multiply_panel, name, multiply_tiles=made.multiply),
        unpack_panel=made.unpack,
    ).address


def up_gate_id(activation: Activation) -> Operation:
    """Return the operation of ops.UpGateId for this kind of activation; its limits are slots."""
    return gate_by_expert.bind(activation.kind, gate_up=gated(activation.kind))


def scratch_bytes(t: TensorType, n_in: int) -> int:
    """Return the bytes of scratch that each thread needs for experts of type ``t`` with rows of ``n_in``."""
    return 2 * (panels(t).bytes(n_in) + PANEL_GAP)
