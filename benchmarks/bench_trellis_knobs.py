"""Measure the effect of each setting of the trellis search: IQ1_KT to IQ4_KT with one setting at its simplest value.

    benchmarks/bench_trellis_knobs.py                                   every type and setting; hours of compilation
    benchmarks/bench_trellis_knobs.py --types IQ3_KT --knobs fits final
    benchmarks/bench_trellis_knobs.py --model SmolLM2-135M-Instruct.Q4_1.gguf     rows of a real matrix, too

The error is the encoder's objective: sum(w (x - y)^2), with ik_llama.cpp's weights, relative to that of the current
settings, for each kind of rows without and with importances; the table has the smallest and the largest ratio. The time
is CPU time of one thread: both encoders take turns, --rounds times, and the ratio of medians is reported, for rows of
4096 normal values and for all kinds. Every encoder is compiled first: settings are compile-time constants.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from results import parse_options, record_output

from quantkit.formats.gguf import open_gguf
from quantkit.kernels import dequantize
from quantkit.kernels.cpu.encode import Encoder
from quantkit.kernels.cpu.encode.trellis import encoder_with
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS, TrellisSettings
from quantkit.types import BY_NAME, TensorType

Rows = npt.NDArray[np.float32]
Change = Callable[[TrellisSettings], TrellisSettings]

NO_WEIGHTS: Rows = np.empty(0, np.float32)
INF = float("inf")


def setting(**values: Any) -> Change:
    """Return a function that changes fields of the settings."""
    return lambda settings: replace(settings, **values)


def search(name: str, **values: Any) -> Change:
    """Return a function that changes fields of a search."""
    return lambda settings: replace(settings, **{name: replace(getattr(settings, name), **values)})


def all_cells(name: str) -> Change:
    """Return a function that makes a search rank all cells; its scratch memory holds 64 lines of them."""

    def change(settings: TrellisSettings) -> TrellisSettings:
        fits = settings.codebooks * settings.points // 256 <= 64
        return search(name, families=())(settings) if fits else settings

    return change


#: Settings and their replacements: off, or the values of other types.
KNOBS: dict[str, Change] = {
    # fmt: off
    "first: all cells": all_cells("first"),
    "first: centers in 16 bits": search("first", coarse_centers=False),
    "first: points in 16 bits": search("first", coarse_points=False),
    "first: one scale": search("first", two_scales=False),
    "first: one codebook": search("first", codebooks=1),
    "first: 24 lines": search("first", lines=24),
    "first: as deep": lambda settings: replace(settings, first=settings.deep),
    "deep: centers in 8 bits": search("deep", coarse_centers=True),
    "deep: 48 lines": search("deep", cells=(16, 16, 16)),
    "retry: none": setting(retry=None),
    "retry: one scale": search("retry", two_scales=False),
    "final: none": setting(final=None),
    "final: 12 lines": search("final", lines=12),
    "light_searches: 1": setting(light_searches=1),
    "light_searches: 2": setting(light_searches=2),
    "deep_searches: 3": setting(deep_searches=3),
    "patient_deep_energy: none": setting(patient_deep_energy=1e30),
    "deep_if_unequal: no": setting(deep_if_unequal=False),
    "deep_if_unequal: yes": setting(deep_if_unequal=True),
    "deep_error: none": setting(deep_error=INF),
    "deep_error: 0.05": setting(deep_error=0.05),
    "scan_error: none": setting(scan_error=INF),
    "scan_error: 0.05": setting(scan_error=0.05),
    "short_row_factor: 1": setting(short_row_factor=1.0),
    "row_scales: 1": setting(row_scales=1),
    "row_scales: 4": setting(row_scales=4),
    "row_scale_gain: 1": setting(row_scale_gain=1.0),
    # fmt: on
}


def variants(settings: TrellisSettings) -> Iterator[tuple[str, TrellisSettings]]:
    """Yield settings with one change, if it changes the search."""
    for name, change in KNOBS.items():
        try:
            changed = change(settings)
        except (AttributeError, TypeError):  # for another kind of search, or for none
            continue
        if changed != settings:
            yield name, changed


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Sample:
    """Rows of a kind."""

    name: str
    x: Rows
    importance: Rows


def samples(model: Path | None, tensor: str, weights: int) -> list[Sample]:
    """Return rows of each kind, without and with importances, about ``weights`` values of each."""
    rng = np.random.default_rng(7)
    long, short = (weights // 4096, 4096), (weights // 256, 256)
    rows: dict[str, npt.NDArray[Any]] = {
        "gauss": rng.standard_normal(long),
        "t3": rng.standard_t(3, long),
        "outliers": rng.standard_normal(long) * np.where(rng.random(long) < 0.01, 8, 1),
        "gauss, 1024 columns": rng.standard_normal((weights // 1024, 1024)),
        "t3, 256 columns": rng.standard_t(3, short),
    }
    if model is not None:
        with open_gguf(model) as file:
            t = file.tensors[tensor]
            n = t.shape[0]
            real = dequantize(file.data(t).reshape(-1, t.type.row_bytes(n)), t.type, n)
            rows["model"] = real[:: max(1, len(real) * n // weights)] * 50
    return [
        Sample(f"{name}{suffix}", np.ascontiguousarray(0.02 * x, np.float32), importance)
        for name, x in rows.items()
        for suffix, importance in (("", NO_WEIGHTS), (" +imatrix", importances(x.shape[1])))
    ]


def importances(n: int) -> Rows:
    """Return importances with the spread of those of real models."""
    return np.exp(1.2 * np.random.default_rng(n).standard_normal(n)).astype(np.float32)


def weights_of(x: Rows, importance: Rows) -> npt.NDArray[np.float64]:
    """Return the weights of ik_llama.cpp's search, of rows without subnormal values."""
    values = x.astype(np.float64).reshape(len(x), -1, 256)
    square = (values**2).mean(2, keepdims=True)
    weights: npt.NDArray[np.float64] = square / 2 + values**2
    if importance.size:
        weights = importance.astype(np.float64).reshape(1, -1, 256) * np.sqrt(2 * square + values**2)
    return weights.reshape(x.shape)


