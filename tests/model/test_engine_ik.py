"""Types that only ik_llama.cpp has: products against its libggml.so, logits against its libllama.so on the same file.

Its program multiplies in ways of its own. Where these agree with the decoded weights and activations in 8 bits, so do
we, to the last bits of a float; where they do not, products show why (``test_products``):

| types                                   | activations there  | here | products                              |
|-----------------------------------------|--------------------|------|---------------------------------------|
| IQ*_K, IQ*_KS, IQ2_KL, _R4 of K, IQ     | Q8_K, Q8_K32       | q8_k | equal                                 |
| IQ1_KT to IQ4_KT, Q6_0, Q6_0_R4         | Q8_2_X4            | q8_2 | equal, IQ2_KT and IQ3_KT stretched    |
| IQ4_KSS, IQ5_KS                         | Q8_K               | q8_k | pairs overflow 16 bits there          |
| Q8_KV, Q8_KV_R8                         | Q8_KV              | q8_kv | equal                                |
| IQ1_BN, IQ2_BN                          | Q8_K64             | q8_k64 | equal                               |
| IQ2_BN_R4                               | Q8_K16             | q8_k64 | ours nearer to the decoded weights  |
| Q4_0_R8, IQ4_NL_R4 and their like       | Q8_2_X4            | q8_0 | as llama.cpp's of the base type       |
| most, from 32 rows of x on              |                    |      | weights rounded again to 8 bits there |

That is the wheel, built for AVX2. QUANTKIT_IK_LIB names a folder with libraries of 8337e4cd3 built otherwise: for
AVX-512 with VNNI pairs overflow in more types.

Single tokens are a forward pass in which few values lie on a border of rounding (test_engine_quantized.py); with more
of them the median row still agrees in 7 digits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_products import Rows
from ik_products import IkGgml
from matmul_cases import products
from peer_cache import answer, file_answer, peer

import quantkit
from conftest import DATA
from libllama import Libllama, nmse, perplexity
from quantkit.formats.gguf import Field, ValueType, open_gguf, write_gguf
from quantkit.kernels import dequantize, quantize
from quantkit.kernels.cpu.interleave import deinterleave_rows
from quantkit.kernels.cpu.matmul.activations import SCALES
from quantkit.kernels.formats import activation_format, has_decoder, has_encoder
from quantkit.kernels.interleave import base_of, is_interleaved
from quantkit.kernels.reference import decode_rows
from quantkit.model.engine import load
from quantkit.types import BY_NAME, TYPES, TensorType

pytestmark = pytest.mark.peer

#: Its formats of activations that are ours: Q8_K32 has other sums, and levels mirrored are the same values.
COMMON_FORMATS = {"Q8_K": "q8_k", "Q8_K32": "q8_k", "Q8_2_X4": "q8_2", "Q8_KV": "q8_kv", "Q8_K64": "q8_k64"}
#: Types whose unsigned levels are too large for products of pairs in 16 bits, and the offset of these levels.
OVERFLOWING = {"IQ5_KS": 128, "IQ4_KSS": 128}
#: The same in a library that is built for AVX-512 with VNNI.
WIDE_OVERFLOWING = (*OVERFLOWING, "IQ4_K", "IQ5_K", "IQ6_K", "IQ4_KS")

ENCODABLE = [t for t in TYPES if t.trees == "ik" and t.block > 1 and has_decoder(t) and has_encoder(t)]
#: Those it has no products for (Q4_0_4X4 and its like), or did not have yet when the wheel was built.
MISSING = ("Q4_0_4X4", "Q4_0_4X8", "Q4_0_8X8", "MXFP4_R8", "Q8_K_R16")
MULTIPLIED = [t for t in ENCODABLE if t.name not in MISSING]

N, ROWS, OUT = 512, 8, 64


@pytest.fixture(scope="module")
def ik(ik_lib: Path) -> IkGgml:
    return IkGgml(ik_lib)


def overflows(ik: IkGgml, t: TensorType) -> bool:
    """Return whether sums of pairs of products overflow in ik_llama.cpp."""
    return t.name in (WIDE_OVERFLOWING if ik.has_vnni else OVERFLOWING)


def has_common_format(ik: IkGgml, t: TensorType) -> bool:
    """Return whether both multiply weights of type ``t`` by the same activations."""
    return COMMON_FORMATS.get(ik.activations_of(t).name) == activation_format(base_of(t))


def random_inputs(t: TensorType, rows: int = ROWS) -> tuple[Any, Any]:
    """Return weights, uint8 [OUT, row_bytes], and activations, float32 [rows, N], as uneven as a model's."""
    rng = np.random.default_rng(t.id)
    x = rng.standard_normal((rows, N)) * np.exp(0.5 * rng.standard_normal(N))
    w = rng.standard_normal((OUT, N)).astype(np.float32)
    return quantize(w, t, np.ones(N, np.float32)), x.astype(np.float32)


