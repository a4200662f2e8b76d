"""The zoo: small random f32 models of many architectures, every part of which affects the logits.

    python tests/lib/zoo.py OUT [NAME ...] --seed 1

tests/data/zoo/headers/NAME.head is a GGUF v3 file up to its tensor data. The weights of each tensor come from PCG64
seeded with (seed, crc32 of the tensor's name): norms and scales around 1, projections 1 / sqrt(n_in), a router with
clear choices. ``expected`` has llama.cpp's logits for seed 1; see tests/data/zoo/README.md.

The header is parsed here and not by quantkit, so that the tests are independent of the tested code.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ZOO = Path(__file__).parents[1] / "data" / "zoo"
NAMES = tuple(sorted(path.stem for path in (ZOO / "headers").glob("*.head")))
#: Models that together have every pair of neighbouring operations that any has (tests/model/test_zoo.py).
VARIED = (
    *("apertus-dense", "bert-dense", "bitnet-dense", "bloom-dense", "chatglm-dense", "cohere2moe-moe", "dbrx-moe"),
    *(
        "deepseek2-moe",
        "deepseek4-moe",
        "dots3note-moe",
        "gemma3n-dense",
        "gemma4-dense",
        "gemma4-moe",
        "granite-dense",
        "grok-both",
    ),
    *("grovemoe-moe", "hy_v4-moe", "jamba-moe", "kimi-k3-moe", "kimi-linear-moe", "lfm2-dense", "llama-dense"),
    *("llama4-moe", "mimo2-moe", "mpt-dense", "nanbeige-looped", "nemotron_h_moe-moe", "olmo-dense", "plamo2-dense"),
    *("qwen3next-moe", "rwkv6-dense", "rwkv6qwen2-dense", "rwkv7-dense", "smallthinker-moe", "talkie-dense"),
)
SEED = 1

_STRING, _ARRAY = 8, 9
_F32, _I32 = 0, 26
#: A tensor of integers: different experts for every token.
TABLE = "ffn_gate_tid2eid.weight"
N_EXPERT = 8
#: Bytes of GGUF's value types of fixed size.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def write_zoo(name: str, path: Path, seed: int = SEED) -> Path:
    """Write the model ``name`` with the weights of ``seed`` (4 to 35 MB) and return its path."""
    head = (ZOO / "headers" / f"{name}.head").read_bytes()
    with path.open("wb") as file:
        file.write(head)
        for tensor, ne, offset in tensor_infos(head):
            file.seek(len(head) + offset)
            file.write(draw(tensor, ne, seed).tobytes())
        file.write(bytes(-file.tell() % 32))
    return path


def write_hollow_zoo(name: str, path: Path) -> Path:
    """Write the model ``name`` with holes for weights, all zero, without time to write or disk space."""
    head = (ZOO / "headers" / f"{name}.head").read_bytes()
    end = max(offset + 4 * math.prod(ne) for _, ne, offset in tensor_infos(head))
    path.write_bytes(head)
    os.truncate(path, len(head) + end + -end % 32)
    return path


def expected(name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the tokens [64] and llama.cpp b11434's logits [64, 128] after each of them, for seed 1."""
    arrays = _logits()
    return arrays["tokens"], arrays[name]


@cache
def _logits() -> dict[str, npt.NDArray[Any]]:
    with np.load(ZOO / "logits.npz") as npz:
        return dict(npz)


def tensor_infos(head: bytes) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield name, ne and offset of every tensor of a GGUF v3 header."""
    n_tensors, n_kv = struct.unpack_from("<QQ", head, 8)
    position = 24
    for _ in range(n_kv):
        _, position = _string(head, position)
        position = _skip(head, position + 4, *struct.unpack_from("<I", head, position))
    for _ in range(n_tensors):
        name, position = _string(head, position)
        (n_dims,) = struct.unpack_from("<I", head, position)
        ne = struct.unpack_from(f"<{n_dims}Q", head, position + 4)
        kind, offset = struct.unpack_from("<IQ", head, position + 4 + 8 * n_dims)
        if kind != (_I32 if name.endswith(TABLE) else _F32):
            raise ValueError(f"{name} is of type {kind}")
        position += 16 + 8 * n_dims
        yield name, ne, offset


def _string(head: bytes, position: int) -> tuple[str, int]:
    (n,) = struct.unpack_from("<Q", head, position)
    return head[position + 8 : position + 8 + n].decode(), position + 8 + n


def _skip(head: bytes, position: int, kind: int) -> int:
    """Return the end of a metadata value of a type."""
    if kind == _STRING:
        return _string(head, position)[1]
    if kind != _ARRAY:
        return position + _SIZES[kind]
    item, n = struct.unpack_from("<IQ", head, position)
    position += 12
    if item in _SIZES:
        return position + int(n) * _SIZES[item]
    for _ in range(n):
        position = _skip(head, position, item)
    return position


def draw(name: str, ne: tuple[int, ...], seed: int) -> npt.NDArray[Any]:
    """Return random float32 weights (for a table, int32) of the shape ne reversed, by the kind of tensor."""
    rng, shape = np.random.default_rng([seed, zlib.crc32(name.encode())]), ne[::-1]
    if name.endswith(TABLE):
        return rng.permuted(np.tile(np.arange(N_EXPERT, dtype=np.int32), (ne[1], 1)), axis=1)[:, : ne[0]].copy()
    if name.endswith("ssm_a"):
        x = -rng.uniform(0.2, 1.2, shape)
    elif "mix_lerp" in name or "mix_first" in name:
        x = rng.uniform(0, 1, shape)
    elif name.endswith("mix_decay.weight"):
        x = rng.uniform(-5, 0, shape)
    elif name.startswith("rope_f"):
        x = rng.uniform(1, 4, shape)
    elif name.endswith("sinks.weight"):
        x = rng.standard_normal(shape)
    elif name.endswith((".bias", "probs_b", "ssm_dt")):
        x = rng.standard_normal(shape) * 0.2
    elif "norm" in name or name.endswith(("scale", "ssm_d")) or len(ne) == 1:
        x = rng.uniform(0.5, 1.5, shape)
    elif name.startswith("token_embd"):
        x = rng.standard_normal(shape)
    else:
        gain = 3 if "ffn_gate_inp" in name else 1.5 if "attn_q" in name or "attn_k" in name else 1
        x = rng.standard_normal(shape) * (gain / ne[0] ** 0.5)
    return x.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown model: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        write_zoo(name, options.out / f"{name}.gguf", options.seed)


if __name__ == "__main__":
    main()
