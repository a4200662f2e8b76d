"""Which type each tensor gets: equal to llama.cpp's choice, and every option does what it says or says why not."""

from __future__ import annotations

import re
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from header_models import DENSE, FUSED, MIXED, MLA, MOE, SHARED, Tensor, build_model, write_sparse
from peer_cache import answer, file_or_word, header, peer
from refusals import refuses

from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.pipeline import recipe
from quantkit.pipeline.choose import (
    Choice,
    ModelFacts,
    Request,
    choose_types,
    iteration_order,
    lint_request,
)
from quantkit.pipeline.presets import PRESETS, preset_by_name
from quantkit.types import BY_NAME, TensorType, type_by_name
from zoo import NAMES, write_hollow_zoo

MAINLINE = [p.name for p in PRESETS if p.trees in ("mainline", "both")]
DATA = Path(__file__).parents[1] / "data"


def t(name: str) -> TensorType:
    return BY_NAME[name]


# --- against llama.cpp's snapshots of real models ------------------------------------------------------------

#: Architecture of each snapshot, and its row lengths where they are not n_embd ({part of the name: length}).
SNAPSHOTS: dict[str, tuple[str, dict[str, int]]] = {
    "deepseek-v3.1": ("deepseek2", {"attn_k_b": 128, "attn_q_b": 1536, "attn_output": 16384, "ffn_down.": 18432,
                                    "ffn_down_": 2048}),
    "gemma-3-4b-it": ("gemma3", {"attn_output": 2048, "ffn_down": 10240}),
    "glm-4.6v": ("glm4moe", {"attn_output": 12288, "ffn_down.": 10944, "ffn_down_": 1408}),
    "gpt-oss-120b": ("gpt-oss", {"attn_output": 4096}),
    "meta-llama-3.1-70b-instruct": ("llama", {"ffn_down": 28672}),
    "nvidia-nemotron-3-nano-30b-a3b": ("nemotron_h_moe", {"attn_output": 4096, "ssm_out": 4096, "ffn_down_exps": 1856,
                                                          "ffn_down_shexp": 3712}),
    "qwen3-0.6b": ("qwen3", {"ffn_down": 3072}),
    "qwen3-14b": ("qwen3", {"ffn_down": 17408}),
    "qwen3-coder-next": ("qwen3next", {"ffn_down": 512}),
    "qwen3.5-397b-a17b": ("qwen35moe", {"ffn_down": 1024}),
    "qwen3.6-27b": ("qwen35", {"ffn_down": 17408}),
    "step-3.5-flash": ("step35", {"ffn_down.": 11264, "ffn_down_": 1280}),
}  # fmt: skip


@pytest.fixture(scope="module")
def schemas() -> dict[str, str]:
    with tarfile.open(DATA / "schemas" / "llama.cpp-b11434.tar.xz") as tar:
        files = {m.name.removesuffix(".schema"): tar.extractfile(m) for m in tar.getmembers()}
        return {name: f.read().decode() for name, f in files.items() if f is not None}


