"""Embeddings of images and sounds from libmtmd.so of llama.cpp b11434, each in a process of its own.

    python tests/lib/libmtmd.py MMPROJ TEXT OUT.npz --lib DIR
    python tests/lib/libmtmd.py MMPROJ - - --lib DIR

MMPROJ is an mmproj file, TEXT the text model that it belongs to. OUT gets float32 arrays [tokens, n] by the name of the
input, of what the file has towers for: ``image``, an image of random pixels, and ``audio``, a random sound; n is
llama_model_n_embd_inp of the text model. The second command only opens MMPROJ. ``Libmtmd`` starts this file once; it
loads the library and forks for every call, as libllama.py does. Files that the library refuses, or crashes on, are a
``LibllamaError`` with its output.

The structs are those of tools/mtmd/mtmd.h at b11434, checked against the library's defaults.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from peer_cache import answer, peer

import libllama
from libllama import REFUSED, LibllamaError, Mainline, Server, defaults, open_model

Embeddings = dict[str, npt.NDArray[np.float32]]

#: Width and height of an image in pixels, and samples of the sound.
IMAGE, SAMPLES = (40, 24), 16000


@dataclass(frozen=True)
class Libmtmd:
    """The libmtmd.so in the folder ``lib``; every call is a process."""

    lib: Path
    threads: int = 1
    timeout: int = 60

    def encode(self, mmproj: Path, text: Path, size: tuple[int, int] = IMAGE) -> Embeddings:
        """Return the embeddings [tokens, n] of the image and of the sound, of what ``mmproj`` has towers for.

        ``size``: width and height of the image in pixels. Raises LibllamaError.
        """
        question = (peer(self.lib), Path(__file__), Path(libllama.__file__), self.threads, mmproj, text, size)
        with np.load(io.BytesIO(answer(lambda: self._encode(mmproj, text, size), *question))) as arrays:
            return dict(arrays)

    def opens(self, mmproj: Path) -> bool:
        """Return whether the library opens a file, without a text model. Uncached."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = [str(mmproj), "-", "-"]
            return _server(self.lib.resolve()).run(arguments, Path(folder, "log"), self.timeout) == 0

    def _encode(self, mmproj: Path, text: Path, size: tuple[int, int]) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "out.npz"), Path(folder, "log")
            arguments = [str(mmproj), str(text), str(out), "--threads", str(self.threads), "--size", *map(str, size)]
            status = _server(self.lib.resolve()).run(arguments, log, self.timeout)
            if status != 0:
                output = log.read_text(errors="replace")
                raise LibllamaError(f"{self.lib}/libmtmd.so: {mmproj} ended with {status}", output)
            return out.read_bytes()


@cache
def _server(lib: Path) -> Server:
    return Server(lib, program=Path(__file__))


# ---------------------------------------------------------------- the child's side


class ContextParams(Structure):
    """mtmd_context_params of llama.cpp b11434."""

    _fields_ = [
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    ]


