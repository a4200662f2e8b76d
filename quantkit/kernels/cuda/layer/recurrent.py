"""Recurrent layers on the device: recurrent.cu. Convolution, the gated delta rule, selective scans, RWKV.

    convolve     batch x out weight bias state taps width rows
                 weight: f32 [width, taps], taps <= TAPS; bias: f32 [width], or 0
                 state: f32 [sequences, taps - 1, width]
    delta_net    batch q k v g beta out state n_k_head n_v_head head_k head_v scale tiled rows
                 g: [n_v_head] a token; by_row [n_v_head, head_k]
                 state: f32 [sequences, n_v_head, head_k, head_v]
    ssm_scan     batch x z dt b c dt_bias a d out state n_head n_group head d_state rows
                 dt, dt_bias, d, z: or 0
                 state: f32 [sequences, n_head, d_state, head]
    column_scan  batch x z dt b c a d out state width d_state rows
                 a: f32 [d_state, width]; state: f32 [sequences, d_state, width]
    wkv          batch r g k v removed rate out state n_head n_kv_head head earlier complement scale bound rows
                 removed, rate: or 0; state: f32 [sequences, n_head, head, head]

rows: tokens. A token at position 0 finds zeros in the state; otherwise it reads the state, which is initialized with
zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import TypeNotSupported
from quantkit.kernels.cuda.core.kernel import Kernel, Shape

FILE = "layer/recurrent.cu"
#: Maximum number of taps of a convolution.
TAPS = 16
#: Numbers of rows of a head's state for which kernels are compiled: the smallest sufficient one is used.
HEADS = (16, 32, 64, 128, 256)
#: The same if rows also have their own rates in registers.
COLUMN_STATES = HEADS[:3]

#: Columns of a block of threads.
_COLUMNS = 32


def convolve(taps: int, width: int) -> Shape:
    """Return the kernel and grid that convolve ``width`` columns; TypeNotSupported for too many taps."""
    _check("a convolution with", taps, "taps", TAPS)
    return Shape(_bound("convolve", HEADS[-2]), (-(-width // _COLUMNS), 1, 1))


def delta_net(n_v_head: int, head_k: int, head_v: int, *, by_row: bool = False) -> Shape:
    """Return the kernel and grid that apply the delta rule to all heads; TypeNotSupported for too long keys."""
    _check("a delta net with keys of", head_k, "columns", HEADS[-1])
    return Shape(_of_heads("delta_net", head_k, by_row), (n_v_head, -(-head_v // _COLUMNS), 1))


def ssm_scan(n_head: int, head: int, d_state: int) -> Shape:
    """Return the kernel and grid that scan all heads of ``head`` columns; TypeNotSupported for too large a state."""
    _check("a selective scan with a state of", d_state, "rows", HEADS[-1])
    return Shape(_of_heads("ssm_scan", d_state), (n_head, -(-head // _COLUMNS), 1))


def column_scan(width: int, d_state: int) -> Shape:
    """Return the kernel and grid that scan ``width`` columns; TypeNotSupported for too large a state."""
    _check("a scan of columns with a state of", d_state, "rows", COLUMN_STATES[-1])
    return Shape(_of_heads("column_scan", d_state), (-(-width // _COLUMNS), 1, 1))


def wkv(n_head: int, head: int) -> Shape:
    """Return the kernel and grid that advance all heads of RWKV; TypeNotSupported for too large heads."""
    _check("RWKV with heads of", head, "columns", HEADS[-1])
    return Shape(_of_heads("wkv", head), (n_head, -(-head // _COLUMNS), 1))


def _check(name: str, n: int, unit: str, most: int) -> None:
    if not 0 < n <= most:
        raise TypeNotSupported(
            f"{name} {n} {unit} is not supported on CUDA, only 1 to {most}; run the model on the CPU (--gpu-layers 0)",
            "QK-E306",
        )


def _of_heads(name: str, rows: int, by_row: bool = False) -> Kernel:
    return _bound(name, next(head for head in HEADS if head >= rows), by_row)


def _bound(name: str, head: int, by_row: bool = False) -> Kernel:
    return Kernel(FILE, name).bind(HEAD=head, BY_ROW=int(by_row))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield convolve(1, 1).kernel
    for head in HEADS:
        yield from (_of_heads(name, head) for name in ("delta_net", "ssm_scan", "wkv"))
        yield _of_heads("delta_net", head, by_row=True)
    for head in COLUMN_STATES:
        yield _of_heads("column_scan", head)
