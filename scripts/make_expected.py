"""Write tests/data/llama-quantize.json: hashes of the tensor data that llama-quantize b11434 writes for tiny-moe.

The tests use it to compare whole files with the reference on machines without llama.cpp.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

from quantkit.formats.gguf import open_gguf

DATA = Path(__file__).parent.parent / "tests" / "data"
TYPES = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S",
    "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "MXFP4_MOE", "F16", "BF16", "F32", "COPY",
    "IQ3_S", "IQ3_M",
]  # fmt: skip
#: Presets that llama-quantize refuses without an importance matrix.
WITH_IMATRIX = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS"]


def data_sha256(path: Path) -> str:
    """Return a SHA-256 over names, types and bytes of all tensors, in file order."""
    digest = hashlib.sha256()
    with open_gguf(path) as file:
        for name, tensor in file.tensors.items():
            digest.update(f"{name} {tensor.type} ".encode() + file.data(tensor).tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "programs", nargs="?", type=Path, default=Path.home() / ".cache/quantkit/peers/llama-b11434/bin"
    )
    programs = parser.parse_args().programs
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.gguf"
        for type_name in TYPES + WITH_IMATRIX:
            for imatrix in (False, True) if type_name in TYPES else (True,):
                flags: list[str | Path] = ["--imatrix", DATA / "tiny-moe-imatrix.gguf"] if imatrix else []
                command = [programs / "llama-quantize", *flags, DATA / "tiny-moe-bf16.gguf", out, type_name]
                subprocess.run(command, check=True, capture_output=True)
                hashes[type_name + ("+imatrix" if imatrix else "")] = data_sha256(out)
    (DATA / "llama-quantize.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
