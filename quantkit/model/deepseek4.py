"""DeepSeek V4's attention: a window of positions, and beyond it compressed blocks of one row each.

A token has one row k = norm(kv x) of ``key_length`` columns, which is the key and the value of all heads; the last
n_rot columns of q and k rotate. Values also rotate, so attention's result is rotated back by the token's own angles.
Groups of heads are then projected by ``attn_output_a``, which has a matrix for each group, and by ``attn_output_b``.

``attention.compress_ratios`` defines what a layer attends to in addition to its window of ``sliding_window`` positions:

    0     nothing
    128   a row for every complete block of 128 positions: per column, the sum of its tokens' compressor rows times
          softmax(gate x + ape); normalized, rotated by the block's first position
    4     such rows of blocks of 4, each also computed from the block before; only the ``indexer.top_k`` blocks that an
          indexer with its own blocks scores highest

Only layers with a ratio use the base ``compress_rope_freq_base`` and yarn, whose mscale is cancelled. Source: llama.cpp
b11434 src/models/deepseek4.cpp, llama-kv-cache-dsv4.cpp. It also multiplies keys by a Hadamard matrix, which does not
change products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.attention import cache_kv, rope_config
from quantkit.model.builder import Builder
from quantkit.model.indexer import indexer_sizes
from quantkit.model.ops import (
    Attention,
    BlockWrite,
    Cache,
    Compress,
    LightningIndexer,
    Matrix,
    MulMatHeads,
    RopeConfig,
    Value,
    WindowAndBlocks,
)
from quantkit.model.recurrent import new_state

#: The ratio whose blocks overlap and are selected, and the ratio whose blocks are all visible.
SELECTED_RATIO, ALL_RATIO = 4, 128


def compressed_attention(b: Builder, x: Value) -> Value:
    """Add DeepSeek V4's attention.

    Raises:
        FormatError: a tensor or key is missing, or shapes are inconsistent.
        TypeNotSupported: another ratio, which llama.cpp does not support either.
    """
    head = b.h.head_k
    n_head = b.h.layer_int("attention.head_count", b.layer)
    ratio = _ratio(b)
    window = b.h.int("attention.sliding_window")
    if window < 1:
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.attention.sliding_window is {window}; it must be positive", "QK-E123"
        )
    config = _rope(b, ratio)
    tail = head - config.n_rot
    row = b.norm(b.mul_mat(x, "attn_q_a", scale=False), "attn_q_a_norm")
    q = b.plain_norm(b.mul_mat(row, "attn_q_b", scale=False), head, out="q_normed")
    q = b.rope(q, config, head, tail)
    k = b.rope(b.norm(b.mul_mat(x, "attn_kv", scale=False), "attn_kv_a_norm"), config, head, tail)
    cache = cache_kv(b, k, None, ratio)
    selected = _visible_cells(b, x, row, cache, config, window) if ratio else None
    out = b.value("attended", n_head * head, q)
    sizes = {"n_head": n_head, "n_head_kv": 1, "head_k": head, "head_v": head}
    visibility = {"window": window, "mask": "causal" if ratio else "sliding", "selected": selected}
    sinks, scale = b.matrix("attn_sinks.weight"), 1.0 / math.sqrt(head)
    b.add(Attention(out=out, q=q, cache=cache, scale=scale, sinks=sinks, **sizes, **visibility))  # type: ignore[arg-type]
    out = b.rope(out, config, head, tail, inverse=True)
    return b.mul_mat(_project_groups(b, out), "attn_output_b", scale=False)


def _ratio(b: Builder) -> int:
    ratio = b.h.layer_int("attention.compress_ratios", b.layer)
    if ratio not in (0, SELECTED_RATIO, ALL_RATIO):
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch}.attention.compress_ratios is {ratio} for layer {b.layer}; supported are "
            f"0, {SELECTED_RATIO} and {ALL_RATIO}",
            "QK-E306",
        )
    return ratio


def _rope(b: Builder, ratio: int) -> RopeConfig:
    config = rope_config(b, b.h.head_k)
    if config.n_rot > b.h.head_k:
        raise FormatError(
            f"{b.source.paths[0]}: {config.n_rot} columns rotate ({b.h.arch}.rope.dimension_count), but keys have "
            f"{b.h.head_k}",
            "QK-E123",
        )
    if not ratio:
        return replace(config, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0, n_ctx_orig=0)
    factor = 1.0 / (1.0 + 0.1 * math.log(1.0 / config.freq_scale)) if config.ext_factor else 1.0
    return replace(config, freq_base=b.h.float("attention.compress_rope_freq_base"), attn_factor=factor)


def _visible_cells(b: Builder, x: Value, row: Value, cache: Cache, config: RopeConfig, window: int) -> Value:
    """Write the rows of blocks, and return the cells that are visible to each token."""
    _write_blocks(b, x, "attn_compressor", cache, config)
    blocks = _select_blocks(b, x, row, config) if cache.ratio == SELECTED_RATIO else None
    n = blocks.width if blocks is not None else cache.blocks(b.n_ctx)
    out = replace(b.value("cells", window + n, x), integer=True)
    b.add(WindowAndBlocks(out=out, cache=cache, window=window, blocks=blocks))
    return out


def _write_blocks(b: Builder, x: Value, name: str, cache: Cache, config: RopeConfig) -> None:
    head = cache.k_width
    kv, score = b.mul_mat(x, f"{name}_kv", scale=False), b.mul_mat(x, f"{name}_gate", scale=False)
    out, overlap = b.value(f"{name}_rows", head, x), cache.ratio == SELECTED_RATIO
    state = new_state(b, name, (9 if overlap else 3) * head)
    ape = b.matrix(f"{name}_ape.weight")
    b.add(Compress(out=out, kv=kv, score=score, ape=ape, state=state, ratio=cache.ratio))
    k = b.rope(b.norm(out, f"{name}_norm"), config, head, head - config.n_rot, step=cache.ratio)
    b.add(BlockWrite(cache=cache, k=k))


def _select_blocks(b: Builder, x: Value, row: Value, config: RopeConfig) -> Value:
    """Return the indices of the blocks that the indexer selects."""
    n_head, head, top_k = indexer_sizes(b, config)
    q = b.rope(b.mul_mat(row, "indexer.attn_q_b", scale=False), config, head, head - config.n_rot)
    weights = b.mul_mat(x, "indexer.proj", scale=False)
    cache = Cache(f"cache_{b.layer}_indexer", head, 0, SELECTED_RATIO, positions=False)
    b.caches.append(cache)
    _write_blocks(b, x, "indexer_compressor", cache, config)
    out = replace(b.value("selected", top_k, q), integer=True)
    scale = 1.0 / math.sqrt(n_head * head)
    b.add(LightningIndexer(out=out, q=q, weights=weights, cache=cache, n_head=n_head, head=head, scale=scale))
    return out


def _project_groups(b: Builder, x: Value) -> Value:
    """Multiply each group of heads by its matrix of ``attn_output_a``, which the file stores as one matrix."""
    groups, rank = b.h.int("attention.output_group_count"), b.h.int("attention.output_lora_rank")
    tensor = b.matrix("attn_output_a.weight").tensor
    fits = groups > 0 and x.width % groups == 0 and tensor.shape[0] == x.width // groups
    fits = fits and prod(tensor.shape[1:]) == rank * groups
    if not fits:
        raise FormatError(
            f"{b.source.paths[0]}: {tensor.name} is {tensor.shape}, but by the metadata {groups} groups of {rank} "
            f"rows for {x.width} columns: the shapes of this model are inconsistent",
            "QK-E106",
        )
    y = b.value("attn_output_a", groups * rank, x)
    b.add(MulMatHeads(out=y, x=x, weight=Matrix(replace(tensor, shape=(x.width // groups, rank, groups)))))
    return y
