"""The plan of ``--calibrate``: the text, and the tensors whose inputs it covers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, ResourceError
from quantkit.evaluate.passes import bos_of
from quantkit.formats.gguf import ValueType
from quantkit.formats.remote import URL
from quantkit.imatrix.collect import chunks_of
from quantkit.model.engine import load
from quantkit.model.observers import every_token, inputs
from quantkit.model.ops import Embed
from quantkit.names import span
from quantkit.options.imatrix import ImatrixOptions
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.sequential.balance import BalancedSource, balance_factors
from quantkit.sequential.executor import SequentialExecutor
from quantkit.sequential.inputs import DAMPING, METRIC_DAMPING, RESIDUAL, TARGET_DAMPING, StageInputs
from quantkit.sequential.streams import Tokens

#: Tokens per batch of a stage.
_BATCH = 2048


@dataclass(frozen=True)
class Calibration:
    """Texts and conversations (JSON Lines files), in at most ``chunks`` chunks of ``n_ctx`` tokens.

    balance: equalize activations first (balance.py).
    """

    files: tuple[Path, ...]
    n_ctx: int = 512
    chunks: int | None = None
    balance: bool = False

    @property
    def texts(self) -> list[Path]:
        return [f for f in self.files if f.suffix != ".jsonl"]

    @property
    def conversations(self) -> list[Path]:
        return [f for f in self.files if f.suffix == ".jsonl"]


class CalibrationInputs:
    """The inputs that a calibration will record; implements ``pipeline.feedback.InputProvider``.

    Raises ResourceError for a model that is not on this machine, and errors of reading texts.
    """

    corrects = True
    path = None

    def __init__(self, model: Path, calibration: Calibration) -> None:
        if isinstance(model, URL):
            raise ResourceError(
                f"{model}: --calibrate runs the model, which needs a local file: copy it first", "QK-E412"
            )
        self.model = model
        options = ImatrixOptions(n_ctx=calibration.n_ctx, chunks=calibration.chunks)
        with load(model, n_ctx=calibration.n_ctx, rewrite=every_token) as loaded:
            text = chunks_of(loaded, calibration.texts, calibration.conversations, None, None, options)
            self._notes = list(text.notes)
            windows, bos = text.windows.copy(), bos_of(loaded, self._notes)
            embeddings = {op.weight.tensor.name for op in loaded.unfused.ops if isinstance(op, Embed)}
            graph_inputs = inputs(loaded.unfused, process_output=True)
        if bos is not None:
            windows[:, 0] = bos
        self.tokens = Tokens(windows, max(1, _BATCH // calibration.n_ctx))
        self.name, self._files = " and ".join(str(f) for f in calibration.files), calibration.files
        self.entries: dict[str, str] = {}
        for item in graph_inputs:  # embeddings precede all inputs, even where they are also the output matrix
            for name in item.names:
                if name not in embeddings:
                    self.entries.setdefault(name, item.names[0])
        self._sizes = {item.names[0]: (item.n, item.n_mat) for item in reversed(graph_inputs)}
        self._inputs: dict[str, StageInputs] = {}
        self._factors = balance_factors(model, windows, self.tokens.at_once) if calibration.balance else []
        self._balance = calibration.balance
        self._widened: set[str] = set()

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        return [*self._notes, *([self._balance_note()] if self._balance else [])]

    def _balance_note(self) -> str:
        if not self._factors:
            return (
                "nothing is equalized: the input columns already have similar magnitude, or not all tensors are F32, "
                "F16 or BF16"
            )
        names, count = [item.takes for item in self._factors], sum(len(item.gives) for item in self._factors)
        return f"equalized {span(names)} with the {count} tensors that read them"

    def source(self, source: Source, exclude: Collection[str] = ()) -> Source:
        """Return the source, equalized if requested, except for factors that concern tensors of ``exclude``."""
        self._factors = [item for item in self._factors if not {item.takes, *item.gives}.intersection(exclude)]
        self._widened = set()
        if not self._factors:
            return source
        result = BalancedSource(source, self._factors)
        self._widened = {name for name, t in source.tensors.items() if result.tensors[name].type is not t.type}
        return result

    def widens(self, name: str) -> bool:
        """Return whether a tensor of fewer bits is read as F32."""
        return name in self._widened

    def factors(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return the factors of a tensor's inputs, float32 [matrices or 1, n]; None for 1."""
        return next((item.values for item in self._factors if name in item.gives), None)

    @cached_property
    def identity(self) -> str:
        """A SHA-256 of the text and the factors."""
        digest = hashlib.sha256(repr((self.tokens.windows.shape, self.tokens.at_once)).encode())
        digest.update(self.tokens.windows.tobytes())
        for item in self._factors:
            digest.update(item.takes.encode() + item.values.tobytes())
        return digest.hexdigest()

    def inputs(self, tensor: str, entry: str, shape: Sequence[int]) -> StageInputs:
        """Return the inputs of a tensor. Raises FormatError if its entry has another size."""
        n, matrices = self._sizes[entry]
        if (n, matrices) != (shape[0], math.prod(shape[2:])):
            raise FormatError(
                f"{self.model}: {entry} has {matrices} inputs of {n} columns, but {tensor} has {math.prod(shape[2:])} "
                f"of {shape[0]}: it cannot be calibrated",
                "QK-E106",
            )
        return self._inputs.setdefault(entry, StageInputs(entry, n, matrices, self.factors(entry)))

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return the metadata that a calibrated file records."""
        return {
            "calibrate.names": (", ".join(f.name for f in self._files), ValueType.STRING),
            "calibrate.fingerprint": (self.identity, ValueType.STRING),
            "calibrate.chunk": (self.tokens.windows.shape[1], ValueType.UINT32),
            "tokens": (self.tokens.count, ValueType.UINT64),
            "damping": (DAMPING, ValueType.FLOAT32),
            "damping.few_tokens": (DAMPING, ValueType.FLOAT32),
            "damping.metric": (METRIC_DAMPING, ValueType.FLOAT32),
            "damping.target": (TARGET_DAMPING, ValueType.FLOAT32),
            "residual": (RESIDUAL, ValueType.FLOAT32),
            "balanced": (len(self._factors), ValueType.UINT32),
        }

    def executor(self, threads: Threads) -> SequentialExecutor:
        """Return the executor of the plan's jobs."""
        return SequentialExecutor(threads, self.model, self.tokens, self._inputs)
