"""Measure the effect of each part of error feedback: omit or replace it, and leave everything else unchanged.

    benchmarks/feedback_ablations.py MODEL.gguf CALIBRATION EVALUATION [--presets Q4_K_M,Q2_K] [--text NAME=FILE ..]
                                     [--rows RE]

Rows of `--feedback` use covariances of the full-precision model and an importance matrix of the whole calibration text,
those of `--calibrate` go layer by layer. Ratios are to the importance matrix alone, token by token, with 95 %
intervals. Each --text is also used for calibration, up to --chunks. Parts are replaced by patching names of quantkit's
modules; a name that no longer exists ends the run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from feedback_kld import Comparison, Measurement, arguments, ratio
from processes import machine, work_folder
from results import parse_options, record_output

from quantkit.imatrix.covariance import Weighting, covariance
from quantkit.kernels.cpu.feedback import Rounding
from quantkit.kernels.cpu.feedback.sweeps import error_feedback, residuals
from quantkit.quantize import QuantizeOptions
from quantkit.sequential.inputs import StageInputs
from quantkit.sequential.streams import SpilledInput, Streams

Changes = Mapping[str, Any]

OPTIONS, METRIC, ROUNDING = (f"quantkit.kernels.cpu.feedback.{m}" for m in ("options", "metric", "rounding"))
#: Chunks of the calibration text.
TOKENS = (1_024, 10_240, 87_808)

FEEDBACK = "quantkit.pipeline.feedback"
CALIBRATE, INPUTS, STREAMS = (f"quantkit.sequential.{m}" for m in ("calibrate", "inputs", "streams"))


@dataclass(frozen=True)
class Row:
    """A row of the table: its changes, the text and number of chunks, and the weights of tokens in covariances."""

    name: str
    calibrate: bool = False
    changes: Changes = field(default_factory=dict)
    chunks: int | None = None
    text: Path | None = None
    weighting: Weighting = "both"
    options: Changes = field(default_factory=dict)


@contextmanager
def changed(changes: Changes) -> Iterator[None]:
    """Set names of modules, "module:name" or "module:class.name", within a context."""
    with ExitStack() as stack:
        for place, value in changes.items():
            module, _, name = place.partition(":")
            owner: Any = importlib.import_module(module)
            *path, name = name.split(".")
            for step in path:
                owner = getattr(owner, step)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def rounding(**options: Any) -> Changes:
    return {f"{OPTIONS}:Rounding": partial(Rounding, **options)}


def damping(value: float) -> Changes:
    return {f"{FEEDBACK}:DAMPING": value, f"{FEEDBACK}:FEW_TOKENS_DAMPING": value, f"{INPUTS}:DAMPING": value}


def order(permutation: Callable[[Any], Any]) -> Changes:
    """Visit columns in an order computed from their variances."""

    def visited(variances: Any, grouping: Any) -> Any:
        if grouping is not None:
            raise SystemExit("columns that are rounded together have a fixed order: use K types")
        return permutation(variances)

    return {f"{METRIC}:visited": visited}


def without_feedback(columns: Any, x: Any, u: Any, *arguments: Any) -> None:
    """Round every value independently, like error feedback with a covariance without correlations."""
    error_feedback(columns, x, np.zeros_like(u), *arguments)
    v, e, c = arguments[-3:]
    residuals(columns, x, v, u, e, c)


def no_correction(cross: Any, *_: Any) -> Any:
    return np.zeros_like(cross)


def unweighted(inputs: Callable[[Streams, int], list[SpilledInput]]) -> Callable[[Streams, int], list[SpilledInput]]:
    """Give every token of an expert the same weight."""
    return lambda streams, stage: [replace(s, weights=None) for s in inputs(streams, stage)]


def regardless_of_norms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Weight errors equally, without the divisor of the norm of the residual stream."""

    def count(self: StageInputs, tokens: Any) -> tuple[Any, Any]:
        total, counts = function(self, tokens)
        return total, np.ones_like(counts)

    return count


NO_SWEEPS: dict[str, int] = {"sweeps": 0, "most": 0}
NOT_BALANCED: Changes = {f"{CALIBRATE}:balance_factors": lambda *_: []}
NOT_ROUNDED = {f"{INPUTS}:rounded_inputs": lambda x: x}
NORMS = {f"{INPUTS}:StageInputs._targets": regardless_of_norms(StageInputs._targets)}
ONE_ROUND = {
    "quantkit.pipeline.worker:rounding_of": lambda _: Rounding(
        extra_rounds=0, neighbour_scales=False, sweeps=0, max_sweeps=0
    )
}
TARGET = {f"{INPUTS}:times_inverse": no_correction}
PLAIN_EMBEDDINGS = {f"{FEEDBACK}:_is_read_by_row": lambda *_: False}
PLAIN_ROUTERS = {f"{FEEDBACK}:Feedback.lookup_corrected": lambda *_: None}
UNWEIGHTED = {f"{STREAMS}:Streams.inputs": unweighted(Streams.inputs)}
NATURAL = order(lambda variances: np.arange(len(variances)))
#: GPTQ as published: inputs of the layers quantized so far, not balanced, outputs not corrected, equal weights of
#: tokens, columns in file order, damping 0.01, one round, initial scales.
GPTQ = {
    **TARGET, **PLAIN_ROUTERS, **PLAIN_EMBEDDINGS, **NOT_BALANCED, **NOT_ROUNDED, **UNWEIGHTED, **NORMS, **NATURAL,
    **damping(0.01), f"{INPUTS}:METRIC_DAMPING": 0.0, **ONE_ROUND,
}  # fmt: skip


