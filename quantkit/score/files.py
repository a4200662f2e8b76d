"""Files of multiple-choice tasks, as llama-perplexity and lm-evaluation-harness have them.

Formats of llama.cpp b11434 (tools/perplexity/perplexity.cpp hellaswag_score, winogrande_score, multiple_choice_score):

    hellaswag        text, 6 lines a task: context, number of the correct ending (0 to 3), 4 endings
    winogrande       CSV: number, sentence with _, choice 1, choice 2, answer (1 or 2)
    multiple-choice  binary: u32 n, u32[n] positions; a task has a question and two lists of answers, of which
                     llama-perplexity uses the first: u32 n, strings, i32[n] labels (1: correct). Strings: u32, bytes

``requests`` is JSON Lines, one task a line: the samples of lm-evaluation-harness (--log_samples: ``arguments``,
``target``), or objects with ``prompt``, ``choices`` and ``answer``.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import FormatError

#: Most answers of a task, as in llama-perplexity.
MAX_ANSWERS = 100


@dataclass(frozen=True)
class Question:
    """A task: ``parts`` is a prompt and a continuation for each choice, ``answers`` the numbers of correct choices."""

    number: int
    parts: tuple[tuple[bytes, bytes], ...]
    answers: frozenset[int]


@dataclass(frozen=True)
class Questions:
    """The tasks of a file in its order, their format, and notes on lines that are not tasks."""

    kind: str
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()


def read_questions(data: bytes, name: str, kind: str | None = None) -> Questions:
    """Return the tasks of a file.

    Args:
        data: the bytes of the file.
        name: of the file, for errors.
        kind: one of ``KINDS``; None: by the contents.

    Raises:
        FormatError: the file is not of this kind, or a task is malformed.
    """
    has_kind = kind is not None
    kind = kind or kind_of(data)
    notes: list[str] = []
    questions = tuple(_READERS[kind](data, name, notes))
    if not questions:
        names = KINDS[kind] if has_kind else f"{', '.join(KINDS.values())}: its format is none of these"
        raise FormatError(f"{name}: has no tasks of {names}", "QK-E101")
    return Questions(kind, questions, tuple(notes))


def kind_of(data: bytes) -> str:
    """Return the kind of a file by its contents: WinoGrande if it is none of the others."""
    (n,) = struct.unpack_from("<I", data) if len(data) >= 8 else (0,)
    if 0 < n <= len(data) // 4 and struct.unpack_from("<I", data, 4)[0] == 4 + 4 * n:
        return "multiple-choice"
    if data.lstrip()[:1] == b"{":
        return "requests"
    lines = data.split(b"\n", 2)
    return "hellaswag" if len(lines) > 2 and re.fullmatch(rb"\s*[0-3]\s*", lines[1]) else "winogrande"


def _hellaswag(data: bytes, name: str, notes: list[str]) -> Iterator[Question]:
    lines = data.removesuffix(b"\n").split(b"\n")
    if len(lines) % 6:
        raise FormatError(f"{name}: {len(lines)} lines, not a multiple of 6, as HellaSwag has them", "QK-E101")
    for i in range(0, len(lines), 6):
        context, label, *endings = lines[i : i + 6]
        if not re.fullmatch(rb"\s*[0-3]\s*", label):
            raise FormatError(
                f"{name}: line {i + 2} must be the number of an ending, 0 to 3: {label[:40]!r}", "QK-E101"
            )
        yield Question(i // 6, tuple((context + b" ", ending) for ending in endings), frozenset({int(label)}))


#: A line up to its first four commas outside quotes; the sentence may be quoted.
_FIELD = rb'(?:[^,"]|"[^"]*")*'
_WINOGRANDE = re.compile(rb"(%b),(%b),(%b),(%b),(.*)" % ((_FIELD,) * 4), re.DOTALL)


def _winogrande(data: bytes, name: str, notes: list[str]) -> Iterator[Question]:
    """Skip the lines that llama-perplexity skips, but not the last one, which it drops with its -f."""
    bad = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        match = _WINOGRANDE.fullmatch(line)
        sentence = match[2] if match else b""
        quoted = sentence[:1] == b'"'
        first, blank, second = (sentence[1:-1] if quoted else sentence).partition(b"_")
        answer = re.match(rb"\s*([12])(?!\d)", match[5]) if match else None
        if match is None or not blank or answer is None:
            bad.append(number + 1)
            continue
        parts = tuple((first + choice, second) for choice in match.group(3, 4))
        yield Question(number, parts, frozenset({int(answer[1]) - 1}))
    if bad:
        notes.append(f"{name}: {len(bad)} lines are no tasks of WinoGrande and are skipped; the first is line {bad[0]}")


def _multiple_choice(data: bytes, name: str, notes: list[str]) -> Iterator[Question]:
    reader = _Binary(data, name)
    n = reader.number()
    reader.skip(4 * n)
    for i in range(n):
        question, answers, labels = reader.string(), *reader.answers()
        reader.answers()
        if not question or not answers or not all(answers):
            raise FormatError(f"{name}: task {i} has an empty question or answer", "QK-E101")
        correct = frozenset(j for j, label in enumerate(labels) if label == 1)
        yield Question(i, tuple((question + b" ", answer) for answer in answers), correct)


class _Binary:
    """Reads the numbers and strings of a file in order."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self.position = data, name, 0

    def skip(self, n: int) -> int:
        """Skip n bytes; return their position."""
        begin = self.position
        if n > len(self.data) - begin:
            raise FormatError(f"{self.name}: truncated: {n} bytes at {begin}, of {len(self.data)}", "QK-E101")
        self.position += n
        return begin

    def number(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.skip(4))[0])

    def string(self) -> bytes:
        n = self.number()
        begin = self.skip(n)
        return self.data[begin : begin + n]

    def answers(self) -> tuple[list[bytes], Sequence[int]]:
        """Return a list of answers and their labels."""
        n = self.number()
        if n > MAX_ANSWERS:
            raise FormatError(f"{self.name}: {n} answers at {self.position - 4}, at most {MAX_ANSWERS}", "QK-E101")
        texts = [self.string() for _ in range(n)]
        return texts, struct.unpack_from(f"<{n}i", self.data, self.skip(4 * n))


