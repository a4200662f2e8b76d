"""The table of presets, the names TYPE may be, and the fallback of rows that do not divide."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from refusals import refuses

from quantkit.errors import TypeNotSupported
from quantkit.pipeline import presets, type_rules, type_rules_ik, type_rules_llama
from quantkit.pipeline.facts import ModelFacts
from quantkit.pipeline.presets import FTYPE_UNKNOWN, PRESET_ALIASES, PRESETS, preset_by_name
from quantkit.pipeline.type_rules import Place, use_more_bits
from quantkit.types import BY_NAME, TYPES

MAINLINE = [p for p in PRESETS if p.trees in ("mainline", "both")]
IK = [p for p in PRESETS if p.trees in ("ik", "both")]

#: src: llama.cpp b11434, include/llama.h, enum llama_ftype, as `name number` of what llama-quantize prints.
LLAMA_CPP = """
    Q1_0 40 Q2_0 41 Q4_0 2 Q4_1 3 MXFP4_MOE 38 Q5_0 8 Q5_1 9 IQ2_XXS 19 IQ2_XS 20 IQ2_S 28 IQ2_M 29 IQ1_S 24 IQ1_M 31
    TQ1_0 36 TQ2_0 37 Q2_K 10 Q2_K_S 21 IQ3_XXS 23 IQ3_S 26 IQ3_M 27 Q3_K 12 IQ3_XS 22 Q3_K_S 11 Q3_K_M 12 Q3_K_L 13
    IQ4_NL 25 IQ4_XS 30 Q4_K 15 Q4_K_S 14 Q4_K_M 15 Q5_K 17 Q5_K_S 16 Q5_K_M 17 Q6_K 18 Q8_0 7 F16 1 BF16 32 F32 0
