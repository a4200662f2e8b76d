"""Sparse latent attention (DeepSeek V3.2, GLM 5): llama.cpp's logits on every backend, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_mla
import tiny_models
from refusals import refuses
from test_mla import Q_RANK, RANK, ROT, YARN

from libllama import nmse
from quantkit.errors import FormatError
from quantkit.formats.gguf import open_gguf
from quantkit.model.cost import token_cost
from quantkit.model.engine import load
from quantkit.model.graph import build_graph
from quantkit.model.observers import observe
from quantkit.model.ops import Attention, CacheWrite, LightningIndexer, SumColumns
from quantkit.model.placement import ALL_LAYERS, Placement
from zoo import write_zoo

#: Enough heads that no score is 0, as for a key that all heads ignore: llama.cpp does not define the order of equal
#: scores.
HEADS, HEAD, TOP_K, N = 16, 64, 8, 40
INDEXER = {"head_count": HEADS, "key_length": HEAD, "top_k": TOP_K}
#: What a variant changes in the metadata.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek32": ("deepseek32", {}),
    "deepseek32-yarn": ("deepseek32", YARN),
    "deepseek32-groups": ("deepseek32", test_mla.GROUPS),
    "deepseek32-one": ("deepseek32", {"attention.indexer.top_k": 1}),
    "glm-dsa": ("glm-dsa", {"expert_gating_func": None}),
    "glm-dsa-yarn": ("glm-dsa", YARN),
    "glm-dsa-shared": ("glm-dsa", {"attention.indexer.types": [1, 0, 1, 0]}),
    "glm-dsa-5.2": ("glm-dsa", {"context_length": 1 << 20}),
}


def indexer(layer: int) -> tiny_models.Shapes:
    shapes: tiny_models.Shapes = {
        "k_norm.weight": (HEAD,),
        "k_norm.bias": (HEAD,),
        "proj.weight": (tiny_models.N_EMBD, HEADS),
    }
    shapes |= {"attn_k.weight": (tiny_models.N_EMBD, HEAD), "attn_q_b.weight": (Q_RANK, HEADS * HEAD)}
    return {f"blk.{layer}.indexer.{name}": ne for name, ne in shapes.items()}


def layer(number: int, n_expert: int = 8) -> tiny_models.Shapes:
    """Return the shapes of a layer of experts."""
    return indexer(number) | test_mla.attention(number, True, True) | tiny_models.experts(number, n_expert, 32, 32)


def sparse(
    path: Path,
    arch: str = "deepseek32",
    changes: dict[str, Any] | None = None,
    extra_shapes: tiny_models.Shapes | None = None,
) -> Path:
    """Write four layers with indexers; those that the metadata make sharing ones have tensors, too, as any file may."""
    fields = {"block_count": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5}
    fields |= {f"attention.indexer.{key}": n for key, n in INDEXER.items()}
    shapes: tiny_models.Shapes = {}
    for i in range(4):
        shapes |= layer(i, (changes or {}).get("expert_count", 8)) if i >= 2 else indexer(i)
    return test_mla.deepseek2(
        path, fields | (changes or {}), arch=arch, extra_shapes=shapes | (extra_shapes or {}), probs_b=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse")


def model_of(folder: Path, variant: str) -> Path:
    path = folder / f"{variant}.gguf"
    return path if path.exists() else sparse(path, *VARIANTS[variant])


@pytest.mark.peer
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_llama_cpp(variant: str, folder: Path, llama_bin: Path) -> None:
    test_mla.agrees(model_of(folder, variant), llama_bin, N)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_selection_changes_the_logits(variant: str, folder: Path) -> None:
    path, tokens = model_of(folder, variant), tiny_models.ids(N)
    arch, changes = VARIANTS[variant]
    top_k = changes.get("attention.indexer.top_k", TOP_K)
    dense = sparse(folder / "dense.gguf", arch, changes | {"attention.indexer.top_k": N})
    actual, all_keys = tiny_models.logits(path, tokens), tiny_models.logits(dense, tokens)
    assert nmse(actual[:top_k], all_keys[:top_k]) < 1e-12
    assert nmse(actual[top_k:], all_keys[top_k:]) > 1e-4


@pytest.mark.parametrize("variant", ["deepseek32-yarn", "glm-dsa-shared"])
def test_the_cpu_agrees(variant: str, folder: Path) -> None:
    path, tokens = model_of(folder, variant), tiny_models.ids(N)
    want = tiny_models.logits(path, tokens)
    with load(path, kv_type="f32", threads=2) as model:
        session = model.session(N)
        parts = (tokens[:20], tokens[20:21], tokens[21:])
        actual = np.concatenate([session.decode(part) for part in parts])
    assert nmse(actual, want) < 1e-11


@pytest.mark.parametrize("variant", ["deepseek32-yarn", "glm-dsa-shared"])
def test_the_device_agrees(variant: str, folder: Path, cuda_devices: tuple[str, ...]) -> None:
    path, tokens = model_of(folder, variant), tiny_models.ids(N)
    with load(path, kv_type="f32", placement=Placement(ALL_LAYERS, (), cuda_devices[:1], embeddings=True)) as model:
        session = model.session(N)
        actual = np.concatenate([session.decode(part) for part in (tokens[:14], tokens[14:15], tokens[15:17])])
    assert nmse(actual, tiny_models.logits(path, tokens)[:17]) < 1e-9


def test_layers_on_several_devices_share_the_selection(folder: Path) -> None:
    path, tokens = model_of(folder, "glm-dsa-shared"), tiny_models.ids(N)
    placement = Placement(3, (), ("REFERENCE",))
    with load(path, kv_type="f32", placement=placement) as model:
        assert len(model.segments) > 1
        assert nmse(model.forward(tokens), tiny_models.logits(path, tokens)) < 1e-11


def test_batches_and_sequences_do_not_matter(folder: Path) -> None:
    path, first, second = model_of(folder, "glm-dsa-shared"), tiny_models.ids(24), tiny_models.ids(24, 2)
    expected = tiny_models.logits(path, first)
    assert nmse(tiny_models.logits(path, first, (5, 1, 18)), expected) < 1e-12
    both = tiny_models.logits_of_two(path, first, second)
    assert nmse(both[0], expected) < 1e-12
    assert nmse(both[1], tiny_models.logits(path, second)) < 1e-12


def test_short_sequences_have_no_selection(folder: Path) -> None:
    """Nothing is read that plain latent attention does not read; what observes an indexer's input still does."""
    path, tokens = model_of(folder, "glm-dsa-shared"), tiny_models.ids(TOP_K)
    with load(path, kv_type="f32") as model:
        for n_ctx in (TOP_K, TOP_K + 1):
            session = model.session(n_ctx)
            ops = [op for segment in session._programs._segments for op in segment.ops]
            read = {m.tensor.name for op in ops for m in op.matrices() if ".indexer." in m.tensor.name}
            actual = [type(op) for op in ops]
            assert (LightningIndexer in actual, bool(read)) == (n_ctx > TOP_K,) * 2
            assert actual.count(CacheWrite) == (4 if n_ctx == TOP_K else 6)
            assert nmse(session.decode(tokens), tiny_models.logits(path, tokens)) < 1e-11  # type: ignore[arg-type]
    with load(path, kv_type="f32", rewrite=observe) as model:
        session = model.session(TOP_K)
        session.decode(tokens)
        ops = [op for segment in session._programs._segments for op in segment.ops]
        names = {name for op in ops if isinstance(op, SumColumns) for name in op.names}
        assert {f"blk.{i}.indexer.{name}.weight" for i in (0, 2) for name in ("attn_k", "attn_q_b", "proj")} <= names


