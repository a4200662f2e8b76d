"""Multi-head latent attention: keys and values of all heads come out of one short row (DeepSeek 2 and its kin).

A token gives a latent row c of ``kv_lora_rank`` columns (normalized) and one rotated key p of ``n_rot`` columns that
all heads share. Head h has the key [K_h c, p] and the value V_h c; its query is [q, q_rope]. Two ways to the same
numbers:

    expanded   kv_b gives every head's K_h c and V_h c; they are cached, n_head * (head_k + head_v) columns a token.
    absorbed   q . K_h c = K_h^T q . c, so k_b (K_h^T) multiplies the query and the cache holds [c, p] alone, once for
               all heads; attention's result is a mixture of latent rows, and v_b makes values of it.

The metadata say which form a model has (``key_length_mla``), as in llama.cpp b11434 src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.attention import attend, gate_of, gated, gqa, is_windowed, keep, rope_config, rope_factors
from quantkit.model.builder import Builder
from quantkit.model.indexer import select_keys
from quantkit.model.ops import Join, Matrix, MulMatHeads, RopeConfig, ScaleByPosition, Value


def mla(b: Builder, x: Value) -> Value:
    """The attention of DeepSeek 2, absorbed or expanded, with its own rules for yarn.

    Raises:
        FormatError: a tensor or key is missing, or shapes do not fit together.
        TypeNotSupported: a projection has a bias.
    """
    key_length = b.h.int("attention.key_length_mla", 0)
    value_length = b.h.int("attention.value_length_mla", 0)
    if (key_length == 0) != (value_length == 0):
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.attention.key_length_mla is {key_length} and value_length_mla "
            f"{value_length}; a model has both, or none of them"
        )
    heads = Heads(b, key_length or b.h.head_k, value_length or b.h.head_v)
    config, scale = yarn(b, heads)
    row = query_row(b, x)
    q = queries(b, row, heads)
    selected = select_keys(b, x, row, config) if b.arch.indexer else None
    q = by_position(b, b.rope(q, config, heads.k, heads.nope))
    latent, k_rope = latents(b, x, heads, config)
    if key_length:
        return absorbed(b, heads, q, latent, k_rope, scale, selected)
    if b.arch.indexer:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch} needs {b.h.arch}.attention.key_length_mla; convert the model again"
        )
    return expanded(b, heads, q, latent, k_rope, scale)


def mla_plain(b: Builder, x: Value) -> Value:
    """The expanded form without DeepSeek's rules: MiniCPM 3, PLM."""
    heads = Heads(b, b.h.head_k, b.h.head_v)
    config, factors = rope_config(b, heads.k, heads.n_rot), rope_factors(b)
    q = b.rope(queries(b, query_row(b, x), heads), config, heads.k, heads.nope, factors)
    latent, k_rope = latents(b, x, heads, config, factors)
    return expanded(b, heads, q, latent, k_rope, 1.0 / math.sqrt(heads.k))


def mla_bare(b: Builder, x: Value) -> Value:
    """Either form without DeepSeek's rules for yarn, and if there is ``attn_gate``, with a gate on what comes out: Kimi
    Linear and K3, where nothing rotates, and Ling 3."""
    heads = Heads(b, b.h.int("attention.key_length_mla", b.h.head_k), b.h.int("attention.value_length_mla", b.h.head_v))
    config = None if b.arch.rope == "none" else rope_config(b, heads.k, heads.n_rot)
    q = queries(b, query_row(b, x), heads)
    q = q if config is None else b.rope(q, config, heads.k, heads.nope)
    latent, k_shared = latents(b, x, heads, config)
    form = expanded if b.has("attn_kv_b.weight") else absorbed
    return form(b, heads, q, latent, k_shared, 1.0 / math.sqrt(heads.k), gate=gate_of(b, x))


