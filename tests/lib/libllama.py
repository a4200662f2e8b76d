"""Logits and token ids from libllama.so of llama.cpp b11434 or of ik_llama.cpp, each in a process of its own.

    python tests/lib/libllama.py MODEL TOKENS.npy OUT.npy --lib DIR --batch 64
    python tests/lib/libllama.py MODEL TOKENS.npy OUT.npy --lib DIR --embeddings 0
    python tests/lib/libllama.py MODEL TEXT.txt OUT.npy --lib DIR --ik --tokenize
    python tests/lib/libllama.py MODEL --lib DIR --load [--target TARGET]
    python tests/lib/libllama.py KEYS.gguf - OUT.npy --lib DIR --tensors

TOKENS has raw token ids, [n] or [sequences, n]; OUT gets float32 logits, [n, n_vocab] or [sequences, n, n_vocab], one
row after each token. Every sequence begins at position 0 with an empty cache. With --embeddings (llama.cpp only)
TOKENS is one sequence and OUT gets the encoder's rows [n, n_embd], or those of a pooling type [1, n]; -1: the file's.
With --tokenize OUT gets int32 ids.
--load loads the model and creates a context, without computing anything; of a draft, beside a context of its target
(llama.cpp only), as llama-server does. With --tensors KEYS is a GGUF file without
tensors, and OUT gets name and ne of every tensor that llama.cpp's loader reads for these keys, including all optional
ones. Everything runs on the CPU, by default without flash attention and with an f32 cache; ik_llama.cpp, which has none
(it refuses f32 values without flash attention, and f32 keys and values with it), uses an f16 cache.

The two libraries export the same names with different structs, so they must never be loaded in one process: tests use
``Libllama``, which starts this file once for each library; it loads the library and forks for every call, so that calls
do not share state. A model that the library refuses, or crashes on, is a ``LibllamaError`` with the printed output.

The structs of llama.cpp are those of include/llama.h at b11434. Those of ik_llama.cpp come with the wheel
ik-llama-cpp-python, whose library is older than the available headers; any other library is one of 8337e4cd3, whose
structs have more fields. All are checked against the library's defaults.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from peer_cache import answer, array_answer, peer

#: Ids of ggml's types, the same in both projects.
KV_TYPES = {"f32": 0, "f16": 1}
REFUSED = 3

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class LibllamaError(Exception):
    """A failed call of a library; ``log`` is its printed output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log[-2000:]}")
        self.log = log


