"""Neighbours that the cuda backend carries out in one launch: operations of its own, found by who reads which value.

A launch costs about as much as reading 10 MB of weights, and a layer has two dozen operations:

    Stage    what lies between two products: experts summed, norm, sums, norm, and the format of the next weights
    Heads    norms of heads, rotary positions, keys and values into the cache
    MulMats  products of one x

Attention, whose parts a second launch puts together, leaves its result in the format of the next weights.

Nothing that somebody else reads is left out: a value that leaves the program, that an observer sees or that a second
operation takes is written as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import cast

from quantkit.kernels.activation_formats import activation_format
from quantkit.kernels.cuda import heads, stage
from quantkit.kernels.cuda.mat_vec_several import MAX_MATRICES, family
from quantkit.model.ops import (
    Add,
    Attention,
    Cache,
    CacheWrite,
    Combine,
    Matrix,
    MulMat,
    MulMatHeads,
    MulMatId,
    MulMats,
    Norm,
    Op,
    Rope,
    Scale,
    Take,
    UpGate,
    UpGateId,
    Value,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage(Op):
    """t = post of x (or of the sum of a token's experts); y = plus_too + by * (plus + t); z = norm of y.

    post and norm are operations whose values are these. What is read as float32 is in ``plain``; the last value (z, or
    y without a norm) is also made in the format that the products reading it take.
    """

    WRITES = ("y", "z")

    x: Value
    weights: Value | None = None
    n_used: int = 0
    post: Norm | None = None
    plus: Value | None = None
    by: float = 1.0
    plus_too: Value | None = None
    norm: Norm | None = None
    y: Value | None = None
    z: Value | None = None
    plain: frozenset[Value] = frozenset()
    format: str = ""

    @property
    def last(self) -> Value:
        """What the stage ends with."""
        return cast(Value, self.z or self.y)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionTo(Attention):
    """Attention whose result is also made in a format that products take."""

    format: str


@dataclass(frozen=True)
class Part:
    """Heads of q, k or v on their way from a product: where they are in its rows, and what happens to them."""

    x: Value
    start: int
    step: int
    norm: Norm | None = None
    when: int = heads.NEVER
    rope: Rope | None = None
    #: The operations that this stands for.
    of: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads(Op):
    """Parts q (or none), k and v; q is written for attention, k and v to the cache."""

    WRITES = ("q_out", "k_out")

    q: Part | None
    k: Part
    v: Part
    q_x: Value | None
    k_x: Value
    v_x: Value
    table: Value | None
    q_out: Value | None
    k_out: Value | None
    cache: Cache
    attention: Attention


def join(ops: Sequence[Op], leaves: Collection[Value], kv_type: str) -> list[Op]:
    """Return operations that give the same values; ``leaves`` are those that leave the program."""
    return _with_formats(_with_stages(_with_products(_with_heads(ops, leaves, kv_type)), leaves), leaves)


class _Uses:
    """Who makes and who reads each value: numbers of operations."""

    def __init__(self, ops: Sequence[Op], leaves: Collection[Value]) -> None:
        self.ops, self.leaves = ops, leaves
        self.made = {value: i for i, op in enumerate(ops) for value in op.outputs()}
        self.read: dict[Value, list[int]] = {}
        for i, op in enumerate(ops):
            for value in op.inputs():
                self.read.setdefault(value, []).append(i)

    def only_reader(self, value: Value) -> int | None:
        """Return who alone reads a value, once."""
        readers = self.read.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.leaves else None

    def maker(self, value: Value) -> Op | None:
        return self.ops[self.made[value]] if value in self.made else None


def _replaced(ops: Sequence[Op], new: dict[int, Op], gone: Iterable[int]) -> list[Op]:
    left_out = set(gone)
    return [new.get(i, op) for i, op in enumerate(ops) if i in new or i not in left_out]


# ---------------------------------------------------------------- heads


def _with_heads(ops: Sequence[Op], leaves: Collection[Value], kv_type: str) -> list[Op]:
    uses, new, gone = _Uses(ops, leaves), dict[int, Op](), set[int]()
    for i, op in enumerate(ops):
        if isinstance(op, CacheWrite):
            found = _heads(uses, i, op, kv_type)
            if found is not None:
                new[i] = found
                gone |= {at for part in (found.q, found.k, found.v) if part is not None for at in part.of}
    return _replaced(ops, new, gone)


def _heads(uses: _Uses, i: int, op: CacheWrite, kv_type: str) -> Heads | None:
    """Return what writes the cache, and all that goes before it, as one operation."""
    after = (other for other in uses.ops[i:] if isinstance(other, Attention) and other.cache is op.cache)
    attention = next(after, None)
    if attention is None or op.v is None or not _fits(attention, op, kv_type):
        return None

    def early(value: Value) -> bool:  # read before it would be made
        return min(uses.read[value]) < i

    k = Part(op.k, 0, attention.head_k) if early(op.k) else _part(uses, op.k, attention.head_k)
    v = _part(uses, op.v, attention.head_v, bare=True)
    q: Part | None = _part(uses, attention.q, attention.head_k)
    if q is not None and (not q.of or early(attention.q) or max(q.of) > i or not _alike(q, k)):
        q = None
    if not (k.of or v.of or q is not None):
        return None
    ropes = [part.rope for part in (q, k) if part is not None and part.rope is not None]
    others = op.k in uses.leaves or len(uses.read[op.k]) > 1
    return Heads(
        layer=op.layer,
        q=q,
        k=k,
        v=v,
        q_x=None if q is None else q.x,
        k_x=k.x,
        v_x=v.x,
        table=ropes[0].table if ropes else None,
        q_out=None if q is None else attention.q,
        k_out=op.k if k.of and others else None,
        cache=op.cache,
        attention=attention,
    )


def _fits(attention: Attention, op: CacheWrite, kv_type: str) -> bool:
    """Tell whether heads are what the kernel takes them for."""
    sizes = attention.head_k, attention.head_v
    widths = attention.n_head_kv * sizes[0], attention.n_head_kv * sizes[1]
    if (op.cache.k_width, op.cache.v_width) != widths or attention.q.width != attention.n_head * sizes[0]:
        return False
    return max(sizes) <= heads.MAX_HEAD and not (kv_type == "q8_0" and any(size % 32 for size in sizes))


def _part(uses: _Uses, value: Value, head: int, *, bare: bool = False) -> Part:
    """Follow heads back to where they come from, through operations whose results nobody else reads."""
    norm: Norm | None = None
    rope: Rope | None = None
    when, of, x = heads.NEVER, list[int](), value
    while x is value or uses.only_reader(x) is not None:
        op = uses.maker(x)
        if isinstance(op, Norm) and op.group == head and norm is None and not bare:
            norm, when = op, heads.AFTER if rope is None else heads.BEFORE
        elif isinstance(op, Rope) and op.head == head and rope is None and when != heads.BEFORE and not bare:
            rope = op
        elif isinstance(op, Take) and (not bare or uses.only_reader(x) is not None):
            each = op.out.width // (op.x.width // op.period)
            step = op.period if each == head else head if op.x.width == op.period else 0
            if not step:
                break
            return Part(op.x, op.start, step, norm, when, rope, (*of, uses.made[x]))
        else:
            break
        of.append(uses.made[x])
        x = op.x
    return Part(x, 0, head, norm, when, rope, tuple(of))


def _alike(a: Part, b: Part) -> bool:
    """Tell whether the norms and angles of two parts are of one kind."""
    if a.norm is not None and b.norm is not None and (a.norm.kind, a.norm.eps) != (b.norm.kind, b.norm.eps):
        return False
    if a.rope is None or b.rope is None:
        return True
    of = [(rope.table, rope.start, rope.config.kind, rope.config.n_rot) for rope in (a.rope, b.rope)]
    return of[0] == of[1]


# ---------------------------------------------------------------- products


def _with_products(ops: Sequence[Op]) -> list[Op]:
    """Bring products of one x with weights of types that go together to where the first of them is."""
    groups: dict[tuple[Value, str], list[int]] = {}
    for i, op in enumerate(ops):
        if isinstance(op, MulMat):
            groups.setdefault((op.x, family(op.weight.tensor.type)), []).append(i)
    new, gone = dict[int, Op](), set[int]()
    for group in groups.values():
        for first in range(0, len(group), MAX_MATRICES):
            some = group[first : first + MAX_MATRICES]
            if len(some) > 1:
                members = [cast(MulMat, ops[i]) for i in some]
                new[some[0]] = MulMats(
                    layer=members[0].layer,
                    outs=tuple(op.out for op in members),
                    x=members[0].x,
                    weights=tuple(op.weight for op in members),
                    biases=tuple(op.bias for op in members),
                    scales=tuple(op.scale for op in members),
                )
                gone |= set(some)
    return _replaced(ops, new, gone)


# ---------------------------------------------------------------- stages


def _with_stages(ops: Sequence[Op], leaves: Collection[Value]) -> list[Op]:
    uses, new, gone = _Uses(ops, leaves), dict[int, Op](), set[int]()
    for i in range(len(ops)):
        if i not in gone:
            found = _stage(uses, i, gone)
            if found is not None:
                anchor, made, of = found
                new[anchor] = made
                gone |= of
    return _replaced(ops, new, gone)


def _of_rows(op: Op | None) -> bool:
    """Tell whether an operation normalizes whole rows."""
    return isinstance(op, Norm) and op.group == op.x.width


class _Chain:
    """Operations one after the other, each the only reader of what the one before made."""

    def __init__(self, uses: _Uses, first: int, gone: Collection[int]) -> None:
        self._uses, self._gone, self.of = uses, gone, list[int]()
        self._at: int | None = first

    @property
    def op(self) -> Op | None:
        """The next one."""
        return None if self._at is None else self._uses.ops[self._at]

    def follower(self) -> Op | None:
        """Return the one after the next."""
        assert self.op is not None
        at = self._uses.only_reader(self.op.outputs()[0])
        return None if at is None or at in self._gone else self._uses.ops[at]

    def take(self) -> None:
        assert self.op is not None
        assert self._at is not None
        self.of.append(self._at)
        follower = self._uses.only_reader(self.op.outputs()[0])
        self._at = None if follower in self._gone else follower


def _stage(uses: _Uses, i: int, gone: Collection[int]) -> tuple[int, Stage, set[int]] | None:
    """Return the stage that begins with operation i: where it is to stand, itself, what it stands for."""
    first = uses.ops[i]
    if not isinstance(first, Combine | Norm | Add | Scale) or first.out.width > stage.MAX_WIDTH:
        return None
    chain = _Chain(uses, i, gone)
    x = first.b if isinstance(first, Add) else first.x
    weights, n_used, by = None, 0, 1.0
    post: Norm | None = None
    plus: Value | None = None
    plus_too: Value | None = None
    t = x
    if isinstance(op := chain.op, Combine):
        weights, n_used, t = op.weights, op.x.per // op.out.per, op.out
        chain.take()
    if isinstance(op := chain.op, Norm) and _of_rows(op) and isinstance(chain.follower(), Add | Scale):
        post, t = op, op.out
        chain.take()
    if isinstance(op := chain.op, Add) and isinstance(chain.follower(), Add | Scale):
        plus, t = op.b if op.a is t and op.b is not t else op.a, op.out
        chain.take()
    if isinstance(op := chain.op, Scale):
        by, t = op.factor, op.out
        chain.take()
    if isinstance(op := chain.op, Add):
        plus_too, t = op.b if op.a is t and op.b is not t else op.a, op.out
        chain.take()
    of, anchor = set(chain.of), chain.of[-1] if chain.of else i
    norm_at = (
        i if not of else next((at for at in uses.read.get(t, []) if at not in gone and _of_rows(uses.ops[at])), None)
    )
    norm = None if norm_at is None else cast(Norm, uses.ops[norm_at])
    if norm is not None and not _of_rows(norm):
        return None
    y, z = t if of else None, None if norm is None else norm.out
    last = cast(Value, z or y)
    form, alone = _format(uses, last)
    if norm is None and len(of) < 2 and not form:
        return None
    readers = uses.read.get(t, [])
    plain = set() if alone else {last}
    if y is not None and norm is not None and (y in uses.leaves or any(at != norm_at for at in readers)):
        plain.add(y)
    made = Stage(
        layer=uses.ops[anchor].layer,
        x=x,
        weights=weights,
        n_used=n_used,
        post=post,
        plus=plus,
        by=by,
        plus_too=plus_too,
        norm=norm,
        y=y,
        z=z,
        plain=frozenset(plain),
        format=form,
    )
    return anchor, made, of | ({norm_at} if norm_at is not None else set())


def _with_formats(ops: Sequence[Op], leaves: Collection[Value]) -> list[Op]:
    """Let attention make the format of the product after it."""
    uses, new = _Uses(ops, leaves), dict[int, Op]()
    for i, op in enumerate(ops):
        if isinstance(op, Attention):
            form, _ = _format(uses, op.out)
            if form.startswith("q8"):
                new[i] = AttentionTo(**{f.name: getattr(op, f.name) for f in fields(op)}, format=form)
    return _replaced(ops, new, ())


def _format(uses: _Uses, value: Value) -> tuple[str, bool]:
    """Return the format that products take a value in ("": none), and whether nobody reads the value itself."""
    kinds, others = list[str](), value in uses.leaves
    for at in uses.read.get(value, []):
        weights = _weights_of(uses.ops[at], value)
        kinds += [activation_format(w.tensor.type) for w in weights if w.n_in == value.width]
        others |= not weights or any(w.n_in != value.width for w in weights)
    made = [kind for kind in dict.fromkeys(kinds) if kind != "f32"]
    return (made[0] if made else ""), not others and bool(made) and set(kinds) == {made[0]}


def _weights_of(op: Op, x: Value) -> tuple[Matrix, ...]:
    """Return the weights that an operation multiplies x by, and does nothing else with it."""
    if isinstance(op, MulMats):
        return op.weights
    if isinstance(op, MulMat | MulMatHeads | MulMatId) and op.x is x:
        return (op.weight,)
    if isinstance(op, UpGate | UpGateId) and op.x is x:
        return (op.up,)
    return ()
