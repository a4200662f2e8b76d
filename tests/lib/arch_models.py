"""A model of every architecture that llama.cpp runs, with all tensors that its loader reads, including optional ones.

Only keys are described here; libllama lists the tensors that it reads for them (``Libllama.tensors``), like its own
tests/test-llama-archs.cpp; weights are random like those of the zoo. ``Size`` has the variable sizes; an architecture's
fixed sizes are unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from libllama import Libllama, nmse
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import Field, write_gguf
from quantkit.model.arch import ARCHS
from quantkit.model.engine import load
from quantkit.types import BY_NAME
from zoo import TABLE, draw

#: The largest NMSE of equal logits.
BOUND = 1e-8
#: The reason for architectures that the engine does not have.
UNKNOWN = "unknown architecture"
#: Architectures without experts, and with them, from llama.cpp's test.
DENSE = (
    "llama deci falcon gpt2 gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2vl qwen3 qwen3vl "
    "qwen35 phi2 phi3 plamo plamo2 plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n "
    "starcoder2 mamba mamba2 jamba falcon-h1 xverse command-r cohere2 olmo olmo2 muse-glimmer openelm chatglm "
    "glm4 bitnet t5 jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 granite granitemoe granitehybrid "
    "granite_swa arcee hunyuan-dense hunyuan_vl smollm3 lfm2 dream llada seed_oss apertus hrm_text cogvlm "
    "pangu-embedded mistral3 spark2_5 maincoder talkie nanbeige qwen3tts pockettts bert nomic-bert "
    "jina-bert-v2 jina-bert-v3 neo-bert eurobert modern-bert gemma-embedding llama-embed t5encoder"
)
MOE = (
    "llama llama4 grok refact qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe minicpm maple "
    "cohere2moe dbrx olmoe arctic deepseek deepseek2 deepseek32 deepseek4 glm4moe glm-dsa exaone-moe granite "
    "granitemoe bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe "
    "hy_v3 hy_v4 gpt-oss lfm2moe smallthinker llada-moe grovemoe minimax-01 minimax-m2 minimax-m3 rnd1 mistral3 "
    "mistral4 paddleocr mimo2 step35 kimi-linear kimi-k3 glm5-next mellum nomic-bert-moe"
)
MODELS = (*((name, False) for name in DENSE.split()), *((name, True) for name in MOE.split()))

#: Latent attention, whose cache has rows of fixed sizes.
LATENT = {"deepseek2", "deepseek32", "glm-dsa", "dots3note", "mistral4", "hy_v4"} | (
    KIMI := {"kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"}
)
#: Every second layer has no heads: a block other than attention.
MIXED = KIMI | {"plamo2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid", "lfm2", "lfm2moe"}
#: Windows are listed layer by layer.
LISTED_WINDOWS = {"cohere2moe", "mimo2", "step35", "spark2_5", "muse-glimmer", "granite_swa", "dots3note", "maple"}


def label_of(arch: str, moe: bool) -> str:
    """Return the label of a model: its architecture, -dense or -moe."""
    return f"{arch}-{'moe' if moe else 'dense'}"


@dataclass(frozen=True)
class Size:
    """The sizes of a model, and the seed of its weights."""

    embd: int = 256
    heads: int = 2
    ff: int = 384
    layers: int = 2
    vocab: int = 128
    ctx: int = 256
    experts: int = 2
    used: int = 2
    kv_heads: int = 0
    seed: int = 1


#: Architectures with a fixed size, or with more than two layers for all kinds of layers.
FIXED: Mapping[str, dict[str, int]] = {
    "llama4": {"layers": 4},
    "gemma3n": {"embd": 64, "heads": 1, "ff": 96, "layers": 22},
    "deepseek4": {"embd": 512, "heads": 8, "ff": 1024, "layers": 4, "kv_heads": 1},
    "nemotron_h": {"layers": 3},
    "nemotron_h_moe": {"layers": 3},
    "hrm_text": {"layers": 6},
    "qwen3tts": {"vocab": 3072},
    **dict.fromkeys(LATENT, {"embd": 128, "heads": 1, "ff": 192}),
    **dict.fromkeys(("step35", "laguna"), {"embd": 160}),
    "qwen3": {"heads": 4, "kv_heads": 1},
    **dict.fromkeys(("muse-glimmer", "afmoe"), {"heads": 4, "kv_heads": 2}),
}


def sized(arch: str, seed: int) -> Size:
    """Return a size: for seed 1 that of llama.cpp's test, for other seeds a random one around it."""
    size = replace(Size(**FIXED.get(arch, {})), seed=seed)
    if seed == 1:
        return size
    rng = random.Random(f"{arch} {seed}")
    sizes: dict[str, int] = {"ff": 32 * rng.randint(3, 14), "vocab": max(size.vocab, rng.randint(40, 300))}
    if arch not in ("gemma3n", "deepseek4", "hrm_text", "llama4"):
        sizes["layers"] = size.layers + rng.randint(0, 3)
    sizes["experts"] = rng.choice((2, 4, 6))
    sizes["used"] = rng.randint(1, sizes["experts"])
    if arch not in FIXED:
        head = rng.choice((64, 96, 128))
        sizes["heads"] = rng.choice((2, 4))
        sizes["embd"] = head * sizes["heads"]
    return replace(size, **sizes)


