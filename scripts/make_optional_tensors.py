"""Write the optional tensors that every layer of a class has: quantkit/checkpoint/optional_tensors.json.

    python scripts/make_optional_tensors.py [NAME ...]

Of each class with a checkpoint in tests/data/checkpoints, the kinds of tensors that every layer of all its checkpoints
has, and without which llama.cpp's loader (quantkit/loaders) still loads the file; with the settings (true or false)
in which all these checkpoints agree. NAME: only their classes, beside the rows of others. 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

import checkpoints  # noqa: E402
from quantkit.checkpoint.config import raw_config  # noqa: E402
from quantkit.checkpoint.optional_tensors import flags_in, kinds_in_every_layer  # noqa: E402
from quantkit.convert import ConvertOptions, plan_convert  # noqa: E402
from quantkit.errors import QuantkitError  # noqa: E402
from quantkit.loaders.follow import load  # noqa: E402
from quantkit.pipeline.plan import Plan  # noqa: E402

TABLE = ROOT / "quantkit/checkpoint/optional_tensors.json"


def plans(names: list[str]) -> Iterator[tuple[str, dict[str, bool], Plan]]:
    """Yield class, settings and plan of every checkpoint that can be converted."""
    for name in names:
        description = checkpoints.describe(name)
        with tempfile.TemporaryDirectory() as folder:
            source = checkpoints.write_checkpoint(name, Path(folder))
            try:
                plan = plan_convert(source, folder, None, ConvertOptions(**description.convert_keywords()))
            except QuantkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            config = raw_config(source)
            yield config.architecture, flags_in(config.values), plan


def optional_kinds(plan: Plan, kinds: set[str]) -> set[str]:
    """Return the kinds without which llama.cpp loads the file."""
    fields = {field.key: field for field in plan.fields}
    shapes = {name: shape for name, _, shape in plan.entries}
    optional = set()
    for kind in kinds:
        pattern = re.compile(rf"blk\.\d+\.{re.escape(kind)}")
        remaining = {name: shape for name, shape in shapes.items() if not pattern.fullmatch(name)}
        if load("llama.cpp", fields, remaining) == ():
            optional.add(kind)
    return optional


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names
    rows: dict[str, list[tuple[dict[str, bool], Plan]]] = defaultdict(list)
    for architecture, flags, plan in plans(names or list(checkpoints.NAMES)):
        rows[architecture].append((flags, plan))
    table: dict[str, Any] = json.loads(TABLE.read_text()) if names else {}
    for architecture, checkpoints_of_class in rows.items():
        settings: dict[str, set[bool]] = defaultdict(set)
        for flags, _ in checkpoints_of_class:
            for key, flag in flags.items():
                settings[key].add(flag)
        common = {key: next(iter(values)) for key, values in settings.items() if len(values) == 1}
        kinds = set.intersection(
            *(kinds_in_every_layer(name for name, _, _ in plan.entries) for _, plan in checkpoints_of_class)
        )
        for _, plan in checkpoints_of_class:
            kinds &= optional_kinds(plan, kinds)
        table.pop(architecture, None)
        if kinds:
            table[architecture] = {"tensors": " ".join(sorted(kinds)), "settings": dict(sorted(common.items()))}
        print(architecture, sorted(kinds), flush=True)
    lines = (f" {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(table.items()))
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", newline="\n")


if __name__ == "__main__":
    main()
