"""Weights in the formats of quantized checkpoints, of every scheme, rounded to nearest; and their dequantized values.

A scheme is a dict: ``method`` (a function here), ``targets`` (a regular expression of names; default: projections), and
settings of the method. With ``dequantized`` the float32 weights are stored instead, for schemes that
convert_hf_to_gguf.py does not read. All computations are integer arithmetic and single roundings, so the bytes are the
same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
#: Name, safetensors' dtype, shape, bytes.
Tensor = tuple[str, str, tuple[int, ...], bytes]
#: Stored tensors by suffix of the name (without ``.weight``), and the dequantized weights.
Stored = tuple[dict[str, Tensor], Floats]

_PROJECTIONS = r"layers\.\d+\..*_proj(_with_mqa)?\.weight$"
F32 = np.float32


def quantize(scheme: dict[str, Any], name: str, x: Floats) -> list[Tensor] | None:
    """Return the tensors stored for one of a plain checkpoint, None if it is unchanged."""
    if "each" in scheme:
        return next((tensors for part in scheme["each"] if (tensors := quantize(part, name, x)) is not None), None)
    if not re.search(scheme.get("targets", _PROJECTIONS), name) or re.search(scheme.get("but", "\n"), name):
        return None
    options = {key: value for key, value in scheme.items() if key not in ("method", "targets", "but", "dequantized")}
    stored, weights = METHODS[scheme["method"]](x, **options)
    if scheme.get("dequantized"):
        return [(name, *_array(weights))]
    base = name.removesuffix(".weight")
    return [(base + suffix, *tensor[1:]) for suffix, tensor in stored.items()]


def _array(x: npt.NDArray[Any], dtype: str = "") -> Any:
    """Return safetensors' dtype, shape and bytes."""
    if dtype == "BF16":
        return dtype, x.shape, (bf16(x).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    kind = dtype or _DTYPES[x.dtype.str.lstrip("<|")]
    return kind, x.shape, np.ascontiguousarray(x).tobytes()


_DTYPES = {"f4": "F32", "f2": "F16", "i4": "I32", "i8": "I64", "i1": "I8", "u1": "U8"}


def _stored(parts: dict[str, Any], weights: Floats) -> Stored:
    """Return the result of a method; a part is an array, or an array and its dtype."""
    arrays = {key: part if isinstance(part, tuple) else (part, "") for key, part in parts.items()}
    return {key: (key, *_array(x, dtype)) for key, (x, dtype) in arrays.items()}, weights.astype(F32)


def bf16(x: npt.NDArray[Any]) -> Floats:
    """Round to bfloat16, to nearest even."""
    bits = x.astype(F32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(F32)


# --- 8-bit floats ----------------------------------------------------------------------------------------------------


def _small_floats(exponent: int, mantissa: int, bias: int, finite: int) -> Floats:
    """Return the values of the codes 0 .. finite - 1 (the unsigned ones)."""
    codes = np.arange(finite)
    e, m = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(e > 0, np.ldexp(1 + m, e - bias), np.ldexp(m, 1 - bias)).astype(F32)


_E4M3 = _small_floats(4, 3, 7, 127)
_E5M2 = _small_floats(5, 2, 15, 124)
_E2M1 = _small_floats(2, 1, 1, 8)


def _nearest(x: Floats, values: Floats) -> npt.NDArray[np.uint8]:
    """Return the code of the nearest value; the sign is the bit above."""
    middle = (values[1:] + values[:-1]) / F32(2)
    magnitude = np.abs(x)
    if len(values) > 8:
        codes = np.searchsorted(middle, magnitude).astype(np.uint8)
    else:  # faster
        codes = np.zeros(x.shape, np.uint8)
        for value in middle:
            codes += magnitude > value
    sign = np.uint8(128 if len(values) > 8 else 8)
    return codes | np.where(np.signbit(x), sign, np.uint8(0))


def _value(codes: npt.NDArray[np.uint8], values: Floats) -> Floats:
    sign = 128 if len(values) > 8 else 8
    x = values[codes & (sign - 1)]
    result: Floats = np.where(codes & sign, -x, x)
    return result


def _spread(scale: Floats, block: list[int], shape: tuple[int, ...]) -> Floats:
    """Return a scale of each block as one of each weight."""
    for axis, n in enumerate(block):
        scale = np.repeat(scale, n, axis=axis)
    return scale[: shape[0], : shape[1]]


def _amax(x: Floats, block: list[int]) -> Floats:
    """Return the largest absolute value of each block; the last ones may be incomplete."""
    rows, columns = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]), F32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    result: Floats = padded.reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))
    return result


