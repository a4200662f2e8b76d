"""One pass gives what convert_hf_to_gguf.py and llama-quantize give in two, byte for byte, importances included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_convert_goldens import options_of

import checkpoints
from quantkit.convert import convert
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.quantize import QuantizeOptions

#: Permuted heads, stacked experts, the two halves of a latent cache, experts that are MXFP4 already, float8 weights.
NAMES = ["llama", "qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-moe-fp8"]
#: What test_quantize.py compares of GGUF files is not compared of every checkpoint, too.
PRESETS = {"llama": "IQ4_XS", "qwen3-moe": "Q6_K", "deepseek-v3": "IQ4_XS", "gpt-oss": "MXFP4_MOE"}


def drawn_imatrix(path: Path, model: Path) -> Path:
    """Write drawn importances for every matrix of ``model``; some experts saw few tokens, one none."""
    rng = np.random.default_rng(7)
    entries = {}
    with open_gguf(model) as file:
        for t in file.tensors.values():
            if len(t.shape) < 2 or not t.name.endswith(".weight"):
                continue
            n, n_mat = t.shape[0], t.shape[2] if len(t.shape) > 2 else 1
            counts = rng.integers(0 if n_mat > 1 else 1, 300, n_mat).astype(np.int64)
            sums = rng.gamma(0.3, 2, (n_mat, n)) * counts[:, None]
            entries[t.name] = ImatrixEntry(sums.astype(np.float32), counts)
    write_imatrix(path, Imatrix(path, entries, ["calibration.txt"], 10, 512))
    return path


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_equals_two_programs(llama_bin: Path, tmp_path: Path, name: str) -> None:
    options = options_of(checkpoints.describe(name))
    folder = checkpoints.write_checkpoint(name, tmp_path)
    # The bytes of convert_hf_to_gguf.py, as test_convert_goldens.py proves.
    (between,) = convert(folder, tmp_path / "between.gguf", None, options).paths
    imatrix = drawn_imatrix(tmp_path / "imatrix.gguf", between)
    for preset in ("Q4_K_M", PRESETS.get(name, "MXFP4_MOE")):
        want, actual = tmp_path / f"want-{preset}.gguf", tmp_path / f"got-{preset}.gguf"
        command = list(map(str, (llama_bin / "llama-quantize", "--imatrix", imatrix, between, want, preset, 2)))
        process = subprocess.run(command, capture_output=True, text=True, errors="replace")
        assert process.returncode == 0, process.stderr[-2000:]
        convert(folder, actual, preset, options, QuantizeOptions(imatrix=imatrix, no_provenance=True))
        assert actual.read_bytes() == want.read_bytes(), preset
