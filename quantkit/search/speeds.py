"""Speed at which this machine reads weights of each type in generation: products with one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.cpus import available_cpus
from quantkit.errors import FormatError
from quantkit.formats.own_json import read_own_json
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.matmul import activations
from quantkit.kernels.cpu.matmul.matmul import (
    activation_format,
    cached_rows,
    mul_mat,
    products_of,
    row_bytes,
    scratch_bytes,
)
from quantkit.records import record
from quantkit.types import TensorType

#: Values of a row, and bytes of the matrix, which exceeds the caches.
_WIDTH, _BYTES = 4096, 128 << 20
#: Seconds of the measurement of a type; the fastest product is the result.
_SECONDS = 0.5
#: Maximum size of a table in bytes.
_MAX_BYTES = 1 << 20


def measure_speeds(
    types: Iterable[TensorType], *, threads: int | None = None, progress: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """Return GB/s by type name: of the fastest of several products of a matrix, larger than caches, with one row."""
    speeds, team = {}, Team(min(threads or available_cpus(), 62))
    for t in types:
        speeds[t.name] = _speed(team, t)
        progress(f"{t.name}: {speeds[t.name]:.1f} GB/s")
    return speeds


def read_speeds(path: Path) -> Mapping[str, float]:
    """Return GB/s by type name from a JSON file. Raises FormatError."""
    speeds: Mapping[str, float] = read_own_json(
        path, 'a table of GB/s by type, such as {"Q4_K": 18.5}', partial(record, Mapping[str, float]), _MAX_BYTES
    )
    if slow := [name for name, speed in speeds.items() if speed <= 0]:
        raise FormatError(f"{path}: the speed of {slow[0]} must be greater than 0", "QK-E203")
    return speeds


def _speed(team: Team, t: TensorType) -> float:
    rows = _BYTES // t.row_bytes(_WIDTH) // 256 * 256
    weights = np.full((rows, t.row_bytes(_WIDTH)), 0, np.uint8)  # written, so that the pages are not all the zero page
    tape, _keep = _product(team, t, weights)
    tape.run()  # compiled
    best, end = np.inf, time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        tape.run()
        best = min(best, time.perf_counter() - start)
    return weights.nbytes / best / 1e9


def _product(team: Team, t: TensorType, weights: npt.NDArray[np.uint8]) -> tuple[Tape, tuple[object, ...]]:
    """Return the product of weights with a row of ones, and the objects that must outlive it."""
    x, kind = np.ones((1, _WIDTH), np.float32), activation_format(t)
    batch, out = Batch(team, 1), np.empty((1, len(weights)), np.float32)
    batch.set(np.zeros(1, np.int32))
    stride, scratch_size = row_bytes(kind, _WIDTH), -(-scratch_bytes(t, _WIDTH) // 64) * 64
    rows = x if kind == "f32" else _align(stride)
    scratch = _align(scratch_size * team.threads)
    product = mul_mat.block(
        batch=batch.address, x=address_of(rows), x_stride=stride, w=address_of(weights), row_bytes=weights.shape[1],
        products=products_of(t), n_in=_WIDTH, n_out=len(weights), out=address_of(out), out_stride=4 * len(weights),
        rows_of=0, per=1, bias=0, scale=0, scratch=address_of(scratch), scratch_bytes=scratch_size,
        at_once=cached_rows(stride),
    )  # fmt: skip
    entries = [(mul_mat, product)]
    if kind != "f32":
        quantizer = activations.quantize(kind)
        block = quantizer.block(batch=batch.address, x=address_of(x), out=address_of(rows), n=_WIDTH, rows_of=0, per=1)
        entries.insert(0, (quantizer, block))
    return Tape(team, batch, entries), (x, out, rows, scratch)


def _align(n: int) -> npt.NDArray[np.uint8]:
    space = np.zeros(n + 64, np.uint8)
    start = -address_of(space) % 64
    return space[start : start + n]
