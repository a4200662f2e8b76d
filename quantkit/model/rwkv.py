"""Layers of RWKV 6 and 7, and their time mixing in place of attention (QRWKV, ARWKV).

Every matrix reads ``mixed`` = x + (x' - x) mu, x' being the previous token's row and mu a vector, to which RWKV 6 adds
a low-rank function of the token. The state of a head is one matrix S [head, head]. In RWKV 6, for every token:

    r, k, v, g = matrices times rows mixed;  w = exp(-exp(time_mix_decay + W2 tanh(W1 mixed)))
    out = S^T r + v (sum of r time_mix_first k);  S = diag(w) S + k v^T
    out = time_mix_output (layer norm of every head of out * silu(g))

QRWKV (Qwen 2) has no time_mix_first: k is replaced by k (1 - w), out = S^T r / sqrt(head) with the updated S, without
norm, times sigmoid(g). In RWKV 7, with kk = k k_k of length 1 in every head and a = sigmoid(a0 + a2 a1 mixed):

    w = exp(-e^-0.5 sigmoid(w0 + w2 tanh(w1 mixed)));  k = k + (k a - k) k_a
    v = v + (v of the first layer - v) sigmoid(v0 + v2 v1 mixed)
    S = diag(w) S + k v^T - (a kk) (S^T kk)^T;  out = layer norm of every head of S^T r, + v (sum of r r_k k)
    out = time_mix_output (out * g2 sigmoid(g1 mixed))

ARWKV (Qwen 2) may lack the norm and the gate. QRWKV and ARWKV have Qwen's feed-forward layers, RWKV channel mixing:
value (relu(key mixed)^2), in RWKV 6 times sigmoid(receptance mixed).

Sources: llama.cpp b11434 src/models/rwkv6-base.cpp, rwkv7-base.cpp, rwkv6.cpp, rwkv6qwen2.cpp, rwkv7.cpp, arwkv7.cpp.
"""

from __future__ import annotations

from math import prod
from typing import Any

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import Bonus, Lerp, Matrix, MulMatHeads, Previous, Value, Wkv
from quantkit.model.recurrent import activate, apply_gate, check_width, new_state

#: Epsilon of the head norm, which is not in the metadata.
_EPS = 64e-5
#: Epsilon of RWKV 7's removal keys, squared: ggml_l2_norm divides by max(length, 1e-12).
_LENGTH_EPS = 1e-24
#: The bound of RWKV 7's decays: e^-0.5, as llama.cpp rounds it.
_BOUND = 0.606531
#: The mixed inputs, in the order of the file.
_MIXED_6, _MIXED_7 = "wkvrg", "rwkvag"


# ---------------------------------------------------------------- a layer


def add_rwkv_layer(b: Builder, x: Value) -> Value:
    """Add a layer of RWKV 6 or 7: time mixing, then channel mixing, each with the previous rows."""
    mix = time_mix_6 if b.arch.attention == "time_mix_6" else time_mix_7
    middle = b.sum(mix(b, b.norm(x, "attn_norm")), x, "attn_residual")
    normed = b.norm(middle, "attn_norm_2")
    before = _previous(b, normed, "channels")
    if b.layer == b.h.n_layer - 1:
        middle = b.select_outputs(middle)
        normed = b.select_outputs(normed)
        before = b.select_outputs(before)
    channel_out = _channel_mix(b, normed, before)
    interval = b.h.int("rescale_every_n_layers", 0) if b.has("channel_mix_receptance.weight") else 0
    if interval <= 0 or (b.layer + 1) % interval:
        return b.sum(channel_out, middle, "layer_out")
    return b.scale(b.sum(channel_out, middle, "layer"), 0.5, out="layer_out")


def _channel_mix(b: Builder, x: Value, before: Value) -> Value:
    key = _lerp(b, x, before, "channel_key", b.matrix("channel_mix_lerp_k.weight"))
    value = _mul_mat(b, activate(b, _mul_mat(b, key, "channel_mix_key"), "relu_sqr"), "channel_mix_value")
    if not b.has("channel_mix_receptance.weight"):
        return value
    receptance = _lerp(b, x, before, "channel_receptance", b.matrix("channel_mix_lerp_r.weight"))
    return apply_gate(b, value, _mul_mat(b, receptance, "channel_mix_receptance"), "sigmoid")


