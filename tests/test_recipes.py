"""Recipes in and out: written for types, read in four dialects as their programs read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import RecipeError
from quantkit.recipes import DIALECTS, parse_rules, write_recipe
from quantkit.recipes.write import one_of
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
    pattern = one_of(numbers)
    assert {n for n in range(1200) if re.fullmatch(pattern, str(n))} == numbers


@settings(deadline=None)
@given(st.dictionaries(NAMES, TYPES, max_size=40), st.sets(NAMES, max_size=20), st.sampled_from(DIALECTS))
def test_written_rules_give_exactly_the_types(types: dict[str, TensorType], more: set[str], dialect: str) -> None:
    others = more - types.keys()
    text = write_recipe(types, ["a line"], dialect, others=others)
    read = parse_rules(text, "r", dialect)
    assert read.comments == (() if dialect == "llama.cpp" else ("a line",))
    assert read.types([*types, *others]) == {**types, **dict.fromkeys(others)}


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
    with pytest.raises(RecipeError, match=r"llama.cpp has no type IQ4_KS \(for blk.0.ffn_up_exps.weight\)"):
        write_recipe(types, dialect="llama.cpp")


def test_names_that_no_rule_tells_apart() -> None:
    with pytest.raises(RecipeError, match="no rules of ours give"):
        write_recipe({"A.weight": BY_NAME["Q4_K"], "a.weight": BY_NAME["Q8_0"]})
