"""MiniMax Text 01, M1 and M3. MiniMax M2 is in more_experts.py.

Facts of llama.cpp b11434, conversion/minimax.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from quantkit.checkpoint.config import Config, optional_json
from quantkit.checkpoint.expressions import read_f32
from quantkit.checkpoint.families.more_experts import MINIMAX_EXPERTS, MINIMAX_KEYS
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.row import Always, Copied, SetKeys
from quantkit.checkpoint.tensors import Changed, Context, Full, Tensor, plus_one
from quantkit.errors import FormatError

M3_RULES = (Changed(r"norm\.weight$", plus_one), Full(r"\.self_attn\.index(er\.|_)"), MINIMAX_EXPERTS)


def _set_sparse(keys: Keys, config: Config) -> None:
    sparse = config["sparse_attention_config"]
    for key, name in (
        ("head_count", "sparse_num_index_heads"),
        ("key_length", "sparse_index_dim"),
        ("top_k", "sparse_topk_blocks"),
        ("block_size", "sparse_block_size"),
        ("local_blocks", "sparse_local_block"),
    ):
        keys.u32(f".attention.indexer.{key}", sparse[name])
    keys.u32(".leading_dense_block_count", len(list(takewhile(lambda each: each == 0, config["moe_layer_freq"]))))


M3_KEYS: tuple[SetKeys, ...] = (
    *MINIMAX_KEYS,
    Copied(".expert_shared_count", "n_shared_experts", needed=True),
    Copied(".expert_weights_scale", "routed_scaling_factor", "f32", needed=True),
    Always(".expert_weights_norm", True, "flag"),
    _set_sparse,
)

# --- Text 01 and M1 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silent:
    """Tokens beside those of the model whose embeddings are zero are noted in the configuration: they must not come."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name != "model.embed_tokens.weight" or len(tensor.x.shape) != 2:
            return None
        tokenizer = optional_json(context.config.path.parent / "tokenizer.json") or {}
        model = tokenizer.get("model")
        first = len(model.get("vocab") or ()) if isinstance(model, dict) else 0
        rows, width = tensor.x.shape
        silent = [row for row in range(first, rows) if not read_f32(tensor.x, row * width, width).any()]
        context.config.values["_silent"] = silent
        return None


M1_RULES = (Silent(), MINIMAX_EXPERTS)


def _set_m1(keys: Keys, config: Config) -> None:
    keys.array("tokenizer.ggml.suppress_tokens", config.get("_silent") or [])
    parts = ("full_attention", "linear_attention", "mlp")
    alphas, betas = ({config[f"layernorm_{part}_{which}"] for part in parts} for which in ("alpha", "beta"))
    if len(alphas) > 1 or betas != {1.0}:
        raise FormatError(f"{config.path}: layers add to what was before by several numbers; only one is known")
    keys.f32(".residual_scale", alphas.pop())
    keys.u32(".rope.dimension_count", config["rotary_dim"])


M1_KEYS: tuple[SetKeys, ...] = (_set_m1,)
