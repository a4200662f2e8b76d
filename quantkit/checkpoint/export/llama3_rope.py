"""Rope of Llama 3: the parameters of config.json that give the factors of a file (``rope_freqs.weight``).

A frequency of wavelength w is divided by 1 if w < L / high, by F if w > L / low, and in between by f with

    1 / f = s + (1 - s) / F        s = (L / w - low) / (high - low)

so that 1 / f = a + b / w: two factors in between determine a and b, and F, the largest, the rest. Only L / low and high
/ low matter; low is 1 if that keeps L an integer. If several parameters fit, the usual ones are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.export.gguf_metadata import ModelMetadata
from quantkit.checkpoint.expressions import read_f32
from quantkit.checkpoint.row import Architecture
from quantkit.errors import FormatError, TypeNotSupported

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

FREQUENCIES = "rope_freqs.weight"
#: Candidates, the usual one first: the largest factor if no factor of the file has it, high, and L.
_FACTORS = (8.0, 32.0, 4.0, 16.0, 64.0)
_HIGHS = (4.0, 2.0, 8.0, 16.0, 1.0)
_LENGTHS = (8192, *(1 << n for n in range(3, 25) if n != 13))
#: Candidates for low, until L is an integer.
_LOWS = (1.0, 2.0, 3.0, 4.0, 5.0, 0.5, 8.0, 10.0)


def llama3_rope(meta: ModelMetadata, row: Architecture, config: Json) -> Json:
    """Return the parameters that give exactly the file's factors. Raises TypeNotSupported if there are none."""
    values = meta.model.data(FREQUENCIES).view(np.float32)
    base_config = {"rope_theta": 10000.0, "head_dim": 2 * values.size, **config}

    def make_factors(rope: Json) -> F32 | None:
        tried = Config(Path("config.json"), {**base_config, "rope_scaling": rope})
        try:
            factors = [t.x for t in row.synthetic(tried) if t.name_in_file == FREQUENCIES]
        except FormatError:  # high equals low, with a wavelength between them
            return None
        return read_f32(factors[0], 0, values.size) if factors else None

    # F is infinite and all are in between: factors are the wavelengths, except where rope rotates nothing.
    waves = make_factors(_rope(1e30, 1e-12, 1.0, 1))
    if waves is not None and waves.size == values.size:
        for factor, high, length in _solve(values[waves > 1].astype(np.float64), waves[waves > 1].astype(np.float64)):
            for rope in _round(factor, high, length):
                if (candidate_factors := make_factors(rope)) is not None and np.array_equal(candidate_factors, values):
                    return rope
    raise TypeNotSupported(
        f"{meta.path}: tensor {FREQUENCIES}: config.json of Llama 3 cannot express its factors", "QK-E305"
    )


def _rope(factor: float, low: float, high: float, length: int) -> Json:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _solve(values: F64, waves: F64) -> Iterator[tuple[float, float, float]]:
    """Yield F, high and L, for low 1, that may give the factors; measured values are not exact."""
    largest = float(values.max(initial=1.0))
    yield from _solve_with_factor(largest, values, waves)
    between = values != 1
    if between.sum() > 1:  # all may be in between, with F larger than all of them
        a, b = _line(1 / values[between], waves[between])
        for length in _LENGTHS:
            if (u := b / length) > 0 and a + u > 0 and (factor := 1 / (a + u)) > largest:
                yield from ((f, 1 + (1 - 1 / f) / u, length) for f in (round(factor), round(factor, 2), factor))
    for factor in (f for f in _FACTORS if f > largest):
        yield from _solve_with_factor(factor, values, waves)


def _solve_with_factor(factor: float, values: F64, waves: F64) -> Iterator[tuple[float, float, float]]:
    """Yield F, high and L, as ``_solve`` does, of one F."""
    between, span = (values != 1) & (values != factor), 1 - 1 / factor
    inverse, w = 1 / values[between], waves[between]
    if w.size > 1:
        a, b = _line(inverse, w)
        if (u := 1 / factor - a) > 0:
            yield factor, 1 + span / u, b / u
    elif w.size and span:
        s = float((inverse[0] - 1 / factor) / span)
        yield from ((factor, high, float(w[0]) * (s * (high - 1) + 1)) for high in _HIGHS)
        beyond = waves[values == factor].min(initial=16 * w[0])
        evenly = np.linspace(w[0], beyond, 18)[1:-1].round().tolist()
        lengths = (*(n for n in _LENGTHS if w[0] < n < beyond), *evenly)
        yield from ((factor, 1 + (length / float(w[0]) - 1) / s, length) for length in lengths if s > 0)
    else:
        last, first = waves[values == 1].max(initial=0.0), waves[values == factor].min(initial=np.inf)
        yield from ((factor, high, n) for high in _HIGHS for n in _LENGTHS if high * last < n < first)
        yield factor, 1.0, float(last + first) / 2 if first < np.inf else float(last) + 1


def _line(inverse: F64, waves: F64) -> tuple[float, float]:
    """Return a and b of 1 / f = a + b / w."""
    b = float((inverse[0] - inverse[-1]) / (1 / waves[0] - 1 / waves[-1]))
    return float(inverse[0]) - b / float(waves[0]), b


def _round(factor: float, high: float, length: float) -> Iterator[Json]:
    """Yield nearby parameters with an integer L, fewest digits first."""
    for low in _LOWS:
        rounded_length = round(length * low)
        if rounded_length < 1 or abs(rounded_length - length * low) > 1e-4 * rounded_length + 0.1:
            continue
        for digits in range(8):
            for n in (rounded_length, rounded_length + 1, rounded_length - 1):
                if n > 0:
                    yield _rope(factor, low, round(high * low, digits), n)
