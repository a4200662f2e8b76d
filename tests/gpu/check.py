"""Check the CUDA backend on this machine's GPU, then time it. Needs numpy and CuPy only, and no network.

    scripts/gpu_check                      everything; results also into $OUT/gpu_check.md or ./gpu_check.md
    scripts/gpu_check encode               encoders, error feedback: golden bytes, random rows, whole files, speed
    scripts/gpu_check sanitize             products, zoo models and encoders under compute-sanitizer, if it is here
    scripts/gpu_check --only products zoo  some steps
    scripts/gpu_check --shim               the checks without a GPU, by the shim of the tests (needs g++)
    scripts/gpu_check --record gpu_check.md    make these results the record of docs/benchmarks/gpu.md

Every result is written as soon as it is there, what matters most first; what --minutes leave no time for is named. A
part that breaks the GPU, or hangs, costs itself only (run.py). Expected values: tests/data/gpu-expected.npz
(scripts/make_gpu_expected.py: our CPU backend) and tests/data/zoo (llama.cpp).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPU_RECORD = ROOT / "docs/benchmarks/data/gpu.json"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "scripts")]
sys.path.append(str(ROOT / "benchmarks"))

import make_moe  # noqa: E402
import numpy as np  # noqa: E402
from results import record_of  # noqa: E402

from gpu import cases, encoding, feedback, rounding, sanitizer, speed  # noqa: E402
from gpu.cases import TYPES, launched_early, nmse, on_gpu  # noqa: E402
from gpu.run import NOT_RUN, PATIENCE, Run, verdict, watch  # noqa: E402
from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.kernels.cuda.core.device import count_devices, why_none  # noqa: E402
from quantkit.kernels.first_run import tell  # noqa: E402
from quantkit.model.engine import load  # noqa: E402
from quantkit.model.fusion import Fusion  # noqa: E402
from zoo import NAMES, expected, write_zoo  # noqa: E402

# ---------------------------------------------------------------- checks


def products(run: Run) -> None:
    """Products of every type, 1, 5 and 40 tokens, dense, fused, by expert, beside the CPU backend's."""
    from quantkit.kernels.cuda.core.device import open_device
    from quantkit.model.backends.cuda.backend import CUDABackend

    if not run.todo("products", run.types):
        return
    path = run.folder / "products.gguf"
    if not path.exists():
        cases.write_products(path.with_suffix(".part")).rename(path)
    worst: list[tuple[float, str]] = []
    with open_gguf(path) as source:
        backend = CUDABackend(source, open_device("CUDA0"))

        def of_type(name: str) -> None:
            for case, actual in cases.run_products(backend, source, name):
                error = nmse(actual, run.expected[case])
                worst.append((error if np.isfinite(error) else np.inf, name))
                run.check(f"products: {case}", error, cases.BOUND)

        run.for_each("products", run.types, of_type)
        backend.close()
    _say_worst(run, "products beside the CPU backend", worst)


def _say_worst(run: Run, label: str, errors: list[tuple[float, str]]) -> None:
    if errors:
        value, name = max(errors)
        run.say(f"{label}: {len({name for _, name in errors})} done, worst NMSE {value:.2g} ({name})")


def zoo(run: Run) -> None:
    """Logits of all zoo models in F32, fused and not, beside llama.cpp's."""
    _zoo(run, "zoo", {"fused": Fusion(), "unfused": Fusion.none()})


def dependent_launches(run: Run) -> None:
    """The same once more, with launches that begin before the one before them is done."""
    with launched_early():
        _zoo(run, "early", {"early launches": Fusion()})


def _zoo(run: Run, step: str, fusions: dict[str, Fusion]) -> None:
    worst: list[tuple[float, str]] = []

    def of_model(name: str) -> None:
        tokens, logits = expected(name)
        path = write_zoo(name, run.folder / f"{name}.gguf")
        for label, fusion in fusions.items():
            with load(path, kv_type="f32", fusion=fusion, placement=on_gpu()) as model:
                session = model.session(64)
                parts = np.split(tokens, [] if model.is_bidirectional else [40, 41, 42, 43])
                actual = np.concatenate([session.decode(part) for part in parts])
                error = nmse(actual, logits)
                worst.append((error if np.isfinite(error) else np.inf, name))
                run.check(f"{step}: {name}, {label}", error, 1e-8)
        path.unlink()

    run.for_each(step, NAMES, of_model)
    _say_worst(run, f"zoo models in F32 beside llama.cpp, {' and '.join(fusions)}", worst)


