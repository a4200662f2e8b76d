"""Fuses operations on each column or head by itself (column_trace.py) into one launch before their readers.

Targets are the values that products, attention, recurrent layers or other programs read, and what goes into a cache.
Each is traced back to what other operations make; those that can be made at one time, after all of their inputs and
before their first reader, share a launch. Operations whose values nothing reads any more go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from quantkit.kernels.cuda.layer import per_head
from quantkit.kernels.cuda.matmul.activations import OF_ROWS
from quantkit.model.backends.cuda.fuse.column_trace import PER_COLUMN, ColumnChain, Columns, trace_columns
from quantkit.model.backends.cuda.fuse.def_use import DefUse, extended
from quantkit.model.check import CHECK, fit
from quantkit.model.fusion import Decisions
from quantkit.model.ops import Attention, Cache, CacheWrite, LightningIndexer, Matrix, MulMatHeads, Norm, Op, Value


@dataclass(frozen=True)
class Target:
    """A value and where it goes: memory (``plain``), a format (rows of q_width), a cache, as its keys or values."""

    value: Value
    plain: bool = False
    format: str = ""
    q_width: int = 0
    cache: Cache | None = None
    keys: bool = True


class PerHead(Op):
    """Chains of columns in one launch, each to a target; piece_widths: the columns of a piece of each."""

    WRITES = ("outs",)

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    chains: tuple[tuple[Target, ColumnChain], ...]
    piece_widths: tuple[int, ...]

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the weights of the operations it is fused from."""
        return tuple(dict.fromkeys(m for _, chain in self.chains for op in chain.of for m in op.matrices()))


@CHECK.of(PerHead)
def _check(op: PerHead, experts: dict[Value, int]) -> None:
    for (target, chain), n in zip(op.chains, op.piece_widths, strict=True):
        kept = 0 if target.cache is None else target.cache.k_width if target.keys else target.cache.v_width
        room = [target.value.width] * target.plain + [kept] * (kept > 0)
        right = chain.columns.end <= chain.x.width and all(chain.to.end <= width for width in room)
        right = right and (chain.gate is None or chain.gate_columns.end <= chain.gate.width)
        fit(right and 0 < n <= per_head.MAX_OF_BLOCK, op, None, f"{chain.columns} of {chain.x} become {chain.to}")


class MulMatHeadsInto(MulMatHeads):
    """Heads' results within a wider value: from column ``start``, ``step`` apart."""

    start: int
    step: int


@CHECK.of(MulMatHeadsInto)
def _check_into(op: MulMatHeadsInto, experts: dict[Value, int]) -> None:
    w = op.weight
    right = op.x.width == w.n_matrices * w.n_in and op.start + (w.n_matrices - 1) * op.step + w.n_out <= op.out.width
    fit(right, op, w, f"where {op.x.width} values become {op.out.width}, by head")


@dataclass(eq=False)
class _Candidate:
    """A target, the operations between which it can be made (after ``ready``, before ``deadline``), and its chains."""

    target: Target
    chains: list[ColumnChain]
    ready: int
    deadline: int
    #: Products that write a chain themselves, by their numbers.
    by_products: dict[int, ColumnChain] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, bool]:
        return self.target.value.per, self.target.value.outputs


def fuse_per_head(ops: Sequence[Op], leaves: Collection[Value], kv_type: str, decisions: Decisions) -> list[Op]:
    """Return operations that give the same values, in fewer launches."""
    def_use = DefUse(ops, leaves)
    possible = [c for target in _targets(def_use) if (c := _candidate(def_use, target, kv_type, decisions)) is not None]
    candidates = _settled(def_use, possible)
    for lost in possible:
        if lost not in candidates:
            decisions.decide("per_head", _layer(def_use, lost), "its operations run for other readers, too")
    while True:
        groups, left = _groups(candidates), {def_use.ops[i] for i in _left(def_use, candidates)}
        kept = [group for group in groups if _saves(group, left)]
        if len(kept) == len(groups):
            break
        candidates = _settled(def_use, [c for group in kept for c in group])
    for group in groups:
        decisions.decide("per_head", _layer(def_use, group[0]))
    return _rewritten(def_use, groups, kv_type)