@dataclass(frozen=True)
class Libllama:
    """The libllama.so in the folder ``lib``, of ik_llama.cpp if ``ik``; every call is a process."""

    lib: Path
    ik: bool = False
    threads: int = 1
    timeout: int = 300

    def logits(
        self,
        model: Path,
        tokens: npt.ArrayLike,
        *,
        batch: int = 512,
        flash_attn: bool = False,
        kv: str | None = None,
    ) -> Logits:
        """Return float32 logits [..., n_vocab] after each of the token ids, [n] or [sequences, n].

        ``batch`` tokens are computed at once (n_batch and n_ubatch); ``kv`` is the type of the cache, f32 or f16, by
        default the library's most exact one. Raises LibllamaError.
        """
        options = ["--batch", str(batch), "--flash-attn", str(int(flash_attn)), *(["--kv", kv] if kv else [])]
        with tempfile.TemporaryDirectory() as folder:
            np.save(ids := Path(folder, "tokens.npy"), np.asarray(tokens, np.int32))
            return self._run(model, ids, options)

    def embeddings(self, model: Path, tokens: npt.ArrayLike, pooling: int = 0, *, batch: int = 512) -> Logits:
        """Return float32 [n, n_embd], an encoder's row for each token; with a pooling type [1, n], -1 the file's."""
        options = ["--batch", str(batch), "--embeddings", str(pooling)]
        with tempfile.TemporaryDirectory() as folder:
            np.save(ids := Path(folder, "tokens.npy"), np.asarray(tokens, np.int32))
            return self._run(model, ids, options)

    def tokenize(self, model: Path, text: Path) -> Ids:
        """Return the int32 ids of a text file by the model's own tokenizer, with BOS if the model adds it."""
        return self._run(model, text, ["--tokenize"])

    def load(self, model: Path, header: bytes | None = None, target: Path | None = None) -> Loading:
        """Return whether the model loads, of a draft beside its ``target``, and the library's output if not.

        ``header`` is the file up to its weights, which may be holes: the result depends only on it and on the file's
        size. Without it the result depends on the whole file. Raises LibllamaError if the process takes too long or is
        killed from outside.
        """
        about = (model,) if header is None else (header, model.stat().st_size)
        about = (*about, *([target] if target else []))
        question = (peer(self.lib), Path(__file__), self.ik, "load", *about)
        return Loading(**json.loads(answer(lambda: self._load(model, target), *question)))

    def _load(self, model: Path, target: Path | None) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            arguments = [str(model), "--load", "--batch", "64", *(["--target", str(target)] if target else [])]
            status = _server(self.lib.resolve(), self.ik).run(arguments, log, self.timeout)
            text = log.read_text(errors="replace")
        if -status in (signal.SIGALRM, signal.SIGKILL):
            raise LibllamaError(f"{self.lib}/libllama.so: {model} ended with {status}", text)
        loads = LOADED in text
        complaint = "" if status == 0 else _complaint(text.partition(LOADED)[2] if loads else text, status)
        return json.dumps({"loads": loads, "runs": status == 0, "complaint": complaint}).encode()

    def tensors(self, keys: Path) -> dict[str, tuple[int, ...]]:
        """Return ne of every tensor, including optional ones, that the loader reads for a file's keys (llama.cpp
        only)."""
        rows = self._run(keys, keys, ["--tensors"])
        return {str(row["name"]): tuple(int(n) for n in row["ne"][: row["n_dims"]]) for row in rows}

    def _run(self, model: Path, inputs: Path, options: Sequence[str]) -> npt.NDArray[Any]:
        question = (peer(self.lib), Path(__file__), self.ik, self.threads, list(options), model, inputs)
        return array_answer(lambda: self._compute(model, inputs, options), *question)

    def _compute(self, model: Path, inputs: Path, options: Sequence[str]) -> npt.NDArray[Any]:
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "out.npy"), Path(folder, "log")
            arguments = [str(model), str(inputs), str(out), "--threads", str(self.threads), *options]
            status = _server(self.lib.resolve(), self.ik).run(arguments, log, self.timeout)
            if status != 0:
                text = log.read_text(errors="replace")
                raise LibllamaError(f"{self.lib}/libllama.so: {model} ended with {status}", text)
            result: npt.NDArray[Any] = np.load(out)
            return result


@dataclass(frozen=True)
class Loading:
    """The outcome of loading a model; ``runs``: a context was also created."""

    loads: bool
    runs: bool
    #: The library's message, if it did not load and run.
    complaint: str


#: The line between the output of loading a model and that of creating a context.
LOADED = "== the model is loaded ==\n"
#: Patterns of a log's lines with the reason: of exceptions, assertions and logged errors.
_WHY = re.compile(r"[Ee]rror|GGML_ASSERT|terminate called|what\(\):|failed to")
#: Generic lines that follow a reason.
_ADDED = re.compile(r"failed to (load model|create context|initialize the context)|^error loading model")


def _complaint(log: str, status: int) -> str:
    """Return the lines of a log with the reason for an exit status, by default its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    why = [line for line in lines if _WHY.search(line) and not _ADDED.search(line)] or lines[-1:]
    signalled = f"{signal.Signals(-status).name}: " if status < 0 else ""
    return signalled + " | ".join(why)[:1000]


class Server:
    """A process that loads a library and forks for every call; ``program``: the file that does so."""

    def __init__(self, lib: Path, ik: bool = False, program: Path = Path(__file__)) -> None:
        command = [sys.executable, str(program), "--serve", "--lib", str(lib), *(["--ik"] if ik else [])]
        # An aborting library would start gdb on itself; ik_llama.cpp's does unless gdb is not found.
        environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PATH": "/nonexistent"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        atexit.register(self.process.communicate)

    def run(self, arguments: Sequence[str], log: Path, timeout: int) -> int:
        """Return the exit status of a call, its output in ``log``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([list(arguments), str(log), timeout]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline() or sys.exit("the process with the library has ended"))


@cache
def _server(lib: Path, ik: bool) -> Server:
    return Server(lib, ik)


