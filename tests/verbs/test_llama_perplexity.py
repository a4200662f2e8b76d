"""Perplexity and divergence against llama-perplexity itself, on llama.cpp's own logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from peer_cache import program_answer

from libllama import Libllama
from quantkit.cli.kld import chunk_line, statistics_text
from quantkit.errors import FormatError
from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.evaluate.passes import Session
from quantkit.formats.logits import LlamaRows, open_logits
from quantkit.quantize import QuantizeOptions, quantize

F32 = npt.NDArray[np.float32]


class LibllamaModel:
    """llama.cpp's own logits, through ctypes, where an engine would compute them: whole windows, one batch each."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, llama_bin: Path, n_vocab: int = 4096) -> None:
        self.path, self.n_vocab, self.n_ctx_train = path, n_vocab, 256
        self.lib, self.n_ctx = Libllama(llama_bin, threads=1), 0

    @property
    def tokenizer(self) -> Any:
        raise FormatError("none is needed")

    def session(self, n_ctx: int, n_seq: int = 1) -> Session:
        self.n_ctx = n_ctx
        return self

    def decode(
        self,
        tokens: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32] | int = 0,
        outputs: npt.NDArray[np.bool_] | None = None,
        consume: Callable[[int, F32], None] | None = None,
    ) -> F32 | None:
        assert consume is not None
        assert outputs is not None
        windows = tokens.reshape(-1, self.n_ctx)
        logits = self.lib.logits(self.path, windows, batch=self.n_ctx, flash_attn=False, kv="f32")
        consume(0, logits.reshape(-1, self.n_vocab)[outputs])
        return None

    def clear(self, sequence: int | None = None) -> None:
        """Do nothing: every window is a process."""

    def close(self) -> None:
        """Do nothing."""


def llama_perplexity(llama_bin: Path, last: str, *arguments: object, outputs: Sequence[Path] = ()) -> str:
    """Run it so that it computes what Libllama does; return all it printed, up to its ``last`` line."""
    common = ("-t", 1, "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-b", 128, "-ub", 128)
    command = [llama_bin / "llama-perplexity", *arguments, *common]
    output = program_answer(command, outputs, {"LD_LIBRARY_PATH": str(llama_bin)}, last)
    assert not output.code, output.text
    return output.text


