"""A device that runs each kernel twice, by the shim and as PTX, on the same memory, and compares all that they leave.

They must be the same, but for kernels that compute what PTX leaves open: exponentials and sines, which are the C
library's on one side and CUDA's own on the other, and sums within an mma in f32.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from host_device import HostDevice

from ptx.device import PTXDevice, module_of
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

#: What tells a kernel that does not give the same bits, and how far it may be from them; where limits cut values, but
#: not the errors of the sums that they are.
OPEN, TOLERANCE, NEAR_LIMITED = re.compile(r"(ex2|rcp)\.approx|mma\.sync\S+\.f32$|__cudart_sin_cos_coeffs"), 2e-6, 4e-5


def is_exact(kernel: Kernel, capability: int) -> bool:
    """Return whether a kernel has only instructions with a unique result."""
    body = module_of(kernel.file, kernel.defines, capability).functions[f"quantkit_{kernel.name}"].body
    return not any(OPEN.search(statement.text.split(" {")[0]) for statement in body)


def tolerance_of(kernel: Kernel) -> float:
    """Return the tolerance of an inexact kernel; limits come with an activation."""
    return NEAR_LIMITED if "ACTIVATION" in dict(kernel.defines) else TOLERANCE


@dataclass(frozen=True)
class Difference:
    """What a launch left otherwise: 32-bit words, and as floats the largest distance over the largest value."""

    kernel: Kernel
    words: int
    relative: float
    exact: bool  # it had to be the same


class TwinDevice(PTXDevice):
    """Keeps what PTX leaves. differences: of all launches so far that were not the same."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.differences: list[Difference] = []

    def check(self) -> None:
        """Fail if a launch was not what it had to be."""
        wrong = [d for d in self.differences if d.exact or d.relative > tolerance_of(d.kernel)]
        assert not wrong, wrong

    def launch(self, launch: Launch, order: int) -> None:
        before = self._copies()
        self._by_shim(launch, order)
        by_shim = self._copies()
        for address, data in before.items():
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
        super().launch(launch, order)
        for address, data in self._copies().items():
            if not np.array_equal(data, by_shim[address]):
                self._differ(launch.kernel, by_shim[address], data)

    def _by_shim(self, launch: Launch, order: int) -> None:
        shim = HostDevice(self.capability, order)
        HostDevice.run(shim, [launch])

    def _copies(self) -> dict[int, npt.NDArray[np.uint8]]:
        return {
            address: np.frombuffer(ctypes.string_at(address, nbytes), np.uint8).copy()
            for address, nbytes in self._sizes.items()
        }

    def _differ(self, kernel: Kernel, shim: npt.NDArray[np.uint8], ptx: npt.NDArray[np.uint8]) -> None:
        n = len(shim) // 4 * 4
        shim, ptx = shim[:n], ptx[:n]
        words = [a.view(np.uint32) for a in (shim, ptx)]
        mismatch = (words[0] != words[1]) & _differ_beside_nan(shim, ptx).reshape(-1, 2).any(1)
        if not mismatch.any():
            return
        a, b = (w[mismatch].view(np.float32).astype(np.float64) for w in words)
        with np.errstate(all="ignore"):
            largest = np.abs(words[0].view(np.float32)[np.isfinite(words[0].view(np.float32))]).max(initial=0.0)
            relative = np.nan_to_num(np.abs(a - b), nan=np.inf).max() / (float(largest) or 1.0)
        self.differences.append(
            Difference(kernel, int(mismatch.sum()), float(relative), is_exact(kernel, self.capability))
        )


def _differ_beside_nan(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return for each 16 bits whether they differ, except those of floats or doubles that are NaN in both.

    NaN has many bits. Scales may lie between the bytes of blocks, so floats begin at any 16 bits.
    """
    halves = [x.view(np.uint16) for x in (a, b)]
    nan = np.ones(len(halves[0]) + 1, bool)
    nan[0] = nan[-1] = False
    doubles = np.ones(len(a) // 8, bool)
    for x in halves:
        floats = (x[:-1].astype(np.uint32) | x[1:].astype(np.uint32) << 16).view(np.float32)
        nan[1:-1] &= np.isnan(floats)
        doubles &= np.isnan(x[: 4 * len(doubles)].view(np.float64))
    differ: npt.NDArray[np.bool_] = (halves[0] != halves[1]) & ~nan[:-1] & ~nan[1:]
    differ[: 4 * len(doubles)].reshape(-1, 4)[doubles] = False
    return differ
