"""Matrix products by expert: each (token, slot) pair's row of x times the matrix of the expert it is routed to.

``bucket`` sorts the pairs p = token * n_used + slot by expert into a *plan* of int32 words, once per layer::

    0 number of used experts  1 pairs   2 most pairs of one expert
    16 ...                    n_expert + 1 starts: the pairs of expert e are those from starts[e] to starts[e + 1]
    then n_expert             the used experts, in order
    then tokens * n_used      the pairs, by expert

A unit of work is (used expert, 32 rows of its matrix), in the order of the experts. If every expert has few pairs
(generation), a thread takes long runs of units, which suit the memory, shorter ones towards the end; otherwise one unit
at a time. Few rows of x are multiplied one row of weights at a time (dots.py), many with the panel of 32 rows, unpacked
once (panel.py). Products of up to 64 pairs stay in scratch in L1 until the epilogue scales, biases, gates and writes
them: gate and up of the fused product never reach memory.

Operations (strides and ``*_bytes`` are bytes; addresses of biases and scales may be 0):

    bucket             batch plan ids n_expert n_used rows_of
    mul_mat_id         batch out x x_stride x_per plan n_expert n_used products w row_bytes expert_bytes n_in n_out
                       bias bias_stride scale scratch scratch_bytes
    up_gate_id(a)      batch out x x_stride x_per plan n_expert n_used products up gate row_bytes up_expert_bytes
                       gate_expert_bytes n_in n_out up_bias gate_bias up_bias_stride gate_bias_stride up_scale
                       gate_scale scratch scratch_bytes, and ``**limits(a)``

products: products_of(t) or exact_products_of(t) (products.py), the address of a compiled function, so that operations
are not compiled for every type. x: activations in the format of t (activations.py); x_per: n_used if x has one row per
token, 1 if one per pair. out: f32 [pairs, n_out]. bias_stride: between the biases of experts, 4 * n_out, or twice that
for half of a merged one. scale: f32 [n_expert]. scratch: threads * scratch_bytes(t, n_in), 64-aligned, shared by all
operations. The counter of units is word 8 of the batch block, zero before and after each operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba.core import types

from quantkit.kernels.cpu.core.functions import load_part, store_part
from quantkit.kernels.cpu.core.jit import inline
from quantkit.kernels.cpu.core.simd import f32x16, load, stack_bytes, store
from quantkit.kernels.cpu.core.tape import TapeOp, arg, batch_word, farg, operation
from quantkit.kernels.cpu.core.team import atomic_add, atomic_store
from quantkit.kernels.cpu.layer.glu import gated_activation
from quantkit.kernels.cpu.matmul.panel import ROWS, panels
from quantkit.kernels.cpu.matmul.products import (
    BLOCK,
    MIN_PANEL,
    PRODUCTS_BYTES,
    UNIT_BLOCK_BYTES,
    call_unit,
    fill_unit,
    products_of,
)
from quantkit.types import TensorType

if TYPE_CHECKING:
    from quantkit.kernels.parameters import Activation

__all__ = ["bucket", "mul_mat_id", "plan_bytes", "products_of", "scratch_bytes", "up_gate_id"]

# ---------------------------------------------------------------- pairs by expert

_USED = 0
_PAIRS = 1
_MOST = 2
_STARTS = 16


def plan_bytes(n_expert: int, n_used: int, n_tokens: int) -> int:
    """Return the bytes of a plan for up to n_tokens tokens."""
    return 4 * (_STARTS + 2 * n_expert + 2 + n_tokens * n_used)


@inline
def int_at(address, index):
    """An int32 of an array, as int64."""
    return types.int64(load(types.int32, address, 4 * index))


_PLAN, _IDS, _N_EXPERT, _N_USED, _ROWS_OF = range(1, 6)


@operation("batch plan ids n_expert n_used rows_of")
def bucket(args, tid, nth):
    """Sort the pairs by expert: a stable counting sort by one thread."""
    if tid != 0:
        return
    plan = arg(args, _PLAN)
    ids = arg(args, _IDS)
    n_expert = arg(args, _N_EXPERT)
    n = batch_word(args, arg(args, _ROWS_OF)) * arg(args, _N_USED)
    starts = plan + 4 * _STARTS  # starts[e + 2] counts first; then starts[e + 1] is the position of e's next pair
    used = starts + 4 * (n_expert + 2)
    pairs = used + 4 * n_expert
    for e in range(n_expert + 2):
        store(starts, 4 * e, types.int32(0))
    for p in range(n):
        offset = 4 * (int_at(ids, p) + 2)
        store(starts, offset, types.int32(load(types.int32, starts, offset) + 1))
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
        offset = 4 * (int_at(ids, p) + 1)
        slot = load(types.int32, starts, offset)
        store(starts, offset, types.int32(slot + 1))
        store(pairs, 4 * types.int64(slot), types.int32(p))
    store(plan, 4 * _USED, types.int32(n_of_used))
    store(plan, 4 * _PAIRS, types.int32(n))
    store(plan, 4 * _MOST, types.int32(most))


# ---------------------------------------------------------------- work

_COUNTER = 8
#: Padding between the panels of gate and up.
PANEL_GAP = 128


@inline
def share(ticket, n, nth, long_runs):
    """Return (first unit, one past the last, tickets with any units) for n units and nth threads.

    One unit per ticket; or in long runs: every nth tickets together take half of the rest.
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
    """Draw a ticket: the units to do, none at the end. The last thread to reach the end resets the counter."""
    ticket = atomic_add(batch, _COUNTER, 1)
    first, last, tickets = share(ticket, n, nth, long_runs)
    if ticket == tickets + nth - 1:
        atomic_store(batch, _COUNTER, 0)
    return first, last


