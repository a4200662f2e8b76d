"""Recipes in and out: written for types, read in four dialects as their programs read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from sparse_gguf import write_hollow

from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.formats.gguf import Field, open_gguf
from quantkit.pipeline.recipe import Rule
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.recipes import (
    DIALECTS,
    Recipe,
    convert_recipe,
    detect_dialect,
    diff_recipe,
    lint_recipe,
    parse_recipe,
    show_recipe,
    write_recipe,
)
from quantkit.recipes.contents import Model, read_model
from quantkit.recipes.convert import convert_rules
from quantkit.recipes.portable import DialectPattern, NotPortable, rewrite
from quantkit.recipes.write import numbers_pattern
from quantkit.types import BY_NAME, TensorType

FIELDS = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_down_exps",
    "ffn_up_exps",
    "ffn_gate_exps",
    "ffn_gate_up_exps",
]
NAMES = st.one_of(
    st.builds("blk.{}.{}.weight".format, st.integers(0, 120), st.sampled_from(FIELDS)),
    st.sampled_from(
        ["output.weight", "token_embd.weight", "v.blk.3.attn_q.weight", "mm.0.weight", "Odd (name)+.weight"]
    ),
)
#: Types that both trees have.
TYPES = st.sampled_from([BY_NAME[n] for n in ("Q4_K", "Q6_K", "IQ3_S", "Q8_0", "BF16")])


@given(st.sets(st.integers(0, 1100), min_size=1, max_size=60))
def test_numbers_as_a_pattern(numbers: set[int]) -> None:
    pattern = numbers_pattern(numbers)
    assert {n for n in range(1200) if re.fullmatch(pattern, str(n))} == numbers


@settings(deadline=None)
@given(st.dictionaries(NAMES, TYPES, max_size=40), st.sets(NAMES, max_size=20), st.sampled_from(DIALECTS))
def test_written_rules_reproduce_the_types(types: dict[str, TensorType], extra_names: set[str], dialect: str) -> None:
    strangers = extra_names - types.keys()
    text = write_recipe(types, ["a line"], dialect, other_names=strangers)
    read = parse_recipe(text, "r", dialect)
    assert read.comments == (() if dialect == "llama.cpp" else ("a line",))
    assert read.types([*types, *strangers]) == {**types, **dict.fromkeys(strangers)}


def test_rules_are_few_and_readable() -> None:
    types = {
        f"blk.{i}.ffn_{p}_exps.weight": BY_NAME["IQ4_KS" if i < 14 else "IQ3_K"]
        for i in range(24)
        for p in ("up", "gate")
    }
    types |= {f"blk.{i}.attn_{p}.weight": BY_NAME["Q8_0"] for i in range(24) for p in ("q", "k", "output")}
    types |= {"output.weight": BY_NAME["Q6_K"]}
    assert write_recipe(types).splitlines() == [
        r"^output\.weight$ = q6_K",
        r"^blk\.([0-9]|1[0-3])\.ffn_(up|gate)_exps\.weight$ = iq4_ks",
        r"^blk\.(1[4-9]|2[0-3])\.ffn_(up|gate)_exps\.weight$ = iq3_k",
        r"^blk\.[0-9]+\.attn_(q|k|output)\.weight$ = q8_0",
    ]
    with refuses(RecipeError, "QK-E203 llama.cpp IQ4_KS blk.0.ffn_up_exps.weight"):
        write_recipe(types, dialect="llama.cpp")


def test_names_that_no_rule_distinguishes() -> None:
    with refuses(RecipeError, "QK-E200 a.weight Q8_0 Q4_K"):
        write_recipe({"A.weight": BY_NAME["Q4_K"], "a.weight": BY_NAME["Q8_0"]})


# --- a model of the shape of Qwen3-235B-A22B, of which only the header counts ---

LAYERS, WIDTH, EXPERTS = 94, 4096, 128


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": LAYERS,
        "qwen3moe.embedding_length": WIDTH,
        "qwen3moe.expert_count": EXPERTS,
        "qwen3moe.expert_used_count": 8,
        "qwen3moe.attention.head_count": 64,
        "qwen3moe.attention.head_count_kv": 4,
    }
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((WIDTH, 151936), "BF16"),
        "output.weight": ((WIDTH, 151936), "BF16"),
        "output_norm.weight": ((WIDTH,), "F32"),
    }
    for i in range(LAYERS):
        b = f"blk.{i}."
        shapes |= {b + f"attn_{p}.weight": ((WIDTH, n), "BF16") for p, n in (("q", 8192), ("k", 512), ("v", 512))}
        shapes |= {b + "attn_output.weight": ((8192, WIDTH), "BF16"), b + "attn_norm.weight": ((WIDTH,), "F32")}
        shapes |= {b + f"ffn_{p}_exps.weight": ((WIDTH, 1536, EXPERTS), "BF16") for p in ("gate", "up")}
        shapes |= {b + "ffn_down_exps.weight": ((1536, WIDTH, EXPERTS), "BF16")}
        shapes |= {b + "ffn_gate_inp.weight": ((WIDTH, EXPERTS), "F32")}
    infos = [(name, shape, BY_NAME[t]) for name, (shape, t) in shapes.items()]
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    return write_hollow(path, [Field.of(k, v) for k, v in values.items()], infos, {})


#: In the manner of cooks who publish a script, and of GGUF-Tool-Suite.
SCRIPT = r"""#!/usr/bin/env bash
custom="
# Attention
blk\..*\.attn_k.*=q8_0
blk\..*\.attn_.*=iq6_k
# Experts, the first and the last better
blk\.(0|93)\.ffn_down_exps\.weight=iq5_ks
blk\..*\.ffn_down_exps\.weight=iq3_ks
blk\..*\.ffn_(gate|up)_exps\.weight=iq2_ks

