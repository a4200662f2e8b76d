"""Graphs with observing operations: statistics for importance matrices, covariances and similarities.

    every_token     computes all tokens in the last layer, too, not only those whose logits are requested
    fewest_rows     computes only outputs where nothing observes the other tokens
    observe         sums of squares of every weight's input; weights of one input share an accumulator
    similarity      cosines of input and output of every layer, its attention, its feed-forward part
    covariances     x x^T of requested inputs

Operations are only added, so the logits remain the same.

Latent attention (MLA) has two forms, and a file's weights may be quantized for either, so the inputs of attn_kv_b (the
latent row), attn_k_b (the queries' columns without rope, by head) and attn_v_b (each head's attention over latent rows)
are recorded whichever form the file has. In the expanded form, the last one is computed for the statistics alone, by a
second attention whose values are the latent rows; its cache takes n_head * kv_lora_rank values
a token and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quantkit.errors import RecipeError
from quantkit.model import ops
from quantkit.model.ops import Cache, Graph, Op, Value

#: Prefix of accumulators of --all-experts: every token through every expert.
ALL_EXPERTS = "all experts: "
#: Experts that --all-experts computes at a time.
_GROUP = 8
#: Operations that compute each row from one row: no positions, no other rows, no caches or states.
# fmt: off
BY_ROW = (
    ops.Activate, ops.Add, ops.Clamp, ops.Combine, ops.Glu, ops.Join, ops.MulMat, ops.MulMatHeads, ops.MulMatId,
    ops.MultiplyBy, ops.Norm, ops.Repeat, ops.Route, ops.Scale, ops.Shift, ops.Softcap, ops.Take,
    ops.Bonus, ops.Exceed, ops.Lerp, ops.Mix, ops.StreamWeights, ops.ToLength, ops.Xielu,
)
# fmt: on

#: A score vector, which llama.cpp applies like a norm's weight and sums (Kimi K3).
_SCORE = "_res_score.weight"
_KV_B = "attn_kv_b.weight"
_K_B = "attn_k_b.weight"
_V_B = "attn_v_b.weight"


@dataclass(frozen=True)
class Input:
    """A value that weights multiply: by expert if there are ids, by head if a row holds ``heads`` inputs.

    n_mat: the number of experts or heads, else 1. reader: the first operation that reads it.
    """

    x: Value
    ids: Value | None
    names: tuple[str, ...]
    n_mat: int
    reader: Op
    heads: int = 1

    @property
    def n(self) -> int:
        """The number of columns that one matrix multiplies."""
        return self.x.width // self.heads


# ---------------------------------------------------------------- all tokens


def every_token(graph: Graph) -> Graph:
    """Return the graph with SelectOutputs moved from the last layer to just before the output matrix, or to the end."""
    renamed: dict[Value, Value] = {}

    def of_all(value: Value) -> Value:
        if value not in renamed:
            renamed[value] = replace(value, outputs=False) if value.outputs else value
        return renamed[value]

    result: list[Op] = []
    last = _output(graph)
    for op in graph.ops:
        if isinstance(op, ops.SelectOutputs):
            renamed[op.out] = of_all(op.x)
        elif op is last:
            selected = Value(f"{last.x.name}_out", last.x.width, last.x.per, True)
            result += [ops.SelectOutputs(layer=op.layer, out=selected, x=of_all(last.x)), replace(last, x=selected)]
            # Everything after it reads logits, which have rows of outputs only.
            renamed[last.out] = last.out
        elif last is not None and last.out in renamed:
            result.append(op)
        else:
            result.append(map_values(op, of_all))
    logits = graph.logits
    if last is None:
        logits = replace(logits, name=f"{logits.name}_out", outputs=True)
        result.append(ops.SelectOutputs(layer=1 + _last_layer(graph), out=logits, x=of_all(graph.logits)))
    return replace(graph, ops=tuple(result), logits=logits)


def _output(graph: Graph) -> ops.MulMat | None:
    """Return the product that computes the logits; None for an encoder."""
    if graph.pooling is not None:
        return None
    return next(op for op in reversed(graph.ops) if isinstance(op, ops.MulMat))


def _selection(graph: Graph) -> ops.SelectOutputs | None:
    """Return the selection of the rows that the output matrix multiplies, or of an encoder's rows."""
    output = _output(graph)
    selected = graph.logits if output is None else output.x
    return next((op for op in graph.ops if isinstance(op, ops.SelectOutputs) and op.out is selected), None)


def _last_layer(graph: Graph) -> int:
    return max(op.layer for op in graph.ops for value in op.outputs() if value.name.endswith(".layer_out"))


