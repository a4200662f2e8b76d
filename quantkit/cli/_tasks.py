"""The options of multiple-choice tasks, of ``score`` and ``perplexity``."""

from __future__ import annotations

import click

from quantkit.cli._evaluation import TEXT
from quantkit.cli._options import option, options
from quantkit.score.files import KINDS

_KIND = click.Choice(list(KINDS))
_N_TASKS = ("--tasks", "--hellaswag-tasks", "--winogrande-tasks", "--multiple-choice-tasks")

#: llama-perplexity's options: the kind of the tasks in the file, and their number.
task_options = options(
    option("--hellaswag", "kind", group=TEXT, flag_value="hellaswag", type=_KIND, help="The file has HellaSwag tasks."),
    option("--winogrande", "kind", group=TEXT, flag_value="winogrande", type=_KIND, help="It has WinoGrande tasks."),
    option(
        "--multiple-choice",
        "kind",
        group=TEXT,
        flag_value="multiple-choice",
        type=_KIND,
        help="It has multiple-choice tasks (ARC, MMLU, TruthfulQA).",
    ),
    option(
        *_N_TASKS,
        "n_tasks",
        group=TEXT,
        type=click.IntRange(0),
        metavar="N",
        help="Number of tasks; 0: all.  [default: 400 of HellaSwag, all others]",
    ),
)