@inline
def run_of_units(unit, last, panels, count):
    """Return the number of units, up to ``last``, per step: a block has one pair's products of 60 units."""
    return min(last - unit, panels - unit % panels, BLOCK) if count == 1 else 1


#: Rebound for each kind of activation.
gate_up: Any = None


@inline
def number_rows(numbers, x_per, pairs, count):
    """numbers[i] = the row of x that pair pairs[i] reads."""
    for i in range(count):
        store(numbers, 4 * i, types.int32(int_at(pairs, i) // x_per))


@inline
def epilogue(products, scale, bias, n):
    """Return up to 16 products times the scale, plus the bias at an address, or 0."""
    v = load(f32x16, products, 0) * scale
    return v + load_part(f32x16, bias, 0, n) if bias else v


@inline
def factor_of(scale, e):
    """Return the scale of an expert."""
    return load(types.float32, scale, 4 * e) if scale else types.float32(1)


_OUT, _X, _X_STRIDE, _X_PER, _PLAN_, _N_EXPERT_ = range(1, 7)
_PRODUCTS, _W, _ROW_BYTES, _EXPERT_BYTES, _N_IN, _N_OUT, _BIAS, _BIAS_STRIDE, _SCALE = range(8, 17)
_SCRATCH, _SCRATCH_BYTES = 17, 18


@operation(
    "batch out x x_stride x_per plan n_expert n_used products w row_bytes expert_bytes n_in n_out bias bias_stride "
    "scale scratch scratch_bytes"
)
def mul_mat_id(args, tid, nth):
    """out[p] = scale[e] * (w[e] x) + bias[e]"""
    plan = arg(args, _PLAN_)
    n_expert = arg(args, _N_EXPERT_)
    n_in = arg(args, _N_IN)
    n_out = arg(args, _N_OUT)
    starts = plan + 4 * _STARTS
    used = starts + 4 * (n_expert + 2)
    panels = (n_out + ROWS - 1) // ROWS
    units, few_tokens = int_at(plan, _USED) * panels, int_at(plan, _MOST) < MIN_PANEL
    scratch = arg(args, _SCRATCH) + tid * arg(args, _SCRATCH_BYTES)
    numbers = stack_bytes(512)
    products = stack_bytes(PRODUCTS_BYTES)
    block = stack_bytes(UNIT_BLOCK_BYTES)
    fill_unit(block, arg(args, _ROW_BYTES), n_in, arg(args, _X_STRIDE), numbers, products, scratch)
    x, next_bytes = arg(args, _X), ROWS * arg(args, _ROW_BYTES)
    first, last = next_share(arg(args, 0), units, nth, few_tokens)
    while first < last:
        first_after, last_after = next_share(arg(args, 0), units, nth, few_tokens)
        unit = first
        while unit < last:
            e, row = int_at(used, unit // panels), unit % panels * ROWS
            pairs, count = used + 4 * (n_expert + int_at(starts, e)), int_at(starts, e + 1) - int_at(starts, e)
            run = run_of_units(unit, last, panels, count)
            rows = min(run * ROWS, n_out - row)
            w = arg(args, _W) + e * arg(args, _EXPERT_BYTES) + row * arg(args, _ROW_BYTES)
            after = unit + run if unit + run < last else first_after
            next_rows = arg(args, _W) + arg(args, _ROW_BYTES) * (after % panels * ROWS)
            next_rows += arg(args, _EXPERT_BYTES) * int_at(used, min(after, units - 1) // panels)
            bias = arg(args, _BIAS) + e * arg(args, _BIAS_STRIDE) + 4 * row if arg(args, _BIAS) else 0
            scale = factor_of(arg(args, _SCALE), e)
            for begin in range(0, count, BLOCK):
                n, batch = min(BLOCK, count - begin), pairs + 4 * begin
                number_rows(numbers, arg(args, _X_PER), batch, n)
                call_unit(arg(args, _PRODUCTS), block, w, rows, x, n, count, begin, next_rows, next_bytes)
                for i in range(n):
                    out = arg(args, _OUT) + 4 * (int_at(batch, i) * n_out + row)
                    for r in range(0, rows, 16):
                        m = min(16, rows - r)
                        v = epilogue(products + 4 * (ROWS * i + r), scale, bias + 4 * r if bias else 0, m)
                        store_part(out, 4 * r, v, m)
            unit += run
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
    plan = arg(args, _PLAN_)
    n_expert = arg(args, _N_EXPERT_)
    n_in = arg(args, _F_IN)
    n_out = arg(args, _F_OUT)
    alpha, gate_limit = farg(args, _ALPHA), farg(args, _GATE_LIMIT)
    act_limit, up_limit = farg(args, _ACT_LIMIT), farg(args, _UP_LIMIT)
    starts = plan + 4 * _STARTS
    used = starts + 4 * (n_expert + 2)
    panels = (n_out + ROWS - 1) // ROWS
    units, few_tokens = int_at(plan, _USED) * panels, int_at(plan, _MOST) < MIN_PANEL
    half = arg(args, _F_SCRATCH_BYTES) // 2
    gate_scratch = arg(args, _F_SCRATCH) + tid * arg(args, _F_SCRATCH_BYTES)
    up_scratch = gate_scratch + half
    numbers = stack_bytes(512)
    gates = stack_bytes(PRODUCTS_BYTES)
    ups = stack_bytes(PRODUCTS_BYTES)
    gate_block, up_block = stack_bytes(UNIT_BLOCK_BYTES), stack_bytes(UNIT_BLOCK_BYTES)
    row_bytes, function = arg(args, _F_ROW_BYTES), arg(args, _PRODUCTS)
    fill_unit(gate_block, row_bytes, n_in, arg(args, _X_STRIDE), numbers, gates, gate_scratch)
    fill_unit(up_block, row_bytes, n_in, arg(args, _X_STRIDE), numbers, ups, up_scratch)
    x, next_bytes = arg(args, _X), ROWS * row_bytes
    first, last = next_share(arg(args, 0), units, nth, few_tokens)
    while first < last:
        first_after, last_after = next_share(arg(args, 0), units, nth, few_tokens)
        unit = first
        while unit < last:
            e, row = int_at(used, unit // panels), unit % panels * ROWS
            pairs, count = used + 4 * (n_expert + int_at(starts, e)), int_at(starts, e + 1) - int_at(starts, e)
            run = run_of_units(unit, last, panels, count)
            rows = min(run * ROWS, n_out - row)
            after = unit + run if unit + run < last else first_after
            next_rows = arg(args, _GATE) + row_bytes * (after % panels * ROWS)
            next_rows += arg(args, _GATE_BYTES) * int_at(used, min(after, units - 1) // panels)
            gate = arg(args, _GATE) + e * arg(args, _GATE_BYTES) + row * row_bytes
            up = arg(args, _UP) + e * arg(args, _UP_BYTES) + row * row_bytes
            gate_bias = arg(args, _GATE_BIAS) + e * arg(args, _GATE_STRIDE) + 4 * row if arg(args, _GATE_BIAS) else 0
            up_bias = arg(args, _UP_BIAS) + e * arg(args, _UP_STRIDE) + 4 * row if arg(args, _UP_BIAS) else 0
            gate_scale, up_scale = factor_of(arg(args, _GATE_SCALE), e), factor_of(arg(args, _UP_SCALE), e)
            for begin in range(0, count, BLOCK):
                n, batch = min(BLOCK, count - begin), pairs + 4 * begin
                number_rows(numbers, arg(args, _X_PER), batch, n)
                call_unit(function, gate_block, gate, rows, x, n, count, begin, up, next_bytes)
                call_unit(function, up_block, up, rows, x, n, count, begin, next_rows, next_bytes)
                for i in range(n):
                    out = arg(args, _OUT) + 4 * (int_at(batch, i) * n_out + row)
                    for r in range(0, rows, 16):
                        m, k = min(16, rows - r), 4 * (ROWS * i + r)
                        g = epilogue(gates + k, gate_scale, gate_bias + 4 * r if gate_bias else 0, m)
                        u = epilogue(ups + k, up_scale, up_bias + 4 * r if up_bias else 0, m)
                        store_part(out, 4 * r, gate_up(g, u, alpha, gate_limit, act_limit, up_limit), m)
            unit += run
        first, last = first_after, last_after


# ---------------------------------------------------------------- per type and activation


def up_gate_id(activation: Activation) -> TapeOp:
    """Return the operation of ops.UpGateId for a kind of activation; its limits are slots."""
    return gate_by_expert.bind(activation.kind, gate_up=gated_activation(activation.kind))


def scratch_bytes(t: TensorType, n_in: int) -> int:
    """Return the bytes of scratch each thread needs for experts of type ``t`` with rows of ``n_in``."""
    return 2 * (panels(t).bytes(n_in) + PANEL_GAP)
