"""Attention to the last positions and, beyond them, to blocks that are one row each (DeepSeek V4).

A token has one row k = norm(kv x) of ``key_length`` columns, which is the key and the value of all heads; q and k
rotate their last n_rot columns. Since values have rotated, too, what a head attends to is turned back by the token's
own angles. Its heads then go through ``attn_output_a`` in groups, each by a matrix of its own, and through
``attn_output_b``.

``attention.compress_ratios`` says what a layer sees beside its window of ``sliding_window`` positions:

    0     nothing
    128   a row for every block of 128 positions, of those that are complete: of its tokens' compressor rows a mixture,
          column by column, by the softmax of gate x + ape; normalized, rotated by the block's first position
    4     of such rows of blocks of 4, each also made of the block before, the ``indexer.top_k`` that an indexer with
          blocks of its own scores highest

Layers with a ratio have the base ``compress_rope_freq_base``, and only they yarn, which does not lengthen them. Source:
llama.cpp b11434 src/models/deepseek4.cpp, llama-kv-cache-dsv4.cpp. It also multiplies keys by a Hadamard matrix, which
leaves products as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.attention import keep, rope_config
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

#: The ratio whose blocks overlap and are selected, and the one whose blocks are all seen.
SELECTED, SEEN = 4, 128


def compressed(b: Builder, x: Value) -> Value:
    """The attention of DeepSeek V4.

    Raises:
        FormatError: a tensor or key is missing, or shapes do not fit together.
        TypeNotSupported: a ratio that llama.cpp does not know, either.
    """
    head, n_head, ratio = b.h.head_k, b.h.layer_int("attention.head_count", b.layer), _ratio(b)
    window = b.h.int("attention.sliding_window")
    if window < 1:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch}.attention.sliding_window is {window}; it must be positive")
    config = _rope(b, ratio)
    tail = head - config.n_rot
    row = b.norm(b.mul_mat(x, "attn_q_a", scale=False), "attn_q_a_norm")
    q = b.plain_norm(b.mul_mat(row, "attn_q_b", scale=False), head, out="q_normed")
    q = b.rope(q, config, head, tail)
    k = b.rope(b.norm(b.mul_mat(x, "attn_kv", scale=False), "attn_kv_a_norm"), config, head, tail)
    cache = keep(b, k, None, ratio)
    selected = _with_blocks(b, x, row, cache, config, window) if ratio else None
    out = b.value("attended", n_head * head, q)
    sizes = {"n_head": n_head, "n_head_kv": 1, "head_k": head, "head_v": head}
    seen = {"window": window, "mask": "causal" if ratio else "sliding", "selected": selected}
    sinks, scale = b.matrix("attn_sinks.weight"), 1.0 / math.sqrt(head)
    b.add(Attention(out=out, q=q, cache=cache, scale=scale, sinks=sinks, **sizes, **seen))  # type: ignore[arg-type]
    out = b.rope(out, config, head, tail, back=True)
    return b.mul_mat(_grouped(b, out), "attn_output_b", scale=False)


def _ratio(b: Builder) -> int:
    ratio = b.h.layer_int("attention.compress_ratios", b.layer)
    if ratio not in (0, SELECTED, SEEN):
        raise TypeNotSupported(
            f"{b.source.paths[0]}: {b.h.arch}.attention.compress_ratios is {ratio} for layer {b.layer}; 0, {SELECTED} "
            f"and {SEEN} are what is known here"
        )
    return ratio


def _rope(b: Builder, ratio: int) -> RopeConfig:
    config = rope_config(b, b.h.head_k)
    if config.n_rot > b.h.head_k:
        raise FormatError(
            f"{b.source.paths[0]}: {config.n_rot} columns rotate ({b.h.arch}.rope.dimension_count) of keys of "
            f"{b.h.head_k}"
        )
    if not ratio:
        return replace(config, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0, n_ctx_orig=0)
    factor = 1.0 / (1.0 + 0.1 * math.log(1.0 / config.freq_scale)) if config.ext_factor else 1.0
    return replace(config, freq_base=b.h.float("attention.compress_rope_freq_base"), attn_factor=factor)


def _with_blocks(b: Builder, x: Value, row: Value, cache: Cache, config: RopeConfig, window: int) -> Value:
    """Keep the rows of blocks, and return the cells that the tokens of the current layer see."""
    _keep_blocks(b, x, "attn_compressor", cache, config)
    blocks = _selected(b, x, row, config) if cache.ratio == SELECTED else None
    n = blocks.width if blocks is not None else cache.blocks(b.n_ctx)
    out = replace(b.value("cells", window + n, x), integer=True)
    b.add(WindowAndBlocks(out=out, cache=cache, window=window, blocks=blocks))
    return out


def _keep_blocks(b: Builder, x: Value, name: str, cache: Cache, config: RopeConfig) -> None:
    head = cache.k_width
    kv, score = b.mul_mat(x, f"{name}_kv", scale=False), b.mul_mat(x, f"{name}_gate", scale=False)
    out, overlap = b.value(f"{name}_rows", head, x), cache.ratio == SELECTED
    state = new_state(b, name, (9 if overlap else 3) * head)
    ape = b.matrix(f"{name}_ape.weight")
    b.add(Compress(out=out, kv=kv, score=score, ape=ape, state=state, ratio=cache.ratio))
    k = b.rope(b.norm(out, f"{name}_norm"), config, head, head - config.n_rot, step=cache.ratio)
    b.add(BlockWrite(cache=cache, k=k))


def _selected(b: Builder, x: Value, row: Value, config: RopeConfig) -> Value:
    """Return the numbers of the blocks that the indexer selects."""
    n_head, head, top_k = indexer_sizes(b, config)
    q = b.rope(b.mul_mat(row, "indexer.attn_q_b", scale=False), config, head, head - config.n_rot)
    weights = b.mul_mat(x, "indexer.proj", scale=False)
    cache = Cache(f"cache_{b.layer}_indexer", head, 0, SELECTED, positions=False)
    b.caches.append(cache)
    _keep_blocks(b, x, "indexer_compressor", cache, config)
    out = replace(b.value("selected", top_k, q), integer=True)
    scale = 1.0 / math.sqrt(n_head * head)
    b.add(LightningIndexer(out=out, q=q, weights=weights, cache=cache, n_head=n_head, head=head, scale=scale))
    return out


def _grouped(b: Builder, x: Value) -> Value:
    """Multiply groups of heads, side by side, by matrices of their own, which the file has as one."""
    groups, rank = b.h.int("attention.output_group_count"), b.h.int("attention.output_lora_rank")
    tensor = b.matrix("attn_output_a.weight").tensor
    fits = groups > 0 and x.width % groups == 0 and tensor.shape == (x.width // groups, rank * groups)
    if not fits:
        raise FormatError(
            f"{b.source.paths[0]}: {tensor.name} is {tensor.shape}, by the metadata it has {groups} groups of {rank} "
            f"rows for {x.width} columns: the shapes of this model do not fit together"
        )
    y = b.value("attn_output_a", groups * rank, x)
    b.add(MulMatHeads(out=y, x=x, weight=Matrix(replace(tensor, shape=(x.width // groups, rank, groups)))))
    return y
