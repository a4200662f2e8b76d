"""The command line: one file per command, imported only when that command runs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from quantkit.cli._guesses import answer, command_of
from quantkit.cli._help import WIDTH
from quantkit.cli._options import UserError, WholeNames
from quantkit.errors import QuantkitError
from quantkit.names import printable
from quantkit.process import interruptible
from quantkit.version import __version__

#: Command -> one line of help; the module of that name in this package holds the click command, ``command``.
COMMANDS = {
    "cook": "Cook a model: convert, calibrate, search types, quantize, check and report, in one resumable run.",
    "quantize": "Quantize a GGUF model: the bytes of llama-quantize, several times faster.",
    "convert": "Convert a Hugging Face checkpoint to GGUF, and quantize it in the same pass.",
    "convert-lora": "Convert a PEFT LoRA adapter to GGUF.",
    "export": "Export a GGUF file as a checkpoint that transformers loads.",
    "merge-up-gate": "Merge the up and gate experts of a MoE model into one tensor, byte for byte.",
    "split-up-gate": "Split merged up and gate experts; undoes merge-up-gate exactly.",
    "prune-experts": "Write a MoE model with fewer experts, chosen by saliency (REAP), frequency or a list.",
    "cache": "Show, prune and verify a cache of encoded tensors (--cache).",
    "inspect": "Show the contents of a GGUF file: tensors, types, sizes, metadata, shards.",
    "fit": "Show how much memory a model takes, and the options with which it fits GPUs.",
    "split": "Split a GGUF file into shards: the bytes of llama-gguf-split.",
    "join": "Join the shards of a GGUF model into one file.",
    "stitch": "Write one GGUF model with tensors of several files, byte for byte.",
    "edit": "Edit the metadata of a GGUF file, in place where it fits: chat template, special tokens, any key.",
    "hash": "Show digests of GGUF files: of data, metadata and tensors; write and check SHA256SUMS.",
    "compare": "Compare two GGUF files: metadata, types, bytes, and error after decoding.",
    "perplexity": "Measure perplexity on a text; save logits as a base for kld.",
    "kld": "Measure the KL divergence of a model from saved logits.",
    "drift": "Compare the embeddings of a quantized encoder with its base's: cosines, neighbours.",
    "score": "Score multiple-choice tasks: HellaSwag, WinoGrande, ARC, MMLU, TruthfulQA, or your own.",
    "logits": "Write the logits a model computes for given tokens.",
    "imatrix": "Collect, show, compare, merge and convert importance matrices.",
    "texts": "List and write texts to measure models on, in six categories.",
    "calibration": "Build a calibration text and a disjoint evaluation text from local files.",
    "sensitivity": "Measure what quantizing each group of tensors alone costs, for search.",
    "search": "Find the types with the least divergence at a size, from measured sensitivities.",
    "try": "Show a few answers of a model, beside another file's.",
    "bench": "Measure prompt and generation speed, with and without fusion.",
    "sweep-bench": "Measure speed as the context fills.",
    "recipe": "Check, show, convert and compare recipes: which tensor gets which type.",
    "report": "Write an HTML report on quantized files, and a model card.",
    "upload": "Upload GGUF files and a model card to the Hugging Face Hub, and check what it received.",
    "doctor": "Check this machine: packages, CPU, GPUs, memory and disk.",
    "types": "List the tensor types and presets of llama.cpp and ik_llama.cpp.",
}


class LazyGroup(WholeNames, click.Group):
    """A group that imports its commands on demand."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except QuantkitError as e:
            raise UserError(e) from e

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or another name of it."""
        name = command_of(args[0])
        if name not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(answer(args[0], args[1:], list(COMMANDS)), ctx)
        return super().resolve_command(ctx, [name if name in COMMANDS else args[0], *args[1:]])

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


@click.group(cls=LazyGroup, context_settings={"max_content_width": WIDTH})
@click.version_option(__version__, prog_name="quantkit")
def cli() -> None:
    """Quantize, convert and validate GGUF models, offline and byte-exact.

    `quantkit COMMAND --help` explains a command.
    """


def main() -> None:
    """Run the command line; an early end (Ctrl-C, `quantkit types | head`, a full disk) prints one line at most.

    By itself click prints "Aborted!" on Ctrl-C and exits with 1; shells expect 130.
    """
    try:
        with interruptible():
            code = cli.main(prog_name="quantkit", standalone_mode=False)
        sys.exit(code)
    except click.ClickException as e:
        if not isinstance(e, click.exceptions.NoArgsIsHelpError):  # whose message is the help
            e.message = _explain(e.message)  # type: ignore[misc]  # names stand in click's own messages, too
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as e:  # for example a full disk behind stdout
        _drop_output()
        about = f"{e.filename}: " if e.filename else ""
        click.echo(f"Error: {_explain(f'{about}{e.strerror or e}')}", err=True)
        sys.exit(1)


def _explain(message: str) -> str:
    """Return a message on one line, with a hint if the working directory no longer exists."""
    try:
        os.getcwd()
    except OSError:
        message += " (the working directory was removed: go to another)"
    return printable(message)


def _drop_output() -> None:
    """Point stdout at /dev/null, so that Python's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
