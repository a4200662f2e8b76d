#!/usr/bin/env python3
"""Compare quantkit's verdict on whether a model loads with the runtimes themselves: intact models, and damaged ones.

    scripts/check_verdicts.py 2000              every intact model, then damaged ones, up to this number of cases
    scripts/check_verdicts.py 400 --seed 7      other damages
    scripts/check_verdicts.py 0                 only intact models
    scripts/check_verdicts.py 2000 --only change_type,add_tensor --model zoo/ --json verdicts.json

Needs libllama.so of llama.cpp b11434 (scripts/peers) and of the wheel ik-llama-cpp-python; their results are cached
(tests/lib/peer_cache.py), so that a second run executes only quantkit. Prints how often the verdicts agree, then the
cases in which they differ. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib")]

import damage  # noqa: E402
import sparse_models  # noqa: E402
from quantkit.cli._table import table  # noqa: E402
from verdicts import RUNTIMES, Verdict, libraries, verdicts  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A model, intact or damaged, and a runtime: both verdicts."""

    name: str
    architecture: str
    seed: int | None
    kind: str
    damage: str
    runtime: str
    verdict: Verdict
    expected: Verdict

    @property
    def agree(self) -> bool:
        return self.verdict.loads == self.expected.loads


def draw(options: argparse.Namespace) -> Iterator[tuple[str, int | None, str, str, sparse_models.Model]]:
    """Yield name, seed, kind, description and model of every case: intact models (seed None), then damaged ones."""
    names = [name for name in sparse_models.NAMES if options.model in name]
    for name in names if not options.damaged else []:
        yield name, None, "whole", "", sparse_models.model(name)
    pairs = ((name, seed) for seed in itertools.count(options.seed) for name in names)
    cases = ((name, seed, *damage.damage(sparse_models.model(name), seed)) for name, seed in pairs)
    selection = ((name, seed, kind, text, m) for name, seed, m, kind, text in cases if kind in options.only)
    yield from itertools.islice(selection, options.count)


def judge(options: argparse.Namespace) -> Iterator[Case]:
    runtimes = libraries()
    if missing := set(RUNTIMES) - set(runtimes):
        sys.exit(
            f"{', '.join(sorted(missing))} not found: scripts/peers builds llama.cpp, ik_llama.cpp's is in a wheel"
        )
    for name, seed, kind, text, model in draw(options):
        for runtime, (verdict, expected) in verdicts(model, runtimes).items():
            yield Case(name, model.architecture, seed, kind, text, runtime, verdict, expected)


def agreement(cases: list[Case]) -> str:
    """Return a table: the number of cases in which the verdicts agree, for each runtime and kind of damage."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for kind in (ALL, case.kind):
            groups.setdefault((case.runtime, kind), []).append(case)
    rows = [[*group, *counts(members)] for group, members in sorted(groups.items())]
    return table(["runtime", "damage", "cases", "load", "agree", "only ours loads", "only theirs loads"], rows, left=2)


#: The row of all cases, first in alphabetical order.
ALL = "(all)"


def counts(cases: list[Case]) -> list[int]:
    """Return the numbers of cases: all, loaded, agreeing, loaded only by quantkit's verdict, and only by the
    runtime's."""
    wrong = Counter(case.verdict.loads for case in cases if not case.agree)
    loads = sum(case.expected.loads for case in cases)
    return [len(cases), loads, len(cases) - wrong.total(), wrong[True], wrong[False]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, metavar="N", help="damaged models")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the damages (default: 0)")
    parser.add_argument("--model", default="", metavar="TEXT", help="only models with this in their name")
    kinds = [kind.__name__ for kind in damage.DAMAGES]
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=kinds, metavar="KIND,..", help=", ".join(kinds)
    )
    parser.add_argument("--damaged", action="store_true", help="skip intact models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all cases to a file")
    options = parser.parse_args()
    if unknown := set(options.only) - set(kinds):
        parser.error(f"unknown damage: {', '.join(sorted(unknown))}")
    began = time.perf_counter()
    cases = list(judge(options))
    if options.json:
        options.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    print(agreement(cases), f"{time.perf_counter() - began:.0f} s", sep="\n\n")
    wrong = [case for case in cases if not case.agree]
    for case in wrong:
        print(f"\n{case.name} {'whole' if case.seed is None else case.seed} ({case.architecture}): {case.damage}")
        for program, verdict in (("quantkit", case.verdict), (case.runtime, case.expected)):
            print(f"    {program}: {'loads' if verdict.loads else verdict.why[:300]}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
