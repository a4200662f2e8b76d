"""The tokens of the choices of a task, and those of them that are scored.

As llama.cpp b11434 perplexity.cpp does. HellaSwag and multiple choice score all tokens after the common prefix of the
choices. WinoGrande scores the tokens after the word of the choice but the last, or, where few follow, after the common
prefix; there it predicts the first token of the second choice from the last token of the first, by mistake, and so does
this module: its scores are those that people compare. Requests score the tokens after those of the prompt, as
lm-evaluation-harness does (models/huggingface.py, _encode_pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.errors import FormatError
from quantkit.evaluate.passes import I32
from quantkit.formats.tokenizer import Tokenizer
from quantkit.score.files import Question

#: WinoGrande: choices with more tokens than this after the common prefix are scored after the word of the choice.
_MIN_TRAILING = 3


@dataclass(frozen=True, eq=False)
class Choice:
    """The tokens of a prompt with a choice, int32 [n], of which those from ``first`` to ``end`` are scored.

    ``divisor`` normalizes the sum of their log-likelihoods. ``predictor`` is the number of the choice whose last token
    predicts the first scored token; None: this one, whose token before predicts it.
    """

    tokens: I32
    first: int
    end: int
    divisor: float
    predictor: int | None = None


def choices_of(kind: str, question: Question, tokenizer: Tokenizer, name: str) -> tuple[Choice, ...]:
    """Return the choices of a task. Raises FormatError if one has no token to score."""
    choices = _CHOICES.get(kind, _shared_prompt)(question, tokenizer)
    for i, choice in enumerate(choices):
        if not 0 < choice.first < choice.end:
            raise FormatError(
                f"{name}: task {question.number}: choice {i} has no token to score: it is empty, or all other choices "
                "begin with it; remove the task",
                "QK-E101",
            )
    return choices


def common_prefix(rows: Sequence[I32]) -> int:
    """Return the number of tokens with which all rows begin."""
    n = min(map(len, rows))
    equal = np.all([row[:n] == rows[0][:n] for row in rows], axis=0)
    return n if equal.all() else int(np.argmin(equal))


def _shared_prompt(question: Question, tokenizer: Tokenizer) -> tuple[Choice, ...]:
    rows = [tokenizer.encode(prompt + choice) for prompt, choice in question.parts]
    first = common_prefix(rows)
    return tuple(Choice(row, first, len(row), len(row) - first) for row in rows)


def _winogrande(question: Question, tokenizer: Tokenizer) -> tuple[Choice, ...]:
    rows = [tokenizer.encode(prompt + second) for prompt, second in question.parts]
    prefix = common_prefix(rows)
    is_after_choice = all(len(row) - prefix > _MIN_TRAILING for row in rows)
    choices = []
    for i, (row, (prompt, _)) in enumerate(zip(rows, question.parts, strict=True)):
        first = len(tokenizer.encode(prompt)) if is_after_choice else prefix
        end = len(row) - (len(row) - first > 1)
        choices.append(Choice(row, first, end, end - first, 0 if i and not is_after_choice else None))
    return tuple(choices)


def _requests(question: Question, tokenizer: Tokenizer) -> tuple[Choice, ...]:
    choices = []
    for prompt, choice in question.parts:
        text = prompt.rstrip()
        choice = prompt[len(text) :] + choice
        first = len(_without_eos(text, tokenizer))
        row = _without_eos(text + choice, tokenizer)
        if not first and tokenizer.end_ids:  # a prompt without tokens: the choice follows the end of a text
            row, first = np.concatenate([np.array([min(tokenizer.end_ids)], np.int32), row]), 1
        choices.append(Choice(row, first, len(row), float(len(choice.decode().strip()))))
    return tuple(choices)


def _without_eos(text: bytes, tokenizer: Tokenizer) -> I32:
    row = tokenizer.encode(text)
    return row[: len(row) - tokenizer.add_eos]


_CHOICES = {"winogrande": _winogrande, "requests": _requests}
