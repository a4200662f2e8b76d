"""The operations of a forward pass, and tables of functions by operation.

A forward pass is a flat list of operations. Values are float32 [rows, width], one row per token; after SelectOutputs
one row per token whose logits are requested; rows of expert work are [tokens * n_used, width], the experts of a token
side by side. A value is written by exactly one operation. backends/reference.py specifies them in numpy.

    weights      Matrix    a GGUF tensor, or some of its rows (a half of merged gate and up)
    activations  Value     width, rows per token
    memory       Cache     keys and values of one layer; State: the recurrent state of one layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import TensorInfo
from quantkit.kernels.parameters import Activation, RopeConfig, Routing

__all__ = ["Activation", "RopeConfig", "Routing"]


@dataclass(frozen=True, eq=False)
class Value:
    """An activation: float32 (integer: int32) [rows * per, width]; rows are tokens, or outputs."""

    name: str
    width: int
    per: int = 1
    outputs: bool = False
    integer: bool = False

    def __repr__(self) -> str:
        rows = ("outputs" if self.outputs else "tokens") + (f" * {self.per}" if self.per > 1 else "")
        return f"{self.name}[{rows}, {self.width}]"


@dataclass(frozen=True)
class Matrix:
    """A weight: ``rows`` of the tensor, counted within each expert; all of them if it is None.

    ggml order: shape[0] values a row (the input), shape[1] rows (the output), shape[2] experts or heads. Of a bias,
    whose shape is [n_out, experts], ``columns`` are the part that belongs to these rows.
    """

    tensor: TensorInfo
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def n_in(self) -> int:
        return self.tensor.shape[0]

    @property
    def n_out(self) -> int:
        if self.rows is not None:
            return self.rows[1] - self.rows[0]
        return self.tensor.shape[1] if len(self.tensor.shape) > 1 else 1

    @property
    def n_matrices(self) -> int:
        return self.tensor.shape[2] if len(self.tensor.shape) > 2 else 1

    @property
    def first_row(self) -> int:
        return 0 if self.rows is None else self.rows[0]

    def __repr__(self) -> str:
        return self.tensor.name if self.rows is None else f"{self.tensor.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values of one layer, one row per position; if v_width is 0, values are the first columns of keys.

    With a ratio, the rows of all sequences are followed by a row for every block of ``ratio`` positions; without
    ``positions`` there are only rows of blocks.
    """

    name: str
    k_width: int
    v_width: int
    ratio: int = 0
    positions: bool = True

    def cells(self, n_seq: int, n_ctx: int) -> int:
        """Return the number of rows."""
        return max(1, self.first_block(n_seq, n_ctx) + n_seq * self.blocks(n_ctx))

    def first_block(self, n_seq: int, n_ctx: int) -> int:
        """Return the index of the first row of a block."""
        return n_seq * n_ctx if self.positions else 0

    def blocks(self, n_ctx: int) -> int:
        """Return the largest number of blocks of a sequence."""
        return n_ctx // self.ratio if self.ratio else 0


@dataclass(frozen=True, eq=False)
class State:
    """The state of a recurrent layer: ``width`` float32 a sequence, zero before position 0."""

    name: str
    width: int


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
class _Frozen:
    """Base that makes every subclass a dataclass: frozen, keyword-only, compared by identity."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False, kw_only=True)(cls)


class Op(_Frozen):
    """An operation. ``layer`` determines placement and streaming: -1 before the first, n_layer after the last."""

    #: Fields of values that the operation writes; all other fields are read.
    WRITES: ClassVar[tuple[str, ...]] = ("out",)

    layer: int = -1

    def outputs(self) -> tuple[Value, ...]:
        """Return the values it writes."""
        return self._outputs

    def inputs(self) -> tuple[Value, ...]:
        """Return the values it reads."""
        return self._inputs

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the weights it reads, biases and scales included, and those of operations it is fused from."""
        return self._matrices

    @cached_property
    def _outputs(self) -> tuple[Value, ...]:
        return tuple(part for name, part in self._parts() if name in self.WRITES and isinstance(part, Value))

    @cached_property
    def _inputs(self) -> tuple[Value, ...]:
        return tuple(part for name, part in self._parts() if name not in self.WRITES and isinstance(part, Value))

    @cached_property
    def _matrices(self) -> tuple[Matrix, ...]:
        return tuple(
            matrix
            for _, part in self._parts()
            if isinstance(part, Matrix | Op)
            for matrix in ((part,) if isinstance(part, Matrix) else part.matrices())
        )

    def _parts(self) -> Iterator[tuple[str, object]]:
        for f in fields(self):
            part = getattr(self, f.name)
            for item in part if isinstance(part, tuple) else (part,):
                yield f.name, item


