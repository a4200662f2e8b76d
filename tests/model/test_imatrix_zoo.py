"""Importance matrices of every architecture: no weight without an entry, and llama-imatrix's sums."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_delta_net
import test_indexer
import test_mamba
import test_mla
from peer_cache import answer, peer
from tiny_models import Shapes, ends, write

from guide import step
from quantkit.formats.gguf import Field, ValueType, open_gguf, write_gguf
from quantkit.formats.imatrix import ImatrixEntry, read_imatrix
from quantkit.imatrix import ImatrixOptions, expected_tensors, imatrix
from quantkit.model.arch import ARCHS
from quantkit.model.graph import build_graph
from quantkit.model.observers import observe
from quantkit.model.ops import SumColumns
from zoo import NAMES, ZOO, write_zoo


def renamed(path: Path, name: str, arch: str) -> Path:
    """Write a model of the zoo, without a classifier, under the name of an architecture with the same tensors."""
    with open_gguf(write_zoo(name, path.with_suffix(".zoo"))) as model:
        old = str(model.get("general.architecture"))
        fields = [Field.of("general.architecture", arch)]
        for key, field in model.fields.items():
            if key.startswith(f"{old}."):
                fields.append(replace(field, key=f"{arch}.{key.removeprefix(f'{old}.')}"))
            elif key != "general.architecture":
                fields.append(field)
        tensors = [t for t in model.tensors.values() if t.name != "cls.output.weight"]
        write_gguf(path, fields, [(t.name, t.shape, t.type, model.data(t).tobytes()) for t in tensors])
    return path


def chameleon(path: Path) -> Path:
    """Norms of every head, and after the two parts of a layer."""
    fields = {"block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 4, "swin_norm": True}
    shapes = ends()
    for i in range(2):
        layer: Shapes = {"attn_norm": (64,), "ffn_norm": (64,), "ffn_down": (48, 64)}
        layer |= {f"attn_{name}": (64, 64) for name in ("q", "k", "v", "output")}
        layer |= {f"ffn_{name}": (64, 48) for name in ("gate", "up")}
        layer |= {f"attn_{name}_norm": (16, 4) for name in "qk"}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return write(path, "chameleon", fields, shapes)


#: Models drawn for the architectures that are not in the zoo.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "chameleon": chameleon,
    "deepseek2-absorbed": test_mla.deepseek2,
    "deepseek2-expanded": lambda path: test_mla.deepseek2(path, absorbed=False),
    "deepseek2-ocr": test_mla.ocr,
    "deepseek32": test_indexer.sparse,
    "glm-dsa": lambda path: test_indexer.sparse(path, "glm-dsa"),
    "ernie4_5": lambda path: renamed(path, "smollm3-dense", "ernie4_5"),
    "granitehybrid": test_mamba.hybrid,
    "granitehybrid-moe": lambda path: test_mamba.hybrid(path, n_expert=8),
    "hunyuan-dense": lambda path: renamed(path, "qwen3-dense", "hunyuan-dense"),
    "internlm2": lambda path: renamed(path, "smollm3-dense", "internlm2"),
    "minicpm3": lambda path: test_mla.plain(path, "minicpm3"),
    "mistral4": lambda path: test_mla.deepseek2(path, arch="mistral4"),
    "plm": lambda path: test_mla.plain(path, "plm"),
    "qwen35": lambda path: test_delta_net.qwen(path, "qwen35"),
    "qwen3next-ssm_in": lambda path: test_delta_net.qwen(path, "qwen3next", ssm_in=True),
    "t5": lambda path: renamed(path, "t5encoder-dense", "t5"),
    "xverse": lambda path: renamed(path, "smollm3-dense", "xverse"),
}
#: llama.cpp crashes on a vocabulary without Chameleon's 8192 tokens of pictures.
DIES = {"chameleon"}
#: llama.cpp's sums of two sequences in a batch are others than of one after the other, which are ours.
ONE_AT_A_TIME = {"plamo2-dense"}
#: Read by llama.cpp and never used; they get the entry of a weight with the same input (collect.py).
NEVER_MULTIPLIED = {"qwen3next-moe": {"blk.0.ssm_in.weight"}}


def headers(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from ((name, ZOO / "headers" / f"{name}.head") for name in NAMES)
    yield from ((name, write(folder / f"{name}.gguf")) for name, write in WRITERS.items())


def test_every_quantizable_weight_of_every_architecture_gets_an_entry(tmp_path: Path) -> None:
    archs = set()
    for name, path in headers(tmp_path):
        with open_gguf(path, header_only=True) as source:
            arch = str(source.get("general.architecture"))
            graph = observe(build_graph(source), process_output=True)
            names = expected_tensors(source.tensors.values(), arch, process_output=True)
        entries = {entry for op in graph.ops if isinstance(op, SumColumns) for entry in op.names}
        missing = {t.name for t in names} - entries
        assert missing == NEVER_MULTIPLIED.get(name, set()), name
        archs.add(arch)
    assert archs == set(ARCHS), f"{archs ^ set(ARCHS)}: {step('Add an architecture', 3)}, or a model in DRAWN"


# ---------------------------------------------------------------- beside llama-imatrix

N_CTX, N_CHUNKS = 32, 3
TEXT = "".join(chr(33 + int(c)) for c in np.random.default_rng(3).integers(0, 90, N_CTX * N_CHUNKS + 5))
TOLERANCE = 1e-3


def with_tokenizer(source: Path, target: Path) -> Path:
    """Write the model with a tokenizer of 128 tokens: a character each."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(125))]
    kinds = [2, 3, 3, *[1] * 125]
    scores = [0.0] * 3 + [-1.0 - i for i in range(125)]
    with open_gguf(source) as model:
        fields = [f for key, f in model.fields.items() if not key.startswith("tokenizer.")]
        fields += [
            Field.of("tokenizer.ggml.model", "llama"),
            Field.of("tokenizer.ggml.tokens", tokens, ValueType.ARRAY, ValueType.STRING),
            Field.of("tokenizer.ggml.scores", scores, ValueType.ARRAY, ValueType.FLOAT32),
            Field.of("tokenizer.ggml.token_type", kinds, ValueType.ARRAY, ValueType.INT32),
            Field.of("tokenizer.ggml.bos_token_id", 1, ValueType.UINT32),
            Field.of("tokenizer.ggml.eos_token_id", 2, ValueType.UINT32),
            Field.of("tokenizer.ggml.unknown_token_id", 0, ValueType.UINT32),
            Field.of("tokenizer.ggml.add_space_prefix", False),
        ]
        data = [(t.name, t.shape, t.type, model.data(t)) for t in model.tensors.values()]
        write_gguf(target, fields, data)
    return target


