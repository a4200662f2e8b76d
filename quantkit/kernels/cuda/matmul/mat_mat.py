"""Products of weights with many rows of activations on the device: mat_mat.cu, panel.cuh.

Slots are those of mat_vec.py's kernels of the same names; strides are bytes. x holds rows in the format of the weight's
type (activations.py): 16-byte aligned if it is quantized. ``plan`` is a result of moe.bucket. A ``Shape`` belongs to
sizes and to a device's ``capability``: small ones share less memory. A row of the result does not depend on the other
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.kernels.cuda.core.kernel import BLOCK_TAKES, Kernel, Shape, shared_of_multiprocessor
from quantkit.kernels.cuda.layer.glu import ACTIVATIONS, GATES
from quantkit.kernels.cuda.matmul.moe import most_tiles
from quantkit.kernels.formats import FOLDED_TO_F16, format_of
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType

#: Types without blocks of levels, and their names in panel.cuh.
FLOATS = {"F16": "HALF", "BF16": "BFLOAT", "F32": "SINGLE"}

#: Below this number of large tiles, so much of a device is idle that small ones, which unpack four times as often, are
#: faster. For up to 32 tokens, a large tile has 0.76 of the instructions of its four small ones (Q4_K, sm_90).
_FEW_BLOCKS = 40
_FEW_OF_32 = 8
#: Distance of two rows of a tile in shared memory.
_STRIDE = 144


@dataclass(frozen=True)
class Tile:
    """The shape of a block's tile: rows of weights, tokens, threads."""

    rows: int
    tokens: int
    threads: int


SMALL = Tile(32, 32, 128)
MIDDLE = Tile(64, 128, 128)
LARGE = Tile(128, 128, 256)


