"""Products of weights with 1 to 8 rows of activations on the device: mat_vec.cu.

Slots are in mat_vec.cu; x holds rows in the format of the weight's type (activations.py), strides are bytes. A
``Shape`` belongs to sizes: ``rows`` of x, or tokens, ``n_used`` experts each. A row of the result does not depend on
how many rows are computed together: LANES, which decides the order of a sum, comes from the matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.layer.glu import ACTIVATIONS, GATES
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.formats import FORMATS, format_of
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType

#: Maximum rows of x.
MAX_ROWS = 8
_WARPS = 4
#: Number of warps that keep a large device busy, and the number below which each gets fewer rows; with tiles, whose
#: instructions are mostly independent, two per scheduler and one.
_MANY_WARPS = 2112
_FEW_WARPS = 1056
_TWO_EACH = 990
_ONE_EACH = 495


def _lanes(t: TensorType, n_in: int, n_out: int) -> int:
    """Return the number of lanes that share a row of weights."""
    if format_of(t).is_float:
        lanes, steps = 32, n_in * t.block_bytes // 16 / 64  # at least two loads of 16 bytes a lane
    else:
        parts = n_in // (32 * format_of(t).blocks_per_lane)
        lanes, steps = _lanes_of_warp(parts), parts / 32
    # Few rows, but long ones: warps share them.
    busy = 128 * _ONE_EACH if format_of(t).tiles else 64 * _MANY_WARPS
    while 32 <= lanes < 128 and n_out * lanes < busy and steps >= lanes // 16:
        lanes *= 2
    return lanes


def _lanes_of_warp(parts: int) -> int:
    """Return 32, or 16 or 8 where many of 32 would idle in the last step."""
    busy = {lanes: parts / (-(-parts // lanes) * lanes) for lanes in (32, 16, 8)}
    return next((lanes for lanes in busy if busy[lanes] >= 0.85), max(busy, key=busy.__getitem__))


def _rows(t: TensorType, lanes: int, n_out: int, columns: int, matrices: int) -> int:
    """Return the number of rows of each of one or two matrices that a team computes at once, of one x."""
    # As many as the registers hold; the fewer the bits, the more it matters that rows share the work on x.
    bits = 8 * t.block_bytes / t.block
    parts = format_of(t).blocks_per_lane
    fourfold = format_of(t).byte_replicated
    if format_of(t).is_float:
        rows = 2
    elif columns == matrices == 1 and lanes >= 32 and (bits < 1.75 or bits <= 2.25 and parts == 1):
        most = format_of(t).max_rows_in_registers or _most_rows(bits, parts, fourfold)
        rows = next((n for n in (12, 8, 7, 6, 5) if n <= most and n_out * lanes >= 32 * _MANY_WARPS * n), 4)
    elif parts > 1 and columns > 1:
        rows = 4 if columns <= 4 or bits < 2 else 2
        if matrices == 1:
            rows = 3
    elif columns > 4:
        rows = 3
    else:
        rows = 4 if columns > 2 or bits <= 4 else 2
        if fourfold and columns == 2:
            rows = 2
        elif fourfold and columns < 2 and bits == 4:
            rows = 3
    rows //= matrices
    while rows > 1 and n_out * lanes < 32 * _FEW_WARPS * rows:
        rows //= 2
    return rows


def _most_rows(bits: float, parts: int, fourfold: bool) -> int:
    """Return the number of rows of one column that fit the registers of a warp's lanes."""
    if fourfold:
        return 5
    if bits >= 1.75:
        return 6
    if parts > 1:
        return 7
    return 8 if bits > 1.5 else 12


def _tiles(t: TensorType, lanes: int, n_out: int, columns: int, matrices: int) -> int:
    """Return the number of tiles of 16 rows of each matrix that a team computes at once by tensor cores; 0: none."""
    if not (format_of(t).tiles and columns == 1 and lanes <= 32):
        return 0
    # As in _rows: the fewer the bits, the more it matters. With 8 lanes four tiles do not fit the registers.
    most = 4 if 8 * t.block_bytes < 2 * t.block and lanes > 8 and matrices == 1 else 2 // matrices
    min_warps = {4: _TWO_EACH, 2: _TWO_EACH, 1: _ONE_EACH}
    return next((n for n in min_warps if n <= most and n_out * lanes >= 128 * n * min_warps[n]), 0)