class Map(Op):
    """An operation with one input and one output."""

    out: Value
    x: Value


class _Sink(Op):
    """An operation that writes no value."""

    WRITES: ClassVar[tuple[str, ...]] = ()


# ---------------------------------------------------------------- embeddings and element by element


class Embed(Op):
    """out = scale * weight[token], or scale * weight[position] (by_position)."""

    out: Value
    weight: Matrix
    scale: float = 1.0
    by_position: bool = False


class Lookup(Op):
    """out, integer: table[token], of an I32 table whose values are below ``n``."""

    out: Value
    weight: Matrix
    n: int


class SelectOutputs(Map):
    """out = the rows of x whose logits are requested."""


class Add(Op):
    """out = a + b"""

    out: Value
    a: Value
    b: Value


class Scale(Map):
    """out = factor * x"""

    factor: float


class Shift(Map):
    """out = x + offset"""

    offset: float


class ScaleByPosition(Map):
    """out = x * (1 + alpha * log(1 + floor((position + offset) / floor_scale))): Llama 4, Mistral 3."""

    floor_scale: int
    alpha: float
    offset: float = 0.0


class MultiplyBy(Map):
    """out = x * vector, or x + vector, or x / vector: an f32 vector of x's width, or whose length divides it.

    kind: times, plus, over. repeat: each value of the vector applies to ``repeat`` neighbouring columns.
    """

    vector: Matrix
    kind: str = "times"
    repeat: int = 1


class Softcap(Map):
    """out = cap * tanh(x / cap)"""

    cap: float


class Clamp(Map):
    """out = x clamped to +- limit"""

    limit: float


class Xielu(Map):
    """out = alpha_p x^2 + beta x above 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x (Apertus)"""

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float


class Exceed(Map):
    """out = max(x - (mean + factor * deviation), 0), by row; sample standard deviation, over n - 1 (Gemma 3n)."""

    factor: float


class ToLength(Map):
    """out = x * |like| / |x|, by groups of ``group`` columns; |.|: root of the sum of squares."""

    like: Value
    group: int


class Mix(Map):
    """Groups of columns mixed by weights of the token: out group j = base group j + sum over i of
    (weights[j n + i] + offset) * x group i; x has n groups, base and out as many as weights has rows of n."""

    weights: Value
    base: Value
    n: int
    offset: float = 0.0


class StreamWeights(Op):
    """Weights of four streams in a layer's input and output, from x = [a (4), b (4), c (4 by 4)] (DeepSeek 4).

    before = sigmoid(scale[0] a + base) + eps; after = 2 sigmoid(scale[1] b + base); mixing, transposed:
    M = softmax by row(scale[2] c + base) + eps; columns are divided by their sum + eps; then ``rounds`` - 1 times rows
    and columns are divided by their sums + eps. base is a vector as long as x.
    """

    WRITES: ClassVar[tuple[str, ...]] = ("before", "after", "mixing")

    before: Value
    after: Value
    mixing: Value
    x: Value
    scale: Matrix
    base: Matrix
    eps: float
    rounds: int


class Lerp(Map):
    """out group j = x + (target - x) * (vector group j + weights group j).

    Groups are as wide as x; vector and weights are as wide as out. Either may be missing.
    """

    target: Value
    vector: Matrix | None = None
    weights: Value | None = None


class Bonus(Map):
    """out = x + v * sum(r * k * vector), the sum being over the columns of a head (RWKV).

    r, k, v, x and vector have the same columns, ``head`` to a head.
    """

    r: Value
    k: Value
    v: Value
    vector: Matrix
    head: int


class Norm(Map):
    """Normalize each group of columns (a head, or the row); kind: ``rms``, ``layer`` or ``l2``.

    l2 is x / sqrt(sum of squares + eps). weight and bias are repeated if they are shorter than a row.
    """

    weight: Matrix | None
    bias: Matrix | None = None
    eps: float
    kind: str = "rms"
    group: int


class Glu(Op):
    """out = activation(gate) * up. Without up, gate holds [gate, up]. Each element of a narrower gate gates
    up.width / gate.width neighbouring columns."""

    out: Value
    gate: Value
    up: Value | None
    activation: Activation


class Activate(Map):
    """out = activation(x)"""

    activation: Activation


class Take(Map):
    """out = columns ``start`` ... of every ``period`` columns of x, up to out's width."""

    start: int
    period: int


