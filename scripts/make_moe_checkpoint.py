"""Write a checkpoint with random weights and the shapes of a real mixture of experts, of any size, in BF16.

    scripts/make_moe_checkpoint.py OUT --size 3G --vocab ggml-vocab-qwen2.gguf
    scripts/make_moe_checkpoint.py OUT --size 3G --vision 24

Class Qwen3MoeForCausalLM; layers have Qwen3-30B-A3B's shapes, with --experts experts. --vision N adds a vision encoder
of N layers with InternViT-300M's shapes; the class is InternVLChatModel. The tokenizer is built from the
vocabulary in a GGUF file, by default the one of the tests; llama.cpp's models/ggml-vocab-qwen2.gguf gives Qwen's own,
which convert_hf_to_gguf.py recognizes. Weights are normal values, taken from one pool at random offsets.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import open_gguf
from quantkit.units import format_size, parse_size

TOKENIZER = Path(__file__).resolve().parents[1] / "tests/data/tiny-moe-bf16.gguf"
POOL = 1 << 25
HIDDEN, HEADS, KV, HEAD, FF = 2048, 32, 4, 128, 768
#: Of the vision encoder.
VISION, PATCH, IMAGE = 1024, 14, 448
IMAGES = {
    **{"image_processor_type": "CLIPFeatureExtractor", "do_normalize": True, "crop_size": IMAGE, "size": IMAGE},
    **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
}
#: Pre-tokenizer pattern of Qwen 2.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Json = dict[str, Any]


def tokenizer(vocab: Path) -> tuple[Json, int]:
    """Return tokenizer.json of the BPE vocabulary in a GGUF file, and the number of tokens."""
    with open_gguf(vocab) as file:
        tokens, types, merges = (file.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = list(zip(range(len(tokens)), tokens, types, strict=True))
    added = [
        {"id": i, "content": text, **flags, "special": kind == 3} for i, text, kind in vocabulary if kind in (3, 4)
    ]
    base = {text: i for i, text, kind in vocabulary if kind == 1}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    values = {
        **{"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        **{"post_processor": level, "decoder": level},
        "model": {"type": "BPE", "vocab": base, "merges": [merge.split(" ") for merge in merges]},
    }
    return values, len(tokens)


def shapes(layers: int, experts: int, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors."""
    yield "model.embed_tokens.weight", (vocab, HIDDEN)
    for i in range(layers):
        p = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{name}.weight", (HIDDEN,)
        for name, rows in (("q", HEADS), ("k", KV), ("v", KV)):
            yield f"{p}self_attn.{name}_proj.weight", (rows * HEAD, HIDDEN)
        yield f"{p}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        for name in ("q_norm", "k_norm"):
            yield f"{p}self_attn.{name}.weight", (HEAD,)
        yield f"{p}mlp.gate.weight", (experts, HIDDEN)
        for e in range(experts):
            for name in ("gate", "up"):
                yield f"{p}mlp.experts.{e}.{name}_proj.weight", (FF, HIDDEN)
            yield f"{p}mlp.experts.{e}.down_proj.weight", (HIDDEN, FF)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (vocab, HIDDEN)