def read_schema(text: str) -> tuple[dict[str, int], dict[str, tuple[str, dict[str, str]]]]:
    """Return a snapshot's numbers and, by preset, its base type and the tensors that deviate."""
    numbers = {key: int(value) for key, value in re.findall(r"(n_\w+)=(\d+)", text)}
    sections: dict[str, tuple[str, dict[str, str]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            name, base = line[1:].split("] ")
            types: dict[str, str] = {}
            sections[name] = (base, types)
        elif line and not line.startswith("#"):
            tensor, _, type_name = line.rpartition(" ")
            types[tensor] = type_name
    return numbers, sections


def snapshot_tensors(names: list[str], n_embd: int, rows: dict[str, int]) -> list[Tensor]:
    def tensor(name: str) -> Tensor:
        n = next((length for part, length in rows.items() if part in name), n_embd)
        return Tensor(name, (n, 256, 16) if "_exps" in name or "attn_k_b" in name else (n, 256))

    return [tensor(name) for name in names]


@pytest.mark.parametrize("model", SNAPSHOTS)
def test_types_equal_llama_cpps_snapshots(model: str, schemas: dict[str, str]) -> None:
    numbers, sections = read_schema(schemas[model])
    names = {name for _, tensor_types in sections.values() for name in tensor_types}
    arch, rows = SNAPSHOTS[model]
    tensors = snapshot_tensors(iteration_order(names), numbers["n_embd"], rows)
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": numbers["n_layer"],
        f"{arch}.attention.head_count": numbers["n_head"],
        f"{arch}.attention.head_count_kv": numbers["n_head_kv"],
        f"{arch}.expert_count": numbers.get("n_expert", 0),
    }
    facts = ModelFacts.from_metadata(metadata, tensors)
    assert len(sections) == 33
    for preset, (base, tensor_types) in sections.items():
        request = Request(preset_by_name(preset))
        assert request.preset.base == type_by_name(base)
        actual = {c.name: c.type for c in choose_types(facts, tensors, request)}
        assert actual == {name: type_by_name(tensor_types.get(name, base)) for name in actual}, preset


# --- against llama-quantize --dry-run ------------------------------------------------------------------------

#: (architecture, layers, heads, kv heads, experts, tied, row length that replaces 512, parts)
MODELS = [
    ("llama", 22, 8, 8, 0, True, 512, DENSE),
    ("llama", 80, 64, 8, 0, False, 512, DENSE),
    ("llama", 80, 8, 8, 0, False, 320, DENSE),
    ("llama", 32, 32, 8, 8, False, 512, MOE),
    ("llama", 80, 32, 8, 8, True, 512, MOE),
    ("qwen2", 80, 40, 8, 0, False, 512, DENSE),
    ("falcon", 60, 16, 8, 0, False, 512, FUSED),
    ("gemma3", 34, 16, 8, 0, True, 512, DENSE),
    ("qwen3moe", 48, 32, 8, 128, False, 512, MOE),
    ("olmoe", 37, 8, 8, 4, False, 500, SHARED),
    ("deepseek2", 61, 8, 1, 64, False, 512, MLA),
    ("glm4moe", 47, 48, 8, 16, False, 576, SHARED),
    ("gpt-oss", 36, 64, 8, 32, False, 480, MOE),
    ("phi3", 40, 24, 8, 0, False, 512, FUSED),
    ("nanbeige", 24, 56, 8, 0, False, 512, DENSE),
    ("jais2", 68, 16, 8, 0, False, 512, DENSE),
    ("deci", 80, 64, 8, 0, False, 512, DENSE),
    ("llama-embed", 80, 64, 8, 0, False, 512, DENSE),
    ("clip", 24, 16, 16, 0, False, 512, FUSED),
    ("qwen3next", 48, 16, 2, 512, False, 512, MIXED),
]  # fmt: skip


def make_model(index: int) -> tuple[dict[str, Any], list[Tensor]]:
    arch, n_layer, n_head, n_head_kv, n_expert, tied, n, parts = MODELS[index]
    return build_model(arch, (n_layer, n_head, n_head_kv, n_expert), parts, tied=tied, n=n)


_DRY = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) +- \[[ \d,]+\], type = +(\w+), size = .*?(?:\((\w+)\))?$", re.MULTILINE)


def dry_run(llama_bin: Path, model: Path, preset: str, *options: str) -> dict[str, TensorType]:
    """Return llama-quantize's types, in its order; empty if it fails."""

    def ask() -> bytes:
        args = [llama_bin / "llama-quantize", *options, "--dry-run", model, preset]
        run = subprocess.run(args, capture_output=True, check=False)
        assert not run.returncode or b"no tensor type fallback is defined" in run.stderr, run.stderr[-2000:]
        return b"" if run.returncode else run.stderr

    question = "llama-quantize --dry-run", header(model), preset, *map(file_or_word, options)
    text = answer(ask, peer(llama_bin), *question).decode()
    return {name: type_by_name(new or old) for name, old, new in _DRY.findall(text)}


