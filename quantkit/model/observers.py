"""Adds observing operations to a graph: the statistics of importance matrices, covariances and similarities.

    every_token     the last layer keeps all tokens, as the others do, not only those whose logits are wanted
    fewest_rows     and drops those that no operation observes
    observe         the sums of squares of every weight's input; weights of one input share an accumulator
    similarity      the cosine of input and output of every layer, its attention, its feed-forward part
    covariances     x x^T of chosen inputs

They add operations and change none, so the logits stay the same.

Latent attention (MLA) has two forms, and a file's weights may be quantized for either, so the inputs of attn_kv_b (the
latent row), attn_k_b (the queries' columns that do not rotate, by head) and attn_v_b (the mixture of latent rows that
a head attends to) are recorded whichever form the file has. In the expanded form that mixture is computed for the
statistics alone, by a second attention whose values are the latent rows; its cache takes n_head * kv_lora_rank values
a token and layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quantkit.errors import RecipeError
from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value

#: Prefix of accumulators of --all-experts: every token through every expert.
ALL_EXPERTS = "all experts: "
#: Experts computed together for these.
_GROUP = 8
#: Operations that compute each row from one row: no positions, no other rows, no caches or states.
BY_ROW = (
    *(ops.Activate, ops.Add, ops.Clamp, ops.Combine, ops.Glu, ops.Join, ops.MulMat, ops.MulMatHeads, ops.MulMatId),
    *(ops.MultiplyBy, ops.Norm, ops.Repeat, ops.Route, ops.Scale, ops.Shift, ops.Softcap, ops.Take),
    *(ops.Bonus, ops.Exceed, ops.Lerp, ops.Mix, ops.StreamWeights, ops.ToLength, ops.Xielu),
)

#: What llama.cpp multiplies by as by a norm's weight, and adds up (Kimi K3).
_SCORE = "_res_score.weight"
_KV_B, _K_B, _V_B = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


@dataclass(frozen=True)
class Input:
    """A value that weights multiply: by expert if there are ids, by head if ``heads`` stand side by side in a row.

    n_mat: experts or heads, else 1. ``at`` is the first operation that reads it.
    """

    x: Value
    ids: Value | None
    names: tuple[str, ...]
    n_mat: int
    at: Op
    heads: int = 1

    @property
    def n(self) -> int:
        """The columns that one matrix multiplies."""
        return self.x.width // self.heads


# ---------------------------------------------------------------- all tokens


def every_token(graph: Graph) -> Graph:
    """Return the graph with the choice of outputs moved from the last layer to just before the output matrix."""
    renamed: dict[Value, Value] = {}

    def of_all(value: Value) -> Value:
        if value not in renamed:
            renamed[value] = replace(value, outputs=False) if value.outputs else value
        return renamed[value]

    listed: list[Op] = []
    last = _output(graph)
    for op in graph.ops:
        if isinstance(op, ops.SelectOutputs):
            renamed[op.out] = of_all(op.x)
        elif op is last:
            chosen = Value(f"{last.x.name}_out", last.x.width, last.x.per, True)
            listed += [ops.SelectOutputs(layer=op.layer, out=chosen, x=of_all(last.x)), replace(last, x=chosen)]
            # What follows reads logits, which are of outputs only.
            renamed[last.out] = last.out
        elif last.out in renamed:
            listed.append(op)
        else:
            listed.append(mapped(op, of_all))
    return replace(graph, ops=tuple(listed))


def _output(graph: Graph) -> ops.MulMat:
    """Return the multiplication that makes the logits."""
    return next(op for op in reversed(graph.ops) if isinstance(op, ops.MulMat))


def mapped(op: Op, new: Callable[[Value], Value]) -> Op:
    """Return an operation of other values."""
    changed: dict[str, Any] = {}
    for f in fields(op):
        part = getattr(op, f.name)
        if isinstance(part, Value):
            changed[f.name] = new(part)
        elif isinstance(part, tuple) and any(isinstance(item, Value) for item in part):
            changed[f.name] = tuple(new(item) if isinstance(item, Value) else item for item in part)
    return replace(op, **changed) if changed else op


def fewest_rows(graph: Graph) -> Graph:
    """Return a graph of ``every_token`` that computes what no operation observes for outputs only, as far as possible.

    The last layer's down projections, for one, compute rows of outputs only; their inputs have all tokens. Apply it
    after all observing operations.
    """
    all_rows = _of_all_rows(graph)
    listed: list[Op] = []
    chosen: dict[Value, Value] = {}

    def of_outputs(value: Value, layer: int) -> Value:
        if value.outputs:
            return chosen.get(value, value)
        if value not in chosen:
            chosen[value] = replace(value, name=f"{value.name}_out", outputs=True)
            listed.append(ops.SelectOutputs(layer=layer, out=chosen[value], x=value))
        return chosen[value]

    for op in graph.ops:
        if isinstance(op, ops.SelectOutputs):
            chosen[op.out] = of_outputs(op.x, op.layer)
        elif not isinstance(op, BY_ROW) or not all_rows.isdisjoint(op.outputs()):
            listed.append(op)
        else:
            chosen.update({v: v if v.outputs else replace(v, outputs=True) for v in op.outputs()})
            listed.append(mapped(op, lambda v, op=op: of_outputs(v, op.layer)))  # type: ignore[misc]
    return replace(graph, ops=tuple(listed))


def _of_all_rows(graph: Graph) -> set[Value]:
    """Return the values needed for all tokens: observed, kept in a cache or state, or inputs of such values."""
    found: set[Value] = set()
    for op in reversed(graph.ops):
        if isinstance(op, ops.SelectOutputs):
            continue
        if not isinstance(op, BY_ROW) or not found.isdisjoint(op.outputs()):
            found.update(op.inputs())
    return found


def up_to_layer(graph: Graph, last: int) -> Graph:
    """Return the graph without the layers after ``last``; its logits are no longer the model's."""
    end = _output(graph).layer
    outs = {op.layer: value for op in graph.ops for value in op.outputs() if value.name.endswith(".layer_out")}
    whole, cut_off = outs[max(outs)], outs[last]
    kept = [op for op in graph.ops if op.layer <= last or op.layer >= end]
    return replace(graph, ops=tuple(mapped(op, lambda v: cut_off if v is whole else v) for op in kept))


