"""Grouped-query attention with rope and windows, and helpers shared by all attention blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

from quantkit.errors import FormatError, TypeNotSupported
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


#: Grok's scale of q . k, for old files without the key.
_GROK_SCALE = 0.08838834764831845
#: Tensors of MiniMax M3's block selection. They are ignored: all keys are visible, as in llama.cpp without flash
#: attention, which is the same up to indexer.top_k * indexer.block_size tokens.
_BLOCK_INDEXER = ("q_proj", "k_proj", "q_norm", "k_norm")


def has_windows(b: Builder) -> bool:
    """Return whether any layer may attend only to a window."""
    w = b.arch.window
    return w is not None and window_size(b) > 0 and w.only_if_layers in (0, b.h.n_layer)


def is_windowed(b: Builder, layer: int | None = None) -> bool:
    """Return whether a layer (None: the current one) attends only to a window."""
    w, layer = b.arch.window, b.layer if layer is None else layer
    if w is None or not has_windows(b):
        return False
    if w.period == 0:
        return True
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
    size = b.h.get("attention.sliding_window", None)
    if w.fixed:
        return 0 if size is not None and int(size) == 0 else w.fixed
    return int(size) if size is not None else w.default


def has_rope(b: Builder) -> bool:
    """Return whether the current layer applies rope to q and k."""
    rules = b.arch.rope_rules
    if b.arch.rope == "none" or rules.n_layers not in (0, b.h.n_layer):
        return False
    if rules.only_windowed and has_windows(b) and not (is_windowed(b) or _is_leading_dense(b)):
        return False
    if rules.if_finetuned and not b.h.flag("rope.scaling.finetuned", True):
        return False
    if rules.pattern_key and not b.h.layer_int("attention.rope_pattern", b.layer, 1):
        return False
    if rules.skip_first:
        return not has_windows(b) or b.h.n_layer == rules.skip_step or b.layer % rules.skip_step != 0
    return not rules.skip_step or (b.layer + 1) % rules.skip_step != 0


def _is_leading_dense(b: Builder) -> bool:
    """Return whether the current layer is a leading dense one, which has rope with or without a window."""
    return b.arch.rope_rules.dense_lead and b.layer < b.h.int("leading_dense_block_count", 0)


def rope_config(b: Builder, head: int, n_rot: int = 0) -> RopeConfig:
    """Return the current layer's rope for heads of ``head`` columns; n_rot: rotated columns (0: by the metadata)."""
    h, windowed = b.h, is_windowed(b)
    base, scaled = h.float("rope.freq_base", 10000.0), True
    if windowed and b.arch.window is not None:
        base = h.float("rope.freq_base_swa", b.arch.window.freq_base or base) if b.arch.window.base_key else base
        scaled = b.arch.window.rope_scaling
    alpha = h.float("rope.scaling.alpha", 0.0) if b.arch.rope_rules.alpha_key and head > 2 else 0.0
    base *= alpha ** (head / (head - 2)) if alpha > 0 else 1.0
    sections = tuple(int(s) for s in h.get("rope.dimension_sections", ()))[:4] if b.arch.rope in _SECTIONED else ()
    yarn = scaled and h.rope_scaling == "yarn"
    keys = b.arch.rope_rules.yarn_keys
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
    """Return the number of rotated columns of a head."""
    n = b.h.int("rope.dimension_count", head) or head
    if windowed:
        return b.h.int("rope.dimension_count_swa", n) or n
    return n // 2 if b.arch.rope_rules.half else n


def _rope_kind(rope: str, sections: tuple[int, ...]) -> str:
    return "normal" if rope == "normal" or (rope == "glm" and not any(sections)) else "neox"


def rope_factors(b: Builder) -> Matrix | None:
    """Return the divisors of the angles (Llama 3; Phi: by context length), or None."""
    freqs, long, short = (b.maybe_global(f"rope_{name}.weight") for name in ("freqs", "factors_long", "factors_short"))
    if b.arch.rope_rules.half and is_windowed(b):
        return None
    return freqs or (long if b.n_ctx > b.h.n_ctx_orig else short)


