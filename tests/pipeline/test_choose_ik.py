"""Which type each tensor gets by ik_llama.cpp's rules: equal to its llama-quantize's choice."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from header_models import DENSE, FUSED, MLA, MOE, SHARED, Tensor, build_model, write_sparse
from peer_cache import answer, file_or_word, header, peer
from refusals import refuses

from conftest import DATA
from quantkit.errors import TypeNotSupported
from quantkit.pipeline import recipe, type_rules_ik, type_rules_llama
from quantkit.pipeline.choose import Choice, ModelFacts, Request, choose_types, lint_request
from quantkit.pipeline.facts import TOKEN_EMBD_NAMES, layer_of
from quantkit.pipeline.presets import PRESETS, preset_by_name, without_interleaving
from quantkit.types import BY_NAME, type_by_name

IK = [p.name for p in PRESETS if p.trees in ("ik", "both") and p.name != "COPY"]

MTP = (*DENSE, "nextn.eh_proj", "ssm_x", "ssm_dt", "ssm_conv1d")
HYBRID = ("attn_qkv", "attn_gate", "ssm_out", "ssm_conv1d", "ffn_down_exps", "ffn_up_exps", "ffn_gate_exps",
          "ffn_gate_inp")  # fmt: skip
NO_V = ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYERS_8B = {"vocab_size": 128256}
MAINLINE_MLA = {"attention.key_length": 576, "attention.value_length": 512}

#: architecture, (layers, heads, kv heads, experts), parts, and what else; those with "keep" are in the snapshots.
MODELS: dict[str, tuple[str, tuple[int, int, int, int], tuple[str, ...], dict[str, Any]]] = {
    "tied": ("llama", (22, 8, 8, 0), DENSE, {"tied": True}),
    "70b": ("llama", (80, 64, 8, 0), DENSE, {}),
    "65b-rows-320": ("llama", (80, 8, 8, 0), DENSE, {"n": 320}),
    "8b": ("llama", (32, 32, 8, 0), DENSE, LAYERS_8B),
    "7b": ("llama", (32, 16, 8, 0), MTP, {"vocab_size": 32000}),
    "granite": ("llama", (36, 8, 4, 0), DENSE, LAYERS_8B),
    "starcoder": ("llama", (32, 8, 8, 0), DENSE, {"vocab_size": 49152}),
    "mixtral": ("llama", (32, 32, 8, 8), MOE, {}),
    "mixtral-tied": ("llama", (80, 32, 8, 8), MOE, {"tied": True}),
    "2-experts": ("llama", (32, 8, 8, 2), SHARED, {}),
    "6-experts": ("qwen2moe", (24, 8, 8, 6), SHARED, {"rows": 12}),
    "qwen2-70b": ("qwen2", (80, 40, 8, 0), DENSE, {}),
    "falcon": ("falcon", (60, 16, 8, 0), FUSED, {}),
    "falcon-v": ("falcon", (32, 16, 4, 0), DENSE, {"n": 512}),
    "gemma3": ("gemma3", (34, 16, 8, 0), DENSE, {"tied": True}),
    "gemma4": ("gemma4", (30, 16, 4, 16), (*MOE, "ffn_gate_up_exps"), {"tied": True}),
    "qwen3moe": ("qwen3moe", (48, 32, 8, 128), MOE, {"rows": 20}),
    "qwen3-8b": ("qwen3", (36, 32, 8, 0), DENSE, {**LAYERS_8B, "embedding_length": 4096}),
    "qwen3-4b": ("qwen3", (36, 32, 8, 0), DENSE, {**LAYERS_8B, "embedding_length": 2560}),
    "deci": ("deci", (80, 64, 8, 0), NO_V, {}),
    "olmo": ("olmo", (80, 64, 64, 0), DENSE, LAYERS_8B),
    "deepseek2": ("deepseek2", (61, 8, 1, 64), (*MLA, "ffn_up_shexp", "ffn_down_shexp"), MAINLINE_MLA),
    "deepseek2-lite": ("deepseek2", (27, 16, 16, 64), (*MLA, "ffn_down", "ffn_up"), {"n": 576}),
    "glm4moe": ("glm4moe", (47, 48, 8, 16), SHARED, {"n": 576}),
    "gpt-oss": ("gpt-oss", (36, 64, 8, 32), MOE, {"n": 480}),
    "phi3": ("phi3", (40, 24, 8, 0), FUSED, {}),
    "gpt2": ("gpt2", (12, 12, 12, 0), FUSED, {"global_names": ("position_embd",)}),
    "cohere2": ("cohere2", (32, 64, 8, 0), DENSE, {**LAYERS_8B, "tied": True, "logit_scale": 0.25}),
    "mistral3": ("mistral3", (34, 32, 8, 0), DENSE, LAYERS_8B),
    "mamba": ("mamba", (24, 0, 0, 0), ("ssm_in", "ssm_out", "ssm_x", "ssm_dt", "ssm_conv1d"), {}),
    "dflash": ("dflash-draft", (8, 32, 8, 0), DENSE, {}),
    "qwen3next": ("qwen3next", (48, 16, 2, 512), HYBRID, {}),
    "gemma-untied": ("gemma", (18, 8, 1, 0), DENSE, {}),
    "clip": ("clip", (24, 16, 16, 0), FUSED, {"global_names": ()}),
}  # fmt: skip


def make_model(name: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return metadata and tensors in the order of the file, which is not the sorted one: ik counts as it goes."""
    arch, sizes, parts, extra_fields = MODELS[name]
    metadata, tensors = build_model(arch, sizes, parts, **{"global_names": ("per_layer_token_embd",), **extra_fields})
    random.Random(name).shuffle(tensors)
    return metadata, tensors