# ---------------------------------------------------------------- inputs of weights


def inputs(graph: Graph, *, process_output: bool = False) -> list[Input]:
    """Return every value that a weight multiplies, in order, with the names of these weights.

    The output matrix's is left out unless ``process_output``, as llama-imatrix does. RecipeError for a fused graph.
    """
    found: dict[tuple[Value, Value | None], Input] = {}
    output = _output(graph)
    chosen = next((op.x for op in graph.ops if isinstance(op, ops.SelectOutputs) and op.out is output.x), None)
    for op in graph.ops:
        if isinstance(op, ops.MulMats | ops.UpGate | ops.UpGateId):
            raise RecipeError("fused operations do not show what every weight multiplies: observe before fusing")
        if not isinstance(op, ops.MulMat | ops.MulMatHeads | ops.MulMatId) or (op is output and not process_output):
            continue
        if op.weight.tensor.name.endswith(_SCORE):
            continue
        x = chosen if op is output and chosen is not None else op.x
        ids = op.ids if isinstance(op, ops.MulMatId) else None
        heads = op.weight.n_matrices if isinstance(op, ops.MulMatHeads) else 1
        n_mat = op.weight.n_matrices if ids is not None else heads
        known = found.get((x, ids))
        names = (*(known.names if known else ()), op.weight.tensor.name)
        found[x, ids] = Input(x, ids, tuple(dict.fromkeys(names)), n_mat, known.at if known else op, heads)
    return list(found.values())


def norms(graph: Graph) -> list[Input]:
    """Return what norms take that have a weight of their own and whose results no matrix multiplies, in order.

    They are those of queries and keys, and those that follow attention or a feed-forward part.
    """
    multiplied = {op.x for op in graph.ops if isinstance(op, ops.MulMat | ops.MulMatHeads | ops.MulMatId)}
    multiplied |= {op.x for op in graph.ops if isinstance(op, ops.SelectOutputs | ops.Repeat) and op.out in multiplied}
    uses = Counter(m.tensor.name for op in graph.ops for m in op.matrices())
    found = [(op, op.weight.tensor.name) for op in graph.ops if isinstance(op, ops.Norm) and op.weight is not None]
    alone = [(op, name) for op, name in found if uses[name] == 1 and op.out not in multiplied]
    return [Input(op.x, None, (name,), 1, op) for op, name in alone]