def product(w: Any, t: TensorType, x: Any) -> tuple[Any, Any]:
    """Return quantkit's product, in double, and that of the decoded weights with the unrounded activations."""
    base = base_of(t)
    weights = w
    if is_interleaved(t):
        deinterleave_rows(t, w, weights := np.empty((len(w), base.row_bytes(N)), np.uint8))
    rows = Rows(base, x)
    return products(weights, base, *rows.values()), products(weights, base, x.astype(np.float64), np.zeros((len(x), 0)))


@pytest.mark.parametrize("t", MULTIPLIED, ids=str)
def test_products(ik: IkGgml, t: TensorType) -> None:
    w, x = random_inputs(t, 31 if overflows(ik, t) else ROWS)
    actual, exact = product(w, t, x)
    expected = ik.product(w, t, x)
    if overflows(ik, t):
        if t.name in OVERFLOWING:
            assert nmse(expected, overflowing(w, t, x)) < 1e-12
        assert nmse(expected, exact) > (3 if t.name in OVERFLOWING else 1.2) * nmse(actual, exact)
    elif has_common_format(ik, t):
        assert nmse(expected, actual) < 1e-12
    else:
        assert nmse(actual, exact) < 1.25 * nmse(expected, exact)


@pytest.mark.parametrize("t", MULTIPLIED, ids=str)
def test_products_with_many_rows(ik: IkGgml, t: TensorType) -> None:
    """Weights that are not rounded again are at least as near to the decoded ones."""
    w, x = random_inputs(t, 64)
    actual, exact = product(w, t, x)
    assert nmse(actual, exact) < 1.02 * nmse(ik.product(w, t, x), exact)


def overflowing(w: Any, t: TensorType, x: Any) -> Any:
    """Return the product as AVX2's vpmaddubsw makes it: sums of two neighbours stop at 32767."""
    blocks = np.ascontiguousarray(w[:, 4:]).reshape(OUT * N // 256, -1)
    if t.name == "IQ5_KS":
        scale = blocks[:, :8].astype(np.int64)
    else:  # eight lowest bits of words
        words = blocks.view("<u2").reshape(len(blocks), 8, 8)
        scale = ((words & 1) << np.arange(8)).sum(2).astype(np.int64)
    raised = (scale & 1) * (2 if t.name == "IQ5_KS" else 4)
    scale = ((scale & 254) - 127).reshape(OUT, -1)
    d = np.ascontiguousarray(w[:, :4]).view("<f4").astype(np.float64)
    levels = np.rint(decode_rows(t, w).reshape(OUT, -1, 32) / (d * scale)[:, :, None]).astype(np.int64)
    excess = OVERFLOWING[t.name] - raised.reshape(OUT, -1)
    levels += excess[:, :, None]
    rows = Rows(t, x)
    d_x = rows.part(SCALES, 16, np.float32)[:, ::2].astype(np.float64)
    q = rows.part(0, 256, np.int8).reshape(len(x), -1, 32).astype(np.int64)
    q *= np.sign(d_x).astype(np.int64)[:, :, None]  # its scales are positive
    pairs = np.einsum("obip,rbip->robi", levels.reshape(OUT, -1, 16, 2), q.reshape(len(x), -1, 16, 2))
    assert np.abs(pairs).max() > 32767
    dots = pairs.clip(-32768, 32767).sum(3) - excess * q.sum(2)[:, None, :]
    return np.einsum("rob,rb,ob->ro", dots.astype(np.float64), np.abs(d_x), scale * d)


# ---------------------------------------------------------------- logits

LOADED = [t for t in MULTIPLIED if "_BN" not in t.name]
#: Interleaved ones are multiplied as their base types; of the others one of each family and kind of row, and what
#: overflows. Products of each type are compared above; QUANTKIT_ALL=1 takes all.
KINDS = {(t.family, t.row_header, t.name in OVERFLOWING): t for t in LOADED if not is_interleaved(t)}
TEST_TYPES = LOADED if os.environ.get("QUANTKIT_ALL") else list(KINDS.values())


def logits(path: Path, tokens: Any) -> Any:
    """Return our logits of sequences of tokens."""
    with load(path, kv_type="f16") as model:
        return np.stack([model.forward(sequence) for sequence in tokens])


def by_row(actual: Any, expected: Any) -> Any:
    """Return the NMSE of each row."""
    a, b = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (actual, expected))
    return np.square(a - b).sum(1) / np.square(b).sum(1)


