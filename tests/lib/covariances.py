"""Covariance files of made inputs, as ``imatrix --covariance`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quantkit.formats.gguf import Field, ValueType, write_gguf
from quantkit.types import BY_NAME, TensorType

F32 = BY_NAME["F32"]


def write_covariances(path: Path, entries: Mapping[str, tuple[float, ...]], seed: int = 0) -> Path:
    """Write covariances of 256 columns; ``entries``: tokens of each matrix by the names of the weights ("a: b")."""
    rng = np.random.default_rng(seed)
    tensors: list[tuple[str, tuple[int, ...], TensorType, bytes]] = []
    for line, tokens in entries.items():
        name = line.partition(":")[0]
        x = rng.standard_normal((len(tokens), 300, 256)) * np.exp(rng.standard_normal(256))
        x[..., 1:] += 0.7 * x[..., :-1]
        h = np.einsum("mti,mtj->mij", x, x).astype("<f4")
        tensors.append((f"{name}.cov", (256, 256, len(tokens)), F32, h.tobytes()))
        tensors.append((f"{name}.counts", (len(tokens),), F32, np.array(tokens, "<f4").tobytes()))
    lines = Field.of("quantkit.covariance.inputs", list(entries), ValueType.ARRAY, ValueType.STRING)
    write_gguf(path, [Field.of("general.type", "covariance"), lines], tensors)
    return path