def observe(graph: Graph, *, process_output: bool = False, all_experts: bool = False, latent: bool = True) -> Graph:
    """Return the graph with SumColumns before every multiplication by a weight, all tokens in every layer.

    Args:
        process_output: also for the output matrix.
        all_experts: also the inputs that every expert would have for every token, in accumulators of their own.
        latent: also the other form's inputs of latent attention.
    """
    graph = every_token(graph)
    found = inputs(graph, process_output=process_output)
    if latent:
        graph, more = with_latent(graph)
        found += more
    before: dict[int, list[Op]] = {}
    for item in found:
        # The heads of a weight have one count, as llama-imatrix has it.
        n_mat = 1 if item.ids is None else item.n_mat
        op = ops.SumColumns(
            layer=item.at.layer, x=item.x, of=item.names[0], names=item.names, ids=item.ids, n_mat=n_mat
        )
        before.setdefault(id(_place(graph, item)), []).append(op)
    listed = [each for op in graph.ops for each in (*before.get(id(op), ()), op)]
    if all_experts:
        listed = list(_with_all_experts(listed))
    return replace(graph, ops=tuple(listed))


def _place(graph: Graph, item: Input) -> Op:
    """Return the operation to observe before: for the output matrix the choice of outputs."""
    if item.at is not _output(graph):
        return item.at
    return next((op for op in graph.ops if isinstance(op, ops.SelectOutputs) and op.out is _output(graph).x), item.at)


def observe_hidden(graph: Graph) -> Graph:
    """Return the graph with Observe of the input of its output matrix, for all tokens.

    The graph is one of ``observe``, or of ``every_token``.
    """
    found = next(op for op in graph.ops if isinstance(op, ops.SelectOutputs) and op.out is _output(graph).x)
    look = ops.Observe(layer=found.layer, x=found.x, of=found.x.name)
    return replace(graph, ops=tuple(each for op in graph.ops for each in ((look, op) if op is found else (op,))))


# ---------------------------------------------------------------- latent attention


def with_latent(graph: Graph, layers: Collection[int] | None = None) -> tuple[Graph, list[Input]]:
    """Return the graph with the inputs of the weights of latent attention's other form, and these inputs.

    layers: only of these; None: of all.
    """
    listed: list[Op] = []
    found: list[Input] = []
    caches = list(graph.caches)
    latents = {op.layer: op.x for op in graph.ops if isinstance(op, ops.MulMat) and _KV_B in op.weight.tensor.name}
    keys: dict[int, ops.Join] = {}
    for op in graph.ops:
        wanted = layers is None or op.layer in layers
        if isinstance(op, ops.Join) and op.out.name.endswith((".k", ".k_latent")):
            keys[op.layer] = op
            if wanted and op.out.name.endswith(".k_latent"):
                found.append(_other(op, op.a, _KV_B, 1))
        if wanted and isinstance(op, ops.Attention) and op.layer in latents and op.layer in keys:
            more, cache, seen = _expanded(op, keys[op.layer], latents[op.layer])
            listed += more
            found += seen
            caches.append(cache)
        listed.append(op)
    return replace(graph, ops=tuple(listed), caches=tuple(caches)), found


def _expanded(op: ops.Attention, keys: ops.Join, latent: Value) -> tuple[list[Op], Cache, list[Input]]:
    """Return operations that make the inputs of k_b and v_b where kv_b expands the latent rows, and these inputs."""
    layer, n, nope = op.layer, op.n_head, keys.period_a
    rank = latent.width
    q_nope = Value(f"{layer}.q_nope_seen", n * nope)
    both = Value(f"{layer}.k_and_latent", n * (op.head_k + rank))
    rows = Value(f"{layer}.latent_by_head", n * rank)
    mixed = Value(f"{layer}.latent_attended", n * rank)
    cache = Cache(f"cache_{layer}_latent", n * op.head_k, n * rank)
    attention = replace(op, out=mixed, cache=cache, n_head_kv=n, head_v=rank)
    made = [
        ops.Take(layer=layer, out=q_nope, x=op.q, start=0, period=op.head_k),
        ops.Join(layer=layer, out=both, a=keys.out, b=latent, period_a=op.head_k, period_b=rank),
        ops.Take(layer=layer, out=rows, x=both, start=op.head_k, period=op.head_k + rank),
        ops.CacheWrite(layer=layer, cache=cache, k=keys.out, v=rows),
        attention,
    ]
    return made, cache, [_other(op, q_nope, _K_B, n), _other(op, mixed, _V_B, n)]


def _other(at: Op, x: Value, name: str, heads: int) -> Input:
    return Input(x, None, (f"blk.{at.layer}.{name}",), heads, at, heads)


# ---------------------------------------------------------------- all experts