@pytest.fixture(scope="module")
def one_layer(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of tiny-moe."""
    options = quantkit.QuantizeOptions(prune_layers=(1, 2, 3), no_provenance=True)
    quantkit.quantize(tiny_moe, path := tmp_path_factory.mktemp("ik") / "one-layer.gguf", "COPY", options)
    return path


@pytest.mark.parametrize("t", TEST_TYPES, ids=str)
def test_logits(tmp_path: Path, ik_lib: Path, ik: IkGgml, one_layer: Path, t: TensorType) -> None:
    """All matrices in this type, embeddings too; but its IQ6_K there are decoded by a polynomial, not by the table."""
    embeddings = "Q8_0" if base_of(t).name == "IQ6_K" else None
    options = quantkit.QuantizeOptions(
        imatrix=DATA / "tiny-moe-imatrix.gguf", pure=True, no_provenance=True, token_embedding_type=embeddings
    )
    path = tmp_path / "m.gguf"
    quantkit.quantize(one_layer, path, t.name, options)
    with load(path) as model:
        text = (DATA / "tiny-moe-evaluation.txt").read_text()[:1000]
        tokens = np.asarray(model.tokenizer.encode(text)[:64], np.int32)
    single, batches_of_4 = tokens.reshape(64, 1), tokens.reshape(16, 4)
    peer = Libllama(ik_lib, ik=True)
    actual, expected = logits(path, single), peer.logits(path, single, batch=1)
    if overflows(ik, t) or not has_common_format(ik, t):
        assert nmse(actual, expected) < 5e-3
        return
    assert nmse(actual, expected) < 1e-4
    assert np.median(by_row(actual, expected)) < 1e-11
    assert np.median(by_row(logits(path, batches_of_4), peer.logits(path, batches_of_4, batch=4))) < 1e-11


def with_long_rows(tiny_moe: Path, path: Path) -> Path:
    """Write tiny-moe with all neurons of its experts twice, at half the weight: the same model, rows of 512 in down."""
    width = "qwen3moe.expert_feed_forward_length"
    with open_gguf(tiny_moe) as source:
        fields = [
            Field.of(width, 2 * f.value, ValueType.UINT32) if f.key == width else f for f in source.fields.values()
        ]
        tensors = []
        for name, tensor in source.tensors.items():
            shape, data = tensor.shape, source.data(tensor)
            if name.endswith("_exps.weight"):
                axis, factor = (2, 0.5) if "down" in name else (1, 1)
                values = dequantize(data.reshape(-1, tensor.type.row_bytes(shape[0])), tensor.type, shape[0])
                values = np.concatenate([values.reshape(shape[::-1]) * np.float32(factor)] * 2, axis)
                tensors.append((name, values.shape[::-1], BY_NAME["F32"], values))
            else:
                tensors.append((name, shape, tensor.type, data))
        write_gguf(path, fields, tensors)
    return path


@pytest.mark.parametrize("name", ["IQ1_BN", "IQ2_BN", "IQ2_BN_R4"])
def test_logits_of_ternary_types(tmp_path: Path, ik_lib: Path, ik: IkGgml, tiny_moe: Path, name: str) -> None:
    """Its products abort on rows of fewer than 512 values; those of IQ2_BN_R4 have activations of their own."""
    path, tokens = tmp_path / "m.gguf", np.arange(100, 148, dtype=np.int32)[:, None]
    rule = quantkit.QuantizeOptions(custom_q=(f"ffn_down_exps={name.lower()}",), pure=True, no_provenance=True)
    quantkit.quantize(with_long_rows(tiny_moe, tmp_path / "long.gguf"), path, "Q6_0", rule)
    actual, expected = logits(path, tokens), Libllama(ik_lib, ik=True).logits(path, tokens, batch=1)
    if not has_common_format(ik, BY_NAME[name]):
        assert nmse(actual, expected) < 1e-3
        return
    assert nmse(actual, expected) < 1e-4
    assert np.median(by_row(actual, expected)) < 1e-11


# ---------------------------------------------------------------- perplexity

#: What ik_llama.cpp's llama-perplexity gives tiny-moe quantized by its llama-quantize: -c 256, 228 chunks; importance
#: by llama.cpp, the router in Q8_0. BF16 has 30.3366 there, here and in llama.cpp 30.28. Others are compared with what
#: the wheel's library gives the wheel's file, 12 chunks.
EXPECTED_PPL = {"IQ4_KS": 30.5527, "IQ2_KT": None, "IQ2_KS": None}


@pytest.mark.parametrize("name", EXPECTED_PPL)
def test_perplexity(tmp_path: Path, ik_bin: Path, tiny_moe: Path, name: str) -> None:
    path, folder = tmp_path / "m.gguf", ik_bin.parent
    environment = {"LD_LIBRARY_PATH": f"{folder}/lib:{folder.parent}/ik_llama_cpp_python.libs", "PATH": "/usr/bin:/bin"}
    options = ["--imatrix", DATA / "tiny-moe-imatrix.dat", "--ffn-gate-inp-type", "q8_0"]
    command = [ik_bin / "llama-quantize", *options, tiny_moe, path, name, "2"]
    file_answer(command, path, environment)
    text, expected_ppl, chunks = (DATA / "tiny-moe-evaluation-whole.txt").read_bytes(), EXPECTED_PPL[name], None
    if expected_ppl is None:
        with load(path) as model:
            tokens = np.asarray(model.tokenizer.encode(text.decode()), np.int32)[: 12 * 256].reshape(12, 256)
        library, chunks = Libllama(folder / "lib", ik=True), len(tokens)

        def run_peer() -> bytes:
            return str(perplexity(library.logits(path, tokens, batch=256), tokens)).encode()

        expected_ppl = float(answer(run_peer, "perplexity", peer(folder / "lib"), path, tokens))
    assert quantkit.perplexity(path, text, n_ctx=256, chunks=chunks).ppl.value == pytest.approx(expected_ppl, rel=3e-3)