class Join(Op):
    """out = period_a columns of a, then period_b of b, alternating; a narrower b repeats from its start."""

    out: Value
    a: Value
    b: Value
    period_a: int
    period_b: int


# ---------------------------------------------------------------- matrices


class _Product(Map):
    """Product with a weight, dense or by expert."""

    weight: Matrix
    bias: Matrix | None = None
    scale: Matrix | None = None


class _Gated(Map):
    """Fused gate, up and activation, dense or by expert."""

    up: Matrix
    gate: Matrix
    up_bias: Matrix | None = None
    gate_bias: Matrix | None = None
    up_scale: Matrix | None = None
    gate_scale: Matrix | None = None
    activation: Activation


class MulMat(_Product):
    """out = scale * (weight x) + bias; scale is a tensor of one value (the ``.scale`` tensors)."""


class MulMats(Op):
    """Several MulMats of one x in one pass: q, k and v."""

    WRITES: ClassVar[tuple[str, ...]] = ("outs",)

    outs: tuple[Value, ...]
    x: Value
    weights: tuple[Matrix, ...]
    biases: tuple[Matrix | None, ...]
    scales: tuple[Matrix | None, ...]


class MulMatHeads(Map):
    """Multiply each head by its own matrix: columns h * n_in ... of x to columns h * n_out ... of out (MLA: k_b, v_b).

    weight: [n_in, n_out, heads]; of one head in two dimensions.
    """

    weight: Matrix


class UpGate(_Gated):
    """out = activation(gate x) * (up x), fused: x is quantized once, gate and up never reach memory."""


# ---------------------------------------------------------------- experts


class Route(Op):
    """Select experts: ids int32 [tokens, n_used] and their weights [tokens, n_used], from the router's logits.

    bias, one value per expert, affects only the selection. selected: given ids; only their weights are computed.
    """

    WRITES: ClassVar[tuple[str, ...]] = ("ids", "weights")

    ids: Value
    weights: Value
    logits: Value
    bias: Matrix | None = None
    selected: Value | None = None
    routing: Routing


class MulMatId(_Product):
    """out row (t, j) = scale[e] * (weight[e] x) + bias[e], e = ids[t, j]; x has one row a token, or one per (t, j)."""

    ids: Value


class UpGateId(_Gated):
    """out row (t, j) = activation(gate[e] x) * (up[e] x), fused: experts looked up once, x quantized once.

    up and gate may be the halves of one merged tensor.
    """

    ids: Value


class Repeat(Map):
    """out row (t, j) = x row t * weights[t, j]: experts whose input is weighted (Llama 4).

    The rows of a token may be one row of out: hyper-connections (HY V4).
    """

    weights: Value


class Combine(Map):
    """out row t = sum over j of weights[t, j] * x row (t, j), in the order of j; without weights the plain sum.

    The rows of a token may be one row of x.
    """

    weights: Value | None


# ---------------------------------------------------------------- attention


class RopeTable(Op):
    """out[t] = cos, sin, cos, sin, ... of n_rot / 2 angles at the token's position, attn_factor included.

    step: of the first position of the token's block of ``step`` positions. inverse: of the negated angles.
    """

    out: Value
    config: RopeConfig
    factors: Matrix | None = None
    step: int = 1
    inverse: bool = False


class Rope(Map):
    """Rotate columns start ... start + n_rot of every head (``head`` columns each) by the angles of the table."""

    table: Value
    config: RopeConfig
    head: int
    start: int = 0


class CacheWrite(_Sink):
    """Write the keys and values of the tokens to the cache, at their positions, in its type."""

    cache: Cache
    k: Value
    v: Value | None


class BlockWrite(_Sink):
    """Write k of the tokens that end a block of ``ratio`` positions to the row of that block."""

    cache: Cache
    k: Value


class WindowAndBlocks(Op):
    """out, int32: the cells of a cache that a token attends to, relative to its sequence's first: the last ``window``
    positions, then the blocks that end with it or before, all or those listed in ``blocks``; then -1.

    out.width - window blocks fit.
    """

    out: Value
    cache: Cache
    window: int
    blocks: Value | None = None


class LightningIndexer(Op):
    """out, int32 [tokens, top_k]: the positions with the largest scores, ascending; then -1 if there are fewer.

    The score of a position of this token's sequence, its own and those before, with q and weights of its row:
    sum over heads of scale * weights[h] * max(q[h] . key, 0); n_head heads share keys of ``head`` columns. Of equal
    scores the lower position comes first. A cache of blocks: their numbers, of those that end with the token or before.
    """

    out: Value
    q: Value
    weights: Value
    cache: Cache
    n_head: int
    head: int
    scale: float