def _with_all_experts(listed: Sequence[Op]) -> Iterator[Op]:
    """Add, after every layer's down projection, that of all experts for every token, for the statistics alone."""
    made_by = {value: op for op in listed for value in op.outputs()}
    for op in listed:
        yield op
        if isinstance(op, ops.MulMatId) and isinstance(made_by.get(op.x), ops.Glu | ops.Activate):
            route = made_by.get(op.ids)
            if isinstance(route, ops.Route):
                yield from _down_of_all(op, route, made_by)


def _down_of_all(down: ops.MulMatId, route: ops.Route, made_by: Mapping[Value, Op]) -> Iterator[Op]:
    chain = _between(down.x, down.ids, made_by)
    n_expert, name = down.weight.n_matrices, down.weight.tensor.name
    first = next(op for op in chain if isinstance(op, ops.MulMatId))
    names = tuple(op.weight.tensor.name for op in chain if isinstance(op, ops.MulMatId))
    repeat = made_by.get(first.x)
    weighted = repeat if isinstance(repeat, ops.Repeat) else None
    if weighted is None:
        yield ops.SumColumns(layer=down.layer, x=first.x, of=ALL_EXPERTS + names[0], names=names)
        every = None
    else:
        every = _route_to_all(route, first)
        yield every
    own = {value for op in chain for value in op.outputs()} | ({first.x} if weighted else set())
    for start in range(0, n_expert, _GROUP):
        new = _in_group(down.ids, own, start, min(_GROUP, n_expert - start))
        if weighted is not None and every is not None:
            yield from _weighted_group(every, weighted, new(down.ids), new(first.x), start)
            yield _sum_of_all(down, new(first.x), new(down.ids), names)
        else:
            yield ops.CountUp(layer=down.layer, out=new(down.ids), like=first.x, first=start)
        for op in chain:
            yield mapped(op, new)
        yield _sum_of_all(down, new(down.x), new(down.ids), (name,))


def _sum_of_all(down: ops.MulMatId, x: Value, ids: Value, names: tuple[str, ...]) -> ops.SumColumns:
    n_mat = down.weight.n_matrices
    return ops.SumColumns(layer=down.layer, x=x, of=ALL_EXPERTS + names[0], names=names, ids=ids, n_mat=n_mat)


def _route_to_all(route: ops.Route, first: ops.MulMatId) -> ops.Route:
    """Return the router's weights for all experts, where they weigh the inputs (Llama 4).

    Each has one of its own, the sigmoid of its logit, chosen or not; where those of the chosen ones are made to add up
    to 1, an expert that is not chosen has none, which is a RecipeError.
    """
    r = route.routing
    if r.norm or r.gating == "softmax_weight":
        raise RecipeError(
            f"--all-experts: {first.weight.tensor.name} multiplies inputs weighted by the router, by a share among the "
            "experts that are chosen, which one that is not chosen does not have; leave the option away for this model"
        )
    ids, weights = (replace(v, name=f"{v.name}_all", width=r.n_expert) for v in (route.ids, route.weights))
    return replace(route, ids=ids, weights=weights, routing=replace(r, n_used=r.n_expert, n_group=1, n_group_used=1))


def _weighted_group(every: ops.Route, repeat: ops.Repeat, ids: Value, x: Value, start: int) -> list[Op]:
    """Return what makes the inputs x of some experts ids: of every token the start-th best and those after it."""
    n, layer = every.ids.width, repeat.layer
    weights = Value(f"{every.weights.name}_{start}", ids.width, 1, ids.outputs)
    return [
        ops.Take(layer=layer, out=ids, x=every.ids, start=start, period=n),
        ops.Take(layer=layer, out=weights, x=every.weights, start=start, period=n),
        ops.Repeat(layer=layer, out=x, x=repeat.x, weights=weights),
    ]


def _in_group(ids: Value, own: Collection[Value], start: int, width: int) -> Callable[[Value], Value]:
    """Return what renames a layer's ids and the values ``own`` of its experts to those of a group of experts."""
    renamed = {ids: Value(f"{ids.name}_{start}", width, 1, ids.outputs, True)}
    renamed |= {value: Value(f"{value.name}_{start}", value.width, width, value.outputs) for value in own}
    return lambda value: renamed.get(value, value)


