"""The memory that ik_llama.cpp allocates for a context, from its log.

    python tests/lib/ik_memory.py MODEL --lib DIR --fields '{"n_ctx": 4096}'

loads MODEL on the CPU and creates a context whose parameters have these fields, the others its defaults. Tests use
``ik_memory``, which starts this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from ctypes import c_char_p, c_void_p
from pathlib import Path

from peer_cache import answer, header, peer

from libllama import CONTEXT_DEFAULTS, MODEL_DEFAULTS, Ik, defaults

#: The fields of a model that the loader needs to know of the context.
SHARED = ("n_ubatch", "flash_attn", "type_k", "type_v")


def ik_memory(model: Path, lib: Path, **fields: int) -> dict[str, list[float]]:
    """Return MiB of weights, of keys and values, and of the compute buffer, each with two digits."""
    command = [sys.executable, str(Path(__file__)), str(model), "--lib", str(lib), "--fields", json.dumps(fields)]
    # An aborting library would start gdb on itself.
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PATH": "/nonexistent"}

    def run() -> bytes:
        output = subprocess.run(command, capture_output=True, env=environment, timeout=120)
        log = output.stdout + output.stderr
        assert b"compute buffer size" in log, log.decode(errors="replace")[-2000:]
        return log

    question = (peer(lib), Path(__file__), header(model), model.stat().st_size, fields)
    text = answer(run, *question).decode(errors="replace")
    return {
        kind: [float(n) for n in re.findall(rf"\w+ {name} size =\s*([\d.]+) MiB", text)]
        for kind, name in (("weights", "buffer"), ("cache", "KV buffer"), ("compute", "compute buffer"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--fields", type=json.loads, default={})
    options = parser.parse_args()
    api = Ik(options.lib.absolute())
    api.c.llama_backend_init()
    model_params = defaults(api.c.llama_model_default_params, api.ModelParams, MODEL_DEFAULTS | api.own_model_defaults)
    context_params = defaults(
        api.c.llama_context_default_params, api.ContextParams, CONTEXT_DEFAULTS | api.own_defaults
    )
    model_params.n_gpu_layers = 0
    for name, value in options.fields.items():
        setattr(context_params, name, value)
        if name in SHARED:
            setattr(model_params, name, value)
    for name in ("type_k", "type_v"):  # the first and the last layers have fields of their own
        for layers in ("first", "last"):
            setattr(context_params, f"{name}_{layers}", getattr(context_params, name))
    load, create = api.c.llama_model_load_from_file, api.c.llama_init_from_model
    load.restype, load.argtypes = c_void_p, [c_char_p, api.ModelParams]
    create.restype, create.argtypes = c_void_p, [c_void_p, api.ContextParams]
    model = load(os.fsencode(options.model), model_params)
    if not model or not create(model, context_params):
        sys.exit(f"{options.model}: refused")


if __name__ == "__main__":
    main()