def map_values(op: Op, new: Callable[[Value], Value]) -> Op:
    """Return an operation with its values replaced by new(value)."""
    fields_changed: dict[str, Any] = {}
    for f in fields(op):
        part = getattr(op, f.name)
        if isinstance(part, Value):
            fields_changed[f.name] = new(part)
        elif isinstance(part, tuple) and any(isinstance(item, Value) for item in part):
            fields_changed[f.name] = tuple(new(item) if isinstance(item, Value) else item for item in part)
    return replace(op, **fields_changed) if fields_changed else op


def fewest_rows(graph: Graph) -> Graph:
    """Return a graph of ``every_token`` that computes only rows of outputs where no operation observes the others.

    For example, the last layer's down projections compute only rows of outputs; their inputs have all tokens. Apply it
    after all observing operations.
    """
    all_rows = _all_row_values(graph)
    result: list[Op] = []
    selected: dict[Value, Value] = {}

    def of_outputs(value: Value, layer: int) -> Value:
        if value.outputs:
            return selected.get(value, value)
        if value not in selected:
            selected[value] = replace(value, name=f"{value.name}_out", outputs=True)
            result.append(ops.SelectOutputs(layer=layer, out=selected[value], x=value))
        return selected[value]

    for op in graph.ops:
        if isinstance(op, ops.SelectOutputs):
            selected[op.out] = of_outputs(op.x, op.layer)
        elif not isinstance(op, BY_ROW) or not all_rows.isdisjoint(op.outputs()):
            result.append(op)
        else:
            selected.update({v: v if v.outputs else replace(v, outputs=True) for v in op.outputs()})
            result.append(map_values(op, lambda v, op=op: of_outputs(v, op.layer)))  # type: ignore[misc]
    return replace(graph, ops=tuple(result), logits=selected.get(graph.logits, graph.logits))


def _all_row_values(graph: Graph) -> set[Value]:
    """Return the values needed for all tokens: observed, written to a cache or state, or inputs of such values."""
    values: set[Value] = set()
    for op in reversed(graph.ops):
        if isinstance(op, ops.SelectOutputs):
            continue
        if not isinstance(op, BY_ROW) or not values.isdisjoint(op.outputs()):
            values.update(op.inputs())
    return values


def up_to_layer(graph: Graph, last: int) -> Graph:
    """Return the graph without the layers after ``last``; its logits are no longer the model's."""
    end = 1 + _last_layer(graph)
    outs = {op.layer: value for op in graph.ops for value in op.outputs() if value.name.endswith(".layer_out")}
    final_out, cut_off = outs[max(outs)], outs[last]
    remaining = [op for op in graph.ops if op.layer <= last or op.layer >= end]
    return replace(graph, ops=tuple(map_values(op, lambda v: cut_off if v is final_out else v) for op in remaining))


# ---------------------------------------------------------------- inputs of weights


def inputs(graph: Graph, *, process_output: bool = False) -> list[Input]:
    """Return every value that a weight multiplies, in order, with the names of these weights.

    The output matrix's is omitted unless ``process_output``, as llama-imatrix does. RecipeError for a fused graph.
    """
    result: dict[tuple[Value, Value | None], Input] = {}
    output = _output(graph)
    selection = _selection(graph)
    unselected = None if selection is None else selection.x
    for op in graph.ops:
        if isinstance(op, ops.MulMats | ops.UpGate | ops.UpGateId):
            raise RecipeError("fused operations hide inputs of weights: add observers before fusing", "QK-E201")
        if not isinstance(op, ops.MulMat | ops.MulMatHeads | ops.MulMatId) or (op is output and not process_output):
            continue
        if op.weight.tensor.name.endswith(_SCORE):
            continue
        x = unselected if op is output and unselected is not None else op.x
        ids = op.ids if isinstance(op, ops.MulMatId) else None
        heads = op.weight.n_matrices if isinstance(op, ops.MulMatHeads) else 1
        n_mat = op.weight.n_matrices if ids is not None else heads
        previous = result.get((x, ids))
        names = (*(previous.names if previous else ()), op.weight.tensor.name)
        result[x, ids] = Input(x, ids, tuple(dict.fromkeys(names)), n_mat, previous.reader if previous else op, heads)
    return list(result.values())


