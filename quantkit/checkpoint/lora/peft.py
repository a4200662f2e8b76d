"""PEFT's directory of a LoRA adapter: adapter_config.json and adapter_model.safetensors.

The meaning of the two factors of a weight follows from both files, so they are checked before weights are read. An
adapter may have more: magnitudes of rows (DoRA), and whole tensors that replace those of the base (modules_to_save,
trained biases, norms of mergekit-extract-lora). Merging applies them; a GGUF adapter cannot express them. Other
PEFT features called LoRA are refused by name, because a file or merged model without them would give other results.
Facts of PEFT 0.17.1: tuners/lora/config.py, tuners/lora/model.py, tuners/lora/layer.py, tuners/lora/variants.py (DoRA),
utils/other.py (get_pattern_key), utils/save_and_load.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import Json, read_json
from quantkit.checkpoint.expressions import Stored, Transposed
from quantkit.checkpoint.lora.low_rank import LowRank
from quantkit.errors import FormatError, RecipeError, os_error_code
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
#: Suffixes of the names of a weight's magnitudes.
_MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
#: Keys of adapter_config.json that are not merged, with their meaning.
_UNSUPPORTED = {
    "use_qalora": "QALoRA, whose A is for groups of columns",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases of B (lora_bias)",
    "trainable_token_indices": "rows of the embeddings (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "factors of parameters for all experts (target_parameters)",
    "use_bdlora": "factors in blocks (BD-LoRA)",
    "arrow_config": "experts selected at run time (Arrow)",
    "invocation_string": "an invocation as text: tokenize it into alora_invocation_tokens",
}
#: The remedy for such an adapter.
_MERGE_IT = "which quantkit does not merge: merge it into its base with PEFT (merge_and_unload) and convert the result"
#: Initializations that do not change the weights of the base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """An adapter with checked files.

    ``weights``: by the name of the weight in the base, in the order of the file. ``alpha``: of weights without a
    pattern; with rsLoRA times the root of the rank. ``copies``: copies of base weights in the adapter. ``magnitudes``:
    the lengths that rows of a merged weight have (DoRA), of embeddings its columns, by the name of the weight.
    ``replacements``: tensors that replace those of the base, by their names in it.
    """

    path: Path
    config: Json
    weights: dict[str, LowRank]
    alpha: float
    copies: dict[str, StoredTensor]
    magnitudes: dict[str, StoredTensor] = field(default_factory=dict)
    replacements: dict[str, StoredTensor] = field(default_factory=dict)

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
    content = _Content.read(read_header(path / WEIGHTS))
    weights = {name: _make_product(path, name, pair, patterns, strength) for name, pair in content.pairs.items()}
    if not weights:
        raise FormatError(f"{path / WEIGHTS}: has no factors (lora_A, lora_B)", "QK-E117")
    adapter = Adapter(path, config, weights, patterns.default, content.copies, content.magnitudes, content.replacements)
    _check_dora(adapter, strength)
    saved = config.get("modules_to_save")
    if saved and not adapter.replacements:
        raise FormatError(f"{path / WEIGHTS}: has no tensor of modules_to_save {short(saved)}", "QK-E117")
    return adapter


def _check_dora(adapter: Adapter, strength: float) -> None:
    """Refuse magnitudes that are incomplete or do not fit, and a strength, which they would undo."""
    has_magnitudes = adapter.config.get("use_dora", False)
    if bool(adapter.magnitudes) != bool(has_magnitudes):
        tensors = "has" if adapter.magnitudes else "has no"
        raise FormatError(
            f"{adapter.path / CONFIG}: use_dora is {short(has_magnitudes)}, but {WEIGHTS} {tensors} "
            "lora_magnitude_vector",
            "QK-E117",
        )
    if not adapter.magnitudes:
        return
    if strength != 1:
        raise RecipeError(
            f"--merge-lora {adapter.path}:{strength:g}: DoRA sets the lengths of rows, which have no scale: omit "
            f":{strength:g}",
            "QK-E201",
        )
    for name, product in adapter.weights.items():
        t = adapter.magnitudes.get(name)
        if t is None:
            raise adapter.fail(name, "its lora_magnitude_vector is missing (use_dora)")
        length = product.shape[1 if product.of_embeddings else 0]
        if t.shape != (length,) or t.dtype not in _DTYPES:
            raise adapter.fail(t.name, f"{t.dtype} {list(t.shape)} is not a vector of {length} floats")
    unused = next((t for name, t in adapter.magnitudes.items() if name not in adapter.weights), None)
    if unused is not None:
        raise adapter.fail(unused.name, "its weight has no factors (lora_A, lora_B)")


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


@dataclass(frozen=True)
class _Content:
    """The tensors of an adapter, by the names of the base's tensors that they change; see ``Adapter``."""

    pairs: dict[str, _Pair] = field(default_factory=dict)
    copies: dict[str, StoredTensor] = field(default_factory=dict)
    magnitudes: dict[str, StoredTensor] = field(default_factory=dict)
    replacements: dict[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def read(cls, header: dict[str, StoredTensor]) -> _Content:
        content = cls()
        for t in sorted(header.values(), key=lambda t: (t.offset, t.name)):
            content._add(t, t.name.replace("base_model.model.", ""))
        return content

    def _add(self, t: StoredTensor, name: str) -> None:
        end = next((end for end in (*_ENDS, *_MAGNITUDES) if name.endswith(end)), None)
        if end in _ENDS:
            letter, flipped = _ENDS[end]
            pair = self.pairs.setdefault(name.removesuffix(end) + ".weight", {})
            _check_unique(t, letter in pair, f"{letter} of the same weight")
            pair[letter] = t, flipped
        elif end is not None:
            weight = name.removesuffix(end) + ".weight"
            _check_unique(t, weight in self.magnitudes, "the magnitudes of the same weight")
            self.magnitudes[weight] = t
        elif ".lora_" in name:
            raise FormatError(
                f"{t.path}: tensor {short(t.name)} is more than the weight of a factor (a bias, or a named adapter); "
                "save it with PEFT",
                "QK-E117",
            )
        elif name.endswith(".base_layer.weight"):
            self.copies[name.replace(".base_layer.weight", ".weight")] = t
        else:
            replaced = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            _check_unique(t, replaced in self.replacements, f"{short(replaced)} of the base")
            if t.dtype not in _DTYPES or 0 in t.shape:
                raise FormatError(
                    f"{t.path}: tensor {short(t.name)}: {t.dtype} {list(t.shape)} has no floats", "QK-E117"
                )
            self.replacements[replaced] = t


def _check_unique(t: StoredTensor, is_double: bool, item: str) -> None:
    if is_double:
        raise FormatError(f"{t.path}: tensor {short(t.name)}: two tensors are {item}", "QK-E117")


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
        return LowRank(Transposed(Stored(b)), Transposed(Stored(a)), alpha, strength, of_embeddings=True)
    return LowRank(Stored(a), Stored(b), alpha, strength)
