"""Compare headers of conversions with those of llama.cpp's converter, of checkpoints with the sizes of popular models.

    TRANSFORMERS scripts/check_published_sizes.py --llama DIR --out DIR [NAME ...]

enters hashes of the headers (metadata, names, shapes and types) of encoders and text models in f16 and q8_0 in
tests/data/published-sha256.json, which tests/checkpoint/test_published_sizes.py compares with quantkit's. The
checkpoints (tests/lib/published_sizes.py) have no weights, and no data are written. TRANSFORMERS has 4.57.6.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib")]

from make_convert_goldens import converted, enter, load_reference  # noqa: E402
from published_sizes import PUBLISHED, describe_published, write_published  # noqa: E402

SHA256 = ROOT / "tests" / "data" / "published-sha256.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--llama", type=Path, required=True, help="llama.cpp's tree")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of named chat templates depends on it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    program = load_reference(args)
    omit_data()
    for name in args.names or PUBLISHED:
        description, source = describe_published(name), write_published(name, args.out / "checkpoints")
        row: dict[str, Any] = {}
        for mode, options in (("text", []), ("mmproj", ["--mmproj"])):
            if mode == "text" and not PUBLISHED[name].text:
                continue
            for outtype in ("f16", "q8_0"):
                arguments = [*options, "--outtype", outtype]
                file = converted(program, description, source, args.out / "file", arguments)
                row[f"{mode} {outtype}"] = {key: file[key] for key in ("error", "sha256", "bytes") if key in file}
        enter(SHA256, {name: row})
        print(name, row, flush=True)
        shutil.rmtree(source)


def omit_data() -> None:
    """Let the reference write headers only."""
    import gguf

    def write_infos(writer: Any, *, progress: bool = False) -> None:
        writer.write_ti_data_to_file()
        for file in writer.fout:
            writer.write_padding(file, file.tell())

    gguf.GGUFWriter.write_tensors_to_file = write_infos


if __name__ == "__main__":
    main()