@pytest.fixture(scope="module")
def peer(llama_bin: Path, tiny_moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """llama-perplexity's base file of tiny-moe, a Q4_K_M file, and what it prints for both."""
    folder = tmp_path_factory.mktemp("peer")
    base, quantized = folder / "base.bin", folder / "q4.gguf"
    text = data / "tiny-moe-evaluation.txt"
    command = [llama_bin / "llama-quantize", tiny_moe, quantized, "Q4_K_M", "2"]
    assert not program_answer(command, [quantized], {"LD_LIBRARY_PATH": str(llama_bin)}).code
    arguments = ("-m", tiny_moe, "-f", text, "-c", 128, "--chunks", 4, "--save-all-logits", base)
    ppl = llama_perplexity(llama_bin, "Final estimate", *arguments, outputs=[base])
    return {"folder": folder, "base": base, "quantized": quantized, "text": text, "ppl": ppl}


@pytest.mark.peer
def test_base_files_equal_llama_cpps(peer: dict[str, Any], llama_bin: Path, tiny_moe: Path) -> None:
    expected = open_logits(peer["base"])
    path = peer["folder"] / "ours.bin"
    tokens = expected.chunks.tokens.ravel()
    result = perplexity(
        LibllamaModel(tiny_moe, llama_bin), tokens=tokens, n_ctx=128, save_logits=SaveLogits(path, "llama.cpp")
    )
    final = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", peer["ppl"])
    assert final is not None
    assert (f"{result.ppl.value:.4f}", f"{result.ppl.error:.5f}") == final.groups()
    values = re.findall(r"\[\d\](\d+\.\d{4})", peer["ppl"])
    assert [f"{e.value:.4f}" for e in result.running][-len(values) :] == values
    actual = open_logits(path)
    assert np.array_equal(actual.chunks.tokens, expected.chunks.tokens)
    for chunk in range(4):
        a, b = (file.rows(chunk, 0, 63) for file in (actual, expected))
        assert isinstance(a, LlamaRows)
        assert isinstance(b, LlamaRows)
        assert np.array_equal(a.codes, b.codes)
        assert np.array_equal(a.scale, b.scale)
        # numpy's expf and glibc's may differ in the last bit, and so may the sum's logarithm.
        assert np.abs(a.minimum.view(np.int32) - b.minimum.view(np.int32)).max() <= 1
    llama = llama_perplexity(
        llama_bin, "Same top p:", "-m", peer["quantized"], "-c", 128, "--kl-divergence", "--kl-divergence-base", path
    )
    _check_table(llama, LibllamaModel(peer["quantized"], llama_bin), path)


@pytest.mark.peer
def test_the_table_equals_llama_cpps(peer: dict[str, Any], llama_bin: Path) -> None:
    llama = llama_perplexity(
        llama_bin,
        "Same top p:",
        "-m",
        peer["quantized"],
        "-c",
        128,
        "--kl-divergence",
        "--kl-divergence-base",
        peer["base"],
    )
    _check_table(llama, LibllamaModel(peer["quantized"], llama_bin), peer["base"])


def _check_table(llama: str, model: LibllamaModel, base: Path) -> None:
    """Compare every line with llama.cpp's, and every number in it to one in the last digit."""
    lines: list[str] = []
    result = kld(model, base, progress=lambda now: lines.append(chunk_line(now.current, now.sums)))
    actual = [line for line in (*lines, *statistics_text(result.sums).splitlines()) if line]
    assert len(actual) == 4 + 37
    expected = [line.rstrip() for line in llama.splitlines()]
    number = re.compile(r"-?\d+\.\d+")
    for line in actual:
        shape = number.sub("#", re.sub(" +", " ", line))
        digits = number.findall(line)
        candidates = [t for t in expected if number.sub("#", re.sub(" +", " ", t)) == shape]
        assert candidates, line
        assert any(
            all(
                abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(a.split(".")[1]) for a, b in zip(digits, d, strict=True)
            )
            for d in (number.findall(t) for t in candidates)
        ), (line, candidates)
    equal = sum(line in expected for line in actual)
    assert equal >= 37


@pytest.mark.peer
def test_strides_equal_llama_cpps_without_bos(peer: dict[str, Any], llama_bin: Path, tiny_moe: Path) -> None:
    # -c 128 -b 128 with a stride of 64 makes it 160 tokens of context, rounded up to 256.
    llama = llama_perplexity(
        llama_bin, "[3]", "-m", tiny_moe, "-f", peer["text"], "-c", 128, "--ppl-stride", 64, "--chunks", 3
    )
    value = re.findall(r"\[3\](\d+\.\d+)", llama)
    tokens = Libllama(llama_bin, threads=1).tokenize(tiny_moe, peer["text"])
    model = LibllamaModel(tiny_moe, llama_bin)
    result = perplexity(model, tokens=tokens, n_ctx=256, stride=64, chunks=3)
    assert value
    assert result.ppl.value == pytest.approx(float(value[0]), abs=2e-3)


@pytest.mark.peer
def test_a_compact_base_gives_llama_cpps_divergence(peer: dict[str, Any], llama_bin: Path, tiny_moe: Path) -> None:
    tokens = open_logits(peer["base"]).chunks.tokens.ravel()
    quantized = LibllamaModel(peer["quantized"], llama_bin)
    path = peer["folder"] / "compact"
    saved = SaveLogits(path, "compact", top_k=1024)
    perplexity(LibllamaModel(tiny_moe, llama_bin), tokens=tokens, n_ctx=128, save_logits=saved)
    compact, full = kld(quantized, path), kld(quantized, peer["base"])
    mean, reference = compact.sums.kld.mean.value, full.sums.kld.mean.value
    assert abs(mean - reference) < compact.bound
    assert mean == pytest.approx(reference, rel=0.01)
    assert path.stat().st_size < 0.7 * peer["base"].stat().st_size


@pytest.mark.peer
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_the_noise_of_activations_is_llama_cpps(
    tiny_moe: Path, llama_bin: Path, data: Path, tmp_path: Path, name: str
) -> None:
    """A file against its decoded copy: both round activations alike, so the divergences differ by chance alone.

    Another format of activations changes them by a factor of 2 and more. Medians, because a few tokens for which
    rounding changes the experts have most of the mean.
    """
    file, copy, base = (tmp_path / n for n in ("file.gguf", "copy.gguf", "base"))
    quantize(tiny_moe, file, name, QuantizeOptions(pure=True))
    quantize(file, copy, "F32", QuantizeOptions(allow_requantize=True))
    text = (data / "tiny-moe-evaluation.txt").read_text(encoding="utf-8")
    perplexity(copy, text, n_ctx=128, chunks=8, save_logits=SaveLogits(base, "llama.cpp"))
    arguments = ("-m", file, "-c", 128, "--kl-divergence", "--kl-divergence-base", base, "--no-repack")
    match = re.search(r"Median +KLD: +([\d.]+)", llama_perplexity(llama_bin, "Same top p:", *arguments))
    assert match is not None
    klds = np.concatenate(kld(file, base, activations="runtime").sums.klds)
    assert np.median(klds) / float(match[1]) == pytest.approx(1, abs=0.25)
