"""Feed-forward layers: dense, shared experts, and mixtures of experts with their routers."""

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

#: Names of what makes shorter rows for experts: Nemotron 3, Kimi K3.
_LATENT = ("ffn_latent", "ffn_routed")
#: expert_gating_func of the metadata.
GATING: Mapping[int, str] = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrt_softplus"}


#: Of gpt-oss and its kin; no metadata hold it.
_OAI_LIMIT = 7.0


def feed_forward(b: Builder, x: Value, logits: Value | None = None) -> Value:
    """The feed-forward layer of x; logits: those of the router, where another value than x decides them."""
    if not b.has("ffn_gate_inp.weight"):
        return _dense(b, x)
    if b.arch.moe.chunks:
        return _with_chunks(b, x)
    latent = next((name for name in _LATENT if b.has(f"{name}_down.weight")), None)
    routed = experts(b, x, logits) if latent is None else latent_experts(b, x, latent)
    if b.has("ffn_up.weight"):
        both = b.sum(routed, _dense(b, x), "ffn_sum")
        return b.scaled(both, b.arch.moe.dense_factor)
    if not b.has("ffn_up_shexp.weight"):
        return routed
    shared = dense(b, x, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "shexp")
    if b.has("ffn_gate_inp_shexp.weight"):
        gate = b.mul_mat(x, "ffn_gate_inp_shexp")
        y = b.value("shexp_gated", shared.width, shared)
        b.add(Glu(out=y, gate=gate, up=shared, activation=Activation("sigmoid")))
        shared = y
    both = b.sum(routed, shared, "ffn_sum")
    return b.scaled(both, 0.5) if b.arch.moe.shared_half else both


def dense_and_experts(b: Builder, x: Value, of_layer: Value) -> Value:
    """A dense feed-forward layer of x, and beside it a mixture of experts of another value (Arctic)."""
    return b.sum(_dense(b, x), experts(b, of_layer), "ffn_sum")


def _dense(b: Builder, x: Value) -> Value:
    return dense(b, x, "ffn_gate", "ffn_up", "ffn_down", "ffn")


