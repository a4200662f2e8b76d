"""The program inside a ``child.Child``: limits itself, constructs the service named in the first line, and answers
calls."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO


def serve() -> None:
    """Answer requests until the input ends; see ``child``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which also ends this process
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    first = json.loads(requests.readline())
    limits = first["limits"]
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, limits["memory"])
    service: list[Any] = []

    def start(name: str, *arguments: Any) -> None:
        module, _, kind = name.partition(":")
        service.append(getattr(import_module(module), kind)(*arguments))

    def call(method: str, *arguments: Any) -> Any:
        return getattr(service[0], method)(*arguments)

    _limit(resource.RLIMIT_CPU, limits["seconds"])
    data = [] if first["data"] is None else [requests.read(first["data"])]
    _answer(answers, start, [first["service"], *data, *first["arguments"]])
    for calls, line in enumerate(requests, 1):
        request = json.loads(line)
        _limit(resource.RLIMIT_CPU, limits["seconds"] + int(limits["per_call"] * calls))
        _answer(answers, call, [request["method"], *request["arguments"]])


def _limit(resource_id: int, limit: int) -> None:
    """Set a soft limit of this process, CPU time from the process's start; a lower limit of ``ulimit`` remains."""
    hard = resource.getrlimit(resource_id)[1]
    resource.setrlimit(resource_id, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _answer(answers: BinaryIO, function: Callable[..., Any], arguments: list[Any]) -> None:
    """Send the result of a function, or the reason for its failure."""
    try:
        answer = json.dumps({"value": function(*arguments)}, default=str)
    except BaseException as e:  # noqa: BLE001 - foreign code raises anything, and panics of Rust are no Exceptions
        answer = json.dumps({"refused": _reason(e)})
    answers.write(answer.encode() + b"\n")
    answers.flush()


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"needs more than {resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MiB"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