def mla_gated(b: Builder, x: Value) -> Value:
    """The absorbed form without DeepSeek's rules, with a gate on what comes out: dots 3, HY V4.

    Windowed layers have latent rows and heads of their own size, and see all keys of their window.
    """
    windowed = is_windowed(b)
    of = "_swa" if windowed else ""
    heads = Heads(b, b.h.int(f"attention.key_length_mla{of}"), b.h.int(f"attention.value_length_mla{of}"), of)
    config = rope_config(b, heads.k, heads.n_rot)
    row = query_row(b, x)
    q = queries(b, row, heads)
    indexed = not windowed and b.h.int("attention.indexer.top_k", 0) > 0
    selected = select_keys(b, x, row, config) if indexed else None
    q = b.rope(q, config, heads.k, heads.nope)
    latent, k_rope = latents(b, x, heads, config)
    return absorbed(b, heads, q, latent, k_rope, 1.0 / math.sqrt(heads.k), selected, gate_of(b, x))


def unscaled(b: Builder, x: Value) -> Value:
    """DeepSeek OCR's text: no latent rows, and rope by constants, whatever the metadata say.

    Raises TypeNotSupported where they say otherwise.
    """
    config = rope_config(b, b.h.head_k)
    plain = RopeConfig(n_rot=b.h.n_embd // b.h.int("attention.head_count"), kind="neox", freq_base=10000.0)
    if replace(config, n_ctx_orig=0) != plain or b.h.head_k != plain.n_rot:
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch} rotates all {plain.n_rot} columns of a head, with the base 10000 and "
            "without scaling; the rope.* keys of this file say otherwise"
        )
    return gqa(b, x)


class Heads:
    """The dimensions of a layer: k = nope + n_rot columns of a key, v of a value, ``rank`` of a latent row.

    of: how the key of the rank ends.
    """

    def __init__(self, b: Builder, head_k: int, head_v: int, of: str = "") -> None:
        self.n = b.h.layer_int("attention.head_count", b.layer)
        self.k, self.v = head_k, head_v
        self.rank = b.h.int(f"attention.kv_lora_rank{of}")
        self.n_rot = b.h.int("rope.dimension_count", b.h.head_k)
        self.nope = head_k - self.n_rot
        if self.nope < 1:
            raise FormatError(
                f"{b.source.paths[0]}: keys of {head_k} columns, of which {self.n_rot} rotate "
                f"({b.h.arch}.rope.dimension_count): latent attention needs some that do not"
            )


def yarn(b: Builder, heads: Heads) -> tuple[RopeConfig, float]:
    """Return how the rotating columns turn, and the scale of the products, which has yarn's factor squared."""
    log_mul = b.h.float("rope.scaling.yarn_log_multiplier", 0.0) / 0.1 if b.arch.yarn_log else 0.0
    attn_factor = b.h.yarn_attn_factor(log_mul, log_mul if b.arch.yarn_cancels else 1.0)
    config = replace(rope_config(b, heads.k, heads.n_rot), attn_factor=attn_factor)
    # llama.cpp does it for any scaling, not for yarn alone.
    log_factor = math.log(1.0 / config.freq_scale)
    mscale = attn_factor * (1.0 + 0.1 * log_factor) * (1.0 + 0.1 * log_mul * log_factor)
    return config, mscale * mscale / math.sqrt(heads.k)


def query_row(b: Builder, x: Value) -> Value:
    """Return what queries are made of: a latent row, normalized, if there is q_a, else x."""
    return b.norm(project(b, x, "attn_q_a"), "attn_q_a_norm") if b.has("attn_q_a.weight") else x


def queries(b: Builder, row: Value, heads: Heads) -> Value:
    """Return q, heads side by side, each with its rotating columns last."""
    name = "attn_q_b" if b.has("attn_q_a.weight") else "attn_q"
    return fitting(b, project(b, row, name), heads.n * heads.k)


def latents(
    b: Builder, x: Value, heads: Heads, config: RopeConfig | None, factors: Matrix | None = None
) -> tuple[Value, Value]:
    """Return a token's latent row, normalized, and the key that all heads share, rotated if there is a config."""
    both = fitting(b, project(b, x, "attn_kv_a_mqa"), heads.rank + heads.n_rot)
    latent = b.norm(b.take(both, "kv_latent", heads.rank, 0), "attn_kv_a_norm")
    k_rope = b.take(both, "k_rope", heads.n_rot, heads.rank)
    if b.has("attn_k_norm.weight"):
        k_rope = b.norm(k_rope, "attn_k_norm")
    return latent, k_rope if config is None else b.rope(k_rope, config, heads.n_rot, 0, factors)


