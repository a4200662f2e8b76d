"""Guessed names of commands, or those of other programs: aliases, or what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise

from quantkit.cli._options import near_names

#: Other names of commands; a leading ``llama-`` is removed first.
ALIASES = {
    "info": "inspect",
    "dump": "inspect",
    "gguf-dump": "inspect",
    "ppl": "perplexity",
    "quant": "quantize",
    "diff": "compare",
    "set-metadata": "edit",
    "generate": "try",
    "convert-hf-to-gguf": "convert",
    "convert-lora-to-gguf": "convert-lora",
    "check": "doctor",
}


def _files(arguments: Sequence[str], names: Sequence[str]) -> str:
    """Return the arguments that are no options, or names for missing ones, for a command line."""
    files = [a for a in arguments if not a.startswith("-") and not a.isdecimal()]
    return shlex.join([*files[: len(names)], *names[len(files) :]])


def _split(arguments: Sequence[str]) -> str:
    words = list(arguments)
    size = words[words.index("--split-max-size") + 1] if "--split-max-size" in words[:-1] else "48G"
    files = [a for a in words if a != size or "--split-max-size" not in words]
    return f"quantkit split --max-size {shlex.quote(size)} {_files(files, ['IN.gguf', 'OUT.gguf'])}"


def _join(arguments: Sequence[str]) -> str:
    return f"quantkit join {_files(arguments, ['IN-00001-of-00002.gguf', 'OUT.gguf'])}"


def _split_or_join(arguments: Sequence[str]) -> str:
    return _join(arguments) if "--merge" in arguments else _split(arguments)


def _merge(arguments: Sequence[str]) -> str:
    return (
        f"to join shards, {_join(arguments)}; importance matrices, quantkit imatrix merge; a LoRA adapter, quantkit "
        "quantize or convert --merge-lora"
    )


def _constant(text: str) -> Callable[[Sequence[str]], str]:
    return lambda arguments: text


def _export_lora(arguments: Sequence[str]) -> str:
    """Return the command of a line of llama-export-lora; several files of an option are separated by commas."""
    values: dict[str, list[str]] = {"model": [], "output": [], "lora": []}
    names = {"-m": "model", "--model": "model", "-o": "output", "--output": "output", "--output-file": "output"}
    names |= {"--lora": "lora", "--lora-scaled": "lora"}
    for option, value in pairwise(arguments):
        if option in names:
            values[names[option]] += value.split(",")
    model, output = (values["model"] or ["BASE.gguf"])[-1], (values["output"] or ["ggml-lora-merged-f16.gguf"])[-1]
    adapters = [word for value in values["lora"] or ["ADAPTER.gguf"] for word in ("--merge-lora", value)]
    return f"quantkit quantize {shlex.join([model, output])} COPY {shlex.join(adapters)}"


_LORA = (
    "merge a GGUF adapter into a GGUF model: quantkit quantize IN.gguf OUT.gguf TYPE --merge-lora ADAPTER.gguf; one of "
    "PEFT into its checkpoint: quantkit convert CHECKPOINT OUT.gguf TYPE --merge-lora ADAPTER"
)
_NO_RUN = "for a few answers, quantkit try -m MODEL.gguf; to chat, use llama.cpp: llama-cli -m MODEL.gguf"

_EDIT = "quantkit edit FILE.gguf --set KEY=VALUE [-o OUT.gguf]"

#: Guessed names, and what to type instead, from the arguments.
ANSWERS: dict[str, Callable[[Sequence[str]], str]] = {
    "gguf-split": _split_or_join,
    "merge": _merge,
    "export-lora": _export_lora,
    "merge-lora": _constant(_LORA),
    "lora": _constant("to convert an adapter, quantkit convert-lora ADAPTER; " + _LORA),
    "gguf-set-metadata": _constant(_EDIT),
    "gguf-new-metadata": _constant(_EDIT),
    "download": lambda arguments: (
        f"hf download {_files(arguments, ['ORG/REPO'])}; -hf ORG/REPO:TYPE instead of -m MODEL downloads, too, and "
        "quantkit convert reads hf://ORG/REPO"
    ),
    "run": _constant(_NO_RUN),
    "chat": _constant(_NO_RUN),
    "cli": _constant(_NO_RUN),
    "server": _constant(_NO_RUN.replace("llama-cli", "llama-server")),
    "serve": _constant(_NO_RUN.replace("llama-cli", "llama-server")),
    "eval": _constant("quantkit perplexity -m MODEL.gguf -f TEXT, or quantkit kld for the divergence from a base"),
    "plot": _constant("--plot FILE of quantkit search, types, quantize, imatrix show and imatrix --layer-similarity"),
}


def command_of(name: str) -> str:
    """Return the command that another name stands for, or the name."""
    short = name.removesuffix(".py").replace("_", "-").removeprefix("llama-")
    return ALIASES.get(short, short)


def answer(name: str, arguments: Sequence[str], commands: Sequence[str]) -> str:
    """Return the error of a name that is no command."""
    guess = ANSWERS.get(command_of(name))
    if guess is not None:
        return f"No such command {name!r}; type: {guess(arguments)}"
    close = near_names(name, [*commands, *ALIASES])
    suggestion = f" Did you mean {' or '.join(dict.fromkeys(command_of(c) for c in close))}?" if close else ""
    return f"No such command {name!r}.{suggestion}"