"""


def test_tables_are_complete() -> None:
    names = {name for name, _ in re.findall(r"(\w+) (\d+)\s", LLAMA_CPP)}
    assert {p.name for p in MAINLINE} | PRESET_ALIASES.keys() == names | {"COPY"}
    assert {p.name for p in MAINLINE if p.trees == "both"} <= {p.name for p in IK}
    assert len({p.name for p in PRESETS}) == len(PRESETS)
    assert all(p.description for p in PRESETS)


def test_a_number_belongs_to_one_preset_of_a_project() -> None:
    for tree in (MAINLINE, IK):
        numbers = [p.ftype for p in tree if p.name != "COPY"]
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("name", "number"), re.findall(r"(\w+) (\d+)\s", LLAMA_CPP))
def test_mainline_names_and_numbers(name: str, number: str) -> None:
    preset = preset_by_name(name)
    assert preset.ftype == int(number)
    assert preset.mixes
    assert preset_by_name(number) == preset == preset_by_name(f" {name.lower()} ")


@pytest.mark.peer
def test_numbers_equal_llama_quantizes(llama_bin: Path) -> None:
    text = subprocess.run([llama_bin / "llama-quantize", "--help"], capture_output=True, text=True, check=False).stdout
    rows = re.findall(r"^ +(\d+) +or +(\w+) *:", text, re.MULTILINE)
    assert {name for _, name in rows} | {"COPY"} == {p.name for p in MAINLINE} | PRESET_ALIASES.keys()
    assert "COPY" in text
    for number, name in rows:
        assert preset_by_name(name).ftype == int(number)


@pytest.mark.peer
def test_names_equal_iks(ik_bin: Path) -> None:
    env = {"LD_LIBRARY_PATH": f"{ik_bin.parents[1]}/ik_llama_cpp_python.libs:{ik_bin.parent}/lib"}
    run = subprocess.run([ik_bin / "llama-quantize", "--help"], capture_output=True, text=True, check=False, env=env)
    rows = re.findall(r"^ +(\d+) +or +(\w+) *:", run.stdout, re.MULTILINE)
    assert len(rows) > 70
    numbers = {p.name: p.ftype for p in IK}
    for number, name in rows:
        assert numbers[PRESET_ALIASES.get(name, name)] == int(number)


@pytest.mark.parametrize(
    ("text", "name", "ftype", "base"),
    [
        ("NVFP4", "NVFP4", 39, "NVFP4"),
        ("q4_0_4x8", "Q4_0_4X8", 34, "Q4_0_4X8"),
        ("IQ2_S_R4", "IQ2_S_R4", 229, "IQ2_S_R4"),
        ("Q1_0_G128", "Q1_0", 40, "Q1_0"),
        ("Q8_K_R16", "Q8_K_R16", FTYPE_UNKNOWN, "Q8_K_R16"),
    ],
)
def test_types_without_type_rules(text: str, name: str, ftype: int, base: str) -> None:
    preset = preset_by_name(text)
    assert (preset.name, preset.ftype, preset.base) == (name, ftype, BY_NAME[base])
    assert not preset.mixes


@pytest.mark.parametrize("t", [t for t in TYPES if presets.is_target(t)], ids=str)
def test_every_type_for_weights_is_a_name(t: object) -> None:
    assert preset_by_name(str(t)).base is not None


@pytest.mark.parametrize(
    ("text", "name", "ftype", "base"),
    [
        ("iq4_ks", "IQ4_KS", 145, "IQ4_KS"),
        ("145", "IQ4_KS", 145, "IQ4_KS"),
        ("Q8_KV", "Q8_KV", 149, "Q8_KV"),
        ("MXFP4", "MXFP4", 38, "MXFP4"),
        ("IQ3_KL", "IQ3_KL", 146, "IQ3_K"),
        ("q4_0_4_8", "Q4_0_4_8", 34, "Q4_0_4X8"),
    ],
)
def test_type_rules_of_ik(text: str, name: str, ftype: int, base: str) -> None:
    preset = preset_by_name(text)
    assert (preset.name, preset.ftype, preset.base, preset.mixes) == (name, ftype, BY_NAME[base], True)
    assert presets.rules_of(preset) == "ik"


def test_rules_of_a_project() -> None:
    assert presets.rules_of(preset_by_name("Q4_K_M")) == presets.rules_of(preset_by_name("NVFP4")) == "mainline"
    assert preset_by_name("38", "ik").name == "MXFP4"
    assert preset_by_name("38", "mainline").name == "MXFP4_MOE"
    assert not preset_by_name("MXFP4", "mainline").mixes
    assert preset_by_name("Q4_K", "ik").name == "Q4_K_M"
    for name in ("IQ4_KS", "IQ2_S_R4", "IQ3_KL", "145"):
        with refuses(TypeNotSupported, "QK-E301 llama.cpp --rules"):
            preset_by_name(name, "mainline")
    for name in ("TQ1_0", "NVFP4", "41"):
        with refuses(TypeNotSupported, "QK-E301 ik_llama.cpp"):
            preset_by_name(name, "ik")


def test_shared_numbers_mean_llama_cpps_preset() -> None:
    assert preset_by_name("38").name == "MXFP4_MOE"
    assert preset_by_name("41").name == "Q2_0"
    assert preset_by_name("0").name == "F32"
    assert preset_by_name("copy").base is None


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("Q4_KM", "QK-E301 Q4_K_M"),
        ("8bit", "QK-E301"),
        ("999", "QK-E301"),
        ("", "QK-E301"),
        ("I32", "QK-E301"),
        ("Q8_K", "QK-E301"),
        ("-1", "QK-E301"),
    ],
)
def test_refused_names(text: str, refusal: str) -> None:
    with refuses(TypeNotSupported, refusal):
        preset_by_name(text)


def test_more_bits() -> None:
    assert [i for i in range(32) if use_more_bits(i, 32)] == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert all(use_more_bits(i, 0) for i in range(3))


def test_tables_name_only_presets_types_and_conditions() -> None:
    main, ik = type_rules_llama, type_rules_ik
    tables = [(MAINLINE, table) for table in (main.ATTN_V, main.ATTN_K_Q, main.FFN_DOWN, main.FFN_DOWN_FALCON,
              main.ATTN_OUTPUT, main.ATTN_OUTPUT_FALCON, main.FFN_GATE_UP, *main.LOW_BIT.values())]  # fmt: skip
    tables += [(IK, table) for table in (ik.OUTPUT, ik.TOKEN_EMBD, *ik.TABLES.values(), *ik.FALCON.values())]
    used = {branch.condition for branch in (*ik.GENERIC, *ik.LOW_BIT, *ik.LOW_BIT_SHARED)}
    for tree, table in tables:
        assert set(table) <= {p.name for p in tree}
        for rows in table.values():
            used |= {part for condition, _ in rows for part in condition.split(", ")}
            assert all(type_name in BY_NAME for _, type_name in rows)
    assert used == set(type_rules.CONDITIONS)


def test_pick_takes_the_first_row_that_holds() -> None:
    place = Place(i=0, n=32, facts=ModelFacts("llama", 32, n_head=32, n_head_kv=8), has_imatrix=False)
    result = type_rules.pick(type_rules_llama.ATTN_V["Q2_K"], place)
    assert result == (BY_NAME["Q4_K"], "4+ heads per KV head")
    assert type_rules.pick((), place) is None
    assert type_rules.holds("first 8th, no imatrix", place)
    assert not type_rules.holds("first 8th, imatrix", place)


@pytest.mark.parametrize("t", [t for t in TYPES if presets.is_target(t)], ids=str)
@pytest.mark.parametrize("ik", [False, True])
def test_fallbacks_terminate(t: object, ik: bool) -> None:
    quant = BY_NAME[str(t)]
    assert presets.next_dividing(quant, 33, ik=ik).name == "F16"
    small = presets.next_dividing(quant, 32, ik=ik)
    assert small.block <= 32
    assert presets.without_interleaving(quant).interleave == 1


@pytest.mark.parametrize(
    ("name", "fallback"),
    [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0"), ("TQ1_0", "Q4_0"), ("IQ4_XS", "IQ4_NL"), ("Q8_0", "F16"),
     ("MXFP4", "F16"), ("Q1_0", "Q4_0"), ("NVFP4", "IQ4_NL"), ("IQ5_K", "Q6_0"), ("Q5_K_R4", "Q6_0"),
     ("Q8_K_R8", "Q8_0"), ("IQ2_KT", "IQ4_NL"), ("IQ4_K_R4", "Q5_0"), ("IQ1_BN", "Q4_0"), ("Q8_KV", "F16")],
)  # fmt: skip
def test_next_type(name: str, fallback: str) -> None:
    assert presets.next_type(BY_NAME[name]).name == fallback


@pytest.mark.parametrize(
    ("name", "fallback"), [("Q4_K", "Q5_0"), ("Q5_K", "Q6_0"), ("Q2_K", "IQ4_NL"), ("Q1_0", "Q4_0"), ("TQ1_0", "Q4_0")]
)
def test_next_type_in_ik(name: str, fallback: str) -> None:
    assert presets.next_type(BY_NAME[name], ik=True).name == fallback