def gqa(b: Builder, x: Value) -> Value:
    """Add grouped-query attention: projections, norms, rope, the cache, and the output matrix."""
    h = b.h
    n_head, n_kv = h.layer_int("attention.head_count", b.layer), n_head_kv(b)
    windowed = is_windowed(b)
    head_k = h.int("attention.key_length_swa", h.head_k) if windowed else h.head_k
    head_v = h.int("attention.value_length_swa", h.head_v) if windowed else h.head_v
    q, k, v = qkv(b, x, n_head * head_k, n_kv * head_k, n_kv * head_v)
    gate = attention_gate(b, x)
    b.ignore(*(f"indexer.{name}.weight" for name in _BLOCK_INDEXER))
    if not b.arch.attention_rules.norm_after_rope:
        q, k = head_norms(b, q, k, head_k)
    if has_rope(b):
        config, factors = rope_config(b, head_k), rope_factors(b)
        q, k = b.rope(q, config, head_k, factors=factors), b.rope(k, config, head_k, factors=factors)
    if b.arch.attention_rules.norm_after_rope:
        q, k = head_norms(b, q, k, head_k)
    q, k = _after_rope(b, q, k, head_k)
    heads = HeadShape(n_head, n_kv, head_k, head_v)
    attended = attend(b, q, cache_kv(b, k, v), heads, _attention_scale(b, head_k))
    attended = gate_attention(b, attended, gate)
    if b.has("attn_sub_norm.weight"):
        attended = b.norm(attended, "attn_sub_norm")
    out = b.mul_mat(attended, "attn_o" if b.arch.layer_prefix else "attn_output")
    factor = b.h.float("attention.value_scale", 0.0) if b.arch.attention_rules.value_scale_key else 0.0
    return b.scale(out, factor or 1.0)


def gqa_or_one(b: Builder, x: Value) -> Value:
    """Add attention, or only the output matrix if the layer has no heads (Deci)."""
    return gqa(b, x) if n_head_kv(b) else b.mul_mat(x, "attn_output")


def attention_gate(b: Builder, x: Value) -> Value | None:
    """Return attn_gate x (softplus applied if that is the gate's function), or None without a gate."""
    if not b.arch.attention_rules.gate or not b.has("attn_gate.weight"):
        return None
    gate = b.mul_mat(x, "attn_gate", scale=False)
    if b.arch.attention_rules.gate != "softplus":
        return gate
    y = b.value("attn_gate_softplus", gate.width, gate)
    b.add(Activate(out=y, x=gate, activation=Activation("softplus")))
    return y


def gate_attention(b: Builder, attended: Value, gate: Value | None) -> Value:
    """Return attended * function(gate); a gate has a value for each head or column. None: attended itself."""
    if gate is None:
        return attended
    # softplus was applied already and is never negative, so relu leaves it unchanged.
    kind = "relu" if b.arch.attention_rules.gate == "softplus" else b.arch.attention_rules.gate
    y = b.value("attended_gated", attended.width, attended)
    b.add(Glu(out=y, gate=gate, up=attended, activation=Activation(kind)))
    return y


def cache_kv(b: Builder, k: Value, v: Value | None, ratio: int = 0) -> Cache:
    """Write keys and values to a new cache and return it; ratio: it also has rows for blocks of ``ratio`` positions."""
    cache = Cache(f"cache_{b.layer}", k.width, 0 if v is None else v.width, ratio)
    b.caches.append(cache)
    b.add(CacheWrite(cache=cache, k=k, v=v))
    return cache


class HeadShape(NamedTuple):
    """Numbers of query and key-value heads, and columns of a key and of a value."""

    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int


def attend(b: Builder, q: Value, cache: Cache, heads: HeadShape, scale: float, selected: Value | None = None) -> Value:
    """Return the attention of q over a cache, within the current layer's window."""
    out = b.value("attended", heads.n_head * heads.head_v, q)
    softcap = b.arch.attention_rules.softcap
    if softcap:
        softcap = b.h.float("attn_logit_softcapping", softcap)
    windowed = is_windowed(b)
    mask = "causal" if is_causal(b) else "whole"
    if windowed and b.arch.window:
        mask = b.arch.window.mask
        if mask != "symmetric" and not is_causal(b):
            raise TypeNotSupported(
                f"{b.source.paths[0]}: {b.h.arch}.attention.causal is false, but windows are of earlier tokens: "
                "this model cannot be run",
                "QK-E306",
            )
    buckets = b.maybe("attn_rel_b.weight")
    if buckets is not None:
        b.buckets = b.buckets or buckets
    b.add(
        Attention(
            out=out,
            q=q,
            cache=cache,
            n_head=heads.n_head,
            n_head_kv=heads.n_head_kv,
            head_k=heads.head_k,
            head_v=heads.head_v,
            scale=scale,
            softcap=softcap,
            alibi=_alibi(b),
            buckets=buckets or b.buckets,
            sinks=b.maybe("attn_sinks.weight"),
            mask=mask,
            window=window_size(b) if windowed else 0,
            selected=selected,
        )
    )
    return out


def is_causal(b: Builder) -> bool:
    """Return whether tokens attend to earlier ones only."""
    return b.arch.causal and b.h.flag("attention.causal", True)


def _alibi(b: Builder) -> float:
    """Return ALiBi's largest bias; 0: none."""
    if b.arch.attention_rules.alibi is None:
        return max(b.h.float("attention.max_alibi_bias", 0.0), 0.0)
    return b.arch.attention_rules.alibi if b.arch.attention_rules.alibi_layers in (0, b.h.n_layer) else 0.0


