"""The backend cpu against the numpy reference, operation by operation; lifetimes of values; segments; observers."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
from refusals import refuses

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.kernels import quantize
from quantkit.model.backends import Limits
from quantkit.model.backends.arena import Buffer, Entry, place
from quantkit.model.backends.cpu.backend import CPUBackend
from quantkit.model.backends.reference import Reference
from quantkit.model.batch import Batch
from quantkit.model.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    Bonus,
    Cache,
    CacheWrite,
    Clamp,
    ColumnScan,
    Combine,
    Convolve,
    DeltaNet,
    Embed,
    Glu,
    Join,
    Lerp,
    Matrix,
    MulMat,
    MulMatHeads,
    MulMatId,
    MulMats,
    MultiplyBy,
    Norm,
    Observe,
    Op,
    Previous,
    Repeat,
    Rope,
    RopeConfig,
    RopeTable,
    Route,
    Routing,
    Scale,
    ScaleByPosition,
    SelectOutputs,
    Softcap,
    SsmScan,
    State,
    Take,
    UpGate,
    UpGateId,
    Value,
    Wkv,
)
from quantkit.types import type_by_name

N_EMBD, N_VOCAB, N_CTX, N_SEQ = 96, 50, 40, 3
f32 = np.float32
X = Value("x", N_EMBD)


def batch_of(tokens, positions, sequences, outputs):
    return Batch(*(np.asarray(a, np.int32) for a in (tokens, positions, sequences, outputs)))


#: A prompt, a mixture of sequences, one token, no output.
BATCHES = [
    batch_of(np.arange(17) % N_VOCAB, np.arange(17), [0] * 17, [16]),
    batch_of([1, 2, 3, 4, 5], [0, 17, 1, 18, 2], [2, 0, 2, 0, 2], [1, 3, 4]),
    batch_of([49], [19], [0], [0]),
    batch_of([7, 8, 9], [3, 4, 5], [2, 2, 2], []),
]


@dataclass
class Tensors:
    """Tensors to be written to a file, drawn as they are named."""

    by_name: dict = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))

    def add(self, name, *shape, kind="F32", mean=0.0):
        values = self.rng.normal(mean, 1 if len(shape) == 1 else shape[0] ** -0.5, shape[::-1]).astype(f32)
        t = type_by_name(kind)
        data = quantize(values.reshape(-1, shape[0]), t, None) if kind != "F32" else values
        self.by_name[name] = (name, shape, t, data.tobytes())
        return name

    def open(self, path):
        write_gguf(path, [], self.by_name.values())
        return open_gguf(path)


def embedded(*ops):
    """Operations whose x is the tokens' embeddings."""
    return [lambda m: Embed(out=X, weight=m("embd"), scale=1.5), *ops]


def out(width, per=1, **options):
    return Value("out", width, per, **options)


def simple(make, width=N_EMBD, **fields):
    """One operation on x."""
    return embedded(lambda m: make(out=out(width), x=X, **{k: f(m) if callable(f) else f for k, f in fields.items()}))


def rope(config, head, start=0):
    table = Value("table", config.n_rot)
    return embedded(
        lambda m: RopeTable(out=table, config=config, factors=m("factors")),
        lambda m: Rope(out=out(N_EMBD), x=X, table=table, config=config, head=head, start=start),
    )


def attention(**options):
    q, k, v = Value("q", 8 * 16), Value("k", 2 * 16), Value("v", 2 * 16)
    cache = Cache("cache", k.width, v.width)
    heads = {"n_head": 8, "n_head_kv": 2, "head_k": 16, "head_v": 16, "scale": 0.25}
    return embedded(
        lambda m: MulMats(
            outs=(q, k, v), x=X, weights=(m("q"), m("k"), m("v")), biases=(None, m("k.bias"), None), scales=(None,) * 3
        ),
        lambda m: CacheWrite(cache=cache, k=k, v=v),
        lambda m: Attention(
            out=out(128), q=q, cache=cache, **heads, **{k: f(m) if callable(f) else f for k, f in options.items()}
        ),
    )


def experts():
    logits, ids, weights = Value("logits", 6), Value("ids", 2, integer=True), Value("weights", 2)
    repeated = Value("repeated", N_EMBD, 2)
    routing = Routing(n_expert=6, n_used=2, norm=True)
    return embedded(
        lambda m: MulMat(out=logits, x=X, weight=m("router")),
        lambda m: Route(ids=ids, weights=weights, logits=logits, bias=m("router.bias"), routing=routing),
        lambda m: Repeat(out=repeated, x=X, weights=weights),
        lambda m: Combine(out=out(N_EMBD), x=repeated, weights=weights),
    )


