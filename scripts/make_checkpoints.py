"""Write the descriptions in tests/data/checkpoints from scripts/checkpoint_table*.py, with transformers.

    for python in PYTHON_WITH_4_57_6 PYTHON_WITH_5_18_0; do $python scripts/make_checkpoints.py [NAME ...]; done

For each row of the table transformers builds the model and saves it; tests/data/checkpoints/NAME.json gets config.json
and the names and shapes of the tensors. tests/lib/checkpoints.py generates the checkpoint from that with numpy. Rows of
the other major version of transformers are skipped; scripts/make_convert_goldens.py writes the expected results.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_table_classes import CLASSES
from checkpoint_table_decoders import NAMED
from checkpoint_table_drafts import ADAPTERS, DRAFTS
from checkpoint_table_encoders import ENCODERS
from checkpoint_table_mixtures import OTHERS
from checkpoint_table_towers import TOWERS, WIDE

from checkpoint_table import BASE, QUANTIZED, ROWS, SPARSE, VARIANTS, Json, Quantized, Row, Variant

DATA = Path(__file__).parents[1] / "tests" / "data" / "checkpoints"


def describe(row: Row, fold_names: bool = False) -> Json:
    """Return the description of a row, which tests/lib/checkpoints.py reads."""
    if row.version:
        config, tensors = saved(row)
    else:
        config, tensors = dict(row.args), {}
    for old, new in row.copies:
        tensors |= {name.replace(old, new): shape for name, shape in tensors.items() if name.startswith(old)}
    if row.text:
        config["text_config"] |= row.text
    config = {key: value for key, value in (config | row.config).items() if key not in row.drop}
    patterns = compact(tensors) | row.more
    text: Json = {"config": config, "vocab": row.vocab, "tensors": fold(patterns) if fold_names else patterns}
    defaults = Row(name="", model="", vocab={})
    for key in ("dtype", "f32", "shards", "files", "options", "outtypes", "quantized", "target", "parts", "period"):
        if (value := getattr(row, key)) != getattr(defaults, key):
            text[key] = value
    if fold_names and row.parts:
        text["parts"] = {file: fold(x) if file.endswith(".safetensors") else x for file, x in row.parts.items()}
    if row.version and row.model != config["architectures"][0]:
        text["model"] = row.model
    text["transformers"] = (row.version if row.runs is None else row.runs) or None
    return text


def saved(row: Row) -> tuple[Json, dict[str, list[int]]]:
    """Return config.json and the shapes of the tensors that transformers saves for a row."""
    import torch
    import transformers

    cls = getattr(transformers, row.model)
    config = cls.config_class(**(({} if "text_config" in row.args else BASE) | row.args | row.sparse))
    config.architectures = [row.model]
    torch.manual_seed(0)
    model = cls(config).to(getattr(torch, row.dtype))
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        (file,) = Path(out).glob("*.safetensors")
        with file.open("rb") as stored:
            header = json.loads(stored.read(struct.unpack("<Q", stored.read(8))[0]))
        saved_config = json.loads((Path(out) / "config.json").read_text())
    return saved_config, {name: info["shape"] for name, info in header.items() if name != "__metadata__"}


def compact(tensors: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return patterns for expand() of tests/lib/checkpoints.py: numbers in names that form a grid, as ranges."""
    groups: dict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name, shape in tensors.items():
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", name)
        groups[tuple(parts[::2]), tuple(shape)].add(tuple(map(int, parts[1::2])))
    patterns = {}
    for (texts, shape), numbers in groups.items():
        for grid in grids(sorted(numbers)):
            ranges = ["{" + ranged(axis) + "}" for axis in grid]
            patterns["".join(a + b for a, b in zip(texts, [*ranges, ""], strict=True))] = list(shape)
    return dict(sorted(patterns.items()))


def fold(patterns: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return patterns in which names of one shape and place are alternatives."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, shape in patterns.items():
        _, head, middle, tail = re.split(r"^(.*\}\.|(?:[^.]+\.){0,2})(.+?)(\.weight|\.bias|)$", name)[:4]
        groups[head, tail, tuple(shape)].append(middle)
    return {
        head + (names[0] if len(names) == 1 else "{" + "|".join(names) + "}") + tail: list(shape)
        for (head, tail, shape), names in groups.items()
    }


def grids(numbers: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Return grids (numbers of each axis) that cover the tuples."""
    if len(numbers[0]) < 2:
        return [[[n for (n,) in numbers]]] if numbers[0] else [[]]
    tails: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for first in sorted({n[0] for n in numbers}):
        tails[tuple(n[1:] for n in numbers if n[0] == first)].append(first)
    return [[firsts, *grid] for tail, firsts in tails.items() for grid in grids(list(tail))]


def ranged(numbers: list[int]) -> str:
    """Return ``0-3,5``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1][-1] = n
        else:
            parts.append([n, n])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)


def describe_quantized(row: Quantized) -> Json:
    """Return the description of a quantized checkpoint."""
    base: Json = json.loads((DATA / f"{row.base}.json").read_text())
    base["config"]["quantization_config"] = row.config
    base["quantized"] = row.scheme
    base |= {"formula": True} if row.formula else {}
    base["files"] = base.get("files", {}) | row.files
    return base | {"transformers": None}


def describe_variant(row: Variant) -> Json:
    """Return the description of a variant."""
    description: Json = json.loads((DATA / f"{row.base}.json").read_text())
    for key in ("config", "vocab"):
        description[key] = description[key] | getattr(row, key)
    if row.files:
        description["files"] = row.files
    if row.options:
        description["options"] = row.options
    return description | {"transformers": None, "outtypes": list(row.outtypes)}


def describe_sparse(base: str) -> Json:
    """Return a description without the keys of config.json that have the value of their class's default."""
    import transformers

    description: Json = json.loads((DATA / f"{base}.json").read_text())
    config = description["config"]
    defaults = transformers.AutoConfig.for_model(config["model_type"]).to_dict()
    keys = ("architectures", "model_type", "vocab_size", "num_hidden_layers", "tie_word_embeddings")
    description["config"] = {k: v for k, v in config.items() if k in keys or k not in defaults or defaults[k] != v}
    return description | {"transformers": None, "outtypes": ["bf16"]}


def text_of(description: Json) -> str:
    """Return JSON with a line per key, and a line per key of nested objects."""
    lines = []
    for key, value in description.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = parser.parse_args()
    import transformers

    version = int(transformers.__version__.split(".")[0])
    n_failed = 0
    jobs = {
        row.name: partial(describe, row)
        for row in ROWS + NAMED + ENCODERS + OTHERS + CLASSES
        if row.version in (0, version)
    }
    for folder, rows in {"towers": TOWERS, "wide": WIDE, "drafts": DRAFTS, "adapters": ADAPTERS}.items():
        jobs |= {
            f"{folder}/{row.name}": partial(describe, row, fold_names=True)
            for row in rows
            if row.version in (0, version)
        }
    jobs |= {row.name: partial(describe_quantized, row) for row in QUANTIZED}
    jobs |= {row.name: partial(describe_variant, row) for row in VARIANTS}
    if version == 4:
        jobs |= {f"{name}-sparse": partial(describe_sparse, name) for name in SPARSE}
    for name, job in jobs.items():
        if args.names and name.rpartition("/")[2] not in args.names:
            continue
        try:
            text = text_of(job())
        except Exception as error:  # continue with the other rows
            n_failed += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        (DATA / f"{name}.json").write_text(text, encoding="utf-8", newline="\n")
        print(name, len(text))
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