def n_head_kv(b: Builder) -> int:
    return b.h.layer_int("attention.head_count_kv", b.layer, b.h.layer_int("attention.head_count", b.layer))


def qkv(b: Builder, x: Value, q_width: int, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    """Return q, k and v, projected by three matrices or one."""
    limit = b.h.float("attention.clamp_kqv", 0.0) if b.arch.attention_rules.clamp_key else 0.0
    q, k, v = _qkv(b, x, q_width, k_width, v_width)
    return _clamp(b, q, limit), _clamp(b, k, limit), _clamp(b, v, limit)


def _clamp(b: Builder, x: Value, limit: float) -> Value:
    if limit <= 0:
        return x
    y = b.value(f"{x.name.split('.')[-1]}_clamped", x.width, x)
    b.add(Clamp(out=y, x=x, limit=limit))
    return y


def _qkv(b: Builder, x: Value, q_width: int, k_width: int, v_width: int) -> tuple[Value, Value, Value]:
    if not b.has("attn_qkv.weight"):
        return b.mul_mat(x, "attn_q"), b.mul_mat(x, "attn_k"), b.mul_mat(x, "attn_v")
    merged = b.mul_mat(x, "attn_qkv")
    if merged.width != q_width + k_width + v_width:
        raise FormatError(
            f"{b.source.paths[0]}: {b.full_name('attn_qkv.weight')} has {merged.width} rows, which do not match q, k "
            "and v",
            "QK-E106",
        )
    parts = (("attn_q", q_width, 0), ("attn_k", k_width, q_width), ("attn_v", v_width, q_width + k_width))
    q, k, v = (_add_bias(b, b.take(merged, name, width, start), f"{name}.bias") for name, width, start in parts)
    return q, k, v


def _add_bias(b: Builder, x: Value, name: str) -> Value:
    bias = b.maybe(name)
    if bias is None:
        return x
    y = b.value(f"{x.name.split('.')[-1]}_biased", x.width, x)
    b.add(MultiplyBy(out=y, x=x, vector=bias, kind="plus"))
    return y


def head_norms(b: Builder, q: Value, k: Value, head: int) -> tuple[Value, Value]:
    """Return q and k, normalized if they have norms."""
    if b.arch.attention_rules.head_gains or not b.has("attn_q_norm.weight", "attn_k_norm.weight"):
        return q, k
    return head_norm(b, q, "attn_q_norm", head), head_norm(b, k, "attn_k_norm", head)


def head_norm(b: Builder, x: Value, name: str, head: int) -> Value:
    """Return q or k normalized per head, or per row if the weight is as long as the row."""
    shape = b.matrix(f"{name}.weight").tensor.shape
    group, eps = x.width if shape[0] == x.width and x.width != head else head, b.arch.attention_rules.head_norm_eps
    return b.norm(x, name, group=group, kind="layer", eps=eps) if eps else b.norm(x, name, group=group)


def _after_rope(b: Builder, q: Value, k: Value, head: int) -> tuple[Value, Value]:
    """Return q and k after Llama 4's norms of rotated heads, gains of heads, and scales of q by position."""
    if b.arch.attention_rules.plain_qk_norm and has_rope(b) and b.h.n_expert != 128:
        q, k = b.plain_norm(q, head), b.plain_norm(k, head)
    if b.arch.attention_rules.head_gains:
        y = b.value("q_gained", q.width, q)
        b.add(MultiplyBy(out=y, x=q, vector=b.matrix("attn_q_norm.weight"), repeat=head))
        q = y
    if b.arch.attention_rules.temperature == "llama4" and not has_rope(b) and has_windows(b):
        q = _scale_by_position(b, q, 8192, 0.1, 1.0)
    if b.arch.attention_rules.temperature == "mistral3" and (alpha := b.h.float("attention.temperature_scale", 0.0)):
        q = _scale_by_position(b, q, b.h.n_ctx_orig, alpha, 0.0)
    return q, k


def _scale_by_position(b: Builder, q: Value, floor_scale: int, alpha: float, offset: float) -> Value:
    y = b.value("q_by_position", q.width, q)
    b.add(ScaleByPosition(out=y, x=q, floor_scale=floor_scale, alpha=alpha, offset=offset))
    return y


def _attention_scale(b: Builder, head: int) -> float:
    if head < 1:
        raise FormatError(
            f"{b.source.paths[0]}: heads of {head} columns; {b.h.arch}.attention.key_length must be positive", "QK-E123"
        )
    if b.arch.attention_rules.scale == "head":
        return 1.0 / head
    if b.arch.attention_rules.scale == "one":
        return 1.0
    if b.arch.attention_rules.scale == "output":
        return b.h.float("attention.output_scale", _GROK_SCALE)
    scale = b.h.float("attention.scale", 0.0) if b.arch.attention_rules.scale == "key" else 0.0
    return scale or 1.0 / math.sqrt(head)
