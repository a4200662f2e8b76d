"""Foreign code and grammars: whatever they do, it is one error that names the file, soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from tiny_checkpoints import moe_arrays, moe_config, write_checkpoint

from quantkit import chat
from quantkit.chat import chat_template
from quantkit.checkpoint import general
from quantkit.checkpoint.vocab import tokenizer
from quantkit.convert import ConvertOptions, plan_convert
from quantkit.cook import config as cook_config
from quantkit.cook import read_config
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.foreign.child import Child, Limits
from quantkit.formats.gguf import Field, open_gguf
from quantkit.pipeline.recipe import MAX_RULES, parse_custom_q, parse_recipe
from small_models import llama_fields, llama_tensors, write_model

#: Less than the usual limits, for tests.
SHORT = Limits(seconds=1, memory=1 << 28, answers=1 << 22)


class Words:
    """A tokenizer with neither BOS nor EOS, for templates: rendering one asks for nothing else."""

    bos = eos = None

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> Any:
        raise AssertionError("rendering a template does not tokenize")

    def piece(self, token: int) -> bytes:
        raise AssertionError("rendering a template does not tokenize")


@pytest.mark.parametrize(
    ("template", "refusal"),
    [
        ("{{ 9**(9**9) }}", "QK-E116 1"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "QK-E116 1"),
        ("{{ 'x' * 20000000000 }}", "QK-E116 MiB"),
        ("{{ 'x' * 9000000 }}", "QK-E116 4.00 MiB"),
        ("{{ 1 // 0 }}", "QK-E116 ZeroDivisionError"),
        ("{{ 10.0 ** 1000 }}", "QK-E116 OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "QK-E116 RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "QK-E116 m.gguf tokenizer.chat_template"),
        ("{% break %}", "QK-E116 SyntaxError"),
        ("{{ x", "QK-E116 TemplateSyntaxError"),
        ("{{ raise_exception('no system role') }}", "QK-E116 m.gguf tokenizer.chat_template"),
        ("{{ ''.__class__.__mro__ }}", "QK-E116 SecurityError"),
    ],
)
def test_a_template_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, refusal: str
) -> None:
    monkeypatch.setattr(chat, "LIMITS", SHORT)
    fields = [*llama_fields(), Field.of("tokenizer.chat_template", template)]
    path = write_model(tmp_path / "m.gguf", llama_tensors(), fields)
    with open_gguf(path) as source, chat_template(source, Words()) as child:
        with refuses(FormatError, refusal) as e:
            child.call("render", [{"role": "user", "content": "a"}])
        assert e.value.message.startswith(f"{path}: tokenizer.chat_template: ")
        assert len(e.value.message) < 600
        with pytest.raises(FormatError):  # and it stays so
            child.call("render", [{"role": "user", "content": "a"}])


def test_a_child_serves_many_calls_and_ends_with_its_parent() -> None:
    with Child("quantkit.foreign.template:Template", "t", "{{ messages[0].content }}{{ bos_token }}", {}) as child:
        for text in ("a", "\udce9\n", "\u2028é" * 50_000):
            assert child.call("render", [{"role": "user", "content": text}]) == text
        process = child._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None


def test_lower_shell_limits_are_kept() -> None:
    """They are below ours, and no child may raise them."""
    expression = "Child('quantkit.foreign.grammars:Grammars', 't')"
    code = f"from quantkit.foreign.child import Child; print({expression}.call('toml', 'a=1'))"
    command = f'ulimit -t 5; ulimit -v 900000; exec {sys.executable} -c "{code}"'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert (process.stdout, process.stderr) == ("{'a': 1}\n", "")


def test_no_file_descriptor_leaks(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Child("quantkit.foreign.grammars:Grammars", "t") as child, pytest.raises(FormatError):
            child.call("toml", "=")
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of other tests may be collected meanwhile


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("m"), moe_config(num_hidden_layers=1), moe_arrays(layers=1))


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    value = json.loads((folder / name).read_text())
    change(value)
    return json.dumps(value)


def _abort(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAQAAGFiYw=="}


def _grow(value: dict[str, Any]) -> None:
    """Each step makes ten letters of one."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    value["normalizer"] = {"type": "Sequence", "normalizers": [step] * 12}