GRAPHS = {
    "embed": [lambda m: Embed(out=out(N_EMBD), weight=m("embd"))],
    "select": embedded(lambda m: SelectOutputs(out=out(N_EMBD, outputs=True), x=X)),
    "scale": simple(Scale, factor=0.3),
    "scale_by_position": simple(ScaleByPosition, floor_scale=4, alpha=0.5, offset=1.0),
    "multiply_by": simple(MultiplyBy, vector=lambda m: m("vector")),
    "multiply_by_narrow": simple(MultiplyBy, vector=lambda m: m("narrow")),
    "multiply_by_repeat": simple(MultiplyBy, vector=lambda m: m("few"), repeat=32),
    "divide_by": simple(MultiplyBy, vector=lambda m: m("vector"), kind="over"),
    "plus": simple(MultiplyBy, vector=lambda m: m("vector"), kind="plus"),
    "softcap": simple(Softcap, cap=2.0),
    "clamp": simple(Clamp, limit=0.5),
    "rms": simple(Norm, weight=lambda m: m("vector"), eps=1e-5, group=N_EMBD),
    "rms_heads": simple(Norm, weight=lambda m: m("narrow"), eps=1e-5, group=32),
    "rms_narrow": simple(Norm, weight=lambda m: m("narrow"), eps=1e-5, group=N_EMBD),
    "layer": simple(Norm, weight=lambda m: m("vector"), bias=lambda m: m("narrow"), eps=1e-5, kind="layer", group=48),
    "l2": simple(Norm, weight=None, eps=1e-6, kind="l2", group=24),
    "take": simple(Take, width=60, start=8, period=32),
    "glu_halves": embedded(lambda m: Glu(out=out(48), gate=X, up=None, activation=Activation("silu"))),
    "activate": simple(Activate, activation=Activation("relu_sqr")),
    "mul_mat": simple(
        MulMat, width=200, weight=lambda m: m("w"), bias=lambda m: m("w.bias"), scale=lambda m: m("w.scale")
    ),
    "mul_mat_f16": simple(MulMat, width=200, weight=lambda m: m("w16")),
    "rope_normal": rope(RopeConfig(n_rot=20, kind="normal", freq_base=1e4), head=24, start=4),
    "rope_neox": rope(RopeConfig(n_rot=32, kind="neox", freq_base=1e4, freq_scale=0.5), head=48),
    "experts": experts(),
    "attention": attention(),
    "attention_window": attention(mask="sliding", window=5, softcap=3.0, sinks=lambda m: m("sinks")),
    "attention_alibi": attention(alibi=8.0),
}


def _join():
    a, b = Value("a", 60), Value("b", 7)
    return embedded(
        lambda m: Take(out=a, x=X, start=0, period=32),
        lambda m: Take(out=b, x=X, start=3, period=N_EMBD),
        lambda m: Join(out=out(3 * 27), a=a, b=b, period_a=20, period_b=7),
    )


def _gated():
    gate, up, one = Value("gate", 200), Value("up", 200), Value("one", 4)
    return embedded(
        lambda m: MulMat(out=gate, x=X, weight=m("w")),
        lambda m: MulMat(out=up, x=X, weight=m("w2")),
        lambda m: Take(out=one, x=X, start=0, period=24),
        lambda m: Glu(out=Value("h", 200), gate=gate, up=up, activation=Activation("silu")),
        lambda m: Glu(out=out(200), gate=one, up=up, activation=Activation("sigmoid")),
    )


def _heads(kind=""):
    """x as 3 heads of 32 columns, each to 20."""
    return embedded(lambda m: MulMatHeads(out=out(60), x=X, weight=m(f"heads{kind}")))


def _up_gate(activation="silu"):
    biases = {"up_bias": "w.bias", "gate_bias": "w2.bias"}
    return embedded(
        lambda m: UpGate(
            out=out(200),
            x=X,
            up=m("w"),
            gate=m("w2"),
            activation=Activation(activation, up_limit=1.0),
            up_scale=m("w.scale"),
            **{k: m(v) for k, v in biases.items()},
        )
    )


