"""Multi-head latent attention (MLA): keys and values of all heads are projected from one latent row (DeepSeek 2).

A token has a latent row c of ``kv_lora_rank`` columns (normalized) and one rotated key p of ``n_rot`` columns shared by
all heads. Head h has the key [K_h c, p] and the value V_h c; its query is [q, q_rope]. There are two equivalent forms:

    expanded   kv_b gives every head's K_h c and V_h c; they are cached, n_head * (head_k + head_v) columns a token.
    absorbed   q . K_h c = K_h^T q . c, so k_b (K_h^T) multiplies the query and the cache holds [c, p] alone, once for
               all heads; attention returns a mixture of latent rows, which v_b projects to values.

The metadata says which form a model has (``key_length_mla``), as in llama.cpp b11434 src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.attention import (
    HeadShape,
    attend,
    attention_gate,
    cache_kv,
    gate_attention,
    gqa,
    is_windowed,
    rope_config,
    rope_factors,
)
from quantkit.model.builder import Builder
from quantkit.model.indexer import select_keys
from quantkit.model.ops import Join, Matrix, MulMatHeads, RopeConfig, ScaleByPosition, Value

#: Tensors of low-rank queries; a file with one of them must have all.
_LATENT_QUERY = ("attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight")


def mla(b: Builder, x: Value) -> Value:
    """Add DeepSeek 2's attention, absorbed or expanded, with its yarn rules.

    Raises:
        FormatError: a tensor or key is missing, or shapes are inconsistent.
        TypeNotSupported: a projection has a bias.
    """
    key_length = b.h.int("attention.key_length_mla", 0)
    value_length = b.h.int("attention.value_length_mla", 0)
    if (key_length == 0) != (value_length == 0):
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.attention.key_length_mla is {key_length} and value_length_mla "
            f"{value_length}; a model must have both, or neither",
            "QK-E123",
        )
    heads = Heads(b, key_length or b.h.head_k, value_length or b.h.head_v)
    config, scale = yarn(b, heads)
    row = query_row(b, x)
    q = queries(b, row, heads)
    selected = select_keys(b, x, row, config) if b.arch.indexer else None
    q = scale_by_position(b, b.rope(q, config, heads.k, heads.nope))
    latent, k_rope = latents(b, x, heads, config)
    if key_length:
        return attend_absorbed(b, heads, q, latent, k_rope, scale, selected)
    if b.arch.indexer:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch} needs {b.h.arch}.attention.key_length_mla; convert the model again",
            "QK-E123",
        )
    return attend_expanded(b, heads, q, latent, k_rope, scale)


def mla_plain(b: Builder, x: Value) -> Value:
    """Add the expanded form without DeepSeek's yarn rules: MiniCPM 3, PLM."""
    heads = Heads(b, b.h.head_k, b.h.head_v)
    config, factors = rope_config(b, heads.k, heads.n_rot), rope_factors(b)
    q = b.rope(queries(b, query_row(b, x), heads), config, heads.k, heads.nope, factors)
    latent, k_rope = latents(b, x, heads, config, factors)
    return attend_expanded(b, heads, q, latent, k_rope, 1.0 / math.sqrt(heads.k))


def mla_without_yarn(b: Builder, x: Value) -> Value:
    """Add either form without DeepSeek's yarn rules, with a gate on the output if there is ``attn_gate``.

    Kimi Linear and K3, which have no rope, and Ling 3.
    """
    heads = Heads(b, b.h.int("attention.key_length_mla", b.h.head_k), b.h.int("attention.value_length_mla", b.h.head_v))
    config = None if b.arch.rope == "none" else rope_config(b, heads.k, heads.n_rot)
    q = queries(b, query_row(b, x), heads)
    q = q if config is None else b.rope(q, config, heads.k, heads.nope)
    latent, k_shared = latents(b, x, heads, config)
    form = attend_expanded if b.has("attn_kv_b.weight") else attend_absorbed
    return form(b, heads, q, latent, k_shared, 1.0 / math.sqrt(heads.k), gate=attention_gate(b, x))