def tile_for(t: TensorType, n_out: int, tokens: float, groups: int = 1, capability: int = 90) -> Tile:
    """Return the tile for ``tokens`` rows of x in each of ``groups`` (heads, experts): a larger one for more rows.

    Two large tiles should fit on a multiprocessor, so that one multiplies while the other unpacks; otherwise two medium
    ones may, which do not unpack more often.
    """
    blocks = groups * -(-n_out // LARGE.rows) * -(-tokens // LARGE.tokens)
    if blocks < (_FEW_BLOCKS if tokens > SMALL.tokens else _FEW_BLOCKS * _FEW_OF_32):
        return SMALL
    capacity = shared_of_multiprocessor(capability)
    fits = {tile: capacity // (shared_bytes(t, tile) + BLOCK_TAKES) for tile in (LARGE, MIDDLE)}
    return next((tile for least in (2, 1) for tile in fits if fits[tile] >= least), SMALL)


def shared_bytes(t: TensorType, tile: Tile) -> int:
    """Return the shared memory of a block, as panel.cuh lays it out, and checks."""
    panel, x = tile.rows * _STRIDE, tile.tokens * _STRIDE
    if t.name in FLOATS:
        return 2 * panel + 2 * x
    spec = format_of(t)
    if spec.folded_scale_bytes == FOLDED_TO_F16:
        panel, scales = tile.rows * (2 * 128 + 16), 0
    else:
        panel, scales = max(spec.folded_scale_bytes, 1) * panel, 4 * tile.rows * (1 if spec.folded_scale_bytes else 4)
    mins = 4 * tile.rows * (128 // spec.span) if spec.mins else 0
    pieces = (spec.unit_bytes + (15 if spec.align % 16 else 0) + 15) // 16
    x += 16 * tile.tokens + (32 * tile.tokens if mins else 0)
    raw = tile.rows * 16 * (pieces | 1) + 16
    of_rows = 4 * tile.rows * (2 if t.row_scale else 1)
    return panel + scales + mins + 2 * x + of_rows + raw + 4 * spec.grid


def _kernel(name: str, t: TensorType, tile: Tile, activation: str = "") -> Kernel:
    weights = FLOATS.get(t.name, "QUANTIZED")
    kernel = Kernel("matmul/mat_mat.cu", name).bind(
        TYPE=t.name, WEIGHTS=weights, TOKENS=tile.tokens, THREADS=tile.threads, SHARED=shared_bytes(t, tile)
    )
    return kernel.bind(ACTIVATION=ACTIVATIONS[activation]) if activation else kernel


def _shape(kernel: Kernel, t: TensorType, tile: Tile, n_out: int, tokens: int, heads: int = 1) -> Shape:
    """Return the shape of a product; tiles along the tokens, which read the same weights, are adjacent blocks."""
    return Shape(kernel, (tokens, -(-n_out // tile.rows), heads), shared_bytes(t, tile))


def mul_mat(t: TensorType, n_in: int, n_out: int, rows: int, capability: int = 90) -> Shape:
    """Return the kernel and grid that multiply a matrix with rows of x."""
    return mul_mat_heads(t, n_in, n_out, rows, 1, capability, "mul_mat")


def mul_mat_heads(
    t: TensorType, n_in: int, n_out: int, rows: int, heads: int, capability: int = 90, name: str = "mul_mat_heads"
) -> Shape:
    """Return the kernel and grid that multiply a matrix a head with the heads of rows of x."""
    tile = tile_for(t, n_out, rows, heads, capability)
    return _shape(_kernel(name, t, tile), t, tile, n_out, -(-rows // tile.tokens), heads)


def up_gate(t: TensorType, activation: Activation, n_in: int, n_out: int, rows: int, capability: int = 90) -> Shape:
    """Return the kernel and grid that compute activation(gate x) * (up x) for rows of x."""
    tile = tile_for(t, 2 * n_out, rows, 1, capability)
    kernel = _kernel("up_gate", t, tile, activation.kind)
    return _shape(kernel, t, tile, 2 * n_out, -(-rows // tile.tokens))


def mul_mat_id(
    t: TensorType, n_in: int, n_out: int, rows: int, n_used: int, n_expert: int, capability: int = 90
) -> Shape:
    """Return the kernel and grid that multiply chosen experts with rows of x."""
    return _by_expert("mul_mat_id", t, "", n_out, rows * n_used, n_expert, capability)


def up_gate_id(
    t: TensorType, activation: Activation, n_in: int, n_out: int, rows: int, n_used: int, n_expert: int,
    capability: int = 90,
) -> Shape:  # fmt: skip
    """Return the kernel and grid that compute activation(gate x) * (up x) with chosen experts."""
    return _by_expert("up_gate_id", t, activation.kind, 2 * n_out, rows * n_used, n_expert, capability)


def _by_expert(
    name: str, t: TensorType, activation: str, n_out: int, pairs: int, n_expert: int, capability: int
) -> Shape:
    used = min(pairs, n_expert)
    tile = tile_for(t, n_out, pairs / used, used, capability)
    kernel = _kernel(name, t, tile, activation)
    return _shape(kernel, t, tile, n_out, most_tiles(pairs, n_expert, tile.tokens))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file, for one type of each multiplication method; other types differ only in their
    unpacker."""
    kernels = ("mul_mat", "mul_mat_heads", "mul_mat_id", "up_gate", "up_gate_id")
    small = ("Q8_0", "Q4_K", "Q2_K", "Q6_K", "NVFP4", "IQ1_S", *FLOATS)
    middle = ("Q8_0", "Q4_K", "Q6_K", "F16")
    for tile, names in (
        (SMALL, small),
        (MIDDLE, middle),
        (LARGE, ("Q8_0", "Q4_K", "Q2_K", "Q6_K", "NVFP4", "F16", "F32")),
    ):
        for name in names:
            for kernel in kernels:
                yield _kernel(kernel, BY_NAME[name], tile, "silu")
    for kind in GATES:
        yield _kernel("up_gate", BY_NAME["Q8_0"], SMALL, kind)
