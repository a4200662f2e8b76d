"""Load a model in one engine and run tests on request, so that engines can alternate quickly.

    benchmarks/engine_worker.py quantkit -m MODEL.gguf --set mmap=0
    benchmarks/engine_worker.py llama.cpp -m MODEL.gguf --set use_extra_bufts=0
    benchmarks/engine_worker.py ik_llama.cpp -m MODEL.gguf --set repack_tensors=1 use_mmap=0

Prints "ready", then for each line "pp N" or "tg N" of stdin the seconds of a prompt of N tokens in one batch, with
logits of the last one, or of N tokens one by one, each from an empty cache. Tokens are random, because choosing experts
is part of the work. For "read N", quantkit prints the seconds for reading the bytes of N tokens at the currently
measured bandwidth. Peers run through their libraries, with flash attention and otherwise their defaults; --set changes
any field of their model or context parameters, and merge_up_gate and mmap of quantkit's ``load``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from processes import llama_bin, package_folder

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/lib")]

from libllama import Ik, Mainline, batch_of, decode_batch, open_context, open_model  # noqa: E402

I32 = npt.NDArray[np.int32]


class Engine(Protocol):
    """A loaded model with an empty sequence."""

    n_vocab: int

    def prepare(self, batches: Sequence[I32]) -> Callable[[], None]:
        """Return a function that computes batches of tokens, one after another, from an empty cache."""


class Quantkit:
    """quantkit's engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        from quantkit.model.engine import load

        names = ("merge_up_gate", "mmap")
        options_of_load: dict[str, Any] = {name: bool(value) for name, value in options.set.items()}
        if unknown := [name for name in options_of_load if name not in names]:
            sys.exit(f"--set {unknown[0]}: quantkit takes {' and '.join(names)}")
        self.model = load(options.model, threads=options.threads, **options_of_load)
        self.session = self.model.session(options.n_ctx)
        self.n_vocab = self.model.n_vocab

    def prepare(self, batches: Sequence[I32]) -> Callable[[], None]:
        masks = [np.arange(len(batch)) == len(batch) - 1 for batch in batches]

        def compute() -> None:
            self.session.clear()
            for batch, outputs in zip(batches, masks, strict=True):
                self.session.decode(batch, outputs=outputs)

        return compute

    def reading(self, n: int) -> float:
        """Return the seconds for reading the weights and caches of n single tokens at memory bandwidth."""
        from quantkit.kernels.cpu.core.peak import read_gb_s
        from quantkit.model.cost import token_cost

        return n * token_cost(self.model.graph, "f16", n // 2).bytes / read_gb_s(self.model.threads) / 1e9


class Library:
    """A peer's libllama."""

    def __init__(self, api: Mainline | Ik, options: argparse.Namespace) -> None:
        self.api = api
        of_model, of_context = settings_of(api, options.set)
        model = open_model(api, options.model, **of_model)
        options.flash_attn, options.kv, options.batch = 1, "f16", options.n_ctx
        self.context = open_context(api, model, options.n_ctx, options, **of_context)
        for name, result in (("llama_model_get_vocab", c_void_p), ("llama_vocab_n_tokens", c_int32)):
            getattr(api.c, name).restype, getattr(api.c, name).argtypes = result, [c_void_p]
        api.c.llama_synchronize.argtypes = [c_void_p]
        self.n_vocab = api.c.llama_vocab_n_tokens(api.c.llama_model_get_vocab(model))

    def prepare(self, batches: Sequence[I32]) -> Callable[[], None]:
        starts = np.cumsum([0, *map(len, batches)])
        llama_batches = [
            batch_of(self.api, batch, int(start), [0] * (len(batch) - 1) + [1])
            for batch, start in zip(batches, starts, strict=False)
        ]

        def compute() -> None:
            self.api.clear(self.context)
            for batch in llama_batches:
                decode_batch(self.api, self.context, batch)
                self.api.c.llama_synchronize(self.context)

        return compute


def settings_of(api: Mainline | Ik, values: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings as fields of the model and context parameters; exits for unknown ones."""
    settings: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in values.items():
        kinds = [i for i, kind in enumerate((api.ModelParams, api.ContextParams)) if hasattr(kind, name)]
        if not kinds:
            sys.exit(f"--set {name}: this library has no such parameter")
        for i in kinds:
            settings[i][name] = value
    return settings


def library_folder(engine: str) -> Path:
    """Return the folder of a peer's libllama.so; exits if it is not installed."""
    package = package_folder("ik_llama_cpp")
    folder = llama_bin() if engine == "llama.cpp" else package and package / "lib"
    return folder or sys.exit(f"{engine} not found: scripts/peers builds llama.cpp; ik_llama.cpp's comes in a wheel")


def load_engine(options: argparse.Namespace) -> Engine:
    """Load the model with the requested engine."""
    if options.engine == "quantkit":
        return Quantkit(options)
    api = (Mainline if options.engine == "llama.cpp" else Ik)(library_folder(options.engine))
    return Library(api, options)


def seconds(engine: Engine, test: str, n: int) -> float:
    """Return the seconds of a prompt of n tokens ("pp"), of n single ones ("tg"), or of reading their bytes
    ("read")."""
    if test == "read":
        assert isinstance(engine, Quantkit)
        return engine.reading(n)
    tokens = np.random.default_rng(1).integers(0, engine.n_vocab, n).astype(np.int32)
    compute = engine.prepare([tokens] if test == "pp" else np.split(tokens, n))
    began = time.perf_counter()
    compute()
    return time.perf_counter() - began


def setting(text: str) -> tuple[str, int]:
    """Parse NAME=NUMBER."""
    name, _, value = text.partition("=")
    return name, int(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("quantkit", "llama.cpp", "ik_llama.cpp"))
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-c", "--n-ctx", type=int, default=512, metavar="N", help="tokens of the longest test")
    parser.add_argument("-t", "--threads", type=int, default=2, metavar="N")
    parser.add_argument("--set", nargs="*", type=setting, default=[], metavar="NAME=NUMBER", help="such as mmap=0")
    options = parser.parse_args()
    options.set = dict(options.set)
    engine = load_engine(options)
    print("ready", flush=True)
    for line in sys.stdin:
        test, n = line.split()
        print(seconds(engine, test, int(n)), flush=True)


if __name__ == "__main__":
    main()