def choose(metadata: dict[str, Any], tensors: Sequence[Tensor], preset: str, **options: Any) -> list[Choice]:
    by_name = {x.name: x for x in tensors}
    ordered = [by_name[name] for name in iteration_order(by_name)]
    facts = ModelFacts.from_metadata(metadata, tensors)
    return choose_types(facts, ordered, Request(preset_by_name(preset), **options))


def assert_equal(llama_bin: Path, path: Path, preset: str, choices: list[Choice], *options: str) -> int:
    expected = dry_run(llama_bin, path, preset, *options)
    if expected:
        assert [c.name for c in choices] == list(expected)
        assert {c.name: c.type for c in choices} == expected, (preset, options)
    return len(expected)


@pytest.mark.peer
@pytest.mark.parametrize("index", range(len(MODELS)), ids=[f"{m[0]}-{m[1]}-{m[4]}" for m in MODELS])
def test_every_preset_equals_llama_quantize(index: int, llama_bin: Path, tmp_path: Path) -> None:
    metadata, tensors = make_model(index)
    write_sparse(tmp_path / "m.gguf", metadata, tensors)
    compared = 0
    presets = MAINLINE[index % 3 :: 3]  # models take turns: time
    if metadata["general.architecture"] == "clip":  # it aborts where it asks for a projector's heads per kv head
        presets = ["Q4_K_M", "Q5_K_S", "Q3_K_L", "Q8_0", "Q4_K_S"]
    for preset in presets:
        compared += assert_equal(llama_bin, tmp_path / "m.gguf", preset, choose(metadata, tensors, preset))
    assert compared >= len(tensors) * (len(presets) - 1)  # rows of 500 stop it at Q1_0


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_types_of_the_zoo_equal_llama_quantize(name: str, llama_bin: Path, tmp_path: Path) -> None:
    with open_gguf(write_hollow_zoo(name, tmp_path / "m.gguf")) as model:
        metadata = {key: model.get(key) for key in model.fields}
        tensors = [Tensor(t.name, t.shape, t.type) for t in model.tensors.values()]
    for preset in ("Q4_K_M", "Q3_K_L", "Q2_K", "Q5_K_S", "IQ4_XS", "MXFP4_MOE"):
        choices = choose(metadata, tensors, preset)
        assert assert_equal(llama_bin, tmp_path / "m.gguf", preset, choices) == len(tensors)


RULES = (r"attn_V=q5_K", r"blk\.(1|2)\.ffn=iq4_xs", r"per_layer=q6_K", "ffn_gate=f16", "output=q8_0", "^output=q5_1")
OPTIONS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("--pure",), {"pure": True}),
    (("--leave-output-tensor",), {"leave_output_tensor": True}),
    (("--output-tensor-type", "q8_0"), {"output_tensor_type": BY_NAME["Q8_0"]}),
    (("--pure", "--output-tensor-type", "q5_0"), {"pure": True, "output_tensor_type": BY_NAME["Q5_0"]}),
    (("--token-embedding-type", "iq4_nl"), {"token_embedding_type": BY_NAME["IQ4_NL"]}),
    (
        tuple(word for rule in RULES for word in ("--tensor-type", rule)),
        {"rules": tuple(recipe.parse_tensor_type(rule)[0] for rule in RULES)},
    ),
    (
        ("--pure", "--token-embedding-type", "q8_0", "--tensor-type", RULES[2]),
        {"pure": True, "token_embedding_type": BY_NAME["Q8_0"], "rules": tuple(recipe.parse_tensor_type(RULES[2]))},
    ),
]


