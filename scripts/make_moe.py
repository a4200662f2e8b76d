"""Write a mixture of experts with random weights and the shapes of a real model, of any size.

    scripts/make_moe.py OUT.gguf --size 2G --imatrix OUT-imatrix.gguf

Architecture qwen3moe; by default a layer has the shapes of Qwen3-30B-A3B (623 M weights, 128 experts). Weights are
normal with a deviation of 0.02 times a lognormal factor per column, so that an importance matrix matters. Every chunk
of a tensor has its own generator, seeded by seed, tensor and chunk: the file depends only on the options, not on
threads, and memory is a few chunks for any file size.

The importance of a column is lognormal, too, with a token count per expert. Like llama-imatrix by default, the matrix
covers every matrix of the layers, not the embeddings and the output.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.cpus import available_cpus
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import Field, ValueType, layout_gguf, open_gguf
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.types import BY_NAME, TensorType
from quantkit.units import format_count, format_size, parse_size

#: Weights that a thread generates at once: 8 MiB of float32, which fit a cache.
CHUNK = 1 << 21

#: Option -> llama.cpp's general.file_type.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}

TOKENIZER = Path(__file__).resolve().parents[1] / "tests/data/tiny-moe-bf16.gguf"


@dataclass(frozen=True)
class Model:
    """The shapes of a model; names and defaults as in the options."""

    layers: int = 2
    experts: int = 128
    used: int = 8
    embd: int = 2048
    ff: int = 768
    heads: int = 32
    kv: int = 4
    head_dim: int = 128
    vocab: int = 4096

    def ends(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors outside the layers, shapes innermost first."""
        return {
            "token_embd.weight": (self.embd, self.vocab),
            "output_norm.weight": (self.embd,),
            "output.weight": (self.embd, self.vocab),
        }

    def layer(self, i: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of layer ``i``, shapes innermost first."""
        q, kv = self.heads * self.head_dim, self.kv * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.embd,),
            "attn_q": (self.embd, q),
            "attn_k": (self.embd, kv),
            "attn_v": (self.embd, kv),
            "attn_q_norm": (self.head_dim,),
            "attn_k_norm": (self.head_dim,),
            "attn_output": (q, self.embd),
            "ffn_norm": (self.embd,),
            "ffn_gate_inp": (self.embd, self.experts),
            "ffn_gate_exps": (self.embd, self.ff, self.experts),
            "ffn_up_exps": (self.embd, self.ff, self.experts),
            "ffn_down_exps": (self.ff, self.embd, self.experts),
        }
        return {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return all tensors in file order."""
        merged = self.ends()
        for i in range(self.layers):
            merged |= self.layer(i)
        return merged

    def layers_for(self, nbytes: int, matrix: TensorType) -> int:
        """Return the number of layers for a file of at least ``nbytes``."""

        def total(shapes: dict[str, tuple[int, ...]]) -> int:
            return sum(stored_as(name, shape, matrix).tensor_bytes(shape) for name, shape in shapes.items())

        return max(1, math.ceil((nbytes - total(self.ends())) / total(self.layer(0))))

    def fields(self, file_type: int) -> list[Field]:
        """Return the metadata that a runtime needs."""
        numbers = {
            "block_count": self.layers,
            "context_length": 32768,
            "embedding_length": self.embd,
            "feed_forward_length": 3 * self.embd,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "expert_feed_forward_length": self.ff,
            "vocab_size": self.vocab,
        }
        floats = {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6}
        return [
            Field.of("general.architecture", "qwen3moe"),
            Field.of("general.name", "random-moe"),
            Field.of("general.file_type", file_type),
            *(Field.of(f"qwen3moe.{key}", value, ValueType.UINT32) for key, value in numbers.items()),
            *(Field.of(f"qwen3moe.{key}", value, ValueType.FLOAT32) for key, value in floats.items()),
        ]


def dtype_of(type_name: str) -> Any:
    """Return the dtype of the matrices."""
    if type_name == "bf16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return {"f32": np.float32, "f16": np.float16}[type_name]


def stored_as(name: str, shape: Sequence[int], matrix: TensorType) -> TensorType:
    """Return the type of a tensor; norms and the router are F32, as in every converted model."""
    return BY_NAME["F32"] if len(shape) == 1 or ".ffn_gate_inp." in name else matrix


def generator(*key: int) -> np.random.Generator:
    """Return the generator of a key; equal keys give equal numbers."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


def tokenizer_fields(path: Path | None) -> list[Field]:
    """Return the tokenizer of another model, or the metadata of a model without one."""
    if path is None:
        return [Field.of("tokenizer.ggml.model", "no_vocab")]
    with open_gguf(path) as file:
        return [field for key, field in file.fields.items() if key.startswith("tokenizer.")]


def vocabulary(fields: Sequence[Field]) -> int:
    """Return the number of tokens of a tokenizer."""
    return next(field.count for field in fields if field.key == "tokenizer.ggml.tokens")


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor, and the offset of their bytes."""

    tensor: int
    number: int
    columns: int
    rows: int
    dtype: Any
    offset: int
    is_norm: bool


def chunks(model: Model, matrix: TensorType, dtype: Any, offsets: Sequence[int]) -> Iterator[Chunk]:
    """Cut all tensors into runs of rows of about CHUNK weights."""
    for index, ((name, shape), offset) in enumerate(zip(model.tensors().items(), offsets, strict=True)):
        kind = dtype if stored_as(name, shape, matrix) is matrix else np.float32
        columns, rows = shape[0], math.prod(shape[1:])
        step = max(1, CHUNK // columns)
        for number, start in enumerate(range(0, rows, step)):
            place = offset + start * columns * np.dtype(kind).itemsize
            yield Chunk(index, number, columns, min(step, rows - start), kind, place, len(shape) == 1)


def weights(chunk: Chunk, seed: int) -> npt.NDArray[Any]:
    """Return the weights of a chunk."""
    if chunk.is_norm:
        return np.ones((chunk.rows, chunk.columns), chunk.dtype)
    scale = 0.02 * np.exp(generator(seed, chunk.tensor).normal(0, 0.3, chunk.columns))
    x = generator(seed, chunk.tensor, 1 + chunk.number).standard_normal((chunk.rows, chunk.columns), np.float32)
    x *= scale.astype(np.float32)
    return x.astype(chunk.dtype, copy=False)


def write_model(path: Path, model: Model, type_name: str, tokenizer: Sequence[Field], seed: int, threads: int) -> int:
    """Write the model and return its size; the file gets its name when complete."""
    dtype, file_type = dtype_of(type_name), FILE_TYPES[type_name]
    matrix = BY_NAME[type_name.upper()]
    shapes = [(name, shape, stored_as(name, shape, matrix)) for name, shape in model.tensors().items()]
    layout = layout_gguf([*model.fields(file_type), *tokenizer], shapes)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
        file.flush()
        fill(file.fileno(), chunks(model, matrix, dtype, layout.offsets), seed, threads)
    part.replace(path)
    return layout.nbytes


def fill(fd: int, work: Iterator[Chunk], seed: int, threads: int) -> None:
    """Generate and write all chunks; numpy releases the GIL for both."""
    pending = list(work)[::-1]

    def worker() -> None:
        while True:
            try:
                chunk = pending.pop()
            except IndexError:
                return
            data = weights(chunk, seed).tobytes()
            n_bytes = 0
            while n_bytes < len(data):
                n_bytes += os.pwrite(fd, data[n_bytes:], chunk.offset + n_bytes)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(worker) for _ in range(threads)]:
            future.result()


def random_imatrix(path: Path, model: Model, seed: int, n_chunks: int = 100, chunk_size: int = 512) -> Imatrix:
    """Return an importance matrix like that of calibration on ``n_chunks`` chunks."""
    entries = {}
    for index, (name, shape) in enumerate(model.tensors().items()):
        if len(shape) == 1 or not name.startswith("blk."):
            continue
        rng = generator(seed, index, 0)
        n_mat = shape[2] if len(shape) > 2 else 1
        counts = np.full(n_mat, n_chunks * chunk_size, np.int64)
        if n_mat > 1:
            popularity = np.exp(rng.normal(0, 0.7, n_mat))
            share = np.minimum(1, model.used * popularity / popularity.sum())
            counts = rng.binomial(n_chunks * chunk_size, share).astype(np.int64)
        # Importance is mostly shared by all experts; the mean square of a normalized activation is about 1.
        square = np.exp(rng.normal(0, 1, shape[0])) * np.exp(rng.normal(0, 0.3, (n_mat, shape[0])))
        entries[name] = ImatrixEntry((square * counts[:, None]).astype(np.float32), counts)
    return Imatrix(path, entries, ["random"], n_chunks, chunk_size)


def parser() -> argparse.ArgumentParser:
    lines = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    p.add_argument("out", type=Path, metavar="OUT.gguf")
    p.add_argument("--size", metavar="SIZE", help="choose the number of layers for this file size (2G, 1.1G)")
    p.add_argument("--type", choices=FILE_TYPES, default="f16", help="type of the matrices (default: f16)")
    for name in ("layers", "experts", "used", "embd", "ff", "heads", "kv", "head-dim"):
        default = getattr(Model, name.replace("-", "_"))
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    p.add_argument(
        "--tokenizer",
        type=Path,
        default=TOKENIZER,
        metavar="GGUF",
        help="file to copy the tokenizer from (default: tiny-moe)",
    )
    p.add_argument("--vocab", type=int, metavar="N", help="write no tokenizer, and embeddings of N tokens")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=available_cpus())
    p.add_argument("--imatrix", type=Path, metavar="OUT", help="also write an importance matrix (.gguf or .dat)")
    return p