token_embd\.weight=iq4_k
output\.weight=iq6_k
"
custom=$(echo "$custom" | grep -v '^#' | sed -Ez 's:\n+:,:g;s:,$::;s:^,::')
./llama-quantize --custom-q "$custom" in.gguf out.gguf IQ2_KS 24
"""
THIREUS = r"""## Model head & embeddings
^token_embd\.weight$=q8_0
^output\.weight$=q8_0_r8
## Experts
^blk\.([0-9]|[1-8][0-9]|9[0-3])\.attn_(q|k|v|output)\.weight$=iq5_k
^blk\.([0-9]|[1-4][0-9])\.ffn_(down|up|gate)_exps\.weight$=iq3_k
^blk\.([5-8][0-9]|9[0-3])\.ffn_(down|up|gate)_exps\.weight$=iq2_ks
## Summary: 3.05 bpw
"""


def write_recipe_file(folder: Path, text: str) -> Path:
    path = folder / "r.recipe"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        (THIREUS, "thireus"),
        ("attn_v = q6_K\n", "ours"),
        ("# by hand\nattn_v=q6_K\n", "ours"),
        ("attn_v=q6_K\nffn=q4_k\n", "llama.cpp"),
        ("attn_v=q6_K ffn=q4_k", "llama.cpp"),
        (r"attn_v=iq6_k,blk\.[0-9]+\.ffn=iq4_ks", "ik"),
        (r"^blk\.3\.ffn_down_exps\.weight$=iq2_ks", "thireus"),
    ],
)
def test_dialects_are_detected(text: str, dialect: str) -> None:
    assert detect_dialect(text) == dialect


def test_a_script_is_read_or_refused(tmp_path: Path) -> None:
    read = parse_recipe(SCRIPT, "s.sh")
    assert (read.dialect, len(read.rules), read.rules[0].origin) == ("ik", 7, "s.sh:4")
    assert read.comments == ("Attention", "Experts, the first and the last better")
    with refuses(RecipeError, "QK-E204 s.sh $T"):
        parse_recipe('custom="\nattn=$TYPE\n"\n', "s.sh")
    with refuses(RecipeError, "QK-E204 s.sh"):
        parse_recipe('custom="a=q4_K"\ncustom2="b=q4_K"\n', "s.sh")


MIXED = "\\Dttn = Q6_K\nblk.1 = iq2_ks\n(?<=gate)_exps = iq3_k\nFFN = iq4_ks\n"


@pytest.mark.parametrize("text", [SCRIPT, THIREUS, MIXED])
@pytest.mark.parametrize("dialect", ["ours", "ik", "thireus"])
def test_converted_recipes_give_the_same_types(text: str, dialect: str, big: Path, tmp_path: Path) -> None:
    result = convert_recipe(write_recipe_file(tmp_path, text), dialect, model=big)
    model = read_model(big)
    assert not result.omitted
    assert result.proved_tensors == len(model.tensors)
    assert parse_recipe(result.text, "made", dialect).types(model.tensors) == parse_recipe(text, "r").types(
        model.tensors
    )


def test_types_missing_in_a_project_are_dropped_or_replaced(big: Path, tmp_path: Path) -> None:
    path = write_recipe_file(tmp_path, "attn = iq6_k\nffn = q4_K\n")
    result = convert_recipe(path, "llama.cpp", model=big)
    assert result.text == "ffn=q4_k\n"
    assert len(result.omitted) == 1
    assert "llama.cpp has no IQ6_K" in result.notes[0]
    result = convert_recipe(path, "llama.cpp", model=big, replace={BY_NAME["IQ6_K"]: BY_NAME["Q6_K"]})
    assert result.text == "attn=q6_k\nffn=q4_k\n"
    assert not result.omitted


#: Parts of patterns: portable ones, and ones that some engines read differently.
PARTS = st.sampled_from(
    ["attn", "_", "[qk]", r"\.", ".", "blk", r"\d", r"\D", "[0-9]", "{1,2}", "+", "?", "*", "|", "(up|gate)"]
    + [
        "exps",
        "(?=.*exps)",
        "(?!a)",
        "^",
        "$",
        "WEIGHT",
        r"\S",
        r"\b",
        "(?i)",
        "(?<=x)",
        "*+",
        "(?:q|v)",
        r"[\w.]",
        "[[:alpha:]]",
        ",",
        "=",
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.lists(PARTS, min_size=1, max_size=5), TYPES), max_size=4), st.sets(NAMES, max_size=12))
def test_any_rules_round_trip(rule_lists: list[tuple[list[str], TensorType]], names: set[str]) -> None:
    rules = []
    for parts, t in rule_lists:
        try:
            rules.append(Rule("".join(parts), t, "r"))
        except RecipeError:
            continue
    model_types = {name: None for name in names if name.islower()}
    model = Model(Path("m"), "llama", model_types, 1, 0, 0, 0, {})  # type: ignore[arg-type]
    recipe = Recipe("r", "ours", tuple(rules))
    for dialect in ("llama.cpp", "ik", "thireus"):
        converted_rules = convert_rules(recipe, dialect, model, {})
        read = parse_recipe(converted_rules.text, "there", dialect)
        assert read.types(model_types) == recipe.types(model_types)
        copy = convert_rules(read, "ours", model, {})
        assert parse_recipe(copy.text, "back", "ours").types(model_types) == recipe.types(model_types)


@pytest.mark.parametrize(
    ("pattern", "dialect", "expected"),
    [
        (r"\Dttn", "llama.cpp", "[^[:digit:]]ttn"),
        (r"\Dttn", "ik", r"\Dttn"),
        ("a{1,3}b{2,}", "ik", "a{1}(a(a)?)?b{2}b*"),
        ("(?=a)b", "ik", "(?!(?!a))b"),
        (r"a\,b", "ik", r"a\x2cb"),
        (r"\d(?:a|b)", "thireus", "[[:digit:]](a|b)"),
        ("ATTN", "ik", "attn"),
    ],
)
def test_rewritten_patterns(pattern: str, dialect: str, expected: str) -> None:
    assert rewrite(pattern, dialect) == expected


@pytest.mark.parametrize(
    "pattern", ["(?i)a", "a*+", "(?<=a)b", r"\p{L}", r"\Aa", "(a)\\1", "a**", "[]a]", "a{1,99999}"]
)
def test_patterns_that_are_not_portable(pattern: str) -> None:
    with pytest.raises(NotPortable):
        rewrite(pattern, "ik")


def test_llama_cpp_lowercases_patterns_and_ik_does_not() -> None:
    assert DialectPattern("ATTN", "llama.cpp", "").matches("blk.0.attn_q.weight")
    assert not DialectPattern("ATTN", "ik", "").matches("blk.0.attn_q.weight")
    assert DialectPattern(r"^\Slk", "ik", "").matches("blk.0")
    assert not DialectPattern(r"^\Slk", "llama.cpp", "").matches("blk.0")


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (r"^output\.weight$ = q8_0", []),
        ("blk.1 = q6_K", ["QK-W024"]),
        (r"blk\.(1|2)\.attn = q6_K", []),
        (r"blk\.(1|2) = q6_K", ["QK-W024"]),
        ("output.weight = q6_K", ["QK-W003"]),
        ("nothing = q6_K", ["QK-W001"]),
        ("attn_q = q6_K\nattn_q = q8_0", ["QK-W026", "QK-W002"]),
        ("attn_norm = q8_0", ["QK-W023"]),
        ("attn_norm = f32", []),
        ("ffn_down = iq2_xxs", ["QK-W022"]),
        ("attn_q = iq4_ks\nffn = nvfp4", ["QK-W020"]),
    ],
)
def test_lint(text: str, codes: list[str], big: Path, tmp_path: Path) -> None:
    assert [f.code for f in lint_recipe(write_recipe_file(tmp_path, text), model=big)] == codes


def test_lint_without_a_model(tmp_path: Path) -> None:
    assert [f.code for f in lint_recipe(write_recipe_file(tmp_path, "a = iq4_ks"), runtime="mainline")] == ["QK-W020"]
    lints = lint_recipe(write_recipe_file(tmp_path, "(?<=a)b=q4_K,c=q4_K"))
    assert [(f.code, f.severity) for f in lints] == [("QK-W028", "error")]


def test_rows_of_partial_blocks_are_reported(tmp_path: Path) -> None:
    fields = [Field.of("general.architecture", "llama"), Field.of("llama.block_count", 1)]
    infos = [("blk.0.ffn_down.weight", (96, 64), BY_NAME["F16"]), ("blk.0.attn_q.weight", (256, 60), BY_NAME["F16"])]
    model = write_hollow(tmp_path / "m.gguf", fields, infos, {})
    lints = lint_recipe(write_recipe_file(tmp_path, "ffn = q4_K\nattn = q4_0_r8\n"), model=model)
    assert [f.code for f in lints] == ["QK-W021", "QK-W021"]
    assert "Q4_K becomes Q5_0: rows of 96 are not a multiple of blocks of 256" in lints[0].message + lints[1].message


def test_show_by_class_and_device(big: Path, tmp_path: Path) -> None:
    path = write_recipe_file(tmp_path, THIREUS)
    table = show_recipe(path, model=big, gpu_layers=1000, overrides=["_exps=CPU"])
    assert table.contents.exact
    assert {s.name: s.tensors for s in table.by_device} == {"CPU": 3 * LAYERS + 1, "CUDA0": 6 * LAYERS + 2}
    experts = next(s for s in table.by_class if s.name == "ffn_up_exps")
    assert (experts.types, experts.token_bytes) == (("IQ3_K", "IQ2_KS"), experts.nbytes * 8 // EXPERTS)
    assert sum(s.nbytes for s in table.by_layer) == table.total.nbytes
    one = show_recipe(path, model=big, gpu_layers=1000, cpu_moe=True)
    assert one.by_device == table.by_device
    partial_table = show_recipe(path, model=big, gpu_layers=1000, n_cpu_moe=10)
    assert {s.name: s.tensors for s in partial_table.by_device}["CPU"] == 31
    assert not show_recipe(big).contents.tensors[0].type.is_quantized
    for options in ({"cpu_moe": True, "n_cpu_moe": 3}, {"overrides": ["exps"]}):
        with pytest.raises(RecipeError):
            show_recipe(path, model=big, **options)


def test_recipe_of_a_file_round_trips(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "data" / "tiny-moe-bf16.gguf"
    out = tmp_path / "out.gguf"
    options = QuantizeOptions(tensor_type=("attn_k=q8_0", "attn_v=q5_0"), token_embedding_type="q5_0")
    quantize(model, out, "Q4_0", options)
    recipe = tmp_path / "theirs.recipe"
    for dialect in DIALECTS:
        recipe.write_text(convert_recipe(out, dialect).text)
        assert diff_recipe(recipe, out, model=model).identical, dialect
    with open_gguf(out) as quantized:
        types = {name: t.type for name, t in quantized.tensors.items()}
    assert {t.name: t.type for t in show_recipe(out).contents.tensors} == types
    assert show_recipe(recipe, model=model, title="Q4_0").total.nbytes == show_recipe(out).total.nbytes
    recipe.write_text("attn_k = q6_K\n")
    assert not diff_recipe(recipe, out).identical
    assert not diff_recipe(out, model).identical


def test_the_command(big: Path, tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["recipe", *map(str, arguments)], env={"COLUMNS": "80"})
        return result.exit_code, result.stdout

    path = write_recipe_file(tmp_path, THIREUS)
    code, text = run("show", path, "-m", big, "-ngl", "all", "--n-cpu-moe", "40", "--layers")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    code, text = run("show", path, "-m", big, "--json")
    assert json.loads(text)["exact"] is True
    assert run("lint", path, "-m", big, "--imatrix", path) == (0, "nothing found\n")
    assert run("lint", path, "--for", "mainline")[0] == 1
    second = tmp_path / "ik.txt"
    assert run("convert", path, second, "--to", "ik", "-m", big)[0] == 0
    assert run("diff", path, second, "-m", big)[0] == 0
    assert run("diff", path, write_recipe_file(tmp_path / "..", "a = q4_K\n"))[0] == 1
    assert run("diff", path, big)[0] == 1
    assert run("convert", path, "-", "--to", "llama.cpp")[0] == 1


def test_hostile_recipes(big: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.recipe"
    for data, refusal in [
        (b"\xff\xfe\x00a", "QK-E121 UTF-8"),
        (b"a\0b=q4_K", "QK-E121 r.recipe"),
        (b"a=q4_K\n" * 100_000, "QK-E204 20000"),
        (b"\n" * (17 << 20), "QK-E120 r.recipe"),
    ]:
        path.write_bytes(data)
        with refuses(RecipeError, refusal):
            lint_recipe(path, model=big)
    path.write_text(r"(?:(\w)\1?|\w\w|\w|.)+[!-*] = q4_K")
    with refuses(RecipeError, "QK-E205 r.recipe:1"):
        lint_recipe(path, model=big)