@pytest.mark.peer
@pytest.mark.parametrize("index", [0, 3, 12])
def test_options_equal_llama_quantize(index: int, llama_bin: Path, tmp_path: Path) -> None:
    metadata, tensors = make_model(index)
    write_sparse(tmp_path / "m.gguf", metadata, tensors)
    (tmp_path / "i.dat").write_bytes(struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii32f", 1, 32, *[1.0] * 32))
    imatrix = ("--imatrix", str(tmp_path / "i.dat"))
    for preset in ("Q4_K_M", "Q3_K_M", "IQ3_XXS", "IQ2_M", "MXFP4_MOE", "Q4_0", "IQ4_XS"):
        for options, fields in [((), {}), *OPTIONS]:
            choices = choose(metadata, tensors, preset, **fields, has_imatrix=True)
            assert assert_equal(llama_bin, tmp_path / "m.gguf", preset, choices, *imatrix, *options) == len(tensors)


# --- names and facts -----------------------------------------------------------------------------------------


def test_iteration_order() -> None:
    names = ["blk.10.a", "blk.2.b", "blk.2.a", "v.blk.0.a", "output.weight", "blk.-3.a", "blk.x", "Z"]
    order = ["blk.-3.a", "Z", "blk.x", "output.weight", "v.blk.0.a", "blk.2.a", "blk.2.b", "blk.10.a"]
    assert iteration_order(names) == order


def facts_of(arch: str, **values: Any) -> ModelFacts:
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}
    tensors = [Tensor("blk.7.attn_v.weight", (256, 256)), Tensor("output.weight", (256, 9))]
    return ModelFacts.from_metadata(metadata, tensors)


def test_array_hyperparameters_use_the_first_layer() -> None:
    facts = facts_of("openelm", block_count=3, **{"attention.head_count": [12, 16], "attention.head_count_kv": [3, 4]})
    assert (facts.n_layer, facts.n_head, facts.n_head_kv, facts.n_gqa) == (3, 12, 3, 4)
    assert (facts.has_output, facts.n_attention_wv) == (True, 1)


def test_hyperparameters_have_defaults() -> None:
    facts = facts_of("llama", **{"attention.head_count": 32})
    assert (facts.n_layer, facts.n_gqa, facts.n_expert, facts.is_70b) == (8, 1, 0, False)
    assert facts_of("mamba", block_count=2).n_gqa == 0


@pytest.mark.parametrize(
    ("arch", "values", "is_70b"),
    [
        ("llama", {"block_count": 80, "attention.head_count": 64, "attention.head_count_kv": 8}, True),
        ("llama", {"block_count": 80, "attention.head_count": 64}, False),
        ("llama", {"block_count": 80, "attention.head_count": 64, "attention.head_count_kv": 8,
                   "expert_count": 8}, False),
        ("llama", {"block_count": 81, "attention.head_count": 64, "attention.head_count_kv": 8,
                   "nextn_predict_layers": 1}, True),
        ("qwen2", {"block_count": 80, "attention.head_count": 64}, True),
        ("jais2", {"block_count": 68}, True),
        ("qwen3", {"block_count": 80, "attention.head_count": 64, "attention.head_count_kv": 8}, False),
    ],
)  # fmt: skip
def test_models_recognized_as_70b(arch: str, values: dict[str, Any], is_70b: bool) -> None:
    assert facts_of(arch, **values).is_70b is is_70b


def test_architectures_with_extra_layers() -> None:
    assert facts_of("nanbeige", block_count=24, num_loops=2).n_layer == 48
    assert facts_of("graniteswitch", block_count=40).n_layer == 41
    assert facts_of("clip", block_count=24, **{"attention.head_count": 16}).n_layer == 0


# --- the order of the questions ------------------------------------------------------------------------------

NAMES = ("token_embd", "output", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output", "blk.0.ffn_up",
         "blk.0.ffn_down", "blk.0.ffn_gate_inp", "blk.0.ffn_gate_exps", "blk.0.ffn_gate_shexp")  # fmt: skip
SMALL = [Tensor(f"{name}.weight", (512, 64)) for name in NAMES]
FACTS = ModelFacts("qwen3moe", 16, n_expert=16, n_head=8, n_head_kv=4)


