"""A model's hyperparameters: typed access to the metadata of its architecture.

Keys have no architecture prefix: ``h.int("block_count")``. Keys have a default only if llama.cpp has one; a missing key
without a default is an error that names it.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.formats.gguf.mmproj import check_language_model

_REQUIRED = object()
#: LLAMA_MAX_LAYERS of llama.cpp.
MAX_LAYERS = 512

#: Aliases, because methods below have the names of these types.
Integer: TypeAlias = int
Real: TypeAlias = float


#: Architectures of draft models that run beside a target.
DRAFTS = frozenset({"dflash", "eagle3", "gemma4-assistant"})


class HParams:
    """Typed access to ``<architecture>.*``; dimensions have ggml's names."""

    def __init__(self, source: GGUFFile) -> None:
        self.source = source
        self.arch = str(source.get("general.architecture", ""))
        if not self.arch:
            kind = source.get("general.type")
            problem = "this is an imatrix, not a model" if kind == "imatrix" else "this is not a model"
            raise FormatError(f"{source.paths[0]}: {problem}: it has no general.architecture")
        check_language_model(source)
        if self.arch in DRAFTS:
            raise FormatError(
                f"{source.paths[0]}: this is a draft model ({self.arch}), which reads the hidden states of its target "
                "and cannot run by itself; give the file of the target",
                "QK-E306",
            )
        #: Layers stored in the file; a model may run them several times (Nanbeige).
        self.n_stored = self.int("block_count")
        self.n_layer = (self.n_stored - self.int("nextn_predict_layers", 0)) * self._n_loops()
        self.n_embd = self.int("embedding_length")
        self.n_ctx_train = self.int("context_length")
        self.n_head = self.int("attention.head_count")
        width = self.n_embd // max(self.n_head, 1)
        self.head_k = self.int("attention.key_length", 0) or width
        self.head_v = self.int("attention.value_length", 0) or width
        self.n_expert = self.int("expert_count", 0)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key. Raises FormatError if it is missing and has no default."""
        value = self.source.get(f"{self.arch}.{key}", None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise FormatError(
                f"{self.source.paths[0]}: missing key {self.arch}.{key}, which the architecture {self.arch} needs; "
                "convert the model again, or add the key",
                "QK-E123",
            )
        return default

    def int(self, key: str, default: Any = _REQUIRED) -> Integer:
        """Return an integer; the first element of an array."""
        value = self.get(key, default)
        return self._integer(key, value[0] if isinstance(value, list) and value else value)

    def float(self, key: str, default: Any = _REQUIRED) -> Real:
        """Return a number."""
        return self._real(key, self.get(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        return bool(self.get(key, default))

    def layer_int(self, key: str, layer: Integer, default: Any = _REQUIRED) -> Integer:
        """Return an integer of a layer; the value may be an array with an element per layer."""
        return self._integer(key, self._layer_value(key, layer, self.get(key, default)))

    def xielu(self, key: str, layer: Integer) -> Real:
        """Return a parameter of a layer's xIELU; these keys have no architecture prefix."""
        value = self.source.get(f"xielu.{key}", None)
        if value is None:
            raise FormatError(f"{self.source.paths[0]}: missing key xielu.{key}, which {self.arch} needs", "QK-E123")
        return self._real(f"xielu.{key}", self._layer_value(f"xielu.{key}", layer, value))

    def _n_loops(self) -> Integer:
        n = self.int("num_loops", 1)
        if n < 1 or (n > 1 and n * self.n_stored > MAX_LAYERS):
            raise FormatError(
                f"{self.source.paths[0]}: {self.arch}.num_loops is {n} with {self.n_stored} layers: at most "
                f"{MAX_LAYERS} layers are supported",
                "QK-E123",
            )
        return n

    def layer_float(self, key: str, layer: Integer, default: Any = _REQUIRED) -> Real:
        """Return a number of a layer; the value may be an array with an element per layer."""
        return self._real(key, self._layer_value(key, layer, self.get(key, default)))

    def _layer_value(self, key: str, layer: Integer, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        layer %= max(self.n_stored, 1)
        if layer >= len(value):
            raise FormatError(
                f"{self.source.paths[0]}: {self.arch}.{key} has {len(value)} elements, none for layer {layer}",
                "QK-E123",
            )
        return value[layer]

    def _integer(self, key: str, value: Any) -> Integer:
        if isinstance(value, (Integer, Real)) and math.isfinite(value) and value == Integer(value):
            return Integer(value)
        raise FormatError(f"{self.source.paths[0]}: {self.arch}.{key} is {value!r}, not an integer", "QK-E123")

    def _real(self, key: str, value: Any) -> Real:
        # Some keys may be infinite, but none NaN.
        if isinstance(value, (Integer, Real)) and not math.isnan(value):
            return Real(value)
        raise FormatError(f"{self.source.paths[0]}: {self.arch}.{key} is {value!r}, not a number", "QK-E123")

    @property
    def eps(self) -> Real:
        """The epsilon of norms, RMS or layer norms."""
        return self.float("attention.layer_norm_rms_epsilon", 0.0) or self.float("attention.layer_norm_epsilon", 0.0)

    @property
    def rope_scaling(self) -> str:
        return str(self.get("rope.scaling.type", "linear"))

    @property
    def freq_scale(self) -> Real:
        """The inverse of the rope scaling factor; 1 without scaling."""
        factor = self.float("rope.scaling.factor", 0.0) or self.float("rope.scale_linear", 0.0)
        return 1.0 if not factor or self.rope_scaling == "none" else 1.0 / factor

    @property
    def n_ctx_orig(self) -> Integer:
        return self.int("rope.scaling.original_context_length", 0) or self.n_ctx_train

    def yarn_attn_factor(self, log_mul: Real = 0.0, mscale: Real = 1.0) -> Real:
        """Return the factor of cos and sin, as llama_context computes it for yarn."""
        attn = 1.0
        if self.rope_scaling == "yarn":
            factor = 1.0 / self.freq_scale

            def scale(m: Real) -> Real:
                return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

            attn = scale(mscale) / scale(log_mul) if log_mul else scale(1.0)
            attn /= 1.0 + 0.1 * math.log(factor)
        return attn * self.float("rope.scaling.attn_factor", 1.0)
