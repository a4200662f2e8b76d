"""Count the instructions of products with one row (or few), and the share of a copy's bandwidth that they allow.

    benchmarks/count_instructions.py                        # every type, one column, an H200
    benchmarks/count_instructions.py --types Q4_K IQ1_S --columns 8 --kernel up_gate --show
    benchmarks/count_instructions.py --layer                # the bound of every matrix of a layer of Qwen3-30B-A3B

Evidence without a GPU: mat_vec is compiled (NVRTC) and disassemble (nvdisasm from a CUDA toolkit, or pip
install nvidia-cuda-nvdisasm); the instructions of its main loop are counted by pipe and divided by the parts of
32 weights that a lane computes per iteration. A multiprocessor starts per clock:

    issue   4 instructions of any kind
    ALU     2: logic, shifts, integer additions and comparisons, byte permutations
    IMAD    2: integer multiplications and byte products (IDP)
    FMA     4: these and f32 arithmetic
    tensor  0.5: byte products of 16 x 8 x 32, as of sm_80; sm_90 may start more, sm_86 and sm_89 start half as many
    XU      0.5: conversions outside the ALU, population counts
    LSU     1 wavefront of 128 bytes, of loads from shared or global memory or copies between them

A wavefront is one access to shared memory: at best a word for each of 32 lanes. Words of a grid are at random in its 32
banks, so some lanes conflict: the mean number of wavefronts is sampled. All other accesses are assumed to be free of
conflicts. Percentages are shares of the budget when weights are read at --least of a copy's bandwidth.

The bound is the share of a copy's bandwidth (read plus write) at which packed weights could be read if only the busiest
pipe mattered: an upper bound, without cache latency and the start and end of rows.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from results import parse_options, record_output

from quantkit.kernels.cuda.core.compile import compile_module
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.matmul import mat_vec, mat_vec_same_input
from quantkit.kernels.formats import BLOCK_TYPES, format_of
from quantkit.kernels.parameters import Activation
from quantkit.types import BY_NAME, TensorType

#: Opcodes by pipe; all others take an issue slot only.
PIPES = {
    "ALU": "BMSK FMNMX FSEL FSETP I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT SHF VIADD "
    "VIADDMNMX VIMNMX VABSDIFF",
    "IMAD": "IMAD IDP",
    "FMA": "IMAD IDP FADD FFMA FMUL HADD2 HFMA2 HMUL2",
    "XU": "BREV F2F F2I FLO FRND I2F MUFU POPC",
    "tensor": "IMMA",
}
#: Warp instructions that a multiprocessor issues per clock, by pipe.
RATES = {"issue": 4.0, "ALU": 2.0, "IMAD": 2.0, "FMA": 4.0, "XU": 0.5, "tensor": 0.5, "LSU": 1.0}


@dataclass(frozen=True)
class Gpu:
    multiprocessors: int
    gigahertz: float
    copy: float  # terabytes a second

    def share(self, part_bytes: float, clocks: float) -> float:
        """Return the share of a copy's bandwidth if a warp's 32 parts of ``part_bytes`` take ``clocks``."""
        if not clocks:
            return math.inf
        return 32 * part_bytes / clocks * self.multiprocessors * self.gigahertz / (1000 * self.copy)


@dataclass(frozen=True)
class Counts:
    """Registers of a kernel, and the instructions of its main loop by pipe, for a part of 32 weights."""

    registers: int
    rows: int
    by_pipe: dict[str, float]
    opcodes: Counter[str]

    @property
    def clocks(self) -> dict[str, float]:
        return {pipe: n / RATES[pipe] for pipe, n in self.by_pipe.items()}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", nargs="+", default=[t.name for t in BLOCK_TYPES], metavar="TYPE")
    p.add_argument("--columns", type=int, default=1, help="rows of activations (default: 1)")
    p.add_argument("--kernel", choices=("mul_mat", "up_gate"), default="mul_mat")
    p.add_argument("--shape", type=int, nargs=2, default=(4096, 1 << 18), metavar=("IN", "OUT"), help="matrix shape")
    p.add_argument("--layer", action="store_true", help="a token's matrices of a layer of Qwen3-30B-A3B, all of a type")
    p.add_argument("--capability", type=int, default=90, help="compute capability (default: 90)")
    p.add_argument("--multiprocessors", type=int, default=132)
    p.add_argument("--clock", type=float, default=1.98, metavar="GHZ", help="under load (default: 1.98)")
    p.add_argument("--copy", type=float, default=4.3, metavar="TB/S", help="bandwidth of a copy (default: 4.3)")
    p.add_argument("--least", type=float, default=60, metavar="PERCENT", help="mark bounds below this (default: 60)")
    p.add_argument("--nvdisasm", default=shutil.which("nvdisasm"), metavar="PROGRAM", help="default: from PATH")
    p.add_argument("--show", action="store_true", help="also list the opcodes of each type")
    return p


def operation_of(kernel: str, t: TensorType, n_in: int, n_out: int, columns: int) -> Kernel:
    if kernel == "up_gate":
        return mat_vec.up_gate(t, Activation("silu"), n_in, n_out, columns).kernel
    return mat_vec.mul_mat(t, n_in, n_out, columns).kernel


def layer_products(t: TensorType) -> dict[str, tuple[Kernel, int]]:
    """Return the products of a token in a layer of Qwen3-30B-A3B, with their numbers of weights."""
    silu, used = Activation("silu"), 8
    return {
        "up and gate": (mat_vec.up_gate_id(t, silu, 2048, 768, 1, used).kernel, 2 * used * 768 * 2048),
        "down": (mat_vec.mul_mat_id(t, 768, 2048, 1, used).kernel, used * 2048 * 768),
        "q, k, v": (mat_vec_same_input.mul_mats((t, t, t), 2048, (4096, 512, 512)).kernel, 5120 * 2048),
        "attention's output": (mat_vec.mul_mat(t, 4096, 2048).kernel, 2048 * 4096),
    }


def disassemble(code: bytes, nvdisasm: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(text: str, kernel: str) -> Iterator[list[str]]:
    """Yield the instructions of every loop of a kernel, including all its branches."""
    body = text.split(f".text.quantkit_{kernel}:")[1].split("\n\t.section")[0]
    lines, labels = list[str](), dict[str, int]()
    for line in body.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{ )?(.*?);", line):
            lines.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1].strip()))
            if (branch := re.search(r"BRA.*`\((\.L_\w+)\)", lines[-1])) and branch[1] in labels:
                yield lines[labels[branch[1]] :]


def main_loop(text: str, kernel: Kernel) -> list[str]:
    """Return the longest loop with byte products, or with float products if there is none."""
    all_loops = list(loops(text, kernel.name))
    products = [loop for loop in all_loops if any(line.startswith(("IDP", "IMMA")) for line in loop)]
    candidates = products or [loop for loop in all_loops if any(line.startswith("FFMA") for line in loop)]
    return max(candidates, key=lambda loop: len(loop))


def wavefronts(instruction: str) -> float:
    """Return the wavefronts of a load or copy without conflicts: a warp's bytes / 128."""
    name = instruction.split()[0].split(".")
    if name[0] not in ("LDS", "LDG", "STS", "STG", "LDGSTS", "SHFL", "LD", "ATOMS"):
        return 0
    return 4 if "128" in name else 2 if "64" in name else 1