def observe(graph: Graph, *, process_output: bool = False, all_experts: bool = False, latent: bool = True) -> Graph:
    """Return the graph with SumColumns before every multiplication by a weight, all tokens in every layer.

    Args:
        process_output: also before the output matrix.
        all_experts: also sum the inputs that every expert would have for every token, in separate accumulators.
        latent: also sum the inputs of the other form of latent attention.
    """
    graph = every_token(graph)
    observed = inputs(graph, process_output=process_output)
    if latent:
        graph, latent_inputs = with_latent(graph)
        observed += latent_inputs
    before: dict[int, list[Op]] = {}
    for item in observed:
        # The heads of a weight share one count, as in llama-imatrix.
        n_mat = 1 if item.ids is None else item.n_mat
        op = ops.SumColumns(
            layer=item.reader.layer, x=item.x, label=item.names[0], names=item.names, ids=item.ids, n_mat=n_mat
        )
        before.setdefault(id(_insertion_point(graph, item)), []).append(op)
    result = [new_op for op in graph.ops for new_op in (*before.get(id(op), ()), op)]
    if all_experts:
        result = list(_add_all_experts(result))
    return replace(graph, ops=tuple(result))


def _insertion_point(graph: Graph, item: Input) -> Op:
    """Return the operation to insert an observer before; for the output matrix, SelectOutputs."""
    return item.reader if item.reader is not _output(graph) else _selection(graph) or item.reader


def observe_hidden(graph: Graph) -> Graph:
    """Return the graph with Observe of the input of its output matrix, or of an encoder's rows, for all tokens.

    graph: a result of ``observe`` or ``every_token``.
    """
    selection = _selection(graph)
    assert selection is not None
    observation = ops.Observe(layer=selection.layer, x=selection.x, label=selection.x.name)
    return replace(
        graph, ops=tuple(new_op for op in graph.ops for new_op in ((observation, op) if op is selection else (op,)))
    )


# ---------------------------------------------------------------- latent attention


def with_latent(graph: Graph, layers: Collection[int] | None = None) -> tuple[Graph, list[Input]]:
    """Return the graph with the inputs of latent attention's other form, and these inputs.

    layers: only these layers; None: all.
    """
    result: list[Op] = []
    latent_inputs: list[Input] = []
    caches = list(graph.caches)
    latents = {op.layer: op.x for op in graph.ops if isinstance(op, ops.MulMat) and _KV_B in op.weight.tensor.name}
    keys: dict[int, ops.Join] = {}
    for op in graph.ops:
        included = layers is None or op.layer in layers
        if isinstance(op, ops.Join) and op.out.name.endswith((".k", ".k_latent")):
            keys[op.layer] = op
            if included and op.out.name.endswith(".k_latent"):
                latent_inputs.append(_latent_input(op, op.a, _KV_B, 1))
        if included and isinstance(op, ops.Attention) and op.layer in latents and op.layer in keys:
            new_ops, cache, new_inputs = _expand_latent(op, keys[op.layer], latents[op.layer])
            result += new_ops
            latent_inputs += new_inputs
            caches.append(cache)
        result.append(op)
    return replace(graph, ops=tuple(result), caches=tuple(caches)), latent_inputs


def _expand_latent(op: ops.Attention, keys: ops.Join, latent: Value) -> tuple[list[Op], Cache, list[Input]]:
    """Return operations that compute the inputs of k_b and v_b in the expanded form, their cache, and these inputs."""
    layer = op.layer
    n = op.n_head
    nope = keys.period_a
    rank = latent.width
    q_nope = Value(f"{layer}.q_nope_seen", n * nope)
    keys_and_latent = Value(f"{layer}.k_and_latent", n * (op.head_k + rank))
    rows = Value(f"{layer}.latent_by_head", n * rank)
    mixed = Value(f"{layer}.latent_attended", n * rank)
    cache = Cache(f"cache_{layer}_latent", n * op.head_k, n * rank)
    attention = replace(op, out=mixed, cache=cache, n_head_kv=n, head_v=rank)
    operations = [
        ops.Take(layer=layer, out=q_nope, x=op.q, start=0, period=op.head_k),
        ops.Join(layer=layer, out=keys_and_latent, a=keys.out, b=latent, period_a=op.head_k, period_b=rank),
        ops.Take(layer=layer, out=rows, x=keys_and_latent, start=op.head_k, period=op.head_k + rank),
        ops.CacheWrite(layer=layer, cache=cache, k=keys.out, v=rows),
        attention,
    ]
    return operations, cache, [_latent_input(op, q_nope, _K_B, n), _latent_input(op, mixed, _V_B, n)]


def _latent_input(reader: Op, x: Value, name: str, heads: int) -> Input:
    return Input(x, None, (f"blk.{reader.layer}.{name}",), heads, reader, heads)


