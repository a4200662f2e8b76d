"""Measure prompts and generation against llama.cpp, in turns on the same cores and files; then run bench_fusion.py.

    benchmarks/bench_engine.py --llama FOLDER --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

Every turn is a new process that loads the model, warms up and measures once; the median of the turns counts. The MoE is
that of make_moe.py: shapes of Qwen3-30B-A3B (2048 wide, 128 experts of 768, 8 used), 3 layers, and tiny-moe's
vocabulary, so that the output head does not dominate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from processes import machine, make_moe, quantkit, run, work_folder

Speeds = dict[str, float]
PRESETS = ("Q4_K_M", "IQ4_XS", "Q8_0")
ROUTERS = ("q8_0", None)


def quantkit_script(name: str, *arguments: Path) -> list[str | Path]:
    """Return the command line of another script in this folder."""
    return [sys.executable, Path(__file__).with_name(name), *arguments]


def ours(model: Path, prompt: int, gen: int, *switches: str) -> Speeds:
    """Return the tokens a second of quantkit by test."""
    command = quantkit("bench", "-m", model, "-p", str(prompt), "-n", str(gen), "-r", "1", "-o", "json", *switches)
    return {
        ("pp" if row["n_prompt"] else "tg"): row["avg_ts"] for row in json.loads(run(command).checked("bench").stdout)
    }


def llama(folder: Path, model: Path, prompt: int, gen: int) -> Speeds:
    """Return the tokens a second of llama-bench by test."""
    command: list[str | Path] = [
        folder / "llama-bench",
        "-m",
        model,
        "-p",
        str(prompt),
        "-n",
        str(gen),
        "-r",
        "1",
        "-o",
        "json",
    ]
    found = json.loads(run(command).checked("llama-bench").stdout)
    return {("pp" if row["n_prompt"] else "tg"): row["avg_ts"] for row in found}


def medians(runners: Sequence[Callable[[], Speeds]], rounds: int) -> list[tuple[Speeds, dict[str, list[float]]]]:
    """Run all in turns, in rotated order, and return the medians and samples of each."""
    samples: list[dict[str, list[float]]] = [{} for _ in runners]
    for turn in range(rounds):
        for i in [(turn + k) % len(runners) for k in range(len(runners))]:
            for test, speed in runners[i]().items():
                samples[i].setdefault(test, []).append(speed)
    return [({test: statistics.median(v) for test, v in s.items()}, s) for s in samples]


def beside_llama(models: Sequence[tuple[str, Path]], options: argparse.Namespace) -> None:
    print("| model | test | quantkit t/s | llama.cpp t/s | / llama.cpp |\n|---|---|---|---|---|")
    for name, model in models:
        runners = [partial(ours, model), partial(llama, options.llama, model)]
        (mine, _), (theirs, _) = medians([partial(r, options.prompt, options.gen) for r in runners], options.rounds)
        for test, n in (("pp", options.prompt), ("tg", options.gen)):
            ratio = mine[test] / theirs[test]
            print(f"| {name} | {test}{n} | {mine[test]:.1f} | {theirs[test]:.1f} | {ratio:.2f}x |", flush=True)


def quantized(folder: Path, source: Path, preset: str, router: str | None) -> Path:
    out = folder / f"moe-{preset}{f'-router-{router}' if router else ''}.gguf"
    if not out.exists():
        options = ["--ffn-gate-inp-type", router] if router else []
        run(quantkit("quantize", *options, source, out, preset)).checked("quantize")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the models, kept if given")
    options = parser.parse_args()
    with work_folder(options.work) as folder:
        wanted = [(p, r) for p in options.presets for r in ROUTERS]
        if not all((folder / f"moe-{p}{f'-router-{r}' if r else ''}.gguf").exists() for p, r in wanted):
            source = make_moe(folder / "moe-f16.gguf", "--layers", str(options.layers))
            for preset, router in wanted:
                quantized(folder, source, preset, router)
            source.unlink()
        models = [(f"MoE {p}", quantized(folder, folder, p, None)) for p in options.presets]
        if options.smollm2:
            models.append(("SmolLM2 Q4_1", options.smollm2))
        print(f"median of {options.rounds}; {machine()}\n")
        beside_llama(models, options)
        run_gains = quantkit_script(
            "bench_fusion.py", *(quantized(folder, folder, options.presets[0], r) for r in ROUTERS)
        )
        print(run(run_gains).checked("bench_fusion").stdout)


if __name__ == "__main__":
    main()
