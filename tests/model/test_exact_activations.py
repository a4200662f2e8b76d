"""Exact activations: a file's logits are those of its decoded copy in F32, bit by bit, and its divergence from it 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_products import TEAMS, aligned
from matmul_cases import draw_weights
from refusals import refuses
from type_params import DECODED_ALIKE

import quantkit
from quantkit.activations import ACTIVATIONS, EXACT, RUNTIME
from quantkit.errors import RecipeError
from quantkit.kernels import dequantize
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.matmul.matmul import DECODED_TYPE, cached_rows, exact_products_of, mul_mat, scratch_bytes
from quantkit.kernels.formats import FORMATS
from quantkit.model.engine import load
from quantkit.model.placement import Placement
from quantkit.quantize import QuantizeOptions
from quantkit.types import BY_NAME, TensorType
from zoo import write_zoo

#: Types of the layers of a model: of blocks of 32 and 256, with and without minimums, and floats.
MIXTURE = (r"ffn_down=Q5_1", r"ffn_gate=IQ4_NL", r"attn_output=BF16", r"attn_k=F16", r"attn_v=Q4_0")
TOKENS = np.random.default_rng(3).integers(0, 64, 40).astype(np.int32)
#: With and without minimums and row scales, of blocks of 32 and 256; others differ in their unpackers alone.
SAMPLE = ("Q5_1", "Q6_K", "MXFP4", "Q8_KV", "IQ2_KL")
BLOCKS = [
    pytest.param(t, id=t.name, marks=() if t.name in SAMPLE else pytest.mark.exhaustive)
    for name in dict.fromkeys([*SAMPLE, *(t.name for t in DECODED_ALIKE)])
    if (t := BY_NAME[name]).block > 1 and t.in_files and FORMATS[name].row_scale_gain == 1
]


def products(t: TensorType, data: np.ndarray, x: np.ndarray, n_out: int) -> np.ndarray:
    """Return exact products, float32 [rows, n_out], of rows of weights as stored, uint8 [n_out, row_bytes]."""
    team, n = TEAMS[1], x.shape[1]
    batch, out = Batch(team, len(x)), np.zeros((len(x), n_out), np.float32)
    batch.set(np.zeros(len(x), np.int32))
    size = -(-scratch_bytes(DECODED_TYPE, n) // 64) * 64
    scratch = aligned(size)
    block = mul_mat.block(
        batch=batch.address, x=address_of(x), x_stride=4 * n, w=address_of(data), row_bytes=data.shape[1],
        products=exact_products_of(t), n_in=n, n_out=n_out, out=address_of(out), out_stride=4 * n_out, rows_of=0,
        per=1, bias=0, scale=0, scratch=address_of(scratch), scratch_bytes=size, at_once=cached_rows(4 * n),
    )  # fmt: skip
    Tape(team, batch, [(mul_mat, block)]).run()
    return out


@pytest.mark.parametrize("t", BLOCKS)
def test_products_are_those_of_the_decoded_rows(t: TensorType) -> None:
    rng = np.random.default_rng(7)
    n, n_out = 288 if t.block < 256 else 512, 35
    data = np.ascontiguousarray(draw_weights(t, (n_out, n), rng, scale=(0.25, 1)))
    values = np.ascontiguousarray(dequantize(data, t).reshape(n_out, n))
    for rows in (1, 3, 7):  # row by row, four rows at a time, a panel
        x = rng.standard_normal((rows, n)).astype(np.float32)
        result = products(t, data, x, n_out)
        assert np.array_equal(result, products(DECODED_TYPE, values.view(np.uint8).reshape(n_out, -1), x, n_out))
        magnitudes = np.abs(x) @ np.abs(values).T
        assert (np.abs(result - x.astype(np.float64) @ values.astype(np.float64).T) <= 1e-6 * magnitudes).all()


@pytest.fixture(scope="module", params=["llama-dense", "qwen3moe-moe", "deepseek2-moe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in several types, and its decoded copy."""
    folder = tmp_path_factory.mktemp("exact")
    source, path, copy = folder / "f32.gguf", folder / "model.gguf", folder / "decoded.gguf"
    write_zoo(request.param, source)
    quantkit.quantize(source, path, "Q8_0", QuantizeOptions(tensor_type=MIXTURE))
    quantkit.quantize(path, copy, "F32", QuantizeOptions(allow_requantize=True))
    return path, copy


def test_logits_are_those_of_the_decoded_copy(pair: tuple[Path, Path]) -> None:
    path, copy = pair
    with load(path, activations=EXACT) as a, load(copy) as b, load(path) as rounded:
        assert (a.activations, b.activations) == (EXACT, RUNTIME)
        logits = a.forward(TOKENS)
        assert np.array_equal(logits, b.forward(TOKENS))
        assert np.abs(logits - rounded.forward(TOKENS)).max() > 1e-3
        session, copy_session = a.session(8), b.session(8)
        for token in TOKENS[:4]:
            assert np.array_equal(session.decode([token]), copy_session.decode([token]))  # type: ignore[arg-type]


def test_gpus_and_unknown_activations_are_refused(pair: tuple[Path, Path]) -> None:
    with refuses(RecipeError, "QK-E303"):
        load(pair[0], activations=EXACT, placement=Placement(gpu_layers=1))
    with refuses(RecipeError, "QK-E203", *ACTIVATIONS):
        load(pair[0], activations="rounded")
