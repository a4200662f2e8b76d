#!/usr/bin/env python3
"""Fuzz the reader of checkpoints: no crash, no hang, no allocation beyond the files.

    scripts/fuzz_checkpoint.py --mutations 1000000      seeded mutations of the files of small checkpoints
    scripts/fuzz_checkpoint.py --mutations 10000 --towers       of those that describe encoders

A case is a small checkpoint with one changed file: a safetensors file, its index, config.json, tokenizer.json,
tokenizer_config.json, tokenizer.model or tekken.json. JSON is changed as a tree three times out of four, so that most
of it remains JSON, otherwise byte by byte. The checkpoint is opened; if that succeeds, every tensor is read and the
header of the output is laid out. Only QuantkitError may be raised, with a message that names the checkpoint. A case
fails if it exceeds the time limit, pushes the process past its memory cap or, for a sample of cases, allocates more
than a small multiple of its file. Failures are written to the folder --keep.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "scripts")]

from fuzz_gguf import EDGES, SAMPLE, Hang, cap_memory, limited, mutate  # noqa: E402

import quantkit.checkpoint.vocab.tokenizer as library  # noqa: E402
from quantkit.errors import FormatError  # noqa: E402
from quantkit.foreign.child import Limits  # noqa: E402

#: Values that break readers of JSON, in addition to numbers.
VALUES: list[Any] = [
    *(None, True, False, -1, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "\0", "\ud800", "0", "1" * 5000),
    *([], {}, [[]], [None], {"": {}}, [1, "a"], "x" * 3000, "<|end|>", "yarn", "llama3", "longrope", "bfloat16", "F32"),
    *(10**30, 1 << 24, (1 << 24) - 1, 16777217, [0] * 500, [1 << 40, 0], [0, 1 << 47], [1 << 31, 1 << 31]),
    *("BPE", "Unigram", "WordPiece", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "modelopt", "bitnet"),
]
#: Limit of tracemalloc's peak for a case, after imports; the tables of names are not small.
SLACK, FACTOR = 24 << 20, 64


@dataclass(frozen=True)
class Seed:
    """A file of a checkpoint to mutate."""

    folder: Path
    file: str
    data: bytes
    #: Open the encoders of the checkpoint, not its text model.
    mmproj: bool = False

    def mutate(self, rng: random.Random) -> bytes:
        """Return the file with some changes."""
        if self.file.endswith(".safetensors"):
            n = int.from_bytes(self.data[:8], "little")
            if rng.random() < 0.25:
                return mutate(self.data, rng)
            header = mutate_json(self.data[8 : 8 + n], rng)
            return struct.pack("<Q", len(header)) + header + self.data[8 + n :]
        return mutate_json(self.data, rng) if self.file.endswith(".json") else mutate(self.data, rng)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return JSON with changes to its tree, or to its bytes."""
    if rng.random() < 0.25:
        return mutate(data, rng)
    if rng.random() < 0.002:
        return rng.choice((b"[", b'{"a":')) * 200_000
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = change(tree, rng)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def places(tree: Any, pairs: list[tuple[Any, Any]], depth: int = 0) -> list[tuple[Any, Any]]:
    """Return containers of a tree with each of their keys: all keys of small containers."""
    if len(pairs) > 2000 or depth > 20:
        return pairs
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items[:40] + items[-4:]:
        pairs.append((tree, key))
        places(value, pairs, depth + 1)
    return pairs


def change(tree: Any, rng: random.Random) -> Any:
    """Return a tree with one change: a value, a key, a copy of something elsewhere."""
    pairs = places(tree, [])
    if not pairs:
        return rng.choice(VALUES)
    container, key = rng.choice(pairs)
    kind = rng.randrange(7)
    if kind <= 2:
        container[key] = (
            copy.deepcopy(rng.choice((*VALUES, *EDGES)))
            if rng.random() < 0.8
            else rng.choice((-1, 1)) * rng.choice(EDGES)
        )
    elif kind == 3:
        del container[key]
    elif kind == 4:
        second, where = rng.choice(pairs)
        container[key] = copy.deepcopy(second[where]) if where in range(len(second)) or where in second else None
    elif kind == 5 and isinstance(container, dict):
        container[rng.choice([k for d, k in pairs if isinstance(d, dict)])] = container.pop(key)
    elif isinstance(container[key], int) and not isinstance(container[key], bool):
        container[key] += rng.choice((-1, 1, 7, 256))
    else:
        deep: Any = container[key]
        for _ in range(rng.choice((1, 100))):
            deep = [deep]
        container[key] = deep
    return tree


