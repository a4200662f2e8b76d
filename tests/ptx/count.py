"""What kernels ask of memory, counted while their PTX runs: to tune them where there is no GPU.

    python -m pytest tests/cuda/test_cuda_mat_mat.py -k "ptx and Q4_K" --ptx-counts

For each kernel, its kinds of access and the worst of its instructions: requests of warps; of shared memory the
wavefronts they take, of global memory the sectors of 32 bytes; and the least there could be: 32 words of different
banks, all bytes side by side. Lanes that go together are modelled (8 bytes: 16 at once, 16 bytes: 8), caches are not.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from functools import cache

import numpy as np

from ptx.device import PTXDevice, machine, ptx_of
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel

#: (kernel, capability, line of the PTX, shared) -> requests, parts, least.
COUNTS: dict[tuple[Kernel, int, int, bool], Counter[str]] = {}
NAMES = ("requests", "parts", "least")
ROOM = 100_000


@cache
def _machine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(machine()))
    library.ptx_begin_count.argtypes = [ctypes.c_uint64]
    library.ptx_end_count.restype = ctypes.c_uint64
    library.ptx_end_count.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


class CountingDevice(PTXDevice):
    """Counts what is launched, in COUNTS."""

    def launch(self, launch: Launch, order: int) -> None:
        rows = np.empty((ROOM, 5), np.uint64)
        _machine().ptx_begin_count(self.shared_of(launch))
        super().launch(launch, order)
        n = _machine().ptx_end_count(rows.ctypes.data, ROOM)
        for line, shared, *numbers in rows[:n].tolist():
            key = (launch.kernel, self.capability, line, bool(shared))
            COUNTS.setdefault(key, Counter()).update(dict(zip(NAMES, numbers, strict=True)))


def instructions(kernel: Kernel, capability: int) -> dict[int, str]:
    """Return the lines of a module's PTX by number, without guards."""
    lines = ptx_of(kernel.file, kernel.defines, capability).split("\n")
    return {i: re.sub(r"^@!?%p\d+\s+", "", line.strip()).rstrip(";") for i, line in enumerate(lines, 1)}


def report() -> str:
    """Return a table of all that was counted, by kernel, the costliest lines first."""
    lines = []
    kernels = dict.fromkeys((kernel, capability) for kernel, capability, *_ in COUNTS)
    for kernel, capability in kernels:
        text = instructions(kernel, capability)
        counts = [(k[2], k[3], c) for k, c in COUNTS.items() if k[:2] == (kernel, capability)]
        defines = " ".join(f"{k}={v}" for k, v in kernel.defines)
        lines.append(f"\n{kernel.file} {kernel.name} {defines} sm_{capability}")
        for shared in (True, False):
            line_counts = [(line, c) for line, s, c in counts if s == shared]
            total: Counter[str] = sum((c for _, c in line_counts), Counter())
            lines.append(f"  {'shared' if shared else 'global'}: {_numbers(total, shared)}")
            by_kind: dict[str, Counter[str]] = {}
            for line, c in line_counts:
                by_kind.setdefault(text[line].split()[0], Counter()).update(c)
            for kind, c in sorted(by_kind.items(), key=lambda item: -item[1]["parts"]):
                lines.append(f"    {kind:44s} {_numbers(c, shared)}")
            worst = sorted(line_counts, key=lambda item: item[1]["least"] - item[1]["parts"])
            for line, c in worst[:6]:
                if c["parts"] > c["least"]:
                    lines.append(f"      line {line:6d} {text[line][:70]:70s} {_numbers(c, shared)}")
    return "\n".join(lines)


def _numbers(c: Counter[str], shared: bool) -> str:
    unit = "wavefronts" if shared else "sectors"
    ratio = c["parts"] / max(1, c["least"])
    return f"{c['requests']:9d} requests {c['parts']:10d} {unit}, {ratio:5.2f} of the least"