def _by_expert(*, fused):
    """Two of six experts: up and gate from one merged tensor, down with scales and biases, weighted and added."""
    logits, ids, weights = Value("logits", 6), Value("ids", 2, integer=True), Value("weights", 2)
    both, hidden, down = Value("both", 80, 2), Value("hidden", 40, 2), Value("down", N_EMBD, 2)

    def halves(m):
        tensor, bias = m("gate_up").tensor, m("gate_up.bias").tensor
        parts = {"gate": (0, 40), "up": (40, 80)}
        matrices = {name: Matrix(tensor, part) for name, part in parts.items()}
        return matrices | {f"{name}_bias": Matrix(bias, columns=part) for name, part in parts.items()}

    silu = Activation("silu")
    middle = [
        lambda m: MulMatId(out=both, x=X, ids=ids, weight=m("gate_up"), bias=m("gate_up.bias")),
        lambda m: Glu(out=hidden, gate=both, up=None, activation=silu),
    ]
    one = [lambda m: UpGateId(out=hidden, x=X, ids=ids, activation=silu, **halves(m))]
    return embedded(
        lambda m: MulMat(out=logits, x=X, weight=m("router")),
        lambda m: Route(ids=ids, weights=weights, logits=logits, routing=Routing(n_expert=6, n_used=2)),
        *(one if fused else middle),
        lambda m: MulMatId(out=down, x=hidden, ids=ids, weight=m("down"), scale=m("down.scale")),
        lambda m: Combine(out=out(N_EMBD), x=down, weights=weights),
    )


def _recurrent(by_row=False):
    q, k, v, beta = Value("q", 32), Value("k", 32), Value("v", 48), Value("beta", 4)
    convolved, normed, g = Value("convolved", N_EMBD), Value("normed", N_EMBD), Value("g", 64 if by_row else 4)
    decaying = Value("decaying", g.width)
    return embedded(
        lambda m: Convolve(out=convolved, x=X, weight=m("taps"), state=State("convolved", 3 * N_EMBD)),
        lambda m: Norm(out=normed, x=convolved, weight=None, eps=1e-6, kind="l2", group=32),
        lambda m: Take(out=q, x=normed, start=0, period=N_EMBD),
        lambda m: Take(out=k, x=normed, start=32, period=N_EMBD),
        lambda m: Take(out=v, x=convolved, start=48, period=N_EMBD),
        lambda m: Take(out=beta, x=normed, start=7, period=N_EMBD),
        lambda m: Take(out=decaying, x=normed, start=7, period=N_EMBD),
        lambda m: Scale(out=g, x=decaying, factor=0.1),
        lambda m: DeltaNet(
            out=out(48),
            **{"q": q, "k": k, "v": v, "g": g, "beta": beta, "n_k_head": 2, "n_v_head": 4, "scale": 0.25},
            state=State("delta", 4 * 16 * 12),
        ),
    )


def _scan():
    x, z, b, c, dt = Value("x", 48), Value("z", 48), Value("b", 32), Value("c", 32), Value("dt", 4)
    convolved = Value("convolved", N_EMBD)
    return embedded(
        lambda m: Convolve(out=convolved, x=X, weight=m("taps"), bias=m("vector"), state=State("c", 3 * N_EMBD)),
        lambda m: Take(out=x, x=convolved, start=0, period=N_EMBD),
        lambda m: Take(out=z, x=X, start=11, period=N_EMBD),
        lambda m: Take(out=b, x=convolved, start=48, period=N_EMBD),
        lambda m: Take(out=c, x=convolved, start=16, period=N_EMBD),
        lambda m: Take(out=dt, x=X, start=7, period=N_EMBD),
        lambda m: SsmScan(
            out=out(48),
            **{"x": x, "z": z, "dt": dt, "b": b, "c": c, "dt_bias": m("scan.bias"), "a": m("scan.a"), "d": m("scan.d")},
            **{"n_head": 4, "n_group": 2, "state": State("s", 4 * 16 * 12)},
        ),
    )


def _column_scan():
    dt, z, b, c = Value("dt", 40), Value("z", 40), Value("b", 16), Value("c", 16)
    convolved, x = Value("convolved", N_EMBD), Value("x", 40)
    return embedded(
        lambda m: Convolve(out=convolved, x=X, weight=m("taps"), state=State("c", 3 * N_EMBD)),
        lambda m: Take(out=x, x=convolved, start=2, period=N_EMBD),
        lambda m: Take(out=z, x=X, start=48, period=N_EMBD),
        lambda m: Take(out=dt, x=X, start=5, period=N_EMBD),
        lambda m: Take(out=b, x=convolved, start=50, period=N_EMBD),
        lambda m: Take(out=c, x=convolved, start=70, period=N_EMBD),
        lambda m: ColumnScan(
            out=out(40),
            **{"x": x, "z": z, "dt": dt, "b": b, "c": c, "a": m("columns.a"), "d": m("columns.d")},
            state=State("s", 16 * 40),
        ),
    )


