"""Guessed names of commands, or those of other programs: aliases, or what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

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
        "convert --merge-lora"
    )


def _constant(text: str) -> Callable[[Sequence[str]], str]:
    return lambda arguments: text


_LORA = "merge the adapter into the checkpoint: quantkit convert CHECKPOINT OUT.gguf --merge-lora ADAPTER"
_NO_RUN = "quantkit does not generate text; use llama.cpp: llama-cli -m MODEL.gguf"

_EDIT = "quantkit edit FILE.gguf --set KEY=VALUE [-o OUT.gguf]"

#: Guessed names, and what to type instead, from the arguments.
ANSWERS: dict[str, Callable[[Sequence[str]], str]] = {
    "gguf-split": _split_or_join,
    "merge": _merge,
    "export-lora": _constant(_LORA),
    "merge-lora": _constant(_LORA),
    "lora": _constant("to convert an adapter, quantkit convert-lora ADAPTER; " + _LORA),
    "gguf-set-metadata": _constant(_EDIT),
    "gguf-new-metadata": _constant(_EDIT),
    "download": lambda arguments: (
        f"hf download {_files(arguments, ['ORG/REPO'])}; -hf ORG/REPO:TYPE instead of -m MODEL downloads, too, and "
        "quantkit convert reads hf://ORG/REPO"
    ),
    "upload": lambda arguments: f"hf upload {_files(arguments, ['ORG/REPO', 'FILE.gguf'])}",
    "run": _constant(_NO_RUN),
    "chat": _constant(_NO_RUN),
    "cli": _constant(_NO_RUN),
    "generate": _constant(_NO_RUN),
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
