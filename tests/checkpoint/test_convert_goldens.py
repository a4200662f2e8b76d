"""Every checkpoint is converted to the bytes of convert_hf_to_gguf.py, and runs as in transformers."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses

import checkpoints
from exact_gelu import exact_gelu, exact_tanh_gelu
from gguf_digests import differences, digests
from libllama import Libllama, LibllamaError, nmse
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.model.arch import ARCHS, Arch
from quantkit.model.backends import reference
from quantkit.model.builder import Builder
from quantkit.model.engine import load
from quantkit.model.ops import RopeConfig, Value
from quantkit.model.placement import Placement

pytestmark = pytest.mark.usefixtures("services_in_process")

DATA = Path(__file__).parents[1] / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "convert-sha256.json").read_text())
LOGITS = np.load(DATA / "convert-logits.npz")
#: Rows of an encoder's tokens.
EMBEDDINGS = np.load(DATA / "convert-embeddings.npz")
#: llama.cpp, and so the engine, computes something else of these files: its converter keeps the unused positions of
#: CamemBERT, without attention.causal llama-embed's tokens do not see later ones, and the rows of NeoBERT's qkv are
#: taken for those of all heads' q, k and v. A note of the conversion says so.
DIFFERENT_ROWS = {"camembert", "llama-embed", "neobert"}
#: llama.cpp crashes if no layer lacks a window.
CRASHES = {"gemma-embedding", "gemma-embedding-dense"}
#: Encoders without a key for the epsilon of their norms, which neither the engine nor llama.cpp loads.
WITHOUT_EPSILON = ("modernbert-classifier",)
BOUND = 1e-5
#: Converted as the reference does it, and refused by the engine as by llama.cpp: a bias of attention is missing.
INCOMPLETE = {"pangu"}
#: llama.cpp does not load its converter's output for these.
REFUSED = {
    "chameleon": "ggml_nelements",  # it crashes on a vocabulary without its 8192 tokens of pictures
    "command-r": "wrong number of tensors",  # norms of q and k, in fewer than 64 layers
    "gpt2": "wrong shape",  # n_positions and n_ctx differ
    "exaone": "layer_norm_rms_epsilon",  # config.json says layer_norm_epsilon, and so does the file
    "pangu": "attn_output.bias",  # there is none
    "deci": "wrong shape",  # more embeddings than pieces
    "deci-7b": "wrong shape",
    "internlm2": "wrong shape",  # an added token more than embeddings
    "deepseek-v2": "q_lora_rank",  # it has none, and is no DeepSeek 2 Lite by its layers
    "falcon-mamba": "wrong shape",  # as many tokens as its vocabulary is filled up to, fewer embeddings
    "nemotron-h": "wrong shape",  # the same
    "nemotron-h-moe": "layer_norm_epsilon",  # its configuration has the epsilon under another name
    "olmoe": "wrong shape",  # fewer heads of keys than of queries
    "qwen3.5": "n_expert_used_max",  # no experts
}
#: llama.cpp, and so the engine, computes something else of its converter's file than transformers does: Mamba's outputs
#: are normed by groups, and the converter permutes whole heads where only a part of them rotates. With one norm and
#: rows as they are stored, the logits agree to 5e-12. So are Mamba 2's. Mellum's windowed layers turn by the base of
#: the others, and HY V4 turns neighbouring columns, where transformers pairs them over half a head. Baichuan of other
#: than 32 layers does not turn columns at all.
DIFFERENT_LOGITS = {"baichuan", "bamba", "hy-v4", "mamba2", "mellum"}
#: llama.cpp differs by 1e-7 from itself, with another batch: 22 layers without a residual sum.
TOLERANCES = {"gemma3n-deep": 1e-6}
SPLITS: dict[str, dict[str, Any]] = {
    "bf16 by size": {"split_max_size": "2M"},
    "bf16 by tensors": {"split_max_tensors": 10},
    "bf16 by tensors-after-metadata": {"split_max_tensors": 10, "no_tensor_first_split": True},
}


def options_of(description: checkpoints.Description) -> ConvertOptions:
    """Return the options that a checkpoint was converted with by the reference."""
    return ConvertOptions(**description.convert_keywords())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkpoint, drawn once for all tests of it: pytest runs those together."""
    folder = tmp_path_factory.mktemp("checkpoint")
    yield checkpoints.write_checkpoint(request.param, folder)
    shutil.rmtree(folder)  # pytest would keep gigabytes of them


