"""Granite Switch: a dense Granite with LoRA adapters in the file, of which control tokens select one.

Facts of llama.cpp b11434, conversion/granite.py (GraniteSwitchModel). The adapters of a matrix are one tensor, after
one of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Expression, Shaped, Zeros, concatenate, permute_heads, take
from quantkit.checkpoint.key_rows import Computed, Copied, SetKeys
from quantkit.checkpoint.models import granite
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Drop, Rename, Split
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor

#: The parts of a layer with adapters, and the kinds of tensors that each becomes.
_PARTS = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "self_attn.o_proj": ("attn_output",),
    "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
    "shared_mlp.output_linear": ("ffn_down",),
}
_ADAPTER = re.compile(
    rf"^(?:model\.)?layers\.(\d+)\.({'|'.join(map(re.escape, _PARTS))})\.lora_([AB])(?:_slices\.(\d))?$"
)


def _patch(config: Config) -> None:
    """Keep the width of heads, which Granite's own keys ignore."""
    config.values["head_width"] = config.get("projection_head_dim") or config.head_dim
    granite.drop_head_dim(config)


def _heads(config: Config) -> tuple[int, int]:
    return config.number("num_attention_heads"), config.number("num_key_value_heads")


def _permute(x: Expression, heads: int) -> Expression:
    """Undo the permutation of rows for rope; raises ValueError if they are not those of the heads."""
    if heads < 1 or x.shape[0] % (2 * heads):
        raise ValueError(f"its rows are not a multiple of {heads} heads")
    return permute_heads(x, heads)


@dataclass(frozen=True)
class _PermuteFused(OneWayRule):
    """Undoes the permutation of queries and keys for rope in a matrix that values follow."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.self_attn\.qkv_proj\.base_layer\.weight", tensor.name)
        if match is None:
            return None
        config, x = context.config, tensor.x
        width, (heads, kv_heads) = config.number("head_width"), _heads(config)
        q, kv = heads * width, kv_heads * width
        if x.shape[:1] != (q + 2 * kv,):
            raise context.fail(
                tensor, f"its shape {list(x.shape)} does not match {heads} and {kv_heads} heads of {width}"
            )
        parts = [take(x, 0, rows) for rows in (range(q), range(q, q + kv), range(q + kv, q + 2 * kv))]
        try:
            fused = concatenate((_permute(parts[0], heads), _permute(parts[1], kv_heads), parts[2]))
        except ValueError as e:
            raise context.fail(tensor, str(e)) from None
        return (replace(tensor, x=fused, name_in_file=f"blk.{match[1]}.attn_qkv.weight"),)


@dataclass(frozen=True)
class _StackAdapters(OneWayRule):
    """Puts zeros before a matrix's adapters, [adapters, 1, rows, columns]: the adapter of tokens without one."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = _ADAPTER.match(tensor.name)
        if match is None:
            return None
        kinds = _PARTS[match[2]]
        slot, shape = int(match[4] or 0), tensor.x.shape
        if slot >= len(kinds) or len(shape) != 4 or shape[1] != 1:
            raise context.fail(tensor, f"its shape {list(shape)}, or its number, is not that of adapters", "QK-E107")
        count, _, rows, columns = shape
        kind, x = kinds[slot], tensor.x
        heads = dict(zip(("attn_q", "attn_k"), _heads(context.config), strict=True)).get(kind)
        if match[3] == "B" and heads:
            try:
                x = _permute(Shaped(x, (count * rows, columns)), count * heads)
            except ValueError as e:
                raise context.fail(tensor, str(e)) from None
        stacked = concatenate((Zeros((1, rows, columns), x.type), Shaped(x, (count, rows, columns))))
        return (replace(tensor, x=stacked, name_in_file=f"blk.{match[1]}.{kind}.lora_{match[3].lower()}"),)


def _no_experts(config: Config) -> int | None:
    """Return 0: a dense model may have the key of a mixture."""
    return None if config.get("num_local_experts") else 0


_KEYS: tuple[SetKeys, ...] = (
    *granite.MOE_KEYS,
    Computed(".expert_used_count", _no_experts),
    Copied(".adapters.count", "num_adapters", required=True),
    Copied(".adapters.lora_rank", "max_lora_rank", required=True),
    Computed(".adapters.token_ids_activate", lambda config: config["adapter_token_ids"], "array"),
    Computed(".adapters.token_ids_substitute", lambda config: config["adapter_substitute_token_ids"], "array"),
    Copied(".adapters.router_gain", "control_token_gain", "f32", default=15.0),
)

ARCHITECTURES: dict[str, Architecture] = {
    "GraniteSwitchForCausalLM": replace(
        granite.GRANITE,
        arch="graniteswitch",
        stored=(Drop(r"^(model\.)?switch\.|(^|\.)(adapter_token_ids|control_to_substitute_lut)$|^lm_head\.weight$"),),
        rules=(
            _PermuteFused(),
            _StackAdapters(),
            Split(r"shared_mlp\.input_linear\.base_layer\.weight$", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            *(
                Rename(rf"{part}\.base_layer\.weight$", f"{name}.weight")
                for part, name in (
                    (r"self_attn\.o_proj", "self_attn.o_proj"),
                    (r"shared_mlp\.output_linear", "mlp.down_proj"),
                )
            ),
        ),
        keys=_KEYS,
        patch_config=_patch,
        layers=lambda config: config.layers - 1,
    ),
}
