"""Attention as most models have it: grouped queries, rope, windows; and what all kinds of attention share."""

from __future__ import annotations

import math

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import (
    Activate,
    Activation,
    Attention,
    Cache,
    CacheWrite,
    Clamp,
    Glu,
    Matrix,
    MultiplyBy,
    RopeConfig,
    ScaleByPosition,
    Value,
)

#: Kinds of rope that read ``rope.dimension_sections``.
_SECTIONED = ("imrope", "mrope", "glm", "glm_moe")


#: Grok's factor of q . k in old files, which do not say.
_GROK_SCALE = 0.08838834764831845
#: What selects blocks of keys (MiniMax M3). It is passed over: all keys are seen, as in llama.cpp without flash
#: attention; the same up to indexer.top_k * indexer.block_size tokens.
_BLOCK_INDEXER = ("q_proj", "k_proj", "q_norm", "k_norm")


def has_windows(b: Builder) -> bool:
    """Tell whether any layer of the model may attend to a window only."""
    w = b.arch.window
    return w is not None and window_size(b) > 0 and w.only_if_layers in (0, b.h.n_layer)


def is_windowed(b: Builder, layer: int | None = None) -> bool:
    """Tell whether a layer, the current one if none is named, attends to a window only."""
    w, layer = b.arch.window, b.layer if layer is None else layer
    if w is None or not has_windows(b):
        return False
    pattern = b.h.get("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):
        return bool(b.h.layer_int("attention.sliding_window_pattern", layer))
    period = int(pattern) if pattern is not None else w.period
    if period == 0:
        return True
    return layer % period != 0 if w.dense_first else layer % period < period - 1


def window_size(b: Builder) -> int:
    """Return the window of windowed layers; 0 if the model has none."""
    w = b.arch.window
    if w is None:
        return 0
    given = b.h.get("attention.sliding_window", None)
    if w.fixed:
        return 0 if given is not None and int(given) == 0 else w.fixed
    return int(given) if given is not None else w.default


def rotates(b: Builder) -> bool:
    """Tell whether the current layer's q and k rotate."""
    a = b.arch
    if a.rope_layers not in (0, b.h.n_layer):
        return False
    if a.rope == "none" or (a.rope_only_windowed and has_windows(b) and not (is_windowed(b) or _leads(b))):
        return False
    if a.rope_if_finetuned and not b.h.flag("rope.scaling.finetuned", True):
        return False
    if a.rope_pattern and not b.h.layer_int("attention.rope_pattern", b.layer, 1):
        return False
    if a.no_rope_first:
        return not has_windows(b) or b.h.n_layer == a.no_rope_step or b.layer % a.no_rope_step != 0
    return not a.no_rope_step or (b.layer + 1) % a.no_rope_step != 0


def _leads(b: Builder) -> bool:
    """Tell whether the current layer is one of the leading dense ones that rotate whatever they attend to."""
    return b.arch.rope_dense_lead and b.layer < b.h.int("leading_dense_block_count", 0)


def rope_config(b: Builder, head: int, n_rot: int = 0) -> RopeConfig:
    """Return how the current layer rotates heads of ``head`` columns."""
    h, windowed = b.h, is_windowed(b)
    base, scaled = h.float("rope.freq_base", 10000.0), True
    if windowed and b.arch.window is not None:
        base = h.float("rope.freq_base_swa", b.arch.window.freq_base or base) if b.arch.window.own_base else base
        scaled = b.arch.window.scaled
    alpha = h.float("rope.scaling.alpha", 0.0) if b.arch.rope_alpha and head > 2 else 0.0
    base *= alpha ** (head / (head - 2)) if alpha > 0 else 1.0
    sections = tuple(int(s) for s in h.get("rope.dimension_sections", ()))[:4] if b.arch.rope in _SECTIONED else ()
    yarn = scaled and h.rope_scaling == "yarn"
    keys = b.arch.yarn_keys
    log_mul = h.float("rope.scaling.yarn_log_multiplier", 0.0) if keys == "log" else 0.0
    ext = 1.0 if yarn else 0.0
    return RopeConfig(
        n_rot=n_rot or _n_rot(b, head, windowed),
        kind=_rope_kind(b.arch.rope, sections),
        freq_base=base,
        freq_scale=h.freq_scale if scaled else 1.0,
        ext_factor=h.float("rope.scaling.yarn_ext_factor", ext) if keys == "ext" else ext,
        attn_factor=h.yarn_attn_factor(log_mul) if scaled else 1.0,
        beta_fast=h.float("rope.scaling.yarn_beta_fast", 32.0) if keys else 32.0,
        beta_slow=h.float("rope.scaling.yarn_beta_slow", 1.0) if keys else 1.0,
        n_ctx_orig=h.n_ctx_orig,
        sections=sections if any(sections) else (),
        interleaved=b.arch.rope == "imrope",
    )


def _n_rot(b: Builder, head: int, windowed: bool) -> int:
    """Return how many columns of a head rotate."""
    n = b.h.int("rope.dimension_count", head) or head
    if windowed:
        return b.h.int("rope.dimension_count_swa", n) or n
    return n // 2 if b.arch.rope_half else n


def _rope_kind(rope: str, sections: tuple[int, ...]) -> str:
    return "normal" if rope == "normal" or (rope == "glm" and not any(sections)) else "neox"


def rope_factors(b: Builder) -> Matrix | None:
    """Return the divisors of the angles: Llama 3's, or Phi's for short or long contexts."""
    if b.arch.rope_half and is_windowed(b):
        return None
    for scope in (b.layer, b.h.n_layer):
        name = f"blk.{scope}." if scope < b.h.n_layer else ""
        if f"{name}rope_freqs.weight" in b.source.tensors:
            return Matrix(b.source.tensors[f"{name}rope_freqs.weight"])
        which = "long" if b.n_ctx > b.h.n_ctx_orig else "short"
        if f"{name}rope_factors_{which}.weight" in b.source.tensors:
            return Matrix(b.source.tensors[f"{name}rope_factors_{which}.weight"])
    return None


def gqa(b: Builder, x: Value) -> Value:
    """Attention with grouped queries: q, k, v, their norms and rope, the cache, and the output matrix."""
    h = b.h
    n_head, n_kv = h.layer_int("attention.head_count", b.layer), n_head_kv(b)
    windowed = is_windowed(b)
    head_k = h.int("attention.key_length_swa", h.head_k) if windowed else h.head_k
    head_v = h.int("attention.value_length_swa", h.head_v) if windowed else h.head_v
    q, k, v = qkv(b, x, n_head * head_k, n_kv * head_k, n_kv * head_v)
    gate = gate_of(b, x)
    for name in _BLOCK_INDEXER:
        b.maybe(f"indexer.{name}.weight")
    if not b.arch.norm_after_rope:
        q, k = head_norm(b, q, "attn_q_norm", head_k), head_norm(b, k, "attn_k_norm", head_k)
    if rotates(b):
        config, factors = rope_config(b, head_k), rope_factors(b)
        q, k = b.rope(q, config, head_k, factors=factors), b.rope(k, config, head_k, factors=factors)
    if b.arch.norm_after_rope:
        q, k = head_norm(b, q, "attn_q_norm", head_k), head_norm(b, k, "attn_k_norm", head_k)
    q, k = _after_rope(b, q, k, head_k)
    attended = attend(b, q, keep(b, k, v), n_head, n_kv, head_k, head_v, _attention_scale(b, head_k))
    attended = gated(b, attended, gate)
    if b.has("attn_sub_norm.weight"):
        attended = b.norm(attended, "attn_sub_norm")
    out = b.mul_mat(attended, "attn_output", bias=b.arch.output_bias)
    return b.scaled(out, (b.h.float("attention.value_scale", 0.0) if b.arch.value_scale else 0.0) or 1.0)


def gqa_or_one(b: Builder, x: Value) -> Value:
    """Attention, or one matrix in its place (Deci)."""
    return gqa(b, x) if n_head_kv(b) else b.mul_mat(x, "attn_output")


def gate_of(b: Builder, x: Value) -> Value | None:
    """Return the product of ``attn_gate`` and x, if the model multiplies what attention gives by a function of it."""
    if not b.arch.attention_gate or not b.has("attn_gate.weight"):
        return None
    gate = b.mul_mat(x, "attn_gate")
    if b.arch.attention_gate != "softplus":
        return gate
    y = b.value("attn_gate_softplus", gate.width, gate)
    b.add(Activate(out=y, x=gate, activation=Activation("softplus")))
    return y


def gated(b: Builder, attended: Value, gate: Value | None) -> Value:
    """Multiply what attention gives by the row's function of its gate, a value a head or a column."""
    if gate is None:
        return attended
    # softplus is never negative, so relu passes it on.
    kind = "relu" if b.arch.attention_gate == "softplus" else b.arch.attention_gate
    y = b.value("attended_gated", attended.width, attended)
    b.add(Glu(out=y, gate=gate, up=attended, activation=Activation(kind)))
    return y


def keep(b: Builder, k: Value, v: Value | None, ratio: int = 0) -> Cache:
    """Keep keys and values, and return their cache; ratio: it has room for blocks of so many positions, too."""
    cache = Cache(f"cache_{b.layer}", k.width, 0 if v is None else v.width, ratio)
    b.caches.append(cache)
    b.add(CacheWrite(cache=cache, k=k, v=v))
    return cache


def attend(
    b: Builder,
    q: Value,
    cache: Cache,
    n_head: int,
    n_kv: int,
    head_k: int,
    head_v: int,
    scale: float,
    selected: Value | None = None,
) -> Value:
    """Attend to the keys and values in a cache, within the current layer's window."""
    out = b.value("attended", n_head * head_v, q)
    windowed = is_windowed(b)
    b.add(
        Attention(
            out=out,
            q=q,
            cache=cache,
            n_head=n_head,
            n_head_kv=n_kv,
            head_k=head_k,
            head_v=head_v,
            scale=scale,
            softcap=b.h.float("attn_logit_softcapping", b.arch.attn_softcap) if b.arch.attn_softcap else 0.0,
            alibi=_alibi(b),
            sinks=b.maybe("attn_sinks.weight"),
            mask=b.arch.window.mask if windowed and b.arch.window else "causal" if b.arch.causal else "whole",
            window=window_size(b) if windowed else 0,
            selected=selected,
        )
    )
    return out


def _alibi(b: Builder) -> float:
    """Return the largest bias by distance; 0: there is none."""
    if b.arch.alibi is None:
        return max(b.h.float("attention.max_alibi_bias", 0.0), 0.0)
    return b.arch.alibi if b.arch.alibi_layers in (0, b.h.n_layer) else 0.0


def n_head_kv(b: Builder) -> int:
    return b.h.layer_int("attention.head_count_kv", b.layer, b.h.layer_int("attention.head_count", b.layer))


def qkv(b: Builder, x: Value, q_width: int, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    """Return q, k and v, of three matrices or of one."""
    limit = b.h.float("attention.clamp_kqv", 0.0) if b.arch.clamp_qkv else 0.0
    q, k, v = _qkv(b, x, q_width, k_width, v_width)
    return _clamped(b, q, limit), _clamped(b, k, limit), _clamped(b, v, limit)


def _clamped(b: Builder, x: Value, limit: float) -> Value:
    if limit <= 0:
        return x
    y = b.value(f"{x.name.split('.')[-1]}_clamped", x.width, x)
    b.add(Clamp(out=y, x=x, limit=limit))
    return y


def _qkv(b: Builder, x: Value, q_width: int, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    if not b.has("attn_qkv.weight"):
        return b.mul_mat(x, "attn_q"), b.mul_mat(x, "attn_k"), b.mul_mat(x, "attn_v")
    both = b.mul_mat(x, "attn_qkv")
    if both.width != q_width + k_width + v_width:
        raise FormatError(
            f"{b.source.paths[0]}: {b.full_name('attn_qkv.weight')} has {both.width} rows, not q, k and v"
        )
    parts = (("attn_q", q_width, 0), ("attn_k", k_width, q_width), ("attn_v", v_width, q_width + k_width))
    q, k, v = (_biased(b, b.take(both, name, width, start), f"{name}.bias") for name, width, start in parts)
    return q, k, v


def _biased(b: Builder, x: Value, name: str) -> Value:
    bias = b.maybe(name)
    if bias is None:
        return x
    y = b.value(f"{x.name.split('.')[-1]}_biased", x.width, x)
    b.add(MultiplyBy(out=y, x=x, vector=bias, add=True))
    return y


def head_norm(b: Builder, x: Value, name: str, head: int) -> Value:
    """Normalize q or k: every head, unless the weight covers the whole row in one dimension."""
    if not b.has(f"{name}.weight") or b.arch.head_gains:
        return x
    shape = b.matrix(f"{name}.weight").tensor.shape
    group, eps = x.width if shape[0] == x.width and x.width != head else head, b.arch.head_norm_eps
    return b.norm(x, name, group=group, kind="layer", eps=eps) if eps else b.norm(x, name, group=group)


def _after_rope(b: Builder, q: Value, k: Value, head: int) -> tuple[Value, Value]:
    """Llama 4's norms of rotated heads; factors of q that grow with the position."""
    if b.arch.plain_qk_norm and rotates(b) and b.h.n_expert != 128:
        q, k = b.plain_norm(q, head), b.plain_norm(k, head)
    if b.arch.head_gains:
        y = b.value("q_gained", q.width, q)
        b.add(MultiplyBy(out=y, x=q, vector=b.matrix("attn_q_norm.weight"), each=head))
        q = y
    if b.arch.temperature == "llama4" and not rotates(b) and has_windows(b):
        q = _by_position(b, q, 8192, 0.1, 1.0)
    if b.arch.temperature == "mistral3" and (alpha := b.h.float("attention.temperature_scale", 0.0)):
        q = _by_position(b, q, b.h.n_ctx_orig, alpha, 0.0)
    return q, k


def _by_position(b: Builder, q: Value, floor_scale: int, alpha: float, offset: float) -> Value:
    y = b.value("q_by_position", q.width, q)
    b.add(ScaleByPosition(out=y, x=q, floor_scale=floor_scale, alpha=alpha, offset=offset))
    return y


def _attention_scale(b: Builder, head: int) -> float:
    if head < 1:
        raise FormatError(
            f"{b.source.paths[0]}: heads of {head} columns; {b.h.arch}.attention.key_length must be above 0"
        )
    if b.arch.attention_scale == "head":
        return 1.0 / head
    if b.arch.attention_scale == "output":
        return b.h.float("attention.output_scale", _GROK_SCALE)
    given = b.h.float("attention.scale", 0.0) if b.arch.attention_scale == "key" else 0.0
    return given or 1.0 / math.sqrt(head)
