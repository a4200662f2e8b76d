"""Layers that remember a sequence, on the device: recurrent.cu. Causal convolution and the gated delta rule.

    convolve     batch x out weight state taps width rows
                 weight: f32 [width, taps], taps <= TAPS; state: f32 [sequences, taps - 1, width]
    delta_net    batch q k v g beta out state n_k_head n_v_head head_k head_v scale tiled rows
                 state: f32 [sequences, n_v_head, head_k, head_v]

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


def _delta_net(head: int) -> Kernel:
    return Kernel(FILE, "delta_net").bind(HEAD=head)


def delta_net(n_v_head: int, head_k: int, head_v: int) -> Shape:
    """Return how to apply the delta rule to all heads; ValueError for longer keys than there is room for."""
    if not 0 < head_k <= HEADS[-1]:
        raise ValueError(f"keys of {head_k} values: 1 to {HEADS[-1]} are possible")
    head = next(head for head in HEADS if head >= head_k)
    return Shape(_delta_net(head), (n_v_head, -(-head_v // _COLUMNS), 1))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield convolve(1, 1).kernel
    for head in HEADS:
        yield _delta_net(head)
