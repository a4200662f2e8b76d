"""Check the CUDA backend on this machine's card, then time it. Needs numpy and CuPy only, and no network.

    scripts/gpu_check                      everything; results also into $OUT/gpu_check.md or ./gpu_check.md
    scripts/gpu_check --only products zoo  some steps
    scripts/gpu_check --shim               the checks without a card, by the shim of the tests (needs g++)
    scripts/gpu_check --record gpu_check.md    append such results to BENCHMARKS.md

Every result is written as soon as it is there; steps that --minutes leave no time for are named at the end. Expected
values: tests/data/gpu-expected.npz (scripts/make_gpu_expected.py: our CPU backend) and tests/data/zoo (llama.cpp).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import gpu_cases  # noqa: E402
import gpu_speed  # noqa: E402
import numpy as np  # noqa: E402
from gpu_cases import TYPES, nmse, on_card  # noqa: E402

from quantkit.errors import QuantkitError  # noqa: E402
from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.kernels.cuda.device import count_devices, why_none  # noqa: E402
from quantkit.model.engine import load  # noqa: E402
from quantkit.model.fusion import Fusion  # noqa: E402
from zoo import NAMES, expected, write_zoo  # noqa: E402

EXPECTED = ROOT / "tests/data/gpu-expected.npz"


class Run:
    """A run of all steps: where results go, what failed, when time is up."""

    def __init__(self, out: Path, minutes: float, types: Sequence[str]) -> None:
        self.file = out.open("w", encoding="utf-8")
        self.deadline = time.monotonic() + 60 * minutes
        self.failed: list[str] = []
        self.types = types
        shared = Path("/dev/shm")  # models of gigabytes are quicker in memory
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 24 << 30
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_check-", dir=shared if roomy else None))
        self.expected: Any = np.load(EXPECTED) if EXPECTED.exists() else {}

    @property
    def left(self) -> float:
        """Seconds until time is up."""
        return self.deadline - time.monotonic()

    def say(self, line: str = "") -> None:
        """Write a line to the screen and to the file, now."""
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def check(self, what: str, value: float, bound: float) -> bool:
        """Note a failure if a value is beyond its bound, or no number."""
        good = value <= bound
        if not good:
            self.failed.append(f"{what}: {value:.3g}, bound {bound:g}")
        return good


# ---------------------------------------------------------------- checks


def products(run: Run) -> None:
    """Products of every type, 1, 5 and 40 tokens, dense, fused, by expert, beside the CPU backend's."""
    from quantkit.kernels.cuda.device import open_device
    from quantkit.model.backends.cuda import CUDABackend

    path = gpu_cases.write_products(run.folder / "products.gguf")
    worst: list[tuple[float, str]] = []
    with open_gguf(path) as source:
        backend = CUDABackend(source, open_device("CUDA0"))
        for name in run.types:
            largest = 0.0
            for case, found in gpu_cases.run_products(backend, source, name):
                error = nmse(found, run.expected[case])
                largest = max(largest, error if np.isfinite(error) else np.inf)
                run.check(f"products: {case}", error, gpu_cases.BOUND)
            worst.append((largest, name))
        backend.close()
    run.say(f"products of {len(worst)} types beside the CPU backend: worst NMSE {max(worst)[0]:.2g} ({max(worst)[1]})")


def zoo(run: Run) -> None:
    """Logits of all zoo models in F32, fused and not, beside llama.cpp's."""
    worst: list[tuple[float, str]] = []
    for name in NAMES:
        tokens, logits = expected(name)
        path = write_zoo(name, run.folder / f"{name}.gguf")
        for fusion in (Fusion(), Fusion.none()):
            with load(path, kv_type="f32", fusion=fusion, placement=on_card()) as model:
                session = model.session(64)
                parts = (tokens[:40], tokens[40:41], tokens[41:42], tokens[42:43], tokens[43:])
                found = np.concatenate([session.decode(part) for part in parts])
                error = nmse(found, logits)
                worst.append((error if np.isfinite(error) else np.inf, name))
                run.check(f"zoo: {name}, {'fused' if fusion.moe else 'unfused'}", error, 1e-8)
        path.unlink()
    run.say(
        f"zoo, {len(NAMES)} models fused and not, beside llama.cpp: worst NMSE {max(worst)[0]:.2g} ({max(worst)[1]})"
    )


def quantized(run: Run) -> None:
    """Logits of a zoo model drawn in several types beside the CPU backend's."""
    for name in gpu_cases.RETYPED[1]:
        path = gpu_cases.retyped(run.folder, name)
        with load(path, kv_type="f16", placement=on_card()) as model:
            found = model.forward(gpu_cases.retyped_tokens())
        wanted = run.expected[f"retyped {name}"]
        error, best = nmse(found, wanted), min(nmse(a, b) for a, b in zip(found, wanted, strict=True))
        run.check(f"quantized: {name}", error, gpu_cases.BOUND_MODEL)
        run.check(f"quantized: {name}, the closest token", best, gpu_cases.BOUND)
        run.say(f"{gpu_cases.RETYPED[0]} in {name} beside the CPU backend: NMSE {error:.2g}, closest token {best:.2g}")


