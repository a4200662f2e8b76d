"""Checkpoints whose weights are quantized already: how each scheme is decoded while it is read.

A scheme takes what belongs together out of the stored tensors (``found``): codes, scales, zero points; and puts one
expression in their place. ``SCHEMES`` holds them by the quant_method of config.json; what it does not hold is refused
by name. They end in a few kinds of expressions: ``rows.Scaled``, floats, which is exactly what torch computes, and
blocks (``blocks``), whose bits only move. ``matrices`` reads what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.quantized import awq, bitnet, fp8, gptq, modelopt, mxfp4, packed
from quantkit.checkpoint.quantized.found import Decoded, Found
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

__all__ = ["SCHEMES", "Decoded", "decoded", "quantization_of", "weights_only"]

#: quant_method -> what puts the weights together.
SCHEMES: dict[str, Callable[[Found], None]] = {
    "fp8": fp8.decode,
    "fbgemm_fp8": fp8.decode,
    "modelopt": modelopt.decode,
    "compressed-tensors": packed.decode,
    "mxfp4": mxfp4.decode,
    "gptq": gptq.decode,
    "awq": awq.decode,
    "bitnet": bitnet.decode,
}


def quantization_of(config: Config) -> dict[str, Any]:
    """Return how the checkpoint is quantized, {} if it is not.

    hf_quant_config.json (ModelOpt) comes before config.json, if that does not say everything.
    """
    found = config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise FormatError(f"{config.path}: quantization_config is {short(found)}, not an object")
    path = config.path.parent / "hf_quant_config.json"
    if (found.get("quant_algo") and found.get("quantized_layers")) or (other := optional_json(path)) is None:
        return found
    producer, more = other.get("producer") or {}, other.get("quantization") or {}
    if not isinstance(producer, dict) or not isinstance(more, dict):
        raise FormatError(f"{path}: producer or quantization is not an object")
    method = found.get("quant_method") or str(producer.get("name") or "").lower()
    return {**found, "quant_method": method, **more}


def decoded(stored: Mapping[str, Expression], config: Config, *, lossless: bool = False) -> Decoded:
    """Return the stored tensors as they are meant; ``lossless``: integers as blocks, where that is exact."""
    quantization = quantization_of(config)
    method = quantization.get("quant_method") or _unnamed(stored)
    if method is None:
        return Decoded(dict(stored))
    if not isinstance(method, str) or method not in SCHEMES:
        raise TypeNotSupported(
            f"{config.path}: weights quantized by {short(method)} are not read; there are {', '.join(SCHEMES)}"
        )
    found = Found(config, stored, quantization, lossless)
    SCHEMES[method](found)
    return found.result()


def _unnamed(stored: Mapping[str, Expression]) -> str | None:
    """Return the scheme of a checkpoint that names none: 8-bit floats beside scales cannot be anything else."""
    for name, x in stored.items():
        scaled = isinstance(x, Stored) and x.tensor.dtype in fp8.FLOATS
        if scaled and any(f"{name}{end}" in stored for end in ("_scale_inv", "_scale")):
            return "fp8"
    return None


def weights_only(config: Config) -> dict[str, bool]:
    """Return which modules have weights of 4 bits but inputs of 16 (W4A16_NVFP4), by name; "" is all others."""
    given = quantization_of(config)
    layers = given.get("quantized_layers") or {}
    if not isinstance(layers, dict):
        raise FormatError(f"{config.path}: quantized_layers is {short(layers)}, not an object")
    named = {name: each.get("quant_algo") for name, each in layers.items() if isinstance(each, dict)}
    return {name: algo == "W4A16_NVFP4" for name, algo in {"": given.get("quant_algo"), **named}.items()}
