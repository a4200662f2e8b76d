"""Answers: greedy tokens are those of the logits and of llama.cpp, draws repeat, chats use the file's template."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.edit import EditOptions, edit
from quantkit.errors import FormatError, RecipeError
from quantkit.generate import BEGINNINGS, MESSAGES, Answer, first_difference, generate
from quantkit.model.engine import load

JINJA = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture
def chat_model(tiny_moe: Path, tmp_path: Path) -> Path:
    (tmp_path / "t.jinja").write_text(JINJA)
    edit(tiny_moe, path := tmp_path / "chat.gguf", EditOptions(chat_template={"": tmp_path / "t.jinja"}))
    return path


def test_greedy_tokens_have_the_largest_logits(tiny_moe: Path) -> None:
    with load(tiny_moe) as model:
        ids = model.tokenizer.encode("Once upon a time")
        result = generate(model, ["Once upon a time"], n_predict=12)
        answer = result.answers[0]
        rows = model.forward(np.concatenate([ids, np.array(answer.tokens, np.int32)]))
        expected = rows[len(ids) - 1 : len(ids) - 1 + len(answer.tokens)].argmax(axis=1)
    assert list(answer.tokens) == expected.tolist()
    assert (answer.n_prompt, len(answer.tokens), result.is_chat) == (len(ids), 12, False)
    assert generate(tiny_moe, ["Once upon a time"], n_predict=12).answers[0].tokens == answer.tokens


def test_an_answer_ends_with_the_context(tiny_moe: Path, tmp_path: Path) -> None:
    edit(tiny_moe, path := tmp_path / "m.gguf", EditOptions(set={"qwen3moe.context_length": 12}))
    result = generate(path, ["Once upon a time"], n_predict=50)
    answer = result.answers[0]
    assert answer.n_prompt + len(answer.tokens) == 12
    assert any("12" in note for note in result.notes)
    with refuses(RecipeError, "QK-E203 12"):
        generate(path, ["word " * 40])


@pytest.mark.peer
def test_greedy_text_is_that_of_llama_cpp(llama_bin: Path, tiny_moe: Path) -> None:
    arguments = ["-m", tiny_moe, "-p", "Once upon a time", "-n", "24", "--temp", "0", "-no-cnv", "--no-display-prompt"]
    result = subprocess.run(
        [llama_bin / "llama-completion", *arguments], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    answer = generate(tiny_moe, ["Once upon a time"], n_predict=24).answers[0].text
    assert result.stdout.decode().strip() == answer.strip()


def test_draws_depend_on_the_seed_alone(tiny_moe: Path) -> None:
    with load(tiny_moe) as model:
        texts = [
            generate(model, ["Once"], n_predict=16, temperature=t, seed=seed).answers[0].text
            for t, seed in ((1.0, 1), (1.0, 1), (1.0, 2), (1e-6, 1), (0.0, 1))
        ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


def test_an_answer_ends_with_its_turn(tiny_moe: Path) -> None:
    with load(tiny_moe) as model:
        first = generate(model, ["Once"], n_predict=3).answers[0]
        model.tokenizer.end_ids = frozenset({first.tokens[2]})
        pieces: list[tuple[int, str]] = []
        answer = generate(model, ["Once"], n_predict=9, on_text=lambda i, piece: pieces.append((i, piece))).answers[0]
    assert (answer.tokens, answer.end) == (first.tokens[:2], model.tokenizer.piece(first.tokens[2]).decode())
    assert "".join(piece for _, piece in pieces) == answer.text


def test_chats_use_the_template_of_the_file(chat_model: Path, tiny_moe: Path) -> None:
    with load(chat_model) as model:
        result = generate(model, ["Hi"], system="Be brief", n_predict=4)
        n = len(model.tokenizer.encode("<system>Be brief<user>Hi<answer>", parse_special=True))
        assert (result.is_chat, result.answers[0].n_prompt) == (True, n)
        assert [a.prompt for a in generate(model, n_predict=1).answers] == list(MESSAGES)
        assert [a.prompt for a in generate(model, chat=False, n_predict=1).answers] == list(BEGINNINGS)
    with refuses(FormatError, "QK-E123", str(tiny_moe)):
        generate(tiny_moe, ["Hi"], chat=True)
    with refuses(RecipeError, "QK-E202"):
        generate(tiny_moe, ["Hi"], system="x")
    with refuses(RecipeError, "QK-E203 0"):
        generate(tiny_moe, ["Hi"], n_predict=0)


@pytest.mark.parametrize(
    ("a", "b", "n"), [("abc", "abc", None), ("abc", "abx", 2), ("ab", "abc", 2), ("", "x", 0), ("x", "y", 0)]
)
def test_the_first_difference(a: str, b: str, n: int | None) -> None:
    x, y = (Answer("", (), text, "", 0, 0, 0) for text in (a, b))
    assert first_difference(x, y) == n


def test_the_command(chat_model: Path, tiny_moe: Path) -> None:
    arguments = ["try", "-m", str(tiny_moe), "--beside", str(chat_model), "-p", "Once", "-n", "4"]
    result = CliRunner().invoke(cli, [*arguments, "--no-chat"])
    assert result.exit_code == 0, result.output
    assert "the answers are equal" in result.stdout
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    answer = json.loads(result.stdout)
    assert [model["chat"] for model in answer["models"]] == [False, True]
    assert isinstance(answer["equal_characters"][0], int)
