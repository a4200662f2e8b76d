"""What the rules of single families (``families``) did, undone: see ``rules``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from quantkit.checkpoint.back.rules import CHANGES, Backward, undone
from quantkit.checkpoint.expressions import (
    Constant,
    Expression,
    Mapped,
    Shaped,
    Transposed,
    Zeros,
    joined,
    size_of,
    taken,
)
from quantkit.checkpoint.families import (
    bailing,
    bert,
    bitnet,
    cohere,
    deepseek,
    dots3,
    early,
    gemma,
    glm,
    granite,
    hybrids,
    kimi,
    mamba,
    mimo,
    minimax,
    others,
    qwen_next,
    step,
)
from quantkit.checkpoint.tensors import Context, Rule, Tensor


def _unchanged(tensor: Tensor, context: Context) -> Expression:
    return tensor.x


def _flat(tensor: Tensor, context: Context) -> Expression:
    """Leave out all but one dimension."""
    return Shaped(tensor.x, (size_of(tensor.x),))


def _three(tensor: Tensor, context: Context) -> Expression:
    """Make a convolution of single channels of what llama.cpp has in four dimensions."""
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], 1, tensor.x.shape[-1]))


def _log_of_negative(tensor: Tensor, context: Context) -> Expression:
    return Mapped(_flat(tensor, context), "log of negative")


def _log(tensor: Tensor, context: Context) -> Expression:
    return Mapped(_flat(tensor, context), "log")


def _with_positions(tensor: Tensor, context: Context) -> Expression:
    """Put the positions first that no token has: zeros."""
    unused = bert.offset(context.config)
    return joined([Zeros((unused, tensor.x.shape[1]), tensor.x.type), tensor.x]) if unused else tensor.x


def _rows(tensor: Tensor, context: Context) -> Expression:
    """Put experts one behind the other."""
    return Shaped(tensor.x, (size_of(tensor.x) // tensor.x.shape[-1], tensor.x.shape[-1]))


def _turned_rows(tensor: Tensor, context: Context) -> Expression:
    return _rows(replace(tensor, x=Transposed(tensor.x)), context)


CHANGES |= {
    bert.by_expert: _rows,
    bert.turned_by_expert: _turned_rows,
    bert.used_positions: _with_positions,
    bailing.exponential: _log,
    bitnet.ternary: _unchanged,
    gemma.filled_up: _unchanged,
    hybrids.grouped: _flat,
    kimi.as_convolution: _three,
    kimi.of_heads: _log_of_negative,
    gemma.known_tokens: _unchanged,
    granite.grouped: _flat,
    granite.column: _flat,
    glm.halves: glm.pairs,
    early.by_head: early.by_head_back,
    early.by_key: early.by_key_back,
    mamba.column: _flat,
    mamba.grouped: _flat,
    step.without_ones: _unchanged,
}


@undone.register
def _(rule: cohere.NoBias, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Leave out biases of zero."""
    return None


@undone.register(dots3.Rescaled)
@undone.register(hybrids.Multipliers)
@undone.register(hybrids.OnlyExpert)
@undone.register(kimi.Gates)
@undone.register(mamba.OwnOutput)
@undone.register(others.Activations)
@undone.register(minimax.Silent)
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
    if stem in stems and ahead > 0:
        return ()  # of all such layers the same
    name = f"mtp.{stems[stem]}.{suffix}" if stem in stems else f"mtp.layers.{ahead}.{match[2]}"
    return (replace(tensor, name=name),)


@undone.register
def _(rule: gemma.Projections, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take the projections apart."""
    match = re.fullmatch(r"model\.(altup_(?:unembed_)?projections)\.weight", tensor.name)
    if match is None:
        return None
    return [
        replace(
            tensor,
            name=f"model.{match[1]}.{i}.weight",
            x=Shaped(taken(tensor.x, 0, range(i, i + 1)), tensor.x.shape[1:]),
        )
        for i in range(tensor.x.shape[0])
    ]


@undone.register
def _(rule: kimi.Scores, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Make a norm of ones, which leaves all to the projection, of what both are multiplied."""
    if not tensor.name.endswith("_res_proj.weight"):
        return None
    n = size_of(tensor.x)
    norm = replace(tensor, name=tensor.name.replace("_proj.", "_norm."), x=Constant((1.0,) * n))
    return norm, replace(tensor, x=Shaped(tensor.x, (1, n)))


@undone.register
def _(rule: bailing.Gates, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Call both gates by one name."""
    name = re.sub(r"\.self_attn\.g_(a_)?proj\.", ".attention.g_proj.", tensor.name)
    return None if name == tensor.name else (replace(tensor, name=name),)


@undone.register
def _(rule: dots3.EmbeddingAhead, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    found = re.fullmatch(r"model\.layers\.\d+\.embed_tokens\.weight", tensor.name)
    return None if found is None else (replace(tensor, name="model.mtp.embed_tokens.weight"),)


@undone.register
def _(rule: mamba.LayerAhead, tensor: Tensor, back: Backward) -> Iterable[Tensor] | None:
    """Take the layer that predicts more tokens apart: attention, and experts."""
    match = re.fullmatch(r"(?:backbone|model)\.layers\.(\d+)\.(.+)", tensor.name)
    if match is None or int(match[1]) < back.config.layers:
        return None
    stems = {stem: name for name, stem in mamba.APART.items()}
    first = match[2] == "norm.weight" or re.match(r"mixer\.[qkvo]_proj\.", match[2])
    return (replace(tensor, name=f"mtp.layers.{stems.get(match[2], f'{0 if first else 1}.{match[2]}')}"),)


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
