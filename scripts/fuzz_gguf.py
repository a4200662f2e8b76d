#!/usr/bin/env python3
"""Fuzz quantkit's GGUF reader: no crash, no hang, no allocation beyond the file.

    scripts/fuzz_gguf.py --mutations 1000000        seeded mutations of small files; without dependencies
    scripts/fuzz_gguf.py [libFuzzer options]        coverage-guided, until stopped; needs atheris

Each case is opened; if the reader accepts it, every field is decoded, every tensor viewed and the header laid out
again. Only FormatError may be raised. A case fails if it exceeds the time limit, pushes the process past its memory cap
or, for a sample of cases, allocates more than a small multiple of its size. Failures are written to the folder --keep.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib")]

#: Numbers that break readers: the edges of the integer types, and sizes whose products wrap.
EDGES = [0, 1, 2, 4, 5, 7, 8, 9, 31, 32, 33, 64, 255, 256, 65535, 65536]
EDGES += [(1 << b) + d for b in (31, 32, 40, 59, 60, 61, 62, 63) for d in (-1, 0, 1)] + [
    (1 << 64) - d for d in (1, 8, 31, 32)
]

#: tracemalloc watches one case in SAMPLE; its peak may reach SLACK plus FACTOR times the file.
SAMPLE, SLACK, FACTOR = 64, 1 << 17, 64


class Hang(Exception):
    """A case took too long."""


def exercise(path: Path) -> str:
    """Open a file and read all of it; return ``opened`` or ``refused``."""
    from quantkit.errors import FormatError
    from quantkit.formats.gguf import layout_gguf, open_gguf

    try:
        file = open_gguf(path)
    except FormatError as e:
        if not str(e).startswith(str(path)) or len(str(e)) > 1000:
            raise AssertionError(f"a message without the file, or endless: {e}") from None
        return "refused"
    for field in file.fields.values():
        field.describe()
        _ = field.value
    for tensor in file.tensors.values():
        if file.data(tensor).nbytes != tensor.nbytes:
            raise AssertionError(f"{tensor.name} has a view of another size")
    tensors = [(t.name, t.shape, t.type) for t in file.tensors.values()]
    layout_gguf(file.fields.values(), tensors, version=file.version)
    return "opened"


def seeds() -> list[bytes]:
    """Return the seeds: valid files, the attacks, and a real header with a shortened vocabulary."""
    from attacks import ARR, ATTACKS, I32, STR, U32, Tiny, array, kv, string, tensor, u32

    tokens = b"".join(string(f"token{i}".encode()) for i in range(40))
    model = Tiny(
        fields=[
            kv(b"general.architecture", STR, string(b"qwen3moe")),
            kv(b"general.alignment", U32, u32(64)),
            kv(b"tokenizer.ggml.tokens", ARR, array(STR, 40, tokens)),
            kv(b"tokenizer.ggml.token_type", ARR, array(I32, 40, u32(1) * 40)),
        ],
        tensors=[
            tensor(b"token_embd.weight", (256, 4), 12, 0),
            tensor(b"blk.0.ffn_gate_exps.weight", (256, 4, 2), 139, 576),
            tensor(b"blk.0.ffn_up_exps.weight", (256, 8, 1, 1), 212, 1728),
        ],
        alignment=64,
        data=bytes(4096),
    )
    # Valid files are frequent: mutations of damaged ones are mostly refused early.
    valid = [Tiny().bytes(), Tiny(version=u32(2)).bytes(), model.bytes()]
    return valid * 40 + [data for data, _ in ATTACKS.values() if len(data) < 10_000]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with one to four changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        n = len(out)
        offset = rng.randrange(n) if n else 0
        kind = rng.randrange(8)
        if kind == 0 and n:
            out[offset] ^= 1 << rng.randrange(8)
        elif kind == 1 and n:
            out[offset] = rng.randrange(256)
        elif kind == 2:
            out[offset : offset + 8] = struct.pack("<Q", rng.choice((*EDGES, n, n - offset if n > offset else 0)))
        elif kind == 3:
            out[offset : offset + 4] = struct.pack(
                "<I", rng.choice((*EDGES[:16], 0x7FFFFFFF, 0xFFFFFFFF, n, rng.randrange(420)))
            )
        elif kind == 4:
            del out[offset : offset + rng.choice((1, 4, 8, rng.randrange(1, 64)))]
        elif kind == 5:
            out[offset:offset] = out[offset : offset + rng.randrange(1, 64)]
        elif kind == 6:
            out[offset:offset] = rng.randbytes(rng.choice((1, 4, 8, 16)))
        else:
            del out[offset:]
    return bytes(out)


def on_alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"stopped by {signal.Signals(signum).name}")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang after a number of seconds of CPU time, or after 20 times as many of wall time."""
    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 20 * seconds))
    for timer, number, limit in timers:
        signal.signal(number, on_alarm)
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)


