"""Measure error feedback at the width and with the experts of a real model: random weights, correlated inputs.

    benchmarks/feedback_experts.py TEXT [--layers 1] [--experts 128] [--ff 768] [--tokens N] [--types Q4_K,Q2_K]

A model of `scripts/make_moe.py` (2048 columns; the shapes of Qwen3-30B-A3B) gets embeddings with the spectrum of inputs
of trained models: eigenvalues fall as 1/i over three decades, columns differ, and some are massive. `quantkit imatrix
--covariance` and `quantkit quantize --feedback` run as processes. Prints the time and memory of each, and the loss of
every kind of tensor relative to the reference's encoder, in the metric of its covariance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_feedback import covariance
from processes import Outcome, machine, make_moe, quantkit, run, work_folder
from results import parse_options, record_output

from quantkit.evaluate import perplexity
from quantkit.formats.covariance import Covariances
from quantkit.formats.gguf import open_model

F64 = npt.NDArray[np.float64]


def correlate(path: Path) -> None:
    """Replace the embeddings by rows with such a covariance, and the weights of norms by varying ones."""
    model = open_model(path)
    rng = np.random.default_rng(1)
    n, count = model.tensors["token_embd.weight"].shape
    root = np.linalg.cholesky(covariance(n, n) + 1e-6 * np.eye(n))
    rows = rng.standard_normal((count, n)) @ root.T
    with open(path, "r+b") as file:
        for name, tensor in model.tensors.items():
            if name == "token_embd.weight":
                data = (rows / rows.std()).astype(np.float16)
            elif name.endswith(("attn_norm.weight", "ffn_norm.weight")):
                data = np.exp(0.3 * rng.standard_normal(n)).astype(np.float32)
            else:
                continue
            assert data.nbytes == tensor.nbytes
            file.seek(tensor.offset)
            file.write(data.tobytes())


def spectrum(h: F64) -> str:
    """Return the shares of the largest 1 % and 10 % of a covariance's eigenvalues in their sum, as text."""
    values = np.sort(np.linalg.eigvalsh(h))[::-1]
    shares = [values[: max(1, len(values) // part)].sum() / values.sum() for part in (100, 10)]
    return " / ".join(f"{share:.0%}" for share in shares)


def print_usage(label: str, outcome: Outcome) -> None:
    """Print the time and memory of a process."""
    checked_outcome = outcome.checked(label)
    print(f"{label}: {checked_outcome.seconds:.0f} s, {checked_outcome.cpu_seconds:.0f} s of processors, peak memory "
          f"{checked_outcome.peak_rss / 2**20:.0f} MiB", flush=True)  # fmt: skip


def rows(report: dict[str, Any], columns: dict[str, int]) -> Iterator[str]:
    """Yield a row of the table for each tensor."""
    for tensor in report["tensors"]:
        matrices = [m for m in tensor["matrices"] if m["damping"] is not None]
        ratios = np.array([m["loss_after"] / m["loss_before"] for m in matrices])
        if not len(matrices) or not np.isfinite(ratios).all():
            yield f"| {tensor['name']} | {tensor['type']} | {len(matrices)} of {len(tensor['matrices'])} | no figures |"
            continue
        tokens = np.percentile([m["tokens"] for m in tensor["matrices"]], [0, 50, 100])
        better = sum(m["rows_better"] for m in matrices) / sum(m["rows"] for m in matrices)
        spread = f"{ratios.min():.3f} to {ratios.max():.3f}"
        yield (
            f"| {tensor['name']} | {columns.get(tensor['name'], 0)} | {tensor['type']} | "
            f"{len(matrices)} of {len(tensor['matrices'])} | {' / '.join(f'{t:.0f}' for t in tokens)} | "
            f"{np.exp(np.log(ratios).mean()):.3f} | {spread} | {better:.2%} |"
        )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("text", type=Path)
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--experts", type=int, default=128)
    p.add_argument("--ff", type=int, default=768)
    p.add_argument("--tokens", type=int, default=98_304)
    p.add_argument("--types", default="Q4_K,Q2_K")
    p.add_argument("--max-ram", default="4G")
    p.add_argument("--folder", type=Path, help="folder for the files, which are kept")
    args = parse_options(p)
    print(machine(), flush=True)
    with work_folder(args.folder) as folder:
        model, sums, im = folder / "moe.gguf", folder / "cov.gguf", folder / "im.gguf"
        make_moe(model, *(f"--{name}={getattr(args, name)}" for name in ("layers", "experts", "ff")))
        correlate(model)
        print_usage("imatrix --covariance", run(quantkit(
            "imatrix", "-m", model, "-f", args.text, "-o", im, "--covariance", sums, "--covariance-of", "router",
            "-c", "512", "--chunks", str(args.tokens // 512), "--max-ram", args.max_ram, "--no-ppl", "--overwrite",
        )))  # fmt: skip
        covariances = Covariances(sums)
        for entry in dict.fromkeys(covariances.entries.values()):
            print(f"  {entry}: {covariances.shape(entry)[0]} columns, the largest 1 % / 10 % of the eigenvalues are "
                  f"{spectrum(covariances.matrix(entry, 0))} of their sum", flush=True)  # fmt: skip
        columns = {name: tensor.shape[0] for name, tensor in open_model(model).tensors.items()}
        print(f"{sums.name}: {sums.stat().st_size / 2**20:.0f} MiB")
        base_ppl = perplexity(model, args.text.read_bytes(), n_ctx=512, chunks=4).ppl.value
        for name in args.types.split(","):
            out = folder / "out.gguf"
            outcome = run(quantkit("quantize", "--imatrix", im, "--feedback", sums, "--pure", "--max-ram", args.max_ram,
                                "--overwrite", "--json", model, out, name))  # fmt: skip
            print_usage(f"quantize --feedback, {name}", outcome)
            print("| tensor | columns | type | fed | tokens, least / median / most | loss | of single matrices | rows "
                  "better |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
            print("\n".join(rows(json.loads(outcome.stdout)["feedback"], columns)), flush=True)
            ppl = perplexity(out, args.text.read_bytes(), n_ctx=512, chunks=4).ppl.value
            print(f"perplexity of 4 chunks: {ppl:.1f}, of the source {base_ppl:.1f}", flush=True)


if __name__ == "__main__":
    record_output(main)
