"""A model with all tensors that llama.cpp's loader takes gives llama.cpp's logits, or is refused with the reason; one
that lacks a tensor, or has one that nothing uses, is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from arch_models import BOUND, MODELS, UNKNOWN, compare, label_of, sized
from refusals import refuses

from guide import step
from libllama import Libllama, nmse
from quantkit.errors import FormatError, TypeNotSupported
from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, open_gguf, write_gguf
from quantkit.model.arch import ARCHS
from quantkit.model.builder import kind_of
from quantkit.model.engine import load
from quantkit.model.graph import ATTENTION, build_graph
from quantkit.types import BY_NAME
from zoo import NAMES, ZOO, expected, write_hollow_zoo

#: Architectures that llama.cpp's test, and so arch_models.py, leaves out, and why.
NOT_DESCRIBED = {
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "sizes follow from each other: the zoo has some"),
    **dict.fromkeys(("chameleon", "deepseek2-ocr", "gemma4", "plm"), "llama.cpp's test leaves them out"),
}
guide_step = partial(step, "Add an architecture")


def test_attention_rows_are_present() -> None:
    """No block is without a row, no row without its block."""
    kinds = {arch.attention for arch in ARCHS.values()}
    assert kinds == ATTENTION.keys(), f"{kinds ^ ATTENTION.keys()}: {guide_step(2)}"


def test_every_architecture_is_compared_with_all_tensors() -> None:
    missing = ARCHS.keys() - {name for name, _ in MODELS}
    assert missing == NOT_DESCRIBED.keys(), f"{missing ^ NOT_DESCRIBED.keys()}: {guide_step(6)}"


def test_every_model_of_the_zoo_has_an_architecture() -> None:
    """optional.json lists the tensors that llama.cpp loads without."""
    assert set(NAMES) == optional().keys(), f"{set(NAMES) ^ optional().keys()}: {guide_step(5)}"
    for name in NAMES:
        with open_gguf(ZOO / "headers" / f"{name}.head", header_only=True) as file:
            assert file.get("general.architecture") in ARCHS, f"{name}: {guide_step(1)}"


#: What llama.cpp takes and combines in a way of its own, or in none: the tensors that the error names.
REFUSED = {
    "mpt-dense": r"attn_q_norm",  # it draws norms of k alone, of which llama.cpp makes nothing
    "refact-moe": r"ffn_gate_inp",  # its graph has no experts
    "hy_v3-moe": r"blk\.0\.ffn_gate\.weight",  # dense layers beside experts
    "mimo2-moe": r"blk\.0\.ffn_gate\.weight",
    "step35-moe": r"blk\.0\.ffn_gate\.weight",
}


@pytest.mark.peer
@pytest.mark.parametrize(("arch", "moe"), MODELS, ids=[label_of(*model) for model in MODELS])
def test_all_tensors_of_the_loader_are_used_or_refused(llama_bin: Path, tmp_path: Path, arch: str, moe: bool) -> None:
    error, reason = compare(Libllama(llama_bin), arch, moe, sized(arch, 1), tmp_path)
    assert error <= BOUND
    expected_reason = REFUSED.get(label_of(arch, moe), UNKNOWN if arch not in ARCHS else "")
    assert re.search(expected_reason, reason) if expected_reason else not reason


@pytest.mark.peer
def test_layers_between_those_with_experts_are_dense(llama_bin: Path, tmp_path: Path) -> None:
    """The loader gives each layer of ERNIE 4.5 experts, its graph every second one: the rest would not be used."""
    error, reason = compare(Libllama(llama_bin), "ernie4_5-moe", True, sized("ernie4_5-moe", 3), tmp_path)
    assert error == 0
    assert "blk.2.ffn_gate_inp.weight" in reason


# ---------------------------------------------------------------- missing, not used


class ChangedFile:
    """A model with other tensors: without those of a kind, or with more."""

    def __init__(
        self,
        source: GGUFFile,
        without: Callable[[str], bool] = lambda name: False,
        extra: Mapping[str, TensorInfo] = {},
    ) -> None:
        self.source = source
        self.tensors = {name: info for name, info in source.tensors.items() if not without(name)} | dict(extra)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, shape, BY_NAME["F32"], 4 * shape[0], 0, 0)


@cache
def optional() -> dict[str, list[str]]:
    """Return, by model, the kinds of tensors without which llama.cpp b11434 loads it (scripts/check_archs.py)."""
    kinds: dict[str, list[str]] = json.loads((ZOO / "optional.json").read_text())
    return kinds


#: llama.cpp needs them and here nothing is computed with them, or another tensor stands in.
NOT_ASKED = {
    ("gemma4-dense", "attn_v.weight"),
    *(("minimax-m3-moe", f"indexer.{name}.weight") for name in ("q_proj", "k_proj", "q_norm", "k_norm")),
}
#: In place of these there can be others, which are then said to be missing.
ALTERNATIVES = ("attn_qkv", "ffn_gate_up_exps", "time_mix_lerp_fused", "pre_ffw_norm_2", "layer_output_norm")
#: Without these a layer of Deci is another.
OF_DECI = ("attn_norm.weight", "ffn_norm.weight")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_required_tensor_is_refused(tmp_path: Path, name: str) -> None:
    with open_gguf(write_hollow_zoo(name, tmp_path / "z.gguf")) as source:
        kinds = {kind_of(tensor) for tensor in source.tensors}
        for kind in sorted(kinds - set(optional()[name])):
            if (name, kind) in NOT_ASKED or kind.endswith("scale"):
                continue
            with pytest.raises((FormatError, TypeNotSupported)) as error:
                build_graph(ChangedFile(source, lambda tensor, kind=kind: kind_of(tensor) == kind))  # type: ignore[arg-type,misc]
            assert (
                kind in str(error.value) or kind.startswith(ALTERNATIVES) or (name == "deci-dense" and kind in OF_DECI)
            )


@pytest.mark.parametrize("kind", ["attn_norm.weight", "ffn_norm.weight", "ffn_gate.weight", "attn_output.weight"])
def test_one_missing_tensor_is_named(tmp_path: Path, kind: str) -> None:
    with open_gguf(write_hollow_zoo("llama-dense", tmp_path / "z.gguf")) as source:
        missing = f"blk.1.{kind}"
        with refuses(FormatError, "QK-E105", missing):
            build_graph(ChangedFile(source, lambda tensor: tensor == missing))  # type: ignore[arg-type]


def test_all_missing_tensors_are_counted(tmp_path: Path) -> None:
    """Norms, q, k, v, output, gate, up and down of a layer, and two more; scales and biases are optional."""
    prefixes = ("blk.1.", "token_embd", "output_norm")
    with (
        open_gguf(write_hollow_zoo("llama-dense", tmp_path / "z.gguf")) as source,
        refuses(FormatError, "QK-E105 token_embd.weight blk.1 11"),
    ):
        build_graph(ChangedFile(source, lambda name: name.startswith(prefixes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gemma-dense", "rope_factors_long.weight.old"),
        ("mamba-dense", "rope_freqs.weight"),
        ("llama-dense", "blk.99.attn_norm.weight"),
        ("llama-dense", "blk.0.attn_q_a.scale"),
        ("llama-dense", "blk.0.ffn_nrom.weight"),
        ("llama-dense", "blk.1.nextn.eh_proj.weight"),
        ("llama-dense", "cls.weight"),
        ("gemma4-dense", "blk.0.attn_output.bias"),
    ],
)
def test_an_unused_tensor_is_named(tmp_path: Path, model: str, name: str) -> None:
    with open_gguf(write_hollow_zoo(model, tmp_path / "z.gguf")) as source, pytest.raises(TypeNotSupported) as error:
        build_graph(ChangedFile(source, extra={name: info(name, 64)}))  # type: ignore[arg-type]
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dream-dense", "output.bias"),
        ("qwen2vl-dense", "output.bias"),
        ("mimo2-moe", "blk.0.attn_q.bias"),
        ("falcon-h1-dense", "blk.0.attn_output.bias"),
        ("llada-dense", "blk.1.ffn_up.bias"),
        ("apertus-dense", "blk.0.attn_k_norm.bias"),
    ],
)
def test_tensors_unused_by_llama_cpp_are_ignored_with_a_note(zoo: Callable[[str], Path], model: str, name: str) -> None:
    tokens, logits = expected(model)

    def wrap(source: GGUFFile) -> Any:
        return ChangedFile(source, extra={name: info(name, 128)})

    with load(zoo(model), kv_type="f32", threads=2, wrap=wrap) as opened:
        assert nmse(opened.forward(tokens), logits) <= BOUND
        assert any(name in note for note in opened.notes)


def test_a_companion_file_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    fields = [Field.of("general.architecture", "clip"), Field.of("general.type", "mmproj")]
    write_gguf(path, fields, [("v.blk.0.attn_q.weight", (4, 4), BY_NAME["F32"], bytes(64))])
    with refuses(FormatError, "QK-E306 mmproj.gguf"):
        load(path)
