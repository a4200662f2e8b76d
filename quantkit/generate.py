"""A few answers of a model, to look at before a file is published: ``quantkit try``.

Tokens are greedy, or drawn with a seed; the chat template runs in its child process. There is no server and no history:
use llama.cpp for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack, cast

import numpy as np

from quantkit.arguments import checked
from quantkit.chat import chat_template
from quantkit.errors import RecipeError
from quantkit.evaluate.passes import F32, I32, LoadOptions, loaded_model
from quantkit.foreign.child import Child
from quantkit.formats.tokenizer import Tokenizer
from quantkit.html_table import HtmlTable, Table, table_of
from quantkit.model.engine import Model
from quantkit.names import shorten

#: Prompts without ``prompts``: as messages to a model with a chat template, or to be continued.
MESSAGES = ("What is the capital of France?", "Count from 1 to 10.", "Write a haiku about the sea.")
BEGINNINGS = ("The capital of France is", "1, 2, 3, 4,", "Once upon a time")
#: Tokens of an answer by default.
N_PREDICT = 128


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        prompt: the prompt as given.
        tokens: the ids of the answer, without the token that ended it.
        text: their text.
        end: the text of the token that ended it, "" if it was cut off.
        n_prompt: the tokens of the prompt, with the template.
        prompt_seconds, seconds: of the prompt and of the answer.
    """

    prompt: str
    tokens: tuple[int, ...]
    text: str
    end: str
    n_prompt: int
    prompt_seconds: float
    seconds: float


@dataclass(frozen=True)
class Answers(HtmlTable):
    """The answers of a model, and notes on it."""

    path: Path
    is_chat: bool
    answers: tuple[Answer, ...]
    notes: tuple[str, ...]

    @property
    def prompt_speed(self) -> float:
        """Tokens of prompts per second."""
        return _speed(sum(a.n_prompt for a in self.answers), sum(a.prompt_seconds for a in self.answers))

    @property
    def speed(self) -> float:
        """Tokens of answers per second."""
        return _speed(sum(len(a.tokens) for a in self.answers), sum(a.seconds for a in self.answers))

    def as_table(self) -> Table:
        """Return the answer to each prompt."""
        rows = [(a.prompt, a.text, a.end or None, len(a.tokens)) for a in self.answers]
        return table_of("prompt, answer, end, tokens", rows, str(self.path))


@checked
def generate(
    model: str | Path | Model,
    prompts: Sequence[str] = (),
    *,
    chat: bool | None = None,
    system: str | None = None,
    n_predict: int = N_PREDICT,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[int, str], object] | None = None,
    **load: Unpack[LoadOptions],
) -> Answers:
    """Return a model's answers to some prompts, each on its own.

    Args:
        model: path of a GGUF file, loaded with the options ``load`` (those of quantkit.load), or a loaded model.
        prompts: texts; () for a few of quantkit's.
        chat: render each prompt as a message of the user by the file's chat template; None: if it has one.
        system: a message of the system before it.
        n_predict: maximum tokens of an answer; it ends sooner at the end of a turn, and of the context that the model
            was trained with.
        temperature: 0 takes the most probable token; above, tokens are drawn from softmax(logits / temperature).
        seed: of the draws.
        on_text: called with the index of a prompt and each piece of its answer.

    Raises:
        RecipeError: an argument out of range, or ``system`` without a chat template.
        FormatError: the template fails, or the file has no tokenizer. Errors of ``quantkit.load``.
    """
    if n_predict < 1 or not temperature >= 0:
        raise RecipeError(
            f"{n_predict} tokens at a temperature of {temperature}: at least 1, and at least 0", "QK-E203"
        )
    with ExitStack() as stack:
        opened = cast(Model, stack.enter_context(loaded_model(model, None, load)))
        tokenizer: Tokenizer = opened.tokenizer
        has_template = isinstance(opened.source.get("tokenizer.chat_template"), str)
        is_chat = has_template if chat is None else chat
        if system is not None and not is_chat:
            raise RecipeError("a system message needs a chat template: give --chat", "QK-E202")
        template = stack.enter_context(chat_template(opened.source, tokenizer)) if is_chat else None
        texts = list(prompts) or list(MESSAGES if is_chat else BEGINNINGS)
        inputs = [_prompt_tokens(tokenizer, text, template, system) for text in texts]
        sampler = _Sampler(temperature, np.random.Generator(np.random.Philox(seed)))
        answers, notes = [], list(opened.notes)
        for i, (text, ids) in enumerate(zip(texts, inputs, strict=True)):
            report = partial(on_text, i) if on_text is not None else _ignore
            room = opened.n_ctx_train - len(ids)
            if room < 1:
                raise RecipeError(
                    f"the prompt {shorten(repr(text), 60)} has {len(ids)} tokens, and the context has "
                    f"{opened.n_ctx_train}: shorten it",
                    "QK-E203",
                )
            answers.append(_answer(opened, text, ids, min(n_predict, room), sampler, report))
            if not answers[-1].end and len(answers[-1].tokens) == room < n_predict:
                notes.append(
                    f"the answer to {shorten(repr(text), 60)} ends with the context, {opened.n_ctx_train} tokens"
                )
        return Answers(opened.path, is_chat, tuple(answers), tuple(dict.fromkeys(notes)))


def _ignore(text: str) -> None:
    """Take the pieces of answers that nobody reads."""


class _Sampler(NamedTuple):
    """Chooses tokens."""

    temperature: float
    random: np.random.Generator

    def choose(self, logits: F32) -> int:
        if self.temperature == 0:
            return int(np.argmax(logits))
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / self.temperature)
        return int(self.random.choice(len(weights), p=weights / weights.sum()))


def _prompt_tokens(tokenizer: Tokenizer, text: str, template: Child | None, system: str | None) -> I32:
    """Return the tokens of a prompt; BOS comes once, from the template or before it."""
    if template is None:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": text}]
    ids = tokenizer.encode(template.call("render", messages, True), add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos is not None and (not len(ids) or ids[0] != tokenizer.bos):
        ids = np.concatenate([np.array([tokenizer.bos], np.int32), ids])
    return ids


def _answer(
    model: Model, prompt: str, ids: I32, n_predict: int, sampler: _Sampler, on_text: Callable[[str], object]
) -> Answer:
    tokenizer: Tokenizer = model.tokenizer
    if not len(ids):
        raise RecipeError(f"the prompt {prompt!r} has no tokens", "QK-E203")
    session = model.session(len(ids) + n_predict)
    is_last = np.zeros(len(ids), bool)
    is_last[-1] = True
    began = time.perf_counter()
    logits = session.decode(ids, outputs=is_last)
    after_prompt = time.perf_counter()
    tokens: list[int] = []
    end, printed = "", ""
    while len(tokens) < n_predict:
        assert logits is not None
        token = sampler.choose(logits[-1])
        if token in tokenizer.end_ids:
            end = tokenizer.piece(token).decode("utf-8", "replace")
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # within a character of several tokens
            on_text(text[len(printed) :])
            printed = text
        if len(tokens) < n_predict:
            logits = session.decode([token])
    text = tokenizer.decode(tokens)
    if len(text) > len(printed):
        on_text(text[len(printed) :])
    return Answer(prompt, tuple(tokens), text, end, len(ids), after_prompt - began, time.perf_counter() - after_prompt)


def _speed(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds > 0 else 0.0


def first_difference(a: Answer, b: Answer) -> int | None:
    """Return the number of characters that two answers share from the beginning; None if they are equal."""
    if (a.text, a.end) == (b.text, b.end):
        return None
    pairs = zip(a.text, b.text, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.text), len(b.text)))
