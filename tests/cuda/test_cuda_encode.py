"""Encoders on the device: the CPU's bytes, for every type that has one, and the golden ones."""

from __future__ import annotations

import numpy as np
import pytest
from device_memory import Memory
from ptx.device import PTXDevice
from refusals import refuses
from type_params import SEARCHED

from edge_rows import NO_WEIGHTS, awkward_imatrix, awkward_rows, within_reach
from edge_rows import encode as on_cpu
from quantkit.errors import TypeNotSupported
from quantkit.kernels.cpu.interleave import interleave_rows
from quantkit.kernels.cuda.core.kernel import SOURCES
from quantkit.kernels.cuda.encode import SEARCHES, struct_of, trellis
from quantkit.kernels.cuda.encode.encode import Rows, encode, encode_rows, encoders, working_bytes
from quantkit.kernels.cuda.encode.interleaved import is_changed
from quantkit.kernels.formats import FORMATS, INTERLEAVED_ENCODERS
from quantkit.kernels.interleave import BASES, base_of
from quantkit.types import BY_NAME, TensorType

TYPES = [BY_NAME[name] for name in encoders()]
#: All encoders: types, and by whose search.
ENCODERS = [(BY_NAME[name], search) for search in SEARCHES for name in encoders(search)]


def on_device(
    memory: Memory, t: TensorType, x: np.ndarray, weights: np.ndarray, search: str = "", interleaved: bool = False
) -> np.ndarray:
    """Encode rows; what is before and after the bytes must stay as it was."""
    rows, n = x.shape
    size = rows * t.row_bytes(n)
    out, work = memory.allocate((size + 64,), np.uint8), memory.allocate((working_bytes(t, rows, n),), np.uint8)
    importance = memory.put(weights) if weights.size else 0
    r = Rows(memory.put(x), rows, n, out, importance, work)
    encode_rows(memory.device, t, r, search=search, interleaved=interleaved)
    actual = memory.get(out, (size + 64,), np.uint8)
    assert (actual[size:] == 255).all()
    return actual[:size].reshape(rows, -1)


@pytest.mark.parametrize(("t", "search"), ENCODERS, ids=str)
def test_bytes_equal_the_cpus(memory: Memory, t: TensorType, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of every awkward kind; lanes of the last block of threads idle, or blocks take some rows each.

    Searches take seconds: every third row of these, in turns for each way. As PTX, where the shim's bytes are known,
    three rows for each way.
    """
    searched, as_ptx = t in SEARCHED, type(memory.device) is PTXDevice
    blocks = 1 if searched else 2 if FORMATS[t.name].grid else 3
    n = blocks * max(t.block, 32)
    at_once = 2 if as_ptx else 6
    monkeypatch.setattr(trellis, "_WORK", at_once * trellis.trellis_working_bytes(t, 1, n) if searched else 0)
    for i, weights in enumerate((NO_WEIGHTS, awkward_imatrix(n, 5))):
        selection = slice(None) if not searched else slice(9 * i, None, 18) if as_ptx else slice(3 * i, None, 6)
        x = within_reach(t, awkward_rows(n, 5)[selection], weights)
        np.testing.assert_array_equal(on_device(memory, t, x, weights, search), on_cpu(t, x, weights, search or None))


@pytest.mark.parametrize("device", ["host"], indirect=True)
@pytest.mark.parametrize(("t", "search"), ENCODERS, ids=str)
def test_nonfinite_values_do_not_cause_invalid_accesses(memory: Memory, t: TensorType, search: str) -> None:
    """Rows are refused when they have been encoded: nothing may be read or written elsewhere for them."""
    n = max(t.block, 64)
    x = np.random.default_rng(9).standard_normal((4, n)).astype(np.float32)
    x[0, ::7], x[1, 5], x[1, n // 2], x[2], x[3, ::2] = np.nan, np.nan, -np.inf, np.nan, np.inf
    for weights in (awkward_imatrix(n, 5),) if t.imatrix == "required" else (NO_WEIGHTS, awkward_imatrix(n, 5)):
        assert len(on_device(memory, t, x, weights, search)) == 4


USUAL = [(t, search) for t, search in ENCODERS if search or (t.family in ("k_quant", "legacy") and not t.row_header)]


@pytest.mark.parametrize(("t", "search"), USUAL, ids=str)
def test_warps_of_ordinary_values(memory: Memory, t: TensorType, search: str) -> None:
    """Where no lane of a warp has awkward values, shorter ways are taken, and candidates skipped.

    A few values among zeros are fitted so well that errors of candidates differ by their rounding only.
    """
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((4, 2048)) * [[0.02], [1.0], [1e-3], [40.0]]).astype(np.float32)
    x[0, 1024:] *= rng.random(1024) < 0.3
    x[3] = np.rint(x[3])
    importance = np.exp(rng.standard_normal(2048)).astype(np.float32)
    for weights in (importance,) if t.imatrix == "required" else (NO_WEIGHTS, importance):
        np.testing.assert_array_equal(on_device(memory, t, x, weights, search), on_cpu(t, x, weights, search or None))


@pytest.mark.parametrize("t", [t for t in TYPES if t.row_header], ids=str)
def test_rows_longer_than_a_thread_block(memory: Memory, t: TensorType) -> None:
    """The scale of a row, and sums over it, are of all its parts. Where these are searched, one row for each way.

    Trellis types try several scales of the second row, as few parts make most of its error, but one of the first.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 2304)).astype(np.float32)
    x[1] *= np.exp(rng.standard_normal(72)).repeat(32)
    for i, weights in enumerate((NO_WEIGHTS, awkward_imatrix(2304, 4))):
        rows = x[i : i + 1] if t in SEARCHED else x
        np.testing.assert_array_equal(on_device(memory, t, rows, weights), on_cpu(t, rows, weights, None))


