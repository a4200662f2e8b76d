"""Quantized checkpoints: every scheme gives the values that its formula says, and blocks give the same ones.

What is expected is computed here, from the codes and scales that are then packed: nothing of how they are read.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from refusals import refuses
from tiny_checkpoints import bf16, moe_arrays, moe_config, write_checkpoint, write_raw

from quantkit.checkpoint import OpenOptions, open_checkpoint
from quantkit.checkpoint import expressions as ex
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.quantized import DecodedTensors, decode_tensors
from quantkit.checkpoint.quantized.scale_tensors import add_scale_tensors, outer_scales
from quantkit.checkpoint.tensors import Tensor
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, QuantkitError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.formats.safetensors import read_header
from quantkit.kernels.reference import decode_rows

Array = npt.NDArray[Any]
#: An array, or its bytes under another dtype of safetensors.
Parts = dict[str, Array | tuple[str, Array]]
F32 = np.float32
_DTYPES = {"f8": "F64", "f4": "F32", "f2": "F16", "u2": "BF16", "i4": "I32", "i8": "I64", "i1": "I8", "u1": "U8"}
W = "layers.0.x_proj"


def write(
    folder: Path, parts: Mapping[str, Any], quantization: dict[str, Any] | None
) -> tuple[dict[str, ex.Expression], Config]:
    """Write tensors and return them as they are stored, with the configuration of their checkpoint."""
    header: dict[str, Any] = {}
    blobs, offset = [], 0
    for name, part in parts.items():
        dtype, x = part if isinstance(part, tuple) else (_DTYPES[part.dtype.str[1:]], part)
        data = np.ascontiguousarray(x).tobytes()
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [offset, offset + len(data)]}
        blobs.append(data)
        offset += len(data)
    path = write_raw(folder / "model.safetensors", json.dumps(header).encode(), b"".join(blobs))
    values: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    if quantization is not None:
        values["quantization_config"] = quantization
    return {name: ex.Stored(t) for name, t in read_header(path).items()}, Config(folder / "config.json", values)


def read(folder: Path, parts: Parts, quantization: dict[str, Any] | None, *, lossless: bool = False) -> DecodedTensors:
    stored, config = write(folder, parts, quantization)
    return decode_tensors(stored, config, lossless=lossless)


def full_array(x: ex.Expression) -> Array:
    """Return all values as float32, after any run of them was read and found to be the same."""
    n, block = ex.size_of(x), x.type.block
    data = ex.read_values(x, 0, n)
    rng, width = np.random.default_rng(1), x.type.block_bytes
    for _ in range(6):
        start, stop = sorted(int(i) for i in rng.integers(0, n // block + 1, 2))
        block_values = ex.read_values(x, start * block, (stop - start) * block)
        assert (block_values == data[start * width : stop * width]).all(), (start, stop)
    values = data.view(F32) if block == 1 else decode_rows(x.type, data.reshape(-1, width * (x.shape[-1] // block)))
    return values.reshape(x.shape)


def bits_of(x: Array) -> Array:
    return np.ascontiguousarray(x, F32).view(np.uint32)


def small_floats(exponent: int, mantissa: int, bias: int) -> Array:
    """Return the values of all codes of a small float without infinities, the sign bit highest."""
    codes = np.arange(1 << (exponent + mantissa))
    e, m = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    x = np.where(e > 0, np.ldexp(1 + m, e - bias), np.ldexp(m, 1 - bias))
    return np.concatenate([x, -x]).astype(F32)


E4M3, E5M2, E2M1 = small_floats(4, 3, 7), small_floats(5, 2, 15), small_floats(2, 1, 1)


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def e4m3(*shape: int) -> Array:
    """Return codes, none of them NaN."""
    x = rng().integers(0, 256, shape).astype(np.uint8)
    return np.where(x & 0x7F == 0x7F, x - 1, x).astype(np.uint8)


def e5m2(*shape: int) -> Array:
    x = rng().integers(0, 256, shape).astype(np.uint8)
    return np.asarray(np.where(x & 0x7F > 0x7B, x & 0xF0, x) & 0xFB, np.uint8)


def scales(*shape: int) -> Array:
    return rng(4).uniform(0.001, 0.02, shape).astype(F32)


def powers(exponents: Array) -> Array:
    """Return the values of E8M0 codes."""
    return np.asarray(np.ldexp(F32(1), exponents.astype(int) - 127), F32)


def as_bf16(x: Array) -> Array:
    return (bf16(x).astype(np.uint32) << 16).view(F32)


def spread(x: Array, *block: int) -> Array:
    """Repeat the cells of the last dimensions."""
    for i, n in enumerate(block):
        x = np.repeat(x, n, axis=x.ndim - len(block) + i)
    return x


# --- 8-bit floats ----------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 6]}


def test_fp8_with_partial_blocks_at_the_edges(tmp_path: Path) -> None:
    codes, s = e4m3(10, 20), scales(3, 4)
    actual = read(tmp_path, {f"{W}.weight": ("F8_E4M3", codes), f"{W}.weight_scale_inv": s}, FP8)
    assert list(actual.tensors) == [f"{W}.weight"]
    want = E4M3[codes] * spread(s, 4, 6)[:10, :20]
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


def test_fp8_experts_in_one_tensor(tmp_path: Path) -> None:
    codes, s = e4m3(3, 10, 20), scales(3, 3, 4)
    parts: Parts = {"experts.gate_up_proj": ("F8_E4M3", codes), "experts.gate_up_proj_scale_inv": bf16(s)}
    actual = read(tmp_path, parts, FP8)
    want = E4M3[codes] * spread(as_bf16(s), 4, 6)[:, :10, :20]
    assert (bits_of(full_array(actual.tensors["experts.gate_up_proj"])) == bits_of(want)).all()


@pytest.mark.parametrize(
    ("quantization", "end", "shape"),
    [
        ({"quant_method": "fp8"}, "_scale_inv", ()),
        ({"quant_method": "fp8"}, "_scale_inv", (8, 1)),
        ({"quant_method": "fbgemm_fp8"}, "_scale", (8, 1)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (8,)),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}}, "_scale", (1,)),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}}, "_scale", (8, 1)),
        (None, "_scale_inv", ()),
    ],
)
def test_fp8_with_a_scale_per_row_or_tensor(
    tmp_path: Path, quantization: dict[str, Any] | None, end: str, shape: tuple[int, ...]
) -> None:
    codes, s = e5m2(8, 6), scales(*shape)
    parts: Parts = {f"{W}.weight": ("F8_E5M2", codes), f"{W}.weight{end}": s, f"{W}.input_scale": np.array([3], F32)}
    if quantization is None:
        del parts[f"{W}.input_scale"]
    actual = read(tmp_path, parts, quantization)
    assert list(actual.tensors) == [f"{W}.weight"]
    want = E5M2[codes] * (s[:, None] if shape == (8,) else s)
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


def test_mxfp8_and_blocks_of_modelopt(tmp_path: Path) -> None:
    codes, exponents = e4m3(8, 64), rng().integers(110, 130, (8, 2)).astype(np.uint8)
    tiles, s = e4m3(200, 130), scales(2, 1, 2, 1)
    parts: Parts = {"a.weight": ("F8_E4M3", codes), "a.weight_scale": exponents}
    parts |= {"b.weight": ("F8_E4M3", tiles), "b.weight_scale": s}
    actual = read(tmp_path, parts, {"quant_method": "modelopt"}).tensors
    assert (full_array(actual["a.weight"]) == E4M3[codes] * spread(powers(exponents), 1, 32)).all()
    assert (full_array(actual["b.weight"]) == E4M3[tiles] * spread(s.reshape(2, 2), 128, 128)[:200, :130]).all()


def test_exponents_as_block_scales(tmp_path: Path) -> None:
    codes, s = e4m3(10, 20), rng().integers(110, 130, (3, 4)).astype(np.uint8)
    parts: Parts = {f"{W}.weight": ("F8_E4M3", codes), f"{W}.scale": ("F8_E8M0", s)}
    actual = read(tmp_path, parts, FP8)
    want = E4M3[codes] * spread(powers(s), 4, 6)[:10, :20]
    assert (full_array(actual.tensors[f"{W}.weight"]) == want).all()


# --- 4-bit floats ----------------------------------------------------------------------------------------------------


def pairs(codes: Array) -> Array:
    return np.asarray(codes[..., ::2] | codes[..., 1::2] << 4, np.uint8)


def test_mxfp4_of_gpt_oss_is_copied(tmp_path: Path) -> None:
    codes = rng().integers(0, 16, (2, 6, 64)).astype(np.uint8)
    exponents = rng(2).integers(100, 140, (2, 6, 2)).astype(np.uint8)
    parts: Parts = {"norm": scales(4), "experts.down_proj_blocks": pairs(codes).reshape(2, 6, 2, 16)}
    parts["experts.down_proj_scales"] = exponents
    actual = read(tmp_path, parts, {"quant_method": "mxfp4"})
    assert (list(actual.first), list(actual.tensors)) == (["experts.down_proj"], ["norm"])
    want = E2M1[codes] * spread(powers(exponents), 1, 32)
    x = actual.first["experts.down_proj"]
    assert isinstance(x, ex.Transposed)  # as transformers names it, [experts, in, out]
    assert (full_array(x) == want.swapaxes(1, 2)).all()
    assert x.x.type.name == "MXFP4"
    assert (full_array(x.x) == want).all()
    assert (full_array(ex.as_floats(x.x)) == want).all()
    odd = ex.take(x.x, 1, range(1, 6, 2))
    assert odd.type.name == "MXFP4"
    assert (full_array(odd) == want[:, 1::2]).all()
    assert (full_array(ex.take(x.x, -1, range(32, 64))) == want[..., 32:]).all()
    assert (full_array(ex.take(x.x, -1, range(0, 64, 2))) == want[..., ::2]).all()


@pytest.mark.parametrize(
    ("quantization", "names", "dtypes"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, ("weight_packed", "weight_scale"), "U8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("weight", "scale"), "F8_E8M0"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, ("weight", "weight_scale"), "U8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, ("weight", "weight_scale"), "U8"),
    ],
)
def test_mxfp4_of_other_schemes(
    tmp_path: Path, quantization: dict[str, Any], names: tuple[str, str], dtypes: str
) -> None:
    codes = rng().integers(0, 16, (6, 96)).astype(np.uint8)
    exponents = rng(2).integers(100, 140, (6, 3)).astype(np.uint8)
    parts: Parts = {f"{W}.{names[0]}": pairs(codes), f"{W}.{names[1]}": (dtypes, exponents)}
    actual = read(tmp_path, parts, quantization)
    want = E2M1[codes] * spread(powers(exponents), 1, 32)
    assert (list(actual.first), actual.tensors) == ([f"{W}.weight"], {})
    assert (full_array(actual.first[f"{W}.weight"]) == want).all()


def nvfp4(columns: int = 128, scale: float = 0.25, rows: int = 4) -> tuple[Parts, Array]:
    """Return the parts of a weight of ModelOpt, and its values."""
    codes = rng().integers(0, 16, (rows, columns)).astype(np.uint8)
    s = e4m3(rows, columns // 16) & 0x7F
    parts: Parts = {f"{W}.weight": pairs(codes), f"{W}.weight_scale": ("F8_E4M3", s)}
    parts |= {f"{W}.weight_scale_2": np.array(scale, F32), f"{W}.input_scale": np.array(1, F32)}
    return parts, E2M1[codes] * spread(E4M3[s], 1, 16)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    parts, want = nvfp4()
    actual = read(tmp_path, parts, MODELOPT)
    x = actual.first[f"{W}.weight"]
    assert (x.type.name, actual.tensors) == ("NVFP4", {})
    assert (full_array(x) == want).all()
    assert outer_scales(x) == {"scale": (0.25,)}
    assert (full_array(ex.as_floats(x)) == want * F32(0.25)).all()
    assert (
        full_array(ex.permute_heads(x, 2)) == full_array(x).reshape(2, 2, 1, -1).swapaxes(1, 2).reshape(want.shape)
    ).all()


def test_nvfp4_of_compressed_tensors_divides_by_the_global_scale(tmp_path: Path) -> None:
    parts, want = nvfp4()
    parts = {f"{W}.weight_packed": parts[f"{W}.weight"], f"{W}.weight_scale": parts[f"{W}.weight_scale"]}
    parts |= {f"{W}.weight_global_scale": np.array([3], F32), f"{W}.input_global_scale": np.array([1], F32)}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}
    x = read(tmp_path, parts, quantization).first[f"{W}.weight"]
    assert outer_scales(x) == {"scale": (float(F32(1) / F32(3)),)}
    assert (full_array(x) == want).all()


def test_a_scale_of_one_is_omitted(tmp_path: Path) -> None:
    one, neighbour = (
        read(_new(tmp_path, str(s)), nvfp4(scale=s)[0], MODELOPT).first[f"{W}.weight"] for s in (1, 1 + 5e-6)
    )
    assert outer_scales(one) == {}
    assert list(outer_scales(neighbour)) == ["scale"]
    assert outer_scales(ex.stack([one, neighbour])) == {}  # of experts, the tolerance is wider
    half = read(_new(tmp_path, "c"), nvfp4(scale=0.5)[0], MODELOPT).first[f"{W}.weight"]
    assert outer_scales(ex.stack([one, half])) == {"scale": [1, 0.5]}


def _new(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_model_scale_is_multiplied_into_the_weight_scale(tmp_path: Path) -> None:
    parts, _ = nvfp4()
    actual = read(tmp_path, parts | {"own": np.array([3, 5], F32)}, MODELOPT)
    x = ex.stack([actual.first[f"{W}.weight"]] * 2)
    tensors = [("blk.0.down.weight", Tensor("a", x, 0)), ("blk.0.down.scale", Tensor("b", actual.tensors["own"], 0))]
    scaled = dict(add_scale_tensors(tensors))
    assert list(scaled) == ["blk.0.down.weight", "blk.0.down.scale"]
    assert full_array(scaled["blk.0.down.scale"].x).tolist() == [0.75, 1.25]


def test_nvfp4_that_does_not_fit_blocks_becomes_floats(tmp_path: Path) -> None:
    parts, want = nvfp4(48)
    actual = read(tmp_path, parts, MODELOPT)
    x = actual.tensors[f"{W}.weight"]
    assert x.type.name == "F32"
    assert outer_scales(x) == {}
    assert (full_array(x) == want * F32(0.25)).all()


def test_a_model_may_mix_blocks_and_floats(tmp_path: Path) -> None:
    one = read(_new(tmp_path, "a"), nvfp4()[0], MODELOPT).first[f"{W}.weight"]
    two = read(_new(tmp_path, "b"), nvfp4(scale=0.5)[0], MODELOPT).first[f"{W}.weight"]
    want = nvfp4()[1]
    plain = write(_new(tmp_path, "c"), {"x": want}, None)[0]["x"]
    mixed = ex.stack([one, plain])
    assert (mixed.type.name, outer_scales(mixed)) == ("F32", {})
    assert (full_array(mixed) == [want * F32(0.25), want]).all()
    both = ex.concatenate([one, two])  # one scale cannot be for both
    assert (full_array(both) == np.concatenate([want * F32(0.25), want * F32(0.5)])).all()
    assert ex.concatenate([one, one]).type.name == "NVFP4"


# --- integers --------------------------------------------------------------------------------------------------------


def stream(values: Array, bits: int, axis: int) -> Array:
    """Return integers one after another in 32-bit words along an axis, low bits first."""
    moved = np.moveaxis(values, axis, -1)
    flat = ((moved[..., None] >> np.arange(bits)) & 1).reshape(*moved.shape[:-1], -1)
    flat = np.concatenate([flat, np.zeros((*flat.shape[:-1], -flat.shape[-1] % 32), int)], axis=-1)
    words = np.packbits(flat.astype(np.uint8).reshape(*flat.shape[:-1], -1, 8), axis=-1, bitorder="little")
    return np.moveaxis(np.ascontiguousarray(words[..., 0]).view("<i4"), -1, axis)


def each_word(values: Array, bits: int, axis: int) -> Array:
    """Return integers, as many as fit in each 32-bit word."""
    moved, n = np.moveaxis(values, axis, -1), 32 // bits
    padded = np.concatenate([moved, np.zeros((*moved.shape[:-1], -moved.shape[-1] % n), int)], axis=-1)
    words = (padded.reshape(*moved.shape[:-1], -1, n) << np.arange(n) * bits).sum(axis=-1)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def compressed(bits: int, group: int | None, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": True, **options}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def packed_tensors(
    bits: int, group: int, rows: int = 10, columns: int = 96, pack: Callable[[Array, int, int], Array] = each_word
) -> tuple[Parts, Array, Array]:
    """Return the parts of a symmetric weight, its codes [rows, columns], its scales [rows, groups]."""
    codes, s = rng().integers(0, 1 << bits, (rows, columns)), as_bf16(scales(rows, -(-columns // group)))
    parts: Parts = {f"{W}.weight_packed": pack(codes, bits, 1), f"{W}.weight_scale": bf16(s)}
    parts[f"{W}.weight_shape"] = np.array([rows, columns], np.int64)
    return parts, codes, s


@pytest.mark.parametrize("pack", [each_word, stream])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_of_any_bits(tmp_path: Path, bits: int, pack: Callable[[Array, int, int], Array]) -> None:
    parts, codes, s = packed_tensors(bits, 32, pack=pack)
    actual = read(tmp_path, {"norm": scales(3), **parts, "z": scales(3)}, compressed(bits, 32))
    assert list(actual.tensors) == ["norm", "z", f"{W}.weight"]
    want = (codes - (1 << (bits - 1))).astype(F32) * spread(s, 1, 32)
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("pack", [each_word, stream])
def test_packed_zero_points(tmp_path: Path, bits: int, pack: Callable[[Array, int, int], Array]) -> None:
    parts, codes, s = packed_tensors(bits, 24, rows=37, pack=pack)
    zero = rng(9).integers(0, 1 << bits, s.shape)
    want = (codes - spread(zero, 1, 24)).astype(F32) * spread(s, 1, 24)
    for number, stored in enumerate((pack(zero, bits, 0), (zero - (1 << (bits - 1))).astype(np.int8))):
        with_zero = {**parts, f"{W}.weight_zero_point": stored}
        actual = read(_new(tmp_path, str(number)), with_zero, compressed(bits, 24, symmetric=False), lossless=True)
        assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


@pytest.mark.parametrize("cells", ["channel", "row", "all"])
def test_packed_with_a_scale_per_row_or_tensor(tmp_path: Path, cells: str) -> None:
    parts, codes, s = packed_tensors(4, 96)
    stored = {"channel": s, "row": s[:, 0], "all": s[:1, 0]}[cells]
    actual = read(tmp_path, parts | {f"{W}.weight_scale": bf16(stored)}, compressed(4, None))
    want = (codes - 8).astype(F32) * (s[:1] if cells == "all" else s)
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


def test_packed_rows_with_partial_words_and_groups(tmp_path: Path) -> None:
    parts, codes, s = packed_tensors(4, 32, columns=77)
    actual = read(tmp_path, parts, compressed(4, 32), lossless=True)
    want = (codes - 8).astype(F32) * spread(s, 1, 32)[:, :77]
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


def test_packed_act_order(tmp_path: Path) -> None:
    parts, codes, s = packed_tensors(4, 32)
    index = rng(8).permutation(np.arange(96) // 32).astype(np.int32)
    actual = read(tmp_path, {**parts, f"{W}.weight_g_idx": index}, compressed(4, 32), lossless=True)
    want = (codes - 8).astype(F32) * s[:, index]
    assert (bits_of(full_array(actual.tensors[f"{W}.weight"])) == bits_of(want)).all()


def test_several_config_groups(tmp_path: Path) -> None:
    four, eight = packed_tensors(4, 32), packed_tensors(8, 96)
    quantization = compressed(4, 32)
    quantization["config_groups"]["group_1"] = compressed(8, None)["config_groups"]["group_0"]
    parts = {**four[0], **{name.replace("x_proj", "y_proj"): x for name, x in eight[0].items()}}
    actual = read(tmp_path, parts, quantization).tensors
    assert (full_array(actual[f"{W}.weight"]) == (four[1] - 8).astype(F32) * spread(four[2], 1, 32)).all()
    assert (full_array(actual["layers.0.y_proj.weight"]) == (eight[1] - 128).astype(F32) * eight[2]).all()


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [32, 96])
def test_plain_int8(tmp_path: Path, zero: bool, group: int) -> None:
    codes, s = rng().integers(-128, 128, (10, 96)).astype(np.int8), scales(10, 96 // group)
    points = rng(2).integers(-20, 20, s.shape).astype(np.int8)
    parts: Parts = {f"{W}.weight": codes, f"{W}.weight_scale": s}
    parts |= {f"{W}.weight_zero_point": points} if zero else {}
    actual = read(tmp_path, parts, compressed(8, None, symmetric=not zero)).tensors
    want = (codes.astype(int) - (spread(points, 1, group) if zero else 0)).astype(F32) * spread(s, 1, group)
    assert (bits_of(full_array(actual[f"{W}.weight"])) == bits_of(want)).all()


def gptq(
    bits: int, *, v2: bool = False, act_order: bool = False, symmetric: bool = False, group: int = 32
) -> tuple[Parts, Array]:
    """Return the parts of a weight [64, 96] and its values."""
    rows, columns = 64, 96
    codes, s = rng().integers(0, 1 << bits, (rows, columns)), scales(rows, columns // group).astype(np.float16)
    zero = rng(5).integers(1, 1 << bits, s.shape)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    index = np.arange(columns) // group
    if act_order:
        index = rng(6).permutation(index)
    parts: Parts = {f"{W}.qweight": stream(codes.T, bits, 0), f"{W}.qzeros": stream(zero.T - (not v2), bits, 1)}
    parts |= {f"{W}.scales": np.ascontiguousarray(s.T), f"{W}.g_idx": index.astype(np.int32)}
    return parts, s[:, index].astype(F32) * (codes - zero[:, index]).astype(F32)


def gptq_config(bits: int, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, **options}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("lossless", [False, True])
def test_gptq(tmp_path: Path, bits: int, v2: bool, act_order: bool, lossless: bool) -> None:
    parts, want = gptq(bits, v2=v2, act_order=act_order)
    quantization = gptq_config(bits, checkpoint_format="gptq_v2" if v2 else "gptq")
    actual = read(tmp_path, {"norm": scales(3), **parts}, quantization, lossless=lossless).tensors
    assert set(actual) == {"norm", f"{W}.weight"}
    assert (bits_of(full_array(actual[f"{W}.weight"])) == bits_of(want)).all()


def test_gptq_without_group_index_and_with_dynamic_bits(tmp_path: Path) -> None:
    parts, want = gptq(4)
    eight, four = gptq(8)
    y_proj = {name.replace("x_proj", "y_proj"): x for name, x in eight.items()}
    actual = read(_new(tmp_path, "a"), {**parts, **y_proj}, gptq_config(4, dynamic={"+:.*y_proj": {"bits": 8}})).tensors
    assert (full_array(actual[f"{W}.weight"]) == want).all()
    assert (full_array(actual["layers.0.y_proj.weight"]) == four).all()
    del parts[f"{W}.g_idx"]
    actual = read(_new(tmp_path, "b"), parts, gptq_config(4)).tensors
    assert (full_array(actual[f"{W}.weight"]) == want).all()


def test_many_columns_are_read_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.checkpoint.quantized.matrices._SLAB", 12 * 4 * 5)
    monkeypatch.setattr("quantkit.checkpoint.quantized.matrices._LINES", 5)
    parts, want = gptq(4, act_order=True)
    x = read(tmp_path, parts, gptq_config(4)).tensors[f"{W}.weight"]
    for row in (0, 3, 7, 60, 5):
        assert (ex.read_f32(x, row * 96, 3 * 96).reshape(3, 96) == want[row : row + 3]).all()
    assert (full_array(x) == want).all()


def awq_parts(zero: bool = True) -> Parts:
    """Return the parts of a weight [64, 96]: of these codes, scales and zero points."""
    codes, s, points = awq_numbers(zero)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(x: Array) -> Array:
        return each_word(x.T.reshape(-1, 8, 8)[:, :, order].reshape(x.T.shape), 4, 1)

    parts: Parts = {f"{W}.qweight": pack(codes), f"{W}.scales": np.ascontiguousarray(s.T)}
    return parts | ({f"{W}.qzeros": pack(points)} if zero else {})


def awq_numbers(zero: bool) -> tuple[Array, Array, Array]:
    codes, s = rng().integers(0, 16, (64, 96)), scales(64, 3).astype(np.float16)
    return codes, s, rng(2).integers(0, 16, s.shape) if zero else np.full(s.shape, 8)


@pytest.mark.parametrize("zero", [True, False])
def test_awq(tmp_path: Path, zero: bool) -> None:
    parts, (codes, s, points) = awq_parts(zero), awq_numbers(zero)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": zero, "version": "GEMM"}
    actual = read(tmp_path, parts, quantization).tensors
    want = (codes - spread(points, 1, 32)).astype(F32) * spread(s, 1, 32).astype(F32)
    assert (bits_of(full_array(actual[f"{W}.weight"])) == bits_of(want)).all()


def test_bitnet(tmp_path: Path) -> None:
    values = rng().integers(0, 3, (4, 5, 12))
    data = (values << np.array([0, 2, 4, 6])[:, None, None]).sum(axis=0).astype(np.uint8)
    s = as_bf16(np.array([0.37], F32))
    parts: Parts = {f"{W}.weight": data, f"{W}.weight_scale": bf16(s)}
    actual = read(tmp_path, parts, {"quant_method": "bitnet"}).tensors
    want = (values.reshape(20, 12) - 1).astype(F32) / s
    assert (bits_of(full_array(actual[f"{W}.weight"])) == bits_of(want)).all()


# --- without a loss --------------------------------------------------------------------------------------------------


def integer_weight(tensors: DecodedTensors) -> ex.Expression:
    return tensors.tensors[f"{W}.weight"]


@pytest.mark.parametrize("group", [32, 64, 192])
@pytest.mark.parametrize(("bits", "type_name"), [(4, "Q4_0"), (8, "Q8_0")])
def test_symmetric_integers_are_kept(tmp_path: Path, bits: int, type_name: str, group: int) -> None:
    parts, codes, s = packed_tensors(bits, group, columns=192)
    actual = read(tmp_path, parts, compressed(bits, group), lossless=True)
    assert integer_weight(actual).type.name == type_name
    want = (codes - (1 << (bits - 1))).astype(F32) * spread(s, 1, group)
    assert (full_array(integer_weight(actual)) == want).all()
    assert (bits_of(full_array(ex.as_floats(integer_weight(actual)))) == bits_of(want)).all()
    floats = read(tmp_path, parts, compressed(bits, group))
    assert (floats.lossless_count, integer_weight(floats).type.name) == (1, "F32")


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(("bits", "type_name"), [(4, "Q4_0"), (8, "Q8_0")])
def test_gptq_is_kept(tmp_path: Path, bits: int, type_name: str, v2: bool) -> None:
    parts, want = gptq(bits, symmetric=True, v2=v2)
    quantization = gptq_config(bits, sym=True, checkpoint_format="gptq_v2" if v2 else "gptq")
    actual = read(tmp_path, parts, quantization, lossless=True)
    assert integer_weight(actual).type.name == type_name
    assert (full_array(integer_weight(actual)) == want).all()
    assert read(tmp_path, parts, quantization).lossless_count == 1


def test_int8_is_kept(tmp_path: Path) -> None:
    codes, s = rng().integers(-128, 128, (10, 96)).astype(np.int8), as_bf16(scales(10, 1))
    parts: Parts = {f"{W}.weight": codes, f"{W}.weight_scale": bf16(s)}
    actual = read(tmp_path, parts, compressed(8, None), lossless=True)
    assert integer_weight(actual).type.name == "Q8_0"
    assert (full_array(integer_weight(actual)) == codes.astype(F32) * s).all()


@pytest.mark.parametrize("why", ["scale", "columns", "group", "float32"])
def test_blocks_are_not_kept_if_values_would_change(tmp_path: Path, why: str) -> None:
    group = 48 if why == "group" else 32
    parts, codes, s = packed_tensors(4, group, columns=80 if why == "columns" else 96)
    if why == "scale":
        s[3, 1] = 2.0**-30
        parts[f"{W}.weight_scale"] = bf16(s)
    elif why == "float32":
        s = scales(*s.shape)
        parts[f"{W}.weight_scale"] = s
    actual = read(tmp_path, parts, compressed(4, group), lossless=True)
    assert integer_weight(actual).type.name == "F32"
    want = (codes - 8).astype(F32) * spread(s, 1, group)[:, : codes.shape[1]]
    assert (bits_of(full_array(integer_weight(actual))) == bits_of(want)).all()


def quantized_moe(folder: Path, bits: int = 4) -> tuple[Path, dict[str, Array]]:
    """Write the mixture of experts with packed experts; return what they stand for."""
    arrays, want = dict(moe_arrays()), dict[str, Array]()
    for name in [n for n in arrays if ".experts." in n]:
        del arrays[name]
        base = name.removesuffix(".weight")
        codes = np.random.default_rng(len(want)).integers(0, 1 << bits, (256, 256))
        s = as_bf16(np.random.default_rng(len(want)).uniform(0.001, 0.02, (256, 8)).astype(F32))
        want[name] = (codes - (1 << (bits - 1))).astype(F32) * spread(s, 1, 32)
        arrays |= {f"{base}.weight_packed": each_word(codes, bits, 1), f"{base}.weight_scale": bf16(s)}
        arrays[f"{base}.weight_shape"] = np.array([256, 256], np.int64)
    path = write_checkpoint(folder, moe_config(quantization_config=compressed(bits, 32)), {})
    write(path, arrays, None)
    return path, want


def test_a_model_is_kept_without_loss(tmp_path: Path) -> None:
    path, want = quantized_moe(tmp_path / "moe")
    out = tmp_path / "x.gguf"
    convert(path, out, None, ConvertOptions(pre="gpt-2", lossless=True))
    with open_gguf(out) as file:
        assert file.get("general.file_type") == 2
        for weight in ("down", "gate", "up"):
            t = file.tensors[f"blk.1.ffn_{weight}_exps.weight"]
            assert t.type.name == "Q4_0"
            actual = decode_rows(t.type, file.data(t).reshape(-1, t.type.row_bytes(t.shape[0])))
            names = [f"model.layers.1.mlp.experts.{e}.{weight}_proj.weight" for e in range(4)]
            assert (actual.reshape(4, 256, 256) == np.stack([want[n] for n in names])).all()
        assert file.tensors["blk.0.attn_q.weight"].type.name == "BF16"
    plan = plan_convert(path, out, "Q8_0", ConvertOptions(pre="gpt-2", lossless=True))
    types = {t.name: t.type.name for t in plan.tensors}
    assert (types["blk.0.ffn_up_exps.weight"], types["blk.0.attn_q.weight"]) == ("Q4_0", "Q8_0")
    noted = plan_convert(path, out, None, ConvertOptions(pre="gpt-2")).notes
    assert any("--lossless" in note for note in noted)
    assert open_checkpoint(path, OpenOptions(pre="gpt-2", lossless=True)).notes == ()


def nvfp4_moe(folder: Path, **quantization: Any) -> Path:
    """Write the mixture of experts with experts of NVFP4."""
    arrays: dict[str, Any] = dict(moe_arrays())
    for number, name in enumerate([n for n in arrays if ".experts." in n]):
        base = name.removesuffix(".weight")
        parts, _ = nvfp4(256, 0.5 + number, 256)
        arrays |= {base + part.removeprefix(W): x for part, x in parts.items()}
    path = write_checkpoint(folder, moe_config(quantization_config={**MODELOPT, **quantization}), {})
    write(path, arrays, None)
    return path


def test_nvfp4_experts_and_their_input_scales(tmp_path: Path) -> None:
    layers = {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
    path = nvfp4_moe(tmp_path / "moe", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    opened = open_checkpoint(path, OpenOptions(pre="gpt-2"))
    names = list(opened.tensors)
    assert names[:2] == ["blk.0.ffn_down_exps.weight", "blk.0.ffn_down_exps.scale"]
    scale = full_array(opened.converted["blk.0.ffn_down_exps.scale"].expr)
    arrays = [n for n in moe_arrays() if ".experts." in n]
    downs = [arrays.index(f"model.layers.0.mlp.experts.{e}.down_proj.weight") for e in range(4)]
    assert scale.tolist() == [0.5 + i for i in downs]
    four = [n for n in names if n.startswith("blk.1.") and opened.tensors[n].type.name == "NVFP4"]
    assert opened.get("general.tensor_extra.name") == sorted(four)
    assert opened.get("general.tensor_extra.prec_a4") == [False] * 3
    assert opened.get("general.file_type") == 39
    with refuses(TypeNotSupported, "QK-E209 --lossless"):
        plan_convert(path, tmp_path / "x.gguf", "Q8_0", ConvertOptions(pre="gpt-2"))


def test_nvfp4_across_shards_has_the_references_order(tmp_path: Path) -> None:
    """Weights by their own places, not those of their scales; experts of each kind when the last of them is there."""
    path = nvfp4_moe(tmp_path / "moe")
    file = path / "model.safetensors"
    raw, header = file.read_bytes(), read_header(file)
    last_names = {name for name in header if "layers.0.mlp.experts.3.down_proj" in name}
    last_names |= {name for name in header if "layers.0.mlp.experts.0.gate_proj.weight_scale" in name}
    file.unlink()
    for no, names in enumerate((header.keys() - last_names, last_names), 1):
        offset, entries, blobs = 0, dict[str, Any](), []
        for name in names:
            t = header[name]
            entries[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
            blobs.append(raw[t.offset : t.offset + t.nbytes])
            offset += t.nbytes
        write_raw(path / f"model-0000{no}-of-00002.safetensors", json.dumps(entries).encode(), b"".join(blobs))
    weights = [
        name for name, t in open_checkpoint(path, OpenOptions(pre="gpt-2")).tensors.items() if t.type.name == "NVFP4"
    ]
    kinds = [("gate", 0), ("up", 0), ("down", 1), ("gate", 1), ("up", 1), ("down", 0)]
    assert weights == [f"blk.{layer}.ffn_{kind}_exps.weight" for kind, layer in kinds]


def test_mlx_weights_are_named_in_the_refusal(tmp_path: Path) -> None:
    parts: Parts = {f"{W}.weight": ("U32", np.zeros((8, 8), np.uint32))}
    parts |= {f"{W}.{name}": bf16(scales(8, 1)) for name in ("scales", "biases")}
    with refuses(TypeNotSupported, "QK-E300 model.safetensors x_proj MLX"):
        read(tmp_path, parts, None)


def test_rows_are_converted_independently(tmp_path: Path) -> None:
    rows, columns = 1 << 12, 1 << 13
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": [0, rows * columns]},
        "a.weight_scale_inv": {
            "dtype": "F32",
            "shape": [32, 64],
            "data_offsets": [rows * columns, rows * columns + 8192],
        },
    }
    path = write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), b"")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + rows * columns + 8192)
    stored = {name: ex.Stored(t) for name, t in read_header(path).items()}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = Config(tmp_path / "config.json", {"architectures": ["x"], "quantization_config": quantization})
    x = decode_tensors(stored, config).tensors["a.weight"]
    out = np.empty(64 * columns * 4, np.uint8)
    x.read(0, out[: 4 * columns])
    tracemalloc.start()
    x.read(1000 * columns, out)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


# --- hostile input ---------------------------------------------------------------------------------------------------


def _replaced(name: str, part: Array | tuple[str, Array] | None) -> Callable[[Parts], Parts]:
    def change(parts: Parts) -> Parts:
        remainder = {n: p for n, p in parts.items() if n != f"{W}.{name}"}
        return remainder if part is None else {**remainder, f"{W}.{name}": part}

    return change


def _fp8_parts(end: str = "weight_scale_inv") -> Parts:
    return {f"{W}.weight": ("F8_E4M3", e4m3(10, 20)), f"{W}.{end}": scales(3, 4)}


def _in_blocks() -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 6]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def _nvfp4_packed() -> Parts:
    """Return the parts of a weight of compressed-tensors in NVFP4."""
    parts, _ = nvfp4()
    return {
        f"{W}.weight_packed": parts[f"{W}.weight"],
        f"{W}.weight_scale": parts[f"{W}.weight_scale"],
        f"{W}.weight_global_scale": np.array([3], F32),
    }


def _nan(*shape: int) -> Array:
    x = np.ones(shape, F32)
    x[-1] = np.nan
    return x


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
MX = {"quant_method": "mxfp4"}
U8 = np.zeros((4, 2, 16), np.uint8)
ASYMMETRIC = compressed(4, 32, symmetric=False)
HOSTILE: list[tuple[dict[str, Any], Parts, Callable[[Parts], Parts], str]] = [
    (FP8, _fp8_parts(), _replaced("weight_scale_inv", scales(4, 4)), "QK-E113 weight_scale_inv"),
    (FP8, _fp8_parts(), _replaced("weight_scale_inv", _nan(3, 4)), "QK-E113 weight_scale_inv NaN"),
    (FP8, _fp8_parts(), _replaced("weight_scale_inv", np.zeros((3, 4), np.int32)), "QK-E113 I32"),
    (FP8, _fp8_parts(), _replaced("weight", np.zeros((10, 20), np.int32)), "QK-E113 I32"),
    (FP8, _fp8_parts(), _replaced("weight", ("F8_E4M3", e4m3(10))), "QK-E113 x_proj.weight"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale", ("F8_E4M3", e4m3(4, 7))), "QK-E113 weight_scale"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale_2", np.array(np.inf, F32)), "QK-E113 weight_scale_2"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale_2", scales(3)), "QK-E113 x_proj.weight_scale_2 1"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale", ("F8_E4M3", np.full((4, 8), 0x7F, np.uint8))), "QK-E113 NaN"),
    (MODELOPT, nvfp4()[0], _replaced("pre_quant_scale", scales(128)), "QK-E113 pre_quant_scale"),
    (MODELOPT, nvfp4()[0], _replaced("weight", np.zeros((4, 64), np.int32)), "QK-E113 I32"),
    (MX, {f"{W}_blocks": U8}, lambda p: p, "QK-E113 x_proj_blocks x_proj_scales"),
    (MX, {f"{W}_blocks": U8, f"{W}_scales": U8[:, 0]}, lambda p: p, "QK-E113 U8"),
    (MX, {f"{W}_blocks": U8, f"{W}_scales": np.full((4, 2), 255, np.uint8)}, lambda p: p, "QK-E113 NaN"),
    (MX, {f"{W}_blocks": U8[..., :8], f"{W}_scales": U8[..., 0]}, lambda p: p, "QK-E113 16"),
    (compressed(4, 32), packed_tensors(4, 32)[0], _replaced("weight_scale", None), "QK-E113 weight_scale"),
    (compressed(4, 32), packed_tensors(4, 32)[0], _replaced("weight_shape", None), "QK-E113 weight_shape"),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_shape", np.array([10, 1 << 60], np.int64)),
        "QK-E113 weight_shape",
    ),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_shape", np.array([-1, 96], np.int64)),
        "QK-E113 weight_shape",
    ),
    (compressed(4, 32), packed_tensors(4, 32)[0], _replaced("weight_shape", scales(2)), "QK-E113 weight_shape"),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_scale", scales(10, 4)),
        "QK-E113 config_groups",
    ),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_scale", _nan(10, 3)),
        "QK-E113 weight_scale",
    ),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_g_idx", np.full(96, 3, np.int32)),
        "QK-E113 3",
    ),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_g_idx", np.full(96, -1, np.int32)),
        "QK-E113 3",
    ),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight", scales(10, 96)),
        "QK-E113 x_proj.weight_packed x_proj.weight",
    ),
    (ASYMMETRIC, packed_tensors(4, 32)[0], lambda p: p, "QK-E113 weight_zero_point"),
    (
        ASYMMETRIC,
        packed_tensors(4, 32)[0],
        _replaced("weight_zero_point", np.zeros((5, 3), np.int32)),
        "QK-E113 x_proj.weight_zero_point I32",
    ),
    (compressed(8, None), {f"{W}.weight_scale": scales(10, 1)}, lambda p: p, "QK-E113 x_proj.weight"),
    (gptq_config(4), gptq(4)[0], _replaced("scales", None), "QK-E113 x_proj.qweight x_proj.scales"),
    (gptq_config(4), gptq(4)[0], _replaced("qzeros", None), "QK-E113 x_proj.qweight x_proj.qzeros"),
    (gptq_config(4), gptq(4)[0], _replaced("qzeros", np.zeros((3, 9), np.int32)), "QK-E113 I32"),
    (gptq_config(4), gptq(4)[0], _replaced("scales", scales(4, 64)), "QK-E113 x_proj.scales 32"),
    (gptq_config(4), gptq(4)[0], _replaced("scales", _nan(3, 64)), "QK-E113 NaN"),
    (gptq_config(4), gptq(4)[0], _replaced("g_idx", np.full(96, 7, np.int32)), "QK-E113 3"),
    (gptq_config(4), gptq(4)[0], _replaced("g_idx", np.zeros(95, np.int32)), "QK-E113 95"),
    (gptq_config(8), gptq(4)[0], lambda p: p, "QK-E113 8"),
    (AWQ, gptq(4)[0], lambda p: p, "QK-E113 x_proj.scales 12"),
    (
        {"quant_method": "bitnet"},
        {f"{W}.weight": np.zeros((4, 8), np.uint8), f"{W}.weight_scale": np.zeros(1, F32)},
        lambda p: p,
        "QK-E113 weight_scale 0",
    ),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale_2", np.array(1e300)), "QK-E113 weight_scale_2"),
    ({"quant_method": "bitnet"}, {f"{W}.weight_scale": scales(1)}, lambda p: p, "QK-E113 x_proj.weight"),
    # what a scheme promises, and is not there
    (FP8, _fp8_parts(), _replaced("weight_scale_inv", None), "QK-E113 x_proj.weight F8_E4M3"),
    ({"quant_method": "fbgemm_fp8"}, {f"{W}.weight": ("F8_E4M3", e4m3(8, 6))}, lambda p: p, "QK-E113 x_proj.weight"),
    ({"quant_method": "fp8"}, {f"{W}.weight": ("F8_E5M2", e5m2(2, 8, 6))}, lambda p: p, "QK-E113 x_proj.weight"),
    ({"quant_method": "fp8"}, {f"{W}.weight": np.zeros((8, 16), np.uint8)}, lambda p: p, "QK-E113 x_proj.weight"),
    ({"quant_method": "modelopt"}, {f"{W}.weight": ("F8_E4M3", e4m3(8, 6))}, lambda p: p, "QK-E113 x_proj.weight"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale", None), "QK-E113 x_proj.weight U8"),
    (MODELOPT, nvfp4()[0], _replaced("weight_scale_2", None), "QK-E113 weight_scale_2"),
    (compressed(4, None), _nvfp4_packed(), _replaced("weight_global_scale", None), "QK-E113 weight_global_scale"),
    (compressed(8, None), {f"{W}.weight": np.zeros((8, 6), np.int8)}, lambda p: p, "QK-E113 I8"),
    (
        compressed(8, None, symmetric=False),
        {f"{W}.weight": np.zeros((8, 6), np.int8), f"{W}.weight_scale": scales(8, 1)},
        lambda p: p,
        "QK-E113 weight_zero_point",
    ),
    (compressed(4, 32, actorder="group"), packed_tensors(4, 32)[0], lambda p: p, "QK-E113 weight_g_idx"),
    (gptq_config(4, desc_act=True), gptq(4)[0], _replaced("g_idx", None), "QK-E113 g_idx"),
    (AWQ, awq_parts(), _replaced("scales", None), "QK-E113 x_proj.qweight x_proj.scales"),
    (AWQ, awq_parts(), _replaced("qzeros", None), "QK-E113 x_proj.qweight x_proj.qzeros"),
    ({"quant_method": "bitnet"}, {f"{W}.weight": np.zeros((4, 8), np.uint8)}, lambda p: p, "QK-E113 x_proj.weight"),
    # one scale, where blocks or groups are promised
    *(
        (FP8, _fp8_parts(), _replaced("weight_scale_inv", scales(*s)), "QK-E113 x_proj.weight_scale_inv x_proj.weight")
        for s in ((1, 1), (1,), ())
    ),
    (_in_blocks(), _fp8_parts("weight_scale"), _replaced("weight_scale", scales(1, 1)), "QK-E113 weight_scale"),
    (
        compressed(4, 32),
        packed_tensors(4, 32)[0],
        _replaced("weight_scale", scales(1, 1)),
        "QK-E113 config_groups",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {f"{W}.weight": ("F8_E4M3", e4m3(200, 130)), f"{W}.weight_scale": scales(1, 1)},
        lambda p: p,
        "QK-E113 weight_scale",
    ),
]


def read_values(folder: Path, parts: Parts, quantization: dict[str, Any]) -> None:
    actual = read(folder, parts, quantization)
    for x in (*actual.first.values(), *actual.tensors.values()):
        ex.read_values(x.x if isinstance(x, ex.Transposed) else x, 0, ex.size_of(x))


@pytest.mark.parametrize(("quantization", "parts", "change", "refusal"), HOSTILE)
def test_inconsistent_shapes_are_refused(
    tmp_path: Path, quantization: dict[str, Any], parts: Parts, change: Callable[[Parts], Parts], refusal: str
) -> None:
    with refuses(FormatError, refusal, tmp_path / "model.safetensors") as caught:
        read_values(tmp_path, change(parts), quantization)
    assert "x_proj" in caught.value.message


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "hqq"},
        {"quant_method": ["fp8"]},
        {"quant_method": "gptq", "bits": "4"},
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"block_structure": [0, 1]}}}},
        {"quant_method": "fp8", "weight_block_size": [128]},
        ["fp8"],
    ],
)
def test_invalid_configurations_are_refused(tmp_path: Path, quantization: Any) -> None:
    with refuses((FormatError, TypeNotSupported), "QK-E112|QK-E300 config.json"):
        read(tmp_path, _fp8_parts(), quantization)


def test_experts_that_are_partly_quantized(tmp_path: Path) -> None:
    path, want = quantized_moe(tmp_path / "moe")
    opened = open_checkpoint(path, OpenOptions(pre="gpt-2", lossless=True, exact=True))
    expr = opened.converted["blk.0.ffn_down_exps.weight"].expr
    mixture = ex.stack([*expr.xs[:3], ex.as_floats(expr.xs[3])])  # type: ignore[attr-defined]
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(4)]
    assert mixture.type.name == "F32"
    assert (full_array(mixture) == np.stack([want[n] for n in names])).all()


def test_errors_during_a_run_name_the_tensor(tmp_path: Path) -> None:
    path, _ = quantized_moe(tmp_path / "moe")
    stored = dict(read_header(path / "model.safetensors"))
    t = stored["model.layers.1.mlp.experts.2.up_proj.weight_scale"]
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(t.offset + 100)
        file.write(b"\xff\x7f")
    with refuses(QuantkitError, "QK-E113 model.safetensors experts.2.up_proj.weight_scale"):
        convert(path, tmp_path / "x.gguf", None, ConvertOptions(pre="gpt-2"))
    assert not (tmp_path / "x.gguf").exists()


#: What AutoAWQ and AutoGPTQ stored, and the weights as they dequantize them (scripts/make_packed_goldens.py).
REAL_CHECKPOINTS = np.load(Path(__file__).parents[1] / "data" / "packed.npz")


@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in REAL_CHECKPOINTS}))
def test_arrays_of_real_packers_decode_to_their_weights(name: str, tmp_path: Path) -> None:
    method, _, bits = name.removesuffix("-act").partition("-")
    settings = {"quant_method": method, "bits": int(bits or 4), "group_size": 32, "version": "gemm"}
    keys = [key for key in REAL_CHECKPOINTS if key.startswith(f"{name}/") and not key.endswith("/weight")]
    tensors = read(tmp_path, {f"{W}.{key.partition('/')[2]}": REAL_CHECKPOINTS[key] for key in keys}, settings)
    assert list(tensors.tensors) == [f"{W}.weight"]
    values, expected = whole_floats(tensors.tensors[f"{W}.weight"]), REAL_CHECKPOINTS[f"{name}/weight"]
    assert values.shape == expected.shape
    assert (values.astype(np.float16) == expected).all()


def whole_floats(x: ex.Expression) -> Array:
    return ex.read_f32(x, 0, ex.size_of(x)).reshape(x.shape)
