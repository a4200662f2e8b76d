"""LoRA adapters in PEFT's format for the checkpoints in tests/data/checkpoints, generated without torch or PEFT.

    python tests/lib/adapters.py OUT [NAME ...]

writes OUT/NAME (adapter_config.json and adapter_model.safetensors). The bytes depend only on the table here.
scripts/make_lora_goldens.py checks that PEFT reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import checkpoints

Json = dict[str, Any]
F32 = npt.NDArray[np.float32]

_ATTENTION = r"self_attn\.[qkvo]_proj"
_LINEAR = r"linear_attn\.(in_proj_\w+|out_proj)"
_DENSE = rf"{_ATTENTION}|mlp\.(gate|up|down)_proj"


@dataclass(frozen=True)
class Adapter:
    """An adapter: its checkpoint, its modules (a regular expression of PEFT) and its settings."""

    name: str
    base: str
    modules: str
    rank: int = 8
    alpha: float = 16
    dtype: str = "float32"
    #: Further keys of adapter_config.json.
    config: Json = field(default_factory=dict)
    #: Other files.
    files: Json = field(default_factory=dict)
    #: Types of the conversion.
    outtypes: tuple[str, ...] = ("f32",)
    #: Whether the reference's scale is PEFT's.
    scaled_alike: bool = True
    #: Names of modules that differ from the checkpoint's.
    renamed: tuple[str, str] = ("", "")
    #: Tensors that replace those of the base (a regular expression of names): modules_to_save, trained biases.
    saved: str = ""
    #: Keys that the reference needs in the configuration of the base model.
    base_config: Json = field(default_factory=dict)
    #: Weights of a base model without a description in tests/data/checkpoints, with their shapes.
    shapes: dict[str, tuple[int, ...]] | None = None


_GPU = """---
base_model: meta/Llama-3.2-1B
library_name: peft
license: mit
tags:
- lora
- test
---
# An adapter
"""

ADAPTERS = {
    item.name: item
    for item in (
        Adapter("llama", "llama", _DENSE, rank=32, outtypes=("f32", "f16", "bf16", "q8_0")),
        Adapter(
            "llama-small", "llama", rf"{_ATTENTION}|lm_head|embed_tokens", dtype="float16", outtypes=("f32", "q8_0")
        ),
        Adapter("llama-embedding", "llama", "embed_tokens", dtype="bfloat16"),
        Adapter("Llama-3.2-1B-lora-v0.2", "llama", r"[qv]_proj", dtype="bfloat16", files={"README.md": _GPU}),
        Adapter("llama-rslora", "llama", _DENSE, config={"use_rslora": True}, scaled_alike=False),
        Adapter(
            "llama-patterns",
            "llama",
            _DENSE,
            config={
                "rank_pattern": {"q_proj": 4, r"layers\.1\..*down_proj": 12, "model.layers.2.mlp.up_proj": 16},
                "alpha_pattern": {"v_proj": 32, r"layers\.1\..*down_proj": 7},
            },
            scaled_alike=False,
        ),
        Adapter(
            "llama-rslora-patterns",
            "llama",
            _ATTENTION,
            config={"use_rslora": True, "rank_pattern": {"q_proj": 4, "k_proj": 16}, "alpha_pattern": {"o_proj": 5}},
            scaled_alike=False,
        ),
        Adapter("llama-alora", "llama", _ATTENTION, config={"alora_invocation_tokens": [577, 3, 1]}),
        Adapter("mixtral", "mixtral", rf"{_ATTENTION}|experts\.\d+\.w[123]"),
        Adapter("qwen2", "qwen2", _DENSE, dtype="bfloat16", outtypes=("f32", "bf16")),
        Adapter("qwen3", "qwen3", _DENSE, dtype="bfloat16"),
        Adapter("qwen3-moe", "qwen3-moe", rf"{_ATTENTION}|experts\.\d+\.(gate|up|down)_proj", outtypes=("f32", "bf16")),
        Adapter("qwen3.5", "qwen3.5", rf"{_LINEAR}|{_ATTENTION}", base_config={"mtp_num_hidden_layers": 1}),
        Adapter("qwen3-next", "qwen3-next", rf"{_LINEAR}|{_ATTENTION}", outtypes=()),  # the reference fails on it
        Adapter("phi3", "phi3", r"qkv_proj|gate_up_proj|o_proj|down_proj"),
        Adapter("ernie4.5-fused", "ernie4.5-fused", r"qkv_proj|up_gate_proj|o_proj|down_proj"),
        Adapter("gemma2", "gemma2", _DENSE),
        Adapter(
            "gemma3-vl",
            "gemma3-vl",
            r"language_model.*self_attn\.[qkvo]_proj",
            renamed=("language_model.model.", "model.language_model."),  # transformers' modules, and its files
        ),
        # Encoders beside the text; modules of transformers have another prefix than its files.
        Adapter(
            "qwen2.5-vl-towers",
            "mm-qwen2.5-vl",
            rf"{_DENSE}|attn\.(qkv|proj)|merger\.mlp\.[02]",
            renamed=("visual.", "model.visual."),
        ),
        Adapter("qwen3-vl-towers", "mm-qwen3-vl", rf"{_DENSE}|attn\.(qkv|proj)|linear_fc[12]"),
        Adapter(
            "gemma3-towers",
            "mm-gemma3",
            rf"{_DENSE}|vision_model\.encoder\..*(out_proj|fc[12])",
            renamed=("vision_tower.", "model.vision_tower."),
        ),
        Adapter("glm4", "glm4", r"self_attn\.[qkvo]_proj|gate_up_proj|down_proj"),
        Adapter("deepseek-v2", "deepseek-v2", r"self_attn\.(q_proj|kv_a_proj_with_mqa|o_proj)"),
        Adapter("granite", "granite", _DENSE),
        Adapter("mistral", "mistral", _ATTENTION),
        Adapter("smollm3", "smollm3", _DENSE),
        Adapter("gpt-oss", "gpt-oss", _ATTENTION),
    )
}
#: Adapters with more than factors, which can only be merged.
MERGED = {
    item.name: item
    for item in (
        Adapter("llama-dora", "llama", rf"{_DENSE}|embed_tokens", rank=4, config={"use_dora": True}),
        Adapter(
            "seed-oss-dora-saved",
            "seed-oss",
            rf"{_ATTENTION}|mlp\.up_proj",
            dtype="bfloat16",
            config={
                "use_dora": True,
                "use_rslora": True,
                "rank_pattern": {"q_proj": 4},
                "alpha_pattern": {"v_proj": 32},
                "modules_to_save": ["embed_tokens", "lm_head"],
                "bias": "all",
            },
            saved=r"(embed_tokens|lm_head)\.weight|self_attn\.[qkv]_proj\.bias",
        ),
    )
}


def modules(adapter: Adapter) -> list[tuple[str, tuple[int, ...]]]:
    """Return the modules that an adapter changes, and the shape of their weights, in the order of PEFT's file."""
    names: list[tuple[str, tuple[int, ...]]] = []
    described = (
        adapter.shapes.items() if adapter.shapes else checkpoints.expand(checkpoints.describe(adapter.base).tensors)
    )
    for name, shape in described:
        module = name.removesuffix(".weight")
        if module != name and len(shape) == 2 and re.search(rf"(^|\.)({adapter.modules})$", module):
            names.append((module, shape))
    return names


