"""Write tests/data/gpu-expected.npz: the CPU backend's results for the cases of scripts/gpu_check.

    scripts/make_gpu_expected.py [OUT.npz]
    scripts/make_gpu_expected.py --encode [TYPE ..]    tests/data/gpu-encode.json instead: digests of the CPU's bytes

A machine with a GPU may have neither numba nor a compiler, so expected results are computed here and committed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from gpu import cases, encoding  # noqa: E402
from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.kernels import quantize  # noqa: E402
from quantkit.kernels.cpu.interleave import deinterleave_rows  # noqa: E402
from quantkit.kernels.formats import BLOCK_TYPES, has_encoder  # noqa: E402
from quantkit.model.backends.cpu.backend import CPUBackend  # noqa: E402
from quantkit.model.engine import load  # noqa: E402
from quantkit.types import BY_NAME, TensorType  # noqa: E402

#: Tokens per chunk of tiny-moe's text, and chunks.
N_CTX, CHUNKS = 256, 12


def expected() -> dict[str, Any]:
    """Return the expected arrays by name."""
    arrays: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())
    with open_gguf(cases.write_products(folder / "products.gguf")) as source:
        backend = CPUBackend(source, 2)
        for name in cases.TYPES:
            arrays |= dict(cases.run_products(backend, source, name))
    for name in cases.RETYPED[1]:
        with load(cases.retyped(folder, name), kv_type="f16") as model:
            arrays[f"retyped {name}"] = model.forward(cases.retyped_tokens())
    with load(ROOT / "tests/data/tiny-moe-bf16.gguf") as model:
        ids = model.tokenizer.encode((ROOT / "tests/data/tiny-moe-evaluation.txt").read_text())
        tokens = np.asarray(ids[: CHUNKS * N_CTX], np.int32).reshape(CHUNKS, N_CTX)
        arrays |= {"tiny-moe tokens": tokens, "tiny-moe perplexity": cases.perplexity(model, tokens)}
    return arrays


def encode_on_cpu(case: encoding.Case, t: TensorType) -> npt.NDArray[np.uint8]:
    """Return the bytes of a case's rows; those of an interleaved type are deinterleaved."""
    if case.interleaved is None:
        return quantize(case.x, t, case.importance, case.encoder)
    plain = np.empty((len(case.x), t.row_bytes(case.x.shape[1])), np.uint8)
    deinterleave_rows(case.interleaved, quantize(case.x, case.interleaved, case.importance, "ik"), plain)
    return plain


def write_digests(names: list[str]) -> None:
    """Enter digests of the encoded random rows of types, by default of all, into gpu-encode.json."""
    path = encoding.EXPECTED
    digests = json.loads(path.read_text()) if path.exists() else {}
    for name in names or [t.name for t in BLOCK_TYPES if has_encoder(t)]:
        for case in encoding.parity_cases(BY_NAME[name]):
            digests[case.key] = encoding.digests(encode_on_cpu(case, BY_NAME[name]))
        print(name, flush=True)
    path.write_text(json.dumps(dict(sorted(digests.items())), indent=0) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--encode"]:
        write_digests(sys.argv[2:])
        return
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/data/gpu-expected.npz"
    arrays = expected()
    np.savez_compressed(out, **arrays)
    size, ppl = out.stat().st_size / 1e6, arrays["tiny-moe perplexity"]
    print(f"{out}: {len(arrays)} arrays, {size:.1f} MB; perplexity of tiny-moe {ppl:.4f}")


if __name__ == "__main__":
    main()
