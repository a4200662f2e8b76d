"""llama-bench's two tests with ik_llama.cpp's library, from the wheel ik-llama-cpp-python, which has no llama-bench.

    benchmarks/ik_bench.py -m MODEL.gguf -p 512 -n 64 --set repack_tensors=1

A prompt of -p tokens in one batch, logits of the last one only, then -n tokens one by one; before each an untimed run
and an empty cache. Tokens are random. Prints llama-bench's JSON, as far as it is used. Flash attention is on; all else
are the library's defaults (experts are fused). --set changes any field of its parameters of the model or the context.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from processes import package_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from libllama import Ik, batch_of, decode_batch, open_context, open_model  # noqa: E402


def settings_of(api: Ik, given: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return NAME=NUMBER settings as fields of the model's and of the context's parameters; exits for unknown ones."""
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for text in given:
        name, _, value = text.partition("=")
        at = [i for i, kind in enumerate((api.ModelParams, api.ContextParams)) if hasattr(kind, name)]
        if not at:
            sys.exit(f"--set {text}: ik_llama.cpp has no such parameter")
        for i in at:
            found[i][name] = int(value)
    return found


def timed(api: Ik, context: int, batches: Sequence[Any]) -> float:
    """Return the seconds that the batches take one after the other, from an empty cache."""
    api.clear(context)
    began = time.perf_counter()
    for batch in batches:
        decode_batch(api, context, batch)
        api.c.llama_synchronize(context)
    return time.perf_counter() - began


def tests(api: Ik, context: int, n_vocab: int, n_prompt: int, n_gen: int) -> list[dict[str, Any]]:
    """Run both tests and return their rows."""
    tokens = np.random.default_rng(1).integers(0, n_vocab, max(n_prompt, n_gen)).astype(np.int32)
    rows = []
    if n_prompt:
        prompt = [batch_of(api, tokens[:n_prompt], 0, [0] * (n_prompt - 1) + [1])]
        timed(api, context, prompt)
        rows.append({"n_prompt": n_prompt, "n_gen": 0, "avg_ts": n_prompt / timed(api, context, prompt)})
    if n_gen:
        single = [batch_of(api, tokens[i : i + 1], i, [1]) for i in range(n_gen)]
        timed(api, context, single[:1])
        rows.append({"n_prompt": 0, "n_gen": n_gen, "avg_ts": n_gen / timed(api, context, single)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N")
    parser.add_argument("-n", "--n-gen", type=int, default=64, metavar="N")
    parser.add_argument("-t", "--threads", type=int, default=2, metavar="N")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="such as use_mmap=0")
    options = parser.parse_args()
    folder = package_folder("ik_llama_cpp")
    if folder is None:
        sys.exit("the wheel ik-llama-cpp-python is not installed")
    api = Ik(folder / "lib")
    of_model, of_context = settings_of(api, options.set)
    model = open_model(api, options.model, **of_model)
    options.flash_attn, options.kv, options.batch = 1, "f16", max(options.n_prompt, 1)
    context = open_context(api, model, max(options.n_prompt, options.n_gen), options, **of_context)
    for name, result in (("llama_model_get_vocab", c_void_p), ("llama_vocab_n_tokens", c_int32)):
        getattr(api.c, name).restype, getattr(api.c, name).argtypes = result, [c_void_p]
    api.c.llama_synchronize.argtypes = [c_void_p]
    n_vocab = api.c.llama_vocab_n_tokens(api.c.llama_model_get_vocab(model))
    print(json.dumps(tests(api, context, n_vocab, options.n_prompt, options.n_gen)))


if __name__ == "__main__":
    main()