def mla_gated(b: Builder, x: Value) -> Value:
    """Add the absorbed form without DeepSeek's yarn rules, with a gate on the output: dots 3, HY V4.

    Windowed layers have other sizes of latent rows and heads, and attend to all keys of their window.
    """
    windowed = is_windowed(b)
    suffix = "_swa" if windowed else ""
    heads = Heads(
        b, b.h.int(f"attention.key_length_mla{suffix}"), b.h.int(f"attention.value_length_mla{suffix}"), suffix
    )
    config = rope_config(b, heads.k, heads.n_rot)
    row = query_row(b, x)
    q = queries(b, row, heads)
    indexed = not windowed and b.h.int("attention.indexer.top_k", 0) > 0
    selected = select_keys(b, x, row, config) if indexed else None
    q = b.rope(q, config, heads.k, heads.nope)
    latent, k_rope = latents(b, x, heads, config)
    return attend_absorbed(b, heads, q, latent, k_rope, 1.0 / math.sqrt(heads.k), selected, attention_gate(b, x))


def gqa_fixed_rope(b: Builder, x: Value) -> Value:
    """Add grouped-query attention with constant rope (DeepSeek OCR's text model).

    Raises TypeNotSupported if the metadata has another rope.
    """
    config = rope_config(b, b.h.head_k)
    plain = RopeConfig(n_rot=b.h.n_embd // b.h.int("attention.head_count"), kind="neox", freq_base=10000.0)
    if replace(config, n_ctx_orig=0) != plain or b.h.head_k != plain.n_rot:
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch} rotates all {plain.n_rot} columns of a head, with the base 10000 and "
            "without scaling; the rope.* keys of this file differ",
            "QK-E306",
        )
    return gqa(b, x)


class Heads:
    """The dimensions of a layer: k = nope + n_rot columns of a key, v of a value, ``rank`` of a latent row.

    suffix: of the rank's key.
    """

    def __init__(self, b: Builder, head_k: int, head_v: int, suffix: str = "") -> None:
        self.n = b.h.layer_int("attention.head_count", b.layer)
        self.k, self.v = head_k, head_v
        self.rank = b.h.int(f"attention.kv_lora_rank{suffix}")
        self.n_rot = b.h.int("rope.dimension_count", b.h.head_k)
        self.nope = head_k - self.n_rot
        if self.nope < 1:
            raise FormatError(
                f"{b.source.paths[0]}: keys have {head_k} columns, of which {self.n_rot} rotate "
                f"({b.h.arch}.rope.dimension_count): latent attention needs columns that do not rotate",
                "QK-E123",
            )


def yarn(b: Builder, heads: Heads) -> tuple[RopeConfig, float]:
    """Return the rope of the rotated columns, and the scale of q . k, which includes yarn's mscale^2."""
    log_mul = b.h.float("rope.scaling.yarn_log_multiplier", 0.0) / 0.1 if b.arch.rope_rules.yarn_log else 0.0
    attn_factor = b.h.yarn_attn_factor(log_mul, log_mul if b.arch.rope_rules.yarn_cancels else 1.0)
    config = replace(rope_config(b, heads.k, heads.n_rot), attn_factor=attn_factor)
    # llama.cpp applies it to any scaling, not to yarn alone.
    log_factor = math.log(1.0 / config.freq_scale)
    mscale = attn_factor * (1.0 + 0.1 * log_factor) * (1.0 + 0.1 * log_mul * log_factor)
    return config, mscale * mscale / math.sqrt(heads.k)


def query_row(b: Builder, x: Value) -> Value:
    """Return the input of the query projection: norm(q_a x) if there is q_a, else x."""
    return b.norm(project(b, x, "attn_q_a"), "attn_q_a_norm") if b.has(*_LATENT_QUERY) else x


def queries(b: Builder, row: Value, heads: Heads) -> Value:
    """Return q, heads side by side, the rotated columns of each last."""
    name = "attn_q_b" if b.has(*_LATENT_QUERY) else "attn_q"
    return require_width(b, project(b, row, name), heads.n * heads.k)


def latents(
    b: Builder, x: Value, heads: Heads, config: RopeConfig | None, factors: Matrix | None = None
) -> tuple[Value, Value]:
    """Return the normalized latent row, and the shared key, rotated if there is a config."""
    kv_a = require_width(b, project(b, x, "attn_kv_a_mqa"), heads.rank + heads.n_rot)
    latent = b.norm(b.take(kv_a, "kv_latent", heads.rank, 0), "attn_kv_a_norm")
    k_rope = b.take(kv_a, "k_rope", heads.n_rot, heads.rank)
    if b.has("attn_k_norm.weight"):
        k_rope = b.norm(k_rope, "attn_k_norm")
    return latent, k_rope if config is None else b.rope(k_rope, config, heads.n_rot, 0, factors)