@pytest.fixture(scope="module")
def in_f32(checkpoint: Path) -> Callable[[], Path]:
    """Return a function that gives the checkpoint in F32, converted at the first call."""

    @cache
    def f32_file() -> Path:
        options = replace(options_of(checkpoints.describe(checkpoint.name)), outtype="f32")
        return convert(checkpoint, checkpoint.parent / "f32.gguf", None, options).paths[0]

    return f32_file


#: Its experts stay the blocks they are (test_checkpoint_quantized.py); the reference, which cannot read it, has floats.
BLOCKS = "kimi-k2-ct-mxfp4"
FLOATS = [name for name in EXPECTED if name != BLOCKS]


def of_each(names: Collection[str]) -> pytest.MarkDecorator:
    """Give a test every checkpoint: of the module's scope, so that pytest runs what shares one together."""
    pairs = [(name, name) for name in names]
    return pytest.mark.parametrize(
        ("name", "checkpoint"), pairs, indirect=["checkpoint"], ids=list(names), scope="module"
    )


def expected_files(name: str) -> dict[str, Any]:
    """Return the digests of the reference's files of a checkpoint, by output type."""
    return {outtype: files for outtype, files in EXPECTED[name].items() if not isinstance(files, str)}


@of_each(FLOATS)
def test_the_bytes_are_the_references(name: str, checkpoint: Path, in_f32: Callable[[], Path], tmp_path: Path) -> None:
    assert checkpoints.digest(checkpoint) == EXPECTED[name]["checkpoint"], (
        "another checkpoint than the reference converted"
    )
    description, out = checkpoints.describe(name), tmp_path / "out.gguf"
    options, wrong = options_of(description), {}
    for outtype, expected in expected_files(name).items():
        if isinstance(expected, dict):
            if outtype != "f32":
                convert(checkpoint, out, None, replace(options, outtype=outtype), overwrite=True)
            path = in_f32() if outtype == "f32" else out
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected["sha256"]:
                with open_gguf(path) as file:
                    wrong[outtype] = differences(expected, digests(path), list(file.tensors))
        else:
            paths = convert(
                checkpoint, tmp_path / "split.gguf", None, replace(options, outtype="bf16", **SPLITS[outtype])
            ).paths
            if [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] != expected:
                wrong[outtype] = (
                    f"{len(paths)} parts, not {len(expected)}" if len(paths) != len(expected) else "parts differ"
                )
            for path in paths:
                path.unlink()
    out.unlink(missing_ok=True)
    assert {outtype: text for outtype, text in wrong.items() if not only_exponentials(text)} == {}


@of_each(EXPECTED)
def test_only_settings_without_a_key_are_reported_as_lost(name: str, checkpoint: Path, tmp_path: Path) -> None:
    notes = plan_convert(checkpoint, tmp_path / "x.gguf", None, options_of(checkpoints.describe(name))).notes
    assert checkpoints.settings_in(notes) == checkpoints.OMISSIONS.get(name, set())
    assert not any("no layer has" in note for note in notes)


@pytest.mark.parametrize("checkpoint", [BLOCKS], indirect=True)
def test_with_kept_blocks_the_other_tensors_equal_the_references(checkpoint: Path, in_f32: Callable[[], Path]) -> None:
    assert checkpoints.digest(checkpoint) == EXPECTED[BLOCKS]["checkpoint"]
    expected = EXPECTED[BLOCKS]["f32"]["tensors"]
    sums = {expected[i : i + 8] for i in range(0, len(expected), 8)}
    with open_gguf(in_f32()) as file:
        data = {t.name: file.data(t).tobytes() for t in file.tensors.values()}
        blocks = {t.name for t in file.tensors.values() if t.type.name == "MXFP4"}
    assert len(data) == len(expected) // 8
    differences = {name for name, raw in data.items() if f"{zlib.crc32(raw + bytes(-len(raw) % 32)):08x}" not in sums}
    assert differences == blocks
    assert blocks == {f"blk.{i}.ffn_{kind}_exps.weight" for i in (1, 2) for kind in ("down", "gate", "up")}


