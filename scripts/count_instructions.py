"""Count the instructions of products of one row (or few) and what they allow, of the bandwidth of a copy.

    scripts/count_instructions.py                        # every type, one column, an H200
    scripts/count_instructions.py --types Q4_K IQ1_S --columns 8 --kernel up_gate --show

Where no GPU is at hand, this is the evidence: mat_vec is compiled (NVRTC) and disassembled (nvdisasm: of a CUDA
toolkit, or pip install nvidia-cuda-nvdisasm), the instructions of its main loop are sorted by the pipe they take, and
divided by the parts of 32 weights that a lane computes in a turn. What a multiprocessor can start in a clock:

    issue   4 instructions of any kind
    ALU     2: logic, shifts, additions and comparisons of integers, permutations of bytes
    IMAD    2: multiplications of integers and products of bytes (IDP)
    FMA     4: these and what is done with f32
    XU      half a one: conversions that are not the ALU's, counts of bits
    LSU     1 wavefront of 128 bytes, of loads from shared or global memory or copies between them

A wavefront is what shared memory gives at once: at best 32 lanes' words. Words of a grid lie at random in its 32
banks, and of 32 lanes some want the same bank: their mean number of wavefronts is drawn. All else is taken to have no
conflict. Percentages are shares of what may be used up if weights are to be read at --least of a copy's bandwidth.

The bound is the share of a copy's bandwidth (counting what is read and what is written) that packed weights could be
read with if the busiest of these were all there is: an upper bound, with the caches' delays, the beginnings and the
ends of rows left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quantkit.kernels.cuda import mat_vec
from quantkit.kernels.cuda.compile import compile_module
from quantkit.kernels.cuda.dequantize import TYPES
from quantkit.kernels.cuda.operation import Operation
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType

#: Opcodes by pipe; what is in none takes a turn to issue and no more.
PIPES = {
    "ALU": "BMSK FMNMX FSEL FSETP I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT SHF VIADD "
    "VIADDMNMX VIMNMX VABSDIFF",
    "IMAD": "IMAD IDP",
    "FMA": "IMAD IDP FADD FFMA FMUL HADD2 HFMA2 HMUL2",
    "XU": "BREV F2F F2I FLO FRND I2F MUFU POPC",
}
#: Instructions of a warp that a multiprocessor starts in a clock, by pipe.
RATES = {"issue": 4.0, "ALU": 2.0, "IMAD": 2.0, "FMA": 4.0, "XU": 0.5, "LSU": 1.0}


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    gigahertz: float
    copy: float  # terabytes a second

    def share(self, part_bytes: float, clocks: float) -> float:
        """Return the share of a copy's bandwidth if a warp's 32 parts of so many bytes take so many clocks."""
        return 32 * part_bytes / clocks * self.multiprocessors * self.gigahertz / (1000 * self.copy)


@dataclass(frozen=True)
class Counts:
    """Of one kernel: its registers, and of its main loop the instructions, by pipe, for a part of 32 weights."""

    registers: int
    rows: int
    by_pipe: dict[str, float]
    opcodes: Counter[str]

    @property
    def clocks(self) -> dict[str, float]:
        return {pipe: n / RATES[pipe] for pipe, n in self.by_pipe.items()}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", nargs="+", default=[t.name for t in TYPES if t.block > 1], metavar="TYPE")
    p.add_argument("--columns", type=int, default=1, help="rows of activations (default: 1)")
    p.add_argument("--kernel", choices=("mul_mat", "up_gate"), default="mul_mat")
    p.add_argument("--shape", type=int, nargs=2, default=(4096, 1 << 18), metavar=("IN", "OUT"), help="of the matrix")
    p.add_argument("--capability", type=int, default=90, help="of the machine code (default: 90)")
    p.add_argument("--multiprocessors", type=int, default=132)
    p.add_argument("--clock", type=float, default=1.98, metavar="GHZ", help="under load (default: 1.98)")
    p.add_argument("--copy", type=float, default=4.3, metavar="TB/S", help="bandwidth of a copy (default: 4.3)")
    p.add_argument("--least", type=float, default=60, metavar="PERCENT", help="mark bounds below this (default: 60)")
    p.add_argument("--nvdisasm", default=shutil.which("nvdisasm"), metavar="PROGRAM", help="default: from PATH")
    p.add_argument("--show", action="store_true", help="list each type's opcodes, too")
    return p


def operation_of(kernel: str, t: TensorType, n_in: int, n_out: int, columns: int) -> Operation:
    if kernel == "up_gate":
        return mat_vec.up_gate(t, Activation("silu"), n_in, n_out, columns).operation
    return mat_vec.mul_mat(t, n_in, n_out, columns).operation


def disassembled(code: bytes, nvdisasm: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(text: str, kernel: str) -> Iterator[list[str]]:
    """Yield the instructions of every loop of a kernel, branches within it included: all are counted."""
    body = text.split(f".text.quantkit_{kernel}:")[1].split("\n\t.section")[0]
    lines, labels = list[str](), dict[str, int]()
    for line in body.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{ )?(.*?);", line):
            lines.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1].strip()))
            if (back := re.search(r"BRA.*`\((\.L_\w+)\)", lines[-1])) and back[1] in labels:
                yield lines[labels[back[1]] :]


def main_loop(text: str, operation: Operation) -> list[str]:
    """Return the longest of the loops with products of bytes, or of floats where there are none."""
    found = list(loops(text, operation.name))
    products = [loop for loop in found if any(line.startswith("IDP") for line in loop)]
    wanted = products or [loop for loop in found if any(line.startswith("FFMA") for line in loop)]
    return max(wanted, key=lambda loop: len(loop))


def wavefronts(instruction: str) -> float:
    """Return the wavefronts of a load, or a copy, without conflicts: a warp's bytes by 128."""
    name = instruction.split()[0].split(".")
    if name[0] not in ("LDS", "LDG", "STS", "STG", "LDGSTS", "SHFL", "LD", "ATOMS"):
        return 0
    return 4 if "128" in name else 2 if "64" in name else 1


