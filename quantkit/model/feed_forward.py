"""Feed-forward layers: dense, mixture of experts (MoE) with routers, and shared experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import (
    Activate,
    Activation,
    Combine,
    Glu,
    Lookup,
    Matrix,
    MulMatId,
    MultiplyBy,
    Repeat,
    Route,
    Routing,
    SelectOutputs,
    Value,
    Xielu,
)

#: Projections of experts on shorter rows: Nemotron 3, Kimi K3.
_LATENT = ("ffn_latent", "ffn_routed")
#: Weights of routed experts, of a shared expert, and of a dense layer; a file with one of them must have all.
_ROUTED = tuple(f"ffn_{name}.weight" for name in ("gate_inp", "down_exps", "up_exps", "gate_up_exps"))
_SHARED = tuple(f"ffn_{name}_shexp.weight" for name in ("up", "down", "gate"))
_DENSE = ("ffn_up.weight", "ffn_down.weight")
#: Gating functions by ``expert_gating_func``.
GATING: Mapping[int, str] = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrt_softplus"}


#: The clamp of gpt-oss' activation, which is not in the metadata.
_OAI_LIMIT = 7.0


def feed_forward(b: Builder, x: Value, logits: Value | None = None) -> Value:
    """Add the feed-forward layer of x; logits: the router's, if it reads another value than x."""
    if not has_experts(b):
        return _dense(b, x)
    if b.arch.moe.chunk_experts:
        return _chunked_experts(b, x)
    latent = next((name for name in _LATENT if b.has(f"{name}_down.weight")), None)
    routed = experts(b, x, logits) if latent is None else latent_experts(b, x, latent)
    if b.arch.moe.dense_factor and b.has(*_DENSE):
        total = b.sum(routed, _dense(b, x), "ffn_sum")
        return b.scale(total, b.arch.moe.dense_factor)
    if not _has_shared_expert(b):
        return routed
    shared = dense(b, x, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "shexp")
    if b.has("ffn_gate_inp_shexp.weight"):
        gate = b.mul_mat(x, "ffn_gate_inp_shexp")
        y = b.value("shexp_gated", shared.width, shared)
        b.add(Glu(out=y, gate=gate, up=shared, activation=Activation("sigmoid")))
        shared = y
    total = b.sum(routed, shared, "ffn_sum")
    return b.scale(total, 0.5) if b.arch.moe.shared_half else total


def has_experts(b: Builder) -> bool:
    """Return whether the current layer has routed experts."""
    step = b.h.int("interleave_moe_layer_step", 1) if b.arch.moe.layer_step else 1
    if b.arch.dense_only or (b.layer + 1) % max(step, 1):
        return False
    return b.has(*_ROUTED) or (
        b.h.n_expert > 0 and b.layer >= b.h.int("leading_dense_block_count", 0) and not b.has(*_DENSE)
    )


def _has_shared_expert(b: Builder) -> bool:
    """Return whether there is a shared expert; if the metadata mentions one, the architecture may require it."""
    has_keys = b.h.int("expert_shared_count", 0) or b.h.int("expert_shared_feed_forward_length", 0)
    return b.has(*_SHARED) if has_keys else b.has(*_SHARED[1:])


def arctic_feed_forward(b: Builder, x: Value, of_layer: Value) -> Value:
    """Add a dense layer of x in parallel with experts of another value (Arctic)."""
    return b.sum(_dense(b, x), experts(b, of_layer), "ffn_sum")


def _dense(b: Builder, x: Value) -> Value:
    return dense(b, x, "ffn_gate", "ffn_up", "ffn_down", "ffn")


