"""What the rules of single families (``families``) did, undone: see ``rules``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from quantkit.checkpoint.back.rules import CHANGES, Backward, undone
from quantkit.checkpoint.expressions import Expression, Shaped, Transposed, joined, taken
from quantkit.checkpoint.families import cohere, deepseek, early, gemma, glm, granite, mamba, mimo, others, qwen_next
from quantkit.checkpoint.tensors import Context, Rule, Tensor


def _unchanged(tensor: Tensor, context: Context) -> Expression:
    return tensor.x


def _flat(tensor: Tensor, context: Context) -> Expression:
    """Leave out all but one dimension."""
    n = 1
    for each in tensor.x.shape:
        n *= each
    return Shaped(tensor.x, (n,))


CHANGES |= {
    gemma.known_tokens: _unchanged,
    granite.grouped: _flat,
    granite.column: _flat,
    glm.halves: glm.pairs,
    early.by_head: early.by_head_back,
    early.by_key: early.by_key_back,
    mamba.column: _flat,
    mamba.grouped: _flat,
}


@undone.register
def _(rule: cohere.NoBias, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Leave out biases of zero."""
    return None


@undone.register(mamba.OwnOutput)
@undone.register
def _(rule: deepseek.LaterLayersDropped, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    return None


@undone.register
def _(rule: deepseek.LatentHeads, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Make keys and values of the latent one matrix again, head by head."""
    match = re.fullmatch(r"(.*\.)([kv])_b_proj\.weight", tensor.name)
    if match is None:
        return None
    if len(tensor.x.shape) != 3:
        raise back.context.fail(tensor, f"its shape {list(tensor.x.shape)} is not one of heads")
    whole = f"{match[1]}kv_b_proj.weight"
    held = back.held.setdefault((id(rule), whole), {})
    held[match[2]] = tensor
    if len(held) < 2:
        return ()
    key, value = Transposed(held["k"].x), held["v"].x
    del back.held[id(rule), whole]
    if (key.shape[0], key.shape[2]) != (value.shape[0], value.shape[2]):
        raise back.context.fail(tensor, f"keys are made by {list(key.shape)}, values by {list(value.shape)}")
    by_head = joined((key, value), 1)
    heads, rows, rank = by_head.shape
    return (replace(tensor, name=whole, x=Shaped(by_head, (heads * rows, rank))),)


@undone.register
def _(rule: others.HeadNorms, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    match = re.search(r"self_attn\.[qk]_layernorm(?=\.weight$)", tensor.name)
    if match is None:
        return None
    heads, width = tensor.x.shape
    return [
        replace(
            tensor,
            name=f"{tensor.name[: match.end()]}.norms.{head}.weight",
            x=Shaped(taken(tensor.x, 0, range(head, head + 1)), (width,)),
        )
        for head in range(heads)
    ]


@undone.register
def _(rule: mimo.LayersAhead, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor.name)
    ahead = -1 if match is None else int(match[1]) - back.config.layers
    return None if match is None or ahead < 0 else (replace(tensor, name=f"model.mtp.layers.{ahead}.{match[2]}"),)


@undone.register(qwen_next.LayersAhead)
@undone.register(others.LayersBehind)
def _(rule: Rule, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor.name)
    ahead = -1 if match is None else int(match[1]) - back.config.layers
    if match is None or ahead < 0:
        return None
    stems = {stem: name for name, stem in qwen_next.BESIDE.items()}
    stem, _, suffix = match[2].rpartition(".")
    name = f"mtp.{stems[stem]}.{suffix}" if stem in stems else f"mtp.layers.{ahead}.{match[2]}"
    return (replace(tensor, name=name),)


@undone.register
def _(rule: qwen_next.QueriesByHead, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Weave queries, keys, values and gates, all heads of each, by head."""
    match = re.fullmatch(r"(.*\.)in_proj_(qkv|z)\.weight", tensor.name)
    if match is None:
        return None
    whole = f"{match[1]}in_proj_qkvz.weight"
    held = back.held.setdefault((id(rule), whole), {})
    held[match[2]] = tensor
    if len(held) < 2:
        return ()
    x = joined((held["qkv"].x, held["z"].x))
    del back.held[id(rule), whole]
    order, at = [], 0
    widths = qwen_next.woven_widths(back.config)
    keys = back.config.number("linear_num_key_heads")
    if x.shape[0] != keys * sum(widths):
        raise back.context.fail(tensor, f"{x.shape[0]} rows are not those of {keys} heads of {sum(widths)}")
    for width in widths:
        order.append([range(at + head * width, at + (head + 1) * width) for head in range(keys)])
        at += keys * width
    runs = [run for head in zip(*order, strict=True) for run in head]
    return (replace(tensor, name=whole, x=taken(x, 0, *runs)),)
