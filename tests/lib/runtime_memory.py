"""The memory that a runtime allocates for a context, from its log."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from peer_cache import answer, header, peer

from ik_memory import ik_memory
from quantkit.fit import Fit, FitOptions
from quantkit.types import BY_NAME

#: Options of ik_llama.cpp's context, by those of ``FitOptions``.
IK_FIELDS = {"ctx": "n_ctx", "ubatch": "n_ubatch", "parallel": "n_seq_max", "ctk": "type_k", "ctv": "type_v"}
LLAMA_OPTIONS = {"ubatch": "-ub", "parallel": "-np", "ctk": "-ctk", "ctv": "-ctv"}


def runtime_memory(result: Fit, options: FitOptions, folder: Path) -> dict[str, list[float]]:
    """Return MiB of keys and values, states and the compute buffer, of ik_llama.cpp of weights, too.

    folder: of llama.cpp's programs, or of ik_llama.cpp's libraries, by the runtime of ``options``.
    """
    if options.runtime == "ik":
        fields = {field: getattr(options, name) for name, field in IK_FIELDS.items()}
        fields |= {name: BY_NAME[fields[name].upper()].id for name in ("type_k", "type_v")}
        fields["flash_attn"] = options.flash_attn
        return ik_memory(result.path, folder, **fields)
    arguments = [str(word) for name, option in LLAMA_OPTIONS.items() for word in (option, getattr(options, name))]
    flash_attn = "on" if options.flash_attn else "off"
    return llama_cpp(folder / "llama-fit-params", result.path, result.ctx, "-fa", flash_attn, *arguments)


def llama_cpp(program: Path, model: Path, ctx: int, *arguments: str) -> dict[str, list[float]]:
    """Return MiB that llama.cpp prints: of the file, of keys and values, of states, and of the compute buffer."""
    command = [str(program), "-m", str(model), "-lv", "5", "-fitp", "on", "-c", str(ctx), *arguments]

    def run() -> bytes:
        # Its log thread does not always print everything before it ends.
        environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
        for _ in range(10):
            output = subprocess.run(command, capture_output=True, env=environment, timeout=60)
            if b"compute buffer size" in (log := output.stdout + output.stderr):
                return log
        raise AssertionError(log.decode(errors="replace"))

    # The weights, which are holes, do not matter.
    text = answer(run, peer(program.parent), header(model), *command[3:]).decode(errors="replace")
    sizes = r"K \(\w+\):\s*([\d.]+) MiB, V \(\w+\):\s*([\d.]+) MiB"
    return {
        "cache": [float(n) for pair in re.findall(rf"cells,.*{sizes}", text) for n in pair],
        "state": [float(n) for n in re.findall(r"RS buffer size =\s*([\d.]+)", text)],
        "compute": [float(n) for n in re.findall(r"compute buffer size =\s*([\d.]+)", text)],
    }
