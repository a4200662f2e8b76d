"""A file with a tensor of every type that has a big-endian form, and metadata of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantkit.formats.gguf import Field, ValueType, write_gguf
from quantkit.types import BY_NAME

#: Types that gguf_convert_endian.py of llama.cpp b11434 converts.
TYPES = ("F32", "F16", "BF16", "Q1_0", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "TQ2_0", "MXFP4", "NVFP4")


def write_all_types(path: Path) -> Path:
    """Write the file, little-endian, with random values."""
    random = np.random.default_rng(7)
    tensors = []
    for number, name in enumerate(TYPES):  # in the order that llama-quantize writes
        t, shape = BY_NAME[name], (256, 3, 2)
        data = random.integers(0, 64, t.tensor_bytes(shape), np.uint8)  # scales are finite
        if name in ("F32", "F16", "BF16"):
            data = random.standard_normal(256 * 6).astype("<f4")
            data = data.astype("<f2") if name == "F16" else (data.view("<u2")[1::2] if name == "BF16" else data)
        tensors.append((f"blk.{number:02}.{name.lower()}.weight", shape, t, np.ascontiguousarray(data)))
    fields = [
        Field.of("general.architecture", "llama"),
        Field.of("general.name", "Zażółć"),
        Field.of("test.bool", True),
        Field.of("test.u8", 200, ValueType.UINT8),
        Field.of("test.i16", -2, ValueType.INT16),
        Field.of("test.u64", 2**40, ValueType.UINT64),
        Field.of("test.f64", 0.1, ValueType.FLOAT64),
        Field.of("test.floats", [0.5, -1.25, 3.0]),
        Field.of("test.ints", [1, -2, 3]),
        Field.of("test.bools", [True, False]),
        Field.of("test.texts", ["a", "", "long " * 20]),
        Field.of("general.quantization_version", 2),
        Field.of("general.file_type", 7),
    ]
    write_gguf(path, fields, tensors)
    return path
