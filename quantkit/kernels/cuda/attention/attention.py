"""Attention over a cache on the device: attention.cu.

``attention`` chooses the kernel of a layer's attention by the number of tokens::

    few      up to 8 rows (tokens x heads of a group) a block, straight from the cache to registers: generation
    tile     tiles of rows x 64 keys in f32: prompts with a cache of f32, or heads of odd lengths
    tensor   the same on tensor cores, from f16 or q8_0: prompts, and generation where heads share their keys

All take the same slots. With more than one part of the keys their results go to scratch and ``attention_combine``
follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from quantkit.kernels.cuda.attention.cache import TYPES
from quantkit.kernels.cuda.core.kernel import Kernel, Shape, shared_of_block

VECTOR, TILE, TENSOR = range(3)

#: Maximum number of parts of the keys (attention_combine's limit). A launch has about as many blocks as run at once:
#: more would run alone on a multiprocessor, and each additional part must be combined.
SPLITS, MULTIPROCESSORS = 128, 132
#: Maximum rows (tokens x heads of a group) for the algorithm ``few``: if tensor cores are an alternative, and if not.
FEW_ROWS, FEW_ROWS_F32 = 2, 16
_ATTENTION = Kernel("attention/attention.cu", "attention")


@dataclass(frozen=True)
class Attention:
    """A launch, its number of key parts, bytes of scratch, and the launch that combines the parts, or None."""

    attend: Shape
    splits: int
    scratch: int
    combine: Shape | None


@dataclass(frozen=True)
class _Algorithm:
    """A block of threads: a kernel, its rows of q, number of blocks at once, bytes of shared memory."""

    kernel: Kernel
    rows: int
    at_once: int
    shared: int = 0


@dataclass(frozen=True)
class AttentionLayer:
    """Heads of a layer and its cache, of n_ctx cells a sequence; kind: f32, f16 or q8_0.

    mla: the cache has no values. selected: number of keys visible to a token (0: all). biased: scores have biases by
    distance.
    """

    kind: str
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    n_ctx: int
    mla: bool = False
    selected: int = 0
    biased: bool = False


@cache
def attention(
    layer: AttentionLayer,
    rows: int,
    *,
    capability: int = 90,
    algorithm: int | None = None,
    splits: int | None = None,
) -> Attention:
    """Return the kernels by which ``rows`` tokens attend to a layer's cache.

    algorithm and splits are chosen without; tests choose them.
    """
    n_head, head_v = layer.n_head, layer.head_v
    group = n_head // layer.n_head_kv
    block = _choose(layer, rows * group, shared_of_block(capability), algorithm)
    tiles = -(-rows * group // block.rows) * layer.n_head_kv
    if splits is None:
        cells = min(layer.n_ctx, layer.selected or layer.n_ctx)
        splits = max(1, min(SPLITS, MULTIPROCESSORS * block.at_once // tiles, -(-cells // 64)))
    bound = block.kernel.bind(CACHE=TYPES.index(layer.kind), HEAD_K=layer.head_k, HEAD_V=head_v)
    bound = bound.bind(SELECTED=1) if layer.selected else bound
    bound = bound.bind(BIASED=1) if layer.biased else bound
    attend = Shape(bound, (tiles, splits, 1), block.shared)
    if splits == 1:
        return Attention(attend, 1, 0, None)
    combine = Shape(Kernel(bound.file, "attention_combine", bound.defines), (rows * n_head, -(-head_v // 128), 1))
    return Attention(attend, splits, 4 * rows * n_head * splits * (head_v + 2), combine)


@cache
def most_scratch(layer: AttentionLayer, rows: int, capability: int = 90) -> int:
    """Return the scratch bytes for up to ``rows`` tokens, the most that ``attention`` needs for any of them."""
    return max(attention(layer, n, capability=capability).scratch for n in range(1, rows + 1))


def combine_to(launches: Attention, head_v: int) -> Shape | None:
    """Return the launch that combines the parts and converts a token's heads to a format (activations.py).

    None: there is one part, or heads do not make up 256 columns.
    """
    threads = min(head_v, 128)
    if launches.combine is None or 256 % threads or head_v % threads:
        return None
    kernel, grid = launches.combine.kernel, launches.combine.grid
    return Shape(Kernel(kernel.file, "attention_combine_to", kernel.defines), grid)


def _choose(layer: AttentionLayer, rows: int, limit: int, algorithm: int | None) -> _Algorithm:
    tensor = _tensor(layer, rows, limit) if layer.kind != "f32" and algorithm in (None, TENSOR) else None
    if algorithm is None:
        algorithm = TENSOR if tensor else TILE
        if rows <= (FEW_ROWS if tensor else FEW_ROWS_F32):
            algorithm = VECTOR
    if algorithm == TENSOR:
        assert tensor is not None
        return tensor
    return _vector(rows, layer.head_k, layer.head_v) if algorithm == VECTOR else _tile(layer.head_k, layer.head_v)


def _up_to(size: int, values: dict[int, int], beyond: int) -> int:
    """Return the value of the first limit that ``size`` does not exceed."""
    return next((value for limit, value in values.items() if size <= limit), beyond)


def _vector(rows: int, head_k: int, head_v: int) -> _Algorithm:
    size = 1
    while size < min(rows, 8 if max(head_k, head_v) <= 256 else 4):
        size *= 2
    longest = max(head_k, head_v)
    resident = 4 - (longest > 128) - (size > 2) if longest <= 256 else 2
    return _Algorithm(_ATTENTION.bind(WAY=VECTOR, ROWS=size, THREADS=128, BLOCKS_AT_ONCE=resident), size, resident)


def _tile(head_k: int, head_v: int) -> _Algorithm:
    """Shared memory stays below 64 KiB, which every device has."""
    longest = max(head_k, head_v)
    size = _up_to(longest, {128: 64, 256: 32}, 16)
    q = -(-head_k // 32) * 32 + 4
    columns = -(-head_v // 64) * 64
    values = {1: 32, 2: 16, 3: 8, 4: 8}.get(columns // 64, 4) * columns
    shared = 4 * (size * (q + 68) + max(64 * 36, values))
    return _Algorithm(
        _ATTENTION.bind(WAY=TILE, ROWS=size, THREADS=4 * size, BLOCKS_AT_ONCE=2), size, 2 * 64 // size, shared
    )


def _tensor(layer: AttentionLayer, rows: int, limit: int) -> _Algorithm | None:
    """Return the tensor-core kernel; None: heads not of 16 bytes, or too long for the device's shared memory."""
    head_k, head_v = layer.head_k, layer.head_v
    if head_k % 8 or head_v % 8:
        return None
    warps = _up_to(rows, {16: 1, 32: 2}, 4)  # of 16 rows each
    while warps:
        columns = max(4 // warps, _up_to(head_v, {128: 1, 256: 2}, 4))
        for keys in (64, 32) if warps * columns <= 8 else ():  # more leave too few registers
            shared = _tensor_shared(layer, 16 * warps, columns, keys)
            if shared is not None and shared <= limit - 4096:  # the kernel also declares static shared memory
                size = {"ROWS": 16 * warps, "COLUMNS": columns, "THREADS": 32 * warps * columns, "KEYS": keys}
                resident = _tensor_resident(warps, columns, max(head_k, head_v))
                bound = _ATTENTION.bind(WAY=TENSOR, LATENT=int(layer.mla), BLOCKS_AT_ONCE=resident, **size)
                return _Algorithm(bound, 16 * warps, max(1, min(resident, limit // (shared + 2048))), shared)
        warps //= 2
    return None


def _tensor_shared(layer: AttentionLayer, rows: int, columns: int, keys: int) -> int | None:
    """Return the bytes of shared memory that attention_tensor.cuh lays out. None: values are longer than keys."""
    head_k, head_v, mla = layer.head_k, layer.head_v, layer.mla
    k_stride = 2 * (-(-head_k // 16) * 16) + 16
    v_columns = -(-head_v // (16 * columns)) * 16 * columns
    v_stride = k_stride if mla else 2 * v_columns + 16
    if mla and 2 * v_columns > k_stride - 16:
        return None
    raw_k, raw_v = (16 * ((head // 32 * 34 + 29) // 16 | 1) for head in (head_k, head_v))
    if layer.kind == "q8_0":
        incoming, later = keys * raw_k, keys * (max(k_stride, v_stride) + head_k // 32 * 4)
        later += keys * (head_k // 32 * 4 if mla else raw_v + -(-v_columns // 32) * 4)
    else:
        incoming, later = keys * k_stride, keys * v_stride
    q, weights = 2 * rows * k_stride, 4 * rows * (keys + 8)
    if columns > 1 and (head_k > 128 or keys // columns < 16):  # sliced
        return incoming + max(q, later + columns * weights)
    return incoming + q + later + (weights if columns > 1 else 0)


def _tensor_resident(warps: int, columns: int, longest: int) -> int:
    """Return the number of blocks that fit the registers at once, by NVRTC's reports."""
    if warps * columns > 4:
        return 1
    if longest > 128:
        return 2
    if warps == 1:
        return 4
    return 3 if warps == 2 or longest <= 64 else 2


def kernels() -> Iterator[Kernel]:
    """Yield kernels of this file: every algorithm and type, for some of the sizes that models have."""
    sizes: dict[str, tuple[tuple[int, int, int, int], ...]]
    sizes = {"f32": ((32, 4, 128, 1), (32, 4, 128, 512))}
    sizes["q8_0"] = (*sizes["f32"], (32, 32, 128, 1), (8, 4, 256, 512), (128, 1, 576, 1))
    sizes["f16"] = (*sizes["q8_0"], (32, 8, 64, 1), (32, 8, 64, 512))
    for kind, shapes in sizes.items():
        for n_head, n_head_kv, head, rows in shapes:
            mla = head == 576
            layer = AttentionLayer(kind, n_head, n_head_kv, head, 512 if mla else head, 4096, mla)
            launches = attention(layer, rows)
            yield launches.attend.kernel
            if mla:
                yield attention(replace(layer, selected=2048), rows).attend.kernel
            for shape in (launches.combine, combine_to(launches, head)):
                if shape is not None:
                    yield shape.kernel