def encode(encoder: Encoder, t: TensorType, sample: Sample) -> npt.NDArray[np.uint8]:
    """Return the rows' bytes."""
    out = np.empty((len(sample.x), t.row_bytes(sample.x.shape[1])), np.uint8)
    encoder(sample.x, sample.importance, out, 0, len(sample.x))
    return out


def error(t: TensorType, sample: Sample, data: npt.NDArray[np.uint8]) -> float:
    """Return the error that the encoder minimizes, over the energy."""
    weights = weights_of(sample.x, sample.importance)
    difference = sample.x - dequantize(data, t, sample.x.shape[1]).astype(np.float64)
    return float((weights * difference**2).sum() / (weights * sample.x.astype(np.float64) ** 2).sum())


def cpu_time(encoder: Encoder, t: TensorType, sample: Sample) -> float:
    """Return the CPU time of a call."""
    begin = time.thread_time()
    encode(encoder, t, sample)
    return time.thread_time() - begin


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """Ratios to the current settings: of errors and of CPU time, by kind of rows."""

    errors: dict[str, float]
    times: dict[str, float]

    def __str__(self) -> str:
        errors = sorted(self.errors.items(), key=lambda item: item[1])
        mean = statistics.geometric_mean(self.errors.values())
        times = statistics.geometric_mean(self.times.values())
        return (
            f"{mean:.4f} | {errors[0][1]:.4f} ({errors[0][0]}) | {errors[-1][1]:.4f} ({errors[-1][0]}) | "
            f"{self.times['gauss']:.3f} | {times:.3f} | {max(self.times.values()):.3f}"
        )


def compare(t: TensorType, standing: Encoder, changed: Encoder, rows: list[Sample], rounds: int) -> Figures:
    """Return the figures of an encoder relative to the current one."""
    errors, times = {}, {}
    for sample in rows:
        expected, actual = (error(t, sample, encode(encoder, t, sample)) for encoder in (standing, changed))
        errors[sample.name] = actual / expected
        pairs = [(cpu_time(standing, t, sample), cpu_time(changed, t, sample)) for _ in range(rounds)]
        before, after = zip(*pairs, strict=True)
        times[sample.name] = statistics.median(after) / statistics.median(before)
    return Figures(errors, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(TRELLIS_SETTINGS), choices=list(TRELLIS_SETTINGS))
    parser.add_argument("--knobs", nargs="+", help="only settings whose names begin with this")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--tensor", default="blk.10.ffn_down.weight", help="a matrix of it")
    parser.add_argument("--weights", type=int, default=32768, help="of each kind of rows")
    parser.add_argument("--rounds", type=int, default=7)
    options = parse_options(parser)
    rows = samples(options.model, options.tensor, options.weights)
    print("| type | setting | error | least | most | time, gauss | time | most |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.types:
        settings = TRELLIS_SETTINGS[name]
        standing = encoder_with(name, settings)
        for knob, changed in variants(settings):
            if options.knobs and not knob.startswith(tuple(options.knobs)):
                continue
            begin = time.process_time()
            figures = compare(BY_NAME[name], standing, encoder_with(name, changed), rows, options.rounds)
            print(f"| {name} | {knob} | {figures} |", flush=True)
            print(f"{name} {knob}: {time.process_time() - begin:.0f} s; {figures.errors}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    record_output(main)
