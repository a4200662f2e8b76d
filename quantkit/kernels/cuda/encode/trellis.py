"""Encodes rows of float32 as trellis types, IQ1_KT to IQ4_KT: trellis.cu.

    trellis    x importance out work rows n room      importance f32 [n] (0: none)
               points cells families indices grid lists    of the type's codebook (core/codebooks.py)

x: f32 [rows, n], out: the rows' bytes, both 16-byte aligned; work: ``room`` bytes for each of the launch's blocks of
threads, 16-byte aligned, which take a row at a time. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.codebooks import CODEBOOKS, codebook_on
from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

#: Searches of 32 values at most: a slot of survivors each, and one more.
_SEARCHES = {"IQ1_KT": 3, "IQ2_KT": 3, "IQ3_KT": 4, "IQ4_KT": 4}
#: Survivors of a search.
_SURVIVORS = 16
#: Working memory of a launch, if rows are not that long: so many of them are searched at once.
_WORK = 1 << 29


def is_trellis(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.name in CODEBOOKS


def _groups(t: TensorType) -> int:
    return 32 // CODEBOOKS[t.name].size


def _sides(t: TensorType) -> int:
    of = CODEBOOKS[t.name]
    return of.books * (1 if of.magnitudes else 2)


def _kept(t: TensorType) -> int:
    """Return the words that are kept of 32 values: of each group, sign and codebook three a survivor."""
    return 3 * _SURVIVORS * (_SEARCHES[t.name] + 1) * _groups(t) * _sides(t)


def _row_room(t: TensorType, n: int) -> int:
    """Return the working memory of a row in bytes, as trellis.cuh's TrellisRow takes it."""
    words = _kept(t) + 64 + 32 + 3 + 2 * _sides(t) + 1 + 4 + 4 * _groups(t)
    return round_up(4 * words * (n // 32), 256)


def _at_once(t: TensorType, rows: int, n: int) -> int:
    return max(1, min(rows, _WORK // _row_room(t, n)))


def trellis_room(t: TensorType, rows: int, n: int) -> int:
    """Return the working memory of a launch in bytes."""
    return _at_once(t, rows, n) * _row_room(t, n)


def trellis_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/trellis.cu", "trellis").bind(ENCODER=f"Encode{t.name}", WORDS_KEPT=_kept(t))


def trellis_launch(
    device: Device, t: TensorType, x: int, rows: int, n: int, out: int, importance: int, work: int
) -> Launch:
    """Return what encodes rows; x, out, importance and work are addresses."""
    kernel = trellis_kernel(t)
    block = kernel.block(
        x=x, importance=importance, out=out, work=work, rows=rows, n=n, room=_row_room(t, n),
        **codebook_on(device, t)._asdict(),
    )  # fmt: skip
    return Launch(kernel, (_at_once(t, rows, n), 1, 1), block)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (trellis_kernel(BY_NAME[name]) for name in CODEBOOKS)