# ---------------------------------------------------------------- all experts


def _add_all_experts(operations: Sequence[Op]) -> Iterator[Op]:
    """Add, after every layer's down projection, the inputs of all experts for every token, for the statistics only."""
    producers = {value: op for op in operations for value in op.outputs()}
    for op in operations:
        yield op
        if isinstance(op, ops.MulMatId) and isinstance(producers.get(op.x), ops.Glu | ops.Activate):
            route = producers.get(op.ids)
            if isinstance(route, ops.Route):
                yield from _down_of_all(op, route, producers)


def _down_of_all(down: ops.MulMatId, route: ops.Route, producers: Mapping[Value, Op]) -> Iterator[Op]:
    chain = _expert_chain(down.x, down.ids, producers)
    n_expert, name = down.weight.n_matrices, down.weight.tensor.name
    first = next(op for op in chain if isinstance(op, ops.MulMatId))
    names = tuple(op.weight.tensor.name for op in chain if isinstance(op, ops.MulMatId))
    repeat = producers.get(first.x)
    weighted = repeat if isinstance(repeat, ops.Repeat) else None
    if weighted is None:
        yield ops.SumColumns(layer=down.layer, x=first.x, label=ALL_EXPERTS + names[0], names=names)
        all_route = None
    else:
        all_route = _route_to_all(route, first)
        yield all_route
    expert_values = {value for op in chain for value in op.outputs()} | ({first.x} if weighted else set())
    for start in range(0, n_expert, _GROUP):
        new = _group_renaming(down.ids, expert_values, start, min(_GROUP, n_expert - start))
        if weighted is not None and all_route is not None:
            yield from _weighted_group(all_route, weighted, new(down.ids), new(first.x), start)
            yield _sum_of_all(down, new(first.x), new(down.ids), names)
        else:
            yield ops.CountUp(layer=down.layer, out=new(down.ids), like=first.x, first=start)
        for op in chain:
            yield map_values(op, new)
        yield _sum_of_all(down, new(down.x), new(down.ids), (name,))


def _sum_of_all(down: ops.MulMatId, x: Value, ids: Value, names: tuple[str, ...]) -> ops.SumColumns:
    n_mat = down.weight.n_matrices
    return ops.SumColumns(layer=down.layer, x=x, label=ALL_EXPERTS + names[0], names=names, ids=ids, n_mat=n_mat)


def _route_to_all(route: ops.Route, first: ops.MulMatId) -> ops.Route:
    """Return a Route with the weights of all experts, where they multiply inputs (Llama 4).

    Raises RecipeError if weights are normalized over the selected experts: others then have none.
    """
    r = route.routing
    if r.norm or r.gating == "softmax_weight":
        raise RecipeError(
            f"--all-experts: {first.weight.tensor.name} has inputs scaled by router weights, which only selected "
            "experts have; omit the option for this model"
        )
    ids, weights = (replace(v, name=f"{v.name}_all", width=r.n_expert) for v in (route.ids, route.weights))
    return replace(route, ids=ids, weights=weights, routing=replace(r, n_used=r.n_expert, n_group=1, n_group_used=1))


def _weighted_group(all_route: ops.Route, repeat: ops.Repeat, ids: Value, x: Value, start: int) -> list[Op]:
    """Return operations that compute inputs x of experts ids: each token's experts from rank ``start`` on."""
    n, layer = all_route.ids.width, repeat.layer
    weights = Value(f"{all_route.weights.name}_{start}", ids.width, 1, ids.outputs)
    return [
        ops.Take(layer=layer, out=ids, x=all_route.ids, start=start, period=n),
        ops.Take(layer=layer, out=weights, x=all_route.weights, start=start, period=n),
        ops.Repeat(layer=layer, out=x, x=repeat.x, weights=weights),
    ]


def _group_renaming(ids: Value, expert_values: Collection[Value], start: int, width: int) -> Callable[[Value], Value]:
    """Return a function that maps a layer's ids and ``expert_values`` to those of a group of experts."""
    renamed = {ids: Value(f"{ids.name}_{start}", width, 1, ids.outputs, True)}
    renamed |= {value: Value(f"{value.name}_{start}", value.width, width, value.outputs) for value in expert_values}
    return lambda value: renamed.get(value, value)


