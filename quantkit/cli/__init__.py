"""The command line: one file per command, loaded only when it is the one that runs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from quantkit import __version__
from quantkit.errors import QuantkitError

#: Command -> one line of help; the module of the same name in this package holds a click command ``command``.
COMMANDS = {
    "quantize": "Quantize a GGUF model, byte for byte as llama-quantize, several times faster.",
    "merge-up-gate": "Merge the up and gate experts of a MoE into one tensor, byte for byte, offline.",
    "split-up-gate": "Take merged up and gate experts apart; undoes merge-up-gate exactly.",
    "inspect": "Show what is in a GGUF file: tensors, types, sizes, metadata, shards.",
    "compare": "Compare two GGUF files: metadata, types, bytes, and the error after decoding.",
    "perplexity": "Measure the perplexity of a text; keep the logits as a base for kld.",
    "kld": "Measure the KL divergence of a model from base logits.",
    "logits": "Write the logits that a model computes for some tokens.",
    "imatrix": "Importance matrices: collect, show, compare, merge and convert them.",
    "calibration": "Build a text to calibrate on, and one to evaluate on, from local files.",
    "bench": "Measure how fast a model runs: prompts and generation, fused and not.",
    "sweep-bench": "Measure speed step by step while a context fills.",
    "types": "List all tensor types and presets of llama.cpp and ik_llama.cpp.",
}


class _Shown(click.ClickException):
    """An error of the library, as click shows it: one line, and the error's exit code."""

    def __init__(self, error: QuantkitError) -> None:
        super().__init__(error.message)
        self.exit_code = error.exit_code  # type: ignore[misc]


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when asked for it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except QuantkitError as e:
            raise _Shown(e) from e

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"quantkit.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="quantkit")
def cli() -> None:
    """Quantize, convert and validate GGUF models, offline and byte-exact.

    `quantkit COMMAND --help` explains a command.
    """


def main() -> None:
    """Run the command line; what ends it early (Ctrl-C, `quantkit types | head`, a full disk) takes one line at most.

    click's own way out would call Ctrl-C "Aborted!" and end with 1; shells expect 130.
    """
    try:
        sys.exit(cli.main(prog_name="quantkit", standalone_mode=False))
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as e:  # a device that fails, a full disk behind stdout
        _drop_output()
        click.echo(f"Error: {f'{e.filename}: ' if e.filename else ''}{e.strerror or e}", err=True)
        sys.exit(1)


def _drop_output() -> None:
    """Let Python's last flush of stdout go nowhere, since it cannot go where it should."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
