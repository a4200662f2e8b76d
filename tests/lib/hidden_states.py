"""Whether libllama.so of llama.cpp b11434 reads the hidden states of a model, which drafts need of their target.

    python tests/lib/hidden_states.py MODEL LAYER --lib DIR

computes four tokens with the input of layer LAYER as an output; the number of layers is the output of the last. The
library aborts where its graph of the architecture has none. ``reads_hidden_states`` runs this in a fork of one process.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from peer_cache import answer, peer

import libllama
from libllama import Mainline, Server, batch_of, decode_batch, open_context, open_model

#: llama_set_embeddings_layer_inp(llama_context *, uint32_t, bool), which is C++.
_SET = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"


def reads_hidden_states(lib: Path, model: Path, layer: int) -> bool:
    """Return whether the library in the folder ``lib`` computes a model with the input of a layer as an output."""
    return bool(
        answer(lambda: _reads(lib, model, layer), peer(lib), Path(__file__), Path(libllama.__file__), model, layer)
    )


def _reads(lib: Path, model: Path, layer: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        status = _server(lib.resolve()).run([str(model), str(layer)], Path(folder, "log"), 60)
    return b"yes" if status == 0 else b""


@cache
def _server(lib: Path) -> Server:
    return Server(lib, program=Path(__file__))


def execute(api: Mainline, words: Sequence[str]) -> None:
    """Compute a batch of four tokens."""
    options = libllama.parser().parse_args([words[0], "--batch", "64"])
    context = open_context(api, open_model(api, options.model), 64, options)
    set_layer = getattr(api.c, _SET)
    set_layer.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
    set_layer(context, int(words[1]), True)
    decode_batch(api, context, batch_of(api, np.arange(1, 5, dtype=np.int32), 0, [0, 0, 0, 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="MODEL LAYER")
    parser.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libllama.so")
    parser.add_argument("--serve", action="store_true", help="execute calls from stdin")
    options = parser.parse_args()
    api = Mainline(options.lib.resolve())
    if options.serve:
        libllama.serve(lambda words: execute(api, words))
    else:
        execute(api, options.words)


if __name__ == "__main__":
    main()