def choose_by_name(preset: str, tensors: Sequence[Tensor] = SMALL, **options: Any) -> dict[str, Choice]:
    choices = choose_types(FACTS, tensors, Request(preset_by_name(preset), **options))
    return {c.name.removesuffix(".weight").removeprefix("blk.0."): c for c in choices}


def rules(text: str) -> tuple[recipe.Rule, ...]:
    return tuple(recipe.parse_recipe(text, "mix.txt"))


@pytest.mark.parametrize("preset", ["Q4_K_M", "COPY", "F16", "IQ4_KS", "MXFP4_MOE"])
@pytest.mark.parametrize("pure", [False, True])
def test_precedence(preset: str, pure: bool) -> None:
    choices = choose_by_name(
        preset, pure=pure, rules=rules("token|output$|attn_k|gate_inp = q6_K\n.*output.weight = q5_K"),
        token_embedding_type=t("Q8_0"), output_tensor_type=t("Q5_1"), ffn_gate_inp_type=t("Q4_1"),
        attn_k_type=t("Q4_0"), attn_q_type=t("Q5_0"), ffn_gate_type=t("Q3_K"),
    )  # fmt: skip
    assert choices["token_embd"].type.name == "Q8_0"
    assert choices["output"].type.name == "Q5_1"
    assert choices["ffn_gate_inp"].type.name == "Q4_1"
    assert choices["attn_k"].type.name == "Q6_K"
    assert choices["attn_output"].type.name == "Q5_K"
    assert choices["attn_q"].type.name == "Q5_0"
    assert choices["ffn_gate_exps"].type.name == choices["ffn_gate_shexp"].type.name == "Q3_K"
    assert [choices[x].step for x in ("output", "attn_k", "attn_q")] == ["option", "rule", "class"]
    assert choices["attn_k"].reason_text == "rule token|output$|attn_k|gate_inp = Q6_K (mix.txt:1)"
    base = preset_by_name(preset).base
    if pure and base is not None:
        assert choices["ffn_up"].type == base


def test_copy_keeps_unmatched_tensors() -> None:
    choices = choose_by_name("COPY", ffn_gate_inp_type=t("Q8_0"))
    assert {name for name, c in choices.items() if not c.copied} == {"ffn_gate_inp"}


def test_per_layer_embeddings_have_their_own_rule() -> None:
    tensors = [Tensor("token_embd.weight", (512, 8)), Tensor("per_layer_token_embd.weight", (512, 8))]
    choices = choose_by_name("Q4_K_M", tensors, token_embedding_type=t("Q8_0"), rules=rules("token_embd = q5_K"))
    assert choices["token_embd"].type.name == "Q8_0"
    assert choices["per_layer_token_embd"].type.name == "Q5_K"


@pytest.mark.parametrize("preset", MAINLINE)
def test_only_the_router_option_quantizes_the_router(preset: str) -> None:
    tensors = [
        Tensor("blk.0.ffn_gate_inp.weight", (512, 64)), Tensor("blk.1.ffn_gate_inp.weight", (500, 64)),
        Tensor("blk.0.ffn_gate_inp.bias", (64, 2)), Tensor("blk.0.ffn_gate_inp_shexp.weight", (512,)),
        Tensor("blk.2.ffn_gate_inp.weight", (512, 1)),
    ]  # fmt: skip
    closed = choose_by_name(preset, tensors, rules=rules(".* = q4_0"))
    assert all(c.copied for c in closed.values())
    assert "--ffn-gate-inp-type" in closed["ffn_gate_inp"].reason_text
    assert "mix.txt:1" in closed["ffn_gate_inp"].reason_text
    opened = choose_by_name(preset, tensors, ffn_gate_inp_type=t("Q8_0"))
    assert [c.type.name for c in opened.values()] == ["Q8_0", "F16", "F32", "F32", "F32"]
    assert opened["blk.1.ffn_gate_inp"].fallback_from == t("Q8_0")
    assert "rows of 500" in opened["blk.1.ffn_gate_inp"].reason_text