def only_exponentials(text: str) -> bool:
    """Whether two files differ in tensors alone that are made by exp, whose last bit depends on torch's machine."""
    return all(part.endswith(".ssm_a differs") for part in text.split("; "))


@of_each(LOGITS)
def test_the_logits_are_those_of_transformers(name: str, checkpoint: Path, in_f32: Callable[[], Path]) -> None:
    path = in_f32()
    if name in INCOMPLETE:
        with pytest.raises(FormatError):
            load(path)
        return
    assert (nmse(last_logits(path), LOGITS[name]) <= BOUND) == (name not in DIFFERENT_LOGITS)


@pytest.mark.peer
@of_each(LOGITS)
def test_the_logits_are_those_of_llama_cpp(
    name: str, checkpoint: Path, in_f32: Callable[[], Path], llama_bin: Path
) -> None:
    path = in_f32()
    tokens = np.array(checkpoints.PROMPT, np.int32)
    if name in REFUSED:
        with pytest.raises(LibllamaError, match=REFUSED[name]):
            Libllama(llama_bin).logits(path, tokens)
        return
    with load(path, n_ctx=512, kv_type="f32") as model:
        assert nmse(model.forward(tokens), Libllama(llama_bin).logits(path, tokens)) <= TOLERANCES.get(name, 1e-8)


