"""The options of several texts, of ``kld`` and ``perplexity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from quantkit.cli._evaluation import TEXT
from quantkit.cli._options import option, options, setting
from quantkit.cli._paths import TEXT_FILE, TEXT_PLACE
from quantkit.evaluate.texts import SCORED, Texts
from quantkit.formats.tokenizer import read_token_ids

#: The texts; ``texts_from`` takes the values.
texts_options = options(
    option(
        "-f",
        "--file",
        "files",
        group=TEXT,
        type=TEXT_PLACE,
        multiple=True,
        metavar="FILE|DIR",
        help="Text file, or directory of *.txt and *.jsonl; - for stdin. A final newline is dropped. Repeatable: a "
        "row for each.",
    ),
    option(
        "--chat",
        group=TEXT,
        type=TEXT_FILE,
        multiple=True,
        metavar="JSONL",
        help="Conversations, rendered with the model's chat template. Repeatable.",
    ),
    setting(
        "--score",
        "scored",
        group=TEXT,
        type=click.Choice(SCORED),
        default="answers",
        help="Tokens of conversations that are scored.",
    ),
    option("-p", "--prompt", group=TEXT, metavar="TEXT", help="Text."),
    option("--tokens", group=TEXT, metavar="IDS", help="Token ids, such as 1,2,3, or @FILE of raw int32."),
    option("--parse-special", group=TEXT, is_flag=True, help="Read <|im_end|> and the like as special tokens."),
)
#: The names of its values.
TEXT_VALUES = ("files", "chat", "scored", "prompt", "tokens", "parse_special")


def texts_from(values: Mapping[str, Any]) -> Texts:
    """Return the texts, from the values of ``texts_options``."""
    tokens = None if values["tokens"] is None else read_token_ids(values["tokens"])
    return Texts(**{**{name: values[name] for name in TEXT_VALUES}, "tokens": tokens})
