"""Encoders of interleaved types: q8_k.cu; ik_llama.cpp's changes to rows that it interleaves: interleaved.cu.

    q8_k             x out n         Q8_K_R8 and Q8_K_R16, by groups of 8 or 16 rows; x and out 16-byte aligned
    write_ternary    x out rows n    rows of Q2_K that are almost ternary become that, without importance
    repeat_shifts    x out rows n    halves of zeros in groups of 4 rows of IQ1_M_ROW shift as those before

x: f32 [rows, n], finite; out: the rows' bytes. Details are in the CPU's encoders:
quantkit.kernels.cpu.encode.interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.kernels.cuda.encode import Rows
from quantkit.kernels.formats import INTERLEAVED_ENCODERS
from quantkit.types import BY_NAME, TensorType

#: Types of single rows that are changed after they are encoded: the kernel, rows of a block of threads, whether it also
#: applies with importance.
_CHANGED = {"Q2_K": ("write_ternary", 32, False), "IQ1_M_ROW": ("repeat_shifts", 4, True)}
#: Types whose importances are checked a second time: number of values of the sub-blocks.
GUARDED = {"IQ2_XXS": 32, "IQ2_XS": 16, "IQ2_S": 16, "IQ3_XXS": 32, "IQ3_S": 16, "Q6_0": 32}


def is_changed(t: TensorType) -> bool:
    """Return whether ik_llama.cpp may encode rows differently if it interleaves them."""
    return t.name in _CHANGED or t.name in GUARDED


def is_guarded(t: TensorType, weighted: bool) -> bool:
    """Return whether the importances of rows are checked again if ik_llama.cpp interleaves them."""
    return weighted and t.name in GUARDED


def changing_kernels(t: TensorType, weighted: bool) -> list[Kernel]:
    """Return the kernel that interleaves rows, if the type needs one."""
    name, _, always = _CHANGED.get(t.name, ("", 1, False))
    return [Kernel("encode/interleaved.cu", name)] if name and (always or not weighted) else []


def changing_launches(t: TensorType, r: Rows, weighted: bool) -> list[Launch]:
    """Return the launches that change encoded rows."""
    return [
        Launch(
            kernel,
            (max(1, -(-r.rows // _CHANGED[t.name][1])), 1, 1),
            kernel.block(x=r.x, out=r.out, rows=r.rows, n=r.n),
        )
        for kernel in changing_kernels(t, weighted)
    ]


def is_q8_k(t: TensorType) -> bool:
    """Return whether this module encodes the type."""
    return t.name in INTERLEAVED_ENCODERS


def q8_k_kernel(t: TensorType) -> Kernel:
    """Return the kernel that encodes a type."""
    return Kernel("encode/q8_k.cu", "q8_k").bind(ROWS=t.interleave)


def q8_k_launch(t: TensorType, r: Rows) -> Launch:
    """Return the launch that encodes rows."""
    kernel = q8_k_kernel(t)
    return Launch(kernel, (r.rows // t.interleave * (r.n // t.block), 1, 1), kernel.block(x=r.x, out=r.out, n=r.n))


def kernels() -> Iterator[Kernel]:
    """Yield every kernel of both files."""
    for name, _, _ in _CHANGED.values():
        yield Kernel("encode/interleaved.cu", name)
    yield from (q8_k_kernel(BY_NAME[name]) for name in INTERLEAVED_ENCODERS)