def mean_wavefronts(words: int, capability: int) -> float:
    """Return the mean number of wavefronts of 32 lanes that read random words of a grid, including its copies."""
    rng = np.random.default_rng(0)
    copies = 4096 // words if words <= 512 and capability in (80, 90, 100) else 1  # Copies of dot_forms.cuh
    draws = rng.integers(0, words, (2000, 32)) * copies + np.arange(32) % copies
    return float(np.mean([np.bincount(np.unique(draw) % 32, minlength=32).max() for draw in draws]))


def lookups(t: TensorType) -> tuple[int, int]:
    """Return the words of a grid that 32 weights need, and the words of the grid."""
    words = format_of(t).grid
    return (8 if t.name.startswith("IQ3") else 4) if words else 0, max(1, words)


def count(kernel: Kernel, t: TensorType, capability: int, nvdisasm: str) -> Counts:
    code, log = compile_module(kernel, capability, "--ptxas-options=-v")
    loop = main_loop(disassemble(code, nvdisasm), kernel)
    opcodes = Counter(line.split()[0].split(".")[0] for line in loop)
    macros = dict(kernel.defines)
    rows = int(macros["ROWS"]) * (2 if "ACTIVATION" in macros else 1)
    rows *= format_of(t).blocks_per_lane
    match = re.search(rf"quantkit_{kernel.name}'.*?Used (\d+) registers", log, re.S)
    n_lookups, words = lookups(t)

    by_pipe = {pipe: sum(opcodes[name] for name in names.split()) / rows for pipe, names in PIPES.items()}
    extra = n_lookups * (mean_wavefronts(words, capability) - 1) if n_lookups else 0
    by_pipe |= {"issue": len(loop) / rows, "LSU": sum(map(wavefronts, loop)) / rows + extra}
    return Counts(int(match[1]) if match else 0, rows, by_pipe, opcodes)