def test_merged_experts_get_one_type_for_both_halves() -> None:
    merged = [Tensor("blk.0.ffn_gate_up_exps.weight", (512, 64, 16)), Tensor("blk.0.ffn_up_shexp.weight", (512, 64))]
    assert choose_by_name("Q4_K_M", merged, ffn_up_type=t("Q5_K"))["ffn_gate_up_exps"].type.name == "Q5_K"
    both = choose_by_name("Q4_K_M", merged, ffn_up_type=t("Q5_K"), ffn_gate_type=t("Q5_K"))
    assert both["ffn_gate_up_exps"].type.name == "Q5_K"
    torn = choose_by_name("Q4_K_M", merged, ffn_up_type=t("Q5_K"), ffn_gate_type=t("Q6_K"))
    assert torn["ffn_gate_up_exps"].type.name == "Q4_K"
    assert "differ" in torn["ffn_gate_up_exps"].reason_text
    assert torn["ffn_up_shexp"].type.name == "Q5_K"


def test_rules_for_separate_experts_reach_merged_ones() -> None:
    merged = [Tensor("blk.0.ffn_gate_up_exps.weight", (512, 64, 16)), Tensor("blk.0.ffn_up_shexp.weight", (512, 64))]
    request = Request(preset_by_name("Q4_K_M"), rules=rules("ffn_(up|gate)_exps = q6_K"), ffn_up_type=t("Q5_K"))
    choices = choose_types(FACTS, merged, request)
    assert [c.type.name for c in choices] == ["Q6_K", "Q5_K"]
    assert choices[0].reason_text == "rule ffn_(up|gate)_exps = Q6_K (mix.txt:1), which covers both halves"
    assert [lint.code for lint in lint_request(request, merged, choices)] == ["QK-W014"]


def test_a_tensor_of_several_types() -> None:
    """Halves of different types, to be merged: types count one by one."""
    tensor, mixed = Tensor("blk.0.ffn_gate_up_exps.weight", (512, 64, 16), t("Q8_0")), (t("Q8_0"), t("F16"))

    def choice(preset: str, **options: Any) -> Choice:
        request = Request(preset_by_name(preset), **options)
        return choose_types(FACTS, [tensor], request, {tensor.name: mixed})[0]

    choice_of_both = choice("Q8_0")
    assert (choice_of_both.copied, choice_of_both.requantized, choice_of_both.undecided) == (False, False, False)
    assert choice("COPY").undecided
    assert not choice("COPY", rules=rules("gate_up = q8_0")).undecided
    with refuses(TypeNotSupported, "QK-E209 Q8_0 F16 Q4_K"):
        choice("Q4_K_M")
    assert choice("Q4_K_M", allow_requantize=True).requantized


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blk.0.attn_q.bias", "no weight"),
        ("blk.0.attn_q_norm.weight", "norm"),
        ("token_types.weight", "token types"),
        ("v.position_embd.weight", "positions"),
        ("blk.0.time_mix_w2.weight", "RWKV"),
        ("blk.0.ssm_conv1d.weight", "convolution"),
    ],
)
def test_never_quantized(name: str, why: str) -> None:
    [result] = choose_types(FACTS, [Tensor(name, (512, 512))], Request(preset_by_name("Q4_K_M")))
    assert result.copied
    assert why in result.reason_text


def test_tensors_never_quantized_by_project() -> None:
    names = ("blk.0.ssm_x.weight", "blk.0.hc_a.weight", "blk.0.attn_q_b.weight")
    tensors = [Tensor(name, (512, 512)) for name in names]

    def types(arch: str, preset: str) -> list[str]:
        return [c.type.name for c in choose_types(replace(FACTS, arch=arch), tensors, Request(preset_by_name(preset)))]

    assert types("llama", "Q4_0") == ["Q4_0", "Q4_0", "Q4_0"]
    assert types("glm5-next", "Q4_0") == ["Q4_0", "F32", "Q8_0"]
    assert types("llama", "IQ4_KS") == ["F32", "IQ4_KS", "IQ4_KS"]