# ---------------------------------------------------------------- time mixing


def time_mix_6(b: Builder, x: Value) -> Value:
    """Add time mixing of RWKV 6 or QRWKV.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    n_head, head = _heads(b)
    mixed = dict(zip(_MIXED_6, _mix_by_token(b, x), strict=True))
    r, k, v = (
        b.mul_mat(mixed[c], f"time_mix_{name}", scale=False)
        for c, name in zip("rkv", ("receptance", "key", "value"), strict=True)
    )
    gate = _mul_mat(b, mixed["g"], "time_mix_gate")
    n_kv = b.h.layer_int("attention.head_count_kv", b.layer, 0) or n_head
    for part, n in ((r, n_head), (k, n_kv), (v, n_kv), (gate, n_head)):
        check_width(b, part, n * head)
    low = b.softcap(_mul_mat(b, mixed["w"], "time_mix_decay_w1"), 1.0)
    decays = _mul_mat_with_bias(b, low, "time_mix_decay_w2", "time_mix_decay.weight")
    first = b.maybe("time_mix_first.weight")
    # QRWKV has no bonus for the current token and reads S after its update.
    fields: dict[str, Any] = {"earlier": True} if first else {"complement": True, "scale": head**-0.5}
    out = _wkv(b, x, r, decays, k, v, n_head, **fields)
    if first is not None:
        out = _bonus(b, out, r, k, v, first, head)
        out = b.norm(out, "time_mix_ln", group=head, kind="layer", eps=_EPS)
    return _mul_mat(b, apply_gate(b, out, gate, "silu" if first else "sigmoid"), "time_mix_output")


def _mix_by_token(b: Builder, x: Value) -> list[Value]:
    """Return RWKV 6's mixed rows, whose weights are vectors plus a low-rank function of the token."""
    before = _previous(b, x, "time")
    low = _mul_mat(b, _lerp(b, x, before, "time_x", b.matrix("time_mix_lerp_x.weight")), "time_mix_w1")
    low = b.softcap(low, 1.0)
    weights = b.value("time_mix_w2", len(_MIXED_6) * x.width, x)
    b.add(MulMatHeads(out=weights, x=low, weight=b.matrix("time_mix_w2.weight")))
    fused = b.maybe("time_mix_lerp_fused.weight")
    if fused is not None:
        return _parts(b, _lerp(b, x, before, "time", fused, weights), x.width, _MIXED_6)
    token_weights = _parts(b, weights, x.width, _MIXED_6)  # old files
    vectors = [b.matrix(f"time_mix_lerp_{c}.weight") for c in _MIXED_6]
    return [
        _lerp(b, x, before, f"time_{c}", vector, weight)
        for c, vector, weight in zip(_MIXED_6, vectors, token_weights, strict=True)
    ]


def time_mix_7(b: Builder, x: Value) -> Value:
    """Add time mixing of RWKV 7 or ARWKV.

    Raises FormatError if the metadata or shapes are inconsistent.
    """
    n_head, head = _heads(b)
    has_gate = b.has("time_mix_g1.weight") and b.has("time_mix_g2.weight")
    names = _MIXED_7 if has_gate else _MIXED_7[:-1]
    vector = b.matrix("time_mix_lerp_fused.weight")
    mixed = dict(
        zip(names, _parts(b, _lerp(b, x, _previous(b, x, "time"), "time", vector), x.width, names), strict=True)
    )
    r, k, v = (
        _mul_mat(b, mixed[c], f"time_mix_{name}") for c, name in zip("rkv", ("receptance", "key", "value"), strict=True)
    )
    for part in (r, k, v):
        check_width(b, part, n_head * head)
    decays = _mul_mat_with_bias(
        b, b.softcap(_mul_mat(b, mixed["w"], "time_mix_w1"), 1.0), "time_mix_w2", "time_mix_w0.weight"
    )
    rate = _rate(b, mixed["a"], "a")
    v = _with_first(b, v, mixed["v"])
    removed = b.plain_norm(b.times(k, "time_mix_k_k.weight", "k_removed"), head, kind="l2", eps=_LENGTH_EPS)
    k = _lerp(b, k, apply_gate(b, k, rate, "linear"), "k_by_rate", b.matrix("time_mix_k_a.weight"))
    out = _wkv(b, x, r, decays, k, v, n_head, removed=removed, rate=rate, bound=_BOUND)
    if b.has("time_mix_ln.weight") and b.has("time_mix_ln.bias"):
        out = b.norm(out, "time_mix_ln", group=head, kind="layer", eps=_EPS)
    out = _bonus(b, out, r, k, v, b.matrix("time_mix_r_k.weight"), head)
    if has_gate:
        gate = _mul_mat(b, activate(b, _mul_mat(b, mixed["g"], "time_mix_g1"), "sigmoid"), "time_mix_g2")
        out = apply_gate(b, out, gate, "linear")
    return _mul_mat(b, out, "time_mix_output")


