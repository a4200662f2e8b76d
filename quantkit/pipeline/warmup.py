"""The kernels of a plan, each called once on a row of zeros to load or compile it before the work begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from quantkit.kernels.first_run import Job
from quantkit.pipeline.encoding import Action, RowEncoding
from quantkit.pipeline.row_slices import PlannedTensor
from quantkit.types import TensorType


def kernel_calls(
    tensors: Iterable[PlannedTensor], measure: bool, elsewhere: Collection[str] = frozenset()
) -> list[Job]:
    """Return calls of all kernels that encoding ``tensors`` will run; ``measure``: and measuring the error.

    elsewhere: names of tensors that GPUs decode and encode, and the CPU only checks and measures.
    """
    parts = [(part.encoding, part.importance is not None, t.name) for t in tensors for part in t.parts]
    encodings = [encoding for encoding, _, _ in parts]
    changed = [encoding for encoding in encodings if encoding.action is Action.ENCODE]
    on_cpu = [(e, weighted) for e, weighted, name in parts if e.action is Action.ENCODE and name not in elsewhere]
    with_kernel = [(e, weighted) for e, weighted in on_cpu if e.custom is None]
    repacked = {(e.source, e.target): e for e in encodings if e.action is Action.REPACK}
    sources = dict.fromkeys(e.decoder_type for e in (changed if measure else [e for e, _ in on_cpu]))
    targets = dict.fromkeys(encoding.target for encoding in changed)
    encoders = dict.fromkeys((e.target, e.encoder, e.encoder == "ik" and weighted) for e, weighted in with_kernel)
    kept_grids = dict.fromkeys((e.source, e.target) for e in changed if e.keeps_grid)
    checked_types = dict.fromkeys(encoding.target for encoding in encodings if encoding.is_checked)
    return [
        *(partial(_encode, *arguments) for arguments in encoders),
        *(partial(_keep_grid, *types) for types in kept_grids),
        *(partial(_decode, t) for t in (sources | targets if measure else sources) if t.name != "F32"),
        *(partial(_repack, encoding) for encoding in repacked.values()),
        *(partial(_validate, t) for t in checked_types),
        *([_first_nonfinite] if on_cpu else []),
        *([_digest] if changed else []),
        *([_measure] if changed and measure else []),
    ]


def first_calls() -> list[Job]:
    """Return the call of a kernel that is nearly always needed; loading the first kernel also loads the compiler."""
    return [_first_nonfinite]


def _shape(t: TensorType) -> tuple[int, int]:
    """Return the rows and values of a small tensor."""
    return t.interleave, max(t.block, 256)


def _encode(t: TensorType, encoder_name: str, weighted: bool) -> None:
    """Encode as type ``t``; some of ik_llama.cpp's encoders have a separate kernel with importance."""
    from quantkit.kernels.cpu.encode import encoder

    rows, n = _shape(t)
    weights, out = np.ones(n if weighted else 0, np.float32), np.zeros((rows, t.row_bytes(n)), np.uint8)
    encoder(t, encoder_name)(np.zeros((rows, n), np.float32), weights, out, 0, rows)


def _keep_grid(source: TensorType, t: TensorType) -> None:
    from quantkit.kernels.cpu.encode.lattice_rows import keep_exact_blocks

    rows, n = _shape(t)
    x = np.full((rows, n), 1 / 3, np.float32)
    keep_exact_blocks(t, source, x, np.zeros((rows, t.row_bytes(n)), np.uint8))


def _decode(t: TensorType) -> None:
    from quantkit.kernels.cpu.unpack.dequantize import dequantize_rows

    rows, n = _shape(t)
    dequantize_rows(t, np.zeros((rows, t.row_bytes(n)), np.uint8), np.zeros((rows, n), np.float32))


def _repack(encoding: RowEncoding) -> None:
    from quantkit.kernels.cpu.interleave import deinterleave_rows, interleave_rows

    source, target = encoding.source, encoding.target
    plain = encoding.target_rows

    def rows(t: TensorType, interleaved: TensorType) -> npt.NDArray[np.uint8]:
        count, n = _shape(interleaved)
        return np.zeros((count, t.row_bytes(n)), np.uint8)

    if source is not encoding.source_rows:
        deinterleave_rows(source, rows(source, source), rows(plain, source), plain)
    if encoding.is_interleaved:
        interleave_rows(target, rows(plain, target), rows(target, target))


def _validate(t: TensorType) -> None:
    from quantkit.kernels.cpu.encode.check import validate_rows

    rows, n = _shape(t)
    validate_rows(t, np.zeros((rows, t.row_bytes(n)), np.uint8))


def _first_nonfinite() -> None:
    from quantkit.kernels.cpu.encode.check import first_nonfinite_row

    first_nonfinite_row(np.zeros((1, 256), np.float32), 0, 1)


def _digest() -> None:
    from quantkit.kernels.cpu.digest import digest_of

    digest_of(np.zeros(8, np.uint8))


def _measure() -> None:
    from quantkit.kernels.cpu.encode.check import error_sums

    x = np.zeros((1, 256), np.float32)
    error_sums(x, x, np.zeros(0, np.float32))
