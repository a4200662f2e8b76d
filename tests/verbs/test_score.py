"""``quantkit score``: tasks, order, answers and statistics, against llama-perplexity and scipy."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

import task_files
from quantkit import QuantizeOptions, load, quantize, score
from quantkit.cli import cli
from quantkit.errors import FormatError, RecipeError
from quantkit.score import Accuracy, PairedAccuracy, compare_accuracies
from quantkit.score.files import kind_of, read_questions
from quantkit.score.likelihood import log_likelihoods
from quantkit.score.order import select_tasks
from quantkit.score.tokens import choices_of

#: The functions that make a file, and llama-perplexity's name of the kind.
FILES = {
    "hellaswag": task_files.hellaswag,
    "winogrande": task_files.winogrande,
    "multiple-choice": task_files.multiple_choice,
}


@pytest.fixture(scope="module")
def path(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32, whose products are not rounded: llama.cpp's likelihoods are equal within 0.001."""
    path = tmp_path_factory.mktemp("model") / "model-f32.gguf"
    quantize(tiny_moe, path, "F32")
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    with load(path, n_ctx=512) as opened:
        yield opened


def llama_lines(llama_bin: Path, model: Path, file: Path, kind: str, n_tasks: int) -> list[list[str]]:
    """Return the fields of llama-perplexity's line for each task."""
    command = [llama_bin / "llama-perplexity", "-m", model, "-bf", file, f"--{kind}", f"--{kind}-tasks", f"{n_tasks}"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(llama_bin)}
    command += ["-t", "1", "-np", "8"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [line.split() for line in process.stdout.splitlines() if re.match(r"\d+\t", line)]


def check_against_llama(
    llama_bin: Path, model: Any, folder: Path, kind: str, n: int, n_tasks: int, atol: float
) -> None:
    path, file = model.path, folder / "tasks"
    # llama-perplexity drops a newline at the end, and with it the last task of WinoGrande.
    file.write_bytes(FILES[kind](n) + b"\n" * (kind == "winogrande"))
    lines = llama_lines(llama_bin, path, file, kind, n_tasks)
    file.write_bytes(FILES[kind](n))
    result = score(model, file, n_tasks=n_tasks)
    assert result.kind == kind
    assert len(lines) == len(result.numbers) == (n_tasks or n)
    running = [round(float(fields[1].rstrip("%")) * (i + 1) / 100) for i, fields in enumerate(lines)]
    assert np.cumsum(result.correct["acc_norm"]).tolist() == running
    if kind == "winogrande":
        questions = {q.number: q for q in read_questions(file.read_bytes(), "").questions}
        choices = [choices_of(kind, questions[number], model.tokenizer, "") for number in result.numbers.tolist()]
        means = np.array(result.likelihoods) / [[choice.divisor for choice in task] for task in choices]
        np.testing.assert_allclose(means, [[float(x) for x in fields[2:4]] for fields in lines], atol=atol)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("kind", "n", "n_tasks"),
    [("hellaswag", 45, 40), ("winogrande", 40, 0), ("winogrande", 60, 25), ("multiple-choice", 60, 40)],
)
def test_answers_are_those_of_llama_perplexity(
    llama_bin: Path, model: Any, tmp_path: Path, kind: str, n: int, n_tasks: int
) -> None:
    check_against_llama(llama_bin, model, tmp_path, kind, n, n_tasks, 0.002)