def relative_error(actual: Any, expected: Any) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@of_each(EMBEDDINGS)
def test_rows_of_encoders_are_those_of_transformers(
    name: str, checkpoint: Path, in_f32: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml takes GELU by the tanh and rounds it to f16; with transformers' own function, the rows are the same."""
    path, expected = in_f32(), EMBEDDINGS[name]
    assert (nmse(rows_of(path, "CPU"), expected) <= BOUND) == (name not in DIFFERENT_ROWS)
    if name in DIFFERENT_ROWS:
        return
    tanh = checkpoints.describe(name).config["model_type"] in ("t5", "mt5", "umt5", "gemma3_text")
    monkeypatch.setitem(reference._ACTIVATIONS, "gelu", exact_tanh_gelu if tanh else exact_gelu)
    assert relative_error(rows_of(path, "REFERENCE"), expected) <= 1e-5


@pytest.mark.peer
@of_each([name for name in EMBEDDINGS if name not in CRASHES])
def test_rows_of_encoders_are_those_of_llama_cpp(
    name: str, checkpoint: Path, in_f32: Callable[[], Path], llama_bin: Path
) -> None:
    path = in_f32()
    assert nmse(rows_of(path, "CPU"), Libllama(llama_bin).embeddings(path, checkpoints.PROMPT)) <= 2e-8


@of_each(sorted(DIFFERENT_ROWS | {"nomic-bert-moe"}))
def test_encoders_with_different_rows_are_no_strict_conversion(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Also Nomic's, whose rows lack the bias of experts."""
    options = replace(options_of(checkpoints.describe(name)), strict=True)
    with refuses(TypeNotSupported, "QK-E305", *checkpoints.OMISSIONS[name]):
        plan_convert(checkpoint, tmp_path / "x.gguf", None, options)


@of_each(["neobert"])
def test_neobert_with_reordered_rows_is_that_of_its_class(
    name: str, checkpoint: Path, in_f32: Callable[[], Path], tmp_path: Path
) -> None:
    """The order of the rows of qkv is the only difference."""
    path = tmp_path / "reordered.gguf"
    shutil.copyfile(in_f32(), path)
    with open_gguf(path) as file:
        offsets = [tensor.offset for tensor in file.tensors.values() if "attn_qkv" in tensor.name]
    assert len(offsets) == 3
    for offset in offsets:
        rows = np.memmap(path, np.float32, "r+", offset, (4, 3, 16, 64))  # heads, q k v, rows of a head, columns
        rows[:] = rows.swapaxes(0, 1).copy().reshape(rows.shape)
        rows.flush()
    assert relative_error(rows_of(path, "REFERENCE"), EMBEDDINGS[name]) <= 1e-5


@of_each(WITHOUT_EPSILON)
def test_an_encoder_without_epsilon_is_refused(name: str, checkpoint: Path, in_f32: Callable[[], Path]) -> None:
    with refuses(FormatError, "QK-E123", "modern-bert.attention.layer_norm_epsilon"):
        load(in_f32())


def rows_of(path: Path, device: str) -> Any:
    """Return the rows of an encoder's tokens on a device."""
    placement = Placement(gpu_layers=99, rules=((".*", device),), accelerators=(device,))
    with load(path, n_ctx=512, kv_type="f32", placement=placement) as model:
        return model.forward(np.array(checkpoints.PROMPT, np.int32))


def last_logits(path: Path) -> Any:
    """Return the reference backend's logits after the last tokens of the prompt."""
    placement = Placement(gpu_layers=99, rules=((".*", "REFERENCE"),), accelerators=("REFERENCE",))
    with load(path, n_ctx=512, kv_type="f32", placement=placement) as model:
        return model.forward(np.array(checkpoints.PROMPT, np.int32))[-4:]


@pytest.mark.parametrize("checkpoint", ["gpt-oss"], indirect=True)
def test_gpt_oss_differs_only_by_rounded_yarn_dimensions(
    checkpoint: Path, in_f32: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its yarn goes between dimensions that are not integers (``truncate`` false); ggml's always are, and GGUF has no
    key for it."""

    def between(c: RopeConfig) -> tuple[float, float]:
        low, high = (math.log(c.n_ctx_orig / (beta * 2 * math.pi)) for beta in (c.beta_fast, c.beta_slow))
        scale = c.n_rot / (2 * math.log(c.freq_base))
        return max(0.0, scale * low), min(c.n_rot - 1.0, scale * high)

    path = in_f32()
    assert nmse(last_logits(path), LOGITS["gpt-oss"]) > 1e-6
    monkeypatch.setattr(reference, "_yarn_range", between)
    assert nmse(last_logits(path), LOGITS["gpt-oss"]) <= 1e-10


@pytest.mark.parametrize("checkpoint", ["mamba2"], indirect=True)
def test_mamba2_differs_only_by_its_norm(
    checkpoint: Path, in_f32: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers norms the whole row; llama.cpp norms groups, as mamba_ssm does, whose models these are."""
    norm = Builder.norm

    def of_rows(b: Builder, x: Value, name: str, *, group: int = 0, **options: Any) -> Value:
        return norm(b, x, name, group=0 if name == "ssm_norm" else group, **options)

    monkeypatch.setattr(Builder, "norm", of_rows)
    assert nmse(last_logits(in_f32()), LOGITS["mamba2"]) <= 1e-10


def with_its_own_base(row: Arch) -> Arch:
    assert row.window is not None
    return replace(row, window=replace(row.window, base_key=True))


@pytest.mark.parametrize(
    ("checkpoint", "name", "arch", "change"),
    [
        ("mellum", "mellum", "mellum", with_its_own_base),  # llama.cpp passes over rope.freq_base_swa
        ("baichuan", "baichuan", "baichuan", lambda row: replace(row, rope_rules=replace(row.rope_rules, n_layers=0))),
        ("hy-v4", "hy-v4", "hy_v4", lambda row: replace(row, rope="neox", indexer="neox")),
    ],
    indirect=["checkpoint"],
)
def test_a_known_difference_is_a_single_number(
    checkpoint: Path,
    name: str,
    arch: str,
    change: Callable[[Arch], Arch],
    in_f32: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ARCHS, arch, change(ARCHS[arch]))
    assert nmse(last_logits(in_f32()), LOGITS[name]) <= 1e-10
