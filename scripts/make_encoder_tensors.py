"""Write the tensors that libmtmd requires of mmproj files, by projector: quantkit/loaders/libmtmd.json.

    python scripts/make_encoder_tensors.py --lib DIR

DIR has libmtmd.so of llama.cpp b11434 (scripts/peers). Of every checkpoint with towers (tests/data/checkpoints/towers)
whose mmproj file the library opens, each tensor is renamed in turn: if the library no longer opens the file, it
requires the tensor. Checkpoints of one projector may require different ones: a list of each, of which a file needs all
of one. 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

from libmtmd import Libmtmd  # noqa: E402

import checkpoints  # noqa: E402
from quantkit.convert import ConvertOptions, convert_mmproj  # noqa: E402
from quantkit.errors import QuantkitError  # noqa: E402
from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.loaders.libmtmd import PROJECTORS, kind_of  # noqa: E402


def renamed(data: bytes, name: str) -> bytes:
    """Return a GGUF file in which a tensor has another name of the same length."""
    stored = name.encode()
    entry = struct.pack("<Q", len(stored)) + stored
    start = data.index(entry) + 8
    return data[:start] + b"?" + data[start + 1 :]


def required_kinds(lib: Libmtmd, mmproj: Path, names: Iterable[str]) -> set[str]:
    """Return the kinds of tensors without any of which the library does not open a file."""
    data, required = mmproj.read_bytes(), defaultdict[str, list[bool]](list)
    for name in names:
        mmproj.write_bytes(renamed(data, name))
        required[kind_of(name)].append(not lib.opens(mmproj))
    return {kind for kind, answers in required.items() if all(answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libmtmd.so")
    lib = Libmtmd(parser.parse_args().lib)
    table: dict[str, list[set[str]]] = defaultdict(list)
    for name in checkpoints.TOWERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                source = checkpoints.write_checkpoint(name, Path(folder))
                options = ConvertOptions(outtype="f32", allow_incomplete=True)
                (mmproj,) = convert_mmproj(source, Path(folder, "mm.gguf"), None, options).paths
            except QuantkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            with open_gguf(mmproj) as file:
                names = list(file.tensors)
                projectors = {key: file.get(key) for key in PROJECTORS if file.get(key)}
            if not lib.opens(mmproj):
                print(f"{name}: the library does not open it", file=sys.stderr)
                continue
            kinds = required_kinds(lib, mmproj, names)
        # A kind that only some layers have is required of these alone.
        layers: dict[str, set[str]] = defaultdict(set)
        groups: dict[str, set[str]] = defaultdict(set)
        for tensor in names:
            if match := re.match(r"(.*?\bblk)\.(\d+)\.", tensor):
                layers[kind_of(tensor)].add(match[2])
                groups[match[1]].add(match[2])
        kinds -= {kind for kind, numbers in layers.items() if numbers != groups[kind.partition(".*.")[0]]}
        row = table[" ".join(sorted(set(projectors.values())))]
        row.append(kinds)
        print(name, projectors, len(kinds), "of", len({kind_of(tensor) for tensor in names}), flush=True)
    least = {
        projector: sorted({tuple(sorted(row)) for row in rows if not any(subset < row for subset in rows)})
        for projector, rows in sorted(table.items())
    }
    lines = (f" {json.dumps(key)}: {json.dumps([' '.join(row) for row in rows])}" for key, rows in least.items())
    path = ROOT / "quantkit/loaders/libmtmd.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", newline="\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
