"""Products by cuBLAS (--cublas) compared with quantkit's; without a GPU, numpy replaces cuBLAS on the host shim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import cases
from libllama import nmse
from quantkit.formats.gguf import open_gguf
from quantkit.kernels.cuda.core import device as devices
from quantkit.model.backends.cuda.backend import CUDABackend
from quantkit.model.engine import load
from quantkit.model.placement import ALL_LAYERS, Placement

Devices = tuple[str, ...]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch, cuda_devices: Devices) -> list[int]:
    """The rows of every product by cuBLAS from now on."""
    device, rows = devices.open_device("CUDA0"), list[int]()
    gemm = device.gemm_bf16

    def noted(n: int, *arguments: Any) -> None:
        rows.append(n)
        gemm(n, *arguments)

    monkeypatch.setattr(device, "gemm_bf16", noted)
    return rows


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_products(tmp_path_factory.mktemp("cublas") / "products.gguf")


@pytest.mark.parametrize(
    ("name", "bound", "max_vram"),
    [("BF16", 1e-10, None), ("BF16", 1e-10, 0), ("Q4_K", 1e-3, None), ("F32", 0, None)],
)
def test_products_of_every_kind(weights: Path, gemms: list[int], name: str, bound: float, max_vram: int | None) -> None:
    """BF16 differs in the order of sums alone; F32 is not for cuBLAS; few rows never are."""
    with open_gguf(weights) as source:
        results = []
        for cublas in (False, True):
            backend = CUDABackend(source, devices.open_device("CUDA0"), cublas=cublas, max_vram=max_vram)
            results.append(dict(cases.run_products(backend, source, name)))
            backend.close()
            assert bool(gemms) == (cublas and name != "F32")
    for case, result in results[0].items():
        is_few = int(case.split()[-1]) <= 8
        assert nmse(results[1][case], result) <= (1e-13 if is_few else bound), case
    if gemms:
        _, ids = cases.inputs(40)
        by_expert = [n for n in np.bincount(ids.ravel()) if n]
        assert gemms == [40, 40, 40, *5 * by_expert]


@pytest.mark.parametrize("model", ["qwen3moe-moe", "gpt-oss-moe"])
def test_models(tmp_path: Path, model: str, gemms: list[int]) -> None:
    """Biases, gates with limits, batches of several sizes; bf16 has 8 bits, a rounded router may choose otherwise."""
    path, tokens = cases.retyped(tmp_path, "Q8_0", model), cases.retyped_tokens()
    results = []
    for cublas in (False, True):
        with load(path, placement=Placement(ALL_LAYERS, (), ("CUDA0",), embeddings=True), cublas=cublas) as opened:
            session = opened.session(64)
            results.append(np.concatenate([session.decode(part) for part in (tokens[:20], tokens[20:21], tokens[21:])]))
    assert max(gemms) == 20
    assert min(gemms) < 20
    errors = [nmse(a, b) for a, b in zip(*results, strict=True)]
    assert 1e-9 < float(np.median(errors)) < 1e-2
