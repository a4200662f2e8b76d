"""Parameters of a layer that kernels take: activation, rotary positions, routing. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass

#: Maximum number of experts, and groups of experts: limited by a CPU kernel's stack and a CUDA kernel's shared memory.
MAX_EXPERTS = 4096
#: Maximum rows of a delta net's state with their own decays.
MAX_DECAYS = 256
#: Kinds of gating by their numbers in a slot.
GATINGS = ("softmax", "sigmoid", "softmax_weight", "sqrt_softplus")
#: Masks of attention by their numbers in a slot.
MASKS = ("causal", "sliding", "chunked", "whole", "symmetric")


@dataclass(frozen=True)
class Activation:
    """Activation of a gate: ``silu gelu gelu_erf gelu_quick relu relu_sqr sigmoid swiglu_oai``, or ``linear``, which is
    x; in ops.Activate also ``softplus``, log(1 + e^x), which is x above 20.

    Limits, 0 for none: the gate is clamped from above before (gate_limit) or after (act_limit) its activation, ``up``
    to +- up_limit. swiglu_oai is g / (1 + exp(-alpha g)) * (up + 1). As in ggml, gelu and gelu_quick round through f16.
    """

    kind: str
    alpha: float = 1.702
    gate_limit: float = 0.0
    act_limit: float = 0.0
    up_limit: float = 0.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions, except for the head's layout; equal configs share one table. ggml's names.

    kind: ``normal`` rotates pairs (2i, 2i + 1), ``neox`` (i, i + n_rot / 2). sections: of M-RoPE (interleaved: as in
    Qwen3-VL); text has one position, so they only determine which pairs do not rotate.
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
    """Parameters of the router: how a token chooses its experts.

    gating: ``softmax``, ``sigmoid``, ``softmax_weight`` (softmax over the chosen experts only, as in gpt-oss),
    ``sqrt_softplus`` (square root of softplus, DeepSeek 4). n_group, n_group_used: groups are chosen first (DeepSeek
    V3, Bailing). norm: divide the weights by their sum, at least sum_floor; then multiply by scale (unless 0 or 1).
    share: this many neighbouring ids share one expert's matrices: ids are divided by it, and weights are the
    probabilities at the divided ids (Grove MoE; as in llama.cpp, which reads those of the first n_expert / share).
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    norm: bool = False
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    sum_floor: float = 6.103515625e-5
    share: int = 1

    def slots(self) -> dict[str, float]:
        """Return these as slots of a kernel; ValueError above MAX_EXPERTS experts."""
        if not 0 < self.n_used <= self.n_expert <= MAX_EXPERTS:
            raise ValueError(f"{self.n_used} of {self.n_expert} experts: 1 to {MAX_EXPERTS} can be routed to")
        return {**asdict(self), "gating": GATINGS.index(self.gating), "norm": int(self.norm)}
