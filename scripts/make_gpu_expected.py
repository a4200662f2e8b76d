"""Write tests/data/gpu-expected.npz: what the CPU backend computes of the cases of scripts/gpu_check.

    scripts/make_gpu_expected.py [OUT.npz]

A card's machine may have neither numba nor a compiler, so what it is to find is computed here and committed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import gpu_cases  # noqa: E402
import numpy as np  # noqa: E402

from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.model.backends.cpu import CPUBackend  # noqa: E402
from quantkit.model.engine import load  # noqa: E402

#: Tokens of a chunk of tiny-moe's text, and chunks.
N_CTX, CHUNKS = 256, 12


def expected() -> dict[str, Any]:
    """Return all arrays by name."""
    arrays: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())
    with open_gguf(gpu_cases.write_products(folder / "products.gguf")) as source:
        backend = CPUBackend(source, 2)
        for name in gpu_cases.TYPES:
            arrays |= dict(gpu_cases.run_products(backend, source, name))
    for name in gpu_cases.RETYPED[1]:
        with load(gpu_cases.retyped(folder, name), kv_type="f16") as model:
            arrays[f"retyped {name}"] = model.forward(gpu_cases.retyped_tokens())
    with load(ROOT / "tests/data/tiny-moe-bf16.gguf") as model:
        ids = model.tokenizer.encode((ROOT / "tests/data/tiny-moe-evaluation.txt").read_text())
        tokens = np.asarray(ids[: CHUNKS * N_CTX], np.int32).reshape(CHUNKS, N_CTX)
        arrays |= {"tiny-moe tokens": tokens, "tiny-moe perplexity": gpu_cases.perplexity(model, tokens)}
    return arrays


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/data/gpu-expected.npz"
    arrays = expected()
    np.savez_compressed(out, **arrays)
    size, ppl = out.stat().st_size / 1e6, arrays["tiny-moe perplexity"]
    print(f"{out}: {len(arrays)} arrays, {size:.1f} MB; perplexity of tiny-moe {ppl:.4f}")


if __name__ == "__main__":
    main()
