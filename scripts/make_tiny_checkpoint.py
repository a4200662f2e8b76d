"""Write the checkpoint of tiny-moe, as transformers saves it, from its GGUF file: tests/data/tiny-moe-bf16.gguf.

    scripts/make_tiny_checkpoint.py OUT

Tensors that are F32 in the file (norms, routers) become BF16 again, as in the original checkpoint: no value changes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from make_moe_checkpoint import Json, tokenizer

from quantkit.formats.gguf import GGUFFile, open_gguf

SOURCE = Path(__file__).resolve().parents[1] / "tests/data/tiny-moe-bf16.gguf"
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
    **{f"attn_{a}": f"self_attn.{b}" for a, b in (("q_norm", "q_norm"), ("k_norm", "k_norm"), ("output", "o_proj"))},
    **{f"attn_{a}": f"self_attn.{a}_proj" for a in "qkv"},
}


def tensors_of(file: GGUFFile) -> Iterator[tuple[str, tuple[int, ...], npt.NDArray[np.uint16]]]:
    """Yield names, shapes and BF16 values of the checkpoint's tensors."""
    for info in file.tensors.values():
        data, shape = np.asarray(file.data(info)).reshape(-1), info.shape[::-1]
        values = data.view(np.uint16) if info.type.name == "BF16" else (data.view(np.uint32) >> 16).astype(np.uint16)
        name = info.name.removesuffix(".weight")
        if not name.startswith("blk."):
            yield f"{NAMES[name]}.weight", shape, values
            continue
        _, layer, kind = name.split(".")
        prefix = f"model.layers.{layer}."
        if not kind.endswith("_exps"):
            yield f"{prefix}{LAYER[kind]}.weight", shape, values
            continue
        projection = kind.removeprefix("ffn_").removesuffix("_exps")
        for expert, part in enumerate(np.split(values, shape[0])):
            yield f"{prefix}mlp.experts.{expert}.{projection}_proj.weight", shape[1:], part


def config(file: GGUFFile) -> Json:
    """Return config.json."""
    values = {
        **{"vocab_size": len(file.get("tokenizer.ggml.tokens")), "hidden_size": "embedding_length"},
        **{"intermediate_size": "feed_forward_length", "moe_intermediate_size": "expert_feed_forward_length"},
        **{"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"},
        **{"num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"},
        **{"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        **{"max_position_embeddings": "context_length", "rope_theta": "rope.freq_base"},
    }
    settings = {name: file.get(f"qwen3moe.{key}") if isinstance(key, str) else key for name, key in values.items()}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16"}
    return {**names, **settings, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "bos_token_id": 0, "eos_token_id": 0}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_values, _ = tokenizer(SOURCE)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer_values |= {"normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level}
    config_values = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") | {"add_bos_token": False}
    header: Json = {}
    blobs, offset = [], 0
    with open_gguf(SOURCE) as file:
        (out / "config.json").write_text(json.dumps(config(file), indent=1))
        for name, shape, values in tensors_of(file):
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + values.nbytes]}
            blobs.append(values.tobytes())
            offset += values.nbytes
    (out / "tokenizer.json").write_text(json.dumps(tokenizer_values, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **config_values}))
    text = json.dumps(header).encode()
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


if __name__ == "__main__":
    main()