def is_encoder(name: str) -> bool:
    """Return whether llama-imatrix, which computes a perplexity, ends with an error and without a message."""
    arch = name.rpartition("-")[0] or name
    return arch in ARCHS and ARCHS[arch].encoder


@pytest.mark.peer
@pytest.mark.parametrize("name", [name for name in (*NAMES, *WRITERS) if name not in DIES and not is_encoder(name)])
def test_sums_are_those_of_llama_imatrix(
    name: str, zoo: Callable[[str], Path], tmp_path: Path, llama_bin: Path
) -> None:
    plain = WRITERS[name](tmp_path / "plain.gguf") if name in WRITERS else zoo(name)
    model, text = with_tokenizer(plain, tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text(TEXT)
    n_batch = N_CTX if name in ONE_AT_A_TIME else 2 * N_CTX
    options = [
        "--process-output",
        "-c",
        str(N_CTX),
        "-b",
        str(n_batch),
        "-t",
        "2",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-fa",
        "off",
    ]
    out = tmp_path / "theirs.gguf"

    def run_peer() -> bytes:
        program = [llama_bin / "llama-imatrix", "-m", model, "-f", text, "-o", out]
        process = subprocess.run([*program, *options], capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr[-2000:]
        return out.read_bytes()

    out.write_bytes(answer(run_peer, peer(llama_bin), "llama-imatrix", options, model, text))
    expected = read_imatrix(out)
    settings = ImatrixOptions(n_ctx=N_CTX, n_batch=n_batch, process_output=True)
    actual = imatrix(model, [text], tmp_path / "ours.gguf", options=settings, kv_type="f32", threads=2)
    assert actual.imatrix is not None
    # Beside its entries there are only other names of the same data, inputs of latent attention's other form, and
    # those of weights outside of all layers, and RWKV's small ones, which llama.cpp's quantizer leaves alone.
    extra = actual.imatrix.entries.keys() - expected.entries.keys()
    assert not expected.entries.keys() - actual.imatrix.entries.keys()
    assert {entry.removesuffix(".weight").rpartition(".")[2] for entry in extra} <= EXTRA_KINDS
    for entry, peer_entry in expected.entries.items():
        agree(entry, actual.imatrix.entries[entry], peer_entry, SCALED.get((name, entry), 1))


#: MiniCPM 3: llama.cpp scales what the output matrix multiplies, here the logits are; encoders see no difference.
SCALED = {("minicpm3", "output.weight"): 256 / 64}
EXTRA_KINDS = {"attn_k_b", "attn_v_b", "attn_kv_b", "ssm_in", "ffn_gate_exps", "ffn_up_exps", "per_layer_model_proj"}
EXTRA_KINDS |= {"altup_proj", "altup_unembd_proj", "output_hc_fn", "time_mix_w2"}


def agree(name: str, actual: ImatrixEntry, expected: ImatrixEntry, scale: float) -> None:
    assert np.array_equal(actual.counts, expected.counts), name
    a, b = actual.sums.astype(np.float64) * scale**2, expected.sums.astype(np.float64)
    assert a.shape == b.shape, name
    assert np.sqrt(np.square(a - b).sum() / np.square(b).sum()) < TOLERANCE, name
    assert expected.in_sum is not None
    assert actual.in_sum is not None
    assert np.abs(scale * actual.in_sum - expected.in_sum).max() <= TOLERANCE * np.sqrt(
        b.max() * expected.counts.max()
    ), name