def model_of(options: argparse.Namespace, vocab: int) -> Model:
    """Return the model of the options."""
    names = ("layers", "experts", "used", "embd", "ff", "heads", "kv", "head_dim")
    sizes = {name: getattr(options, name) for name in names}
    for name, value in sizes.items():
        if value < 1:
            sys.exit(f"make_moe: --{name.replace('_', '-')} must be at least 1, not {value}")
    sizes["used"] = min(sizes["used"], sizes["experts"])
    model = Model(**sizes, vocab=vocab)
    if options.size is not None:
        layers = model.layers_for(parse_size(options.size), BY_NAME[options.type.upper()])
        model = replace(model, layers=layers)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    try:
        tokenizer = tokenizer_fields(None if options.vocab else options.tokenizer)
        model = model_of(options, options.vocab or vocabulary(tokenizer))
        nbytes = write_model(options.out, model, options.type, tokenizer, options.seed, max(1, options.threads))
        if options.imatrix:
            form = "dat" if options.imatrix.suffix == ".dat" else "gguf"
            write_imatrix(options.imatrix, random_imatrix(options.imatrix, model, options.seed), form)  # type: ignore[arg-type]
    except (QuantkitError, OSError, ValueError) as e:
        sys.exit(f"make_moe: {e}")
    n = sum(math.prod(shape) for shape in model.tensors().values())
    print(f"{options.out}: {format_count(n)} weights, {model.layers} layers, {options.type}, {format_size(nbytes)}")


if __name__ == "__main__":
    main()
