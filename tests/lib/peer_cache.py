"""Cached results of peers: a program that does not change gives the same result for the same input, so it runs once per
machine.

The key has everything that determines a result: the peer's files, the bytes of its inputs, its options. quantkit's side
of a comparison is always computed. Remove the folder ``peer-answers`` of the cache to run peers again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import open_gguf

CACHE = Path(os.environ.get("QUANTKIT_CACHE", Path.home() / ".cache/quantkit")) / "peer-answers"
#: Largest result that is stored, in bytes.
LARGEST = 8 << 20


@cache
def peer(folder: Path) -> str:
    """Return the identity of a build of a peer: its files, and the CPU, which its code may query."""
    files = sorted(path for path in folder.resolve().iterdir() if path.is_file())
    stats = [(path.name, status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
    return _digest(str(folder.resolve()), str(stats), _cpu()).hex()


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return str(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _digest(*question: object) -> bytes:
    digest = hashlib.sha256()
    for part in question:
        data = _bytes(part)
        digest.update(f"{type(part).__name__} {len(data)} ".encode() + data)
    return digest.digest()


def _bytes(part: object) -> bytes:
    """Return the content of a file or of an array, or the text of another value."""
    if isinstance(part, Path):
        with part.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape}".encode() + np.ascontiguousarray(part).tobytes()
    return part if isinstance(part, bytes) else repr(part).encode()


def header(path: Path) -> bytes:
    """Return a GGUF file up to its weights, which may be holes of many gigabytes."""
    with open_gguf(path, header_only=True) as opened:
        end = min(tensor.offset for tensor in opened.tensors.values())
    with path.open("rb") as file:
        return file.read(end)


def file_or_word(word: str) -> str | Path:
    """Return a word of a command, as a path if it is a file."""
    path = Path(word)
    return path if path.is_file() else word


def answer(ask: Callable[[], bytes], *question: object) -> bytes:
    """Return a peer's result; paths in the key represent the content of files."""
    path = CACHE / _digest(*question).hex()
    try:
        return path.read_bytes()
    except OSError:
        data = ask()
    if len(data) > LARGEST:
        return data
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
    return data


def array_answer(ask: Callable[[], npt.NDArray[Any]], *question: object) -> npt.NDArray[Any]:
    """Return a peer's result, an array."""

    def saved() -> bytes:
        np.save(out := io.BytesIO(), ask())
        return out.getvalue()

    array: npt.NDArray[Any] = np.load(io.BytesIO(answer(saved, *question)))
    return array


class Output(NamedTuple):
    """The output of a program, stdout before stderr, and its exit code."""

    code: int
    text: str


def program_answer(
    command: Sequence[object],
    outputs: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    last: str = "",
) -> Output:
    """Run a peer's program; write its files ``outputs`` and return its output.

    Other files among its arguments are identified by content, not by path, so their names must not occur in an output.

    Args:
        command: the program and its arguments. outputs: arguments that are files which it writes. environment:
        variables in addition to those of this process. last: a word of its last line; the program is run again until it
        appears, because on a busy machine llama-perplexity sometimes ends before its log thread has printed everything.
    """
    program, *words = command
    assert isinstance(program, Path)

    def run() -> bytes:
        for _ in range(10):
            process = subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, **(environment or {})},
                timeout=300,
            )
            text = process.stdout + process.stderr
            if last in text:
                break
        files = [base64.b64encode(out.read_bytes()).decode() if out.is_file() else None for out in outputs]
        return json.dumps([process.returncode, text, files]).encode()

    names = {out: f"OUT {i}" for i, out in enumerate(outputs)}
    parts = [names[word] if isinstance(word, Path) and word in names else file_or_word(str(word)) for word in words]
    libraries = [Path(folder) for folder in (environment or {}).get("LD_LIBRARY_PATH", "").split(":") if folder]
    peers = [peer(folder) for folder in (program.parent, *libraries)]
    code, text, files = json.loads(answer(run, *peers, program.name, last, *parts))
    for out, data in zip(outputs, files, strict=True):
        if data is not None:
            out.write_bytes(base64.b64decode(data))
    assert last in text, text
    return Output(code, text)


def file_answer(command: Sequence[str | Path], out: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Run a peer's program that writes the file ``out``, an argument of its command, and return that file.

    Programs may write the paths of their inputs, so these must not change between runs.
    """
    program, *words = command
    assert isinstance(program, Path)
    assert out in words

    def make() -> bytes:
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return out.read_bytes()

    files = [word for word in words if isinstance(word, Path) and word != out]
    names = ["OUT" if word == out else str(word) for word in words]
    folders = [program.parent, *map(Path, (environment or {}).get("LD_LIBRARY_PATH", "").split(":"))]
    peers = [peer(folder) for folder in folders if folder != Path()]
    out.write_bytes(answer(make, *peers, program.name, names, *files))
    return out