def attend_absorbed(
    b: Builder,
    heads: Heads,
    q: Value,
    latent: Value,
    k_rope: Value,
    scale: float,
    selected: Value | None = None,
    gate: Value | None = None,
) -> Value:
    """Add attention over latent rows: one key-value head, whose values are the first columns of its keys."""
    plain = mul_mat_heads(b, b.take(q, "q_nope", heads.n * heads.nope, 0, heads.k), "attn_k_b", heads.n, heads.rank)
    rotated = b.take(q, "q_rope", heads.n * heads.n_rot, heads.nope, heads.k)
    width = heads.rank + heads.n_rot
    q = concat_heads(b, "q_absorbed", plain, rotated, heads.rank, heads.n_rot)
    k = concat_heads(b, "k_latent", latent, k_rope, heads.rank, heads.n_rot)
    mixed = attend(b, q, cache_kv(b, k, None), HeadShape(heads.n, 1, width, heads.rank), scale, selected)
    attended = gate_attention(b, mul_mat_heads(b, mixed, "attn_v_b", heads.n, heads.v), gate)
    return b.mul_mat(attended, "attn_output", bias=False)


def attend_expanded(
    b: Builder, heads: Heads, q: Value, latent: Value, k_rope: Value, scale: float, gate: Value | None = None
) -> Value:
    """Add attention over keys and values of every head, expanded from the latent row."""
    period = heads.nope + heads.v
    kv = require_width(b, project(b, latent, "attn_kv_b"), heads.n * period)
    k_nope = b.take(kv, "k_nope", heads.n * heads.nope, 0, period)
    v = b.take(kv, "v", heads.n * heads.v, heads.nope, period)
    k = concat_heads(b, "k", k_nope, k_rope, heads.nope, heads.n_rot)
    shape = HeadShape(heads.n, heads.n, heads.k, heads.v)
    attended = gate_attention(b, attend(b, q, cache_kv(b, k, v), shape, scale), gate)
    return b.mul_mat(attended, "attn_output", bias=False)


def scale_by_position(b: Builder, q: Value) -> Value:
    """Return q scaled by position, if the metadata has ``attention.temperature_scale`` (Mistral)."""
    alpha = b.h.float("attention.temperature_scale", 0.0)
    if not alpha:
        return q
    step = b.h.int("attention.temperature_length", 0)
    if step < 1:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.attention.temperature_scale is {alpha}, but temperature_length {step}; "
            "it must be a positive number of positions",
            "QK-E123",
        )
    y = b.value("q_by_position", q.width, q)
    b.add(ScaleByPosition(out=y, x=q, floor_scale=step, alpha=alpha))
    return y


def project(b: Builder, x: Value, name: str) -> Value:
    """Multiply only by ``name.weight``; llama.cpp rejects a bias here and ignores a ``.scale``."""
    if b.has(f"{name}.bias"):
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.full_name(name)}.bias: latent attention with biases is not supported", "QK-E306"
        )
    return b.mul_mat(x, name, scale=False)


def mul_mat_heads(b: Builder, x: Value, name: str, n_head: int, n_out: int) -> Value:
    """Multiply each head's columns by its own matrix of ``name``."""
    weight = b.matrix(f"{name}.weight")
    if (weight.n_in * n_head, weight.n_out, weight.n_matrices) != (x.width, n_out, n_head):
        raise FormatError(
            f"{b.source.paths[0]}: {weight.tensor.name} is {weight.tensor.shape}, not ({x.width // n_head}, {n_out}, "
            f"{n_head}): the shapes of this model are inconsistent",
            "QK-E106",
        )
    y = b.value(f"{name}_out", n_head * n_out, x)
    b.add(MulMatHeads(out=y, x=x, weight=weight))
    return y


def concat_heads(b: Builder, name: str, first: Value, second: Value, period_a: int, period_b: int) -> Value:
    """Return each head's columns of ``first`` followed by ``second``, which is repeated for all heads."""
    y = b.value(name, first.width // period_a * (period_a + period_b), first)
    b.add(Join(out=y, a=first, b=second, period_a=period_a, period_b=period_b))
    return y


def require_width(b: Builder, x: Value, width: int) -> Value:
    """Return x. Raises FormatError if its width differs from the metadata."""
    if x.width != width:
        raise FormatError(
            f"{b.source.paths[0]}: {x.name} has {x.width} columns, but {width} by the metadata: the shapes of this "
            "model are inconsistent",
            "QK-E106",
        )
    return x
