"""Every type with an encoder or a decoder: golden bytes both ways, round trips, and refusals."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from refusals import refuses
from type_params import DECODABLE, ENCODABLE, GOLDEN, UNWEIGHTED, WEIGHTED

from edge_rows import assert_same_bytes
from guide import step
from quantkit.errors import FormatError, RecipeError, TypeNotSupported
from quantkit.kernels import dequantize, quantize
from quantkit.types import BY_NAME, TensorType

#: What PyPI gguf decodes too.
KINDS = {kind.name: kind for kind in [*gguf.quants._type_traits, gguf.GGMLQuantizationType.F32]}
SHARED = [t for t in DECODABLE if t.name in KINDS]
Golden = np.lib.npyio.NpzFile


@pytest.mark.parametrize("t", [t for t in GOLDEN if t in UNWEIGHTED], ids=str)
def test_golden_encoding(golden: Golden, t: TensorType) -> None:
    key = f"{t.name}+imatrix" if t.imatrix == "ignored" and t.name not in golden else t.name
    if key in golden:
        assert_same_bytes(quantize(golden["x"], t), golden[key], t)
    else:
        assert "mainline" in t.needs_imatrix, step("Add a type", 9, TYPE=t.name)


@pytest.mark.parametrize("t", GOLDEN, ids=str)
def test_golden_encoding_with_imatrix(golden: Golden, t: TensorType) -> None:
    assert f"{t.name}+imatrix" in golden, step("Add a type", 9, TYPE=t.name)
    assert_same_bytes(quantize(golden["x"], t, golden["imatrix"]), golden[f"{t.name}+imatrix"], t)


@pytest.mark.parametrize("t", SHARED, ids=str)
def test_golden_decoding(golden: Golden, t: TensorType) -> None:
    key = t.name if t.name in golden else f"{t.name}+imatrix"
    data = golden[key] if key in golden else quantize(golden["x"], t)
    want = gguf.dequantize(data, KINDS[t.name])
    assert np.array_equal(dequantize(data, t, 1024).view(np.uint32), want.view(np.uint32))


def test_golden_bytes_belong_to_types_with_decoders(golden: Golden) -> None:
    names = {key.partition("+")[0] for key in golden} - {"x", "imatrix"}
    assert names <= {t.name for t in DECODABLE}


@pytest.mark.parametrize("t", WEIGHTED, ids=str)
def test_a_skewed_imatrix_favors_its_columns(t: TensorType) -> None:
    rng = np.random.default_rng(2)
    n = 4 * t.block
    x = rng.standard_normal((64, n)).astype(np.float32)
    weights = np.ones(n, np.float32)
    weights[::4] = 100

    def error(imatrix: np.ndarray | None) -> float:
        return float(((dequantize(quantize(x, t, imatrix), t, n) - x)[:, ::4] ** 2).mean())

    ones = error(np.ones(n, np.float32))
    none = error(None) if t in UNWEIGHTED else ones
    assert error(weights) < 0.98 * none
    assert ones < 1.3 * none


@pytest.mark.parametrize("t", ENCODABLE, ids=str)
def test_round_trip_error(t: TensorType) -> None:
    x = np.random.default_rng(4).standard_normal((32, 4 * t.block if t.block > 1 else 100)).astype(np.float32)
    ones = None if t in UNWEIGHTED else np.ones(x.shape[1], np.float32)
    y = dequantize(quantize(x, t, ones), t, x.shape[1])
    error = np.sqrt(((y - x) ** 2).mean())
    # A bit halves the error, down to what the mantissas of BF16 and F16 hold; three levels or two are no fit at all.
    crude = {"F32": 0.0, "F16": 3e-4, "BF16": 2.5e-3} | {c.name: 0.9 for c in ENCODABLE if c.bpw < 2.5}
    limit = crude.get(t.name, 2 ** (1.5 - t.bpw))
    assert error <= limit
    assert error > limit / 6 or t.name == "F32"
    rerun = dequantize(quantize(y, t, ones), t, x.shape[1])
    assert np.sqrt(((rerun - y) ** 2).mean()) <= error + 1e-12, "what was encoded once encodes with more error"


def test_leading_axes_are_rows_and_names_are_types() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    assert np.array_equal(quantize(x, "q8_0"), quantize(x.reshape(6, 64), BY_NAME["Q8_0"]))
    assert quantize(x[0, 0], "Q8_0").shape == (1, 68)
    assert quantize(x[:0], "Q8_0").shape == (0, 68)
    assert dequantize(quantize(x, "Q8_0").reshape(2, 3, 68), "Q8_0", 64).shape == (6, 64)


def test_strided_and_readonly_rows() -> None:
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    want = quantize(x[:, ::2].copy(), "Q4_0")
    assert np.array_equal(quantize(x[:, ::2], "Q4_0"), want)
    x.flags.writeable = want.flags.writeable = False
    assert np.array_equal(quantize(x[:, ::2], "Q4_0"), want)
    assert dequantize(want, "Q4_0", 64).shape == (4, 64)


ROWS = np.ones((4, 256), np.float32)


@pytest.mark.parametrize(
    ("x", "name", "imatrix", "error", "refusal"),
    [
        (ROWS.astype(np.float64), "Q4_0", None, FormatError, "QK-E210 float32 float64"),
        (ROWS.tolist(), "Q4_0", None, FormatError, "QK-E210"),
        (np.float32(1), "Q4_0", None, FormatError, "QK-E210"),
        (ROWS[:, :0], "Q4_0", None, FormatError, "QK-E303 32"),
        (ROWS[:, :40], "Q4_0", None, TypeNotSupported, "QK-E303 Q4_0 32 40"),
        (ROWS, "Q4_9", None, TypeNotSupported, "QK-E301 Q4_9 Q4_K"),
        (ROWS, "Q8_1", None, TypeNotSupported, "QK-E302 Q8_1"),
        (ROWS, "Q4_K", np.ones(255, np.float32), FormatError, "QK-E119 [255] 256 [256]"),
        (ROWS, "Q4_K", np.ones((1, 256), np.float32), FormatError, "QK-E119"),
        (ROWS, "Q4_K", np.full(256, np.nan, np.float32), FormatError, "QK-E118 NaN"),
        (ROWS * np.float32(1e30), "Q4_0", None, FormatError, "QK-E108 0 Q4_0"),
        (ROWS * np.float32(1e5), "F16", None, FormatError, "QK-E108 0"),
    ],
)
def test_refusals(x: np.ndarray, name: str, imatrix: np.ndarray | None, error: type, refusal: str) -> None:
    with refuses(error, refusal):
        quantize(x, name, imatrix)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_rows_are_refused_by_number(bad: float) -> None:
    x = ROWS.copy()
    x[2, 77] = bad
    with refuses(FormatError, "QK-E108 2 NaN"):
        quantize(x, "Q8_0")


@pytest.mark.parametrize("t", [t for t in ENCODABLE if t not in UNWEIGHTED], ids=str)
def test_types_that_require_an_imatrix(t: TensorType) -> None:
    with refuses(RecipeError, "QK-E212", t):
        quantize(ROWS, t)
    assert quantize(ROWS, t, np.ones(256, np.float32)).shape == (4, t.block_bytes)


@pytest.mark.parametrize(
    ("data", "name", "n", "error", "refusal"),
    [
        (np.zeros((2, 17), np.uint8), "Q4_0", 32, FormatError, "QK-E210 32 Q4_0 18 17"),
        (np.zeros((2, 18), np.int8), "Q4_0", 32, FormatError, "QK-E210 uint8"),
        (np.zeros((2, 18), np.uint8), "Q4_0", 33, TypeNotSupported, "QK-E303 Q4_0 32"),
        (np.zeros((2, 18), np.uint8), "Q4_0", 0, FormatError, "QK-E303 0 32"),
        (np.zeros((2, 68), np.uint8), "I8", 68, TypeNotSupported, "QK-E302 I8"),
    ],
)
def test_refusals_of_dequantize(data: np.ndarray, name: str, n: int, error: type, refusal: str) -> None:
    with refuses(error, refusal):
        dequantize(data, name, n)


def test_importing_quantkit_does_not_load_the_compiler() -> None:
    code = "import sys, quantkit, quantkit.kernels; sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_values_per_row_follow_from_the_bytes() -> None:
    x = np.random.default_rng(5).standard_normal((8, 1024)).astype(np.float32)
    for t in UNWEIGHTED:
        blocks = quantize(x, t)
        assert t.row_values(blocks.shape[1]) == 1024
        assert np.array_equal(dequantize(blocks, t), dequantize(blocks, t, 1024))


@pytest.mark.parametrize(("name", "nbytes"), [("Q4_0", 17), ("Q4_0", 0), ("IQ2_KS", 2), ("IQ2_KS", 71)])
def test_bytes_of_partial_rows_are_refused(name: str, nbytes: int) -> None:
    with refuses(TypeNotSupported, "QK-E303", name, nbytes):
        dequantize(np.zeros((1, nbytes), np.uint8), name)


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS", "Q4_K_R4", "Q8_0"])
def test_importance_of_each_expert(name: str) -> None:
    """Every expert gets the bytes that its rows have with its own importance."""
    rng = np.random.default_rng(6)
    x, imatrix = rng.standard_normal((3, 4, 512)).astype(np.float32), rng.random((3, 512)).astype(np.float32)
    alone = [quantize(x[i], name, imatrix[i]) for i in range(3)]
    assert np.array_equal(quantize(x, name, imatrix), np.concatenate(alone))
    shared = quantize(x, name, imatrix[0])
    assert np.array_equal(shared[:4], alone[0])
    if name != "Q8_0":
        assert not np.array_equal(shared[4:8], alone[1])


@pytest.mark.parametrize("shape", [(2, 512), (3, 256), (1, 3, 512)])
def test_importance_of_wrong_experts_is_refused(shape: tuple[int, ...]) -> None:
    with refuses(FormatError, "QK-E119"):
        quantize(np.ones((3, 4, 512), np.float32), "Q4_K", np.ones(shape, np.float32))


def test_experts_of_interleaved_rows_are_whole_groups() -> None:
    x, imatrix = np.ones((2, 6, 256), np.float32), np.ones((2, 256), np.float32)
    with refuses(FormatError, "QK-E303", "Q4_K_R4"):
        quantize(x, "Q4_K_R4", imatrix)
