"""Gemma 4: forms of its files that the zoo does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_imatrix_zoo import with_tokenizer

from libllama import Libllama, nmse
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.imatrix import ImatrixOptions, imatrix
from quantkit.model.engine import load
from quantkit.model.ops import Attention, Take
from zoo import draw, expected

NAME = "gemma4-dense"
TOKENS, LOGITS = expected(NAME)
Zoo = Callable[[str], Path]
Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def changed(source: Path, path: Path, change: Callable[[Arrays], Arrays]) -> Path:
    """Write the model with other tensors, whose arrays have the shapes of ggml reversed."""
    with open_gguf(source) as model:
        f32 = next(iter(model.tensors.values())).type
        arrays = {t.name: model.data(t).view(np.float32).reshape(t.shape[::-1]) for t in model.tensors.values()}
        changed_arrays = change(arrays)
        tensors = [(name, x.shape[::-1], f32, x.tobytes()) for name, x in changed_arrays.items()]
        write_gguf(path, model.fields.values(), tensors)
    return path


def fused(arrays: Arrays) -> Arrays:
    """Put q, k and v of every layer into one matrix; scales go; layers that share caches get some k and v, too."""
    fused_arrays = {name: x for name, x in arrays.items() if not name.endswith(".scale")}
    for i in range(6):
        q = fused_arrays.pop(f"blk.{i}.attn_q.weight")
        parts = []
        for name in ("attn_k", "attn_v"):
            rows = (128 if i in (0, 1, 2, 4) else 256, 256)
            parts.append(fused_arrays.pop(f"blk.{i}.{name}.weight", draw(name, rows[::-1], 1)))
        fused_arrays[f"blk.{i}.attn_qkv.weight"] = np.concatenate([q, *parts])
    return fused_arrays


def unscaled(arrays: Arrays) -> Arrays:
    return {name: x for name, x in arrays.items() if not name.endswith(".scale")}


def with_unused(arrays: Arrays) -> Arrays:
    """Give layers that share caches keys and values of their own."""
    unused = {f"blk.4.{name}.weight": draw(name, (256, 128), 1) for name in ("attn_k", "attn_v")}
    return {**arrays, **unused, "blk.4.attn_k_norm.weight": np.ones(64, np.float32)}


def test_fused_matrices_give_the_same_logits(zoo: Zoo, tmp_path: Path) -> None:
    logits = []
    for change in (unscaled, fused):
        with load(changed(zoo(NAME), tmp_path / "m.gguf", change), kv_type="f32") as model:
            logits.append(model.forward(TOKENS))
    assert nmse(*logits) <= 1e-10


def test_keys_and_values_of_sharing_layers_are_unused(zoo: Zoo, tmp_path: Path) -> None:
    with load(changed(zoo(NAME), tmp_path / "m.gguf", with_unused), kv_type="f32") as model:
        assert nmse(model.forward(TOKENS), LOGITS) <= 1e-8


def test_every_weight_gets_an_entry_even_if_it_is_not_used(zoo: Zoo, tmp_path: Path) -> None:
    path = changed(zoo(NAME), tmp_path / "m.gguf", with_unused)
    path, text = with_tokenizer(path, tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text("abcdefgh" * 9)
    matrix = imatrix(path, [text], tmp_path / "i.gguf", options=ImatrixOptions(n_ctx=32, n_batch=32)).imatrix
    assert matrix is not None
    for name in ("attn_k", "attn_v"):
        entry = matrix.entries[f"blk.4.{name}.weight"]
        assert np.array_equal(entry.sums, matrix.entries["blk.4.attn_q.weight"].sums)


@pytest.mark.peer
@pytest.mark.parametrize("change", [fused, unscaled, with_unused])
def test_logits_are_those_of_llama_cpp(
    zoo: Zoo, tmp_path: Path, llama_bin: Path, change: Callable[[Arrays], Arrays]
) -> None:
    path = changed(zoo(NAME), tmp_path / "m.gguf", change)
    with load(path, kv_type="f32") as model:
        assert nmse(model.forward(TOKENS), Libllama(llama_bin).logits(path, TOKENS)) <= 1e-8


def test_layers_share_caches_of_their_kind(zoo: Zoo) -> None:
    with load(zoo(NAME)) as model:
        read = [op.cache.name for op in model.graph.ops if isinstance(op, Attention)]
        windows = [op.window for op in model.graph.ops if isinstance(op, Attention)]
        layers = [op.layer for op in model.graph.ops if isinstance(op, Take) and "layer_input" in op.out.name]
    assert read == ["cache_0", "cache_1", "cache_2", "cache_3", "cache_2", "cache_3"]
    assert windows == [32, 32, 32, 0, 32, 0]
    assert layers == [-1] * 6