def test_integers_and_vectors_are_unchanged() -> None:
    tensors = [Tensor("a.weight", (512, 8), t("I32")), Tensor("b.weight", (512, 1)), Tensor("c.weight", (512,))]
    assert all(c.copied for c in choose_types(FACTS, tensors, Request(preset_by_name("Q8_0"))))


def test_every_choice_has_a_reason() -> None:
    choices = choose_by_name("Q4_K_M")
    assert choices["attn_v"].reason_text == "Q4_K_M: attn_v, favoured layer"
    assert choices["attn_q"].reason_text == "base of Q4_K_M"
    assert all(c.reason_text for c in choices.values())


# --- rows that do not divide, and interleaved types ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "n", "fallback", "type_name"),
    [
        ("Q4_K_S", 320, "next", "Q5_0"),
        ("Q4_K_S", 300, "next", "F16"),
        ("Q4_K_S", 320, "q8_0", "Q8_0"),
        ("Q4_K_S", 300, "q8_0", "F16"),
        ("Q1_0", 320, "next", "Q4_0"),
        ("NVFP4", 96, "next", "IQ4_NL"),
        ("IQ5_K", 320, "next", "Q6_0"),
    ],
)
def test_fallback(preset: str, n: int, fallback: str, type_name: str) -> None:
    [c] = choose_types(FACTS, [Tensor("blk.0.x.weight", (n, 8))], Request(preset_by_name(preset), fallback=fallback))
    assert c.type.name == type_name
    assert c.fallback_from == preset_by_name(preset).base
    assert f"rows of {n}" in c.reason_text
    assert ("llama-quantize fails" in c.reason_text) is (preset in ("Q1_0", "NVFP4"))


def test_fallback_applies_to_explicit_types() -> None:
    tensors = [Tensor("output.weight", (320, 8)), Tensor("token_embd.weight", (320, 8))]
    choices = choose_by_name("Q8_0", tensors, output_tensor_type=t("Q6_K"), rules=rules("token = q4_K"))
    assert [c.type.name for c in choices.values()] == ["Q8_0", "Q5_0"]


def test_fallback_error_names_the_tensors() -> None:
    with refuses(TypeNotSupported, "QK-E303 blk.0.x.weight F32 Q4_K --fallback"):
        choose_types(FACTS, [Tensor("blk.0.x.weight", (320, 8))], Request(preset_by_name("Q4_K_S"), fallback="error"))
    with refuses(TypeNotSupported, "QK-E301 --fallback I32"):
        choose_types(FACTS, [], Request(preset_by_name("Q4_K_S"), fallback="i32"))


def test_interleaved_types_fall_back_for_partial_groups() -> None:
    tensors = [
        Tensor("token_embd.weight", (512, 64)),
        Tensor("blk.0.a.weight", (512, 6)),
        Tensor("blk.0.b.weight", (512, 8, 3)),
    ]
    [small] = choose_by_name("IQ1_S_R4", [Tensor("blk.0.a.weight", (96, 6))], pure=True).values()
    assert (small.type.name, small.fallback_from) == ("IQ4_NL", t("IQ1_S_R4"))
    choices = list(choose_by_name("IQ4_KS_R4", tensors, pure=True).values())
    assert [c.type.name for c in choices] == ["IQ4_KS", "IQ4_KS", "IQ4_KS_R4"]
    assert choices[1].fallback_from == t("IQ4_KS_R4")
    for c, x in zip(choices, tensors, strict=True):
        assert c.type.tensor_bytes(x.shape) > 0


# --- sources that are quantized, and imatrix -----------------------------------------------------------------