def _expert_chain(value: Value, ids: Value, producers: Mapping[Value, Op]) -> list[Op]:
    """Return the operations by expert that compute ``value``, in order."""
    op = producers.get(value)
    if isinstance(op, ops.MulMatId) and op.ids is ids:
        return [op]
    if not isinstance(op, ops.Glu | ops.Activate):
        return []
    chain: list[Op] = []
    for part in op.inputs():
        chain += _expert_chain(part, ids, producers)
    return [*chain, op]


# ---------------------------------------------------------------- layers


def similarity(graph: Graph) -> Graph:
    """Return the graph with a Similarity for every layer ("layer N"), its attention and its feed-forward part."""
    graph = every_token(graph)
    result: list[Op] = []
    x: Value | None = None  # the input of the current layer
    middle: Value | None = None
    active: Value | None = None  # the active one of several streams (Gemma 3n)
    attended: dict[int, Value] = {}
    for op in graph.ops:
        result.append(op)
        out = next(iter(op.outputs()), None)
        if out is None:
            continue
        kind = out.name.rpartition(".")[2]
        if x is None or kind == "embeddings":
            x = out
        elif kind == "attn_residual":
            middle = out
            result.append(ops.Similarity(layer=op.layer, a=active or x, b=middle, label=f"attention {op.layer}"))
        elif kind == "active":
            active = out
        elif kind == "stream_out" and middle is not None:
            result.append(ops.Similarity(layer=op.layer, a=middle, b=out, label=f"feed-forward {op.layer}"))
        elif kind == "ffn_residual":  # attention and feed-forward part are parallel
            result.append(ops.Similarity(layer=op.layer, a=x, b=out, label=f"feed-forward {op.layer}"))
        elif kind == "layer_out":
            if active is not None:
                active = None
            elif middle is not None:
                result.append(ops.Similarity(layer=op.layer, a=middle, b=out, label=f"feed-forward {op.layer}"))
            elif isinstance(op, ops.Add) and op.a is not x:  # otherwise the layer is one block
                attended[op.layer] = Value(f"{op.layer}.attn_residual", out.width)
                result.append(ops.Add(layer=op.layer, out=attended[op.layer], a=x, b=op.b))
                result.append(ops.Similarity(layer=op.layer, a=x, b=attended[op.layer], label=f"attention {op.layer}"))
            result.append(ops.Similarity(layer=op.layer, a=x, b=out, label=f"layer {op.layer}"))
            x, middle = out, None
    return replace(graph, ops=tuple(result))


# ---------------------------------------------------------------- covariances


@dataclass(frozen=True)
class CovarianceRequest:
    """A requested covariance: of the input of weight ``name``, of experts or heads first ... end if it has any."""

    name: str
    experts: tuple[int, int]


def covariances(
    graph: Graph,
    requests: Iterable[CovarianceRequest],
    *,
    process_output: bool = False,
    plain: bool = True,
    weighted: bool = True,
) -> Graph:
    """Return the graph with Covariance of the requested inputs, for all tokens.

    Inputs may also be those of latent attention's other form (with_latent).

    Args:
        requests: by the first name of an input's weights.
        plain: of experts, sum every token once; weighted: sum it times its squared router weight.
    """
    graph = every_token(graph)
    by_name: dict[str, list[CovarianceRequest]] = {}
    for request in requests:
        by_name.setdefault(request.name, []).append(request)
    observed = inputs(graph, process_output=process_output)
    if latent_layers := {int(name.split(".")[1]) for name in by_name.keys() - {item.names[0] for item in observed}}:
        graph, latent_inputs = with_latent(graph, latent_layers)
        observed += latent_inputs
    weights = {op.ids: op.weights for op in graph.ops if isinstance(op, ops.Route)}
    # The inputs of Llama 4's experts already include the router weights.
    repeated = {op.weights for op in graph.ops if isinstance(op, ops.Repeat)}
    before: dict[int, list[Op]] = {}
    for item in observed:
        routed = weights.get(item.ids) if item.ids is not None and weighted else None
        routed = None if routed in repeated else routed
        before.setdefault(id(_insertion_point(graph, item)), []).extend(
            _covariance(item, request, routed, plain) for request in by_name.get(item.names[0], ())
        )
    return replace(graph, ops=tuple(new_op for op in graph.ops for new_op in (*before.get(id(op), ()), op)))


def _covariance(item: Input, request: CovarianceRequest, routed: Value | None, plain: bool) -> ops.Covariance:
    return ops.Covariance(
        layer=item.reader.layer,
        x=item.x,
        label=f"{request.name} {request.experts[0]}",
        names=item.names,
        ids=item.ids,
        weights=routed,
        experts=request.experts,
        plain=plain or routed is None,
        heads=item.heads,
    )