def _shape(
    name: str, t: TensorType, n_in: int, n_out: int, columns: int, matrices: int, concurrent: int, kind: str = ""
) -> Shape:
    """Return the shape of a kernel on several matrices (heads, or pairs); at least ``concurrent`` run at once."""
    if not 1 <= columns <= MAX_ROWS:
        raise ValueError(f"mat_vec supports 1 to {MAX_ROWS} rows, not {columns}")
    lanes = _lanes(t, n_in, n_out * concurrent)
    tiles = _tiles(t, lanes, n_out * concurrent, columns, 2 if kind else 1)
    rows = 4 * tiles or _rows(t, lanes, n_out * concurrent, columns, 2 if kind else 1)
    kernel = Kernel("matmul/mat_vec.cu", name).bind(
        TYPE=format_of(t).type.name, COLUMNS=columns, LANES=lanes, ROWS=rows
    )
    if name.endswith("_to"):
        kernel = kernel.bind(TO=1, ROWS=1 << rows.bit_length() - 1)
    if tiles:
        kernel = kernel.bind(TILES=1)
    if format_of(t).is_float:
        kernel = kernel.bind(FLOATS=1)
    if kind:
        kernel = kernel.bind(ACTIVATION=ACTIVATIONS[kind])
    return Shape(kernel, (-(-n_out // rows_of_block(kernel)), matrices, 1))


def mul_mat(t: TensorType, n_in: int, n_out: int, rows: int = 1) -> Shape:
    """Return the kernel and grid that multiply a matrix with up to 8 rows of x."""
    return _shape("mul_mat", t, n_in, n_out, rows, 1, 1)


def mul_mat_heads(t: TensorType, n_in: int, n_out: int, rows: int, heads: int) -> Shape:
    """Return the kernel and grid that multiply a matrix a head with the heads of up to 8 rows of x."""
    return _shape("mul_mat_heads", t, n_in, n_out, rows, heads, heads)


def mul_mat_id(t: TensorType, n_in: int, n_out: int, rows: int, n_used: int) -> Shape:
    """Return the kernel and grid that multiply chosen experts with rows of x, for small rows * n_used: pair by pair."""
    return _shape("mul_mat_id", t, n_in, n_out, 1, rows * n_used, n_used)


def up_gate(t: TensorType, activation: Activation, n_in: int, n_out: int, rows: int = 1) -> Shape:
    """Return the kernel and grid that compute activation(gate x) * (up x) for up to 8 rows of x."""
    return _shape("up_gate", t, n_in, n_out, rows, 1, 1, activation.kind)


def up_gate_id(t: TensorType, activation: Activation, n_in: int, n_out: int, rows: int, n_used: int) -> Shape:
    """Return the kernel and grid that compute activation(gate x) * (up x) for each pair of a token and an expert."""
    return _shape("up_gate_id", t, n_in, n_out, 1, rows * n_used, n_used, activation.kind)


def mul_mat_heads_to(t: TensorType, n_in: int, n_out: int, heads: int) -> Shape | None:
    """Return the kernel and grid that multiply each head of one row by its own matrix and quantize the result.

    None if 256 columns are not a multiple of heads, or of blocks' rows of a head.
    """
    shape = _shape("mul_mat_heads_to", t, n_in, n_out, 1, heads, heads)
    return shape if (256 % n_out == 0 or n_out % 256 == 0) and n_out % rows_of_block(shape.kernel) == 0 else None


def up_gate_to(t: TensorType, activation: Activation, n_in: int, n_out: int) -> Shape:
    """Return the shape of ``up_gate`` for one row, with the result quantized."""
    return _shape("up_gate_to", t, n_in, n_out, 1, 1, 1, activation.kind)


def up_gate_id_to(t: TensorType, activation: Activation, n_in: int, n_out: int, rows: int, n_used: int) -> Shape:
    """Return the shape of ``up_gate_id``, with every row of the result quantized."""
    return _shape("up_gate_id_to", t, n_in, n_out, 1, rows * n_used, n_used, activation.kind)


def rows_of_block(kernel: Kernel) -> int:
    """Return the rows of weights of a thread block."""
    macros = dict(kernel.defines)
    return int(macros["ROWS"]) * 32 * _WARPS // int(macros["LANES"])


def kernels() -> Iterator[Kernel]:
    """Yield one kernel of every type, and further variants of some types."""
    silu = Activation("silu")
    for t in (BY_NAME[name] for name in sorted(decoders())):
        yield mul_mat(t, 4096, 16384).kernel
        yield mul_mat_id(t, 4096, 16384, 1, 1).kernel
    for name in ("Q8_0", "Q6_K", "TQ1_0", "IQ2_S", "F32"):
        yield up_gate(BY_NAME[name], silu, 4096, 16384, MAX_ROWS).kernel
    for name in ("IQ1_S", "IQ3_XXS", "TQ1_0", "Q1_0"):
        yield up_gate(BY_NAME[name], silu, 4096, 16384).kernel
        yield mul_mat(BY_NAME[name], 4096, 16384, 2).kernel
        yield mul_mat(BY_NAME[name], 4096, 16384, 4).kernel
    for t in (spec.type for spec in FORMATS.values() if spec.tiles):
        for n_in in (768, 1536, 4096):
            yield mul_mat(t, n_in, 1 << 17).kernel
            yield up_gate_id(t, silu, n_in, 1 << 17, 1, 1).kernel
        yield up_gate_id_to(t, silu, 4096, 16384, 1, 1).kernel
    for t in (BY_NAME["Q4_K"], BY_NAME["F16"]):
        for n_in, n_out in ((768, 16384), (1536, 16384), (2048, 768), (4096, 256)):
            yield mul_mat(t, n_in, n_out).kernel
            yield up_gate_id(t, silu, n_in, n_out, 1, 1).kernel
            yield up_gate_id_to(t, silu, n_in, n_out, 1, 1).kernel
        yield up_gate_to(t, silu, 4096, 16384).kernel
        yield _shape("mul_mat_heads_to", t, 512, 128, 1, 128, 128).kernel
        for rows in (2, 3, 5, MAX_ROWS):
            yield mul_mat_heads(t, 4096, 16384, rows, 1).kernel
    for kind in GATES:
        yield up_gate(BY_NAME["Q4_K"], Activation(kind), 4096, 16384).kernel