def _rwkv():
    before, last, wide = Value("before", N_EMBD), Value("far", N_EMBD), Value("wide", 2 * N_EMBD)
    parts = [Value(name, 32) for name in ("r", "g", "k", "v", "removed", "rate")]
    normed, r, g, k, v, removed, rate = Value("normed", N_EMBD), *parts
    gate = Value("found", 32)
    return embedded(
        lambda m: Previous(out=before, x=X, state=State("before", N_EMBD)),
        lambda m: Lerp(out=last, x=X, target=before, vector=m("vector")),
        lambda m: Join(out=wide, a=X, b=last, period_a=N_EMBD, period_b=N_EMBD),
        lambda m: Lerp(out=Value("both", 2 * N_EMBD), x=X, target=before, vector=m("vector2"), weights=wide),
        lambda m: Norm(out=normed, x=last, weight=None, eps=1e-6, kind="l2", group=16),
        *(
            lambda m, index=index, part=part: Take(out=part, x=normed, start=8 * index, period=N_EMBD)
            for index, part in enumerate(parts)
        ),
        lambda m: Wkv(
            **{"out": gate, "r": r, "g": g, "k": k, "v": v, "removed": removed, "rate": rate, "n_head": 2},
            **{"state": State("wkv", 32 * 16), "bound": 0.6},
        ),
        lambda m: Bonus(out=out(32), x=gate, r=r, k=k, v=v, vector=m("narrow"), head=16),
    )


def _outputs():
    selected, normed = Value("selected", N_EMBD, outputs=True), Value("normed", N_EMBD, outputs=True)
    logits = Value("logits", 200, outputs=True)
    return embedded(
        lambda m: SelectOutputs(out=selected, x=X),
        lambda m: Norm(out=normed, x=selected, weight=m("vector"), eps=1e-5, group=N_EMBD),
        lambda m: MulMat(out=logits, x=normed, weight=m("w")),
        lambda m: Softcap(out=Value("capped", 200, outputs=True), x=logits, cap=2.0),
    )


