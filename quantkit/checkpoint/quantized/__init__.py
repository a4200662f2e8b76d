"""Checkpoints whose weights are quantized already: how each scheme is decoded while it is read.

A scheme is a function of the stored tensors, by name, and of the quantization it is described by; it returns the
tensors with those of the scheme (weights, scales, zero points) replaced by what they mean. ``SCHEMES`` holds them by
the quant_method of config.json; what it does not hold is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Expression
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

Stored = Mapping[str, Expression]
#: A scheme: stored tensors, its quantization_config, the configuration of the model -> tensors.
Scheme = Callable[[Stored, dict[str, Any], Config], dict[str, Expression]]

SCHEMES: dict[str, Scheme] = {}


def quantization_of(config: Config) -> dict[str, Any]:
    """Return how the checkpoint is quantized, {} if it is not."""
    found = config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise FormatError(f"{config.path}: quantization_config is {short(found)}, not an object")
    other = optional_json(config.path.parent / "hf_quant_config.json")
    if other is not None and not found.get("quant_algo"):
        producer, more = other.get("producer") or {}, other.get("quantization") or {}
        method = found.get("quant_method") or str(producer.get("name") or "").lower()
        found = {**found, "quant_method": method, **more}
    return found


def decoded(stored: Stored, config: Config) -> dict[str, Expression]:
    """Return the stored tensors as they are meant."""
    quantization = quantization_of(config)
    method = quantization.get("quant_method")
    if not quantization or method is None:
        return dict(stored)
    if method not in SCHEMES:
        raise TypeNotSupported(f"{config.path}: weights quantized by {short(method)} are not read by this version")
    return SCHEMES[method](stored, quantization, config)
