"""CUDA's unpackers against the reference decoders, to the bit: every type, awkward scales, any alignment of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from blocks import blocks_of, random_rows, row_scales
from device_memory import Memory

from quantkit.kernels import formats
from quantkit.kernels.cuda.core.kernel import Kernel, Shape
from quantkit.kernels.cuda.unpack import decoders, dequantize
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.reference import decode_rows as reference
from quantkit.types import BY_NAME, TensorType

UNPACK_TYPES = [t for t in formats.BLOCK_TYPES if t.name in decoders()]
#: All types in one module; the product compiles one for each type.
ALL = str(Path(__file__).parents[1] / "kernels/unpack_all.cu")
FLOATS = [record.type for record in FORMATS.values() if record.is_float]
INDEX = {t: i for i, t in enumerate([*UNPACK_TYPES, *FLOATS])}
SAMPLE_TYPES = {
    f"{name}(DO)": " ".join(f"DO({INDEX[t]}, {t})" for t in types)
    for name, types in (("EACH_TYPE", UNPACK_TYPES), ("EACH_FLOAT", FLOATS))
}

by_name = pytest.mark.parametrize("t", UNPACK_TYPES, ids=str)


def assert_same_bits(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Compare bits, so that 0.0 and -0.0 differ."""
    kind = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(kind), np.ascontiguousarray(expected).view(kind), strict=True)


def unpack(memory: Memory, t: TensorType, blocks: npt.NDArray[np.uint8], shared_grid: bool) -> Any:
    """Return levels [parts, 2, 16], scales and minimums [parts, 2] of blocks."""
    parts = len(blocks) * t.block // 32
    out = memory.allocate((parts, 12))
    slots = {"w": memory.put(blocks), "out": out, "blocks": len(blocks), "type": INDEX[t], "shared_grid": shared_grid}
    memory.run(Shape(Kernel(ALL, "unpack_all").bind(**SAMPLE_TYPES), (1, 1, 1)), **slots)
    words = memory.get(out, (parts, 12))
    return np.ascontiguousarray(words[:, :8]).view(np.int8).reshape(parts, 2, 16), words[:, 8:10], words[:, 10:]


@by_name
def test_levels_scales_and_minimums_decode_to_values(memory: Memory, t: TensorType, golden: Any) -> None:
    key = t.name if t.name in golden else f"{t.name}+imatrix"
    golden_rows = [golden[key][:2]] if key in golden else []  # none of a type of neither tree
    rows, record = np.concatenate([random_rows(t, 8, 1024, seed=1), *golden_rows]), FORMATS[t.name]
    for shared_grid in (False, True):
        levels, scales, mins = unpack(memory, t, blocks_of(t, rows), shared_grid)
        assert np.isnan(mins).all() == (not record.mins)
        if record.span > 16:
            assert_same_bits(scales[:, 0].copy(), scales[:, 1])
        values = (row_scales(t, rows).repeat(32, 0) * scales)[:, :, None] * levels.astype(np.float32)
        if record.mins:
            values = values - mins[:, :, None]
        assert_same_bits(values.reshape(len(rows), -1), reference(t, rows))


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("t", [*UNPACK_TYPES, *FLOATS], ids=str)
def test_rows_of_every_type(memory: Memory, t: TensorType) -> None:
    """Rows and tokens' rows; from an address that is aligned to no more than the type's blocks are."""
    n = {1: 77, 32: 96, 64: 192, 128: 384, 256: 768}[t.block]
    data = random_rows(t, 11, n, seed=3)
    want = reference(t, data)
    tokens, scale = np.array([10, 0, 3, 3, 7], np.int32), np.float32(0.7)
    w, ids = memory.put(data), memory.put(tokens)
    common = {"row_bytes": data.shape[1], "n": n, "out_stride": 4 * n, "type": INDEX[t]}
    run = Shape(Kernel(ALL, "write_all").bind(**SAMPLE_TYPES), (11 * -(-n // 32) // 256 + 1, 1, 1))
    out = memory.allocate((12, n))
    memory.run(run, w=w, out=out, rows=11, tokens=0, scale=1, **common)
    actual = memory.get(out, (12, n))
    assert_same_bits(actual[:11], want)
    assert np.isnan(actual[11]).all()
    out = memory.allocate((5, n))
    memory.run(run, w=w, out=out, rows=5, tokens=ids, scale=float(scale), **common)
    assert_same_bits(memory.get(out, (5, n)), want[tokens] * scale)


def bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    u = x.view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4", "F32"])
def test_kernels_of_one_type(memory: Memory, name: str) -> None:
    """As the product compiles them: f32, f16 and bf16, and the rows of tokens."""
    t, rows, n = BY_NAME[name], 37, 256
    data = random_rows(t, rows, n, seed=3)
    if name == "F32":  # what halves can hold, and beyond
        values = np.random.default_rng(1).standard_normal((rows, n)) * np.exp2(np.arange(n) % 40 - 22)
        data = values.astype(np.float32).view(np.uint8)
    want = reference(t, data)
    w, gap = memory.put(data), 32
    with np.errstate(over="ignore"):
        expected = {"f32": want, "f16": want.astype(np.float16), "bf16": bf16(want)}
    for output_index, kind in enumerate(dequantize.OUTPUTS):
        values = expected[kind]
        stride = values.itemsize * n + gap
        out = memory.allocate((rows, stride), np.uint8)
        run = dequantize.dequantize(t, n, rows)
        memory.run(run, w=w, row_bytes=data.shape[1], rows=rows, n=n, out=out, out_stride=stride, to=output_index)
        actual = memory.get(out, (rows, stride), np.uint8)
        assert_same_bits(np.ascontiguousarray(actual[:, :-gap]).view(values.dtype), values)
        assert (actual[:, -gap:] == 255).all()
    tokens = [5, 36, 0]
    out, batch = memory.allocate((3, n)), memory.batch(tokens, [0, 1, 2])
    slots = {"batch": batch, "w": w, "row_bytes": data.shape[1], "rows": 3, "n": n, "out": out, "out_stride": 4 * n}
    for by_position, rows_of_tokens in enumerate((tokens, [0, 1, 2])):
        memory.run(dequantize.embed(t, n, 3), **slots, scale=2.5, by_position=by_position)
        assert_same_bits(memory.get(out, (3, n)), want[rows_of_tokens] * np.float32(2.5))