def _requests(data: bytes, name: str, notes: list[str]) -> Iterator[Question]:
    for number, line in enumerate(data.splitlines()):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
            parts = tuple((prompt.encode(), choice.encode()) for prompt, choice in _pairs(sample))
            answer = _answer(sample, parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise FormatError(
                f"{name}: line {number + 1} must have prompt, choices and answer, or the arguments and target of "
                f"lm-evaluation-harness: {type(e).__name__}: {e}",
                "QK-E101",
            ) from None
        if not 2 <= len(parts) <= MAX_ANSWERS or not 0 <= answer < len(parts) or not all(c for _, c in parts):
            raise FormatError(
                f"{name}: line {number + 1} has {len(parts)} choices, and answer {answer}: give 2 to {MAX_ANSWERS} "
                "that are not empty, and the number of the correct one, from 0",
                "QK-E101",
            )
        yield Question(number, parts, frozenset({answer}))


def _pairs(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the prompt and the continuation of each choice of a line."""
    if "arguments" not in sample:
        return [(sample["prompt"], choice) for choice in sample["choices"]]
    arguments = sample["arguments"]
    if isinstance(arguments, dict):  # by version: lists, or gen_args_N with arg_0 and arg_1
        arguments = [(pair["arg_0"], pair["arg_1"]) for pair in arguments.values()]
    return [(prompt, choice) for prompt, choice in arguments]


def _answer(sample: dict[str, Any], parts: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the number of the correct choice: of the answer or target, which may be its text."""
    answer = sample["answer"] if "answer" in sample else sample["target"]
    if isinstance(answer, str) and not answer.strip().isdecimal():
        return [choice.decode().strip() for _, choice in parts].index(answer.strip())
    return int(answer)


_READERS = {
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "multiple-choice": _multiple_choice,
    "requests": _requests,
}
#: Formats of tasks, with their names.
KINDS = {
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "multiple-choice": "multiple choice",
    "requests": "requests",
}
