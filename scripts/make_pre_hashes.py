"""Write quantkit/checkpoint/vocab/pre_hashes.json: names of pre-tokenizers by hash (llama.cpp b11434).

    scripts/make_pre_hashes.py LLAMA_CPP [OUT]

LLAMA_CPP is a source tree of llama.cpp, whose conversion/base.py (get_vocab_base_pre) is parsed, not run. The file has
a line for each hash: the name in tokenizer.ggml.pre, and the model whose tokenizer was hashed. Of two names with one
hash the later one is used, as in llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

TARGET = Path(__file__).parent.parent / "quantkit/checkpoint/vocab/pre_hashes.json"
_BRANCH = re.compile(
    r'if chkhsh == "([0-9a-f]{64})":\s+# ref: https://huggingface\.co/(\S+)\s+res = "([^"]+)"',
)


def hashes_of(source: str) -> dict[str, tuple[str, str]]:
    """Return name and model of each hash, by name."""
    rows = {digest: (name, model) for digest, model, name in _BRANCH.findall(source)}
    return dict(sorted(rows.items(), key=lambda item: item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("out", type=Path, nargs="?", default=TARGET, metavar="OUT")
    arguments = parser.parse_args()
    rows = hashes_of((arguments.tree / "conversion/base.py").read_text())
    lines = (f"{json.dumps(digest)}: {json.dumps(row)}" for digest, row in rows.items())
    arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