class InputText(Structure):
    """mtmd_input_text."""

    _fields_ = [("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool), ("parse_special", c_bool)]


MARKER = b"<__media__>"
#: The library's defaults, to check the struct.
DEFAULTS = {
    **{"use_gpu": True, "device": None, "print_timings": True, "n_threads": 4, "image_marker": None},
    **{"media_marker": MARKER, "flash_attn_type": -1, "warmup": True, "image_min_tokens": -1, "image_max_tokens": -1},
    **{"cb_eval": None, "cb_eval_user_data": None, "batch_max_tokens": 1024, "progress_callback": None},
}
#: Result and arguments of functions.
SIGNATURES = {
    "mtmd_init_from_file": (c_void_p, [c_char_p, c_void_p, ContextParams]),
    "mtmd_support_vision": (c_bool, [c_void_p]),
    "mtmd_support_audio": (c_bool, [c_void_p]),
    "mtmd_bitmap_init": (c_void_p, [c_uint32, c_uint32, c_void_p]),
    "mtmd_bitmap_init_from_audio": (c_void_p, [c_size_t, c_void_p]),
    "mtmd_input_chunks_init": (c_void_p, []),
    "mtmd_input_chunks_size": (c_size_t, [c_void_p]),
    "mtmd_input_chunks_get": (c_void_p, [c_void_p, c_size_t]),
    "mtmd_input_chunk_get_type": (c_int, [c_void_p]),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, [c_void_p]),
    "mtmd_tokenize": (c_int32, [c_void_p, c_void_p, POINTER(InputText), POINTER(c_void_p), c_size_t]),
    "mtmd_encode_chunk": (c_int32, [c_void_p, c_void_p]),
    "mtmd_get_output_embd": (POINTER(c_float), [c_void_p]),
}
#: Types of chunks (mtmd_input_chunk_type) with the names of inputs.
CHUNKS = {"image": 1, "audio": 2}


class Mtmd:
    """The library: its functions, and a context of an mmproj file with its text model."""

    def __init__(self, lib: Path) -> None:
        self.llama = Mainline(lib)
        self.c = ctypes.CDLL(str(lib / "libmtmd.so"))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments

    def open(self, mmproj: Path, text: Path | None, threads: int) -> None:
        """Open both files, or only the first; exits if the library refuses one."""
        model = None if text is None else open_model(self.llama, text)
        if model is not None:
            self.llama.c.llama_model_n_embd_inp.argtypes = [c_void_p]
            self.width = int(self.llama.c.llama_model_n_embd_inp(model))
        params = defaults(self.c.mtmd_context_params_default, ContextParams, DEFAULTS)
        for name, value in {"use_gpu": False, "n_threads": threads, "warmup": False, "flash_attn_type": 0}.items():
            setattr(params, name, value)
        self.context = self.c.mtmd_init_from_file(os.fsencode(mmproj), model, params)
        if not self.context:
            print(f"{mmproj}: the file was refused", file=sys.stderr)
            sys.exit(REFUSED)

    def bitmaps(self, size: tuple[int, int]) -> Iterator[tuple[str, int]]:
        """Yield name and bitmap of each input that the file has towers for; ``size``: width and height of the image."""
        random = np.random.default_rng(0)
        if self.c.mtmd_support_vision(self.context):
            width, height = size
            pixels = random.integers(0, 256, (height, width, 3), np.uint8)
            yield "image", self.c.mtmd_bitmap_init(width, height, pixels.ctypes.data)
        if self.c.mtmd_support_audio(self.context):
            sound = random.uniform(-1, 1, SAMPLES).astype(np.float32)
            yield "audio", self.c.mtmd_bitmap_init_from_audio(SAMPLES, sound.ctypes.data)

    def encode(self, kind: str, bitmap: int) -> npt.NDArray[np.float32]:
        """Return the embeddings [tokens, width] of an input, of all its chunks; exits if the library cannot."""
        chunks = self.c.mtmd_input_chunks_init()
        prompt = InputText(MARKER, len(MARKER), True, True)
        status = self.c.mtmd_tokenize(self.context, chunks, ctypes.byref(prompt), (c_void_p * 1)(bitmap), 1)
        if status != 0:
            sys.exit(f"mtmd_tokenize of {kind} ended with {status}")
        parts = []
        for i in range(self.c.mtmd_input_chunks_size(chunks)):
            chunk = self.c.mtmd_input_chunks_get(chunks, i)
            if self.c.mtmd_input_chunk_get_type(chunk) != CHUNKS[kind]:
                continue
            status = self.c.mtmd_encode_chunk(self.context, chunk)
            if status != 0:
                sys.exit(f"mtmd_encode_chunk of {kind} ended with {status}")
            shape = (self.c.mtmd_input_chunk_get_n_tokens(chunk), self.width)
            parts.append(np.ctypeslib.as_array(self.c.mtmd_get_output_embd(self.context), shape).copy())
        return np.concatenate(parts)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mmproj", type=Path)
    parser.add_argument("text", type=Path, help="the text model (GGUF)")
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--size", type=int, nargs=2, default=IMAGE, metavar=("WIDTH", "HEIGHT"))
    return parser


def execute(mtmd: Mtmd, options: argparse.Namespace) -> None:
    """Encode the inputs, and write their embeddings; without a text model, only open the file."""
    text = None if str(options.text) == "-" else options.text
    mtmd.open(options.mmproj, text, options.threads)
    if text is None:
        return
    embeddings = {kind: mtmd.encode(kind, bitmap) for kind, bitmap in mtmd.bitmaps(options.size)}
    with options.out.open("wb") as file:
        np.savez(file, **embeddings)


def main() -> None:
    library = argparse.ArgumentParser(add_help=False)
    library.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libmtmd.so")
    library.add_argument("--serve", action="store_true", help="execute calls from stdin, for Libmtmd")
    options, arguments = library.parse_known_args()
    mtmd = Mtmd(options.lib.resolve())
    if options.serve:
        libllama.serve(lambda words: execute(mtmd, parser().parse_args(words)))
    else:
        execute(mtmd, parser().parse_args(arguments))


if __name__ == "__main__":
    main()
