"""PEFT's directory of a LoRA adapter: adapter_config.json and adapter_model.safetensors.

The meaning of the two factors of a weight follows from both files, so they are checked before weights are read. Some
PEFT features called LoRA are more than a product of two factors; each is refused by name, because a file or merged
model without it would give other results. Facts of PEFT 0.17.1: tuners/lora/config.py, tuners/lora/model.py,
tuners/lora/layer.py, utils/other.py (get_pattern_key).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, read_json
from quantkit.checkpoint.expressions import Stored, Transposed
from quantkit.checkpoint.lora.low_rank import LowRank
from quantkit.errors import FormatError, os_error_code
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import StoredTensor, read_header
from quantkit.patterns import Pattern

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = ("F32", "F16", "BF16", "F64")
#: Maximum number of patterns of a table: each is tried on every module.
_MOST_PATTERNS = 4096
#: Suffixes of factor names, and the factors; for embeddings they are reversed.
_ENDS = {
    ".lora_A.weight": ("A", False),
    ".lora_B.weight": ("B", False),
    ".lora_embedding_A": ("A", True),
    ".lora_embedding_B": ("B", True),
}
#: Keys of adapter_config.json that need more than two factors, with their meaning.
_UNSUPPORTED = {
    "use_dora": "DoRA, which rescales every row of the merged weight",
    "use_qalora": "QALoRA, whose A is for groups of columns",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases of B (lora_bias)",
    "modules_to_save": "complete modules besides the factors (modules_to_save)",
    "trainable_token_indices": "rows of the embeddings (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "factors of parameters for all experts (target_parameters)",
    "use_bdlora": "factors in blocks (BD-LoRA)",
    "arrow_config": "experts selected at run time (Arrow)",
    "invocation_string": "an invocation as text: tokenize it into alora_invocation_tokens",
}
#: The remedy for an adapter that consists of more than factors.
_MERGE_IT = (
    "which GGUF adapters do not support: merge it into its base with PEFT (merge_and_unload) and convert the result"
)
#: Initializations that do not change the weights of the base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter with checked files.

    ``weights``: by the name of the weight in the base, in the order of the file. ``alpha``: of weights without a
    pattern; with rsLoRA times the root of the rank. ``copies``: copies of base weights in the adapter.
    """

    path: Path
    config: Json
    weights: dict[str, LowRank]
    alpha: float
    copies: dict[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.path / CONFIG, self.path / WEIGHTS

    @property
    def one_alpha(self) -> float:
        """The common alpha of all weights, or the adapter's if they differ."""
        alphas = {value.alpha for value in self.weights.values()}
        return alphas.pop() if len(alphas) == 1 else self.alpha

    def digest(self) -> str:
        """Return a SHA-256 of both files."""
        digest = hashlib.sha256()
        for path in self.files:
            try:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as e:
                raise FormatError(f"{path}: cannot be read: {e.strerror or e}", os_error_code(e)) from None
        return digest.hexdigest()

    def base(self) -> Path:
        """Return the directory that the adapter names as its base. Raises FormatError if it is not a directory."""
        name = self.config.get("base_model_name_or_path")
        if isinstance(name, str) and name and "\0" not in name and Path(name).is_dir():
            return Path(name)
        raise FormatError(
            f"{self.path / CONFIG}: base_model_name_or_path is {short(name)}, which is not a local directory, and "
            "quantkit does not download: give --base DIR (its config.json is enough)",
            "QK-E117",
        )

    def fail(self, name: str, problem: str) -> FormatError:
        """Return an error about one of the adapter's weights."""
        return FormatError(f"{self.path / WEIGHTS}: tensor {short(name)}: {problem}", "QK-E117")


def read_adapter(path: Path, strength: float = 1.0) -> Adapter:
    """Read and check an adapter.

    Args:
        path: the directory.
        strength: the factor of its scale.

    Raises:
        FormatError: a file is missing or damaged, or the adapter has more than factors.
    """
    config = _config(path)
    patterns = _Patterns(path / CONFIG, config)
    pairs, copies = _pairs(path, read_header(path / WEIGHTS))
    weights = {name: _make_product(path, name, pair, patterns, strength) for name, pair in pairs.items()}
    if not weights:
        raise FormatError(f"{path / WEIGHTS}: has no factors (lora_A, lora_B)", "QK-E117")
    return Adapter(path, config, weights, patterns.default, copies)


def _config(path: Path) -> Json:
    where = path / CONFIG
    if not where.exists():
        if not path.is_dir():
            raise FormatError(f"{path}: no such directory", "QK-E401")
        raise FormatError(f"{path}: has no {CONFIG}, so this is not a PEFT adapter", "QK-E117")
    if not (path / WEIGHTS).exists():
        hint = " only adapter_model.bin: load and save it with PEFT" if (path / "adapter_model.bin").exists() else ""
        raise FormatError(f"{path}: has no {WEIGHTS}{',' if hint else ''}{hint}", "QK-E117")
    config = read_json(where)
    if config.get("peft_type") != "LORA":
        raise FormatError(f"{where}: peft_type is {short(config.get('peft_type'))}; only LORA is converted", "QK-E117")
    for key, problem in _UNSUPPORTED.items():
        if config.get(key) and not (key == "invocation_string" and config.get("alora_invocation_tokens")):
            raise FormatError(
                f"{where}: {key} is {short(config[key])}: the adapter has {problem}, {_MERGE_IT}", "QK-E117"
            )
    if config.get("bias", "none") != "none":
        raise FormatError(f"{where}: bias is {short(config['bias'])}: the adapter has biases, {_MERGE_IT}", "QK-E117")
    init = config.get("init_lora_weights")
    if not any(init is item or (isinstance(init, str) and init == item) for item in _PLAIN_INITS):
        raise FormatError(
            f"{where}: init_lora_weights is {short(init)}: the adapter belongs to a base whose weights this setting "
            f"changed; "
            "save it with path_initial_model_for_weight_conversion to make it fit the original base",
            "QK-E117",
        )
    return config


class _Patterns:
    """Rank and alpha of a module, looked up in adapter_config.json like PEFT."""

    def __init__(self, where: Path, config: Json) -> None:
        self.where = where
        self.rank = self._rank("r", config.get("r", 8))
        self.alpha = self._alpha("lora_alpha", config.get("lora_alpha", 8))
        self.rank_stabilized = config.get("use_rslora", False)
        if not isinstance(self.rank_stabilized, bool):
            raise FormatError(f"{where}: use_rslora is {short(self.rank_stabilized)}, not true or false", "QK-E117")
        self._ranks = {k: self._rank("rank_pattern", v) for k, v in self._pattern_table(config, "rank_pattern").items()}
        self._alphas = {
            k: self._alpha("alpha_pattern", v) for k, v in self._pattern_table(config, "alpha_pattern").items()
        }
        self._compiled: dict[str, Pattern] = {}

    @property
    def default(self) -> float:
        return self._effective(self.alpha, self.rank)

    def rank_and_alpha(self, module: str) -> tuple[int, float]:
        """Return the rank of a module, and the alpha that divided by it is PEFT's scale."""
        rank = self._match_pattern(self._ranks, module, self.rank)
        return rank, self._effective(self._match_pattern(self._alphas, module, self.alpha), rank)

    def _effective(self, alpha: float, rank: int) -> float:
        return alpha * math.sqrt(rank) if self.rank_stabilized else alpha

    def _match_pattern(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for text, value in patterns.items():
            if text not in self._compiled:
                self._compiled[text] = Pattern(rf"\A(.*\.)?({text})$", f"{self.where}: a pattern")
            if self._compiled[text].search(module):
                return value
        return patterns.get(module, default)

    def _pattern_table(self, config: Json, key: str) -> Json:
        value = config.get(key) or {}
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {key} is {short(value)}, not a table by module", "QK-E117")
        if len(value) > _MOST_PATTERNS:
            raise FormatError(
                f"{self.where}: {key} has {len(value)} patterns; at most {_MOST_PATTERNS} are read", "QK-E117"
            )
        return value

    def _rank(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
            raise FormatError(f"{self.where}: {key}: {short(value)} is not a rank", "QK-E117")
        return value

    def _alpha(self, key: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-30 < abs(value) < 1e30:
            zero = ": the adapter has no effect, but llama.cpp treats 0 as a missing scale" if value == 0 else ""
            raise FormatError(f"{self.where}: {key}: {short(value)} is not a valid alpha{zero}", "QK-E117")
        return float(value)


_Pair = dict[str, tuple[StoredTensor, bool]]


def _pairs(path: Path, header: dict[str, StoredTensor]) -> tuple[dict[str, _Pair], dict[str, StoredTensor]]:
    """Return the factors of each weight of the base, and copies of weights, by their names in the base."""
    pairs: dict[str, _Pair] = {}
    copies: dict[str, StoredTensor] = {}
    for t in sorted(header.values(), key=lambda t: (t.offset, t.name)):
        name = t.name.replace("base_model.model.", "")
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None:
            if not name.endswith(".base_layer.weight"):
                raise FormatError(f"{t.path}: tensor {short(t.name)} {_describe_foreign(name)}", "QK-E117")
            copies[name.replace(".base_layer.weight", ".weight")] = t
            continue
        letter, flipped = _ENDS[end]
        pair = pairs.setdefault(name.removesuffix(end) + ".weight", {})
        if letter in pair:
            raise FormatError(
                f"{t.path}: tensor {short(t.name)}: two tensors are {letter} of the same weight", "QK-E117"
            )
        pair[letter] = t, flipped
    return pairs, copies


def _describe_foreign(name: str) -> str:
    """Describe a tensor that is not a factor."""
    if ".lora_magnitude_vector" in name:
        return f"belongs to DoRA, {_MERGE_IT}"
    if re.search(r"\.lora_[AB]\.(?!weight$)", name):
        return "is more than the weight of a factor (a bias, or a named adapter); save it with PEFT"
    if "embed_tokens" in name or "lm_head" in name:
        return f"is a complete matrix (added tokens or modules_to_save), {_MERGE_IT}"
    return f"is not a LoRA factor, {_MERGE_IT}"


def _make_product(path: Path, name: str, pair: _Pair, patterns: _Patterns, strength: float) -> LowRank:
    for letter, missing_letter in ("AB", "BA"):
        if letter not in pair:
            raise FormatError(
                f"{path / WEIGHTS}: tensor {short(pair[missing_letter][0].name)}: the matching {letter} is missing",
                "QK-E117",
            )
    (a, flipped), (b, also) = pair["A"], pair["B"]
    for t in (a, b):
        if t.dtype not in _DTYPES or len(t.shape) != 2 or 0 in t.shape:
            raise FormatError(
                f"{t.path}: tensor {short(t.name)}: {t.dtype} {list(t.shape)} is not a matrix of floats", "QK-E117"
            )
    if flipped != also:
        raise FormatError(f"{a.path}: tensor {short(a.name)}: only one of A and B belongs to embeddings", "QK-E117")
    rank, alpha = patterns.rank_and_alpha(name.removesuffix(".weight"))
    if a.shape[0] != b.shape[1]:
        raise FormatError(
            f"{a.path}: tensor {short(a.name)}: A {list(a.shape)} and B {list(b.shape)} have different ranks",
            "QK-E117",
        )
    if a.shape[0] != rank:
        raise FormatError(
            f"{a.path}: tensor {short(a.name)} has rank {a.shape[0]}, but the rank in {CONFIG} is {rank}", "QK-E117"
        )
    if flipped:
        return LowRank(Transposed(Stored(b)), Transposed(Stored(a)), alpha, strength)
    return LowRank(Stored(a), Stored(b), alpha, strength)