GRAPHS |= {
    "join": _join(),
    "gated": _gated(),
    "heads": _heads(),
    "heads_q8_0": _heads("8"),
    "up_gate": _up_gate(),
    "up_gate_oai": _up_gate("swiglu_oai"),
    "by_expert": _by_expert(fused=False),
    "by_expert_fused": _by_expert(fused=True),
    "recurrent": _recurrent(),
    "recurrent_by_row": _recurrent(by_row=True),
    "scan": _scan(),
    "column_scan": _column_scan(),
    "rwkv": _rwkv(),
    "outputs": _outputs(),
    "softplus": simple(Activate, activation=Activation("softplus")),
}
#: Activations are rounded to half precision, or to 8 bits.
ROUNDED = {"mul_mat_f16": 3e-3, "heads_q8_0": 4e-2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    t = Tensors()
    t.add("embd", N_EMBD, N_VOCAB)
    for name, width in (("vector", N_EMBD), ("narrow", 32), ("w.bias", 200), ("k.bias", 32), ("sinks", 8)):
        t.add(name, width, mean=0.5)
    t.add("vector2", N_EMBD, 1, 1, 2, mean=0.5)
    t.add("w.scale", 1, mean=2.0)
    t.add("few", 3, mean=0.5)
    t.add("factors", 24, mean=5.0)
    t.add("router.bias", 6)
    for name, width in (("w", 200), ("w2", 200), ("q", 128), ("k", 32), ("v", 32), ("router", 6)):
        t.add(name, N_EMBD, width)
    t.add("w16", N_EMBD, 200, kind="F16")
    t.add("w2.bias", 200)
    t.add("heads", 32, 20, 3)
    t.add("heads8", 32, 20, 3, kind="Q8_0")
    t.add("gate_up", N_EMBD, 80, 6)
    t.add("gate_up.bias", 80, 6)
    t.add("down", 40, N_EMBD, 6)
    t.add("down.scale", 6, mean=1.0)
    t.add("taps", 4, N_EMBD)
    for name, mean in (("bias", 0.5), ("a", -5.0), ("d", 1.0)):
        t.add(f"scan.{name}", 1, 4, mean=mean)
    t.add("columns.a", 16, 40, mean=-3.0)
    t.add("columns.d", 40, mean=1.0)
    with t.open(tmp_path_factory.mktemp("cpu") / "tensors.gguf") as opened:
        yield opened


def graph_of(name, source):
    matrix = {n: Matrix(t) for n, t in source.tensors.items()}
    return [make(matrix.__getitem__) for make in GRAPHS[name]]


LIMITS = Limits(n_ctx=N_CTX, n_seq=N_SEQ, n_ubatch=20, kv_type="f32")


def run_all(program, value):
    results = []
    for batch in BATCHES:
        program.run(batch)
        results.append(program.read(value).copy())
    return results


@pytest.mark.parametrize("name", GRAPHS)
def test_operations_equal_the_reference(name, source):
    ops = graph_of(name, source)
    value = ops[-1].outputs()[0]
    want = run_all(Reference(source).compile(ops, LIMITS, [value]), value)
    for threads in (1, 2, 3):
        actual = run_all(CPUBackend(source, threads).compile(ops, LIMITS, [value]), value)
        tolerance = ROUNDED.get(name, 3e-6)
        for a, b in zip(actual, want, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        if threads == 1:
            first = actual
        for a, b in zip(actual, first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_values_survive_in_place_operations_and_buffer_reuse(source):
    """A long chain with branches: what leaves is right whatever was overwritten on the way."""
    matrix = {n: Matrix(t) for n, t in source.tensors.items()}
    rng = np.random.default_rng(3)
    ops: list[Op] = [Embed(out=X, weight=matrix["embd"])]
    values = [X]
    for i in range(60):
        a, b = (values[max(0, len(values) - 1 - int(rng.integers(0, 9)))] for _ in range(2))
        result = Value(f"v{i}", N_EMBD)
        kinds = [
            Add(out=result, a=a, b=b),
            Scale(out=result, x=a, factor=-0.9),
            Clamp(out=result, x=a, limit=2.0),
            Norm(out=result, x=b, weight=None, eps=1e-5, group=N_EMBD),
        ]
        ops.append(kinds[int(rng.integers(0, 4))])
        values.append(result)
    leaves = [values[i] for i in (5, 23, 24, 59, 60)]
    want = Reference(source).compile(ops, LIMITS, leaves)
    for threads in (1, 2):
        actual = CPUBackend(source, threads).compile(ops, LIMITS, leaves)
        for batch in BATCHES:
            want.run(batch)
            actual.run(batch)
            for value in leaves:
                np.testing.assert_allclose(actual.read(value), want.read(value), rtol=1e-5, atol=1e-5)


def entry(*uses, in_place=None, independent=False):
    return Entry(None, uses=uses, in_place=in_place, independent=independent)


def overlap(a, b):
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def test_buffers_are_reused_only_after_their_last_use():
    a, b, c, d = (Buffer(n, 1000) for n in "abcd")
    assert place([entry(a), entry(a, b), entry(b, c), entry(c, d)]) == 2 * 1024
    assert overlap(a, c)
    assert overlap(b, d)
    a, b, c = (Buffer(n, 1000) for n in "abc")
    assert place([entry(a), entry(a, b, in_place=(b, a)), entry(b, c, in_place=(c, b))]) == 1024
    # Another reader comes later; or reads at the same time; or the value leaves.
    for third in ("later", "together", "leaves"):
        a, b, c = (Buffer(n, 1000) for n in "abc")
        a.live_at_end = third == "leaves"
        entries = [entry(a), entry(a, b, in_place=(b, a)), entry(a if third == "later" else b, c)]
        if third == "together":
            entries.insert(1, entry(a, independent=True))
        place(entries)
        assert not overlap(a, b)


def test_entries_without_barriers_do_not_conflict():
    a, b, c, d = (Buffer(n, 1000) for n in "abcd")
    place([entry(a), entry(a, b, independent=True), entry(c), entry(d, b, c)])
    assert not overlap(a, c)
    a, b, c = (Buffer(n, 1000) for n in "abc")
    place([entry(a), entry(a, b), entry(c)])
    assert overlap(a, c)


def test_segments_pass_values_by_read_and_write(source):
    ops = graph_of("gated", source)
    value = ops[-1].outputs()[0]
    expected = run_all(CPUBackend(source, 2).compile(ops, LIMITS, [value]), value)
    for split in range(1, len(ops)):
        first, second = ops[:split], ops[split:]
        crossing = [v for op in first for v in op.outputs() if any(v in o.inputs() for o in second)]
        one = Reference(source).compile(first, LIMITS, crossing)
        two = CPUBackend(source, 2).compile(second, LIMITS, [value])
        for batch, want in zip(BATCHES, expected, strict=True):
            one.run(batch)
            for v in crossing:
                two.write(v, one.read(v))
            two.run(batch)
            np.testing.assert_allclose(two.read(value), want, rtol=1e-5, atol=1e-5)


def test_observers_see_values_before_they_are_overwritten(source):
    ops = graph_of("experts", source)
    ids = ops[2].ids
    scaled = Value("scaled", N_EMBD)
    ops[2:2] = [Observe(x=X, label="blk.0.ffn_gate_inp.weight")]
    ops += [Scale(out=scaled, x=X, factor=2.0), Observe(x=X, label="again", ids=ids)]
    records: list = []

    def look(label, x, ids):
        records.append((label, x.copy(), None if ids is None else ids.copy()))

    program = CPUBackend(source, 2, observer=look).compile(ops, LIMITS, [scaled])
    program.run(BATCHES[0])
    embedded = Reference(source)
    expected = embedded.compile(ops, LIMITS, [X])
    expected.run(BATCHES[0])
    assert [label for label, _, _ in records] == ["blk.0.ffn_gate_inp.weight", "again"]
    for _, x, _ in records:
        np.testing.assert_allclose(x, expected.read(X), rtol=1e-6)
    np.testing.assert_array_equal(records[1][2], expected.read(ids))
    assert records[1][2].dtype == np.int32
    # Without an observer nothing is cut.
    assert len(CPUBackend(source, 2).compile(ops, LIMITS, [scaled])._steps) == 1


def test_activations_are_quantized_once(source):
    ops = graph_of("mul_mat_f16", source)
    second = Value("again", 200)
    ops.append(MulMat(out=second, x=X, weight=ops[-1].weight))
    program = CPUBackend(source, 1).compile(ops, LIMITS, [second])
    names = [t.name for t in program.profile(BATCHES[0])]
    assert len(names) == 4
    assert sum("round" in name for name in names) == 1


def test_profiles_name_every_entry(source):
    ops = graph_of("attention", source)
    program = CPUBackend(source, 2).compile(ops, LIMITS, [ops[-1].out])
    timings = program.profile(BATCHES[0])
    assert [t.op for t in timings if t.op is ops[-1]]
    assert all(t.nanoseconds > 0 for t in timings)
    products = [(t.name, t.weight_bytes) for t in timings if "mul_mat" in t.name]
    assert products == [("mul_mat F32", 4 * N_EMBD * n) for n in (128, 32, 32)]


def test_unused_programs_are_freed(source):
    ops = graph_of("attention", source)
    gc.collect()
    gc.disable()
    try:
        backend = CPUBackend(source, 1, observer=lambda *_: None)
        program = backend.compile([*ops, Observe(x=ops[-1].out, label="x")], LIMITS, [ops[-1].out])
        program.run(BATCHES[0])
        reference = weakref.ref(program)
        del program
        assert reference() is None
    finally:
        gc.enable()


def test_preconditions_of_kernels_are_checked(source):
    ops = graph_of("embed", source)
    program = CPUBackend(source, 1).compile(ops, LIMITS, [ops[-1].out])
    for bad in (
        batch_of([N_VOCAB], [0], [0], [0]),
        batch_of([-1], [0], [0], [0]),
        batch_of([1], [N_CTX], [0], [0]),
        batch_of([1], [0], [N_SEQ], [0]),
        batch_of([1] * 21, range(21), [0] * 21, [0]),
        batch_of([1, 1], [0], [0], [0]),
        batch_of([1], [0], [0], [1]),
    ):
        with pytest.raises(ValueError, match=r"of this program is|a batch has|outputs are|positions and"):
            program.run(bad)
    with pytest.raises(KeyError, match="is not an output"):
        program.read(X)
    with pytest.raises(KeyError, match="is not an input"):
        program.write(X, np.zeros((1, N_EMBD)))


def test_unknown_operations_are_refused(source):
    class Strange(Op):
        pass

    with refuses(TypeNotSupported, "QK-E306"):
        CPUBackend(source, 1).compile([Strange()], LIMITS, [])