class Attention(Op):
    """Causal attention of q over the cache, as far as this token's sequence goes, its own position included.

    The cache may be that of an earlier layer (Gemma 4).

    n_head heads of head_k columns; head h reads key-value head h // (n_head / n_head_kv); out has n_head * head_v
    columns. A cache without values (MLA): they are the first head_v columns of the keys. scale multiplies the
    products, softcap (0: none) follows; sinks, one value a head, join the softmax's denominator.
    mask: ``causal``; ``sliding``: the last ``window`` positions; ``chunked``: those of the same chunk of ``window``;
    ``whole``: the tokens after it in the batch, too, so that a sequence must come in one batch; ``symmetric``: of
    these, those up to window / 2 positions away.
    alibi: the largest bias (0: none). buckets: biases by distance, [n_head, n_buckets] in ggml's order (T5, see
    backends/distance_bias.py). selected: the positions that a token attends to, from LightningIndexer; where the
    cache has blocks, the cells from WindowAndBlocks, of the same window.
    """

    out: Value
    q: Value
    cache: Cache
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    scale: float
    softcap: float = 0.0
    sinks: Matrix | None = None
    mask: str = "causal"
    window: int = 0
    alibi: float = 0.0
    buckets: Matrix | None = None
    selected: Value | None = None


# ---------------------------------------------------------------- recurrent layers


class Convolve(Map):
    """Causal convolution along the sequence, column by column: out[t] = sum over i of w[i] x[t - n + 1 + i] + bias.

    weight: [n, width], f32; the state holds the last n - 1 rows of the sequence.
    """

    weight: Matrix
    bias: Matrix | None = None
    state: State


class Compress(Op):
    """One row for every block of ``ratio`` positions: out = sum over its tokens i of w_i kv_i, column by column, w the
    softmax of score_i + ape[i]; rows of tokens that do not end a block are 0.

    overlap: kv, score and ape have two halves of out's width; a block is made of its tokens' second halves and of the
    first halves of those of the block before. ape: [width of kv, ratio]. The state holds largest score, sum of weights
    and sum of values of the second halves so far; of the first halves; and of those of the block before.
    """

    out: Value
    kv: Value
    score: Value
    ape: Matrix
    state: State
    ratio: int

    @property
    def overlap(self) -> bool:
        """Whether a block also combines rows of the block before."""
        return self.kv.width > self.out.width


class DeltaNet(Op):
    """Gated delta rule, token by token: S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T (q * scale).

    q, k: [n_k_head * head_k]; v, out: [n_v_head * head_v]; beta: [n_v_head]; g: [n_v_head], or [n_v_head * head_k]: a
    decay for every row of S (Kimi's delta attention). S of a value head is [head_k, head_v]; value head h reads key
    head ``h % n_k_head`` if tiled, else h // (n_v_head / n_k_head).
    """

    out: Value
    q: Value
    k: Value
    v: Value
    g: Value
    beta: Value
    state: State
    n_k_head: int
    n_v_head: int
    scale: float
    tiled: bool = False

    @property
    def by_row(self) -> bool:
        """Whether every row of S has its own decay."""
        return self.g.width > self.n_v_head


class SsmScan(Op):
    """Mamba 2's selective scan, token by token, with dt = softplus(dt + dt_bias) of each head:
    S = exp(a dt) S; S += b (dt x)^T; out = (S^T c + d x) silu(z).

    x, z, out: [n_head * head]; b, c: [n_group * d_state]; dt: [n_head]; a, d, dt_bias: a value a head. S of a head is
    [d_state, head]; head h reads b and c of group h // (n_head / n_group).

    Without dt every step is 1, without d and z there is no skip and no gate: lightning attention, x being values, b
    keys and c queries; its a is given as numbers.
    """

    out: Value
    x: Value
    z: Value | None = None
    dt: Value | None = None
    b: Value
    c: Value
    dt_bias: Matrix | None = None
    a: Matrix | tuple[float, ...]
    d: Matrix | None = None
    state: State
    n_head: int
    n_group: int


class ColumnScan(Op):
    """Mamba's selective scan, token by token, each column independently, with dt = softplus(dt):
    S = exp(a dt) S; S += b (dt x); out = (S^T c + d x) silu(z).

    x, z, dt, out: [width]; b, c: [d_state], the same for all columns; a: [d_state, width], ggml's order; d: a value a
    column. S of a column is [d_state]; the state has row by row of all columns, [d_state, width].
    """

    out: Value
    x: Value
    z: Value
    dt: Value
    b: Value
    c: Value
    a: Matrix
    d: Matrix
    state: State