def _between(value: Value, ids: Value, made_by: Mapping[Value, Op]) -> list[Op]:
    """Return the operations of experts that make ``value``, in order."""
    op = made_by.get(value)
    if isinstance(op, ops.MulMatId) and op.ids is ids:
        return [op]
    if not isinstance(op, ops.Glu | ops.Activate):
        return []
    chain: list[Op] = []
    for part in op.inputs():
        chain += _between(part, ids, made_by)
    return [*chain, op]


# ---------------------------------------------------------------- layers


def similarity(graph: Graph) -> Graph:
    """Return the graph with a Similarity for every layer ("layer N"), its attention and its feed-forward part."""
    graph = every_token(graph)
    listed: list[Op] = []
    x: Value | None = None  # the input of the current layer
    middle: Value | None = None
    active: Value | None = None  # of several streams (Gemma 3n) the one that attention and feed-forward part read
    attended: dict[int, Value] = {}
    for op in graph.ops:
        listed.append(op)
        out = next(iter(op.outputs()), None)
        if out is None:
            continue
        kind = out.name.rpartition(".")[2]
        if x is None or kind == "embeddings":
            x = out
        elif kind == "attn_residual":
            middle = out
            listed.append(ops.Similarity(layer=op.layer, a=active or x, b=middle, of=f"attention {op.layer}"))
        elif kind == "active":
            active = out
        elif kind == "stream_out" and middle is not None:
            listed.append(ops.Similarity(layer=op.layer, a=middle, b=out, of=f"feed-forward {op.layer}"))
        elif kind == "ffn_residual":  # attention and feed-forward part side by side
            listed.append(ops.Similarity(layer=op.layer, a=x, b=out, of=f"feed-forward {op.layer}"))
        elif kind == "layer_out":
            if active is not None:
                active = None
            elif middle is not None:
                listed.append(ops.Similarity(layer=op.layer, a=middle, b=out, of=f"feed-forward {op.layer}"))
            elif isinstance(op, ops.Add) and op.a is not x:  # if it is, the layer is one block
                attended[op.layer] = Value(f"{op.layer}.attn_residual", out.width)
                listed.append(ops.Add(layer=op.layer, out=attended[op.layer], a=x, b=op.b))
                listed.append(ops.Similarity(layer=op.layer, a=x, b=attended[op.layer], of=f"attention {op.layer}"))
            listed.append(ops.Similarity(layer=op.layer, a=x, b=out, of=f"layer {op.layer}"))
            x, middle = out, None
    return replace(graph, ops=tuple(listed))


# ---------------------------------------------------------------- covariances


@dataclass(frozen=True)
class Wanted:
    """An input whose covariance is recorded, of experts or heads first ... end if it has any."""

    of: str
    experts: tuple[int, int]


def covariances(
    graph: Graph, wanted: Iterable[Wanted], *, process_output: bool = False, plain: bool = True, weighted: bool = True
) -> Graph:
    """Return the graph with Covariance for the inputs ``wanted`` (by the first of their weights' names), all tokens.

    They may be those of latent attention's other form, too (with_latent).

    Args:
        plain: of experts, record what every token counts once; weighted: what it counts by its router weight squared.
    """
    graph = every_token(graph)
    chosen: dict[str, list[Wanted]] = {}
    for each in wanted:
        chosen.setdefault(each.of, []).append(each)
    found = inputs(graph, process_output=process_output)
    if others := {int(of.split(".")[1]) for of in chosen.keys() - {item.names[0] for item in found}}:
        graph, more = with_latent(graph, others)
        found += more
    weights = {op.ids: op.weights for op in graph.ops if isinstance(op, ops.Route)}
    # Inputs that are weighted (Llama 4) already include the weights.
    repeated = {op.weights for op in graph.ops if isinstance(op, ops.Repeat)}
    before: dict[int, list[Op]] = {}
    for item in found:
        routed = weights.get(item.ids) if item.ids is not None and weighted else None
        routed = None if routed in repeated else routed
        before.setdefault(id(_place(graph, item)), []).extend(
            _covariance(item, each, routed, plain) for each in chosen.get(item.names[0], ())
        )
    return replace(graph, ops=tuple(each for op in graph.ops for each in (*before.get(id(op), ()), op)))


def _covariance(item: Input, wanted: Wanted, routed: Value | None, plain: bool) -> ops.Covariance:
    return ops.Covariance(
        layer=item.at.layer,
        x=item.x,
        of=f"{wanted.of} {wanted.experts[0]}",
        names=item.names,
        ids=item.ids,
        weights=routed,
        experts=wanted.experts,
        plain=plain or routed is None,
        heads=item.heads,
    )