def keys_of(arch: str, moe: bool, size: Size) -> dict[str, Any]:
    """Return the keys of a model without the architecture's prefix; a dot begins those that have no prefix."""
    head = size.embd // size.heads
    keys: dict[str, Any] = {
        **{"vocab_size": size.vocab, "context_length": size.ctx, "embedding_length": size.embd},
        **{"features_length": size.embd, "block_count": size.layers, "leading_dense_block_count": 1},
        **{"feed_forward_length": size.ff, "use_parallel_residual": False, "logit_scale": 1.0},
        **{"time_mix_extra_dim": 64, "time_decay_extra_dim": 128, "full_attention_interval": 2},
        **{"wkv.head_size": head, "shortconv.l_cache": 3, "residual_scale": 3.5565588, "attn_res.block_size": 12},
        **{"activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0},
        **{f".xielu.{key}": value for key, value in (("alpha_n", 1.0), ("alpha_p", 1.0), ("beta", 1.0), ("eps", 1e-7))},
    }
    keys |= {f"attention.{key}": value for key, value in _attention(arch, size).items()}
    keys |= {f"ssm.{key}": value for key, value in _recurrent(arch, size).items()}
    keys |= {"kda.head_dim": 128, "kda.safe_gate": True, "kda.gate_lower_bound": -5.0}
    keys["rope.dimension_sections"] = [8, 12, 12, 0] if arch == "bailingmoe3" else [head // 4] * 4
    if arch in LATENT:
        keys["rope.dimension_count"] = 0 if arch == "glm5-next" else 64
    if moe:
        keys |= _experts(arch, size)
    return keys | _extra_fields(arch, size, head)


def _attention(arch: str, size: Size) -> dict[str, Any]:
    heads: Any = [0 if i == 1 else size.heads for i in range(size.layers)] if arch in MIXED else size.heads
    keys: dict[str, Any] = {
        **{"head_count": size.heads if arch == "glm5-next" else heads},
        **{"head_count_kv": heads if arch in MIXED else size.kv_heads or size.heads},
        **{"max_alibi_bias": 8.0, "clamp_kqv": 1.0, "layer_norm_epsilon": 1e-5, "layer_norm_rms_epsilon": 1e-5},
        **{"group_norm_epsilon": 1e-5, "group_norm_groups": 8, "kv_lora_rank": 512, "relative_buckets_count": 8},
        **{"q_lora_rank": 64 if arch == "deepseek4" else 512, "sliding_window": size.ctx // 8},
        **{"indexer.head_count": size.heads if arch == "minimax-m3" else 64, "indexer.key_length": 128},
        **{"indexer.top_k": 131072, "indexer.block_size": 4, "indexer.kpool": 4, "indexer.kpool_select_tail": True},
        **{"indexer.local_blocks": 1},
    }
    has_list = arch in LISTED_WINDOWS
    keys["sliding_window_pattern"] = [i % 2 for i in range(size.layers)] if has_list else 2
    if arch in LATENT:
        keys |= {"key_length": 512 if arch == "glm5-next" else 576, "value_length": 512}
        keys |= {"key_length_mla": 192, "value_length_mla": 128}
    if arch == "dots3note":
        keys |= {"kv_lora_rank_swa": 512, "key_length_swa": 576, "value_length_swa": 512}
        keys |= {"key_length_mla_swa": 192, "value_length_mla_swa": 128}
    if arch in ("dots3note", "hy_v4"):
        keys["indexer.types"] = [1 - i % 2 for i in range(size.layers)]
    return keys


def _recurrent(arch: str, size: Size) -> dict[str, Any]:
    delta_net = arch in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")
    rank = 2 * size.heads if arch in ("mamba2", "granitehybrid", "falcon-h1") else size.heads
    return {
        **{"inner_size": 128 * size.heads if delta_net else 2 * size.embd, "conv_kernel": 4, "state_size": 128},
        **{"time_step_rank": rank if size.seed > 1 else size.heads, "group_count": 0 if arch == "plamo2" else 2},
    }


def _experts(arch: str, size: Size) -> dict[str, Any]:
    return {
        **{"expert_feed_forward_length": size.ff, "expert_shared_feed_forward_length": size.ff // 2},
        **{"expert_latent_length": size.ff, "interleave_moe_layer_step": 2, "expert_count": size.experts},
        **{"expert_used_count": size.used, "expert_shared_count": 1, "expert_group_scale": 1.0},
        **{"expert_gating_func": 4 if arch == "deepseek4" else 2, "experts_per_group": 1},
    }


def _extra_fields(arch: str, size: Size, head: int) -> dict[str, Any]:
    """Return the keys in which an architecture differs from the common ones."""
    streams = {"hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6}
    weights = {"expert_weights_scale": 1.0, "expert_weights_norm": True, "swiglu_clamp_exp": 10.0}
    sinkhorn = {"hyper_connection.sinkhorn_iterations": 2}
    match arch:
        case "nemotron_h" | "nemotron_h_moe":
            return {"feed_forward_length": [0 if i <= 1 else size.ff for i in range(size.layers)]}
        case "deepseek4":
            keys = {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head // 2}
            keys |= {"attention.output_group_count": 8, "attention.output_lora_rank": 32, "hash_layer_count": 0}
            ratios = {"attention.compress_ratios": [0, 0, 4, 128], "attention.compress_rope_freq_base": 160000.0}
            return keys | ratios | streams | sinkhorn | weights
        case "hy_v4":
            return streams | weights | {"hyper_connection.magnitude": 2.0}
        case "dots3note":
            return {"rope.freq_base_swa": 10000.0}
        case "minimax-m3":
            return {"rope.dimension_count": 64}
        case "minicpm3":
            return {"rope.dimension_count": 32}
        case "maple":
            return {"swiglu_clamp_exp": 7.0}
        case "bailingmoe3":
            later = size.layers - 1
            return {"swiglu_clamp_exp": [0.0] + [4.0] * later, "swiglu_clamp_shexp": [0.0] + [5.0] * later}
        case "bert" | "nomic-bert" | "nomic-bert-moe" | "jina-bert-v2" | "jina-bert-v3":
            return {".tokenizer.ggml.token_type_count": 2, "moe_every_n_layers": 2}
        case "hrm_text":
            return {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}
    return {}


def tensors_of(library: Libllama, arch: str, moe: bool, size: Size, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return ne of every tensor of a model. Raises LibllamaError if the library refuses the keys."""
    path = folder / f"{arch}.keys"
    write_gguf(path, _fields(arch, moe, size), [])
    return library.tensors(path)


def write_model(path: Path, arch: str, moe: bool, size: Size, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a model with the weights of its seed and return its path."""
    types = {name: BY_NAME["I32" if name.endswith(TABLE) else "F32"] for name in shapes}
    tensors = [(name, ne, types[name], draw(name, ne, size.seed).tobytes()) for name, ne in shapes.items()]
    write_gguf(path, _fields(arch, moe, size), tensors)
    return path


def tokens_of(size: Size, n: int) -> np.ndarray:
    """Return int32 ids [n] of a model's vocabulary."""
    return np.random.default_rng(size.seed).integers(0, size.vocab, n, np.int32)


def _fields(arch: str, moe: bool, size: Size) -> list[Field]:
    fields = {
        key[1:] if key.startswith(".") else f"{arch}.{key}": value for key, value in keys_of(arch, moe, size).items()
    }
    ends = {"general.architecture": arch, "tokenizer.ggml.model": "no_vocab"}
    return [Field.of(key, value) for key, value in (ends | fields).items()]


def compare(library: Libllama, arch: str, moe: bool, size: Size, folder: Path, n: int = 40) -> tuple[float, str]:
    """Return the NMSE of the engine's logits after n tokens against llama.cpp's, and the reason of a refusal, or "".

    Of encoders the rows of tokens are compared. The error is 0 if llama.cpp's own batches differ as much (Gemma 3n: 22
    layers of 64 columns).
    """
    if arch not in ARCHS:
        return 0.0, UNKNOWN
    model = write_model(folder / "m.gguf", arch, moe, size, tensors_of(library, arch, moe, size, folder))
    try:
        opened = load(model, kv_type="f32", threads=2)
    except QuantkitError as e:
        return 0.0, str(e)
    tokens = tokens_of(size, n)
    is_encoder = ARCHS[arch].encoder
    expected = (library.embeddings if is_encoder else library.logits)(model, tokens)
    with opened:
        error = nmse(opened.forward(tokens), expected)
    if is_encoder:
        return error, ""
    by_one = library.logits(model, tokens, batch=1) if error > BOUND else expected
    return (0.0 if error <= 30 * nmse(by_one, expected) else error), ""