# ---------------------------------------------------------------- candidates


def _targets(def_use: DefUse) -> Iterator[Target]:
    for op in def_use.ops:
        if isinstance(op, CacheWrite):
            yield Target(op.k, cache=op.cache)
            if op.v is not None:
                yield Target(op.v, cache=op.cache, keys=False)
    for value in def_use.made_at:
        if isinstance(def_use.definition(value), PER_COLUMN) and (value in def_use.leaves or _readers(def_use, value)):
            form, q_width, alone = def_use.format(value)
            yield Target(value, plain=not alone, format=form, q_width=q_width)


def _readers(def_use: DefUse, value: Value) -> list[int]:
    """Return the readers of a value in memory or in a format."""
    return [at for at in def_use.readers.get(value, []) if not isinstance(def_use.ops[at], (*PER_COLUMN, CacheWrite))]


def _candidate(def_use: DefUse, target: Target, kv_type: str, decisions: Decisions) -> _Candidate | None:
    """Return how a target can be made by a launch; None: not, or it needs none."""
    found = trace_columns(def_use, target.value)
    if target.cache is None and (not found[0].of or _is_norm_of_rows(found[0])):
        return None
    parts = len(found) > 1 or target.format in OF_ROWS
    if target.format and (parts or piece_width(target, found[0], kv_type) is None):
        target = replace(target, plain=True, format="")
    made = _Candidate(target, found, -1, _deadline(def_use, target))
    for chain in list(found):
        at = _writing_product(def_use, target, chain)
        if at is not None:
            made.by_products[at] = chain
            found.remove(chain)
    made.ready = max((def_use.made_at.get(v, -1) for chain in found for v in chain.inputs()), default=-1)
    reason = ""
    if not 0 < len(found) <= per_head.MAX_CHAINS:
        reason = f"{len(found)} chains of columns, not 1 to {per_head.MAX_CHAINS}"
    elif any(piece_width(target, chain, kv_type) is None for chain in found):
        reason = "no kernel takes its heads"
    elif made.ready >= made.deadline:
        reason = "it is read before all it comes from is there"
    if reason:
        decisions.decide("per_head", _layer(def_use, made), reason)
    return None if reason else made


def _layer(def_use: DefUse, candidate: _Candidate) -> int:
    return def_use.ops[min(candidate.deadline, len(def_use.ops) - 1)].layer


def _is_norm_of_rows(chain: ColumnChain) -> bool:
    """Tell whether a chain belongs into a row epilogue."""
    return [type(op) for op in chain.of] == [Norm] and chain.norm is not None and chain.norm.group == chain.to.width


def _deadline(def_use: DefUse, target: Target) -> int:
    """Return the number of the first operation that reads it."""
    if target.cache is None:
        return min(_readers(def_use, target.value), default=len(def_use.ops))
    users = CacheWrite | Attention | LightningIndexer
    at = [i for i, op in enumerate(def_use.ops) if isinstance(op, users) and op.cache is target.cache]
    return at[0] if len(at) == 1 else at[1]


def _writing_product(def_use: DefUse, target: Target, chain: ColumnChain) -> int | None:
    """Return the product by heads that can write a chain to its place, if there is one."""
    op = def_use.definition(chain.x)
    if not isinstance(op, MulMatHeads) or not target.plain or target.format or def_use.sole_reader(chain.x) is None:
        return None
    whole = chain.columns == Columns.run(0, op.out.width) and chain.inputs() == (chain.x,)
    return def_use.made_at[chain.x] if whole and chain.to.each == op.weight.n_out else None


def piece_width(target: Target, chain: ColumnChain, kv_type: str) -> int | None:
    """Return how many columns a piece of a chain has; None: no kernel does it."""
    n = chain.unit
    if target.format and target.q_width <= 256:
        n = target.q_width if not target.q_width % n else 0
    elif target.format:
        n = lcm(n, 256)  # of a row's units; only a token's last one may be shorter
        n = n if target.q_width == target.value.width or not target.q_width % n else 0
    elif n == 1:
        n = 256
    if target.cache is not None and kv_type == "q8_0":
        if any(v % 32 for v in (chain.to.start, chain.to.each, chain.to.step, chain.to.width)):
            return None
        n = lcm(n, 32)
    return n if 0 < n <= per_head.MAX_OF_BLOCK else None