def rank_of(adapter: Adapter, module: str) -> int:
    """Return the rank that adapter_config.json gives a module."""
    return int(_pattern(adapter.config.get("rank_pattern", {}), module, adapter.rank))


def scale_of(adapter: Adapter, module: str) -> float:
    """Return PEFT's factor of B @ A."""
    alpha, rank = _pattern(adapter.config.get("alpha_pattern", {}), module, adapter.alpha), rank_of(adapter, module)
    return float(alpha / rank**0.5 if adapter.config.get("use_rslora") else alpha / rank)


def _pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def factors(adapter: Adapter) -> dict[str, tuple[F32, F32]]:
    """Return A [rank, in] and B [out, rank] of every module; of embeddings [rank, vocabulary] and [width, rank]."""
    values = {}
    for module, (rows, columns) in modules(adapter):
        r = rank_of(adapter, module)
        if module.endswith("embed_tokens"):
            rows, columns = columns, rows
        values[module] = (
            _random_values(adapter, f"{module}.A", (r, columns)),
            _random_values(adapter, f"{module}.B", (rows, r)),
        )
    return values


def _random_values(adapter: Adapter, key: str, shape: tuple[int, ...]) -> F32:
    x = checkpoints.draw(f"adapter/{adapter.name}/{key}", "w.weight", shape) * np.float32(0.25)
    dtype, _, data = checkpoints.encode(x, adapter.dtype)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32).reshape(shape)


