"""LoRA adapters as GGUF files, which llama.cpp's ``--lora`` reads: two factors for each tensor that they change.

The keys are general.type "adapter", general.architecture, adapter.type "lora" and adapter.lora.alpha, the tensors
NAME.lora_a and NAME.lora_b, in ggml's order of dimensions::

    NAME              [columns, rows, matrices]
    NAME.lora_a       [columns, rank, matrices]      NAME.lora_b        [rank, rows, matrices]
    token_embd.weight.lora_a  [rank, tokens]         token_embd.weight.lora_b   [rank, columns]

The change of NAME is b @ a * alpha / rank, without the division where alpha is 0 or missing. Of token embeddings rows
are taken rather than multiplied, so a holds the rows (llama.cpp b11434: tools/export-lora/export-lora.cpp,
src/llama-adapter.cpp, llm_graph_context::build_inp_embd).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantkit.errors import FormatError, RecipeError
from quantkit.formats.gguf import GGUFFile, TensorInfo, open_model
from quantkit.formats.gguf.rules import short

F32 = npt.NDArray[np.float32]

EMBEDDINGS = "token_embd.weight"
_A, _B = ".lora_a", ".lora_b"
_KIND, _ALPHA, _TOKENS = "adapter.type", "adapter.lora.alpha", "adapter.alora.invocation_tokens"


@dataclass(frozen=True)
class Factors:
    """The factors of a tensor: ``rows`` @ ``columns`` is its change before it is scaled.

    ``rows`` is [rank, rows, matrices]; ``columns`` is [columns, rank, matrices], or [rank, columns] if ``flipped``.
    """

    rows: TensorInfo
    columns: TensorInfo
    flipped: bool

    @property
    def rank(self) -> int:
        return self.rows.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the product."""
        columns = self.columns.shape[1 if self.flipped else 0]
        return columns, *self.rows.shape[1:]


@dataclass(frozen=True, eq=False)
class LoraFile:
    """An open adapter: ``factors`` by the name of the tensor that they change."""

    file: GGUFFile
    arch: str
    alpha: float
    factors: dict[str, Factors]

    @property
    def path(self) -> Path:
        return self.file.paths[0]

    def scale(self, name: str, strength: float) -> float:
        """Return the factor of a product, computed in float32 as llama-export-lora does."""
        f32 = np.float32
        if not self.alpha:
            return float(f32(strength))
        return float(f32(strength) * f32(self.alpha) / f32(self.factors[name].rank))

    def fail(self, name: str, problem: str) -> FormatError:
        """Return an error about one of the adapter's tensors."""
        return FormatError(f"{self.path}: tensor {short(name)}: {problem}", "QK-E117")


def open_lora(path: Path) -> LoraFile:
    """Open an adapter.

    Raises FormatError: not an adapter, not a LoRA, active only after an invocation (aLoRA), or with factors that are
    incomplete or do not fit each other.
    """
    if path.is_dir():
        raise FormatError(
            f"{path}: a directory, but the adapter must be a GGUF file: quantkit convert-lora {path} makes one",
            "QK-E117",
        )
    file = open_model(path)
    kind, adapter = file.get("general.type"), file.get(_KIND)
    if kind != "adapter":
        raise FormatError(f"{path}: general.type is {short(kind)}, so this is not an adapter", "QK-E117")
    if adapter != "lora":
        raise FormatError(f"{path}: {_KIND} is {short(adapter)}; only lora is merged", "QK-E117")
    if file.get(_TOKENS):
        raise FormatError(f"{path}: it is active only after an invocation (aLoRA), so it cannot be merged", "QK-E117")
    alpha = file.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise FormatError(f"{path}: {_ALPHA} is {short(alpha)}, not a finite float", "QK-E117")
    return LoraFile(file, str(file.get("general.architecture", "")), alpha, _factors(file))


def _factors(file: GGUFFile) -> dict[str, Factors]:
    path, pairs = file.paths[0], dict[str, dict[str, TensorInfo]]()
    for tensor in file.tensors.values():
        name, end = tensor.name[:-7], tensor.name[-7:]
        if end not in (_A, _B) or not name:
            raise FormatError(f"{path}: tensor {short(tensor.name)}: not a LoRA factor (.lora_a, .lora_b)", "QK-E117")
        pairs.setdefault(name, {})[end] = tensor
    for name, pair in pairs.items():
        missing = next((end for end in (_A, _B) if end not in pair), None)
        if missing is not None:
            raise FormatError(f"{path}: tensor {short(name)}: {name}{missing} is missing", "QK-E117")
    return {name: _check(path, name, pair[_A], pair[_B]) for name, pair in pairs.items()}


def _check(path: Path, name: str, a: TensorInfo, b: TensorInfo) -> Factors:
    flipped = name == EMBEDDINGS
    factors = Factors(a, b, True) if flipped else Factors(b, a, False)
    rank = factors.columns.shape[0 if flipped else 1 : 2]
    is_matrix = 2 <= len(a.shape) == len(b.shape) <= 3 - flipped and 0 not in (*a.shape, *b.shape)
    if not is_matrix or rank[0] != factors.rank or a.shape[2:] != b.shape[2:]:
        raise FormatError(
            f"{path}: tensor {short(name)}: lora_a {list(a.shape)} and lora_b {list(b.shape)} are not two factors of "
            "one product",
            "QK-E117",
        )
    return factors


def parse_adapter(text: str) -> tuple[Path, float]:
    """Return path and strength of ADAPTER[:SCALE]. Raises RecipeError."""
    path, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), 1.0
    try:
        strength = float(number)
    except ValueError:
        return Path(text), 1.0
    if not math.isfinite(strength) or not strength:
        raise RecipeError(f"--merge-lora {text}: the scale is {number}; it must not be 0 (0.5, for example)", "QK-E203")
    return Path(path), strength