def rows(texts: Mapping[str, Path]) -> Iterator[Row]:
    """Yield the rows of the table."""
    yield Row("feedback")
    yield Row("feedback: levels by sweeps alone, scales kept", changes={
        f"{ROUNDING}:feed": without_feedback, **rounding(fits=False)})  # fmt: skip
    yield Row("feedback: fed once, no sweeps", changes=rounding(**NO_SWEEPS))
    yield Row("feedback: fed and swept, scales kept", changes=rounding(fits=False))
    yield Row("feedback: not fed, swept, scales fitted", changes={f"{ROUNDING}:feed": without_feedback})
    yield Row("feedback: a round more", changes=rounding(rounds=2))
    yield Row("feedback: embeddings by the reference", changes=PLAIN_EMBEDDINGS)
    yield Row("feedback: tokens of an expert alike", weighting="tokens")
    yield Row("feedback: columns as they come", changes=NATURAL)
    yield Row("feedback: columns of low variance first", changes=order(lambda v: np.argsort(v, kind="stable")))
    for value in (1e-4, 1e-3, 0.1, 0.3, 1.0):
        yield Row(f"feedback: damping {value:g}", changes=damping(value))
    yield from calibrated_on("feedback", texts)
    yield Row("calibrate", True)
    yield Row("calibrate: not balanced", True, NOT_BALANCED)
    yield Row("calibrate: balanced by half of the differences", True, {"quantkit.sequential.balance:SHARE": 0.5})
    yield Row("calibrate: damped as balanced alone", True, {f"{INPUTS}:DAMPING": 0.0, f"{INPUTS}:METRIC_DAMPING": 0.1})
    yield Row("calibrate: inputs not rounded", True, NOT_ROUNDED)
    yield Row("calibrate: tokens regardless of norms", True, NORMS)
    yield Row("calibrate: narrow matrices rounded twice", True, {f"{FEEDBACK}:_AGAIN": 1})
    yield Row("calibrate: targets not corrected", True, {**TARGET, **PLAIN_ROUTERS})
    yield Row("calibrate: GPTQ", True, GPTQ)
    yield Row("calibrate: residual stream left alone", True, {f"{INPUTS}:RESIDUAL": 0.0})
    yield Row("calibrate: the whole residual", True, {f"{INPUTS}:RESIDUAL": 1.0})
    yield Row("calibrate: routers left alone", True, PLAIN_ROUTERS)
    yield Row("calibrate: fed once, no sweeps", True, rounding(**NO_SWEEPS))
    yield Row("calibrate: tokens of an expert alike", True, UNWEIGHTED)
    yield Row("calibrate: embeddings by the reference", True, PLAIN_EMBEDDINGS)
    for value in (0.02, 0.3):
        yield Row(f"calibrate: damping {value:g}", True, damping(value))
    for value in (0.01, 0.3):
        yield Row(f"calibrate: target's damping {value:g}", True, {f"{INPUTS}:TARGET_DAMPING": value})
    yield from calibrated_on("calibrate", texts)


def calibrated_on(variant: str, texts: Mapping[str, Path]) -> Iterator[Row]:
    """Yield rows with fewer and with more tokens, and with other texts."""
    for tokens in TOKENS:
        yield Row(f"{variant}: {tokens} tokens", variant == "calibrate", chunks=tokens)
    for name, path in texts.items():
        yield Row(f"{variant}: text: {name}", variant == "calibrate", text=path)


class Ablations:
    """Quantizes and measures rows."""

    def __init__(self, compared: Comparison) -> None:
        self.compared, self.args, self.folder = compared, compared.args, compared.folder
        self._variants = compared.variants()

    def _options(self, row: Row) -> QuantizeOptions:
        text = row.text or self.args.calibration
        chunks = self.args.chunks if row.chunks is None else row.chunks // self.args.ctx
        if row.calibrate:
            return replace(self._variants["calibrate"], calibrate=(text,), calibrate_chunks=chunks, **row.options)
        if (row.text, row.chunks, row.weighting) == (None, None, "both"):
            return self._variants["feedback"]
        path, text_options = self.folder / "other-cov.gguf", replace(self.compared.text, chunks=chunks, overwrite=True)
        covariance(self.args.model, [text], path, options=text_options, weighting=row.weighting)
        return replace(self._variants["feedback"], feedback=path)

    def reference(self, preset: str) -> Measurement:
        return self.compared.make(preset, self._variants["imatrix"])

    def measure(self, row: Row, presets: list[str]) -> list[Measurement]:
        options = self._options(row)
        with changed(row.changes):
            return [self.compared.make(preset, options) for preset in presets]


def main() -> None:
    p = arguments()
    p.set_defaults(presets="Q4_K_M,Q2_K", tensor_type=[])
    p.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="also calibrate on this")
    p.add_argument("--rows", default="", metavar="RE", help="only rows whose name matches")
    args = parse_options(p)
    presets = args.presets.split(",")
    texts = {name: Path(path) for name, path in (pair.split("=", 1) for pair in args.text)}
    print(machine(), flush=True)
    with work_folder(None) as folder:
        ablations = Ablations(Comparison(args, folder))
        first = [ablations.reference(preset) for preset in presets]
        print(f"| | {' | ratio | '.join(presets)} | ratio |\n|---|{'---|' * (2 * len(presets))}")
        print("| imatrix | " + " | | ".join(m.text for m in first) + " | |", flush=True)
        for row in rows(texts):
            if not re.search(args.rows, row.name):
                continue
            measurements = ablations.measure(row, presets)
            cells = [c for m, base in zip(measurements, first, strict=True) for c in (m.text, ratio(m, base))]
            print(f"| {row.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    record_output(main)
