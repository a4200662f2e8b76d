"""Layers of encoders with norms after the residual sums (post-norm), and the classification head on pooled rows.

A head is a graph of its own, because it reads one row for each text: a classifier (pooling ``rank``: cls, its norm,
cls.output) or dense layers after any pooling (dense_2, dense_3 of sentence-transformers). The reference is llama.cpp
b11434's src/models/bert.cpp and llama-graph.cpp (build_pooling, build_dense_out).
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.errors import FormatError, TypeNotSupported
from quantkit.model.attention import is_causal
from quantkit.model.builder import Builder
from quantkit.model.ops import Activate, Activation, Graph, Pooling, Value

#: Pooling by ``pooling_type``: rows of all tokens, their mean, the first or the last; the score of a classifier.
POOLINGS = ("none", "mean", "cls", "last", "rank")
_MEAN = 1
_CLASSIFIER = ("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias")

Block = Callable[[Builder, Value], Value]


def pooling_of(b: Builder, kind: str = "") -> Pooling:
    """Return the pooling ``kind``, by default the one that the metadata names, without one that of the mean.

    Raises FormatError for an unknown one.
    """
    number = b.h.int("pooling_type", 0)
    if not 0 <= number < len(POOLINGS):
        raise FormatError(
            f"{b.source.paths[0]}: {b.h.arch}.pooling_type is {number}; it must be 0 to {len(POOLINGS) - 1} "
            f"({', '.join(POOLINGS)})",
            "QK-E123",
        )
    stated = bool(kind) or number > 0
    kind = kind or POOLINGS[number or _MEAN]
    row = kind
    if kind == "rank":
        default = _MEAN if b.arch.name == "modern-bert" else 0
        first = "last" if is_causal(b) else "cls"
        row = "mean" if b.h.int("classifier.pooling_type", default) == _MEAN else first
    return Pooling(kind, row, stated)


def check_encoder(b: Builder) -> None:
    """Raise TypeNotSupported for parts of encoders that are not computed, FormatError without an epsilon."""
    b.h.float(f"attention.layer_norm_{'rms_' if b.arch.norm == 'rms' else ''}epsilon")
    if b.h.int("decision.block_count", 0):
        raise TypeNotSupported(
            f"{b.source.paths[0]}: a decision model, whose output is a score of every token for three types of "
            "questions, cannot be run; it can still be quantized",
            "QK-E306",
        )


def add_residual_norm_layer(b: Builder, x: Value, attention: Block, feed_forward: Block) -> Value:
    """Add a layer whose norms follow the sums (BERT); the second one after attention is Jina's."""
    attn_out = attention(b, x)
    if b.layer == b.h.n_layer - 1:
        attn_out, x = b.select_outputs(attn_out), b.select_outputs(x)
    ffn_in = b.norm(b.sum(attn_out, x, "attn_residual"), "attn_output_norm")
    if b.has("attn_norm_2.weight"):
        ffn_in = b.norm(b.sum(ffn_in, x, "attn_residual_2"), "attn_norm_2")
    return b.norm(b.sum(feed_forward(b, ffn_in), ffn_in, "layer_sum"), "layer_output_norm", out="layer_out")


def head_graph(b: Builder, width: int, pooling: Pooling) -> Graph | None:
    """Return the graph on pooled rows of ``width`` columns, or None if the file has no head for this pooling."""
    pooled = Value("pooled", width)
    outer, b.ops = b.ops, []
    x = _classifier(b, pooled) if pooling.kind == "rank" else pooled
    x = _dense(b, x)
    head = Graph(tuple(b.ops), x, inputs=(pooled,)) if b.ops else None
    b.ops = outer
    b.ignore(*_CLASSIFIER)
    return head


def _classifier(b: Builder, x: Value) -> Value:
    if b.has("cls.weight"):
        x = b.mul_mat(x, "cls")
        if b.arch.name == "modern-bert":
            activated = b.value("cls_activated", x.width, x)
            b.add(Activate(out=activated, x=x, activation=Activation("gelu")))
        else:
            activated = b.softcap(x, 1.0)  # tanh
        x = b.norm(activated, "cls.norm", kind="layer") if b.has("cls.norm.weight") else activated
    return b.mul_mat(x, "cls.output") if b.has("cls.output.weight") else x


def _dense(b: Builder, x: Value) -> Value:
    for name in ("dense_2", "dense_3"):
        x = b.mul_mat(x, name) if b.has(f"{name}.weight") else x
    return x
