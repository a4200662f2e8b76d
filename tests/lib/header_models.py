"""Models with only names, shapes and metadata, as input of llama-quantize --dry-run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.formats.gguf import Field, layout_gguf
from quantkit.types import BY_NAME, TensorType


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: TensorType = BY_NAME["F32"]


#: Keys that the architectures below read; each reads its own.
COMMON: dict[str, Any] = {
    "context_length": 4096, "embedding_length": 512, "feed_forward_length": 1024, "attention.key_length": 64,
    "attention.value_length": 64, "rope.dimension_count": 64, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5, "expert_used_count": 2, "expert_feed_forward_length": 512,
    "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_gating_func": 1, "attention.q_lora_rank": 128,
    "attention.kv_lora_rank": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 64,
    "leading_dense_block_count": 1, "attention.sliding_window": 128, "vocab_size": 100, "num_loops": 2,
    "attention.causal": False, "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16,
    "ssm.time_step_rank": 16, "ssm.group_count": 1, "full_attention_interval": 4, "attention.clamp_kqv": 1.0,
    "attention.relative_buckets_count": 32, "rope.dimension_sections": [16, 24, 24, 0],
}  # fmt: skip

#: Parts of a layer: name and rows; *_exps have a third dimension.
DENSE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "attn_norm")
FUSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
MOE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps")
SHARED = (*MOE, "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_shexp")
MLA = ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_kv_b", "attn_output", "ffn_gate_up_exps",
       "ffn_down_exps", "ffn_gate_inp")  # fmt: skip
MIXED = ("attn_qkv", "attn_gate", "ssm_in", "ssm_out", "ssm_conv1d", "ssm_x", "ffn_down_exps", "ffn_up_exps", "attn_v")


def build_model(
    arch: str,
    sizes: tuple[int, int, int, int],
    parts: Sequence[str],
    *,
    tied: bool = False,
    n: int = 512,
    global_names: Sequence[str] = ("per_layer_token_embd", "position_embd"),
    rows: int = 16,
    **options: Any,
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the metadata and tensors of a model; ``sizes`` are layers, heads, kv heads and experts.

    Rows have ``n`` values, and matrices ``rows`` rows; ``options`` are keys of the architecture.
    """
    n_layer, n_head, n_head_kv, n_expert = sizes
    metadata: dict[str, Any] = {"general.architecture": arch, f"{arch}.block_count": n_layer}
    keys = {**COMMON, "attention.head_count": n_head, "attention.head_count_kv": n_head_kv, **options}
    keys = {key: value for key, value in keys.items() if n_expert or not key.startswith("expert")}
    keys |= {"expert_count": n_expert} if n_expert else {}
    metadata |= {f"{arch}.{key}": value for key, value in keys.items()}
    tensors = [Tensor("token_embd.weight", (n, 64)), Tensor("output_norm.weight", (n,))]
    tensors += [] if tied else [Tensor("output.weight", (n, 64))]
    tensors += [Tensor(f"{name}.weight", (512, 8)) for name in global_names]
    for i in range(n_layer):
        for part in parts:
            shape = (n if "down" not in part else 1024, rows, max(n_expert, 1))
            dims = 3 if "_exps" in part or part == "attn_k_b" else 2
            tensors.append(Tensor(f"blk.{i}.{part}.weight", shape[:dims]))
        tensors.append(Tensor(f"blk.{i}.attn_v.bias", (rows,)))
    return metadata, tensors


def write_sparse(path: Path, metadata: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a model whose weights use no disk space."""
    fields = [Field.of(key, value) for key, value in metadata.items()]
    layout = layout_gguf(fields, [(x.name, x.shape, x.type) for x in tensors])
    with path.open("wb") as f:
        f.write(layout.header)
        f.truncate(layout.nbytes)