def exercise(folder: Path, mmproj: bool) -> str:
    """Open a checkpoint and use all of it, of its encoders with ``mmproj``; return ``opened`` or ``refused``."""
    from quantkit.checkpoint import OpenOptions, open_checkpoint
    from quantkit.checkpoint.open_mmproj import open_mmproj
    from quantkit.errors import QuantkitError
    from quantkit.formats.gguf import layout_gguf

    try:
        opened = (open_mmproj if mmproj else open_checkpoint)(folder, OpenOptions(pre="gpt-2"))
        layout_gguf(opened.fields.values(), [(t.name, t.shape, t.type) for t in opened.tensors.values()])
        for tensor in opened.tensors.values():
            read(opened, tensor)
    except QuantkitError as e:
        if len(str(e)) > 2000:
            raise AssertionError(f"an endless message: {str(e)[:200]}") from None
        return "refused"
    return "opened"


def read(opened: Any, tensor: Any) -> None:
    """Read the first and the last row of a tensor."""
    import numpy as np

    row = tensor.type.row_bytes(tensor.shape[0])
    out = np.empty(row, np.uint8)
    for offset in {0, tensor.nbytes - row}:
        opened.read(tensor, out, offset)


def seeds(folder: Path) -> list[Seed]:
    """Write small checkpoints, and return their files."""
    from tiny_checkpoints import moe_arrays, moe_config, write_checkpoint

    small = {
        name: x[..., :32] if "embed" in name or "lm_head" in name else x for name, x in moe_arrays(1, 1, 2).items()
    }
    config: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_experts": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
    config["rope_scaling"]["original_max_position_embeddings"] = 4096
    shrunk = {name: x.reshape(x.shape)[..., :32].copy() for name, x in small.items()}
    moe = write_checkpoint(folder / "moe", moe_config(hidden_size=32, **config), shrunk, shards=2)
    llama_config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "vocab_size": 96},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 32},
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    dense = {
        n: x[:32].copy() for n, x in shrunk.items() if "experts" not in n and "mlp" not in n and "_norm.w" not in n
    }
    dense |= {n: x for n, x in shrunk.items() if n.startswith(("model.embed", "lm_head", "model.norm"))}
    llama = write_checkpoint(folder / "llama", llama_config, dense)
    pieces = write_checkpoint(folder / "pieces", llama_config, dense)
    (pieces / "tokenizer.json").unlink()
    texts = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(80))]
    body = b"".join(
        _field(_field(text) + b"\x15" + struct.pack("<f", -i) + b"\x18\x06") for i, text in enumerate(texts)
    )
    (pieces / "tokenizer.model").write_bytes(body)
    tekken = write_checkpoint(folder / "tekken", llama_config | {"vocab_size": 300}, dense)
    (tekken / "tokenizer.json").unlink()
    import base64

    ranks = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    sizes = {"default_vocab_size": 286, "default_num_special_tokens": 30, "version": "v3"}
    (tekken / "tekken.json").write_text(json.dumps({"config": sizes, "vocab": ranks}))
    files = [(moe, name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json") for _ in range(3)]
    files += [(moe, "model.safetensors.index.json"), (moe, "model-00001-of-00002.safetensors")] * 3
    files += [(llama, name) for name in ("config.json", "model.safetensors", "tokenizer.json")] * 2
    files += [(pieces, "tokenizer.model"), (tekken, "tekken.json")]
    return [Seed(where, name, (where / name).read_bytes()) for where, name in files]


def more_seeds(folder: Path) -> list[Seed]:
    """Write a checkpoint of every architecture, and return their configurations."""
    import checkpoints

    seeds = []
    for name in checkpoints.NAMES:
        where = checkpoints.write_checkpoint(name, folder / "more")
        seeds.append(Seed(where, "config.json", (where / "config.json").read_bytes()))
    return seeds


def tower_seeds(folder: Path) -> list[Seed]:
    """Write all checkpoints with towers, and return the files that describe these."""
    import checkpoints

    seeds = []
    for name in checkpoints.TOWERS:
        where = checkpoints.write_checkpoint(name, folder / "towers")
        files = ["config.json", "preprocessor_config.json", "processor_config.json"]
        seeds += [Seed(where, file, (where / file).read_bytes(), True) for file in files if (where / file).is_file()]
    return seeds


def _field(data: bytes) -> bytes:
    return b"\x0a" + bytes([len(data)]) + data


class LocalService:
    """A ``foreign.child.Child`` in the same process, because starting a process takes longer than a case."""

    def __init__(
        self,
        service: str,
        name: str,
        *arguments: Any,
        limits: Limits | None = None,
        data: Callable[[], bytes] | None = None,
    ) -> None:
        self.service, self.name, self.arguments, self.limits, self.data = service, name, arguments, limits, data
        self.instance: Any = None

    def start(self) -> None:
        """Do nothing: the first call creates the service."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the child and return its result; any exception counts as a refusal."""
        try:
            if self.instance is None:
                module, _, name = self.service.partition(":")
                data = [] if self.data is None else [self.data()]
                self.instance = getattr(importlib.import_module(module), name)(*data, *self.arguments)
            return getattr(self.instance, method)(*arguments)
        except (KeyboardInterrupt, MemoryError, Hang):
            raise
        except BaseException as e:  # panics of tokenizers are not Exceptions
            raise FormatError(f"{self.name}: {e}") from None


def run_one(seed: Seed, data: bytes, limit: float, watch: bool) -> tuple[str, str]:
    """Run one case; return its outcome and the reason of a failure."""
    path = seed.folder / seed.file
    path.write_bytes(data)
    try:
        with limited(limit):
            if watch:
                tracemalloc.start()
            outcome = exercise(seed.folder, seed.mmproj)
        if not watch:
            return outcome, ""
        peak, allowed = tracemalloc.get_traced_memory()[1], SLACK + FACTOR * len(data)
        return (outcome, "") if peak <= allowed else ("failed", f"allocated {peak} bytes for {len(data)} of file")
    except BaseException as e:  # panics of tokenizers are not Exceptions
        if isinstance(e, KeyboardInterrupt):
            raise
        return "failed", f"{type(e).__name__}: {e}"
    finally:
        tracemalloc.stop()
        path.write_bytes(seed.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1_000_000, metavar="N", help="how many (default: 1000000)")
    parser.add_argument("--all", action="store_true", help="also config.json of every architecture (1 GB of files)")
    parser.add_argument("--towers", action="store_true", help="only the encoders of checkpoints with towers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=5.0, metavar="SECONDS", help="CPU time of one case")
    parser.add_argument("--memory", type=int, default=192, metavar="MIB", help="address space beyond that at the start")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for failing files")
    options = parser.parse_args()
    library.Child = LocalService  # type: ignore[assignment,attr-defined]
    rng, totals, slowest = random.Random(options.seed), Counter[str](), 0.0
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        starts = seeds(Path(folder))
        for seed in starts:  # imports everything before the cap, and must succeed
            if (result := run_one(seed, seed.data, 60.0, True)) != ("opened", ""):
                sys.exit(f"{seed.folder.name} as it is: {result}")
        if options.all:
            starts += [s for s in more_seeds(Path(folder)) if run_one(s, s.data, 60.0, False)[0] == "opened"]
        if options.towers:
            towers = tower_seeds(Path(folder))
            starts = [s for s in towers if run_one(s, s.data, 60.0, False)[0] == "opened"]
        if options.all or options.towers:
            print(f"{len(starts)} files to change", flush=True)
        cap_memory(options.memory)
        began = time.perf_counter()
        try:
            for i in range(options.mutations):
                seed = rng.choice(starts)
                data = seed.mutate(rng)
                start = time.perf_counter()
                outcome, why = run_one(seed, data, options.limit, i % SAMPLE == 0)
                slowest = max(slowest, time.perf_counter() - start)
                totals[outcome] += 1
                if why:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / f"seed{options.seed}-case{i}-{seed.folder.name}-{seed.file}").write_bytes(data)
                    print(f"case {i}, {seed.folder.name}/{seed.file}: {why[:300]}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped early: ", end="")
    n_total, seconds = totals.total(), time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{n_total} checkpoints with a changed file, seed {options.seed}: {totals['opened']} opened, ", end="")
    print(f"{totals['refused']} refused, {totals['failed']} failures; {n_total / seconds:.0f}/s, ", end="")
    print(
        f"slowest {slowest * 1000:.1f} ms, peak RSS {peak:.0f} MiB under a cap of {options.memory} MiB above the start"
    )
    if totals["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