def vision_shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the vision encoder and the projector."""
    p = "vision_model.embeddings."
    yield f"{p}class_embedding", (1, 1, VISION)
    yield f"{p}patch_embedding.weight", (VISION, 3, PATCH, PATCH)
    yield f"{p}patch_embedding.bias", (VISION,)
    yield f"{p}position_embedding", (1, 1 + (IMAGE // PATCH) ** 2, VISION)
    for i in range(layers):
        p = f"vision_model.encoder.layers.{i}."
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1", "ls2"):
            yield f"{p}{name}", (VISION,)
        for name, rows, columns in (
            ("attn.qkv", 3 * VISION, VISION),
            ("attn.proj", VISION, VISION),
            ("mlp.fc1", 4 * VISION, VISION),
            ("mlp.fc2", VISION, 4 * VISION),
        ):
            yield f"{p}{name}.weight", (rows, columns)
            yield f"{p}{name}.bias", (rows,)
    for name, shape in (("0", (4 * VISION,)), ("1", (HIDDEN, 4 * VISION)), ("3", (HIDDEN, HIDDEN))):
        yield f"mlp1.{name}.weight", shape
        yield f"mlp1.{name}.bias", shape[:1]


def vision_config(text: Json, layers: int) -> Json:
    """Return config.json of a model with a vision encoder."""
    encoder = {
        **{"architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "hidden_act": "gelu"},
        **{"hidden_size": VISION, "intermediate_size": 4 * VISION, "num_attention_heads": 16},
        **{"image_size": IMAGE, "patch_size": PATCH, "num_channels": 3, "num_hidden_layers": layers},
        **{"layer_norm_eps": 1e-6, "norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": True},
    }
    return {
        **{"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": text},
        **{"vision_config": encoder, "downsample_ratio": 0.5, "select_layer": -1, "torch_dtype": "bfloat16"},
    }


def config(layers: int, experts: int, vocab: int) -> Json:
    """Return config.json."""
    return {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": vocab},
        **{"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "moe_intermediate_size": FF, "head_dim": HEAD},
        **{"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV},
        **{"num_experts": experts, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6},
        **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        **{"torch_dtype": "bfloat16", "eos_token_id": 0},
    }


def pool(seed: int) -> npt.NDArray[np.uint16]:
    """Return normal values with a standard deviation of 0.02 as BF16."""
    bits = (np.random.default_rng(seed).standard_normal(POOL, np.float32) * np.float32(0.02)).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(folder: Path, tensors: list[tuple[str, tuple[int, ...]]], shard: int, seed: int) -> int:
    """Write the shards, of at most ``shard`` bytes, and their index; return the total number of bytes."""
    values, rng = pool(seed), np.random.default_rng(seed + 1)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    n_here = total = 0
    for name, shape in tensors:
        nbytes = 2 * int(np.prod(shape))
        if n_here + nbytes > shard and groups[-1]:
            groups.append([])
            n_here = 0
        groups[-1].append((name, shape))
        n_here, total = n_here + nbytes, total + nbytes
    where = {}
    for no, group in enumerate(groups, 1):
        path = folder / f"model-{no:05d}-of-{len(groups):05d}.safetensors"
        header: Json = {}
        offset = 0
        for name, shape in group:
            nbytes = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
            where[name] = path.name
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, shape in group:
                left = int(np.prod(shape))
                while left:
                    begin = int(rng.integers(POOL - 1))
                    piece = values[begin : begin + left]
                    file.write(piece.data)
                    left -= piece.size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    p.add_argument("--size", type=parse_size, default=parse_size("3G"), help="minimum size (default: 3G)")
    p.add_argument("--shard", type=parse_size, default=parse_size("1G"), help="maximum size of a file (default: 1G)")
    p.add_argument("--experts", type=int, default=64)
    p.add_argument("--vision", type=int, default=0, metavar="N", help="layers of a vision encoder (default: none)")
    p.add_argument("--vocab", type=Path, default=TOKENIZER, metavar="GGUF", help="file with the vocabulary")
    p.add_argument("--seed", type=int, default=1)
    options = p.parse_args()
    tokenizer_values, n = tokenizer(options.vocab)
    layers = 1
    while sum(2 * int(np.prod(s)) for _, s in shapes(layers, options.experts, n)) < options.size:
        layers += 1
    options.out.mkdir(parents=True, exist_ok=True)
    values, tensors = config(layers, options.experts, n), list(shapes(layers, options.experts, n))
    if options.vision:
        values = vision_config(values, options.vision)
        tensors = [(f"language_model.{name}", shape) for name, shape in tensors] + list(vision_shapes(options.vision))
        (options.out / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    (options.out / "config.json").write_text(json.dumps(values, indent=1))
    (options.out / "tokenizer.json").write_text(json.dumps(tokenizer_values, ensure_ascii=False))
    config_values = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": tokenizer_values["added_tokens"][0]["content"]}
    (options.out / "tokenizer_config.json").write_text(json.dumps(config_values))
    total = write(options.out, tensors, options.shard, options.seed)
    print(f"wrote {options.out}: {layers} layers of {options.experts} experts, {format_size(total)}")


if __name__ == "__main__":
    main()
