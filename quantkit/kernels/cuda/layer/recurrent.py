"""Layers that remember a sequence, on the device: recurrent.cu. Convolution, the gated delta rule, the selective scan.

    convolve     batch x out weight bias state taps width rows
                 weight: f32 [width, taps], taps <= TAPS; bias: f32 [width], or 0
                 state: f32 [sequences, taps - 1, width]
    delta_net    batch q k v g beta out state n_k_head n_v_head head_k head_v scale tiled rows
                 state: f32 [sequences, n_v_head, head_k, head_v]
    ssm_scan     batch x z dt b c dt_bias a d out state n_head n_group head d_state rows
                 state: f32 [sequences, n_head, d_state, head]

rows: tokens. A token at position 0 finds zeros in the state; otherwise what is there counts, so it begins as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.kernel import Kernel, Shape

FILE = "layer/recurrent.cu"
#: The most taps of a convolution.
TAPS = 16
#: Rows of a head's state that lanes have registers for: the smallest that has room is taken.
HEADS = (16, 32, 64, 128, 256)

#: Columns of a block of threads.
_COLUMNS = 32


def convolve(taps: int, width: int) -> Shape:
    """Return how to convolve ``width`` columns; ValueError for more taps than there is room for."""
    if not 0 < taps <= TAPS:
        raise ValueError(f"a convolution with {taps} taps: 1 to {TAPS} are possible")
    return Shape(Kernel(FILE, "convolve").bind(HEAD=HEADS[-2]), (-(-width // _COLUMNS), 1, 1))


def _of_heads(name: str, rows: int) -> Kernel:
    return Kernel(FILE, name).bind(HEAD=next(head for head in HEADS if head >= rows))


def delta_net(n_v_head: int, head_k: int, head_v: int) -> Shape:
    """Return how to apply the delta rule to all heads; ValueError for longer keys than there is room for."""
    if not 0 < head_k <= HEADS[-1]:
        raise ValueError(f"keys of {head_k} values: 1 to {HEADS[-1]} are possible")
    return Shape(_of_heads("delta_net", head_k), (n_v_head, -(-head_v // _COLUMNS), 1))


def ssm_scan(n_head: int, head: int, d_state: int) -> Shape:
    """Return how to scan all heads of ``head`` columns; ValueError for a larger state than there is room for."""
    if not 0 < d_state <= HEADS[-1]:
        raise ValueError(f"a state of {d_state} rows: 1 to {HEADS[-1]} are possible")
    return Shape(_of_heads("ssm_scan", d_state), (n_head, -(-head // _COLUMNS), 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield convolve(1, 1).kernel
    for head in HEADS:
        yield from (_of_heads(name, head) for name in ("delta_net", "ssm_scan"))