@pytest.mark.parametrize("change", [_abort, _grow])
def test_a_tokenizer_cannot_end_the_process(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    monkeypatch.setattr(tokenizer, "LIMITS", Limits(seconds=10, memory=1 << 30))
    path = checkpoint / "tokenizer.json"
    before = path.read_text()
    path.write_text(edited(checkpoint, "tokenizer.json", change))
    try:
        with pytest.raises(FormatError) as e:
            plan_convert(checkpoint, None, None, ConvertOptions())
    finally:
        path.write_text(before)
    assert e.value.message.startswith(f"{path}: ")


def test_a_model_card_has_a_size_limit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "GRAMMAR", SHORT)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = checkpoint / "README.md"
    path.write_text("\n".join(["---", *lines, "tags: *a11", "---", ""]))
    try:
        with pytest.raises(FormatError) as e:
            plan_convert(checkpoint, None, None, ConvertOptions(pre="gpt-2"))
    finally:
        path.unlink()
    assert e.value.message.startswith(f"{path}: its front matter: ")


# ---------------------------------------------------------------- settings and recipes


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 50_000) + " = 1",
        "a = " + "[" * 100_000,
        '"' + "k" * 100_000 + '" = 1',
        "[convert]\n" + "x" * 100_000 + " = 1",
        'model = "m"\ntargets = ["' + "Q" * 100_000 + '"]',
        'model = "m"\nthreads = ' + "9" * 100_000,
        'model = "m"\nthreads = ' + "[" * 300 + "]" * 300,
        'model = "m"\ntargets = [' + ", ".join(f'"{2 + i / 10_000}bpw"' for i in range(10_000)) + "]",
    ],
    ids=["dotted", "nested", "key", "in a table", "target", "number", "value", "targets"],
)
def test_settings_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(cook_config, "GRAMMAR", SHORT)
    (tmp_path / "cook.toml").write_text(text)
    with pytest.raises(QuantkitError) as e:
        read_config(tmp_path / "cook.toml")
    assert str(tmp_path / "cook.toml") in e.value.message
    assert len(e.value.message) < 2000


@pytest.mark.usefixtures("pattern_limit")
@pytest.mark.parametrize(
    "pattern",
    ["a{1000000000}", "(?:" * 6 + "a" + "){50}" * 6, "(?:ab|cd){999999999}", "x" * 10_000_000, "(" * 3000 + ")" * 3000],
    ids=["count", "counts", "group", "10 MB", "nested"],
)
def test_compiling_a_pattern_has_a_memory_limit(pattern: str) -> None:
    with pytest.raises(RecipeError) as e:
        parse_recipe(f"ok = q8_0\n{pattern} = q4_K\n", "mix.txt")
    assert e.value.message.startswith("mix.txt:2: ")
    assert len(e.value.message) < 1000


@pytest.mark.usefixtures("pattern_limit")
def test_slow_patterns_share_one_time_limit() -> None:
    slow = r"(?:(\w)\1?|\w\w|\w|.)+[!-*]"
    rules = parse_recipe("".join(f"{slow}{i} = q4_K\n" for i in range(1000)), "mix.txt")
    with refuses(RecipeError, "QK-E205 mix.txt:2 blk.12.ffn_gate_up_exps.weight"):
        any(rule.matches("blk.12.ffn_gate_up_exps.weight") for rule in rules)
    assert parse_recipe("attn_q = q4_K", "mix.txt")[0].matches("blk.0.attn_q.weight")


def test_rules_are_split_in_linear_time() -> None:
    with pytest.raises(RecipeError) as e:
        parse_custom_q(",".join(["a=b"] * 400_000))
    assert len(e.value.message) < 1000
    with refuses(RecipeError, "QK-E204", MAX_RULES):
        parse_custom_q(",".join(["a=q4_K"] * (MAX_RULES + 1)))
