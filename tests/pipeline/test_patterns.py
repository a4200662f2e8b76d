"""Users' regular expressions: every one comes to an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refuses

from quantkit import compare, inspect, patterns
from quantkit.errors import RecipeError
from quantkit.model.placement import Placement, parse_rules
from quantkit.pipeline.recipe import parse_rule
from small_models import llama_tensors, write_model

ENDLESS = r"(?:(\w)\1?|\w\w|\w|.)+[!-*]"
NAME = "blk.12.ffn_gate_up_exps.weight"


@pytest.mark.usefixtures("pattern_limit")
@pytest.mark.parametrize("verb", ["recipe", "-ot", "inspect", "compare", "--ignore-metadata"])
@pytest.mark.parametrize(("pattern", "refusal"), [(ENDLESS, "QK-E205"), ("(", "QK-E205 1")])
def test_a_slow_pattern_is_named(tmp_path: Path, verb: str, pattern: str, refusal: str) -> None:
    path = write_model(tmp_path / "m.gguf", llama_tensors())
    calls = {
        "recipe": lambda: parse_rule(f"{pattern}=q4_K", "mix.txt:3").matches(NAME),
        "-ot": lambda: Placement(rules=parse_rules([f"{pattern}=CPU"])).tensor_device(NAME, 0, 1),
        "inspect": lambda: inspect(path, tensors=pattern),
        "compare": lambda: compare(path, path, tensors=pattern),
        "--ignore-metadata": lambda: compare(path, path, ignore_metadata=[pattern]),
    }
    with refuses(RecipeError, refusal) as e:
        calls[verb]()
    origin = {"recipe": "mix.txt:3", "inspect": "--tensors", "compare": "--tensors"}.get(verb, verb)
    assert e.value.message.startswith(origin)
    assert repr(pattern) in e.value.message


@pytest.mark.usefixtures("pattern_limit")
def test_the_time_limit_covers_all_names() -> None:
    slow = patterns.Pattern(ENDLESS, "-ot")
    names = [f"blk.{n}.attn_q" for n in range(10**6)]
    with refuses(RecipeError, "QK-E205"):
        any(map(slow.search, names))