def dense(b: Builder, x: Value, gate: str, up: str, down: str, part: str) -> Value:
    """A feed-forward layer: gate and up, activation, down; or up alone, or both in one tensor."""
    ups = _dense_mul_mat(b, x, up, part)
    activation = _activation(b, part)
    if b.has(f"{gate}.weight"):
        gates = _dense_mul_mat(b, x, gate, part)
        hidden = b.value(f"{part}_hidden", ups.width, x)
        add_glu(b, hidden, gates, ups, activation)
    elif b.arch.glu_in_up:
        hidden = b.value(f"{part}_hidden", ups.width // 2, x)
        b.add(Glu(out=hidden, gate=ups, up=None, activation=activation))
    elif b.arch.activation == "xielu":
        hidden = _xielu(b, ups, f"{part}_hidden")
    else:
        hidden = b.value(f"{part}_hidden", ups.width, x)
        b.add(Activate(out=hidden, x=ups, activation=activation))
    if b.has(f"{part}_sub_norm.weight"):
        hidden = b.norm(hidden, f"{part}_sub_norm")
    return _dense_mul_mat(b, hidden, down, part)


def add_glu(b: Builder, out: Value, gate: Value, up: Value, activation: Activation) -> None:
    """Gate: out = activation(gate) * up; for ``situ`` beta tanh(gate / beta) sigmoid(gate) * l tanh(up / l) (Kimi K3).

    There beta and l are ``activation.situ_beta`` and ``situ_linear_beta``; if that is not positive, up stays as it is.
    """
    if activation.kind == "situ":
        bent = b.softcapped(gate, b.h.float("activation.situ_beta"))
        gated = b.value(f"{gate.name.split('.')[-1]}_gated", gate.width, gate, gate.per)
        b.add(Glu(out=gated, gate=gate, up=bent, activation=Activation("sigmoid")))
        bound = b.h.float("activation.situ_linear_beta")
        gate, up, activation = gated, b.softcapped(up, bound) if bound > 0 else up, Activation("linear")
    b.add(Glu(out=out, gate=gate, up=up, activation=activation))


def _xielu(b: Builder, x: Value, out: str) -> Value:
    """Return xIELU(x) with the layer's own numbers, as ggml_xielu takes them."""
    alpha_n, alpha_p, beta, eps = (b.h.xielu(key, b.layer) for key in ("alpha_n", "alpha_p", "beta", "eps"))
    y = b.value(out, x.width, x)
    b.add(Xielu(out=y, x=x, alpha_n=beta + _softplus(alpha_n), alpha_p=_softplus(alpha_p), beta=beta, eps=eps))
    return y


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def _dense_mul_mat(b: Builder, x: Value, name: str, part: str) -> Value:
    """Of a feed-forward layer ``.scale`` multiplies the bias, too (elsewhere the bias is added after it)."""
    scaled = part in b.arch.tensor_scales and b.has(f"{name}.scale")
    if not (scaled and b.has(f"{name}.bias")):
        return b.mul_mat(x, name, scale=scaled)
    plain = b.mul_mat(x, name, scale=False)
    y = b.value(f"{name}_scaled", plain.width, x)
    b.add(MultiplyBy(out=y, x=plain, vector=b.matrix(f"{name}.scale")))
    return y


def _activation(b: Builder, part: str) -> Activation:
    """Return the activation of a part of the current layer, with its limits."""
    plain, limits = Activation(b.arch.activation), b.arch.swiglu_limits
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


def routing(b: Builder) -> Routing:
    """Return how the current layer's router chooses, by its row or the metadata; FormatError if neither says."""
    h, moe = b.h, b.arch.moe
    gating = moe.gating or _gating(b)
    if gating is None:
        raise FormatError(
            f"{b.source.paths[0]}: {h.arch}.expert_gating_func is {h.get('expert_gating_func', 'missing')}; it must be "
            "1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) or 4 (square root of softplus)"
        )
    return Routing(
        n_expert=h.n_expert,
        n_used=h.layer_int("expert_used_count", b.layer),
        gating=gating,
        norm=h.flag("expert_weights_norm") if moe.norm is None else moe.norm,
        scale=h.float("expert_weights_scale", 0.0) if moe.scaled else 0.0,
        n_group=max(h.int("expert_group_count", 0), 1),
        n_group_used=max(h.int("expert_group_used_count", 0), 1),
    )


def _gating(b: Builder) -> str | None:
    given = b.h.int("expert_gating_func", 0)
    if given:
        return GATING.get(given)
    size = (b.h.n_layer, b.source.tensors["token_embd.weight"].shape[1])
    return "sigmoid" if size in b.arch.moe.sigmoid_sizes else b.arch.moe.default_gating


def _with_chunks(b: Builder, x: Value) -> Value:
    """Return the sum of a mixture of experts, and of one of the experts that ``experts_per_group`` of them share.

    As llama.cpp b11434 has it (src/models/grovemoe.cpp): those read what the first mixture gives.
    """
    logits, share = b.mul_mat(x, "ffn_gate_inp"), b.h.int("experts_per_group")
    if share < 1 or b.h.n_expert % share:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.experts_per_group is {share}; it must divide {b.h.n_expert} experts"
        )
    r = routing(b)
    routed = experts(b, x, logits)
    chunks = experts(b, routed, logits, "chexps", replace(r, n_used=min(r.n_used, r.n_expert // share), share=share))
    return b.sum(routed, b.scaled(chunks, b.h.float("expert_group_scale")), "ffn_sum")


def experts(
    b: Builder, x: Value, logits: Value | None = None, part: str = "exps", routed: Routing | None = None
) -> Value:
    """A mixture of experts: the router's choice, up and gate, activation, down, the weighted sum.

    logits: the router's; without, those that ``ffn_gate_inp`` makes of x. part: how names of the experts end; routed:
    how they are chosen, if not as the metadata say.
    """
    r = routed or routing(b)
    logits = b.mul_mat(x, "ffn_gate_inp") if logits is None else logits
    ids = Value(f"{b.layer}.{part}", r.n_used, 1, x.outputs, True)
    weights = b.value(f"{part}_weights", r.n_used, x)
    chosen = _looked_up(b, x, r) if b.arch.hashed and b.layer < b.h.int("hash_layer_count", 0) else None
    bias = None if chosen is not None else _choice_bias(b)
    b.add(Route(ids=ids, weights=weights, logits=logits, bias=bias, chosen=chosen, routing=r))
    b.maybe("exp_probs_b_vl.bias")  # of the tokens of an image
    if b.arch.moe.weight_before:
        weighted = b.value("weighted", x.width, x, r.n_used)
        b.add(Repeat(out=weighted, x=x, weights=weights))
        x = weighted
    hidden = _expert_hidden(b, x, ids, r.n_used, part)
    down = mul_mat_id(b, hidden, ids, f"ffn_down_{part}", r.n_used)
    out = b.value(f"ffn_moe_{part}", down.width, x)
    b.add(Combine(out=out, x=down, weights=None if b.arch.moe.weight_before else weights))
    return out


def latent_experts(b: Builder, x: Value, name: str) -> Value:
    """A mixture of experts on shorter rows, made and unmade by ``name``; the router reads x itself."""
    logits = b.mul_mat(x, "ffn_gate_inp")
    routed = experts(b, b.mul_mat(x, f"{name}_down", scale=False, bias=False), logits)
    routed = b.norm(routed, f"{name}_norm") if b.has(f"{name}_norm.weight") else routed
    return b.mul_mat(routed, f"{name}_up", scale=False, bias=False)


def _looked_up(b: Builder, x: Value, r: Routing) -> Value:
    """Return the experts of each token, by a table (DeepSeek 4)."""
    out = Value(f"{b.layer}.looked_up", r.n_used, 1, False, True)
    b.add(Lookup(out=out, weight=b.matrix("ffn_gate_tid2eid.weight"), n=r.n_expert))
    if not x.outputs:
        return out
    chosen = replace(out, name=f"{out.name}_out", outputs=True)
    b.add(SelectOutputs(out=chosen, x=out))
    return chosen


def _choice_bias(b: Builder) -> Matrix | None:
    """Return the bias of the router's choice, which has no ending in HY V3."""
    return b.maybe("exp_probs_b.bias") or b.maybe("exp_probs_b")


def mul_mat_id(b: Builder, x: Value, ids: Value, name: str, n_used: int, rows: tuple[int, int] | None = None) -> Value:
    """Multiply by the chosen experts' matrices, with their biases and scales if the file has them."""
    weight = b.matrix(f"{name}.weight", rows)
    scale = b.maybe(f"{name}.scale") if "exps" in b.arch.tensor_scales else None
    out = b.value(name, weight.n_out, ids, n_used)
    b.add(MulMatId(out=out, x=x, ids=ids, weight=weight, bias=b.maybe(f"{name}.bias"), scale=scale))
    return out


def _expert_hidden(b: Builder, x: Value, ids: Value, n_used: int, part: str) -> Value:
    activation = _activation(b, "exps")
    if b.has(f"ffn_gate_up_{part}.weight"):
        both = mul_mat_id(b, x, ids, f"ffn_gate_up_{part}", n_used)
        hidden = b.value(f"{part}_hidden", both.width // 2, ids, n_used)
        b.add(Glu(out=hidden, gate=both, up=None, activation=activation))
        return hidden
    up = mul_mat_id(b, x, ids, f"ffn_up_{part}", n_used)
    hidden = b.value(f"{part}_hidden", up.width, ids, n_used)
    if b.has(f"ffn_gate_{part}.weight"):
        gate = mul_mat_id(b, x, ids, f"ffn_gate_{part}", n_used)
        add_glu(b, hidden, gate, up, activation)
    else:
        b.add(Activate(out=hidden, x=up, activation=activation))
    return hidden
