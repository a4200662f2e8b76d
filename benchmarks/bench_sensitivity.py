"""Time ``quantkit sensitivity`` beside one ``quantize`` and ``kld`` per pair of a group and a type, in turns.

    python benchmarks/bench_sensitivity.py MODEL TEXT [--imatrix FILE] [--types A,B] [-c N] [--chunks N] [--pairs N]

A few pairs are done the long way: a file with that group alone in that type, then its divergence from base logits that
are there already. Prints seconds a pair, their ratio, how far the two divergences are apart at most, and how well
proxies rank what was measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.sensitivity import Cost, Sensitivity, SensitivityOptions, sensitivity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", default="Q2_K,Q4_K,Q6_K")
    parser.add_argument("-c", dest="n_ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8, help="pairs that are done the long way")
    given = parser.parse_args()
    options = SensitivityOptions(
        types=tuple(given.types.split(",")), imatrix=given.imatrix, n_ctx=given.n_ctx, chunks=given.chunks
    )
    with tempfile.TemporaryDirectory() as folder:
        out, base = Path(folder) / "S.json", Path(folder) / "base"
        sensitivity(given.model, out, [given.text], options=options)  # kernels are compiled, files are read
        out.unlink()
        began = time.perf_counter()
        found = sensitivity(given.model, out, [given.text], options=options)
        ours = (time.perf_counter() - began) / len(found.costs)
        text = given.text.read_bytes().removesuffix(b"\n")
        saved = SaveLogits(base, "compact", top_k=1 << 20, residual=0)
        perplexity(given.model, text, n_ctx=given.n_ctx, chunks=given.chunks, save_logits=saved)
        step = max(1, len(found.costs) // given.pairs)
        costs = found.costs[step // 2 :: step]
        _alone(given, found, costs[0], base, Path(folder))
        both, alone, apart = 0.0, 0.0, 0.0
        for cost in costs:
            whole, measuring, divergence = _alone(given, found, cost, base, Path(folder))
            both, alone, apart = both + whole, alone + measuring, max(apart, abs(divergence - (cost.kld or 0.0)))
    n = len(costs)
    print(f"sensitivity: {len(found.costs)} pairs, {ours:.3f} s a pair, {ours * len(found.costs):.1f} s in all")
    print(f"kld alone: {alone / n:.3f} s a pair, {alone / n / ours:.2f} times as long ({n} pairs)")
    print(f"quantize and kld: {both / n:.3f} s a pair, {both / n / ours:.2f} times as long")
    print(f"divergences differ by {apart:.2e} at most")
    for name, value in found.settings["rank_correlation"].items():
        print(f"{name}: rank correlation {value:.3f}")


def _alone(
    given: argparse.Namespace, found: Sensitivity, cost: Cost, base: Path, folder: Path
) -> tuple[float, float, float]:
    """Return the seconds of quantizing a group alone and measuring the file, of measuring it, and its divergence."""
    group = next(g for g in found.groups if g.name == cost.group)
    rules = tuple(f"^{name.replace('.', '[.]')}$={cost.type}" for name in group.tensors)
    began = time.perf_counter()
    quantize(
        given.model,
        folder / "q.gguf",
        "COPY",
        QuantizeOptions(imatrix=given.imatrix, tensor_type=rules),
        overwrite=True,
    )
    quantized = time.perf_counter()
    divergence = kld(folder / "q.gguf", base).sums.kld.mean.value
    ended = time.perf_counter()
    return ended - began, ended - quantized, divergence


if __name__ == "__main__":
    main()
