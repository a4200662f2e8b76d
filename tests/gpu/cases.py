"""Generate cases from seeds for scripts/gpu_check (GPU) and scripts/make_gpu_expected.py (CPU).

Needs numpy only. Weights of a quantized type are random bytes, those of blocks that would be no reasonable numbers
drawn again, so that no encoder is needed where the GPU is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.formats.gguf import Field, GGUFFile, TensorInfo, open_gguf, write_gguf
from quantkit.kernels.cuda.encode.encode import Rows, encode_rows, working_bytes
from quantkit.kernels.cuda.unpack import decoders
from quantkit.kernels.formats import FORMATS
from quantkit.kernels.reference import decode_rows
from quantkit.model.backends import Backend, Limits
from quantkit.model.batch import Batch
from quantkit.model.ops import Activation, Matrix, MulMat, MulMatId, Op, UpGate, UpGateId, Value
from quantkit.model.placement import ALL_LAYERS, Placement, parse_rules
from quantkit.types import BY_NAME, TensorType
from zoo import expected, write_zoo

Floats = npt.NDArray[np.float32]

#: Types that products are checked for: all that kernels read.
TYPES = tuple(name for name in FORMATS if name in decoders())
#: What rows begin with: a scale.
HEADS: dict[str, np.floating[Any]] = {"f32": np.float32(2.0**-9), "f16": np.float16(2.0**-9)}

N_IN, N_OUT, N_EXPERT, N_USED = 768, 72, 6, 2

#: Tokens of a batch: a single one, a few (mat-vec), and more than a tile (mat-mat).
ROWS = (1, 5, 40)


def blocks(t: TensorType, count: int, seed: int, largest: float = 64) -> npt.NDArray[np.uint8]:
    """Draw ``count`` blocks of a type, uint8 [count, block_bytes], whose values are finite and below ``largest``."""
    rng = np.random.default_rng([seed, t.id])
    if not t.is_quantized:
        values = rng.standard_normal(count * t.block).astype(np.float32)
        raw: dict[str, npt.NDArray[Any]] = {
            "F32": values,
            "F16": values.astype(np.float16),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
        }
        return raw[t.name].view(np.uint8).reshape(count, t.block_bytes)
    parts: list[npt.NDArray[np.uint8]] = []
    have = 0
    while have < count:
        bytes_of_blocks = rng.integers(0, 256, (4 * count, t.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            most = np.abs(decode_rows(t, with_heads(t, bytes_of_blocks))).max(axis=1)
            good = bytes_of_blocks[np.isfinite(most) & (most < largest) & (most > 1e-3)]
        parts.append(good)
        have += len(good)
    return np.concatenate(parts)[:count]


def with_heads(t: TensorType, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return rows of blocks with a header each, where a type has one."""
    if not t.row_header:
        return rows
    head = np.frombuffer(HEADS[t.row_scale].tobytes().ljust(t.row_header, b"\0"), np.uint8)
    return np.concatenate([np.broadcast_to(head, (len(rows), len(head))), rows], axis=1)