def absorbed(
    b: Builder,
    heads: Heads,
    q: Value,
    latent: Value,
    k_rope: Value,
    scale: float,
    selected: Value | None = None,
    gate: Value | None = None,
) -> Value:
    """Attend to the latent rows: one key-value head, whose values are the first columns of its keys."""
    plain = per_head(b, b.take(q, "q_nope", heads.n * heads.nope, 0, heads.k), "attn_k_b", heads.n, heads.rank)
    rotated = b.take(q, "q_rope", heads.n * heads.n_rot, heads.nope, heads.k)
    width = heads.rank + heads.n_rot
    q = join(b, "q_absorbed", plain, rotated, heads.rank, heads.n_rot)
    k = join(b, "k_latent", latent, k_rope, heads.rank, heads.n_rot)
    mixed = attend(b, q, keep(b, k, None), heads.n, 1, width, heads.rank, scale, selected)
    attended = gated(b, per_head(b, mixed, "attn_v_b", heads.n, heads.v), gate)
    return b.mul_mat(attended, "attn_output", bias=False)


def expanded(
    b: Builder, heads: Heads, q: Value, latent: Value, k_rope: Value, scale: float, gate: Value | None = None
) -> Value:
    """Expand the latent row to a key and a value for every head; then attend as usual."""
    period = heads.nope + heads.v
    kv = fitting(b, project(b, latent, "attn_kv_b"), heads.n * period)
    k_nope = b.take(kv, "k_nope", heads.n * heads.nope, 0, period)
    v = b.take(kv, "v", heads.n * heads.v, heads.nope, period)
    k = join(b, "k", k_nope, k_rope, heads.nope, heads.n_rot)
    attended = gated(b, attend(b, q, keep(b, k, v), heads.n, heads.n, heads.k, heads.v, scale), gate)
    return b.mul_mat(attended, "attn_output", bias=False)


def by_position(b: Builder, q: Value) -> Value:
    """Scale queries by the position, where the metadata has ``attention.temperature_scale`` (Mistral)."""
    alpha = b.h.float("attention.temperature_scale", 0.0)
    if not alpha:
        return q
    step = b.h.int("attention.temperature_length", 0)
    if step < 1:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.attention.temperature_scale is {alpha}, but temperature_length {step}; "
            "it must be the number of positions of a step"
        )
    y = b.value("q_by_position", q.width, q)
    b.add(ScaleByPosition(out=y, x=q, floor_scale=step, alpha=alpha))
    return y


def project(b: Builder, x: Value, name: str) -> Value:
    """Multiply by ``name.weight`` alone; llama.cpp refuses a bias here and passes over a ``.scale``."""
    if b.has(f"{name}.bias"):
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.full_name(name)}.bias: latent attention with biases is not known here"
        )
    return b.mul_mat(x, name, scale=False)


def per_head(b: Builder, x: Value, name: str, n_head: int, n_out: int) -> Value:
    """Multiply every head's columns by its own matrix of ``name``."""
    weight = b.matrix(f"{name}.weight")
    if (weight.n_in * n_head, weight.n_out, weight.n_matrices) != (x.width, n_out, n_head):
        raise FormatError(
            f"{b.source.paths[0]}: {weight.tensor.name} is {weight.tensor.shape}, wanted "
            f"({x.width // n_head}, {n_out}, {n_head}): the shapes of this model do not fit together"
        )
    y = b.value(f"{name}_out", n_head * n_out, x)
    b.add(MulMatHeads(out=y, x=x, weight=weight))
    return y


def join(b: Builder, name: str, first: Value, second: Value, period_a: int, period_b: int) -> Value:
    """Return every head's columns of ``first`` followed by those of ``second``, which repeats for all heads."""
    y = b.value(name, first.width // period_a * (period_a + period_b), first)
    b.add(Join(out=y, a=first, b=second, period_a=period_a, period_b=period_b))
    return y


def fitting(b: Builder, x: Value, width: int) -> Value:
    """Return x; FormatError if its width is not that of the metadata."""
    if x.width != width:
        raise FormatError(
            f"{b.source.paths[0]}: {x.name} has {x.width} columns, by the metadata {width}: the shapes of this model "
            "do not fit together"
        )
    return x
