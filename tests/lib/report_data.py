"""Synthetic reports: many files of deep models, with some missing measurements."""

from __future__ import annotations

import math

import numpy as np

from quantkit.evaluate import Estimate
from quantkit.report.data import (
    Base,
    Costs,
    Coverage,
    File,
    GroupCost,
    Matrix,
    ModelSummary,
    Quality,
    Quantile,
    Report,
    Speed,
    Support,
    TensorCoverage,
    Text,
)
from quantkit.types import type_by_name

#: Presets, in descending size; each type's neighbours in a file are the next smaller and larger ones.
PRESETS = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S"),
    *("IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "IQ4_KT", "IQ3_KT", "IQ2_KT", "IQ1_KT", "IQ2_K", "IQ3_K", "IQ4_K"),
    *("IQ5_K", "IQ6_K", "IQ2_KS", "IQ4_KS", "IQ4_KSS", "IQ2_KL"),
)
_KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def report_of(n_files: int, layers: int) -> Report:
    """Return a report on ``n_files`` presets of a mixture of experts, in a shell's order of files."""
    files = sorted((_file(preset, i, layers) for i, preset in enumerate(_spread(n_files))), key=lambda f: f.name)
    costs = [
        GroupCost(
            f"blk.{layer}.{kind}",
            kind,
            layer,
            (f"blk.{layer}.{kind}.weight",),
            name,
            0.1 * _error(name) * (1 + layer % 5),
            1e-6,
        )
        for kind in _KINDS[1:]  # attn_q is not measured
        for layer in range(layers)
        for name in ("Q4_K", "Q3_K", "Q6_K", "IQ3_XXS")
        if (layer + len(kind)) % 7
    ]
    covered = [
        TensorCoverage(f"blk.{i}.{kind}.weight", kind, i, True, 128, int(i == 2), _tokens(i, layers), 9000.0)
        for i in range(layers)
        for kind in _KINDS
    ]
    return Report(
        title="Qwen3 30B A3B: GGUF quantizations",
        made="2026-01-01",
        version="0",
        model=ModelSummary(
            "Qwen3-30B-A3B",
            "qwen3moe",
            30_500_000_000,
            3_300_000_000,
            (("layers", str(layers)), ("experts", "128"), ("experts used", "8")),
            (("general.license", "apache-2.0"),),
        ),
        files=tuple(files),
        base=Base("Qwen3-30B-A3B-BF16.gguf", "b", 61_000_000_000, ("BF16",)),
        text=Text("evaluation.txt", "0" * 64, 1_234_567),
        imatrix=Coverage("imatrix.gguf", ("calibration.txt",), ("1" * 64,), 0.99, 100, tuple(covered)),
        sensitivity=Costs("s.json", "held-out.txt", tuple(costs)),
    )


def _spread(n: int) -> list[str]:
    """Return ``n`` presets, spread over all sizes."""
    return [PRESETS[i * len(PRESETS) // n] for i in range(n)]


def _tokens(layer: int, layers: int) -> int:
    return 0 if layer == 2 else 60 if layer == layers // 2 else 11_000 * (1 + layer % 8)


def _bits(name: str) -> float:
    t = type_by_name(name)
    return 8 * t.block_bytes / t.block


def _error(name: str) -> float:
    return 1.2 * 0.5 ** _bits(name)


def _type_of(preset: str) -> str:
    """Return the type of most matrices of a preset."""
    name = preset.removesuffix("_M").removesuffix("_L").removesuffix("_S") if "_K_" in preset else preset
    return {"IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_XXS", "IQ2_M": "IQ2_S", "Q2_K_S": "Q2_K"}.get(name, name)


def _file(preset: str, i: int, layers: int) -> File:
    rng = np.random.default_rng(i)
    usual = _type_of(preset)
    types = {"attn_v": "Q6_K", "ffn_down_exps": "Q5_K", "attn_output": "IQ4_NL", "attn_k": "Q5_0"}
    matrices = [
        Matrix(
            f"blk.{layer}.{kind}.weight",
            kind,
            layer,
            name := types.get(kind, usual) if layer % 3 == 0 else usual,
            1 << 22,
            1 << 21,
            None if kind == "attn_q" else _error(name) * (1 + 0.3 * math.sin(layer)),
            True,
        )
        for kind in _KINDS
        for layer in range(layers)
    ]
    matrices += [
        Matrix(f"{kind}.weight", kind, None, "Q6_K", 1 << 26, 1 << 25, 0.01) for kind in ("token_embd", "output")
    ]
    bits = _bits(usual) + 0.1 + 0.25 * preset.endswith(("_M", "_L"))
    kld = float(1.6 * 0.38**bits * (1 + 0.3 * rng.normal()))
    nbytes = int(30.5e9 * bits / 8)
    quality = Quality(
        key="k",
        n_scored=28_956,
        n_ctx=512,
        chunks=114,
        ppl=Estimate(8.1 * (1 + kld), 0.06),
        ppl_base=Estimate(8.1, 0.06),
        ppl_ratio=Estimate(1 + 0.9 * kld - 0.001, 0.02 * math.sqrt(kld)),
        kld=Estimate(kld, kld / 40),
        bound=1e-6,
        same_top=Estimate(1 - 0.6 * math.sqrt(kld), 0.001),
        rms_p_diff=Estimate(math.sqrt(kld) / 5, 0.001),
        quantiles=tuple(
            Quantile(s, kld * (0.25 / s) ** 0.8) for s in (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.002, 0.001)
        ),
    )
    return File(
        name=f"Qwen3-30B-A3B-{preset}.gguf",
        fingerprint=f"{i}",
        shards=1,
        nbytes=nbytes,
        tensor_bytes=nbytes,
        values=30_500_000_000,
        preset=preset,
        by_type=((usual, 300, nbytes // 2), ("Q6_K", 40, nbytes // 3), ("Q5_K", 20, nbytes // 8), ("F32", 80, 1 << 20)),
        matrices=tuple(matrices),
        support=(
            Support("llama.cpp", "K" not in preset or not preset.startswith("IQ"), "loads"),
            Support("ik_llama.cpp", True, "loads"),
        ),
        provenance=(("quantize.imatrix.file", "imatrix.gguf"), ("quantkit.quantize.recipe", preset)),
        command=f"quantkit quantize --imatrix imatrix.gguf model-BF16.gguf Qwen3-30B-A3B-{preset}.gguf {preset}",
        quality=quality,
        errors_key="e",
        speeds=tuple(
            Speed(test, Estimate(float(rng.uniform(low, 2 * low)), low / 20), "a CPU, 16 threads")
            for test, low in (("pp512", 300.0), ("tg64", 20.0))
        ),
    )
