"""Ids from libllama.so's llama_tokenize (llama.cpp b11434), many texts and vocabularies in one process of its own.

    python tests/lib/llama_tokenize.py --lib DIR < REQUESTS.json > IDS.json

REQUESTS is a list of [MODEL.gguf, [[text as hex, add_special, parse_special], ...]]; IDS has a list of ids for each
text, and null for a model that the library refuses. Only vocabularies are loaded. "facts" instead of a list of texts
requests [bos, eos, add_bos, add_eos] and then every token's piece (hex) by llama_token_to_piece.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_void_p
from pathlib import Path
from typing import Any

from peer_cache import answer, peer

import libllama
from libllama import MODEL_DEFAULTS, Mainline, defaults

#: A text, add_special, parse_special.
Request = tuple[bytes, bool, bool]


def ask(lib: Path, requests: Sequence[tuple[Path, Sequence[Request] | str]], *, uncached: bool = False) -> list[Any]:
    """Return for each model the ids of its texts, or its facts, None if the library refuses it.

    ``uncached``: do not store the results, for texts that differ in every run.
    """
    plain = [
        [str(path), texts if isinstance(texts, str) else [[text.hex(), *flags] for text, *flags in texts]]
        for path, texts in requests
    ]
    if uncached:
        return json.loads(_run(lib, plain))  # type: ignore[no-any-return]
    inputs = [x if isinstance(x, str) else [(text, *flags) for text, *flags in x] for _, x in requests]
    question = (peer(lib), *(Path(path) for path in (__file__, libllama.__file__)), *(path for path, _ in requests))
    return json.loads(answer(lambda: _run(lib, plain), *question, inputs))  # type: ignore[no-any-return]


def _run(lib: Path, plain: list[Any]) -> bytes:
    command = [sys.executable, __file__, "--lib", str(lib)]
    process = subprocess.run(command, input=json.dumps(plain).encode(), capture_output=True, timeout=300, check=False)
    if process.returncode != 0:
        log = process.stderr.decode(errors="replace")
        raise RuntimeError(f"libllama.so ended with {process.returncode}: {log[-2000:]}")
    return process.stdout


class Vocabs:
    """The library, loading vocabularies."""

    def __init__(self, lib: Path) -> None:
        self.api = Mainline(lib)
        self.c = c = self.api.c
        c.llama_backend_init()
        c.llama_model_load_from_file.restype = c_void_p
        c.llama_model_load_from_file.argtypes = [c_char_p, self.api.ModelParams]
        c.llama_model_get_vocab.restype, c.llama_model_get_vocab.argtypes = c_void_p, [c_void_p]
        c.llama_model_free.argtypes = [c_void_p]
        c.llama_vocab_n_tokens.restype, c.llama_vocab_n_tokens.argtypes = c_int32, [c_void_p]
        c.llama_tokenize.argtypes = [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]
        for name in ("get_add_bos", "get_add_eos"):
            c[f"llama_vocab_{name}"].restype = c_bool
        c.llama_token_to_piece.argtypes = [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]

    def answer(self, path: str, questions: list[list[Any]] | str) -> list[Any] | None:
        model_defaults = MODEL_DEFAULTS | self.api.own_model_defaults
        params = defaults(self.c.llama_model_default_params, self.api.ModelParams, model_defaults)
        params.n_gpu_layers, params.vocab_only = 0, True
        model = self.c.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            return None
        vocab = self.c.llama_model_get_vocab(model)
        answers: list[Any]
        if isinstance(questions, str):
            names = ("bos", "eos", "get_add_bos", "get_add_eos")
            answers = [int(self.c[f"llama_vocab_{name}"](c_void_p(vocab))) for name in names]
            answers += [self.piece(vocab, i) for i in range(self.c.llama_vocab_n_tokens(vocab))]
        else:
            answers = [self.tokenize(vocab, bytes.fromhex(text), *flags) for text, *flags in questions]
        self.c.llama_model_free(model)
        return answers

    def tokenize(self, vocab: int, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        size = 4 * len(text) + 16  # a byte may become U+FFFD, three tokens
        ids = (c_int32 * size)()
        n = self.c.llama_tokenize(vocab, text, len(text), ids, size, add_special, parse_special)
        if n < 0:
            sys.exit(f"llama_tokenize ended with {n}")
        return list(ids[:n])

    def piece(self, vocab: int, token: int) -> str:
        buffer = ctypes.create_string_buffer(4096)
        n = self.c.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        if n < 0:
            sys.exit(f"llama_token_to_piece ended with {n}")
        return buffer.raw[:n].hex()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libllama.so")
    vocabs = Vocabs(parser.parse_args().lib.resolve())
    json.dump([vocabs.answer(path, questions) for path, questions in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