def delta(adapter: Adapter, module: str) -> npt.NDArray[np.float64]:
    """Return the change of a module's weight by a merge, in float64."""
    a, b = (x.astype(np.float64) for x in factors(adapter)[module])
    product = b @ a * scale_of(adapter, module)
    return product.T if module.endswith("embed_tokens") else product


def tensors(adapter: Adapter) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Return name, dtype, shape and bytes of the tensors in the file."""
    items = []
    for module, pair in factors(adapter).items():
        end = "lora_embedding_{}" if module.endswith("embed_tokens") else "lora_{}.weight"
        module = module.replace(*adapter.renamed) if adapter.renamed[0] else module
        for letter, x in zip("AB", pair, strict=True):
            name = f"base_model.model.{module}.{end.format(letter)}"
            items.append((name, *checkpoints.encode(np.ascontiguousarray(x), adapter.dtype)))
        if adapter.config.get("use_dora"):
            name = f"base_model.model.{module}.lora_magnitude_vector"
            items.append((name, *checkpoints.encode(magnitudes(adapter)[module], adapter.dtype)))
    for name, x in saved_tensors(adapter).items():
        is_wrapped = any(name == f"{module}.bias" for module in factors(adapter))
        name = name.replace(".bias", ".base_layer.bias") if is_wrapped else name
        items.append((f"base_model.model.{name}", *checkpoints.encode(x, adapter.dtype)))
    return sorted(items)


def magnitudes(adapter: Adapter) -> dict[str, F32]:
    """Return the lengths of every module's rows, of embeddings those of its columns, if the adapter is a DoRA."""
    values = {}
    for module, shape in modules(adapter):
        length = shape[1 if module.endswith("embed_tokens") else 0]
        values[module] = np.abs(_random_values(adapter, f"{module}.M", (length,))) + np.float32(0.5)
    return values


def saved_tensors(adapter: Adapter) -> dict[str, F32]:
    """Return the tensors that replace those of the base."""
    if not adapter.saved:
        return {}
    tensors_of_base = checkpoints.expand(checkpoints.describe(adapter.base).tensors)
    matching = [(name, shape) for name, shape in tensors_of_base if re.search(rf"(^|\.)({adapter.saved})$", name)]
    return {name: _random_values(adapter, name, shape) for name, shape in matching}


def config(adapter: Adapter, base: str | None = None) -> Json:
    """Return adapter_config.json."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": rf"(.*\.)?({adapter.modules})",
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **adapter.config,
    }


def sample(x: F32) -> F32:
    """Return some values of a merged weight: of its first two rows and its last one, 16 columns apart."""
    return np.ascontiguousarray(x[[0, 1, -1], ::16] if x.ndim == 2 else x[::16])


def write_adapter(adapter: Adapter | str, out: Path, base: str | None = None) -> Path:
    """Write an adapter as the directory out/name and return it."""
    adapter = {**ADAPTERS, **MERGED}[adapter] if isinstance(adapter, str) else adapter
    path = out / adapter.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config(adapter, base), indent=2) + "\n", encoding="utf-8")
    for name, text in adapter.files.items():
        (path / name).write_text(text, encoding="utf-8")
    checkpoints.write_safetensors(path / "adapter_model.safetensors", tensors(adapter))
    return path


def write_base(adapter: Adapter | str, out: Path) -> Path:
    """Write the base model that an adapter's conversion needs, only config.json, as out/base and return it."""
    adapter = ADAPTERS[adapter] if isinstance(adapter, str) else adapter
    path = out / adapter.base
    path.mkdir(parents=True, exist_ok=True)
    base = {**checkpoints.describe(adapter.base).config, **adapter.base_config}
    (path / "config.json").write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")
    return path


def digest(adapter: Adapter) -> str:
    """Return a SHA-256 of the content of an adapter."""
    parts = [json.dumps(config(adapter), sort_keys=True).encode()]
    for name, dtype, shape, data in tensors(adapter):
        parts += [f"{name} {dtype} {shape}".encode(), data]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = parser.parse_args()
    for name in args.names or ADAPTERS:
        print(write_adapter(name, args.out))


if __name__ == "__main__":
    main()