class Previous(Map):
    """out = x of the sequence's previous token, zeros for the first; the state holds the last row."""

    state: State


class Wkv(Op):
    """RWKV's recurrence, token by token, of every head: S = diag(w) S + k v^T; out = scale S^T r.

    r, g, out: [n_head * head]; k, v: [n * head], head h reading those of h // (n_head / n). w = exp(-exp(g)); with a
    bound w = exp(-bound sigmoid(g)). S is [head, head].

    earlier: out reads S before its update (RWKV 6). complement: k is replaced by k (1 - w) (QRWKV).
    removed, rate: [n_head * head]: S = diag(w) S + k v^T - (rate * removed) (S^T removed)^T, where S^T removed is of S
    before it decays (RWKV 7).
    """

    out: Value
    r: Value
    g: Value
    k: Value
    v: Value
    removed: Value | None = None
    rate: Value | None = None
    state: State
    n_head: int
    scale: float = 1.0
    bound: float = 0.0
    earlier: bool = False
    complement: bool = False


# ---------------------------------------------------------------- observers


class _Observer(_Sink):
    """An operation that observes x: ``label`` names its observer or accumulator, ``ids`` the experts of rows."""

    x: Value
    label: str
    ids: Value | None = None


class Observe(_Observer):
    """Pass x and ids to the run's observer; label: the name of the tensor that multiplies x."""


class SumColumns(_Observer):
    """Add up x^2 and x of every column, by expert if there are ids, into the accumulator ``label``, run after run.

    names: the weights whose input this is. x has one row a token, or one per (t, j), as in MulMatId.
    """

    names: tuple[str, ...]
    n_mat: int = 1


class Covariance(_Observer):
    """Add up x x^T of all rows into the accumulator ``label``; with ids by expert, of ``experts`` first ... end.

    weights, one value per (t, j): rows are also summed with their squared weight, or only so (not ``plain``).
    heads: the number of inputs side by side in a row of x (MulMatHeads); ``experts`` are then heads.
    """

    names: tuple[str, ...]
    weights: Value | None = None
    experts: tuple[int, int] = (0, 1)
    plain: bool = True
    heads: int = 1


class Similarity(_Sink):
    """Add up the cosine of a's and b's row of every token into the accumulator ``label``."""

    a: Value
    b: Value
    label: str


class CountUp(Op):
    """out, integer: first, first + 1, ... in every row: every token goes through these experts (statistics only)."""

    out: Value
    like: Value
    first: int


class Pooling(NamedTuple):
    """Pooling of a text's rows into one embedding: ``mean``, ``cls``, ``last``; ``rank``: a classifier's score.

    row: the pooling before the classifier. stated: whether the file or the caller names it.
    """

    kind: str
    row: str
    stated: bool


@dataclass(frozen=True, eq=False)
class Graph:
    """A forward pass, or a part of one: operations in order, and the value that holds the logits.

    Of an encoder, which has a pooling, ``logits`` are the rows that are pooled; ``head``, if there is one, computes on
    pooled rows, its input. inputs: values of tokens that no operation computes; Session.decode takes them. leaves:
    values that are read after a run, besides the logits.
    """

    ops: tuple[Op, ...]
    logits: Value
    caches: tuple[Cache, ...] = ()
    states: tuple[State, ...] = ()
    inputs: tuple[Value, ...] = ()
    leaves: tuple[Value, ...] = ()
    pooling: Pooling | None = None
    head: Graph | None = None

    def cache_writes(self) -> Mapping[Cache, Sequence[Op]]:
        """Return the operations that write to each cache."""
        writes: dict[Cache, list[Op]] = {}
        for op in self.ops:
            if isinstance(op, CacheWrite | BlockWrite):
                writes.setdefault(op.cache, []).append(op)
        return writes


# ---------------------------------------------------------------- tables by operation


F = TypeVar("F", bound=Callable[..., Any])


class OpTable(dict[type[Op], Callable[..., Any]]):
    """Functions by the class of an operation; TypeNotSupported for a class without one. owner: its name in errors."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner

    def register(self, *kinds: type[Op]) -> Callable[[F], F]:
        """Return a decorator that registers a function for some classes."""

        def enter(function: F) -> F:
            self.update(dict.fromkeys(kinds, function))
            return function

        return enter

    def __missing__(self, kind: type[Op]) -> Callable[..., Any]:
        raise TypeNotSupported(f"{self.owner} has no {kind.__name__}", "QK-E306")