def print_layers(names: list[str], gpu: Gpu, options: argparse.Namespace) -> None:
    """Print the bound of each product of a layer, and of all in sequence; none is above a copy's bandwidth."""
    heads = list(layer_products(BY_NAME["Q4_K"]))
    print(f"| type | {' | '.join(heads)} | all |\n|{'---|' * (2 + len(heads))}")
    for t in map(BY_NAME.__getitem__, names):
        shares, took, weights = [], 0.0, 0
        for kernel, n in layer_products(t).values():
            clocks = max(count(kernel, t, options.capability, options.nvdisasm).clocks.values())
            shares.append(gpu.share(t.block_bytes * 32 / t.block, clocks))
            took, weights = took + n / min(shares[-1], 1), weights + n
        bound = 100 * weights / took
        cells = (
            t.name,
            *(f"{100 * share:.0f} %" for share in shares),
            f"{bound:.0f} %{' <' * (bound < options.least)}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    options = parse_options(parser())
    if options.nvdisasm is None:
        sys.exit("nvdisasm not found in PATH: pip install nvidia-cuda-nvdisasm, then give --nvdisasm PROGRAM")
    gpu = Gpu(options.multiprocessors, options.clock, options.copy)
    if options.layer:
        print_layers(options.types, gpu, options)
        return
    pipes = ("issue", "ALU", "IMAD", "tensor", "LSU")
    print(f"| type | bytes | rows | registers | {' | '.join(pipes)} | busiest | bound |\n|{'---|' * (6 + len(pipes))}")
    for name in options.types:
        t = BY_NAME[name]
        part_bytes = t.block_bytes * 32 / t.block
        n_in, n_out = options.shape
        kernel = operation_of(options.kernel, t, n_in, n_out, options.columns)
        counts = count(kernel, t, options.capability, options.nvdisasm)
        busiest = max(counts.clocks, key=counts.clocks.__getitem__)
        bound = 100 * gpu.share(part_bytes, counts.clocks[busiest])
        shares = [
            f"{counts.by_pipe[p]:.1f} {options.least / gpu.share(part_bytes, counts.clocks[p]):.0f} %" for p in pipes
        ]
        cells = (name, f"{part_bytes:g}", counts.rows, counts.registers, *shares, busiest)
        mark = "" if bound >= options.least else " <"
        print("| " + " | ".join(map(str, cells)) + f" | {bound:.0f} %{mark} |", flush=True)
        if options.show:
            print("    " + ", ".join(f"{n} {opcode}" for opcode, n in counts.opcodes.most_common()), flush=True)


if __name__ == "__main__":
    record_output(main)
