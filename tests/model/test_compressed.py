"""Attention to a window and to blocks beyond it (DeepSeek V4): llama.cpp's logits on every backend, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_mla
import tiny_models
from device_memory import Memory
from recurrent_cases import MIXED, N_SEQ, Tokens, alone
from refusals import refuses

from libllama import nmse
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.kernels.cpu.core.tape import Batch, Tape, address_of
from quantkit.kernels.cpu.core.team import Team
from quantkit.kernels.cpu.layer import compress as cpu
from quantkit.kernels.cuda.layer import mixing as cuda
from quantkit.model.cost import token_cost
from quantkit.model.engine import load
from quantkit.model.graph import build_graph
from quantkit.model.ops import LightningIndexer, Op, WindowAndBlocks
from quantkit.model.placement import ALL_LAYERS, Placement
from zoo import N_EXPERT, TABLE

#: Blocks of 128 are complete at 128 and 256 tokens.
N, WINDOW, TOP_K = 270, 24, 12
HEAD, N_HEAD, INDEX_HEAD, INDEX_HEADS, ROT, RANK, O_RANK, GROUPS = 32, 4, 64, 16, 16, 24, 20, 2
RATIOS = [4, 128, 0, 128]
#: What a variant changes in the metadata.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    "one": {"attention.indexer.top_k": 1, "hyper_connection.sinkhorn_iterations": 1, "hash_layer_count": 0},
}


def layer(number: int, ratio: int, hashed: bool) -> tiny_models.Shapes:
    e = tiny_models.N_EMBD
    shapes: tiny_models.Shapes = {"attn_norm": (e,), "ffn_norm": (e,), "attn_sinks": (N_HEAD,), "attn_q_a": (e, RANK)}
    shapes |= {"attn_q_a_norm": (RANK,), "attn_q_b": (RANK, N_HEAD * HEAD), "attn_kv": (e, HEAD)}
    shapes |= {"attn_kv_a_norm": (HEAD,), "attn_output_b": (GROUPS * O_RANK, e)}
    shapes |= {"attn_output_a": (N_HEAD * HEAD // GROUPS, GROUPS * O_RANK)}
    kinds = [("attn", HEAD), ("indexer", INDEX_HEAD)][: 2 if ratio == 4 else min(ratio, 1)]
    for kind, head in kinds:
        width = 2 * head if ratio == 4 else head
        shapes |= {f"{kind}_compressor_kv": (e, width), f"{kind}_compressor_gate": (e, width)}
        shapes |= {f"{kind}_compressor_ape": (width, ratio), f"{kind}_compressor_norm": (head,)}
    if ratio == 4:
        shapes |= {"indexer.proj": (e, INDEX_HEADS), "indexer.attn_q_b": (RANK, INDEX_HEADS * INDEX_HEAD)}
    for part in ("attn", "ffn"):
        shapes |= {f"hc_{part}_fn": (4 * e, 24), f"hc_{part}_base": (24,), f"hc_{part}_scale": (3,)}
    shapes_by_name = {f"blk.{number}.{name}.weight": ne for name, ne in shapes.items()}
    table = {f"blk.{number}.{TABLE}": (2, 128)} if hashed else {f"blk.{number}.exp_probs_b.bias": (N_EXPERT,)}
    return shapes_by_name | tiny_models.experts(number, N_EXPERT, 32, 32) | table


def model(
    path: Path,
    changes: dict[str, Any] | None = None,
    extra_shapes: tiny_models.Shapes | None = None,
    extra_fields: dict[str, Any] | None = None,
) -> Path:
    """Write four layers: blocks that are selected, all blocks, none, all."""
    fields: dict[str, Any] = {
        **{"block_count": 4, "context_length": 512, "attention.head_count": N_HEAD, "attention.head_count_kv": 1},
        **{"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": ROT},
        **{"rope.freq_base": 1e4, "attention.compress_rope_freq_base": 5e4, "attention.compress_ratios": RATIOS},
        **{"attention.q_lora_rank": RANK, "attention.sliding_window": WINDOW, "attention.output_lora_rank": O_RANK},
        **{"attention.output_group_count": GROUPS, "attention.indexer.head_count": INDEX_HEADS},
        **{"attention.indexer.key_length": INDEX_HEAD, "attention.indexer.top_k": TOP_K, "hash_layer_count": 1},
        **{"expert_count": N_EXPERT, "expert_used_count": 2, "expert_feed_forward_length": 32},
        **{"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        **{"expert_gating_func": 4, "swiglu_clamp_exp": [0.3] * 4, "hyper_connection.count": 4},
        **{"hyper_connection.epsilon": 1e-3, "hyper_connection.sinkhorn_iterations": 3},
    }
    fields |= changes or {}
    shapes = tiny_models.ends() | {"output_hc_fn.weight": (4 * tiny_models.N_EMBD, 4), "output_hc_base.weight": (4,)}
    shapes |= {"output_hc_scale.weight": (1,)}
    for i, ratio in enumerate(RATIOS):
        shapes |= layer(i, ratio, i < fields["hash_layer_count"])
    return tiny_models.write(path, "deepseek4", fields, shapes | (extra_shapes or {}), extra_fields=extra_fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


def model_of(folder: Path, variant: str) -> Path:
    path = folder / f"{variant}.gguf"
    return path if path.exists() else model(path, VARIANTS[variant])


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_llama_cpp(variant: str, folder: Path, llama_bin: Path) -> None:
    test_mla.agrees(model_of(folder, variant), llama_bin, N)


def test_the_cpu_agrees(folder: Path) -> None:
    """In parts that cut blocks, with room for more tokens, and without."""
    path, tokens = model_of(folder, "yarn"), tiny_models.ids(N)
    want = tiny_models.logits(path, tokens)
    with load(path, kv_type="f32", threads=2) as loaded:
        for n_ctx in (N, 512):
            session = loaded.session(n_ctx)
            actual = np.concatenate([session.decode(part) for part in np.split(tokens, [130, 131, 133, 200])])
            assert nmse(actual, want) < 1e-11


def test_the_device_agrees(folder: Path, cuda_devices: tuple[str, ...]) -> None:
    path, tokens = model_of(folder, "yarn"), tiny_models.ids(N)[:132]
    placement = Placement(ALL_LAYERS, (), cuda_devices[:1], embeddings=True)
    with load(path, kv_type="f32", placement=placement) as loaded:
        session = loaded.session(133)
        actual = np.concatenate([session.decode(part) for part in np.split(tokens, [126, 127, 131])])
    assert nmse(actual, tiny_models.logits(path, tokens)) < 1e-9


def test_layers_on_several_devices(folder: Path) -> None:
    path, tokens = model_of(folder, "plain"), tiny_models.ids(140)
    with load(path, kv_type="f32", placement=Placement(3, (), ("REFERENCE",))) as loaded:
        assert len(loaded.segments) > 1
        assert nmse(loaded.forward(tokens), tiny_models.logits(path, tokens)) < 1e-11


def test_sequences_do_not_matter(folder: Path) -> None:
    path, first, second = model_of(folder, "plain"), tiny_models.ids(140), tiny_models.ids(140, 2)
    both = tiny_models.logits_of_two(path, first, second)
    for actual, tokens in zip(both, (first, second), strict=True):
        assert nmse(actual, tiny_models.logits(path, tokens)) < 1e-12
    with load(path, kv_type="f32", threads=2) as loaded:
        session = loaded.session(140, n_seq=2)
        for i, part in enumerate(np.split(np.arange(140), [40, 129])):
            for s, tokens in enumerate((first, second)):
                actual = session.decode(tokens[part], s)
                assert actual is not None
                assert nmse(actual, both[s][part]) < 1e-11, i


def test_short_sequences_have_no_selection(folder: Path) -> None:
    path, n = model_of(folder, "plain"), 4 * TOP_K + 3

    def ops_of(n_ctx: int) -> list[Op]:
        session = loaded.session(n_ctx)
        actual = session.decode(tiny_models.ids(n))
        assert actual is not None
        assert nmse(actual, tiny_models.logits(path, tiny_models.ids(n))) < 1e-11
        return [op for segment in session._programs._segments for op in segment.ops]

    with load(path, kv_type="f32") as loaded:
        short, long = ops_of(n), ops_of(n + 1)
    for ops, indexers, widths in ((short, 0, (TOP_K, 0, 0)), (long, 1, (TOP_K, 0, 0))):
        assert sum(isinstance(op, LightningIndexer) for op in ops) == indexers
        assert tuple(op.out.width - WINDOW for op in ops if isinstance(op, WindowAndBlocks)) == widths


def test_bytes_read_per_token(folder: Path) -> None:
    with open_gguf(model_of(folder, "plain")) as source:
        graph = build_graph(source)
    blocks = TOP_K + 2 * 2  # of 270 positions: those selected, and two layers with two of 128
    keys = 4 * HEAD * (4 * WINDOW + blocks)
    assert token_cost(graph, "f32", N).cache_bytes == keys + 4 * INDEX_HEAD * (N // 4)


@pytest.mark.parametrize(
    ("refusal", "changes", "extra_shapes", "error"),
    [
        ("QK-E306 compress_ratios 8 0", {"attention.compress_ratios": [8, 128, 0, 128]}, {}, TypeNotSupported),
        ("QK-E123 3", {"attention.compress_ratios": [4, 128, 0]}, {}, FormatError),
        ("QK-E123 sliding_window 0", {"attention.sliding_window": 0}, {}, FormatError),
        ("QK-E123 40", {"rope.dimension_count": 40}, {}, FormatError),
        ("QK-E123 8", {"attention.indexer.key_length": 8}, {}, FormatError),
        ("QK-E123 top_k 0", {"attention.indexer.top_k": 0}, {}, FormatError),
        ("QK-E106 3 20", {"attention.output_group_count": 3}, {}, FormatError),
        ("QK-E306 2 4", {"hyper_connection.count": 2}, {}, TypeNotSupported),
        ("QK-E106 attn_compressor_ape.weight", {}, {"blk.0.attn_compressor_ape.weight": (2 * HEAD, 5)}, FormatError),
        ("QK-E106 32 64", {}, {"blk.1.attn_compressor_gate.weight": (tiny_models.N_EMBD, 2 * HEAD)}, FormatError),
        ("QK-E106 hc_ffn_base.weight", {}, {"blk.2.hc_ffn_base.weight": (20,)}, FormatError),
        ("QK-E106 blk.0.ffn_gate_tid2eid.weight 2", {}, {f"blk.0.{TABLE}": (3, 128)}, FormatError),
        ("QK-E123 expert_gating_func 7", {"expert_gating_func": 7}, {}, FormatError),
    ],
)
def test_inconsistent_models_are_refused(
    refusal: str, changes: dict[str, Any], extra_shapes: tiny_models.Shapes, error: type[Exception], tmp_path: Path
) -> None:
    with open_gguf(model(tmp_path / "m.gguf", changes, extra_shapes)) as source, refuses(error, refusal):
        build_graph(source)


def test_a_table_for_missing_layers_is_refused(tmp_path: Path) -> None:
    table = np.tile(np.array([0, 1], np.int32), (128, 1))
    table[100] = [3, N_EXPERT]
    path = model(tmp_path / "m.gguf", extra_fields={f"blk.0.{TABLE}": table})
    with load(path, kv_type="f32") as loaded, refuses(FormatError, "QK-E100 0 8 7"):
        loaded.forward(tiny_models.ids(3))


# ---------------------------------------------------------------- rows of blocks


class Compression:
    """Rows of blocks of three positions by their formula, of tokens that come batch after batch."""

    ratio = 3

    def __init__(self, width: int, overlap: bool) -> None:
        self.width, self.wide, self.overlap = width, width * (1 + overlap), overlap
        self.ape = np.random.default_rng(width).normal(0, 1, (self.ratio, self.wide)).astype(np.float32)
        self.history: dict[int, list[Any]] = {}
        self.slots = {"width": width, "ratio": self.ratio, "overlap": int(overlap)}
        self.state = np.full((N_SEQ, (9 if overlap else 3) * width), np.nan, np.float32)

    def draw(self, tokens: Tokens) -> tuple[Any, Any, Any]:
        """Return kv and score of a batch, and the rows to be made of it."""
        rng, want = np.random.default_rng(len(tokens)), []
        kv, score = rng.normal(0, 2, (2, len(tokens), self.wide)).astype(np.float32)
        for t, (sequence, position) in enumerate(tokens):
            before = self.history.setdefault(sequence, [])
            del before[position:]
            before.append((kv[t], score[t] + self.ape[position % self.ratio]))
            want.append(self.row(before) if len(before) % self.ratio == 0 else np.zeros(self.width))
        return kv, score, np.array(want)

    def row(self, rows: list[Any]) -> Any:
        parts = [np.array(rows[-self.ratio :], np.float64)[:, :, -self.width :]]
        if self.overlap and len(rows) > self.ratio:
            parts.append(np.array(rows[-2 * self.ratio : -self.ratio], np.float64)[:, :, : self.width])
        kv, score = np.concatenate(parts).swapaxes(0, 1)
        weights = np.exp(score - score.max(0))
        return (kv * weights).sum(0) / weights.sum(0)


BATCHES = pytest.mark.parametrize("batches", [alone(4, 1, 1, 7), MIXED], ids=["alone", "mixed"])
SIZES = pytest.mark.parametrize(("width", "overlap"), [(16, True), (37, False), (70, True)])


@BATCHES
@SIZES
def test_rows_of_blocks(width: int, overlap: bool, batches: list[Tokens]) -> None:
    case, team = Compression(width, overlap), Team(2)
    of_batch = Batch(team, 64)
    for tokens in batches:
        kv, score, want = case.draw(tokens)
        out = np.full((len(tokens) + 1, width), np.nan, np.float32)
        arrays = {"out": out, "kv": kv, "score": score, "ape": case.ape, "state": case.state}
        block = cpu.compress.block(
            batch=of_batch.address, **{k: address_of(x) for k, x in arrays.items()}, **case.slots
        )
        of_batch.set(np.zeros(len(tokens)), [p for _, p in tokens], [s for s, _ in tokens])
        Tape(team, of_batch, [(cpu.compress, block)]).run()
        np.testing.assert_allclose(out[:-1], want, atol=3e-6)
        assert np.isnan(out[-1]).all()


@BATCHES
@SIZES
def test_rows_of_blocks_on_the_device(memory: Memory, width: int, overlap: bool, batches: list[Tokens]) -> None:
    case = Compression(width, overlap)
    fixed = {"ape": memory.put(case.ape), "state": memory.put(case.state)}
    for tokens in batches:
        kv, score, want = case.draw(tokens)
        out = memory.allocate((len(tokens) + 1, width))
        memory.run(
            cuda.compress(width),
            batch=memory.batch(np.zeros(len(tokens)), [p for _, p in tokens], [s for s, _ in tokens]),
            **{"out": out, "kv": memory.put(kv), "score": memory.put(score), "rows": len(tokens)},
            **fixed,
            **case.slots,
        )
        actual = memory.get(out, (len(tokens) + 1, width))
        np.testing.assert_allclose(actual[:-1], want, atol=3e-6)
        assert np.isnan(actual[-1]).all()
