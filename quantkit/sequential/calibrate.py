"""What ``--calibrate`` decides before any work: the text, and which tensors have inputs that it will show."""

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
from quantkit.imatrix.collect import ImatrixOptions, chunks_of
from quantkit.model.engine import load
from quantkit.model.observers import every_token, inputs, norms
from quantkit.model.ops import Embed
from quantkit.model.selection import without_selection
from quantkit.pipeline.feedback import Refit
from quantkit.pipeline.source import Source
from quantkit.pipeline.threads import Threads
from quantkit.sequential.balance import Balanced, balanced
from quantkit.sequential.executor import Sequential
from quantkit.sequential.inputs import DAMPING, METRIC_DAMPING, RESIDUAL, TARGET_DAMPING, StageInputs
from quantkit.sequential.norms import norm_inputs
from quantkit.sequential.streams import Tokens

#: Tokens that go through a stage at once.
_BATCH = 2048


@dataclass(frozen=True)
class Calibration:
    """Texts, and conversations (files of JSON Lines); chunks of ``n_ctx`` tokens of them, at most ``chunks``.

    balance: whether columns of inputs are balanced before (balance.py). refit_norms: whether weights of
    norms are refit (norms.py).
    """

    files: tuple[Path, ...]
    n_ctx: int = 512
    chunks: int | None = None
    balance: bool = False
    refit_norms: bool = False

    @property
    def texts(self) -> list[Path]:
        return [f for f in self.files if f.suffix != ".jsonl"]

    @property
    def conversations(self) -> list[Path]:
        return [f for f in self.files if f.suffix == ".jsonl"]


class Foreseen:
    """The inputs that a calibration will show: what ``pipeline.feedback.Known`` asks for.

    Raises ResourceError for a model that is not on this machine, and what reading texts raises.
    """

    corrects = True

    def __init__(self, model: Path, calibration: Calibration) -> None:
        if isinstance(model, URL):
            raise ResourceError(f"{model}: --calibrate runs the model, from a file on this machine: copy it first")
        self.model = model
        options = ImatrixOptions(n_ctx=calibration.n_ctx, chunks=calibration.chunks)
        with load(model, n_ctx=calibration.n_ctx, rewrite=every_token) as loaded:
            text = chunks_of(loaded, calibration.texts, calibration.conversations, None, None, options)
            self._notes = list(text.notes)
            windows, bos = text.windows.copy(), bos_of(loaded, self._notes)
            embeddings = {op.weight.tensor.name for op in loaded.whole.ops if isinstance(op, Embed)}
            found = inputs(loaded.whole, process_output=True)
            run = without_selection(loaded.whole, calibration.n_ctx)
            refit = norms(run) if calibration.refit_norms else []
        if bos is not None:
            windows[:, 0] = bos
        self.tokens = Tokens(windows, max(1, _BATCH // calibration.n_ctx))
        self.name, self._files = " and ".join(str(f) for f in calibration.files), calibration.files
        self.entries: dict[str, str] = {}
        for item in found:  # embeddings come before any input does, also where they are the output matrix
            for name in item.names:
                if name not in embeddings:
                    self.entries.setdefault(name, item.names[0])
        self._sizes = {item.names[0]: (item.n, item.n_mat) for item in reversed(found)}
        self._inputs: dict[str, StageInputs] = {}
        self._refits_none = calibration.refit_norms and not refit
        self._norms = {made.entry: made for made in map(norm_inputs, refit)}
        self._factors = balanced(model, windows, self.tokens.at_once) if calibration.balance else []
        self._balance = calibration.balance
        self._widened: set[str] = set()

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        notes = [*self._notes, *([self._said()] if self._balance else [])]
        return [*notes, "--refit-norms: there is a matrix behind every norm"] if self._refits_none else notes

    def _said(self) -> str:
        if not self._factors:
            return "nothing is balanced: inputs have like columns, or are not of F32, F16 or BF16 tensors alone"
        names, count = [each.takes for each in self._factors], sum(len(each.gives) for each in self._factors)
        which = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} tensors)"
        return f"balanced: {which} took factors over from {count} tensors behind them"

    def refit(self, name: str) -> Refit | None:
        """Return what refits a tensor of the source, if it is a norm's weight and is to be."""
        return self._norms.get(name)

    def source(self, source: Source, but: Collection[str] = ()) -> Source:
        """Return a source as it is to be read: balanced if that is asked for, ``but`` nothing that concerns these."""
        self._factors = [each for each in self._factors if not {each.takes, *each.gives}.intersection(but)]
        self._widened = set()
        if not self._factors:
            return source
        made = Balanced(source, self._factors)
        self._widened = {name for name, t in source.tensors.items() if made.tensors[name].type is not t.type}
        return made

    def widens(self, name: str) -> bool:
        """Tell whether a tensor is read as F32, having had fewer bits."""
        return name in self._widened

    def factors(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return what the inputs of a tensor are multiplied by, float32 [matrices or 1, n]; None: by 1."""
        return next((each.by for each in self._factors if name in each.gives), None)

    @cached_property
    def identity(self) -> str:
        """A SHA-256 that tells this text from others."""
        digest = hashlib.sha256(repr((self.tokens.windows.shape, self.tokens.at_once)).encode())
        digest.update(self.tokens.windows.tobytes())
        for each in self._factors:
            digest.update(each.takes.encode() + each.by.tobytes())
        digest.update("".join(f"refit {name}" for name in self._norms).encode())
        return digest.hexdigest()

    def inputs(self, tensor: str, entry: str, shape: Sequence[int]) -> StageInputs:
        """Return the inputs of a tensor. Raises FormatError if its entry has another size."""
        n, matrices = self._sizes[entry]
        if (n, matrices) != (shape[0], math.prod(shape[2:])):
            raise FormatError(
                f"{self.model}: {entry} has {matrices} inputs of {n} columns, {tensor} {math.prod(shape[2:])} of "
                f"{shape[0]}: such a tensor cannot be calibrated"
            )
        return self._inputs.setdefault(entry, StageInputs(entry, n, matrices, self.factors(entry)))

    def fields(self) -> dict[str, tuple[str | int | float, ValueType]]:
        """Return what a file that is made with it says of it."""
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
            "refit_norms": (len(self._norms), ValueType.UINT32),
        }

    def executor(self, threads: Threads) -> Sequential:
        """Return what runs the jobs of a plan."""
        return Sequential(threads, self.model, self.tokens, {**self._inputs, **self._norms})
