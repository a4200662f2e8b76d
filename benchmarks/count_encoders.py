"""Count the instructions that CUDA encoders execute, and the rates that a card's issue slots allow.

    benchmarks/count_encoders.py                            # every type, normal values, an H200
    benchmarks/count_encoders.py --types IQ4_KS Q6_0 --importance

Evidence without a GPU, beside benchmarks/count_instructions.py: kernels run as PTX on the CPU (tests/ptx), which counts
what every thread executes. Encoders branch by values, so no disassembly could tell. A warp is taken to execute as many
instructions as its busiest lane: no more than it really does where lanes part. PTX is not machine code: moves
disappear, divisions become several instructions. The bound is the rate if four instructions started in each clock of
each multiprocessor, without waiting for anything.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import host_device  # noqa: E402
from device_memory import Memory  # noqa: E402
from ptx import device as ptx  # noqa: E402
from ptx import translate  # noqa: E402

from quantkit.kernels.cuda.core.device import Launch  # noqa: E402
from quantkit.kernels.cuda.core.kernel import Kernel  # noqa: E402
from quantkit.kernels.cuda.encode.encode import encode_rows, encoders, weighs  # noqa: E402
from quantkit.types import BY_NAME, TensorType  # noqa: E402

#: Threads of a block, and blocks of a launch, that are counted.
_THREADS, _BLOCKS = 1024, 1024
_CAPABILITY = 90


class _Counting(translate.Translator):
    """Counts the instructions of each thread."""

    def statement(self, text: str) -> str:
        made = super().statement(text)
        if not made or not (text[0].islower() or text[0] == "@"):
            return made
        return f"executed[host_thread->block.x * {_THREADS} + host_thread->thread.x]++; {made}"


@cache
def _library(kernel: Kernel, capability: int) -> ctypes.CDLL:
    """Return a kernel's library, whose instructions are counted."""
    text = translate.translate(ptx.module_of(kernel.file, kernel.defines, capability), f"quantkit_{kernel.name}")
    text = text.replace("\n", f'\nextern "C" {{ unsigned executed[{_BLOCKS * _THREADS}]; }}\n', 1)
    own = host_device.digest(
        ptx.ptx_of(kernel.file, kernel.defines, capability), kernel.name, ptx.translator(), __doc__
    )
    library = host_device.CACHE.parent / "counts" / f"{own}.so"
    if not library.exists():
        libraries = [ptx.machine(), host_device._runtime_path()]
        host_device.make_library(library, text, [*ptx.FLAGS, f"-I{ptx.HERE}"], libraries)
    return ptx.load(library)


class Counted(ptx.PTXDevice):
    """Adds up what warps execute: each as much as its busiest lane."""

    def __init__(self) -> None:
        super().__init__(_CAPABILITY)
        self.executed = dict[str, int]()

    def launch(self, launch: Launch, order: int) -> None:
        executed = (ctypes.c_uint * (_BLOCKS * _THREADS)).in_dll(_library(launch.kernel, _CAPABILITY), "executed")
        counts = np.ctypeslib.as_array(executed).reshape(-1, 32)
        counts[:] = 0
        super().launch(launch, order)
        name = launch.kernel.name
        self.executed[name] = self.executed.get(name, 0) + 32 * int(counts.max(1).sum(dtype=np.int64))


def count(t: TensorType, rows: int, n: int, weighted: bool) -> dict[str, float]:
    """Return the instructions per weight of each kernel that encodes a type."""
    rng, memory = np.random.default_rng(0), Memory(device := Counted())
    x = rng.standard_normal((rows, n)).astype(np.float32)
    importance = memory.put(np.exp(rng.standard_normal(n)).astype(np.float32)) if weighted else 0
    out = memory.room((rows * t.row_bytes(n),), np.uint8)
    encode_rows(device, t, memory.put(x), rows, n, out, importance, memory.room((rows,)))
    memory.close()
    return {name: executed / x.size for name, executed in device.executed.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", nargs="+", default=list(encoders()), metavar="TYPE")
    p.add_argument("--importance", action="store_true", help="with an importance of columns, where a type uses one")
    p.add_argument("--shape", type=int, nargs=2, default=(4, 4096), metavar=("ROWS", "N"))
    p.add_argument("--multiprocessors", type=int, default=132)
    p.add_argument("--clock", type=float, default=1.98, metavar="GHZ", help="under load (default: 1.98)")
    options = p.parse_args()
    rows, n = options.shape
    ptx.library_of = _library
    translate.Translator = _Counting  # type: ignore[misc]
    print("| type | instructions per weight | of each kernel | Gweights/s at most |\n|---|---|---|---|")
    for name in options.types:
        t = BY_NAME[name]
        found = count(t, rows, n, options.importance and weighs(t))
        total = sum(found.values())
        rate = 128 * options.multiprocessors * options.clock / total
        parts = ", ".join(f"{kernel} {each:.0f}" for kernel, each in found.items())
        print(f"| {name} | {total:.0f} | {parts} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