def tiny_moe(run: Run) -> None:
    """Perplexity of a trained MoE beside the CPU backend's."""
    tokens, cpu = run.expected["tiny-moe tokens"], float(run.expected["tiny-moe perplexity"])
    for what, cublas in (("own products", False), ("cuBLAS", True)):
        with load(ROOT / "tests/data/tiny-moe-bf16.gguf", placement=on_card(), cublas=cublas) as model:
            ppl = gpu_cases.perplexity(model, tokens)
        run.check(f"tiny-moe, {what}: perplexity away from the CPU's", abs(ppl / cpu - 1), 1e-3)
        away = f"{ppl / cpu - 1:+.3%}"
        run.say(f"tiny-moe BF16, {what}, perplexity of {tokens.size} tokens: {ppl:.4f}, CPU {cpu:.4f} ({away})")


def placements(run: Run) -> None:
    """Tensors on the card and on the host in every mixture, #861 among them; the host is numpy's backend."""
    tokens, logits = expected("qwen3moe-moe")
    path = write_zoo("qwen3moe-moe", run.folder / "placed.gguf")
    for what, rules in gpu_cases.PLACEMENTS.items():
        with load(path, kv_type="f32", placement=on_card(rules)) as model:
            session = model.session(64)
            found = np.concatenate([session.decode(part) for part in (tokens[:12], tokens[12:13])])
            run.check(f"placements: {what}", nmse(found, logits[:13]), 1e-8)
    with load(path, kv_type="f32", placement=on_card(), max_vram=2_000_000) as model:
        run.check("placements: --max-vram", nmse(model.forward(tokens[:20]), logits[:20]), 1e-8)
    run.say(f"placements: {len(gpu_cases.PLACEMENTS)} mixtures of card and host, and weights sent for every batch")


CHECKS: dict[str, Callable[[Run], None]] = {
    "products": products,
    "zoo": zoo,
    "quantized": quantized,
    "tiny-moe": tiny_moe,
    "placements": placements,
}

STEPS: dict[str, Callable[[Run], None]] = {"card": gpu_speed.card, **CHECKS, **gpu_speed.STEPS}


# ---------------------------------------------------------------- all of it


def carry_out(run: Run, names: list[str]) -> None:
    """Run steps; a step that breaks is a failure, and the next one runs."""
    late = []
    for name in names:
        if run.left < 10:
            late.append(name)
            continue
        began = time.monotonic()
        try:
            STEPS[name](run)
        except Exception as e:  # whatever it is, the rest is to be measured
            run.failed.append(f"{name} broke: {type(e).__name__}: {e}")
            run.say(traceback.format_exc(limit=8))
        print(f"[{name}: {time.monotonic() - began:.1f} s]", flush=True)
    if late:
        run.say(f"NOT RUN, no time left: {', '.join(late)}")
    for line in run.failed:
        run.say(f"FAILED {line}")
    run.say("all checks passed" if not run.failed else f"{len(run.failed)} FAILED")


def record(results: Path) -> None:
    """Append a file of results to BENCHMARKS.md."""
    text = results.read_text(encoding="utf-8").strip()
    first = next(line for line in text.splitlines() if line.startswith("card: "))
    with (ROOT / "BENCHMARKS.md").open("a", encoding="utf-8") as file:
        file.write(f"\n## On a GPU: {first.removeprefix('card: ')}\n\n`scripts/gpu_check`\n\n{text}\n")
    print(f"appended to BENCHMARKS.md: {first}")


def use_shim() -> None:
    """Let CUDA0 and CUDA1 be the host shim's."""
    import host_device

    import quantkit.kernels.cuda.device as device
    import quantkit.model.devices as devices

    made: dict[str, Any] = {name: host_device.HostDevice(name=name) for name in ("CUDA0", "CUDA1")}
    device.open_device = made.__getitem__  # type: ignore[assignment]
    devices.cuda_devices = lambda: tuple(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"some of: {' '.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop beginning steps (default: 8)")
    parser.add_argument("--out", type=Path, help="where results go")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE", help="of products")
    parser.add_argument("--shim", action="store_true", help="checks only, on the host shim")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append results to BENCHMARKS.md, run nothing")
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    if options.shim:
        use_shim()
    elif not count_devices():
        sys.exit(f"gpu_check: no CUDA device: {why_none()}")
    out = options.out or Path(os.environ.get("OUT", ".")) / "gpu_check.md"
    run = Run(out, options.minutes, options.types)
    try:
        carry_out(run, options.only or list(CHECKS if options.shim else STEPS))
    except QuantkitError as e:
        sys.exit(f"gpu_check: {e}")
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)
    sys.exit(1 if run.failed else 0)


if __name__ == "__main__":
    main()
