"""What quantize writes loads and computes in both runtimes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer_cache import answer, peer, program_answer

import damage
import sparse_models
from libllama import Libllama
from quantkit.merge import merge_up_gate
from quantkit.quantize import QuantizeOptions, quantize
from verdicts import libraries, verdicts

#: Perplexity of the BF16 file on tests/data/tiny-moe-evaluation.txt; quantized files stay near it.
TOLERANCE = 0.15

_IK = """
import sys
from ik_llama_cpp import IkLlama
model = IkLlama(sys.argv[1], n_ctx=256, flash_attn=False, verbose=False, n_threads=2)
print("TOKENS", *model.generate(model.tokenize("def main():\\n    import"), max_tokens=8))
"""


def perplexity(llama_bin: Path, model: Path, text: Path, *arguments: str) -> float:
    command = [
        llama_bin / "llama-perplexity",
        "-m",
        model,
        "-f",
        text,
        "-c",
        "256",
        "-t",
        "2",
        "--chunks",
        "4",
        *arguments,
    ]
    output = program_answer(command, last="PPL = ")
    match = re.search(r"PPL = (\S+)", output.text)
    assert not output.code
    assert match is not None
    return float(match[1])


def ik_tokens(ik_bin: Path, model: Path) -> list[str]:

    def generate() -> bytes:
        return subprocess.run([sys.executable, "-c", _IK, model], capture_output=True, check=True).stdout

    match = re.search(r"TOKENS (.*)", answer(generate, peer(ik_bin), peer(ik_bin.parent / "lib"), _IK, model).decode())
    assert match is not None
    return match[1].split()


@pytest.fixture(scope="module")
def baseline(llama_bin: Path, tiny_moe: Path, data: Path) -> float:
    return perplexity(llama_bin, tiny_moe, data / "tiny-moe-evaluation.txt")


@pytest.mark.peer
@pytest.mark.parametrize("type_name", ["Q4_K_M", "IQ4_XS", "MXFP4_MOE"])
def test_llama_cpp_computes_with_the_file(
    llama_bin: Path, baseline: float, data: Path, tiny_moe: Path, tmp_path: Path, type_name: str
) -> None:
    options = QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf", ffn_gate_inp_type="q8_0")
    quantize(tiny_moe, tmp_path / "o.gguf", type_name, options)
    actual = perplexity(llama_bin, tmp_path / "o.gguf", data / "tiny-moe-evaluation.txt")
    assert actual == pytest.approx(baseline, rel=TOLERANCE)


@pytest.mark.peer
@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q8_0", "IQ4_XS"])
def test_ik_llama_cpp_generates_with_the_file(
    ik_bin: Path, data: Path, tiny_moe: Path, tmp_path: Path, type_name: str
) -> None:
    options = QuantizeOptions(imatrix=data / "tiny-moe-imatrix.gguf", ffn_gate_inp_type="q8_0")
    quantize(tiny_moe, tmp_path / "o.gguf", type_name, options)
    assert len(ik_tokens(ik_bin, tmp_path / "o.gguf")) == 8


@pytest.mark.peer
def test_a_requantized_dense_model_loads(llama_bin: Path, smollm2: Path, data: Path, tmp_path: Path) -> None:
    quantize(smollm2, tmp_path / "o.gguf", "Q4_K_M", QuantizeOptions(allow_requantize=True))
    text = data / "tiny-moe-evaluation.txt"
    before, after = (perplexity(llama_bin, m, text, "--chunks", "1") for m in (smollm2, tmp_path / "o.gguf"))
    assert after == pytest.approx(before, rel=TOLERANCE)


@pytest.mark.peer
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M"])
def test_merged_experts_load_as_reported(
    ik_bin: Path, llama_bin: Path, data: Path, tiny_moe: Path, tmp_path: Path, type_name: str
) -> None:
    separate, merged = tmp_path / "apart.gguf", tmp_path / "merged.gguf"
    quantize(tiny_moe, separate, type_name)
    merge = merge_up_gate(separate, merged)
    assert list(merge.loads_merged.values()) == [False, True]
    assert ik_tokens(ik_bin, merged) == ik_tokens(ik_bin, separate)
    command = [llama_bin / "llama-perplexity", "-m", merged, "-f", data / "tiny-moe-evaluation.txt", "-c", "256"]
    assert program_answer(command).code != 0


@pytest.fixture(scope="session")
def loaders(llama_bin: Path, ik_lib: Path) -> dict[str, Libllama]:
    return libraries()


@pytest.mark.peer
@pytest.mark.parametrize("seed", [None, 0], ids=["whole", "damaged"])
@pytest.mark.parametrize("name", sparse_models.NAMES)
def test_a_model_loads_as_predicted(loaders: dict[str, Libllama], name: str, seed: int | None) -> None:
    model, label = sparse_models.model(name), "whole"
    if seed is not None:
        model, _, label = damage.damage(model, seed)
    judged = verdicts(model, loaders)
    assert {runtime: verdict.loads for runtime, (verdict, _) in judged.items()} == {
        runtime: verdict.loads for runtime, (_, verdict) in judged.items()
    }, f"{label}: {judged}"
