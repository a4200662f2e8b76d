"""Write the tensors that libmtmd requires of mmproj files, by projector: quantkit/loaders/libmtmd.json.

    python scripts/make_encoder_tensors.py --lib DIR [NAME ...]

DIR has libmtmd.so of llama.cpp b11434 (scripts/peers). Of every checkpoint with towers (tests/data/checkpoints/towers
and wide) whose mmproj file the library opens, each tensor is renamed in turn, of wide towers one of each kind: if the
library no longer opens the file, it requires the tensor. Checkpoints of one projector may require different ones: a
list of each, of which a file needs all of one. NAME: only these, beside the rows of other projectors. 10 minutes.
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
from operator import methodcaller
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

from libmtmd import Libmtmd  # noqa: E402
from tensor_names import rename_tensors  # noqa: E402

import checkpoints  # noqa: E402
from quantkit.convert import ConvertOptions, convert_mmproj  # noqa: E402
from quantkit.errors import QuantkitError  # noqa: E402
from quantkit.formats.gguf import open_gguf  # noqa: E402
from quantkit.loaders.libmtmd import PROJECTORS, kind_of  # noqa: E402

#: The names of tensors that the converter gives, and those that the library asks for, by projector.
ASKED_FOR = {"granite_speech": ("conv_norm_var", "conv_norm")}

#: Projectors of images in models whose encoder for sound is optional, with only checkpoints that have one.
IMAGES = {"nemotron_v2_vl"}


def required_kinds(lib: Libmtmd, mmproj: Path, names: Iterable[str]) -> set[str]:
    """Return the kinds of tensors without any of which the library does not open a file."""
    required = defaultdict[str, list[bool]](list)
    with mmproj.open("r+b", buffering=0) as file:
        header = file.read(1 << 20)
        for name in names:
            stored = name.encode()
            start = header.index(struct.pack("<Q", len(stored)) + stored) + 8
            file.seek(start)
            file.write(b"?")
            required[kind_of(name)].append(not lib.opens(mmproj))
            file.seek(start)
            file.write(stored[:1])
    return {kind for kind, answers in required.items() if all(answers)}


def alone(table: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the kinds that an encoder for images requires without the encoder for sound of its checkpoint."""
    rows = {}
    for projectors, kinds in table.items():
        names = [name for name in projectors.split() if name in IMAGES]
        if names and " " in projectors:
            rows[names[0]] = [" ".join(k for k in row.split() if not k.startswith(("a.", "mm.a."))) for row in kinds]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, required=True, metavar="DIR", help="folder of libmtmd.so")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = parser.parse_args()
    lib, path = Libmtmd(args.lib), ROOT / "quantkit/loaders/libmtmd.json"
    table: dict[str, list[set[str]]] = defaultdict(list)
    for name in args.names or (*checkpoints.TOWERS, *checkpoints.WIDE):
        with tempfile.TemporaryDirectory() as folder:
            try:
                source = checkpoints.write_checkpoint(name, Path(folder))
                options = ConvertOptions(outtype="f16", allow_incomplete=True)
                (mmproj,) = convert_mmproj(source, Path(folder, "mm.gguf"), None, options).paths
            except QuantkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            with open_gguf(mmproj) as file:
                names = list(file.tensors)
                projectors = {key: file.get(key) for key in PROJECTORS if file.get(key)}
            for old, new in (ASKED_FOR[x] for x in projectors.values() if x in ASKED_FOR):
                mmproj = rename_tensors(mmproj, mmproj.with_stem("asked"), methodcaller("replace", old, new))
                names = [x.replace(old, new) for x in names]
            if not lib.opens(mmproj):
                print(f"{name}: the library does not open it", file=sys.stderr)
                continue
            one_each = {kind_of(tensor): tensor for tensor in reversed(names)}
            kinds = required_kinds(lib, mmproj, one_each.values() if name in checkpoints.WIDE else names)
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
    texts = {key: [" ".join(row) for row in rows] for key, rows in least.items()}
    if args.names:
        texts = json.loads(path.read_text()) | texts
    texts = dict(sorted((alone(texts) | texts).items()))
    lines = (f" {json.dumps(key)}: {json.dumps(rows)}" for key, rows in texts.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", newline="\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