@pytest.mark.parametrize("t", SEARCHED, ids=str)
def test_search_settings_depend_on_the_row(memory: Memory, t: TensorType) -> None:
    """Short and even; of unequal weights; uneven, where several scales are tried, all points ranked for some groups."""
    rng = np.random.default_rng(5)
    unequal = np.exp(2 * rng.standard_normal(768)).astype(np.float32)
    outliers = np.where(rng.random((1, 256)) < 0.03, 8, 1)
    for n, factor, weights in ((512, 1, NO_WEIGHTS), (768, 1, unequal), (256, outliers, NO_WEIGHTS)):
        x = (rng.standard_normal((1, n)) * factor).astype(np.float32)
        np.testing.assert_array_equal(on_device(memory, t, x, weights), on_cpu(t, x, weights, None))


@pytest.mark.parametrize("t", [t for t in TYPES if t.in_files], ids=str)
def test_golden_bytes(memory: Memory, t: TensorType, golden: dict[str, np.ndarray]) -> None:
    x, weights = golden["x"], golden["imatrix"]
    for name, w in ((t.name, NO_WEIGHTS), (f"{t.name}+imatrix", weights)):
        if name in golden and t not in SEARCHED:
            np.testing.assert_array_equal(on_device(memory, t, x, w).ravel(), golden[name].ravel())


def interleaved_rows(t: TensorType, weights: np.ndarray) -> np.ndarray:
    """Return rows of 512 values that ik_llama.cpp changes: ternary, halves of zeros, products near 0."""
    rng, rows = np.random.default_rng(6), 48
    x = (rng.standard_normal((rows, 512)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)
    x[::3] = rng.integers(-1, 2, x[::3].shape) * x[::3, :1]
    x[::6] *= np.where(rng.random(x[::6].shape) < 0.1, np.float32(1.1), 1)
    x[1::3] *= (rng.random((16, 32)) < 0.6).repeat(16, axis=1)
    x[2::6, 128:] *= np.where(rng.random((8, 12)) < 0.5, np.float32(1e-10), 1).repeat(32, axis=1)
    return within_reach(t, x, weights)


@pytest.mark.parametrize("t", [t for t in map(BY_NAME.__getitem__, BASES) if is_changed(base_of(t))], ids=str)
def test_interleaved_rows_equal_iks(memory: Memory, t: TensorType) -> None:
    """As those of the CPU, which are ik_llama.cpp's, and others than those of the base type."""
    base = base_of(t)
    search = "ik" if base.name in encoders("ik") else ""
    changed = 0
    for weights in (NO_WEIGHTS, awkward_imatrix(512, 5)):
        if not weights.size and base.imatrix == "required":
            continue
        x = interleaved_rows(base, weights)
        actual, expected = np.empty((len(x), t.row_bytes(512)), np.uint8), on_cpu(t, x, weights, "ik")
        interleave_rows(t, on_device(memory, base, x, weights, search, True), actual)
        np.testing.assert_array_equal(actual, expected)
        interleave_rows(t, on_cpu(base, x, weights, "ik"), actual)
        changed += int((actual != expected).sum())
    assert changed


@pytest.mark.parametrize("t", [BY_NAME[name] for name in INTERLEAVED_ENCODERS], ids=str)
def test_groups_of_rows_like_activations(memory: Memory, t: TensorType) -> None:
    """Where values are so small that 127 divided by the largest overflows, too."""
    x = awkward_rows(512, 5)[:32]
    np.testing.assert_array_equal(on_device(memory, t, x, NO_WEIGHTS), on_cpu(t, x, NO_WEIGHTS))
    with refuses(TypeNotSupported, "QK-E302 512", t.name):
        on_device(memory, t, x[:1], NO_WEIGHTS)


def test_every_encoder_is_in_its_types_file() -> None:
    """That of the CPU's encoder, and of the unpacker."""
    for t, search in ENCODERS:
        file = encoders(search)[t.name]
        assert (SOURCES / "unpack" / file).exists()
        twin = SOURCES.parent / "cpu/encode" / file.replace(".cuh", ".py")
        assert f"{struct_of(t, search).replace('Encode', 'encode_').lower()} " in twin.read_text().replace("(", " ")
        assert f'#include "encode/{file}"' in (SOURCES / "encode/all.cuh").read_text()


def test_unsupported_types_are_refused() -> None:
    with refuses(TypeNotSupported, "QK-E302 33 Q4_0"):
        encode(BY_NAME["Q4_0"], 1, 33)