def dense(b: Builder, x: Value, gate: str, up: str, down: str, part: str) -> Value:
    """Add a dense layer: up and gate (or merged, or up alone), activation, down."""
    ups = _dense_mul_mat(b, x, up, part)
    activation = _activation(b, part)
    has_gate = b.has(f"{gate}.weight")
    if has_gate and b.arch.gated_activation:
        activation = Activation(b.arch.gated_activation)
    if has_gate:
        gates = _dense_mul_mat(b, x, gate, part)
        hidden = b.value(f"{part}_hidden", ups.width, x)
        add_glu(b, hidden, gates, ups, activation)
    elif b.arch.glu_in_up and ups.width != b.matrix(f"{down}.weight").n_in:
        hidden = b.value(f"{part}_hidden", ups.width // 2, x)
        b.add(Glu(out=hidden, gate=ups, up=None, activation=activation))
    elif b.arch.activation == "xielu":
        hidden = _xielu(b, ups, f"{part}_hidden")
    else:
        hidden = b.value(f"{part}_hidden", ups.width, x)
        b.add(Activate(out=hidden, x=ups, activation=activation))
    if b.arch.activation_scales and b.has("ffn.act.scales"):
        activated, hidden = hidden, b.value(f"{part}_scaled", hidden.width, x)
        b.add(MultiplyBy(out=hidden, x=activated, vector=b.matrix("ffn.act.scales"), kind="over"))
    if b.has(f"{part}_sub_norm.weight"):
        hidden = b.norm(hidden, f"{part}_sub_norm")
    return _dense_mul_mat(b, hidden, down, part)


def add_glu(b: Builder, out: Value, gate: Value, up: Value, activation: Activation) -> None:
    """Add out = activation(gate) * up; ``situ``: out = beta tanh(gate / beta) sigmoid(gate) * l tanh(up / l) (Kimi K3).

    beta and l are ``activation.situ_beta`` and ``situ_linear_beta``; unless l is positive, up is not bounded.
    """
    if activation.kind == "situ":
        capped = b.softcap(gate, b.h.float("activation.situ_beta"))
        gated = b.value(f"{gate.name.split('.')[-1]}_gated", gate.width, gate, gate.per)
        b.add(Glu(out=gated, gate=gate, up=capped, activation=Activation("sigmoid")))
        bound = b.h.float("activation.situ_linear_beta")
        gate = gated
        up = b.softcap(up, bound) if bound > 0 else up
        activation = Activation("linear")
    b.add(Glu(out=out, gate=gate, up=up, activation=activation))


def _xielu(b: Builder, x: Value, out: str) -> Value:
    """Return xIELU(x) with the layer's parameters in the order of ggml_xielu."""
    alpha_n, alpha_p, beta, eps = (b.h.xielu(key, b.layer) for key in ("alpha_n", "alpha_p", "beta", "eps"))
    y = b.value(out, x.width, x)
    b.add(Xielu(out=y, x=x, alpha_n=beta + _softplus(alpha_n), alpha_p=_softplus(alpha_p), beta=beta, eps=eps))
    return y


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def _dense_mul_mat(b: Builder, x: Value, name: str, part: str) -> Value:
    """Multiply by ``name``: scale * (weight x + bias), where other products are scale * (weight x) + bias."""
    scaled = part in b.arch.tensor_scales and b.has(f"{name}.scale")
    if not (scaled and b.has(f"{name}.bias")):
        return b.mul_mat(x, name, scale=scaled)
    plain = b.mul_mat(x, name, scale=False)
    y = b.value(f"{name}_scaled", plain.width, x)
    b.add(MultiplyBy(out=y, x=plain, vector=b.matrix(f"{name}.scale")))
    return y


def _activation(b: Builder, part: str) -> Activation:
    """Return the activation of a part (exps, shexp, ffn) of the current layer, with its clamps."""
    plain, limits = Activation(_activation_kind(b)), b.arch.swiglu_limits
    if plain.kind == "swiglu_oai":
        return replace(plain, gate_limit=_OAI_LIMIT, up_limit=_OAI_LIMIT)
    if not limits or (limits == "before" and part != "exps"):
        return plain
    limit = b.h.layer_float("swiglu_clamp_exp", b.layer, 0.0) if part == "exps" or limits == "before_all" else 0.0
    if part != "exps":
        limit = b.h.layer_float("swiglu_clamp_shexp", b.layer, limit)
    if limit <= 1e-6:
        return plain
    if limits != "after":
        return replace(plain, up_limit=limit, gate_limit=limit)
    return replace(plain, up_limit=limit, act_limit=limit)


#: Values of ``hidden_activation``; ModernBERT's GELU is the default.
_HIDDEN_ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "swish": "silu"}


def _activation_kind(b: Builder) -> str:
    """Return the function of the activation, by the architecture or a key."""
    if not b.arch.activation_key:
        return b.arch.activation
    return _HIDDEN_ACTIVATIONS.get(str(b.h.get("hidden_activation", "")), b.arch.activation)


def routing(b: Builder) -> Routing:
    """Return the routing of the current layer, by arch.py or the metadata; FormatError if neither has a gating."""
    h, moe = b.h, b.arch.moe
    gating = moe.gating or _gating(b)
    if gating is None:
        raise FormatError(
            f"{b.source.paths[0]}: {h.arch}.expert_gating_func is {h.get('expert_gating_func', 'missing')}; it must be "
            "1 (softmax), 2 (sigmoid), 3 (softmax of the selected experts) or 4 (square root of softplus)",
            "QK-E123",
        )
    return Routing(
        n_expert=h.n_expert,
        n_used=h.layer_int("expert_used_count", b.layer),
        gating=gating,
        norm=h.flag("expert_weights_norm") if moe.norm is None else moe.norm,
        scale=h.float("expert_weights_scale", 0.0) if moe.scale_key else 0.0,
        n_group=max(h.int("expert_group_count", 0), 1),
        n_group_used=max(h.int("expert_group_used_count", 0), 1),
    )


def _gating(b: Builder) -> str | None:
    code = b.h.int("expert_gating_func", 0)
    if code:
        return GATING.get(code)
    size = (b.h.n_layer, b.global_matrix("token_embd.weight").n_out)
    return "sigmoid" if size in b.arch.moe.sigmoid_sizes else b.arch.moe.default_gating


