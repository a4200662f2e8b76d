"""Rules: the four dialects, matching, and what the lints find."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from quantkit.errors import RecipeError
from quantkit.pipeline import recipe
from quantkit.pipeline.recipe import Rule, decide, first_match, lint_rules
from quantkit.types import BY_NAME

DENSE = ["token_embd.weight", "output.weight", "blk.0.attn_output.weight", "blk.0.attn_v.weight", "blk.0.ffn_up.weight"]
MERGED = [f"blk.{i}.ffn_{part}_exps.weight" for i in range(3) for part in ("gate_up", "down")]


def pairs(rules: list[Rule]) -> list[tuple[str, str]]:
    return [(r.pattern, r.type.name) for r in rules]


def codes(text: str, names: list[str]) -> list[str]:
    return [lint.code for lint in lint_rules(recipe.parse_recipe(text, "r"), names)]


def test_recipe_lines_comments_and_origins() -> None:
    text = "\ufeff# cooked by hand\n\nattn_v = q6_K\n  blk\\.[0-3]\\.ffn_down=IQ4_XS   # the first\n.*=q4_K\r\n"
    rules = recipe.parse_recipe(text, "mix.txt")
    assert pairs(rules) == [("attn_v", "Q6_K"), (r"blk\.[0-3]\.ffn_down", "IQ4_XS"), (".*", "Q4_K")]
    assert [r.origin for r in rules] == ["mix.txt:3", "mix.txt:4", "mix.txt:5"]


def test_custom_q_splits_only_after_types() -> None:
    rules = recipe.parse_custom_q(r"blk\.[0-9]{1,2}\.attn_v=iq5_ks,(?=token)embd=q8_0, ffn_(up|gate){1,}=q4_0_r8,", 2)
    assert pairs(rules) == [
        (r"blk\.[0-9]{1,2}\.attn_v", "IQ5_KS"),
        ("(?=token)embd", "Q8_0"),
        ("ffn_(up|gate){1,}", "Q4_0_R8"),
    ]
    assert rules[2].origin == "--custom-q #2, rule 3"


def test_a_recipe_line_may_hold_several_rules() -> None:
    rules = recipe.parse_recipe("attn_q=q4_K,attn_k=q5_K", "r")
    assert pairs(rules) == [("attn_q", "Q4_K"), ("attn_k", "Q5_K")]


def test_tensor_type_file_has_words_and_lines() -> None:
    rules = recipe.parse_tensor_type_file("attn_v=q6_K attn_k=q8_0\n# remark\nffn_down = q5_K\n\toutput=f16", "t.txt")
    assert pairs(rules) == [("attn_v", "Q6_K"), ("attn_k", "Q8_0"), ("ffn_down", "Q5_K"), ("output", "F16")]
    assert rules[2].origin == "--tensor-type-file t.txt:3"


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("a=q4_K b=q5_K\n")
    assert pairs(recipe.read_tensor_type_file(path)) == [("a", "Q4_K"), ("b", "Q5_K")]
    path.write_text("attn = iq4_k\n")
    assert recipe.read_recipe(path)[0].origin == "r.txt:1"


def test_unreadable_files(tmp_path: Path) -> None:
    with refuses(RecipeError, "QK-E401"):
        recipe.read_recipe(tmp_path / "none")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xfe")
    with refuses(RecipeError, "QK-E121 4 UTF-8"):
        recipe.read_tensor_type_file(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("attn_q", "QK-E204 attn_q"),
        ("=q4_K", "QK-E204 =q4_K"),
        ("attn_q=", "QK-E204 mix.txt:2"),
        ("attn_q=q4_KM", "QK-E301 q4_KM Q4_K"),
        ("attn_q=q9_K,attn_k=q4_K", "QK-E204 q9_K"),
        ("attn_q=i32", "QK-E301 I32"),
        ("attn_(q=q4_K", "QK-E205 mix.txt:2"),
        ("attn_q*{=q4_K,(=q8_0", "QK-E205 mix.txt:2"),
        ("(?R)=q4_K", "QK-E205 (?R)"),
    ],
)
def test_errors_name_the_place(text: str, refusal: str) -> None:
    with refuses(RecipeError, refusal) as e:
        recipe.parse_recipe(f"\n{text}", "mix.txt")
    assert "mix.txt:2" in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("attn_q", "blk.3.attn_q.weight", True),
        ("ATTN_Q", "blk.3.attn_q.weight", True),
        (r"blk\.([0-9]|1[0-9])\.ffn", "blk.21.ffn_up.weight", False),
        ("blk.[[:digit:]]+.attn", "blk.21.attn_q.weight", True),
        ("blk.[[:alpha:]]+.attn", "blk.21.attn_q.weight", False),
        ("^output", "blk.0.attn_output.weight", False),
        (r"\Dttn", "blk.0.attn_output.weight", True),
        ("^(?!.*attn).*blk", "blk.0.attn_output.weight", False),
        (r"blk\.(\d)\1\.", "blk.22.attn_q.weight", True),
        ("[[:s:][:D:]]", "blk.a", False),
    ],
)
def test_matching(pattern: str, name: str, matches: bool) -> None:
    assert recipe.parse_rule(f"{pattern}=q4_K", "x").matches(name) is matches


def test_the_first_rule_decides() -> None:
    rules = recipe.parse_recipe("attn_v=q6_K\nattn=q4_K", "r")
    assert first_match(rules, "blk.0.attn_v.weight") == rules[0]
    assert first_match(rules, "blk.0.attn_q.weight") == rules[1]
    assert first_match(rules, "output.weight") is None


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("attn_v=q6_K", DENSE, []),
        ("attn_w=q6_K", DENSE, ["QK-W001"]),
        ("attn=q6_K\nattn_v=q8_0", DENSE, ["QK-W002"]),
        ("attn_v=q6_K\nffn=q8_0\nattn_v|ffn=q4_K", DENSE, ["QK-W002"]),
        ("output.weight=q6_K", DENSE, ["QK-W003"]),
        ("output=q6_K", DENSE, ["QK-W003"]),
        (r"^output\.weight$=q6_K", DENSE, []),
        ("attn|output=q6_K", DENSE, []),
        (".*=q6_K", DENSE, []),
        ("ffn_(up|gate)_exps=q6_K", MERGED, ["QK-W014"]),
        ("ffn_.*_exps=q6_K", MERGED, []),
        ("ffn_up_exps|down=q6_K", MERGED, ["QK-W004"]),
        ("up_exps=q6_K", MERGED, ["QK-W004"]),
        ("ffn_up_exps=q6_K\nffn_gate_exps=q6_K", MERGED, ["QK-W014"]),
        ("ffn_up_exps=q6_K\nffn_gate_exps=q5_K", MERGED, ["QK-W013"]),
        ("ffn_up=q6_K\nffn_gate=q5_K", MERGED, ["QK-W013"]),
        ("ffn_up_exps=q6_K\n.*=q5_K", MERGED, ["QK-W013"]),
        ("ffn_(up|gate)_exps=q6_K\n.*=q5_K", MERGED, ["QK-W014"]),
        ("ffn_(up|gate)_exps=q6_K\nexps=q6_K", MERGED, []),
        ("exps=q5_K\nffn_(up|gate)_exps=q6_K", MERGED, ["QK-W002"]),
        ("ffn_(up|gate)_exps=q6_K\ngate_up=q5_K", MERGED, ["QK-W001"]),
        (r"blk\.0\.ffn_up_exps=q4_K,ffn_(up|gate)_exps=q6_K", MERGED, ["QK-W013", "QK-W014"]),
        ("ffn_gate_up_exps=q6_K", ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"], ["QK-W001"]),
    ],
)
def test_lints(text: str, names: list[str], expected: list[str]) -> None:
    assert codes(text, names) == expected


@pytest.mark.parametrize(
    ("text", "decides"),
    [
        ("ffn_(up|gate)_exps=q6_K", "Q6_K"),
        ("ffn_gate_exps=q6_K\nffn_up_exps=q6_K", "Q6_K"),
        ("ffn_(up|gate)_exps=q6_K\n.*=q5_K", "Q6_K"),
        (".*=q5_K\nffn_(up|gate)_exps=q6_K", "Q5_K"),
        ("ffn_(up|gate)_exps=q6_K\nffn_gate_up_exps=q5_K", "Q5_K"),
        ("ffn_up_exps=q6_K", None),
        ("ffn_up_exps=q6_K\nffn_gate_exps=q5_K", None),
        ("ffn_up_exps=q6_K\nexps=q5_K", "Q5_K"),
        ("ffn_up=q6_K\nffn_gate=q5_K", "Q5_K"),
        ("up_exps=q6_K", "Q6_K"),
        (r"ffn_(up|gate)_exps\.bias=q6_K", None),
    ],
)
def test_rules_for_separate_experts_apply_to_merged_ones(text: str, decides: str | None) -> None:
    rule = decide(recipe.parse_recipe(text, "r"), "blk.7.ffn_gate_up_exps.weight").rule
    assert (rule and rule.type.name) == decides


PATTERNS = [
    "ffn_up_exps",
    "ffn_gate_exps",
    "ffn_(up|gate)_exps",
    "ffn_gate_up_exps",
    "up",
    "gate",
    "exps",
    ".*",
    "attn",
]
RULES = st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(["Q4_K", "Q5_K"])), max_size=4)


@given(RULES)
def test_merged_experts_follow_rules_of_their_name_or_both_halves(pairs: list[tuple[str, str]]) -> None:
    rules = [Rule(pattern, BY_NAME[name], f"r:{i}") for i, (pattern, name) in enumerate(pairs)]
    merged, gate, up = (f"blk.0.ffn_{part}_exps.weight" for part in ("gate_up", "gate", "up"))
    direct, of_gate, of_up = (first_match(rules, name) for name in (merged, gate, up))
    verdict, lints = decide(rules, merged), {lint.code for lint in lint_rules(rules, [merged])}
    if verdict.rule is not direct:  # other than in llama-quantize: then both halves say so, and so does a lint
        assert verdict.rule is of_gate
        assert of_gate is not None
        assert of_up is not None
        assert of_gate.type is of_up.type
        assert "QK-W014" in lints
    else:
        assert "QK-W014" not in lints
        types = {rule and rule.type for rule in (of_gate, of_up)}
        specific = direct is not None and not direct.matches(gate) and not direct.matches(up)
        assert specific or types == {direct and direct.type} or lints & {"QK-W004", "QK-W013"}
    for name in (gate, up):
        assert decide(rules, name).rule is first_match(rules, name)


def test_the_deciding_rule_of_merged_experts_is_reported() -> None:
    [lint] = lint_rules(recipe.parse_recipe("ffn_up_exps=q6_K\nffn_gate_exps=q6_K", "r"), MERGED)
    assert str(lint) == (
        "QK-W014: ffn_gate_exps = Q6_K (r:2) and ffn_up_exps = Q6_K (r:1) apply to merged "
        "blk.0.ffn_gate_up_exps.weight and 2 more, since both halves match; in llama-quantize they would not"
    )
    [lint] = lint_rules(recipe.parse_recipe("ffn_up_exps=q6_K\nffn_gate_exps=q5_K", "r"), MERGED)
    assert "give gate and up different types" in lint.message
    assert lint.message.endswith("can have only one: neither has an effect; write a rule for ffn_gate_up_exps")
    [lint] = lint_rules(recipe.parse_recipe("ffn_up_exps=q6_K", "r"), MERGED)
    assert lint.message.endswith("no rule matches the gate half: it has no effect; write a rule for ffn_gate_up_exps")
    [lint] = lint_rules(recipe.parse_recipe("up_exps=q6_K", "r"), MERGED)
    assert "up_exps = Q6_K (r:1) applies to both halves; write" in lint.message
    [lint] = lint_rules(
        recipe.parse_recipe("ffn_gate_up_exps=q5_K", "r"), ["blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.weight"]
    )
    assert "this model has separate up and gate experts" in lint.message


def test_patterns_lowercased_by_llama_quantize_are_reported() -> None:
    [lint] = lint_rules(recipe.parse_tensor_type(r"blk\.\d+\.\Sttn=q4_K"), DENSE)
    assert lint.code == "QK-W005"
    assert r"lower-cases \S to \s" in lint.message
    assert lint_rules(recipe.parse_tensor_type(r"blk\\.Dttn|attn=q4_K"), DENSE) == []