def choose(metadata: dict[str, Any], tensors: Sequence[Tensor], preset: str, **options: Any) -> list[Choice]:
    facts = ModelFacts.from_metadata(metadata, tensors, ik=True)
    request = Request(preset_by_name(preset, "ik"), tree="ik", allow_requantize=True, **options)
    return choose_types(facts, tensors, request)


def rules(*texts: str) -> tuple[recipe.Rule, ...]:
    return tuple(rule for text in texts for rule in recipe.parse_custom_q(text))


CUSTOM = ("attn_v=iq5_k,blk[.](1|2)[.]ffn_down=iq4_ks_r4", "^output=q5_K,token_embd=q4_k_r4", "blk.3=q8_0")
#: Options of ik's llama-quantize, and what they are here.
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "": ((), {}),
    "pure": (("--pure",), {"pure": True}),
    "leave": (("--leave-output-tensor",), {"leave_output_tensor": True}),
    "output": (("--output-tensor-type", "iq6_k"), {"output_tensor_type": BY_NAME["IQ6_K"]}),
    "token": (("--token-embedding-type", "q6_0"), {"token_embedding_type": BY_NAME["Q6_0"]}),
    "pure-both": (
        ("--pure", "--output-tensor-type", "q5_0", "--token-embedding-type", "q8_0_r8"),
        {"pure": True, "output_tensor_type": BY_NAME["Q5_0"], "token_embedding_type": BY_NAME["Q8_0_R8"]},
    ),
    "inp": (("--ffn-gate-inp-type", "q8_0"), {"ffn_gate_inp_type": BY_NAME["Q8_0"]}),
    "custom": (
        ("--custom-q", CUSTOM[0], "--custom-q", CUSTOM[1]),
        {"rules": rules(*CUSTOM[:2])},
    ),
    "attn": (
        ("--attn-q-type", "iq4_k", "--attn-k-type", "q8_0", "--attn-v-type", "iq5_ks", "--attn-output-type", "q6_0"),
        {"attn_q_type": BY_NAME["IQ4_K"], "attn_k_type": BY_NAME["Q8_0"], "attn_v_type": BY_NAME["IQ5_KS"],
         "attn_output_type": BY_NAME["Q6_0"]},
    ),
    "ffn": (
        ("--ffn-gate-type", "iq3_k", "--ffn-down-type", "q5_k_r4", "--ffn-up-type", "iq3_k", "--custom-q", CUSTOM[2]),
        {"ffn_gate_type": BY_NAME["IQ3_K"], "ffn_down_type": BY_NAME["Q5_K_R4"], "ffn_up_type": BY_NAME["IQ3_K"],
         "rules": rules(CUSTOM[2])},
    ),
}  # fmt: skip
_HEEDED_WITH = {"attn": ("attn_q", "attn_k", "attn_v", "attn_output"), "ffn": ("ffn_gate", "ffn_down", "ffn_up")}


def comparable(preset: str, option: str) -> bool:
    """False where options that ik ignores have an effect here: class options in presets of few bits or of floats."""
    floats = not preset_by_name(preset, "ik").base.is_quantized  # type: ignore[union-attr]
    if option in ("custom", *_HEEDED_WITH) and floats:
        return False
    return all(type_rules_ik.respects_option(preset, name) for name in _HEEDED_WITH.get(option, ()))