def test_bytes_read_per_token(folder: Path) -> None:
    with open_gguf(model_of(folder, "glm-dsa-shared")) as source:
        graph = build_graph(source)
    assert sum(isinstance(op, LightningIndexer) for op in graph.ops) == 2
    assert [op.selected is not None for op in graph.ops if isinstance(op, Attention)] == [True] * 4
    short, long = (token_cost(graph, "f32", depth).cache_bytes for depth in (TOP_K, 200))
    assert short == 4 * TOP_K * 4 * (RANK + ROT)
    assert long == short + 2 * 200 * 4 * HEAD


@pytest.mark.parametrize(
    ("refusal", "arch", "changes", "extra_shapes"),
    [
        ("QK-E123 top_k 0", "deepseek32", {"attention.indexer.top_k": 0}, {}),
        ("QK-E123 head_count -1", "deepseek32", {"attention.indexer.head_count": -1}, {}),
        ("QK-E123 glm-dsa.attention.indexer.key_length", "glm-dsa", {"attention.indexer.key_length": None}, {}),
        ("QK-E123 8", "deepseek32", {"attention.indexer.key_length": 8}, {}),
        ("QK-E106 1024 16", "deepseek32", {"attention.indexer.head_count": 7}, {}),
        ("QK-E106 indexer.k_norm.weight", "glm-dsa", {}, {"blk.1.indexer.k_norm.weight": (HEAD - 32,)}),
        ("QK-E106 1024 3", "glm-dsa", {}, {"blk.1.indexer.proj.weight": (tiny_models.N_EMBD, 3)}),
        (
            "QK-E106 m.gguf blk.1.indexer.attn_q_b.weight",
            "glm-dsa",
            {},
            {"blk.1.indexer.attn_q_b.weight": (Q_RANK - 8, HEADS * HEAD)},
        ),
        (
            "QK-E106 indexer.k_norm.weight",
            "glm-dsa",
            {},
            {"blk.1.indexer.attn_k.weight": (tiny_models.N_EMBD, 2 * HEAD)},
        ),
        ("QK-E123 0", "glm-dsa", {"attention.indexer.types": [0, 1, 1, 1]}, {}),
        ("QK-E123 2", "glm-dsa", {"attention.indexer.types": [1, 1]}, {}),
        ("QK-E123 full", "glm-dsa", {"attention.indexer.types": ["full"] * 4}, {}),
        ("QK-E123 deepseek32.attention.key_length_mla", "deepseek32",
         {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.key_length": 48,
          "attention.value_length": 24}, {}),
    ],
)  # fmt: skip
def test_inconsistent_models_are_refused(
    refusal: str, arch: str, changes: dict[str, Any], extra_shapes: tiny_models.Shapes, tmp_path: Path
) -> None:
    path = sparse(tmp_path / "m.gguf", arch, changes, extra_shapes)
    with open_gguf(path) as source, refuses(FormatError, refusal):
        build_graph(source)


def test_unselected_blocks_are_reported(tmp_path: Path) -> None:
    """MiniMax M3, of which all keys are seen."""
    with load(write_zoo("minimax-m3-moe", tmp_path / "m.gguf")) as model:
        assert [note for note in model.notes if "beyond 512 tokens" in note]
