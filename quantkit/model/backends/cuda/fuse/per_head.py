"""Fusion of operations on columns or heads (column_trace.py) into one launch before their readers.

Targets are the values that products, attention, recurrent layers or other programs read, and the keys and values of
caches. Each is traced back to values of other operations; targets whose inputs are all computed before the first reader
of any of them share a launch. Operations whose values are no longer read are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from quantkit.kernels.cuda.layer import per_head
from quantkit.kernels.cuda.matmul.activations import OF_ROWS
from quantkit.model.backends.cuda.fuse.column_trace import PER_COLUMN, ColumnChain, Columns, trace_columns
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extend_op
from quantkit.model.check import CHECK, fit
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Attention, Cache, CacheWrite, LightningIndexer, Matrix, MulMatHeads, Norm, Op, Value


@dataclass(frozen=True)
class Target:
    """A value and its destination: memory (``plain``), an activation format (rows of q_width), a cache."""

    value: Value
    plain: bool = False
    format: str = ""
    q_width: int = 0
    cache: Cache | None = None
    keys: bool = True


class PerHead(Op):
    """Chains of columns in one launch, each to a target; piece_widths: columns of a block's piece of each."""

    WRITES = ("outs",)

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    chains: tuple[tuple[Target, ColumnChain], ...]
    piece_widths: tuple[int, ...]

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the weights of the fused operations."""
        return tuple(dict.fromkeys(m for _, chain in self.chains for op in chain.ops for m in op.matrices()))


@CHECK.register(PerHead)
def _check(op: PerHead, experts: dict[Value, int]) -> None:
    for (target, chain), n in zip(op.chains, op.piece_widths, strict=True):
        cache_width = 0
        if target.cache is not None:
            cache_width = target.cache.k_width if target.keys else target.cache.v_width
        limits = [target.value.width] * target.plain + [cache_width] * (cache_width > 0)
        valid = chain.columns.end <= chain.x.width and all(chain.out_columns.end <= width for width in limits)
        valid = valid and (chain.gate is None or chain.gate_columns.end <= chain.gate.width)
        fit(
            valid and 0 < n <= per_head.MAX_OF_BLOCK,
            op,
            None,
            f"{chain.columns} of {chain.x} become {chain.out_columns}",
        )


class MulMatHeadsStrided(MulMatHeads):
    """MulMatHeads that writes into a wider value: from column ``start``, heads ``step`` columns apart."""

    start: int
    step: int


@CHECK.register(MulMatHeadsStrided)
def _check_strided(op: MulMatHeadsStrided, experts: dict[Value, int]) -> None:
    w = op.weight
    valid = op.x.width == w.n_matrices * w.n_in and op.start + (w.n_matrices - 1) * op.step + w.n_out <= op.out.width
    fit(valid, op, w, f"where {op.x.width} values become {op.out.width}, by head")


@dataclass(eq=False)
class _Candidate:
    """A target, its chains, and the operations between which they can run (after ``ready``, before ``deadline``)."""

    target: Target
    chains: list[ColumnChain]
    ready: int
    deadline: int
    #: Chains that a product by head writes itself, by the index of the product.
    product_chains: dict[int, ColumnChain] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, bool]:
        return self.target.value.per, self.target.value.outputs


def fuse_per_head(ops: Sequence[Op], leaves: Collection[Value], kv_type: str, decisions: Decisions) -> list[Op]:
    """Return operations that compute the same values in fewer launches."""
    def_use = DefUse(ops, leaves)
    possible = [c for target in _targets(def_use) if (c := _candidate(def_use, target, kv_type, decisions)) is not None]
    candidates = _fusible(def_use, possible)
    for candidate in possible:
        if candidate not in candidates:
            decisions.decide("per_head", _layer(def_use, candidate), "other operations also read its results")
    while True:
        groups, left = _launch_groups(candidates), {def_use.ops[i] for i in _remaining_ops(def_use, candidates)}
        useful = [group for group in groups if _saves(group, left)]
        if len(useful) == len(groups):
            break
        candidates = _fusible(def_use, [c for group in useful for c in group])
    for group in groups:
        decisions.decide("per_head", _layer(def_use, group[0]))
    return _rewrite(def_use, groups, kv_type)


# ---------------------------------------------------------------- candidates


def _targets(def_use: DefUse) -> Iterator[Target]:
    for op in def_use.ops:
        if isinstance(op, CacheWrite):
            yield Target(op.k, cache=op.cache)
            if op.v is not None:
                yield Target(op.v, cache=op.cache, keys=False)
    for value in def_use.defined_at:
        if isinstance(def_use.definition(value), PER_COLUMN) and (value in def_use.leaves or _readers(def_use, value)):
            form, q_width, alone = def_use.format(value)
            yield Target(value, plain=not alone, format=form, q_width=q_width)


def _readers(def_use: DefUse, value: Value) -> list[int]:
    """Return the readers of a value in memory or in an activation format."""
    return [
        reader
        for reader in def_use.readers.get(value, [])
        if not isinstance(def_use.ops[reader], (*PER_COLUMN, CacheWrite))
    ]


def _candidate(def_use: DefUse, target: Target, kv_type: str, decisions: Decisions) -> _Candidate | None:
    """Return the candidate of a target; None if no launch can compute it, or none is needed."""
    chains = trace_columns(def_use, target.value)
    if target.cache is None and (not chains[0].ops or _is_norm_of_rows(chains[0])):
        return None
    parts = len(chains) > 1 or target.format in OF_ROWS
    if target.format and (parts or piece_width(target, chains[0], kv_type) is None):
        target = replace(target, plain=True, format="")
    candidate = _Candidate(target, chains, -1, _deadline(def_use, target))
    for chain in list(chains):
        product = _writing_product(def_use, target, chain)
        if product is not None:
            candidate.product_chains[product] = chain
            chains.remove(chain)
    candidate.ready = max((def_use.defined_at.get(v, -1) for chain in chains for v in chain.inputs()), default=-1)
    reason = ""
    if not 0 < len(chains) <= per_head.MAX_CHAINS:
        reason = f"{len(chains)} chains of columns, not 1 to {per_head.MAX_CHAINS}"
    elif any(piece_width(target, chain, kv_type) is None for chain in chains):
        reason = "no kernel supports its heads"
    elif candidate.ready >= candidate.deadline:
        reason = "it is read before its inputs are complete"
    if reason:
        decisions.decide("per_head", _layer(def_use, candidate), reason)
    return None if reason else candidate


def _layer(def_use: DefUse, candidate: _Candidate) -> int:
    return def_use.ops[min(candidate.deadline, len(def_use.ops) - 1)].layer


def _is_norm_of_rows(chain: ColumnChain) -> bool:
    """Return whether a chain is a norm of rows, which row epilogues fuse."""
    return (
        [type(op) for op in chain.ops] == [Norm]
        and chain.norm is not None
        and chain.norm.group == chain.out_columns.width
    )


def _deadline(def_use: DefUse, target: Target) -> int:
    """Return the index of the first reader of a target."""
    if target.cache is None:
        return min(_readers(def_use, target.value), default=len(def_use.ops))
    users = CacheWrite | Attention | LightningIndexer
    users_at = [i for i, op in enumerate(def_use.ops) if isinstance(op, users) and op.cache is target.cache]
    return users_at[0] if len(users_at) == 1 else users_at[1]


def _writing_product(def_use: DefUse, target: Target, chain: ColumnChain) -> int | None:
    """Return the product by head that can write a chain to its destination, or None."""
    op = def_use.definition(chain.x)
    if not isinstance(op, MulMatHeads) or not target.plain or target.format or def_use.sole_reader(chain.x) is None:
        return None
    is_whole = chain.columns == Columns.contiguous(0, op.out.width) and chain.inputs() == (chain.x,)
    return def_use.defined_at[chain.x] if is_whole and chain.out_columns.chunk == op.weight.n_out else None


def piece_width(target: Target, chain: ColumnChain, kv_type: str) -> int | None:
    """Return the columns of a piece of a chain; None if no kernel supports it."""
    n = chain.unit
    if target.format and target.q_width <= 256:
        n = target.q_width if not target.q_width % n else 0
    elif target.format:
        n = lcm(n, 256)  # of a row's units; only a token's last one may be shorter
        n = n if target.q_width == target.value.width or not target.q_width % n else 0
    elif n == 1:
        n = 256
    if target.cache is not None and kv_type == "q8_0":
        if any(
            v % 32
            for v in (
                chain.out_columns.start,
                chain.out_columns.chunk,
                chain.out_columns.stride,
                chain.out_columns.width,
            )
        ):
            return None
        n = lcm(n, 32)
    return n if 0 < n <= per_head.MAX_OF_BLOCK else None


def _fusible(def_use: DefUse, candidates: list[_Candidate]) -> list[_Candidate]:
    """Return the candidates whose intermediate values no remaining operation or chain reads."""
    while True:
        left = _remaining_ops(def_use, candidates)
        read_values = {v for i in left for v in def_use.inputs[i]} | {
            v for c in candidates for p in c.chains for v in p.inputs()
        }
        caches = {op.cache for i in left if isinstance(op := def_use.ops[i], CacheWrite)}
        fusible = [
            c
            for c in candidates
            if c.target.cache not in caches and (c.target.cache or c.target.value not in read_values)
        ]
        if len(fusible) == len(candidates):
            return fusible
        candidates = fusible


def _remaining_ops(def_use: DefUse, candidates: Sequence[_Candidate]) -> set[int]:
    """Return the traced operations and cache writes that remain."""
    fused_values = {c.target.value for c in candidates if c.target.cache is None}
    cached = {(c.target.cache, c.target.keys) for c in candidates}
    needed_values = {v for c in candidates for chain in c.chains for v in chain.inputs()} | (
        set(def_use.leaves) - fused_values
    )
    left: set[int] = set()
    for i in reversed(range(len(def_use.ops))):
        op = def_use.ops[i]
        if isinstance(op, CacheWrite):
            if (op.cache, True) in cached and (op.v is None or (op.cache, False) in cached):
                continue
            left.add(i)
        elif isinstance(op, PER_COLUMN):
            if needed_values.isdisjoint(def_use.outputs[i]):
                continue
            left.add(i)
        needed_values.update(v for v in def_use.inputs[i] if v not in fused_values)
    return left


# ---------------------------------------------------------------- launches


def _launch_groups(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Return the candidates of each launch, which is placed just before the first reader of any of them."""
    groups, waiting = list[list[_Candidate]](), sorted(candidates, key=lambda c: c.deadline)
    while waiting:
        first, group = waiting[0], list[_Candidate]()
        for c in list(waiting):
            has_space = sum(len(member.chains) for member in group) + len(c.chains) <= per_head.MAX_CHAINS
            if c.rows == first.rows and c.ready < first.deadline and has_space:
                group.append(c)
                waiting.remove(c)
        groups.append(group)
    return groups