def run_one(path: Path, data: bytes, limit: float, watch: bool) -> tuple[str, str]:
    """Run one case; return its outcome and the reason of a failure."""
    path.write_bytes(data)
    try:
        with limited(limit):
            if watch:
                tracemalloc.start()
            outcome = exercise(path)
        if not watch:
            return outcome, ""
        peak, allowed = tracemalloc.get_traced_memory()[1], SLACK + FACTOR * len(data)
        return (outcome, "") if peak <= allowed else ("failed", f"allocated {peak} bytes for {len(data)} of file")
    except Exception as e:
        return "failed", f"{type(e).__name__}: {e}"
    finally:
        tracemalloc.stop()


def cap_memory(memory_mb: int) -> None:
    """Limit the growth of the address space to ``memory_mb``; beyond it Python raises MemoryError."""
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (memory_mb << 20),) * 2)


def mutations(count: int, seed: int, limit: float, memory_mb: int, keep: Path) -> int:
    """Run ``count`` mutated files, or fewer after Ctrl-C; print totals; return the number of failures."""
    rng, starts, totals, slowest = random.Random(seed), seeds(), Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.gguf"
        run_one(path, starts[0], 60.0, True)  # imports everything before the cap
        cap_memory(memory_mb)
        began = time.perf_counter()
        try:
            for i in range(count):
                data = mutate(rng.choice(starts), rng)
                start = time.perf_counter()
                outcome, why = run_one(path, data, limit, i % SAMPLE == 0)
                slowest = max(slowest, time.perf_counter() - start)
                totals[outcome] += 1
                if why:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"seed{seed}-case{i}.gguf").write_bytes(data)
                    print(f"case {i}: {why}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped early: ", end="")
    n_total, seconds = totals.total(), time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{n_total} mutated headers, seed {seed}: {totals['opened']} opened, {totals['refused']} refused, ", end="")
    print(f"{totals['failed']} failures; {n_total / seconds:.0f}/s, slowest {slowest * 1000:.1f} ms, ", end="")
    print(f"peak RSS {peak:.0f} MiB under a cap of {memory_mb} MiB above the start")
    return totals["failed"]


def with_atheris(argv: list[str]) -> None:
    """Fuzz by coverage; libFuzzer stops at the first failure and saves its input."""
    try:
        import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        sys.exit("fuzz_gguf: atheris is not installed: pip install atheris, or use --mutations N")
    with atheris.instrument_imports(include=["quantkit.formats.gguf"]):
        import quantkit.formats.gguf  # noqa: F401  (instrumented here, used by exercise)
    with tempfile.TemporaryDirectory() as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "case.gguf"
        corpus.mkdir()
        for i, data in enumerate({*seeds()}):
            (corpus / str(i)).write_bytes(data)

        def one(data: bytes) -> None:
            path.write_bytes(data)
            exercise(path)

        atheris.Setup([sys.argv[0], *argv, "-timeout=5", "-rss_limit_mb=1024", str(corpus)], one)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, metavar="N", help="run N seeded mutations instead of atheris")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=5.0, metavar="SECONDS", help="CPU time of one case")
    parser.add_argument("--memory", type=int, default=64, metavar="MIB", help="address space beyond that at the start")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for failing files")
    options, remainder = parser.parse_known_args()
    if options.mutations is None:
        with_atheris(remainder)
    elif mutations(options.mutations, options.seed, options.limit, options.memory, options.keep):
        sys.exit(1)


if __name__ == "__main__":
    main()
