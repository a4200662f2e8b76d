"""Small checkpoints for tests: random weights, a vocabulary of bytes, files written without a library."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64", "uint8": "U8"}


def bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return values as BF16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, arrays: Arrays, order: bool = True) -> Path:
    """Write a file; uint16 arrays are BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, blobs = 0, []
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        blobs.append(data)
    return write_raw(path, json.dumps(header, sort_keys=order).encode(), b"".join(blobs))


def write_raw(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def tokenizer(size: int = 96) -> dict[str, Any]:
    """Return a byte-level BPE of printable characters, and <|end|>."""
    vocab = {chr(33 + i): i for i in range(size - 2)} | {"th": size - 2}
    model = {"type": "BPE", "vocab": vocab, "merges": ["t h"]}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = added_token(size - 1, "<|end|>")
    return {"added_tokens": [end], "pre_tokenizer": split, "decoder": split, "model": model}


def added_token(number: int, text: str) -> dict[str, Any]:
    """Return a special token in the format of tokenizer.json."""
    stripped = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": number, "content": text, **stripped, "special": True, "normalized": False}


def moe_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 96,
        "eos_token_id": 95,
        **changes,
    }


def moe_arrays(seed: int = 7, layers: int = 2, experts: int = 4) -> dict[str, npt.NDArray[Any]]:
    """Return the weights of ``moe_config``, as BF16."""
    rng, shapes = np.random.default_rng(seed), {"model.embed_tokens.weight": (96, 256), "lm_head.weight": (96, 256)}
    shapes["model.norm.weight"] = (256,)  # type: ignore[assignment]
    for i in range(layers):
        p = f"model.layers.{i}."
        attention = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256)}
        shapes |= {f"{p}self_attn.{name}.weight": shape for name, shape in attention.items()}
        norms = {f"{p}{n}.weight": (256,) for n in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{p}self_attn.{n}.weight": (64,) for n in ("q_norm", "k_norm")}
        shapes |= {**norms, f"{p}mlp.gate.weight": (experts, 256)}  # type: ignore[dict-item]
        for e in range(experts):
            shapes |= {f"{p}mlp.experts.{e}.{w}_proj.weight": (256, 256) for w in ("gate", "up", "down")}
    return {name: bf16(rng.normal(0, 0.05, shape).astype(np.float32)) for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path, config: dict[str, Any] | None = None, arrays: Arrays | None = None, shards: int = 1
) -> Path:
    """Write a complete checkpoint, by default the mixture of experts."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = moe_arrays() if arrays is None else arrays
    (folder / "config.json").write_text(json.dumps(config or moe_config()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    config_of_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{{ x }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config_of_tokenizer))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", arrays)
        return folder
    names, where = list(arrays), dict[str, str]()
    for no in range(shards):
        file = f"model-{no + 1:05d}-of-{shards:05d}.safetensors"
        part = names[no * len(names) // shards : (no + 1) * len(names) // shards]
        write_safetensors(folder / file, {name: arrays[name] for name in part})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