def quantized(run: Run) -> None:
    """Logits of a zoo model drawn in several types beside the CPU backend's."""

    def of_type(name: str) -> None:
        path = cases.retyped(run.folder, name)
        with load(path, kv_type="f16", placement=on_gpu()) as model:
            actual = model.forward(cases.retyped_tokens())
        expected = run.expected[f"retyped {name}"]
        error, best = nmse(actual, expected), min(nmse(a, b) for a, b in zip(actual, expected, strict=True))
        run.check(f"quantized: {name}", error, cases.BOUND_MODEL)
        run.check(f"quantized: {name}, the closest token", best, cases.BOUND)
        run.say(f"{cases.RETYPED[0]} in {name} beside the CPU backend: NMSE {error:.2g}, closest token {best:.2g}")

    run.for_each("quantized", cases.RETYPED[1], of_type)


def tiny_moe(run: Run) -> None:
    """Perplexity of a trained MoE beside the CPU backend's."""
    tokens, cpu = run.expected["tiny-moe tokens"], float(run.expected["tiny-moe perplexity"])

    def perplexity(label: str) -> None:
        if label == "cuBLAS" and not speed.has_cublas():
            run.say(f"{NOT_RUN}, there is no cuBLAS: tiny-moe by cuBLAS")
            return
        file = ROOT / "tests/data/tiny-moe-bf16.gguf"
        with load(file, placement=on_gpu(), cublas=label == "cuBLAS") as model:
            ppl = cases.perplexity(model, tokens)
        run.check(f"tiny-moe, {label}: perplexity away from the CPU's", abs(ppl / cpu - 1), 1e-3)
        difference = f"{ppl / cpu - 1:+.3%}"
        run.say(f"tiny-moe BF16, {label}, perplexity of {tokens.size} tokens: {ppl:.4f}, CPU {cpu:.4f} ({difference})")

    run.for_each("tiny-moe", ("own products", "cuBLAS"), perplexity)


def placements(run: Run) -> None:
    """Tensors on the card and on the host in every mixture, #861 among them; the host is numpy's backend."""
    if not run.todo("placements", [*cases.PLACEMENTS, "--max-vram"]):
        return
    tokens, logits = expected("qwen3moe-moe")
    path = write_zoo("qwen3moe-moe", run.folder / "placed.gguf")
    labels = []

    def placed(label: str) -> None:
        vram = 2_000_000 if label == "--max-vram" else None
        rules = cases.PLACEMENTS.get(label, ())
        with load(path, kv_type="f32", placement=on_gpu(rules), max_vram=vram) as model:
            session = model.session(64)
            actual = np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:13])])
        if run.check(f"placements: {label}", nmse(actual, logits[:13]), 1e-8):
            labels.append(label)

    run.for_each("placements", [*cases.PLACEMENTS, "--max-vram"], placed)
    if labels:
        run.say(f"placements: {len(labels)} mixtures of card and host are right")


CHECKS: dict[str, Callable[[Run], None]] = {
    "products": products,
    "zoo": zoo,
    "quantized": quantized,
    "tiny-moe": tiny_moe,
    "placements": placements,
    "early": dependent_launches,
    "encoding": encoding.goldens,
    "parity": encoding.parity,
    "rounding": rounding.rounding,
    "metrics": rounding.metrics,
    "pipeline": encoding.pipeline,
    "feedback": feedback.feedback,
}

_ALL: dict[str, Callable[[Run], None]] = {
    "card": speed.card, **CHECKS, **speed.STEPS, "encode": encoding.speed, "cores": encoding.cores,
    "sanitizer": sanitizer.sanitizer,
}  # fmt: skip

#: In this order: whether every type is right, and how fast, then the model, then what takes long or is a switch.
_ORDER = (
    "card", "products", "encoding", "parity", "mat-vec", "encode", "model", "zoo", "fused", "pipeline", "quantized",
    "tiny-moe", "placements", "rounding", "metrics", "feedback", "mat-mat", "attention", "cores", "early", "sanitizer",
)  # fmt: skip
STEPS = {name: _ALL[name] for name in _ORDER}

#: What is asked for by a word: `scripts/gpu_check encode`.
GROUPS = {
    "encode": ("card", "encoding", "parity", "rounding", "metrics", "pipeline", "feedback", "encode", "cores"),
    "sanitize": ("card", "sanitizer"),
}

#: What matters most, before all the rest: whether it is right, and how fast a model and its commonest types are.
_COMMON = ("Q4_K", "Q8_0", "Q6_K", "IQ4_XS")
FIRST: dict[str, Sequence[str]] = {
    "card": ("card",),
    "products": (*_COMMON, "F16", "BF16", "F32"),
    "tiny-moe": ("own products",),
    "zoo": ("qwen3moe-moe", "llama-dense"),
    "model": ("all fused",),
    "mat-vec": _COMMON,
    "mat-mat": _COMMON,
    "attention, 32 heads over 4": ("f16",),
    "encoding": _COMMON,
    "parity": _COMMON,
    "rounding": _COMMON,
    "pipeline": ("Q4_K_M",),
    "feedback": ("Q4_K_M",),
    "encode": _COMMON,
}