def fp8(
    x: Floats, block: list[int] | None = None, *, name: str = ".weight_scale_inv", shape: str = "", dtype: str = "F32",
    codes: str = "F8_E4M3", extra: dict[str, float] | None = None,
) -> Stored:  # fmt: skip
    """8-bit floats times a scale: of a block, a row (block [1, 0]) or (None) the tensor; extra: unused scalars."""
    values = _E4M3 if codes == "F8_E4M3" else _E5M2
    block = [b or x.shape[i] for i, b in enumerate(block or [0, 0])]
    scale = _amax(x, block) / values[-1]
    if dtype == "BF16":
        scale = bf16(scale)
    if dtype == "F8_E8M0":
        scale = np.ldexp(F32(1), np.frexp(scale)[1]).astype(F32)
    rounded = _nearest(x / _spread(scale, block, x.shape), values)
    weights = _value(rounded, values) * _spread(scale, block, x.shape)
    if dtype == "F8_E8M0":
        scale = (np.frexp(scale)[1] + 126).astype(np.uint8)
    shaped_scale = scale.reshape(()) if shape == "scalar" else scale.reshape(-1) if shape == "flat" else scale
    parts: dict[str, Any] = {".weight": (rounded, codes), name: (shaped_scale, dtype)}
    return _stored(parts | {key: np.array(value, F32) for key, value in (extra or {}).items()}, weights)


# --- 4-bit floats ----------------------------------------------------------------------------------------------------


def _pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return two codes per byte, the first in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << np.uint8(4))


def mxfp4(x: Floats, *, packed: bool = False, beside: bool = False) -> Stored:
    """Groups of 32 and their exponents.

    gpt-oss: experts [E, in, out] as blocks [E, out, in / 32, 16]; packed: [out, in], compressed-tensors' names; beside:
    the same with DeepSeek's names and dtypes.
    """
    rows = x if packed or beside else np.ascontiguousarray(x.swapaxes(1, 2))
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    exponent = np.frexp(np.abs(groups).max(axis=-1))[1] - 3 + 127
    scale = np.ldexp(F32(1), exponent - 127).astype(F32)[..., None]
    codes = _nearest(groups / scale, _E2M1)
    weights = (_value(codes, _E2M1) * scale).reshape(rows.shape)
    data, exponents = _pairs(codes), exponent.astype(np.uint8)
    if beside:
        codes_of = (data.reshape(len(x), -1).view(np.int8), "I8")
        return _stored({".weight": codes_of, ".scale": (exponents, "F8_E8M0")}, weights)
    if packed:
        return _stored({".weight_packed": data.reshape(len(x), -1), ".weight_scale": exponents}, weights)
    return _stored({"_blocks": data, "_scales": exponents}, weights.swapaxes(1, 2))


def nvfp4(x: Floats, *, packed: bool, trivial: bool = False) -> Stored:
    """Groups of 16, 8-bit scales, one global scale; packed: compressed-tensors, whose global scales are reciprocals."""
    groups = x.reshape(x.shape[0], -1, 16)
    amax = np.abs(groups).max(axis=-1)
    global_scale = F32(1) if trivial else amax.max() / (_E2M1[-1] * _E4M3[-1])
    stored = F32(1) / global_scale if packed else global_scale
    global_scale = F32(1) / stored if packed else global_scale
    scale = _nearest(amax / _E2M1[-1] / global_scale, _E4M3)
    steps = _value(scale, _E4M3)[..., None] * global_scale
    codes = _nearest(np.divide(groups, steps, out=np.zeros_like(groups), where=steps > 0), _E2M1)
    weights = (_value(codes, _E2M1) * steps).reshape(x.shape)
    data = _pairs(codes.reshape(x.shape))
    if packed:
        parts = {".weight_packed": data, ".weight_scale": (scale, "F8_E4M3")}
        parts |= {".weight_global_scale": stored.reshape(1), ".input_global_scale": np.array([64.0], F32)}
        return _stored(parts, weights)
    parts = {".weight": data, ".weight_scale": (scale, "F8_E4M3"), ".weight_scale_2": np.array(stored, F32)}
    return _stored(parts | {".input_scale": np.array(1.0 if trivial else 0.015625, F32)}, weights)


# --- integers --------------------------------------------------------------------------------------------------------


