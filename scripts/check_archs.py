"""Compare the engine with libllama b11434 on models of every architecture with all tensors that its loader reads.

    scripts/check_archs.py [NAME ...] --lib DIR --seeds 1 2 3
    scripts/check_archs.py --lib DIR --optional

Seed 1 has the sizes of llama.cpp's tests/test-llama-archs.cpp; other seeds also vary layers, heads, widths, vocabulary
and experts (tests/lib/arch_models.py). Prints a line for each model that differs, with the reason of a refusal or the
error, then the counts. Exits with 1 if any differs by more than llama.cpp's own batches do. --optional rewrites
tests/data/zoo/optional.json: the kinds of tensors without which llama.cpp loads the models of the zoo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/lib")]

from arch_models import BOUND, MODELS, compare, label_of, sized  # noqa: E402

from libllama import Libllama  # noqa: E402
from quantkit.formats.gguf import GGUFFile, open_gguf, write_gguf  # noqa: E402
from quantkit.model.builder import kind_of  # noqa: E402
from zoo import NAMES, ZOO, write_zoo  # noqa: E402


def check(library: Libllama, names: list[str], seeds: list[int], folder: Path) -> Counter[str]:
    """Print the models that differ, and return the number of models by outcome."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        for arch, moe in MODELS:
            if names and label_of(arch, moe) not in names:
                continue
            error, reason = compare(library, arch, moe, sized(arch, seed), folder)
            outcome = "refused" if reason else "equal" if error <= BOUND else "different"
            outcomes[outcome] += 1
            if outcome != "equal":
                print(f"{label_of(arch, moe)} seed {seed}: {reason or error}", flush=True)
    return outcomes


def optional_kinds(library: Libllama, source: GGUFFile, folder: Path) -> list[str]:
    """Return the kinds of tensors, except scales, without which llama.cpp loads a model."""
    kinds = sorted({kind_of(name) for name in source.tensors})
    return [kind for kind in kinds if not kind.endswith("scale") and _loads_without(library, source, kind, folder)]


def _loads_without(library: Libllama, source: GGUFFile, kind: str, folder: Path) -> bool:
    left = [tensor for name, tensor in source.tensors.items() if kind_of(name) != kind]
    path = folder / "less.gguf"
    write_gguf(path, source.fields.values(), [(t.name, t.shape, t.type, source.data(t).tobytes()) for t in left])
    return library.load(path).loads


def write_optional(library: Libllama, folder: Path) -> None:
    """Enter the optional kinds of every model of the zoo."""
    values = {}
    for name in NAMES:
        with open_gguf(write_zoo(name, folder / "whole.gguf")) as source:
            values[name] = optional_kinds(library, source, folder)
    rows = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(kinds, separators=(',', ':'))}" for name, kinds in values.items()
    )
    (ZOO / "optional.json").write_text(f"{{{rows}}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models, such as llama-dense; default: all")
    parser.add_argument("--lib", type=Path, required=True, help="folder of llama.cpp b11434's libllama.so")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--optional", action="store_true")
    options = parser.parse_args()
    library = Libllama(options.lib)
    with tempfile.TemporaryDirectory() as folder:
        if options.optional:
            write_optional(library, Path(folder))
            return
        outcomes = check(library, options.names, options.seeds, Path(folder))
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())))
    sys.exit(outcomes["different"] > 0)


if __name__ == "__main__":
    main()