def readable(name: str, ggml_name: str) -> str:
    """Return the type here where ik's is ``ggml_name``: with --pure and BF16_R16, ik interleaves the rows of
    per_layer_token_embd.weight, which its get_rows cannot read."""
    return without_interleaving(type_by_name(ggml_name)).ggml_name if name in TOKEN_EMBD_NAMES else ggml_name


# --- against snapshots of 8337e4cd3 --------------------------------------------------------------------------


def by_part(tensor: Tensor | Choice) -> tuple[str, int]:
    """The order of the snapshots: all layers' attn_q, then all layers' ffn_down."""
    return part_of(tensor.name)


@cache
def part_of(name: str) -> tuple[str, int]:
    return re.sub(r"\d+", "", name), layer_of(name)


def shortened(types: Sequence[str]) -> str:
    """Write types so: q4_K*3 q6_K."""
    runs = [(name, len(list(group))) for name, group in groupby(types)]
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in runs)


def lengthened(text: str) -> list[str]:
    runs = [run.partition("*") for run in text.split()]
    return [name for name, _, n in runs for _ in range(int(n or 1))]


def snapshots() -> dict[str, str]:
    with tarfile.open(DATA / "schemas" / "ik_llama.cpp-8337e4cd3.tar.xz") as tar:
        files = {m.name.removesuffix(".choices"): tar.extractfile(m) for m in tar.getmembers()}
        return {name: f.read().decode() for name, f in files.items() if f is not None}


SNAPSHOTS = snapshots()
#: Models that, without options, meet every row of the tables on both sides of its conditions; for all else models take
#: turns: time.
IN_FULL = {"dflash", "falcon", "qwen2-70b", "2-experts", "6-experts", "gemma4", "7b", "8b", "clip", "tied"}


@pytest.mark.parametrize("model", SNAPSHOTS)
def test_types_equal_ik_llama_cpps_snapshots(model: str) -> None:
    metadata, tensors = make_model(model)
    turn = list(SNAPSHOTS).index(model) % 3
    for i, line in enumerate(SNAPSHOTS[model].splitlines()):
        head, _, text = line.partition(": ")
        preset, option, importance = head.split("/")
        if i % 3 != turn and (option or model not in IN_FULL):
            continue
        choices = choose(metadata, tensors, preset, has_imatrix=importance == "imatrix", **OPTIONS[option][1])
        choices.sort(key=by_part)
        expected = [readable(c.name, name) for c, name in zip(choices, lengthened(text), strict=True)]
        assert [c.type.ggml_name for c in choices] == expected, head


# --- against the llama-quantize of the wheel -----------------------------------------------------------------

_HEAD = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) - \[[ \d,]+\], type = +(\w+), ")
_NEW = re.compile(r"converting to (\w+) \.\.")


