"""Joins operations that look at each column or head by itself (cuda_trace.py) into one launch before their readers.

What is wanted are values that products, attention, recurrent layers or somebody outside read, and what goes into a
cache. Each is followed back to what others make; those that can be made at the same time, after all that they come
from and before the first that reads them, are one launch. Operations whose values nobody reads any more are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import lcm

from quantkit.kernels.cuda import parts
from quantkit.model.backends.cuda_trace import PIECEWISE, Columns, Part, trace
from quantkit.model.backends.cuda_uses import Uses
from quantkit.model.ops import Attention, Cache, CacheWrite, MulMatHeads, Norm, Op, Value


@dataclass(frozen=True)
class Goal:
    """A value and where it is wanted: as it is, in a format (rows of q_width), in a cache, as its keys or values."""

    value: Value
    plain: bool = False
    format: str = ""
    q_width: int = 0
    cache: Cache | None = None
    keys: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Parts(Op):
    """Parts of goals in one launch; cuts: the columns of a piece of each."""

    WRITES = ("outs",)

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    parts: tuple[tuple[Goal, Part], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMatHeadsInto(MulMatHeads):
    """out: one that is wider; of its columns from ``start`` on each head's, ``step`` apart."""

    start: int
    step: int


@dataclass
class _Wanted:
    """A goal, the operations between which it can be made (after ``ready``, before ``deadline``), and its parts."""

    goal: Goal
    parts: list[Part]
    ready: int
    deadline: int
    #: Products that write a part of it themselves, by their numbers.
    direct: dict[int, Part] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, bool]:
        return self.goal.value.per, self.goal.value.outputs


def with_parts(ops: Sequence[Op], leaves: Collection[Value], kv_type: str) -> list[Op]:
    """Return operations that give the same values, in fewer launches."""
    uses = Uses(ops, leaves)
    wanted = _settled(uses, [w for goal in _goals(uses) if (w := _wanted(uses, goal, kv_type)) is not None])
    while True:
        groups, left = _groups(wanted), {uses.ops[i] for i in _left(uses, wanted)}
        kept = [group for group in groups if _saves(group, left)]
        if len(kept) == len(groups):
            return _rewritten(uses, groups, kv_type)
        wanted = _settled(uses, [w for group in kept for w in group])


# ---------------------------------------------------------------- what is wanted


def _goals(uses: Uses) -> Iterator[Goal]:
    for op in uses.ops:
        if isinstance(op, CacheWrite):
            yield Goal(op.k, cache=op.cache)
            if op.v is not None:
                yield Goal(op.v, cache=op.cache, keys=False)
    for value in uses.made:
        if isinstance(uses.maker(value), PIECEWISE) and (value in uses.leaves or _readers(uses, value)):
            form, q_width, alone = uses.format(value)
            yield Goal(value, plain=not alone, format=form, q_width=q_width)


def _readers(uses: Uses, value: Value) -> list[int]:
    """Return who reads a value as it is, or in a format."""
    return [at for at in uses.read.get(value, []) if not isinstance(uses.ops[at], (*PIECEWISE, CacheWrite))]


def _wanted(uses: Uses, goal: Goal, kv_type: str) -> _Wanted | None:
    """Return how a goal can be reached; None: as it is."""
    found = trace(uses, goal.value)
    if goal.cache is None and (not found[0].of or _is_norm_of_rows(found[0])):
        return None
    if goal.format and (len(found) > 1 or cut(goal, found[0], kv_type) is None):
        goal = replace(goal, plain=True, format="")
    made = _Wanted(goal, found, -1, _deadline(uses, goal))
    for part in list(found):
        at = _direct(uses, goal, part)
        if at is not None:
            made.direct[at] = part
            found.remove(part)
    if not 0 < len(found) <= parts.MAX_PARTS or any(cut(goal, part, kv_type) is None for part in found):
        return None
    made.ready = max(uses.made.get(v, -1) for part in found for v in part.inputs())
    return made if made.ready < made.deadline else None


def _is_norm_of_rows(part: Part) -> bool:
    """Tell whether a part is what a stage does."""
    return [type(op) for op in part.of] == [Norm] and part.norm is not None and part.norm.group == part.to.width


def _deadline(uses: Uses, goal: Goal) -> int:
    """Return the number of the first operation that reads it."""
    if goal.cache is None:
        return min(_readers(uses, goal.value), default=len(uses.ops))
    at = [i for i, op in enumerate(uses.ops) if isinstance(op, CacheWrite | Attention) and op.cache is goal.cache]
    return at[0] if len(at) == 1 else at[1]


def _direct(uses: Uses, goal: Goal, part: Part) -> int | None:
    """Return the product by heads that can write a part to where it belongs, if there is one."""
    op = uses.maker(part.x)
    if not isinstance(op, MulMatHeads) or not goal.plain or goal.format or uses.only_reader(part.x) is None:
        return None
    whole = part.columns == Columns.run(0, op.out.width) and part.inputs() == (part.x,)
    return uses.made[part.x] if whole and part.to.each == op.weight.n_out else None


