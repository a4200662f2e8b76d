"""The lightning indexer: latent attention attends only to the keys it selects (DeepSeek V3.2, GLM 5).

A token has an indexer key k of ``key_length`` columns (layer norm, then rope of the first n_rot columns, in HY V4 of
the last), cached separately, ``head_count`` queries q[h], projected from the latent row of attention's queries, and a
weight w[h] for each:

    score of a position = sum over h of w[h] / sqrt(head_count * key_length) * max(q[h] . k, 0)

Attention then reads the ``top_k`` positions with the largest scores; all, while there are no more than top_k. Layers
without an indexer (``indexer.types``; GLM 5.2, HY V4) reuse the selection of the last layer that has one.

Sources: llama.cpp b11434 src/models/deepseek32.cpp, glm-dsa.cpp, dots3note.cpp, hy-v4.cpp; transformers 5.18
DeepseekV32Indexer, GlmMoeDsaAttention, HYV4Indexer. llama.cpp also multiplies q and k by a Hadamard matrix, which does
not change their products. Its prediction layers attend to all keys; quantkit's select keys like the other layers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quantkit.errors import FormatError
from quantkit.model.builder import Builder
from quantkit.model.ops import Cache, CacheWrite, LightningIndexer, RopeConfig, Value

#: Epsilon of the keys' norm, which is not in the metadata. HY V4 uses that of its other norms.
EPS = 1e-6
#: The context length that identifies GLM 5.2, whose first files lack ``indexer.types``.
_CTX_OF_GLM_5_2 = 1 << 20
_TENSORS = ("k_norm.weight", "k_norm.bias", "proj.weight", "attn_k.weight", "attn_q_b.weight")


def select_keys(b: Builder, x: Value, row: Value, config: RopeConfig) -> Value | None:
    """Return the positions that the tokens of the current layer attend to; None: all.

    Args:
        x: the layer's normalized input; row: the input of attention's query projection.
        config: rope of their columns.

    Raises:
        FormatError: a tensor or key is missing, shapes are inconsistent, or no earlier layer has an indexer.
    """
    if not _has_indexer(b):
        b.ignore(*(f"indexer.{name}" for name in _TENSORS))
        if b.selection is None and b.layer < b.h.n_layer:
            raise FormatError(
                f"{b.source.paths[0]}: {b.h.arch}.attention.indexer.types requires layer {b.layer} to attend to keys "
                "selected by an earlier layer, but no earlier layer has an indexer",
                "QK-E123",
            )
        return b.selection
    config = replace(config, kind=b.arch.indexer)
    n_head, head, top_k = indexer_sizes(b, config)
    q = b.mul_mat(row, "indexer.attn_q_b", scale=False, bias=False)
    k = b.mul_mat(x, "indexer.attn_k", scale=False, bias=False)
    weights = b.mul_mat(x, "indexer.proj", scale=False, bias=False)
    start, eps = (head - config.n_rot, b.h.eps) if b.arch.indexer_tail else (0, EPS)
    k = b.rope(b.norm(k, "indexer.k_norm", kind="layer", eps=eps), config, head, start)
    q = b.rope(q, config, head, start)
    cache = Cache(f"cache_{b.layer}_indexer", k.width, 0)
    b.caches.append(cache)
    b.add(CacheWrite(cache=cache, k=k, v=None))
    out = replace(b.value("selected", top_k, q), integer=True)
    scale = 1.0 / math.sqrt(n_head * head)
    b.add(LightningIndexer(out=out, q=q, weights=weights, cache=cache, n_head=n_head, head=head, scale=scale))
    b.selection = out
    return out


def indexer_sizes(b: Builder, config: RopeConfig) -> tuple[int, int, int]:
    """Return the indexer's number of heads, their width, and top_k."""
    n_head, head, top_k = (_positive(b, key) for key in ("head_count", "key_length", "top_k"))
    if config.n_rot > head:
        raise FormatError(
            f"{b.source.paths[0]}: {config.n_rot} columns rotate ({b.h.arch}.rope.dimension_count), but indexer keys "
            f"have {head} ({b.h.arch}.attention.indexer.key_length)",
            "QK-E123",
        )
    return n_head, head, top_k


def _has_indexer(b: Builder) -> bool:
    if b.layer >= b.h.n_layer:  # a prediction layer
        return b.has("indexer.attn_k.weight")
    if b.h.arch not in ("glm-dsa", "hy_v4"):
        return True
    if b.h.arch == "hy_v4" or b.h.get("attention.indexer.types", None) is not None:
        return b.h.layer_int("attention.indexer.types", b.layer) != 0
    return b.h.n_ctx_train < _CTX_OF_GLM_5_2 or b.layer < 2 or b.layer % 4 == 2


def _positive(b: Builder, key: str) -> int:
    key = f"attention.indexer.{key}"
    n = b.h.int(key)
    if n < 1:
        raise FormatError(f"{b.source.paths[0]}: {b.h.arch}.{key} is {n}; it must be positive", "QK-E123")
    return n
