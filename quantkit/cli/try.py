"""``quantkit try``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._evaluation import MODEL, RUN, TEXT, load_options, model_option, run_options
from quantkit.cli._json import JsonOutput, json_option
from quantkit.cli._options import GroupedCommand, echo_notes, option
from quantkit.cli._paths import MODEL_FILE
from quantkit.generate import N_PREDICT, Answer, Answers, first_difference, generate
from quantkit.names import printable

#: Before the first character in which two answers differ.
MARK = "\u00bb"


@click.command("try", cls=GroupedCommand)
@model_option
@option("--beside", "reference", group=MODEL, type=MODEL_FILE, metavar="FILE", help="Compare with another file (BF16).")
@option(
    "-p",
    "--prompt",
    "prompts",
    group=TEXT,
    multiple=True,
    metavar="TEXT",
    help="Prompt; repeatable.  [default: three built-in ones]",
)
@option(
    "--chat/--no-chat",
    group=TEXT,
    default=None,
    help="Render prompts by the chat template.  [default: if the file has one]",
)
@option("-sys", "--system-prompt", "system", group=TEXT, metavar="TEXT", help="System prompt.")
@option(
    "-n",
    "--predict",
    "--n-predict",
    "n_predict",
    group=RUN,
    type=click.IntRange(1),
    default=N_PREDICT,
    show_default=True,
    help="Maximum tokens of an answer.",
)
@option(
    "--temp",
    "--temperature",
    "temperature",
    group=RUN,
    type=click.FloatRange(0),
    default=0.0,
    help="Temperature; 0 (default) takes the most probable token.",
)
@option("-s", "--seed", group=RUN, type=click.IntRange(0), default=0, help="Random seed of --temp.")
@run_options
@json_option()
def command(
    model: Path,
    reference: Path | None,
    prompts: tuple[str, ...],
    chat: bool | None,
    system: str | None,
    n_predict: int,
    temperature: float,
    seed: int,
    json_to: JsonOutput,
    **run: Any,
) -> None:
    """Generate a few answers, to look at a model before you publish it.

    Prompts are independent; an answer ends at the end of the turn. --beside shows
    the answers of a second file, and where the two diverge.

    \b
    quantkit try -m model-Q4_K_M.gguf
    quantkit try -m model-Q4_K_M.gguf -p "Why is the sky blue?" -n 200
    quantkit try -m model-Q2_K.gguf --beside model-bf16.gguf
    """
    arguments: dict[str, Any] = {
        "chat": chat,
        "system": system,
        "n_predict": n_predict,
        "temperature": temperature,
        "seed": seed,
    }
    paths = [path for path in (model, reference) if path is not None]
    results = [generate(path, prompts, **arguments, **load_options(run)) for path in paths]
    echo_notes(dict.fromkeys(note for result in results for note in result.notes))
    json_to.print(lambda: _text(results), lambda: _as_dict(results))


def _text(results: Sequence[Answers]) -> str:
    lines = []
    for answers in zip(*(result.answers for result in results), strict=True):
        lines += [f"> {printable(answers[0].prompt)}"]
        if len(answers) == 1:
            lines += ["", _answer_text(answers[0], None), ""]
            continue
        difference = first_difference(*answers)
        for result, answer in zip(results, answers, strict=True):
            lines += ["", f"{printable(result.path.name)}:", _answer_text(answer, difference)]
        lines += ["", f"{MARK} is the first difference" if difference is not None else "the answers are equal", ""]
    for result in results:
        lines.append(
            f"{printable(result.path.name)}: prompts {result.prompt_speed:.1f} tokens per second, answers "
            f"{result.speed:.1f}{'; chat template' if result.is_chat else ''}"
        )
    return "\n".join(lines)


def _answer_text(answer: Answer, difference: int | None) -> str:
    """Return the text of an answer line by line, with its end, and a mark at the character ``difference``."""
    text = answer.text if difference is None else f"{answer.text[:difference]}{MARK}{answer.text[difference:]}"
    text = "\n".join(printable(line) for line in text.strip("\n").split("\n"))
    return f"{text} [{printable(answer.end)}]" if answer.end else f"{text} ..."


def _as_dict(results: Sequence[Answers]) -> dict[str, Any]:
    pairs = list(zip(*(result.answers for result in results), strict=True))
    return {
        "models": [
            {
                "model": str(result.path),
                "chat": result.is_chat,
                "prompt_tokens_per_second": result.prompt_speed,
                "tokens_per_second": result.speed,
                "answers": [
                    {
                        "prompt": a.prompt,
                        "text": a.text,
                        "tokens": list(a.tokens),
                        "end": a.end or None,
                        "prompt_tokens": a.n_prompt,
                    }
                    for a in result.answers
                ],
            }
            for result in results
        ],
        "equal_characters": [first_difference(*pair) for pair in pairs] if len(results) > 1 else None,
    }
