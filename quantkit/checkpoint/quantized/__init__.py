"""Quantized checkpoints: decoding of each scheme while the weights are being read.

A scheme replaces the stored tensors of a weight (``scheme``), codes, scales and zero points, by one expression.
``SCHEMES`` has them by the quant_method of config.json; others are refused by name. The results are a few kinds of
expressions: ``rows.Scaled``, floats computed exactly as in torch, and blocks (``blocks``), whose bits only move.
``matrices`` reads stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import Expression, Stored
from quantkit.checkpoint.quantized import awq, compressed_tensors, fp4, fp8, gptq, integers
from quantkit.checkpoint.quantized.scheme import DecodedTensors, SchemeReader
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf.rules import short

__all__ = ["SCHEMES", "DecodedTensors", "block_type_of", "decode_tensors", "quantization_of", "weights_only"]

#: quant_method -> the decoder of the weights.
SCHEMES: dict[str, Callable[[SchemeReader], None]] = {
    "fp8": fp8.decode,
    "fbgemm_fp8": fp8.decode,
    "modelopt": fp8.decode_modelopt,
    "compressed-tensors": compressed_tensors.decode,
    "mxfp4": fp4.decode,
    "gptq": gptq.decode,
    "awq": awq.decode,
    "bitnet": integers.decode_bitnet,
}


def quantization_of(config: Config) -> dict[str, Any]:
    """Return quantization_config, {} if the checkpoint is not quantized.

    hf_quant_config.json (ModelOpt) takes precedence if config.json is incomplete.
    """
    settings = config.get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise FormatError(f"{config.path}: quantization_config is {short(settings)}, not an object", "QK-E112")
    path = config.path.parent / "hf_quant_config.json"
    if (settings.get("quant_algo") and settings.get("quantized_layers")) or (modelopt := optional_json(path)) is None:
        return settings
    producer, modelopt_settings = modelopt.get("producer") or {}, modelopt.get("quantization") or {}
    if not isinstance(producer, dict) or not isinstance(modelopt_settings, dict):
        raise FormatError(f"{path}: producer or quantization is not an object", "QK-E112")
    method = settings.get("quant_method") or str(producer.get("name") or "").lower()
    return {**settings, "quant_method": method, **modelopt_settings}


def block_type_of(config: Config) -> str | None:
    """Return the type of blocks that a checkpoint's configuration states, NVFP4 or MXFP4, whatever its tensors are."""
    settings = quantization_of(config)
    layers, groups = (
        [item for item in (settings.get(key) or {}).values() if isinstance(item, dict)]
        if isinstance(settings.get(key) or {}, dict)
        else []
        for key in ("quantized_layers", "config_groups")
    )
    formats = [settings.get("format")]
    if formats == ["mixed-precision"]:
        formats = [group.get("format") for group in groups]
    is_packed = settings.get("quant_method") == "compressed-tensors" and set(formats) == {"nvfp4-pack-quantized"}
    if (
        is_packed
        or settings.get("quant_algo") in ("NVFP4", "W4A16_NVFP4")
        or any(str(layer.get("quant_algo")).endswith("NVFP4") for layer in layers)
    ):
        return "NVFP4"
    return "MXFP4" if settings.get("quant_method") == "mxfp4" else None


def decode_tensors(stored: Mapping[str, Expression], config: Config, *, lossless: bool = False) -> DecodedTensors:
    """Return the decoded tensors; ``lossless``: integers as blocks, if that is exact."""
    quantization = quantization_of(config)
    method = quantization.get("quant_method")
    if not method and (method := _guess_method(stored)) is not None:
        # Encoders whose sizes of blocks the whole model's configuration states.
        outer = config.outer.get("quantization_config")
        quantization = {**(outer if isinstance(outer, dict) else {}), **quantization}
    if method is None:
        _refuse_mlx(stored)
        return DecodedTensors(dict(stored))
    if not isinstance(method, str) or method not in SCHEMES:
        raise TypeNotSupported(
            f"{config.path}: weights quantized by {short(method)} are not supported; supported are {', '.join(SCHEMES)}"
        )
    reader = SchemeReader(config, stored, quantization, lossless)
    SCHEMES[method](reader)
    return reader.result()


def _guess_method(stored: Mapping[str, Expression]) -> str | None:
    """Guess the scheme of a checkpoint without one: 8-bit floats with scales are fp8."""
    for name, x in stored.items():
        scaled = isinstance(x, Stored) and x.tensor.dtype in fp8.FLOATS
        if scaled and any(f"{name}{end}" in stored for end in ("_scale_inv", "_scale")):
            return "fp8"
    return None


def _refuse_mlx(stored: Mapping[str, Expression]) -> None:
    """Refuse MLX's format: 32-bit words with scales and biases for each group."""
    for name, x in stored.items():
        if isinstance(x, Stored) and x.tensor.dtype == "U32" and f"{name.removesuffix('.weight')}.scales" in stored:
            raise TypeNotSupported(
                f"{x.tensor.path}: tensor {short(name)}: MLX quantization is not supported: convert the original "
                "checkpoint, or the output of `mlx_lm.convert --hf-path DIR --dequantize`"
            )


def weights_only(config: Config) -> dict[str, bool]:
    """Return by module whether it is weight-only (W4A16_NVFP4: inputs of 16 bits); "" is for all others."""
    settings = quantization_of(config)
    layers = settings.get("quantized_layers") or {}
    if not isinstance(layers, dict):
        raise FormatError(f"{config.path}: quantized_layers is {short(layers)}, not an object", "QK-E112")
    by_module = {name: layer.get("quant_algo") for name, layer in layers.items() if isinstance(layer, dict)}
    return {name: algo == "W4A16_NVFP4" for name, algo in {"": settings.get("quant_algo"), **by_module}.items()}
