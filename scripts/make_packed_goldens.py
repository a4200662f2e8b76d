"""Record the output of real packers: AutoAWQ's GEMM layers, AutoGPTQ's of 2, 3, 4 and 8 bits, with and without
act-order.

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1    # unpack both below DIR: DIR/awq, DIR/auto_gptq
    PYTHON scripts/make_packed_goldens.py DIR

PYTHON has torch and transformers. Only the packing modules are loaded, not their dependencies for quantization. Weights
are computed from the codes, zero points and scales that are then packed, so that packing does not round;
tests/data/packed.npz has the packed arrays, and the weights as dequantized by the packers' own code (float16).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

OUT = Path(__file__).parents[1] / "tests" / "data" / "packed.npz"
ROWS, COLUMNS, GROUP = 64, 128, 32


def import_module_alone(name: str, path: Path | None = None) -> None:
    """Register a module without running it: a package of which only parts are needed, or a missing one."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [str(path)]
    sys.modules[name] = module


def random_weights(bits: int, half: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [rows, columns], zero points and scales [rows, groups]."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
    zeros = rng.integers(1, 1 << bits, (ROWS, COLUMNS // GROUP))
    scales = rng.uniform(0.5, 2.0, zeros.shape).astype(np.float16 if half else np.float32)
    return torch.tensor(codes), torch.tensor(zeros), torch.tensor(scales)


def linear(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> torch.nn.Linear:
    """Return a layer with the dequantized weights."""
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = (codes - zeros[:, index]).float() * scales.float()[:, index]
    return layer


def awq() -> dict[str, np.ndarray]:
    gemm = importlib.import_module("awq.modules.linear.gemm")
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    vars(gemm)["get_best_device"] = lambda: "cpu"
    codes, zeros, scales = random_weights(4)
    layer = linear(codes, zeros, scales, torch.arange(COLUMNS) // GROUP)
    packed_layer = gemm.WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales.t().float(), zeros=zeros.t().float())
    weight = dequantize(packed_layer.qweight, packed_layer.qzeros, packed_layer.scales, 4, GROUP)
    return arrays("awq", packed_layer, weight.t())


def gptq(bits: int, act_order: bool) -> dict[str, np.ndarray]:
    cls = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    codes, zeros, scales = random_weights(bits)
    index = torch.arange(COLUMNS) // GROUP
    if act_order:
        index = index[torch.from_numpy(np.random.default_rng(9).permutation(COLUMNS))]
    layer = linear(codes, zeros, scales, index)
    packed_layer = cls(bits, GROUP, COLUMNS, ROWS, False)
    packed_layer.pack(layer, scales.float(), zeros.float(), index.to(torch.int32))
    packed_layer.scales = packed_layer.scales.half()
    weight = packed_layer(torch.eye(COLUMNS, dtype=torch.float16)).t()
    return arrays(f"gptq-{bits}{'-act' if act_order else ''}", packed_layer, weight)


def arrays(name: str, packed_layer: Any, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the stored arrays, and the weights."""
    keys = [key for key in ("qweight", "qzeros", "scales", "g_idx") if hasattr(packed_layer, key)]
    values = {f"{name}/{key}": getattr(packed_layer, key).numpy() for key in keys}
    return values | {f"{name}/weight": weight.detach().to(torch.float16).contiguous().numpy()}


def main() -> None:
    where = Path(sys.argv[1])
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        import_module_alone(name, where / name.replace(".", "/"))
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        import_module_alone(name, where / name.replace(".", "/"))
    import_module_alone("accelerate")
    rows = awq()
    for bits in (2, 3, 4, 8):
        for act_order in (False, True):
            rows |= gptq(bits, act_order)
    with OUT.open("wb") as file:
        np.savez_compressed(file, **dict(sorted(rows.items())))  # type: ignore[arg-type]
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