def _settled(def_use: DefUse, candidates: list[_Candidate]) -> list[_Candidate]:
    """Return the candidates whose values no remaining operation or other chain reads."""
    while True:
        left = _left(def_use, candidates)
        needed = {v for i in left for v in def_use.inputs[i]} | {
            v for c in candidates for p in c.chains for v in p.inputs()
        }
        caches = {op.cache for i in left if isinstance(op := def_use.ops[i], CacheWrite)}
        kept = [
            c for c in candidates if c.target.cache not in caches and (c.target.cache or c.target.value not in needed)
        ]
        if len(kept) == len(candidates):
            return kept
        candidates = kept


def _left(def_use: DefUse, candidates: Sequence[_Candidate]) -> set[int]:
    """Return which operations that traces go through, or that write caches, remain."""
    made = {c.target.value for c in candidates if c.target.cache is None}
    cached = {(c.target.cache, c.target.keys) for c in candidates}
    needed = {v for c in candidates for chain in c.chains for v in chain.inputs()} | (set(def_use.leaves) - made)
    left: set[int] = set()
    for i in reversed(range(len(def_use.ops))):
        op = def_use.ops[i]
        if isinstance(op, CacheWrite):
            if (op.cache, True) in cached and (op.v is None or (op.cache, False) in cached):
                continue
            left.add(i)
        elif isinstance(op, PER_COLUMN):
            if needed.isdisjoint(def_use.outputs[i]):
                continue
            left.add(i)
        needed.update(v for v in def_use.inputs[i] if v not in made)
    return left


# ---------------------------------------------------------------- launches


def _groups(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Return the candidates of each launch: it goes just before the first reader of any of them."""
    groups, waiting = list[list[_Candidate]](), sorted(candidates, key=lambda c: c.deadline)
    while waiting:
        first, group = waiting[0], list[_Candidate]()
        for c in list(waiting):
            room = sum(len(member.chains) for member in group) + len(c.chains) <= per_head.MAX_CHAINS
            if c.rows == first.rows and c.ready < first.deadline and room:
                group.append(c)
                waiting.remove(c)
        groups.append(group)
    return groups


def _saves(group: list[_Candidate], left: set[Op]) -> bool:
    """Tell whether a group saves launches: it replaces two or more, those that make formats included."""
    of = {op for c in group for chain in c.chains for op in chain.of} - left
    caches = {c.target.cache for c in group} - {None}
    return len(of) + len(caches) + sum(bool(c.target.format) for c in group) > 1


def _rewritten(def_use: DefUse, groups: list[list[_Candidate]], kv_type: str) -> list[Op]:
    candidates = [c for group in groups for c in group]
    left, before, written = _left(def_use, candidates), dict[int, list[Op]](), dict[int, Op]()
    for group in groups:
        first = min(group, key=lambda c: c.deadline)
        before.setdefault(first.deadline, []).append(_launch(group, _layer(def_use, first), kv_type))
        for c in group:
            for i, chain in c.by_products.items():
                place = {"out": c.target.value, "start": chain.to.start, "step": chain.to.step}
                written[i] = extended(def_use.ops[i], MulMatHeadsInto, **place)
    found = list[Op]()
    for i, op in enumerate(def_use.ops):
        found += before.get(i, [])
        if i in left or not isinstance(op, (*PER_COLUMN, CacheWrite)):
            found.append(written.get(i, op))
    return [*found, *before.get(len(def_use.ops), [])]


def _launch(group: Sequence[_Candidate], layer: int, kv_type: str) -> PerHead:
    some = [(c.target, chain) for c in group for chain in c.chains]
    return PerHead(
        layer=layer,
        ins=tuple(dict.fromkeys(v for _, chain in some for v in chain.inputs())),
        outs=tuple(dict.fromkeys(target.value for target, _ in some if target.cache is None)),
        chains=tuple(some),
        piece_widths=tuple(piece_width(target, chain, kv_type) or 0 for target, chain in some),
    )
