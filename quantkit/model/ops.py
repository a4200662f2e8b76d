"""The operations of a forward pass: what graph.py says and every backend understands.

A forward pass is a flat list of these. Values are float32 [rows, width], one row per token; after SelectOutputs one row
per token whose logits are wanted; rows of expert work are [tokens * n_used, width], the experts of a token side by
side. A value is written by exactly one operation. What each computes is written, in numpy, in backends/reference.py.

    weights      Matrix    a GGUF tensor, or some of its rows (a half of merged gate and up)
    activations  Value     width, rows per token
    memory       Cache     keys and values of one layer; State: what a recurrent layer remembers of a sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

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
    """Keys and values of one layer, one row per position; without v_width values are the first columns of keys."""

    name: str
    k_width: int
    v_width: int


@dataclass(frozen=True, eq=False)
class State:
    """What a recurrent layer keeps of a sequence: ``width`` float32; a token at position 0 finds it zero."""

    name: str
    width: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """An operation. ``layer`` is for placement and streaming: -1 before the first, n_layer after the last."""

    #: The fields whose values it writes; it reads all others.
    WRITES: ClassVar[tuple[str, ...]] = ("out",)

    layer: int = -1

    def outputs(self) -> tuple[Value, ...]:
        """Return the values it writes."""
        return tuple(part for name, part in self._parts() if name in self.WRITES and isinstance(part, Value))

    def inputs(self) -> tuple[Value, ...]:
        """Return the values it reads."""
        return tuple(part for name, part in self._parts() if name not in self.WRITES and isinstance(part, Value))

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the weights it reads, biases and scales included."""
        return tuple(part for _, part in self._parts() if isinstance(part, Matrix))

    def _parts(self) -> Iterator[tuple[str, object]]:
        for f in fields(self):
            part = getattr(self, f.name)
            for item in part if isinstance(part, tuple) else (part,):
                yield f.name, item


# ---------------------------------------------------------------- embeddings and element by element


@dataclass(frozen=True, eq=False, kw_only=True)
class Embed(Op):
    """out = scale * the rows of ``weight`` that the tokens name."""

    out: Value
    weight: Matrix
    scale: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectOutputs(Op):
    """out = the rows of x whose logits are wanted."""

    out: Value
    x: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Op):
    """out = a + b"""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class Scale(Op):
    """out = factor * x"""

    out: Value
    x: Value
    factor: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaleByPosition(Op):
    """out = x * (1 + alpha * log(1 + floor((position + offset) / floor_scale))): Llama 4, Mistral 3."""

    out: Value
    x: Value
    floor_scale: int
    alpha: float
    offset: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class MultiplyBy(Op):
    """out = x * vector (or x + vector): an f32 vector of x's width, or whose length divides it."""

    out: Value
    x: Value
    vector: Matrix
    add: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Softcap(Op):
    """out = cap * tanh(x / cap)"""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Clamp(Op):
    """out = x clamped to +- limit"""

    out: Value
    x: Value
    limit: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm(Op):
    """Normalize every group of columns by itself (a head, or the row); kind ``rms``, ``layer`` or ``l2``, which is
    x / sqrt(sum of squares + eps).

    weight and bias repeat if they are shorter than a row.
    """

    out: Value
    x: Value
    weight: Matrix | None
    bias: Matrix | None = None
    eps: float
    kind: str = "rms"
    group: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Glu(Op):
    """out = activation(gate) * up. Without up, gate's row holds both: the gate first. A narrower gate repeats:
    every element of it gates up.width / gate.width columns side by side."""

    out: Value
    gate: Value
    up: Value | None
    activation: Activation


@dataclass(frozen=True, eq=False, kw_only=True)
class Activate(Op):
    """out = activation(x)"""

    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True, eq=False, kw_only=True)
class Take(Op):
    """Of every ``period`` columns of x, those from ``start``; as many as make up out's width."""

    out: Value
    x: Value
    start: int
    period: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Join(Op):
    """Columns of a and b by turns, period_a of a, then period_b of b; a narrower b repeats from its beginning."""

    out: Value
    a: Value
    b: Value
    period_a: int
    period_b: int


# ---------------------------------------------------------------- matrices


