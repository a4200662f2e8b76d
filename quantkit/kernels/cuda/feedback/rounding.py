"""Rows improved with error feedback on a device: the CPU's bytes and losses, given the same metric.

``round_rows`` takes what encoders made, on the device, and leaves its bytes there.
"""

from __future__ import annotations

from quantkit.kernels.cpu.feedback.options import Rounding
from quantkit.kernels.cuda.core.device import Device
from quantkit.kernels.cuda.feedback.metric import DeviceMetric
from quantkit.types import TensorType


def working_bytes(t: TensorType, rows: int, n: int) -> int:
    """Return the bytes that ``round_rows`` needs for so many rows of n values of type ``t``."""
    raise NotImplementedError


def round_rows(
    device: Device,
    t: TensorType,
    x: int,
    rows: int,
    target: int,
    made: int,
    start: int,
    by: DeviceMetric,
    how: Rounding,
    before: int,
    after: int,
    work: int,
) -> None:
    """Launch what improves the bytes of rows.

    All are addresses: x and target f32 [rows, n], what encoders were given and what values shall come near to, which
    may be x; made uint8 [rows, row bytes], the reference's bytes, improved in place; start: bytes to begin with, made
    for the target, which may be ``made``; before and after f64 [rows], the losses of the reference's bytes and of the
    best; work: room for ``working_bytes``, 256-byte aligned.
    """
    raise NotImplementedError
