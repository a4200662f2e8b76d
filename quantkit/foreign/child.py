"""The process that runs foreign code: started on first use, ended with its parent, limited by the kernel.

Requests and answers are lines of JSON; a file is sent as raw bytes. What the code raises, prints and allocates stays in
the process: a refusal, a crash and a timeout each become one FormatError that names the file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.errors import FormatError, ResourceError
from quantkit.names import printable, shorten
from quantkit.units import format_size

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from quantkit.foreign.serve import serve; serve()"
#: Packages have their own threads and arenas, which count towards the address space.
_SINGLE_THREADED = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RUST_BACKTRACE": "0",
}
#: Maximum number of characters of an error that are shown.
_WORDS = 300
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a child.

    ``seconds`` of CPU time, and ``per_call`` more for each call; ``memory``: bytes of its address space; ``answers``:
    bytes of all its answers.
    """

    seconds: int = 10
    per_call: float = 0.05
    memory: int = 1 << 30
    answers: int = 1 << 30

    @property
    def wall(self) -> float:
        """The wall-clock limit of a call, in seconds, generous for busy machines."""
        return 120.0 + 20.0 * self.seconds


#: Limits of parsing a small text.
GRAMMAR = Limits(seconds=5, memory=1 << 29, answers=1 << 22)


class Child:
    """A process that constructs ``service(*arguments)``, or ``service(data, *arguments)``, and calls its methods.

    Args:
        service: "module:class" below quantkit.foreign.
        subject: the file, and the part of it that runs; errors begin with it.
        arguments: JSON values.
        limits: the resource limits over all calls.
        data: returns the bytes of a file; called after the process has started.
    """

    def __init__(
        self,
        service: str,
        subject: str,
        *arguments: Any,
        limits: Limits | None = None,
        data: Callable[[], bytes] | None = None,
    ) -> None:
        self.subject, self.limits = subject, limits or Limits()
        self._first = {"service": service, "arguments": arguments, "limits": asdict(self.limits)}
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether the service is still starting.
        self._starting = False
        self._n_read, self._buffer = 0, b""
        #: The error after which no call is possible.
        self._error: str | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method. Raises FormatError, also for every call after the process has died."""
        if self._error is not None:
            raise FormatError(self._error, "QK-E116")
        self.start()
        if self._starting:
            self._starting = False
            try:
                self._answer()
            except FormatError as e:
                self._error = e.message
                self.close()
                raise
        self._send({"method": method, "arguments": arguments})
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- one request

    def start(self) -> None:
        """Start the service in the background unless it is running. Raises ResourceError."""
        if self._process is not None or self._error is not None:
            return
        paths = json.dumps([path or os.curdir for path in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_SINGLE_THREADED},
            )
        except OSError as e:
            raise ResourceError(
                f"{self.subject}: cannot start a process to read it: {e.strerror or e}", "QK-E413"
            ) from None
        weakref.finalize(self, _end, self._process)
        data = b"" if self._data is None else self._data()
        self._starting = True
        self._send(self._first | {"data": None if self._data is None else len(data)}, data)

    def _send(self, request: dict[str, Any], data: bytes = b"") -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _answer(self) -> Any:
        process, until = self._process, time.monotonic() + self.limits.wall
        assert process is not None
        try:
            answer = json.loads(self._line(process, until))
        except EOFError:
            raise self._fail(self._exit_reason(process.wait())) from None
        except TimeoutError:
            raise self._fail(f"takes longer than {self.limits.wall:.0f} s") from None
        except BaseException:  # Ctrl-C within an answer: the next line would belong to this request
            self.close()
            raise
        if "refused" in answer:
            raise FormatError(f"{self.subject}: {shorten(printable(answer['refused']), _WORDS)}", "QK-E116")
        return answer["value"]

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes:
        """Return the next line of the process. Raises EOFError, and TimeoutError."""
        assert process.stdout is not None
        pieces = [self._buffer]
        end = self._buffer.find(b"\n")
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        while end < 0:
            if not ready.poll(1000 * max(0.0, until - time.monotonic())):
                raise TimeoutError
            pieces.append(os.read(process.stdout.fileno(), _PIECE))
            self._n_read += len(pieces[-1])
            if self._n_read > self.limits.answers:
                raise self._fail(f"grows to more than {format_size(self.limits.answers)}")
            if not pieces[-1]:
                raise EOFError
            end = pieces[-1].find(b"\n")
        last = pieces.pop()
        self._buffer = last[end + 1 :]
        return b"".join([*pieces, last[:end]])

    def _exit_reason(self, code: int) -> str:
        """Return a description of an exit code of the foreign code."""
        if code == -signal.SIGXCPU:
            return f"takes longer than {self.limits.seconds} s"
        status = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"crashed the process that reads it ({status}): it is damaged, or needs more than {self._memory}"

    @property
    def _memory(self) -> str:
        return format_size(self.limits.memory)

    def _fail(self, reason: str) -> FormatError:
        error = FormatError(f"{self.subject}: {reason}", "QK-E116")
        self._error = error.message
        self.close()
        return error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # the rest of the request
            continue
    process.wait()
