"""Results of runtimes with merged and separate experts, and loading as predicted by the report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from libllama import Ids, Libllama, LibllamaError, nmse, perplexity
from quantkit.errors import RecipeError
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.merge import merge_up_gate, split_up_gate
from quantkit.quantize import QuantizeOptions, quantize
from zoo import NAMES, expected

Zoo = Callable[[str], Path]

MERGED = ["deepseek2-moe", "gemma4-moe", "qwen3next-moe", "qwen35moe-moe", "granite_swa-moe"]
SCALED = ["glm4moe-moe", "olmoe-moe", "qwen2moe-moe"]
#: Experts without a gate.
UNGATED = ["nemotron_h_moe-moe", "nomic-bert-moe-moe"]
#: Those that it loads in either form.
EITHER = ["cohere2moe-moe", "hy_v3-moe"]
SEPARATE = [name for name in NAMES if name.endswith("-moe") and name not in MERGED + EITHER + SCALED + UNGATED]
MAINLINE, IK = "llama.cpp b11434", "ik_llama.cpp 8337e4cd3"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def exchange(source: Path, path: Path) -> Path:
    """Give the gate experts of ``source`` the weights of its up experts, and the other way round."""
    with open_gguf(source) as opened:
        partners = {n: n.replace("ffn_up_exps", "ffn_gate_exps") for n in opened.tensors if "ffn_up_exps" in n}
        partners |= {gate: up for up, gate in partners.items()}
        tensors = [(n, t.shape, t.type, opened.data(partners.get(n, n))) for n, t in opened.tensors.items()]
        write_gguf(path, opened.fields.values(), tensors)
    return path


# ---------------------------------------------------------------- llama.cpp


@pytest.mark.peer
@pytest.mark.parametrize("name", MERGED)
def test_split_and_merged_models_compute_the_same(zoo: Zoo, llama_bin: Path, tmp_path: Path, name: str) -> None:
    tokens, logits = expected(name)
    files = [zoo(name), tmp_path / "apart.gguf", tmp_path / "again.gguf"]
    split_up_gate(files[0], files[1])
    merge = merge_up_gate(files[1], files[2])
    assert merge.loads_merged[MAINLINE]
    with open_gguf(files[1]) as separate:
        assert not any("ffn_gate_up_exps" in tensor for tensor in separate.tensors)
    assert sha256(files[2]) == sha256(files[0]) != sha256(files[1])
    for file in files:
        assert nmse(Libllama(llama_bin).logits(file, tokens), logits) <= 1e-8


@pytest.mark.peer
@pytest.mark.parametrize("name", MERGED)
def test_up_before_gate_would_be_detected(zoo: Zoo, llama_bin: Path, tmp_path: Path, name: str) -> None:
    tokens, logits = expected(name)
    split_up_gate(zoo(name), tmp_path / "apart.gguf")
    merge_up_gate(exchange(tmp_path / "apart.gguf", tmp_path / "wrong.gguf"), tmp_path / "up-first.gguf")
    assert nmse(Libllama(llama_bin).logits(tmp_path / "up-first.gguf", tokens), logits) > 1e-3


@pytest.mark.peer
@pytest.mark.parametrize("name", EITHER)
def test_some_models_are_loaded_in_either_form(zoo: Zoo, llama_bin: Path, tmp_path: Path, name: str) -> None:
    tokens, logits = expected(name)
    merge = merge_up_gate(zoo(name), tmp_path / "merged.gguf")
    assert merge.changed
    assert merge.loads_merged[MAINLINE]
    assert nmse(Libllama(llama_bin).logits(tmp_path / "merged.gguf", tokens), logits) <= 1e-8


@pytest.mark.peer
@pytest.mark.parametrize("name", SEPARATE)
def test_llama_cpp_refuses_what_the_report_says(zoo: Zoo, llama_bin: Path, tmp_path: Path, name: str) -> None:
    """And takes it again when its experts are apart again."""
    tokens, logits = expected(name)
    merge = merge_up_gate(zoo(name), tmp_path / "merged.gguf")
    assert merge.changed
    assert not merge.refused
    assert not merge.loads_merged[MAINLINE]
    with pytest.raises(LibllamaError, match=r"ffn_(gate|up)_exps\.weight' not found|wrong number of tensors"):
        Libllama(llama_bin).logits(tmp_path / "merged.gguf", tokens)
    split_up_gate(tmp_path / "merged.gguf", tmp_path / "apart.gguf")
    assert nmse(Libllama(llama_bin).logits(tmp_path / "apart.gguf", tokens), logits) <= 1e-8


@pytest.mark.parametrize("name", SCALED)
def test_experts_with_scales_are_not_merged(zoo: Zoo, tmp_path: Path, name: str) -> None:
    with refuses(RecipeError, "QK-E211 ffn_gate_exps.scale"):
        merge_up_gate(zoo(name), tmp_path / "merged.gguf")


# ---------------------------------------------------------------- ik_llama.cpp, which loads merged qwen3moe


@pytest.fixture(scope="module")
def ik(ik_bin: Path) -> Libllama:
    return Libllama(ik_bin.parent / "lib", ik=True)


@pytest.fixture(scope="module")
def chunks(ik: Libllama, tiny_moe: Path, data: Path) -> Ids:
    """Token ids [chunks, 256] of the evaluation text."""
    ids = ik.tokenize(tiny_moe, data / "tiny-moe-evaluation.txt")
    return ids[: 4 * 256].reshape(4, 256)


@pytest.mark.peer
@pytest.mark.parametrize("type_name", ["BF16", "Q4_K_M"])
def test_merged_experts_have_the_perplexity_of_separate_ones(
    ik: Libllama, chunks: Ids, llama_bin: Path, tiny_moe: Path, data: Path, tmp_path: Path, type_name: str
) -> None:
    separate_file, merged = tmp_path / "apart.gguf", tmp_path / "merged.gguf"
    quantize(tiny_moe, separate_file, type_name, QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf"))
    assert dict(merge_up_gate(separate_file, merged).loads_merged) == {MAINLINE: False, IK: True}
    merge_up_gate(exchange(separate_file, tmp_path / "wrong.gguf"), tmp_path / "up-first.gguf")
    separate = ik.logits(separate_file, chunks)
    merged_logits = ik.logits(merged, chunks)
    before, after = perplexity(separate, chunks), perplexity(merged_logits, chunks)
    assert nmse(merged_logits, separate) <= 1e-8
    assert after == pytest.approx(before, rel=1e-5)
    assert 30 < before < 40
    assert perplexity(ik.logits(tmp_path / "up-first.gguf", chunks), chunks) > 5 * before
    with pytest.raises(LibllamaError, match=r"blk\.0\.ffn_gate_exps\.weight' not found"):
        Libllama(llama_bin).logits(merged, chunks[0])


@pytest.mark.peer
def test_merged_experts_generate_as_separate_ones(ik: Libllama, chunks: Ids, tiny_moe: Path, tmp_path: Path) -> None:
    """One token at a time, where other kernels are at work."""
    merge_up_gate(tiny_moe, tmp_path / "merged.gguf")
    separate, merged = (ik.logits(file, chunks[0, :64], batch=1) for file in (tiny_moe, tmp_path / "merged.gguf"))
    assert nmse(merged, separate) <= 1e-8


@pytest.mark.peer
def test_both_runtimes_generate_the_same_text(ik: Libllama, chunks: Ids, llama_bin: Path, tiny_moe: Path) -> None:
    """Else their perplexities would say little."""
    mainline = Libllama(llama_bin).logits(tiny_moe, chunks)
    assert perplexity(mainline, chunks) == pytest.approx(perplexity(ik.logits(tiny_moe, chunks), chunks), rel=2e-3)


@pytest.mark.peer
def test_both_runtimes_have_the_same_ids(chunks: Ids, llama_bin: Path, tiny_moe: Path, data: Path) -> None:
    ids = Libllama(llama_bin).tokenize(tiny_moe, data / "tiny-moe-evaluation.txt")
    assert np.array_equal(ids[: chunks.size], chunks.ravel())