def dry_run(ik_bin: Path, model: Path, preset: str, *options: str) -> dict[str, str]:
    """Return the types that ik's llama-quantize chooses: ggml's name for every tensor."""

    def run() -> bytes:
        libraries = f"{ik_bin.parents[1]}/ik_llama_cpp_python.libs:{ik_bin}/../lib"
        args = [ik_bin / "llama-quantize", "--ignore-imatrix-rules", *options, "--dry-run", model, preset, "1"]
        env = os.environ | {"LD_LIBRARY_PATH": libraries}
        return subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, env=env).stdout

    question = "llama-quantize --dry-run", header(model), preset, *map(file_or_word, options)
    text = answer(run, peer(ik_bin), peer(ik_bin.parent / "lib"), *question).decode()
    types: dict[str, str] = {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, types[head[1]] = head[1], head[2]
        if new := _NEW.search(line):
            types[name] = new[1]
    return types


@pytest.mark.peer
@pytest.mark.parametrize("model", ["tied", "7b", "2-experts", "6-experts", "falcon", "gpt2", "clip"])
def test_types_equal_ik_llama_quantizes(model: str, ik_bin: Path, tmp_path: Path) -> None:
    metadata, tensors = make_model(model)
    # The wheel's tree is a little older: it knows neither per-layer embeddings nor MXFP4_R8.
    tensors = [x for x in tensors if "per_layer" not in x.name]
    write_sparse(tmp_path / "m.gguf", metadata, tensors)
    (tmp_path / "i.dat").write_bytes(struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii32f", 1, 32, *[1.0] * 32))
    names = list(OPTIONS)
    turn = list(MODELS).index(model) % 3  # models take turns: time
    for i, preset in list(enumerate(name for name in IK if name != "MXFP4_R8"))[turn::3]:
        option = names[i % len(names)]
        if model == "clip" and preset == "IQ3_KT":  # ik asks for its heads per kv head, and aborts
            continue
        words, fields = OPTIONS[option if comparable(preset, option) else ""]
        imatrix = ("--imatrix", str(tmp_path / "i.dat")) if i % 3 else ()
        choices = choose(metadata, tensors, preset, has_imatrix=bool(imatrix), **fields)
        expected = dry_run(ik_bin, tmp_path / "m.gguf", preset, *imatrix, *words)
        assert {c.name: c.type.ggml_name for c in choices} == expected, (preset, option)


# --- what is ours --------------------------------------------------------------------------------------------

SMALL = [Tensor(f"{name}.weight", (512, 64)) for name in ("blk.0.attn_kv_b", "blk.0.attn_qkv", "blk.0.attn_v",
         "blk.0.ffn_down", "blk.1.shortconv.conv", "output", "token_embd")]  # fmt: skip
METADATA = {"general.architecture": "llama", "llama.block_count": 16, "llama.attention.head_count": 8}


def small(preset: str, **options: Any) -> dict[str, Choice]:
    return {c.name.removesuffix(".weight"): c for c in choose(METADATA, SMALL, preset, **options)}


def test_class_options_apply_where_ik_applies_them() -> None:
    choices = small("IQ4_KS", attn_k_type=BY_NAME["Q8_0"], attn_q_type=BY_NAME["Q6_K"])
    assert (choices["blk.0.attn_kv_b"].type.name, choices["blk.0.attn_qkv"].type.name) == ("Q8_0", "Q6_K")
    choices = small("IQ4_KS", attn_qkv_type=BY_NAME["Q5_K"], attn_q_type=BY_NAME["Q6_K"])
    assert choices["blk.0.attn_qkv"].type.name == "Q5_K"


@pytest.mark.parametrize(
    ("preset", "option", "lint"),
    [("IQ2_KS", "attn_v_type", True), ("IQ2_KT", "ffn_down_type", False), ("IQ4_KS", "attn_v_type", False),
     ("IQ4_KS", "attn_qkv_type", True)],
)  # fmt: skip
def test_a_class_option_that_ik_ignores_is_a_lint(preset: str, option: str, lint: bool) -> None:
    request = Request(preset_by_name(preset), **{option: BY_NAME["Q6_K"]})
    facts = ModelFacts.from_metadata(METADATA, SMALL, ik=True)
    choices = choose_types(facts, SMALL, request)
    assert sum(c.step == "class" for c in choices) == 1
    assert any(item.code == "QK-W016" for item in lint_request(request, SMALL, choices)) is lint


def test_what_ik_ignores_with_pure_is_a_lint() -> None:
    facts, pure = ModelFacts.from_metadata(METADATA, SMALL, ik=True), {"attn_v_type": BY_NAME["Q6_K"], "pure": True}
    for preset, options in (("IQ4_KS", pure), ("BF16_R16", {**pure, "pure": False})):
        request = Request(preset_by_name(preset), tree="ik", rules=rules("ffn_down=q8_0"), **options)
        choices = choose_types(facts, SMALL, request)
        codes = [lint.code for lint in lint_request(request, SMALL, choices)]
        assert codes.count("QK-W010") == codes.count("QK-W016") == 1


def test_reasons() -> None:
    choices = small("IQ3_KL")
    assert choices["blk.0.attn_v"].reason_text == "IQ3_KL: attn_v"
    assert choices["blk.0.ffn_down"].reason_text == "IQ3_KL: ffn_down, favoured layer"
    assert choices["output"].reason_text == "IQ3_KL: output"
    assert choices["token_embd"].reason_text == "base of IQ3_KL"
    assert all(c.reason_text for c in choices.values())


def test_ik_keeps_less() -> None:
    assert small("Q4_K_M")["blk.1.shortconv.conv"].type.name == "Q4_K"
    tensors = [x for x in SMALL if "shortconv" in x.name]
    facts = ModelFacts.from_metadata(METADATA, tensors)
    assert choose_types(facts, tensors, Request(preset_by_name("Q4_K_M")))[0].copied


def test_the_same_preset_by_the_rules_of_both() -> None:
    mainline = Request(preset_by_name("IQ2_XS"))
    assert isinstance(mainline.type_rules(ModelFacts.from_metadata(METADATA, SMALL)), type_rules_llama.LlamaTypeRules)
    assert small("IQ2_XS")["blk.0.attn_qkv"].type.name == "IQ2_K"
    with refuses(TypeNotSupported, "QK-E301 ik_llama.cpp"):
        choose(METADATA, SMALL, "TQ1_0")