def test_requantizing_needs_permission() -> None:
    tensors = [Tensor("blk.0.a.weight", (512, 8), t("Q4_K")), Tensor("blk.1.a.weight", (512, 8), t("Q4_1"))]
    request = Request(preset_by_name("Q4_K_S"))
    with refuses(TypeNotSupported, "QK-E209 blk.1.a.weight Q4_1 Q4_K"):
        choose_types(FACTS, tensors, request)
    choices = choose_types(FACTS, tensors, replace(request, allow_requantize=True))
    assert [c.copied for c in choices] == [True, False]
    assert all(c.copied for c in choose_types(FACTS, tensors, Request(preset_by_name("COPY"))))


# --- lints ---------------------------------------------------------------------------------------------------

NO_OUTPUT = [x for x in SMALL if x.name != "output.weight"]
GATE_UP = [Tensor("blk.0.ffn_gate_up_exps.weight", (512, 64, 8))]


@pytest.mark.parametrize(
    ("preset", "tensors", "options", "code", "says"),
    [
        ("Q4_K_M", SMALL, {"rules": rules("gate_inp = q8_0")}, "QK-W006", "kept: the router"),
        (
            "Q4_K_M",
            SMALL,
            {"rules": rules("^output = q8_0"), "output_tensor_type": t("Q6_K")},
            "QK-W006",
            "--output-tensor",
        ),
        ("Q4_K_M", SMALL, {"rules": rules("nothing = q8_0")}, "QK-W001", "mix.txt:1"),
        ("Q4_K_M", SMALL, {"attn_qkv_type": t("Q8_0")}, "QK-W007", "--attn-qkv-type has no effect"),
        ("Q4_K_M", NO_OUTPUT, {"leave_output_tensor": True}, "QK-W007", "embeddings are the output"),
        ("Q4_K_M", NO_OUTPUT, {"output_tensor_type": t("Q8_0"), "pure": True}, "QK-W007", "embeddings are the output"),
        ("F16", SMALL, {"rules": rules("attn_q = q8_0")}, "QK-W010", "ignores rules when TYPE is F16"),
        ("TQ1_0", SMALL, {"rules": rules("attn_q = iq4_k")}, "QK-W011", "IQ4_K (ik_llama.cpp) and TQ1_0"),
        ("Q4_K_M", GATE_UP, {"ffn_up_type": t("Q5_K"), "ffn_gate_type": t("Q6_K")}, "QK-W012", "merged"),
        ("Q4_K_M", GATE_UP, {"ffn_up_type": t("Q5_K")}, "QK-W015", "--ffn-up-type applies to both halves"),
        ("Q4_K_M", GATE_UP, {"rules": rules("ffn_up_exps = q8_0")}, "QK-W004", "but no rule matches the gate half"),
    ],
)
def test_lints(preset: str, tensors: list[Tensor], options: dict[str, Any], code: str, says: str) -> None:
    facts = replace(FACTS, has_output=tensors is not NO_OUTPUT)
    request = Request(preset_by_name(preset), **options)
    lints = lint_request(request, tensors, choose_types(facts, tensors, request))
    assert [lint.message for lint in lints if lint.code == code and says in lint.message], lints


def test_a_rule_that_matches_the_current_type_is_no_lint() -> None:
    request = Request(preset_by_name("Q4_K_M"), rules=rules("gate_inp = f32"))
    choices = choose_types(FACTS, SMALL, request)
    assert lint_request(request, SMALL, choices) == []
    assert "does not apply" not in next(c.reason_text for c in choices if "gate_inp" in c.name)


@pytest.mark.parametrize("preset", ["Q4_K_M", "Q8_0", "COPY", "MXFP4_MOE"])
def test_plain_requests_have_no_lints(preset: str) -> None:
    request = Request(preset_by_name(preset))
    assert lint_request(request, SMALL, choose_types(FACTS, SMALL, request)) == []


def test_output_type_applies_to_tied_embeddings() -> None:
    facts = replace(FACTS, has_output=False)
    request = Request(preset_by_name("Q4_K_M"), output_tensor_type=t("Q8_0"))
    choices = choose_types(facts, NO_OUTPUT, request)
    assert choices[0].type.name == "Q8_0"
    assert lint_request(request, NO_OUTPUT, choices) == []
