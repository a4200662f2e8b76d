"""HRM text: two stacks of layers, a low one and a high one, that are computed in cycles.

Facts of llama.cpp b11434, conversion/hrm_text.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.checkpoint.config import Config
from quantkit.checkpoint.key_rows import Computed, Copied
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Rename, Split
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor


def _stack(config: Config) -> int:
    """Return the number of layers of a stack."""
    return config.number("num_layers_per_stack") if config.get("num_layers_per_stack") else config.layers


def _slots(config: Config) -> int:
    """Return the number of computed layers: each cycle has several of the low stack, and one of the high stack."""
    return _stack(config) * config.number("H_cycles") * (config.number("L_cycles") + 1)


@dataclass(frozen=True)
class _NumberStacks(OneWayRule):
    """Numbers the layers of the high stack after those of the low one."""

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        match = re.fullmatch(r"model\.([LH])_module\.layers\.(\d{1,9})\.(.+)", tensor.name)
        if match is None:
            return None
        layer = int(match[2]) + (_stack(context.config) if match[1] == "H" else 0)
        return (replace(tensor, name=f"model.layers.{layer}.{match[3]}", layer=layer),)


_ROWS = (".attn_gate.weight", ".attn_q.weight", ".attn_k.weight", ".attn_v.weight")

ARCHITECTURES: dict[str, Architecture] = {
    "HrmTextForCausalLM": Architecture(
        "hrm_text",
        rules=(
            _NumberStacks(),
            Split(r"^model\.layers\.(\d+)\.attn\.gqkv_proj\.weight$", tuple(rf"blk.\1{name}" for name in _ROWS)),
            Split(
                r"^model\.layers\.(\d+)\.mlp\.gate_up_proj\.weight$",
                (r"model.layers.\1.mlp.gate_proj.weight", r"model.layers.\1.mlp.up_proj.weight"),
            ),
            Rename(r"(^model\.layers\.\d+\.)attn\.", r"\1self_attn."),
            Rename(r"^model\.z_L_init$", "hrm.z_l_init"),
        ),
        keys=(
            Computed(".rope.dimension_count", lambda config: config.head_dim),
            Copied(".embedding_scale", "embedding_scale", "f32", required=True),
            Computed(".hrm.layers_per_stack", _stack),
            Copied(".hrm.h_cycles", "H_cycles", required=True),
            Copied(".hrm.l_cycles", "L_cycles", required=True),
            Computed(".hrm.prefix_lm", lambda config: bool(config.get("prefix_lm", False)), "flag"),
        ),
        layers=_slots,
        name_layers=lambda config: 2 * _stack(config),
    ),
}