def cut(goal: Goal, part: Part, kv_type: str) -> int | None:
    """Return how many columns a piece of a part has; None: no kernel does it."""
    n = part.unit
    if goal.format and goal.q_width <= 256:
        n = goal.q_width if not goal.q_width % n else 0
    elif goal.format:
        n = lcm(n, 256)  # of a row's units; only a token's last one may be shorter
        n = n if goal.q_width == goal.value.width or not goal.q_width % n else 0
    elif n == 1:
        n = 256
    if goal.cache is not None and kv_type == "q8_0":
        if any(v % 32 for v in (part.to.start, part.to.each, part.to.step, part.to.width)):
            return None
        n = lcm(n, 32)
    return n if 0 < n <= parts.MAX_OF_BLOCK else None


def _settled(uses: Uses, wanted: list[_Wanted]) -> list[_Wanted]:
    """Return those goals that no operation needs which goes on to be there by itself, nor another part."""
    while True:
        left = _left(uses, wanted)
        needed = {v for i in left for v in uses.inputs[i]} | {v for w in wanted for p in w.parts for v in p.inputs()}
        caches = {op.cache for i in left if isinstance(op := uses.ops[i], CacheWrite)}
        kept = [w for w in wanted if w.goal.cache not in caches and (w.goal.cache or w.goal.value not in needed)]
        if len(kept) == len(wanted):
            return kept
        wanted = kept


def _left(uses: Uses, wanted: Sequence[_Wanted]) -> set[int]:
    """Return which operations that traces go through, or that write caches, have to be there all the same."""
    made = {w.goal.value for w in wanted if w.goal.cache is None}
    cached = {(w.goal.cache, w.goal.keys) for w in wanted}
    needed = {v for w in wanted for part in w.parts for v in part.inputs()} | (set(uses.leaves) - made)
    left: set[int] = set()
    for i in reversed(range(len(uses.ops))):
        op = uses.ops[i]
        if isinstance(op, CacheWrite):
            if (op.cache, True) in cached and (op.v is None or (op.cache, False) in cached):
                continue
            left.add(i)
        elif isinstance(op, PIECEWISE):
            if needed.isdisjoint(uses.outputs[i]):
                continue
            left.add(i)
        needed.update(v for v in uses.inputs[i] if v not in made)
    return left


# ---------------------------------------------------------------- launches


def _groups(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Return which goals are reached by one launch: it is just before the first that reads any of them."""
    groups, waiting = list[list[_Wanted]](), sorted(wanted, key=lambda w: w.deadline)
    while waiting:
        first, group = waiting[0], list[_Wanted]()
        for w in list(waiting):
            room = sum(len(member.parts) for member in group) + len(w.parts) <= parts.MAX_PARTS
            if w.rows == first.rows and w.ready < first.deadline and room:
                group.append(w)
                waiting.remove(w)
        groups.append(group)
    return groups


def _saves(group: list[_Wanted], left: set[Op]) -> bool:
    """Tell whether a group is worth its launch: what it stands for, and what would make a format, are at least two."""
    of = {op for w in group for part in w.parts for op in part.of} - left
    caches = {w.goal.cache for w in group} - {None}
    return len(of) + len(caches) + sum(bool(w.goal.format) for w in group) > 1


def _rewritten(uses: Uses, groups: list[list[_Wanted]], kv_type: str) -> list[Op]:
    wanted = [w for group in groups for w in group]
    left, before, direct = _left(uses, wanted), dict[int, list[Op]](), dict[int, Op]()
    for group in groups:
        at = min(w.deadline for w in group)
        before.setdefault(at, []).append(_launch(group, uses.ops[min(at, len(uses.ops) - 1)].layer, kv_type))
        for w in group:
            direct |= {i: _into(uses.ops[i], w.goal.value, part.to) for i, part in w.direct.items()}
    found = list[Op]()
    for i, op in enumerate(uses.ops):
        found += before.get(i, [])
        if i in left or not isinstance(op, (*PIECEWISE, CacheWrite)):
            found.append(direct.get(i, op))
    return [*found, *before.get(len(uses.ops), [])]


def _launch(group: Sequence[_Wanted], layer: int, kv_type: str) -> Parts:
    some = [(w.goal, part) for w in group for part in w.parts]
    return Parts(
        layer=layer,
        ins=tuple(dict.fromkeys(v for _, part in some for v in part.inputs())),
        outs=tuple(dict.fromkeys(goal.value for goal, _ in some if goal.cache is None)),
        parts=tuple(some),
        cuts=tuple(cut(goal, part, kv_type) or 0 for goal, part in some),
    )


def _into(op: Op, out: Value, to: Columns) -> MulMatHeadsInto:
    given = {f.name: getattr(op, f.name) for f in fields(op)}
    return MulMatHeadsInto(**{**given, "out": out, "start": to.start, "step": to.step})