# ---------------------------------------------------------------- all of it


def carry_out(run: Run, names: Sequence[str], *, only_first: bool = False) -> None:
    """Do steps, all of whose parts are begun once, FIRST's before.

    only_first: only FIRST's.
    """
    first = [name for step in FIRST for name in names if step.partition(",")[0] == name]
    for i, name in enumerate(first if only_first else [*first, *names]):
        run.only = FIRST if i < len(first) else {}
        began = time.monotonic()
        run.do(name, partial(STEPS[name], run))
        print(f"[{name}: {time.monotonic() - began:.1f} s]", flush=True)


def supervise(options: argparse.Namespace, out: Path) -> int:
    """Let other processes do it all; return the exit code."""
    out.write_text("")
    shared = Path("/dev/shm")  # models of gigabytes are quicker in memory
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 24 << 30
    work = Path(tempfile.mkdtemp(prefix="gpu_check-", dir=shared if roomy else None))
    until = time.time() + 60 * options.minutes
    steps = options.only or list(GROUPS[options.group] if options.group else STEPS)
    steps = [name for name in steps if name in CHECKS or not options.shim]
    command = [sys.executable, __file__, "--out", str(out), "--work", str(work), "--until", str(until)]
    command += ["--types", *options.types, "--only", *steps, *(["--shim"] if options.shim else [])]
    try:
        watch(command, out, work, until, 1800 if options.shim else PATIENCE)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    last = verdict(out.read_text(encoding="utf-8"))
    print(last)
    with out.open("a", encoding="utf-8") as file:
        file.write(last + "\n")
    return 0 if last == "all checks passed" else 1


def record(results: Path) -> None:
    """Make a file of results the record that docs/benchmarks/gpu.md shows."""
    text = results.read_text(encoding="utf-8")
    card = next(line for line in text.splitlines() if line.startswith("card: ")).removeprefix("card: ")
    GPU_RECORD.write_text(
        replace(record_of(text), command="scripts/gpu_check", machine=card).to_json(), encoding="utf-8"
    )
    print(f"{GPU_RECORD}: {card}; next: scripts/make_benchmark_pages.py")


def use_shim() -> None:
    """Let CUDA0 and CUDA1 be the host shim's."""
    import host_device

    import quantkit.kernels.cuda.core.device as device
    import quantkit.model.placement as devices

    host_devices: dict[str, Any] = {name: host_device.HostDevice(name=name) for name in ("CUDA0", "CUDA1")}
    device.open_device = host_devices.__getitem__  # type: ignore[assignment]
    device.count_devices = lambda: len(host_devices)  # type: ignore[assignment]
    rounding.SIZES = rounding.Sizes(3, 64, 8192, 96, repetitions=0)
    encoding.FILE = encoding.File(0, make_moe.Model(1, 2, 1, 256, 256, 2, 1, 128, 256), 2)
    feedback.FILE = feedback.File(make_moe.Model(1, 3, 1, 256, 32, 1, 1, 128, 16))
    speed._GPU[:] = [
        speed.Card(host_devices["CUDA0"], math.nan, 1.0)
    ]  # nothing is measured, and products by cuBLAS are
    devices.cuda_devices = lambda: tuple(host_devices)


def without_pool() -> None:
    """Let every array have memory of its own, so that what lies behind it is watched."""
    import cupy

    cupy.cuda.set_allocator(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="?", choices=GROUPS, help="some steps that belong together")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"some of: {' '.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop beginning steps (default: 8)")
    parser.add_argument("--out", type=Path, help="where results go")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE", help="of products")
    parser.add_argument("--shim", action="store_true", help="checks only, on the host shim")
    parser.add_argument("--record", type=Path, metavar="FILE", help="make these results a record, run nothing")
    # Of the processes that do the work (run.py).
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    # Of those under compute-sanitizer (sanitizer.py).
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sanitized", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    if options.shim:
        use_shim()
    elif not count_devices():
        sys.exit(f"gpu_check: no CUDA device: {why_none()}")
    out = options.out or Path(os.environ.get("OUT", ".")) / "gpu_check.md"
    if options.work is None:
        sys.exit(supervise(options, out))
    run = Run(out, options.work, options.until, options.types)
    if options.sanitized:
        without_pool()
    tell(run.moves)  # a line a module: a process that compiles for minutes does not hang
    carry_out(run, options.only, only_first=options.first)
    sys.exit(1 if options.sanitized and run.n_failed else 0)


if __name__ == "__main__":
    main()