def _chunked_experts(b: Builder, x: Value) -> Value:
    """Return the sum of routed experts and of the chunk experts that ``experts_per_group`` of them share.

    As in llama.cpp b11434 (src/models/grovemoe.cpp), chunk experts read the output of the routed ones.
    """
    logits, share = b.mul_mat(x, "ffn_gate_inp"), b.h.int("experts_per_group")
    if share < 1 or b.h.n_expert % share:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.experts_per_group is {share}; it must divide {b.h.n_expert} experts",
            "QK-E123",
        )
    r = routing(b)
    routed = experts(b, x, logits)
    chunks = experts(b, routed, logits, "chexps", replace(r, n_used=min(r.n_used, r.n_expert // share), share=share))
    return b.sum(routed, b.scale(chunks, b.h.float("expert_group_scale")), "ffn_sum")


def experts(
    b: Builder, x: Value, logits: Value | None = None, part: str = "exps", override: Routing | None = None
) -> Value:
    """Add routed experts: routing, up and gate, activation, down, the weighted sum.

    Args:
        logits: the router's; None: ffn_gate_inp x.
        part: the suffix of the experts' tensor names.
        override: a routing in place of the metadata's.
    """
    r = override or routing(b)
    logits = b.mul_mat(x, "ffn_gate_inp") if logits is None else logits
    ids = Value(f"{b.layer}.{part}", r.n_used, 1, x.outputs, True)
    weights = b.value(f"{part}_weights", r.n_used, x)
    selected = _lookup_experts(b, x, r) if b.arch.hash_routing and b.layer < b.h.int("hash_layer_count", 0) else None
    bias = None if selected is not None else _choice_bias(b)
    b.add(Route(ids=ids, weights=weights, logits=logits, bias=bias, selected=selected, routing=r))
    b.ignore("exp_probs_b_vl.bias")  # for the tokens of an image
    if b.arch.moe.weight_inputs:
        weighted = b.value("weighted", x.width, x, r.n_used)
        b.add(Repeat(out=weighted, x=x, weights=weights))
        x = weighted
    hidden = _expert_hidden(b, x, ids, r.n_used, part)
    down = mul_mat_id(b, hidden, ids, f"ffn_down_{part}", r.n_used)
    out = b.value(f"ffn_moe_{part}", down.width, x)
    b.add(Combine(out=out, x=down, weights=None if b.arch.moe.weight_inputs else weights))
    return out


def latent_experts(b: Builder, x: Value, name: str) -> Value:
    """Add experts on shorter rows, projected by ``name_down`` and ``name_up``; the router reads x itself."""
    logits = b.mul_mat(x, "ffn_gate_inp")
    routed = experts(b, b.mul_mat(x, f"{name}_down", scale=False, bias=False), logits)
    routed = b.norm(routed, f"{name}_norm") if b.has(f"{name}_norm.weight") else routed
    return b.mul_mat(routed, f"{name}_up", scale=False, bias=False)


def _lookup_experts(b: Builder, x: Value, r: Routing) -> Value:
    """Return the experts of each token, looked up in a table (DeepSeek 4)."""
    out = Value(f"{b.layer}.looked_up", r.n_used, 1, False, True)
    b.add(Lookup(out=out, weight=b.matrix("ffn_gate_tid2eid.weight"), n=r.n_expert))
    if not x.outputs:
        return out
    selected = replace(out, name=f"{out.name}_out", outputs=True)
    b.add(SelectOutputs(out=selected, x=out))
    return selected


def _choice_bias(b: Builder) -> Matrix | None:
    """Return the bias of the router's selection; its name has no ``.bias`` in HY V3."""
    return b.maybe("exp_probs_b.bias") or b.maybe("exp_probs_b")


def mul_mat_id(b: Builder, x: Value, ids: Value, name: str, n_used: int, rows: tuple[int, int] | None = None) -> Value:
    """Multiply by the selected experts' matrices, with their biases and scales if the file has them."""
    weight = b.matrix(f"{name}.weight", rows)
    scale = b.maybe(f"{name}.scale") if "exps" in b.arch.tensor_scales else None
    out = b.value(name, weight.n_out, ids, n_used)
    b.add(MulMatId(out=out, x=x, ids=ids, weight=weight, bias=b.maybe(f"{name}.bias"), scale=scale))
    return out


def _expert_hidden(b: Builder, x: Value, ids: Value, n_used: int, part: str) -> Value:
    activation = _activation(b, "exps")
    if b.has(f"ffn_gate_up_{part}.weight"):
        gate_up = mul_mat_id(b, x, ids, f"ffn_gate_up_{part}", n_used)
        hidden = b.value(f"{part}_hidden", gate_up.width // 2, ids, n_used)
        b.add(Glu(out=hidden, gate=gate_up, up=None, activation=activation))
        return hidden
    up = mul_mat_id(b, x, ids, f"ffn_up_{part}", n_used)
    hidden = b.value(f"{part}_hidden", up.width, ids, n_used)
    if b.has(f"ffn_gate_{part}.weight"):
        gate = mul_mat_id(b, x, ids, f"ffn_gate_{part}", n_used)
        add_glu(b, hidden, gate, up, activation)
    else:
        b.add(Activate(out=hidden, x=up, activation=activation))
    return hidden