@dataclass(frozen=True, eq=False, kw_only=True)
class _Product(Op):
    """What multiplying by a weight takes, dense or by expert."""

    out: Value
    x: Value
    weight: Matrix
    bias: Matrix | None = None
    scale: Matrix | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class _Gated(Op):
    """What fused gate, up and activation take, dense or by expert."""

    out: Value
    x: Value
    up: Matrix
    gate: Matrix
    up_bias: Matrix | None = None
    gate_bias: Matrix | None = None
    up_scale: Matrix | None = None
    gate_scale: Matrix | None = None
    activation: Activation


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMat(_Product):
    """out = scale * (weight x) + bias; scale is a tensor of one value (the ``.scale`` tensors)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMats(Op):
    """Several MulMats of one x in one pass: q, k and v."""

    WRITES: ClassVar[tuple[str, ...]] = ("outs",)

    outs: tuple[Value, ...]
    x: Value
    weights: tuple[Matrix, ...]
    biases: tuple[Matrix | None, ...]
    scales: tuple[Matrix | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMatHeads(Op):
    """Every head by its own matrix: columns h * n_in ... of x to columns h * n_out ... of out (MLA: k_b, v_b).

    weight: [n_in, n_out, heads]; of one head in two dimensions.
    """

    out: Value
    x: Value
    weight: Matrix


@dataclass(frozen=True, eq=False, kw_only=True)
class UpGate(_Gated):
    """out = activation(gate x) * (up x), fused: x is quantized once, gate and up never reach memory."""


# ---------------------------------------------------------------- experts


@dataclass(frozen=True, eq=False, kw_only=True)
class Route(Op):
    """Choose experts: ids int32 [tokens, n_used] and their weights [tokens, n_used], from the router's logits.

    bias, one value an expert, counts in the choice only.
    """

    WRITES: ClassVar[tuple[str, ...]] = ("ids", "weights")

    ids: Value
    weights: Value
    logits: Value
    bias: Matrix | None = None
    routing: Routing


@dataclass(frozen=True, eq=False, kw_only=True)
class MulMatId(_Product):
    """out row (t, j) = scale[e] * (weight[e] x) + bias[e], e = ids[t, j]; x has one row a token, or one per (t, j)."""

    ids: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class UpGateId(_Gated):
    """out row (t, j) = activation(gate[e] x) * (up[e] x), fused: experts looked up once, x quantized once.

    up and gate may be the halves of one merged tensor.
    """

    ids: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class Repeat(Op):
    """out row (t, j) = x row t * weights[t, j]: experts whose input is weighted (Llama 4)."""

    out: Value
    x: Value
    weights: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class Combine(Op):
    """out row t = sum over j of weights[t, j] * x row (t, j), in the order of j; without weights the plain sum."""

    out: Value
    x: Value
    weights: Value | None


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, eq=False, kw_only=True)
class RopeTable(Op):
    """out[t] = cos, sin, cos, sin, ... of n_rot / 2 angles at the token's position, attn_factor included."""

    out: Value
    config: RopeConfig
    factors: Matrix | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Rope(Op):
    """Turn columns start ... start + n_rot of every head (``head`` columns each) by the angles of the table."""

    out: Value
    x: Value
    table: Value
    config: RopeConfig
    head: int
    start: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheWrite(Op):
    """Keep the keys and values of these tokens, at their positions, in the cache's type."""

    WRITES: ClassVar[tuple[str, ...]] = ()

    cache: Cache
    k: Value
    v: Value | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Op):
    """Causal attention of q over the cache, as far as this token's sequence goes, its own position included.

    n_head heads of head_k columns; head h reads key-value head h // (n_head / n_head_kv); out has n_head * head_v
    columns. A cache without values (MLA): they are the first head_v columns of the keys. scale multiplies the
    products, softcap (0: none) follows; sinks, one value a head, join the softmax's denominator.
    mask: ``causal``; ``sliding``: the last ``window`` positions; ``chunked``: those of the same chunk of ``window``.
    alibi: the largest bias (0: none).
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


# ---------------------------------------------------------------- recurrent layers


@dataclass(frozen=True, eq=False, kw_only=True)
class Convolve(Op):
    """Causal convolution along the sequence, every column by itself: out[t] = sum over i of w[i] x[t - n + 1 + i].

    weight: [n, width], f32; the state holds the last n - 1 rows of the sequence.
    """

    out: Value
    x: Value
    weight: Matrix
    state: State


@dataclass(frozen=True, eq=False, kw_only=True)
class DeltaNet(Op):
    """Gated delta rule, token by token: S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T (q * scale).

    q, k: [n_k_head * head_k]; v, out: [n_v_head * head_v]; g, beta: [n_v_head]. S of a value head is
    [head_k, head_v]; value head h reads key head ``h % n_k_head`` if tiled, else h // (n_v_head / n_k_head).
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


# ---------------------------------------------------------------- looking on


@dataclass(frozen=True, eq=False, kw_only=True)
class Observe(Op):
    """Show x to the run's observer of that name (a tensor's name, for the input of its mat-mul), ids with it."""

    WRITES: ClassVar[tuple[str, ...]] = ()

    x: Value
    of: str
    ids: Value | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class SumColumns(Op):
    """Add up x^2 and x of every column, by expert if there are ids, into the accumulator ``of``, run after run.

    names: the weights whose input this is. x has one row a token, or one per (t, j), as in MulMatId.
    """

    WRITES: ClassVar[tuple[str, ...]] = ()

    x: Value
    of: str
    names: tuple[str, ...]
    ids: Value | None = None
    n_mat: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Covariance(Op):
    """Add up x x^T of all rows into the accumulator ``of``; by expert, of ``experts`` first ... end, if there are ids.

    weights, one value per (t, j): every row also counts with its square (``weighted``), or only so (not ``plain``).
    heads: as many inputs stand side by side in a row of x (MulMatHeads); ``experts`` then counts these.
    """

    WRITES: ClassVar[tuple[str, ...]] = ()

    x: Value
    of: str
    names: tuple[str, ...]
    ids: Value | None = None
    weights: Value | None = None
    experts: tuple[int, int] = (0, 1)
    plain: bool = True
    heads: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Similarity(Op):
    """Add up the cosine of a's and b's row of every token into the accumulator ``of``."""

    WRITES: ClassVar[tuple[str, ...]] = ()

    a: Value
    b: Value
    of: str


@dataclass(frozen=True, eq=False, kw_only=True)
class CountUp(Op):
    """out, integer: first, first + 1, ... in every row: every token goes through these experts (statistics only)."""

    out: Value
    like: Value
    first: int


@dataclass(frozen=True, eq=False)
class Graph:
    """A forward pass: operations in order, and the value that holds the logits.

    given: values of tokens that no operation makes; Session.decode takes them.
    """

    ops: tuple[Op, ...]
    logits: Value
    caches: tuple[Cache, ...] = ()
    states: tuple[State, ...] = ()
    given: tuple[Value, ...] = ()