def tensor(t: TensorType, shape: Sequence[int], seed: int, largest: float = 64) -> bytes:
    """Draw a tensor's data."""
    data = blocks(t, int(np.prod(shape)) // t.block, seed, largest)
    return with_heads(t, data.reshape(int(np.prod(shape[1:])), -1)).tobytes()


def write_products(path: Path) -> Path:
    """Write a file with the weights of all product cases."""
    tensors = []
    for name in TYPES:
        t = BY_NAME[name]
        for part, shape in (
            ("dense", (N_IN, N_OUT)),
            ("up", (N_IN, N_OUT, N_EXPERT)),
            ("gate", (N_IN, N_OUT, N_EXPERT)),
        ):
            kind, data = t, tensor(t, shape, ("dense", "up", "gate").index(part))
            if not t.in_files:
                kind, shape = BY_NAME["I8"], (len(data) // int(np.prod(shape[1:])), *shape[1:])
            tensors.append((f"{name}.{part}", shape, kind, data))
    write_gguf(path, [Field.of("general.architecture", "none")], tensors)
    return path


@dataclass(frozen=True)
class Products:
    """All products with the weights of one type, and the values they write."""

    ops: tuple[Op, ...]
    x: Value
    ids: Value
    outs: tuple[Value, ...]

    @staticmethod
    def from_file(source: GGUFFile, name: str) -> Products:
        """Return the cases of a type: dense, fused, by expert, fused by expert with a merged tensor's halves."""

        def matrix(part: str, rows: tuple[int, int] | None = None) -> Matrix:
            info: TensorInfo = source.tensors[f"{name}.{part}"]
            shape = (N_IN, *info.shape[1:])
            return Matrix(replace(info, type=BY_NAME[name], shape=shape), rows)

        x, ids = Value("x", N_IN), Value("ids", N_USED, integer=True)
        half, silu = N_OUT // 2, Activation("silu")
        outs = (
            Value("dense", N_OUT),
            Value("gated", half),
            Value("by expert", N_OUT, N_USED),
            Value("gated by expert", N_OUT, N_USED),
            Value("gated halves", half, N_USED),
        )
        ops = (
            MulMat(out=outs[0], x=x, weight=matrix("dense")),
            UpGate(
                out=outs[1],
                x=x,
                up=matrix("dense", (half, N_OUT)),
                gate=matrix("dense", (0, half)),
                activation=Activation("gelu"),
            ),
            MulMatId(out=outs[2], x=x, weight=matrix("up"), ids=ids),
            UpGateId(out=outs[3], x=x, up=matrix("up"), gate=matrix("gate"), activation=silu, ids=ids),
            UpGateId(
                out=outs[4], x=x, up=matrix("up", (half, N_OUT)), gate=matrix("up", (0, half)), activation=silu, ids=ids
            ),
        )
        return Products(ops, x, ids, outs)


def inputs(rows: int) -> tuple[Floats, npt.NDArray[np.int32]]:
    """Draw x [rows, N_IN] and the experts of each row [rows, N_USED]."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, N_IN)).astype(np.float32) * np.exp(rng.standard_normal(N_IN)).astype(np.float32)
    ids = np.stack([rng.permutation(N_EXPERT)[:N_USED] for _ in range(rows)]).astype(np.int32)
    return x, ids


def run_products(backend: Backend, source: GGUFFile, name: str) -> Iterator[tuple[str, Floats]]:
    """Yield the name and result of every case of a type."""
    cases = Products.from_file(source, name)
    program = backend.compile(cases.ops, Limits(n_ctx=max(ROWS), n_ubatch=max(ROWS)), cases.outs)
    for rows in ROWS:
        x, ids = inputs(rows)
        positions = np.arange(rows, dtype=np.int32)
        program.write(cases.x, x)
        program.write(cases.ids, ids)
        program.run(Batch(positions * 0, positions, positions * 0, positions))
        for out in cases.outs:
            yield f"{name}, {out.name}, {rows}", np.array(program.read(out))


def encode(
    device: Any,
    t: TensorType,
    x: Floats,
    importance: Floats | None = None,
    repeat: Callable[[Any], None] | None = None,
    *,
    search: str = "",
    interleaved: bool = False,
) -> npt.NDArray[np.uint8]:
    """Return the bytes of rows, encoded on a device; ``repeat`` is given what encodes them once more.

    ``search`` and ``interleaved`` are those of ``encode_rows``.
    """
    rows, n = x.shape
    out = np.empty(rows * t.row_bytes(n), np.uint8)
    addresses = [device.allocate(size) for size in (x.nbytes, out.nbytes, 4 * n, working_bytes(t, rows, n) or 1)]
    try:
        device.upload(addresses[0], x)
        if importance is not None:
            device.upload(addresses[2], importance)

        def work() -> None:
            weights = addresses[2] if importance is not None else 0
            r = Rows(addresses[0], rows, n, addresses[1], weights, addresses[3])
            encode_rows(device, t, r, search=search, interleaved=interleaved)

        work()
        if repeat is not None:
            repeat(work)
        device.download(addresses[1], out)
    finally:
        for address in addresses:
            device.free(address)
    return out


#: Between the CPU backend and the GPU: sums in another order, in f32.
BOUND = 1e-10

#: The same over whole models: an activation that is rounded to the other side is in all tokens after it. Those before
#: the first one agree to ``BOUND``.
BOUND_MODEL = 2e-3


def nmse(actual: Any, expected: Any) -> float:
    """Return the mean squared error, divided by the mean square of the expected values."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.square(a - b).mean() / np.square(b).mean())


# ---------------------------------------------------------------- whole models


def on_gpu(rules: Sequence[str] = ()) -> Placement:
    """Return the placement of everything on the first GPU, but for what rules say."""
    return Placement(ALL_LAYERS, parse_rules(rules), ("CUDA0",), embeddings=True)


@contextmanager
def launched_early() -> Iterator[None]:
    """Let launches on the first GPU begin before the one before them is done, where the GPU can."""
    from quantkit.kernels.cuda.core import device

    card: Any = device.open_device("CUDA0")
    card.dependent_launches = True
    try:
        yield
    finally:
        card.dependent_launches = False


#: Tensors on the host, by numpy's backend, which needs no compiler.
PLACEMENTS = {
    "#861: up and gate on the card, down on the host": ["ffn_down_exps=REFERENCE"],
    "#861: up on the host, gate on the card": ["ffn_up_exps=REFERENCE"],
    "experts on the host": ["_exps=REFERENCE"],
    "a layer on the host": [r"blk\.1\.=REFERENCE"],
    "attention's matrices on the host": [r"attn_(q|k|v|output)\.=REFERENCE"],
    "output and embeddings on the host": ["output=REFERENCE,token_embd=REFERENCE"],
}

#: A zoo model, and the types its matrices are drawn in.
RETYPED = ("qwen3moe-moe", ("Q8_0", "Q4_K", "IQ4_XS", "Q6_K", "IQ3_S"))


def retyped(folder: Path, name: str, model: str = RETYPED[0]) -> Path:
    """Write a zoo model whose matrices are of a type, drawn from a seed."""
    plain = write_zoo(model, folder / "plain.gguf")
    path = folder / f"retyped-{name}.gguf"
    t = BY_NAME[name]
    with open_gguf(plain) as file:
        tensors: list[tuple[str, tuple[int, ...], TensorType, Any]] = []
        for i, (key, info) in enumerate(file.tensors.items()):
            is_plain = len(info.shape) < 2 or ".ffn_gate_inp." in key or key.startswith("token_embd")
            if is_plain or info.shape[0] % t.block:
                tensors.append((key, info.shape, info.type, file.data(info).tobytes()))
            else:
                tensors.append((key, info.shape, t, tensor(t, info.shape, 100 + i, largest=0.25)))
        write_gguf(path, list(file.fields.values()), tensors)
    return path


def retyped_tokens() -> npt.NDArray[np.int32]:
    """Return the tokens of the retyped models: few enough that the logits can be kept."""
    return expected(RETYPED[0])[0][:24]


def perplexity(model: Any, tokens: npt.NDArray[np.int32]) -> float:
    """Return the perplexity of chunks of tokens, int32 [chunks, n]: of the second half of each, as llama.cpp's."""
    total, count = 0.0, 0
    session = model.session(tokens.shape[1])
    for chunk in tokens:
        session.clear()
        logits = session.decode(chunk).astype(np.float64)
        first = len(chunk) // 2
        rows = logits[first:-1] - logits[first:-1].max(axis=1, keepdims=True)
        scores = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), chunk[first + 1 :]]
        total, count = total + float(scores.sum()), count + len(scores)
    return float(np.exp(total / count))