def _saves(group: list[_Candidate], left: set[Op]) -> bool:
    """Return whether a group saves launches: it replaces at least two, conversions of formats included."""
    fused_ops = {op for c in group for chain in c.chains for op in chain.ops} - left
    caches = {c.target.cache for c in group} - {None}
    return len(fused_ops) + len(caches) + sum(bool(c.target.format) for c in group) > 1


def _rewrite(def_use: DefUse, groups: list[list[_Candidate]], kv_type: str) -> list[Op]:
    candidates = [c for group in groups for c in group]
    left = _remaining_ops(def_use, candidates)
    before: dict[int, list[Op]] = {}
    products: dict[int, Op] = {}
    for group in groups:
        first = min(group, key=lambda c: c.deadline)
        before.setdefault(first.deadline, []).append(_launch(group, _layer(def_use, first), kv_type))
        for c in group:
            for i, chain in c.product_chains.items():
                place = {"out": c.target.value, "start": chain.out_columns.start, "step": chain.out_columns.stride}
                products[i] = extend_op(def_use.ops[i], MulMatHeadsStrided, **place)
    result = list[Op]()
    for i, op in enumerate(def_use.ops):
        result += before.get(i, [])
        if i in left or not isinstance(op, (*PER_COLUMN, CacheWrite)):
            result.append(products.get(i, op))
    return [*result, *before.get(len(def_use.ops), [])]


def _launch(group: Sequence[_Candidate], layer: int, kv_type: str) -> PerHead:
    chains = [(c.target, chain) for c in group for chain in c.chains]
    return PerHead(
        layer=layer,
        ins=tuple(dict.fromkeys(v for _, chain in chains for v in chain.inputs())),
        outs=tuple(dict.fromkeys(target.value for target, _ in chains if target.cache is None)),
        chains=tuple(chains),
        piece_widths=tuple(piece_width(target, chain, kv_type) or 0 for target, chain in chains),
    )