def _words(values: Ints, bits: int, axis: int) -> npt.NDArray[np.int32]:
    """Return values of ``bits`` bits as a stream of 32-bit words along an axis, low bits first."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint64)
    stream = (moved[..., None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    stream = stream.reshape(*moved.shape[:-1], -1)
    stream = np.concatenate([stream, np.zeros((*stream.shape[:-1], -stream.shape[-1] % 32), np.uint64)], axis=-1)
    words = stream.reshape(*stream.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint64)
    return np.ascontiguousarray(np.moveaxis(words.sum(axis=-1).astype(np.uint32).view(np.int32), -1, axis))


def _affine(x: Floats, bits: int, group: int, symmetric: bool, half: bool) -> tuple[Ints, Ints, Floats]:
    """Return codes [out, in], zero points and scales [out, groups]; half: scales are float16, else bfloat16."""
    groups, top = x.reshape(x.shape[0], -1, group), 2**bits - 1
    if symmetric:
        low, high = -np.abs(groups).max(axis=-1), np.abs(groups).max(axis=-1)
    else:
        low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scale = (high - low) / F32(top)
    scale = scale.astype(np.float16).astype(F32) if half else bf16(scale)
    zero = np.full(low.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / scale), 1, top).astype(np.int64)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, top).astype(np.int64)
    return codes.reshape(x.shape), zero, scale


def int8(x: Floats) -> Stored:
    """compressed-tensors: int8, one scale per row."""
    scale = bf16(np.abs(x).max(axis=1, keepdims=True) / F32(127))
    codes = np.clip(np.rint(x / scale), -128, 127).astype(np.int8)
    return _stored({".weight": codes, ".weight_scale": (scale, "BF16")}, codes.astype(F32) * scale)


def pack_quantized(x: Floats, *, bits: int, group: int, symmetric: bool = True) -> Stored:
    """compressed-tensors, pack-quantized: words along the input, zero points along the output."""
    codes, zero, scale = _affine(x, bits, group, symmetric, half=False)
    parts = {".weight_packed": _words(codes, bits, 1), ".weight_scale": (scale, "BF16")}
    parts[".weight_shape"] = np.array(x.shape, np.int64)
    if not symmetric:
        parts[".weight_zero_point"] = _words(zero, bits, 0)
    spread = np.repeat(zero, group, axis=1), np.repeat(scale, group, axis=1)
    return _stored(parts, (codes - spread[0]).astype(F32) * spread[1])


def gptq(
    x: Floats, *, bits: int, group: int, symmetric: bool = True, act_order: bool = False, v2: bool = False
) -> Stored:
    """GPTQ: words along the input, zero points along the output, less one unless v2; with act_order, inputs in any
    group."""
    n = x.shape[1]
    order = (np.arange(n) * 37 + 11) % n if act_order else np.arange(n)  # 37 and n have no common divisor
    codes, zero, scale = _affine(np.ascontiguousarray(x[:, order]), bits, group, symmetric, half=True)
    index = np.empty(n, np.int32)
    index[order] = np.arange(n) // group
    stored_codes = np.empty_like(codes)
    stored_codes[:, order] = codes
    parts = {".qweight": _words(stored_codes.T, bits, 0), ".qzeros": _words(zero.T - (0 if v2 else 1), bits, 1)}
    parts |= {".scales": np.ascontiguousarray(scale.T).astype(np.float16), ".g_idx": index}
    return _stored(parts, scale[:, index] * (stored_codes - zero[:, index]).astype(F32))


def awq(x: Floats, *, group: int) -> Stored:
    """AWQ's GEMM layout: eight outputs per word, in a permuted order."""
    codes, zero, scale = _affine(x, 4, group, symmetric=False, half=True)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(values: Ints) -> npt.NDArray[np.int32]:
        return _words(values.reshape(values.shape[0], -1, 8)[..., order].reshape(values.shape), 4, 1)

    parts = {".qweight": pack(np.ascontiguousarray(codes.T)), ".qzeros": pack(np.ascontiguousarray(zero.T))}
    parts[".scales"] = np.ascontiguousarray(scale.T).astype(np.float16)
    spread = np.repeat(zero, group, axis=1), np.repeat(scale, group, axis=1)
    return _stored(parts, (codes - spread[0]).astype(F32) * spread[1])


def bitnet(x: Floats) -> Stored:
    """BitNet: four quarters of the rows in two bits each; the scale divides."""
    scale = bf16(F32(2) / np.abs(x).max().reshape(1))
    codes = np.clip(np.rint(x * scale), -1, 1).astype(np.int64)
    quarters = (codes + 1).astype(np.uint8).reshape(4, -1, x.shape[1])
    data = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return _stored({".weight": data.astype(np.uint8), ".weight_scale": (scale, "BF16")}, codes.astype(F32) / scale)


def numbers(x: Floats, *, below: int) -> Stored:
    """Integers, for tables."""
    values = (np.abs(x * F32(1 << 12)).astype(np.int64)) % below
    return _stored({"": (values, "I64")}, values.astype(F32))


METHODS: dict[str, Callable[..., Stored]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "int8": int8,
    "packed": pack_quantized,
    "gptq": gptq,
    "awq": awq,
    "bitnet": bitnet,
    "numbers": numbers,
}
