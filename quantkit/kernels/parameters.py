"""What kernels are told of a layer: its activation, its rotary positions, its router. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """What a feed-forward layer does to its gate: ``silu gelu gelu_erf gelu_quick relu relu_sqr sigmoid swiglu_oai``;
    softplus (log(1 + e^x), above 20 x itself) stands in Activate only.

    Clamps, 0 for none: the gate from above before (gate_limit) or after (act_limit) its activation, up to +- up_limit.
    swiglu_oai is g / (1 + exp(-alpha g)) * (up + 1). As in ggml, gelu and gelu_quick go through half precision.
    """

    kind: str
    alpha: float = 1.702
    gate_limit: float = 0.0
    act_limit: float = 0.0
    up_limit: float = 0.0


@dataclass(frozen=True)
class RopeConfig:
    """Everything about rotary positions but the head: two equal ones share one table. ggml's names.

    kind: ``normal`` turns neighbours (2i, 2i+1), ``neox`` turns (i, i + n_rot/2). sections: of M-RoPE (interleaved:
    as in Qwen3-VL); text has one position, so they only say which pairs do not turn.
    """

    n_rot: int
    kind: str
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    gating: ``softmax``, ``sigmoid``, ``softmax_weight`` (softmax over the chosen ones only, as in gpt-oss).
    n_group, n_group_used: choose groups first (DeepSeek V3, Bailing). norm: weights are divided by their sum,
    not below sum_floor; scale: then multiplied (0 or 1: not).
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    norm: bool = False
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    sum_floor: float = 6.103515625e-5