@pytest.mark.peer
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_answers_of_a_real_model(
    llama_bin: Path, request: pytest.FixtureRequest, tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / "model-f32.gguf"
    quantize(request.getfixturevalue(name), path, "F32", options=QuantizeOptions(allow_requantize=True))
    with load(path, n_ctx=512) as opened:
        check_against_llama(llama_bin, opened, tmp_path, kind, 60, 50, 0.02)


def test_kinds_are_told_by_contents() -> None:
    for kind, make in {**FILES, "requests": task_files.requests}.items():
        assert kind_of(make(9)) == kind
        assert len(read_questions(make(9), "").questions) == 9


@pytest.mark.parametrize("is_shared", [True, False])
def test_likelihoods_are_those_of_whole_sequences(model: Any, is_shared: bool) -> None:
    """Also where a layer has a state, and each choice is a sequence of its own."""
    questions = [
        q for kind in (task_files.winogrande, task_files.requests) for q in read_questions(kind(6), "").questions
    ]
    kinds = ["winogrande"] * 6 + ["requests"] * 6
    tasks = [choices_of(kind, q, model.tokenizer, "") for kind, q in zip(kinds, questions, strict=True)]
    stand_in = SimpleNamespace(
        graph=SimpleNamespace(states=() if is_shared else ("state",)), is_bidirectional=False, session=model.session
    )
    sums = log_likelihoods(stand_in, tasks, n_batch=256)  # type: ignore[arg-type]
    expected = []
    for task in tasks:
        log_p = []
        for choice in task:
            logits = np.asarray(model.forward(choice.tokens), np.float64)
            log_p.append(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        for i, choice in enumerate(task):
            rows = [(i, token - 1, token) for token in range(choice.first, choice.end)]
            if choice.predictor is not None:
                rows[0] = (choice.predictor, -1, choice.first)
            expected.append(sum(log_p[k][row, choice.tokens[token]] for k, row, token in rows))
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)


def test_the_order_is_that_of_mt19937() -> None:
    assert select_tasks("requests", 5, 3) == [0, 1, 2]
    assert select_tasks("winogrande", 5, 0) == [0, 1, 2, 3, 4]
    assert sorted(select_tasks("hellaswag", 300, None)) == list(range(300))
    assert len(select_tasks("hellaswag", 1000, None)) == 400
    # The first numbers of std::mt19937(1) are 1791095845 and 4282876139.
    assert select_tasks("multiple-choice", 1000, 2) == [417, 996]
    assert select_tasks("hellaswag", 1000, 2) == [417, 997]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"one\n2\nthree\n", None),
        (
            task_files.hellaswag(3).replace(b"\n0\n", b"\n4\n").replace(b"\n1\n", b"\n4\n").replace(b"\n2\n", b"\n4\n"),
            "hellaswag",
        ),
        (b"no comma\n", "winogrande"),
        (task_files.multiple_choice(3)[:-9], None),
        (struct.pack("<III", 1, 8, 1 << 30), None),
        (struct.pack("<II", 0, 4), "multiple-choice"),
        (b'{"prompt": "a"}\n', None),
        (b'{"prompt": "a", "choices": ["b", "c"], "answer": 2}\n', None),
        (b'{"prompt": "a", "choices": ["b", "c"], "answer": "d"}\n', None),
        (b'{"prompt": "a", "choices": ["b"], "answer": 0}\n', None),
        (b"{" * 100_000, None),
        (b"", None),
    ],
)
def test_malformed_files_are_refused(data: bytes, kind: str | None) -> None:
    with pytest.raises(FormatError) as info:
        read_questions(data, "tasks.bin", kind)
    assert info.value.code == "QK-E101"


def test_a_choice_without_tokens_is_refused(model: Any) -> None:
    lines = [b"A context", b"0", b"one", b"one", b"one", b"one"]
    with pytest.raises(FormatError) as info:
        score(model, b"\n".join(lines), kind="hellaswag")
    assert info.value.code == "QK-E101"


def test_statistics_are_scipys() -> None:
    low, high = Accuracy(37, 50).interval()
    expected = stats.binomtest(37, 50).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high))
    pair = PairedAccuracy(200, 9, 21, 40)
    assert pair.p_value == pytest.approx(stats.binomtest(9, 30).pvalue)
    assert PairedAccuracy(200, 5, 5, 12).p_value == 1
    low, high = pair.interval()
    assert low < pair.difference == -0.06 < high
    assert pair.tasks_needed == 325
    assert PairedAccuracy(200, 0, 0, 3).tasks_needed is None


def test_the_interval_of_a_difference_covers_it() -> None:
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        base = rng.random(120) < 0.7
        second = np.where(rng.random(120) < 0.15, rng.random(120) < 0.5, base)
        low, high = compare_accuracies(base, second, base, second).interval()
        hits += low <= 0.15 * (0.5 - 0.7) <= high
    assert 0.92 < hits / 400 < 0.98


def test_arrays_of_other_tasks_are_refused() -> None:
    with pytest.raises(RecipeError):
        compare_accuracies(np.ones(3, bool), np.ones(4, bool), [0] * 3, [0] * 4)


def test_the_command_compares_with_a_base(tiny_moe: Path, tmp_path: Path) -> None:
    file, result = tmp_path / "tasks.jsonl", tmp_path / "scores.json"
    file.write_bytes(task_files.requests(9))
    arguments = ["score", "-m", str(tiny_moe), "--base-model", str(tiny_moe), "-f", str(file), "--json", str(result)]
    outcome = CliRunner().invoke(cli, arguments)
    assert outcome.exit_code == 0, outcome.output
    base, model = json.loads(result.read_text())["models"]
    assert base["log_likelihoods"] == model["log_likelihoods"]
    assert base["against_base"] == {}
    for metric in ("acc", "acc_norm"):
        pair = model["against_base"][metric]
        assert (pair["flips"], pair["difference"], pair["p_value"], pair["tasks_needed"]) == (0, 0, 1, None)
        assert 0 <= model["metrics"][metric]["accuracy"] <= 1


def test_the_output_is_no_input(tiny_moe: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.txt"
    file.write_bytes(task_files.hellaswag(3))
    arguments = ["score", "-m", str(tiny_moe), "-f", str(file), "--json", str(file), "--overwrite"]
    assert CliRunner().invoke(cli, arguments).exit_code != 0
    assert file.read_bytes() == task_files.hellaswag(3)