def of_random_words(words: int, capability: int) -> float:
    """Return the mean number of wavefronts of 32 lanes that want any of so many words, of which there are copies."""
    rng = np.random.default_rng(0)
    copies = 4096 // words if words <= 512 and capability in (80, 90, 100) else 1  # Copies of forms.cuh
    draws = rng.integers(0, words, (2000, 32)) * copies + np.arange(32) % copies
    return float(np.mean([np.bincount(np.unique(draw) % 32, minlength=32).max() for draw in draws]))


def lookups(t: TensorType) -> tuple[int, int]:
    """Return how many words of a grid 32 weights need, and how many words the grid has."""
    words = {"IQ3_XXS": 256, "IQ3_S": 512, "IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ1_S": 2048, "IQ1_M": 2048}
    return (8 if t.name.startswith("IQ3") else 4) if t.name in words else 0, words.get(t.name, 1)


def count(operation: Operation, t: TensorType, capability: int, nvdisasm: str) -> Counts:
    code, log = compile_module(operation, capability, "--ptxas-options=-v")
    loop = main_loop(disassembled(code, nvdisasm), operation)
    opcodes = Counter(line.split()[0].split(".")[0] for line in loop)
    macros = dict(operation.defines)
    rows = int(macros["ROWS"]) * (2 if "ACTIVATION" in macros else 1)
    rows *= 2 if t.name in mat_vec.TWO_PARTS else 1
    found = re.search(rf"quantkit_{operation.name}'.*?Used (\d+) registers", log, re.S)
    wanted, words = lookups(t)

    by_pipe = {pipe: sum(opcodes[name] for name in names.split()) / rows for pipe, names in PIPES.items()}
    more = wanted * (of_random_words(words, capability) - 1) if wanted else 0
    by_pipe |= {"issue": len(loop) / rows, "LSU": sum(map(wavefronts, loop)) / rows + more}
    return Counts(int(found[1]) if found else 0, rows, by_pipe, opcodes)


def main() -> None:
    options = parser().parse_args()
    if options.nvdisasm is None:
        sys.exit("nvdisasm is not in PATH: pip install nvidia-cuda-nvdisasm, then --nvdisasm PROGRAM")
    card = Card(options.multiprocessors, options.clock, options.copy)
    pipes = ("issue", "ALU", "IMAD", "LSU")
    print(f"| type | bytes | rows | registers | {' | '.join(pipes)} | busiest | bound |\n|{'---|' * (6 + len(pipes))}")
    for name in options.types:
        t = BY_NAME[name]
        part_bytes = t.block_bytes * 32 / t.block
        n_in, n_out = options.shape
        operation = operation_of(options.kernel, t, n_in, n_out, options.columns)
        counts = count(operation, t, options.capability, options.nvdisasm)
        busiest = max(counts.clocks, key=counts.clocks.__getitem__)
        bound = 100 * card.share(part_bytes, counts.clocks[busiest])
        shares = [
            f"{counts.by_pipe[p]:.1f} {options.least / card.share(part_bytes, counts.clocks[p]):.0f} %" for p in pipes
        ]
        cells = (name, f"{part_bytes:g}", counts.rows, counts.registers, *shares, busiest)
        mark = "" if bound >= options.least else " <"
        print("| " + " | ".join(map(str, cells)) + f" | {bound:.0f} %{mark} |", flush=True)
        if options.show:
            print("    " + ", ".join(f"{n} {opcode}" for opcode, n in counts.opcodes.most_common()), flush=True)


if __name__ == "__main__":
    main()
