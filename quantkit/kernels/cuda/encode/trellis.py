"""Encodes rows of float32 as trellis types, IQ1_KT to IQ4_KT: trellis.cu.

    trellis    x importance out work rows n work_bytes      importance f32 [n] (0: none)
               points cells families indices grid lists    of the type's codebook (core/lookups.py)

x: f32 [rows, n], out: the rows' bytes, both 16-byte aligned; work: ``work_bytes`` for each thread block of the
launch, 16-byte aligned; a thread block encodes one row at a time. Rows must be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Device, Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.core.lookups import codebook_on
from quantkit.kernels.cuda.encode import Rows
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS
from quantkit.types import BY_NAME, TensorType
from quantkit.units import round_up

#: Number of survivors of a search.
_SURVIVORS = 16
#: Working memory of a launch, which limits the rows that are searched at once (at least one).
_WORK = 1 << 29


def is_trellis(t: TensorType) -> bool:
    """Return whether this encodes the type."""
    return t.name in TRELLIS_SETTINGS


def _survivor_words(t: TensorType) -> int:
    """Return the words of survivors of 32 values: three each, of each group, sign and codebook."""
    settings = TRELLIS_SETTINGS[t.name]
    return 3 * _SURVIVORS * settings.slots * settings.groups * settings.combinations


def _row_bytes(t: TensorType, n: int) -> int:
    """Return the working memory of a row in bytes, as trellis.cuh's TrellisRow takes it."""
    settings = TRELLIS_SETTINGS[t.name]
    words = _survivor_words(t) + 64 + 32 + 3 + 2 * settings.combinations + 1 + 4 + 4 * settings.groups
    return round_up(4 * words * (n // 32), 256)


def _at_once(t: TensorType, rows: int, n: int) -> int:
    return max(1, min(rows, _WORK // _row_bytes(t, n)))


def trellis_working_bytes(t: TensorType, rows: int, n: int) -> int:
    """Return the working memory of a launch in bytes."""
    return _at_once(t, rows, n) * _row_bytes(t, n)


def trellis_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/trellis.cu", "trellis").bind(ENCODER=f"Encode{t.name}", SURVIVOR_WORDS=_survivor_words(t))


def trellis_launch(device: Device, t: TensorType, r: Rows) -> Launch:
    """Return the launch that encodes rows."""
    kernel = trellis_kernel(t)
    block = kernel.block(**r._asdict(), work_bytes=_row_bytes(t, r.n), **codebook_on(device, t)._asdict())
    return Launch(kernel, (_at_once(t, r.rows, r.n), 1, 1), block)


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of this file."""
    yield from (trellis_kernel(BY_NAME[name]) for name in TRELLIS_SETTINGS)