def _with_first(b: Builder, v: Value, mixed: Value) -> Value:
    """Return v + (v of the first layer - v) * rate; in the first layer, store and return v."""
    if b.first_values is None:
        b.first_values = v
        for i in range(3):
            b.ignore(f"time_mix_v{i}.weight")  # unused, but files also have them in the first layer
        return v
    return _lerp(b, v, b.first_values, "v_drawn", weights=_rate(b, mixed, "v"))


def _rate(b: Builder, x: Value, name: str) -> Value:
    """Return sigmoid(w0 + w2 w1 x), w0 to w2 being the three tensors of a name."""
    low = _mul_mat(b, x, f"time_mix_{name}1")
    return activate(b, _mul_mat_with_bias(b, low, f"time_mix_{name}2", f"time_mix_{name}0.weight"), "sigmoid")


# ---------------------------------------------------------------- parts


def _heads(b: Builder) -> tuple[int, int]:
    """Return the number of heads, and their width."""
    head = b.h.int("wkv.head_size")
    if head < 1 or b.h.n_embd % head:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.wkv.head_size is {head}, which does not divide {b.h.n_embd} columns",
            "QK-E123",
        )
    return b.h.n_embd // head, head


def _wkv(b: Builder, x: Value, r: Value, g: Value, k: Value, v: Value, n_head: int, **fields: Any) -> Value:
    """Return the recurrence's output; ``fields`` are further fields of ``Wkv``."""
    y, state = b.value("wkv", r.width, x), new_state(b, "wkv", r.width * (r.width // n_head))
    b.add(Wkv(out=y, r=r, g=g, k=k, v=v, state=state, n_head=n_head, **fields))
    return y


def _previous(b: Builder, x: Value, name: str) -> Value:
    y = b.value(f"{name}_before", x.width, x)
    b.add(Previous(out=y, x=x, state=new_state(b, f"{name}_before", x.width)))
    return y


def _lerp(
    b: Builder, x: Value, target: Value, name: str, vector: Matrix | None = None, weights: Value | None = None
) -> Value:
    """Return interpolations of x and target, side by side: one for each x.width columns of weights or vector."""
    width = x.width if vector is None else prod(vector.tensor.shape)
    width = width if weights is None else weights.width
    y = b.value(f"{name}_mixed", width, x)
    b.add(Lerp(out=y, x=x, target=target, vector=vector, weights=weights))
    return y


def _parts(b: Builder, x: Value, width: int, names: str) -> list[Value]:
    check_width(b, x, len(names) * width)
    return [b.take(x, f"{x.name.split('.')[-1]}_{name}", width, i * width) for i, name in enumerate(names)]


def _mul_mat(b: Builder, x: Value, name: str) -> Value:
    return b.mul_mat(x, name, scale=False, bias=False)


def _mul_mat_with_bias(b: Builder, x: Value, name: str, vector: str) -> Value:
    """Multiply by ``name.weight``, with the tensor ``vector`` as bias."""
    return b.mul_mat(x, name, scale=False, bias_name=vector)


def _bonus(b: Builder, x: Value, r: Value, k: Value, v: Value, vector: Matrix, head: int) -> Value:
    y = b.value("wkv_with_bonus", x.width, x)
    b.add(Bonus(out=y, x=x, r=r, k=k, v=v, vector=vector, head=head))
    return y