def nmse(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the mean square of the error over the mean square of the expected values."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    return float(np.square(a - b).sum() / np.square(b).sum())


def perplexity(logits: Logits, tokens: Ids) -> float:
    """Return the perplexity of the second half of each sequence, as llama-perplexity scores its chunks.

    ``logits`` [sequences, n, n_vocab], ``tokens`` [sequences, n].
    """
    first = tokens.shape[-1] // 2
    x = logits[..., first:-1, :].astype(np.float64)
    top = x.max(-1, keepdims=True)
    log_sum = top[..., 0] + np.log(np.exp(x - top).sum(-1))
    scores = np.take_along_axis(x, tokens[..., first + 1 :, None], -1)[..., 0]
    return float(np.exp(np.mean(log_sum - scores)))


# ---------------------------------------------------------------- the child's side


class ModelParams(Structure):
    """llama_model_params of llama.cpp b11434."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(Structure):
    """llama_context_params of llama.cpp b11434."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class Batch(Structure):
    """llama_batch of llama.cpp b11434."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


#: The libraries' defaults of the fields that are set here, to check the structs.
MODEL_DEFAULTS = {"split_mode": 1, "main_gpu": 0, "vocab_only": False, "check_tensors": False}
CONTEXT_DEFAULTS = {
    **{"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4, "n_threads_batch": 4},
    **{"rope_scaling_type": -1, "yarn_ext_factor": -1, "defrag_thold": -1, "type_k": 1, "type_v": 1},
    **{"embeddings": False, "offload_kqv": True},
}


class Mainline:
    """llama.cpp b11434: opens a model and clears a cache."""

    ModelParams, ContextParams, Batch = ModelParams, ContextParams, Batch
    best_kv = "f32"
    own_defaults: dict[str, Any] = {"flash_attn_type": -1, "op_offload": True, "swa_full": True, "n_samplers": 0}
    own_model_defaults: dict[str, Any] = {
        "n_gpu_layers": -1,
        "load_mode": -1,
        "use_extra_bufts": True,
        "load_mtp": False,
    }

    def __init__(self, lib: Path) -> None:
        self.lib, self.c = lib, ctypes.CDLL(str(lib / "libllama.so"))

    def settings(self, flash_attn: bool) -> dict[str, Any]:
        """Return the context's settings that only this project has."""
        return {"flash_attn_type": int(flash_attn), "op_offload": False, "n_outputs_max_per_seq": 0}

    def clear(self, context: int) -> None:
        self.c.llama_get_memory.restype, self.c.llama_get_memory.argtypes = c_void_p, [c_void_p]
        self.c.llama_memory_clear.argtypes = [c_void_p, c_bool]
        self.c.llama_memory_clear(self.c.llama_get_memory(context), True)

    def tokenizer(self, model: int, vocab: int) -> int:
        """Return the first argument of llama_tokenize."""
        return vocab


#: Fields of ik_llama.cpp 8337e4cd3 that the older wheel lacks, by the field before them.
NEWER_MODEL_FIELDS: dict[str, list[tuple[str, Any]]] = {
    "type_v": [("idx_type_k", c_int)],
    "n_v_last": [("extra_output_type", c_int)],
    "tensor_split": [("fit_margin_array", c_void_p)],
    "flash_attn": [("defer_experts", c_bool), ("swa_compress", c_bool)],
}
NEWER_CONTEXT_FIELDS: dict[str, list[tuple[str, Any]]] = {
    "type_v": [("idx_type_k", c_int)],
    "type_reduce": [("type_graph_attn", c_int)],
    "graph_reuse": [("dsa", c_bool), ("fused_idx_topk", c_bool), ("swa_compress", c_bool), ("dsa_top_k", c_int)],
    "only_active_experts": [("prefetch_experts", c_bool), ("prefetch_experts_threads", c_int)],
}


def with_fields(old: Any, extra: dict[str, list[tuple[str, Any]]]) -> type[Structure]:
    """Return a struct with additional fields, each list after a field of the old one."""
    fields = [(name, kind) for field in old._fields_ for name, kind in (field, *extra.get(field[0], ()))]
    return type(old.__name__, (Structure,), {"_fields_": fields})


class Ik:
    """ik_llama.cpp, with the structs of its wheel, or those of 8337e4cd3."""

    best_kv = "f16"
    own_defaults: dict[str, Any] = {"flash_attn": True, "mla_attn": 3, "fused_moe_up_gate": True, "graph_reuse": True}
    own_model_defaults: dict[str, Any] = {"n_ubatch": 512, "use_mmap": True, "flash_attn": True}

    def __init__(self, lib: Path) -> None:
        os.environ["IK_LLAMA_CPP_LIB_PATH"] = str(lib / "libllama.so")
        bindings = importlib.import_module("ik_llama_cpp._ctypes_api")
        self.ModelParams, self.ContextParams = bindings.llama_model_params, bindings.llama_context_params
        if not Path(str(bindings.__file__)).resolve().is_relative_to(lib.parent):
            self.ModelParams = with_fields(self.ModelParams, NEWER_MODEL_FIELDS)
            self.ContextParams = with_fields(self.ContextParams, NEWER_CONTEXT_FIELDS)
        self.Batch, self.c = bindings.llama_batch, ctypes.CDLL(str(lib / "libllama.so"))

    def settings(self, flash_attn: bool) -> dict[str, Any]:
        return {"flash_attn": flash_attn}

    def clear(self, context: int) -> None:
        self.c.llama_kv_cache_clear.argtypes = [c_void_p]
        self.c.llama_kv_cache_clear(context)

    def tokenizer(self, model: int, vocab: int) -> int:
        return model


def defaults(function: Any, kind: type[Structure], values: dict[str, Any]) -> Any:
    """Call llama_*_default_params; end the process if the struct is not the library's."""
    function.restype, function.argtypes = kind, []
    params = function()
    wrong = {name: getattr(params, name) for name, value in values.items() if getattr(params, name) != value}
    if wrong:
        sys.exit(f"{kind.__name__} does not match this library: its defaults are {wrong}")
    return params


def open_model(api: Mainline | Ik, path: Path, vocab_only: bool = False, **fields: Any) -> int:
    """Return a model; ``fields``: fields of its parameters."""
    api.c.llama_backend_init()
    params = defaults(api.c.llama_model_default_params, api.ModelParams, MODEL_DEFAULTS | api.own_model_defaults)
    for name, value in {"n_gpu_layers": 0, "vocab_only": vocab_only, **fields}.items():
        setattr(params, name, value)
    load = api.c.llama_model_load_from_file
    load.restype, load.argtypes = c_void_p, [c_char_p, api.ModelParams]
    model = load(os.fsencode(path), params)
    if not model:
        print(f"{path}: the model was refused", file=sys.stderr)
        sys.exit(REFUSED)
    return int(model)


def open_context(api: Mainline | Ik, model: int, n: int, options: argparse.Namespace, **fields: Any) -> int:
    """Return a context for sequences of n tokens; ``fields``: fields of its parameters.

    Its size is rounded up to 256, as the libraries do.
    """
    params = defaults(api.c.llama_context_default_params, api.ContextParams, CONTEXT_DEFAULTS | api.own_defaults)
    kv = KV_TYPES[options.kv or api.best_kv]
    settings = {
        **{"n_ctx": -(-n // 256) * 256, "n_batch": options.batch, "n_ubatch": options.batch, "n_seq_max": 1},
        **{"n_threads": options.threads, "n_threads_batch": options.threads, "offload_kqv": False},
        **{"type_k": kv, "type_v": kv},
    }
    for name, value in (settings | api.settings(bool(options.flash_attn)) | fields).items():
        setattr(params, name, value)
    create = api.c.llama_init_from_model
    create.restype, create.argtypes = c_void_p, [c_void_p, api.ContextParams]
    context = create(model, params)
    if not context:
        sys.exit("the context was refused")
    return int(context)


class Tensor(Structure):
    """The beginning of ggml_tensor."""

    _fields_ = [("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4)]


class InitParams(Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


#: name, ne and number of dimensions of a tensor.
TENSOR = np.dtype([("name", "U64"), ("ne", np.int64, 4), ("n_dims", np.int64)])


def tensors_of(api: Mainline, lib: Path, keys: Path) -> npt.NDArray[Any]:
    """Return the tensors of the model that llama.cpp builds from keys; exits if it builds none."""
    ggml = ctypes.CDLL(str(lib / "libggml-base.so"))
    ggml.gguf_init_from_file.restype, ggml.gguf_init_from_file.argtypes = c_void_p, [c_char_p, InitParams]
    ggml.ggml_get_name.restype, ggml.ggml_get_name.argtypes = c_char_p, [c_void_p]
    ggml.ggml_n_dims.argtypes = [c_void_p]
    rows: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def enter(tensor: int, _: Any) -> None:
        name = ggml.ggml_get_name(tensor).decode()
        rows[name] = (name, tuple(Tensor.from_address(tensor).ne), ggml.ggml_n_dims(tensor))

    callback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
    create = api.c.llama_model_init_from_user
    create.restype, create.argtypes = c_void_p, [c_void_p, callback, c_void_p, api.ModelParams]
    api.c.llama_backend_init()
    params = defaults(api.c.llama_model_default_params, api.ModelParams, MODEL_DEFAULTS | api.own_model_defaults)
    params.n_gpu_layers = 0
    if not create(ggml.gguf_init_from_file(os.fsencode(keys), InitParams(True, None)), callback(enter), None, params):
        print(f"{keys}: the keys were refused", file=sys.stderr)
        sys.exit(REFUSED)
    return np.array(list(rows.values()), TENSOR)


def batch_of(api: Mainline | Ik, tokens: Ids, start: int, outputs: Sequence[int]) -> Any:
    """Return a llama_batch of tokens from position ``start`` on; outputs: 1 for each token that needs logits."""
    n, sequence = len(tokens), c_int32(0)
    batch = api.Batch(n)
    batch.token = (c_int32 * n)(*tokens.tolist())
    batch.pos = (c_int32 * n)(*range(start, start + n))
    batch.n_seq_id = (c_int32 * n)(*[1] * n)
    batch.seq_id = (POINTER(c_int32) * n)(*[ctypes.pointer(sequence)] * n)
    batch.logits = (c_int8 * n)(*outputs)
    return batch


def decode_batch(api: Mainline | Ik, context: int, batch: Any) -> None:
    """Compute a batch; exits if the library cannot."""
    api.c.llama_decode.argtypes = [c_void_p, api.Batch]
    status = api.c.llama_decode(context, batch)
    if status != 0:
        sys.exit(f"llama_decode ended with {status} at position {batch.pos[0]}")


def decode(api: Mainline | Ik, context: int, tokens: Ids, start: int, n_vocab: int) -> Logits:
    """Return the logits [n, n_vocab] after each token of one batch; the first has the position ``start``."""
    n = len(tokens)
    decode_batch(api, context, batch_of(api, tokens, start, [1] * n))
    api.c.llama_get_logits.restype, api.c.llama_get_logits.argtypes = POINTER(c_float), [c_void_p]
    return np.ctypeslib.as_array(api.c.llama_get_logits(context), (n, n_vocab)).copy()


def compute(api: Mainline | Ik, model: int, n_vocab: int, options: argparse.Namespace) -> Logits:
    tokens = np.load(options.tokens).astype(np.int32)
    if tokens.ndim not in (1, 2) or tokens.size == 0 or tokens.min() < 0 or tokens.max() >= n_vocab:
        sys.exit(f"{options.tokens}: expected ids below {n_vocab} in one or two dimensions, got {tokens.shape}")
    n = tokens.shape[-1]
    context = open_context(api, model, n, options)
    out = np.empty((tokens.size // n, n, n_vocab), np.float32)
    for sequence, row_out in zip(tokens.reshape(-1, n), out, strict=True):
        api.clear(context)
        for start in range(0, n, options.batch):
            row_out[start : start + options.batch] = decode(
                api, context, sequence[start : start + options.batch], start, n_vocab
            )
    return out.reshape(*tokens.shape, n_vocab)


def embeddings(api: Mainline, model: int, options: argparse.Namespace) -> Logits:
    """Return the rows of one sequence's tokens, or the row that they are pooled to."""
    tokens, pooling = np.load(options.tokens).astype(np.int32), options.embeddings
    context = open_context(api, model, len(tokens), options, embeddings=True, pooling_type=pooling)
    for name, kind, arguments in (
        ("llama_pooling_type", c_int, [c_void_p]),
        ("llama_model_n_embd", c_int32, [c_void_p]),
        ("llama_model_n_cls_out", c_uint32, [c_void_p]),
        ("llama_get_embeddings", POINTER(c_float), [c_void_p]),
        ("llama_get_embeddings_seq", POINTER(c_float), [c_void_p, c_int32]),
        ("llama_model_has_encoder", c_bool, [c_void_p]),
        ("llama_encode", c_int32, [c_void_p, api.Batch]),
    ):
        getattr(api.c, name).restype, getattr(api.c, name).argtypes = kind, arguments
    batch = batch_of(api, tokens, 0, [1] * len(tokens))
    if not api.c.llama_model_has_encoder(model):
        decode_batch(api, context, batch)
    elif (status := api.c.llama_encode(context, batch)) != 0:
        sys.exit(f"llama_encode ended with {status}")
    width, kind = api.c.llama_model_n_embd(model), api.c.llama_pooling_type(context)
    if kind == 0:
        return np.ctypeslib.as_array(api.c.llama_get_embeddings(context), (len(tokens), width)).copy()
    width = api.c.llama_model_n_cls_out(model) if kind == RANK else width
    return np.ctypeslib.as_array(api.c.llama_get_embeddings_seq(context, 0), (1, width)).copy()


#: LLAMA_POOLING_TYPE_RANK
RANK = 4


def tokenize(api: Mainline | Ik, model: int, vocab: int, text: bytes) -> Ids:
    call = api.c.llama_tokenize
    call.argtypes = [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]
    ids = (c_int32 * (len(text) + 2))()
    n = call(api.tokenizer(model, vocab), text, len(text), ids, len(ids), True, False)
    if n < 0:
        sys.exit(f"llama_tokenize ended with {n}")
    return np.array(ids[:n], np.int32)


def serve(execute: Callable[[Sequence[str]], None]) -> None:
    """Execute calls, one line of JSON each, in forks; print their exit status."""
    for line in sys.stdin:
        arguments, log, timeout = json.loads(line)
        if (child := os.fork()) == 0:
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
            os.dup2(1, 2)
            signal.alarm(timeout)
            os._exit(_status(execute, arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _status(execute: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Return the exit status of the call as a process."""
    try:
        execute(arguments)
    except SystemExit as e:
        print(e.code, file=sys.stderr, flush=True)
        return e.code if isinstance(e.code, int) else 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, nargs="?", help="token ids (.npy), or a text with --tokenize")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--batch", type=int, default=512, metavar="N", help="tokens computed at once (default: 512)")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--flash-attn", type=int, choices=(0, 1), default=0)
    parser.add_argument("--kv", choices=KV_TYPES, help="type of the cache (default: f32; ik_llama.cpp: f16)")
    parser.add_argument("--embeddings", type=int, metavar="POOLING", help="write an encoder's rows of one sequence")
    parser.add_argument("--tokenize", action="store_true", help="write the ids of a text instead")
    parser.add_argument("--load", action="store_true", help="load the model and create a context, without output")
    parser.add_argument("--target", type=Path, metavar="FILE", help="the model that a draft with --load guesses for")
    parser.add_argument("--tensors", action="store_true", help="write the tensors of a model with these keys instead")
    return parser


def execute(api: Mainline | Ik, options: argparse.Namespace) -> None:
    """Compute the requested result, and write it."""
    if options.tensors:
        assert isinstance(api, Mainline)
        write(options.out, tensors_of(api, api.lib, options.model))
        return
    target_context = open_context(api, open_model(api, options.target), 64, options) if options.target else None
    model = open_model(api, options.model, options.tokenize)
    if options.load:
        print(LOADED, file=sys.stderr, end="", flush=True)
        open_context(api, model, 64, options, **({"ctx_other": target_context} if target_context else {}))
        return
    for name, kind in (("llama_model_get_vocab", c_void_p), ("llama_vocab_n_tokens", c_int32)):
        getattr(api.c, name).restype, getattr(api.c, name).argtypes = kind, [c_void_p]
    vocab = api.c.llama_model_get_vocab(model)
    if options.tokenize:
        result: npt.NDArray[Any] = tokenize(api, model, vocab, options.tokens.read_bytes())
    elif options.embeddings is not None:
        assert isinstance(api, Mainline)
        result = embeddings(api, model, options)
    else:
        result = compute(api, model, api.c.llama_vocab_n_tokens(vocab), options)
    write(options.out, result)


def write(path: Path, result: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, result)


def main() -> None:
    library = argparse.ArgumentParser(add_help=False)
    library.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libllama.so")
    library.add_argument("--ik", action="store_true", help="the library is ik_llama.cpp's")
    library.add_argument("--serve", action="store_true", help="execute calls from stdin, for Libllama")
    options, arguments = library.parse_known_args()
    call = None if options.serve else parser().parse_args(arguments)
    api = Ik(options.lib.resolve()) if options.ik else Mainline(options.lib.resolve())
    if call is None:
        serve(lambda words: execute(api, parser().parse_args(words)))
    else:
        execute(api, call)


if __name__ == "__main__":
    main()
