"""Enter which modules of transformers' classes have biases, and by which switch of config.json: tests/data/biases.json.

    PYTHON scripts/record_biases.py DIR [DIR ...]

Each DIR holds the unpacked wheel of a version of transformers (4.57.6, then 5.18.0): ``pip download --no-deps``, unzip.
Nothing of it is run: what a class makes is read from its source. Of the exported classes each is looked for in the
first version that has it; of those that none has there is no entry. The file is evidence for
quantkit/checkpoint/export/biases.py, which tests/verbs/test_export.py compares with it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from quantkit.checkpoint.registry import CLASSES  # noqa: E402

OUTPUT = ROOT / "tests" / "data" / "biases.json"
#: Parts of models that no file of a text model holds.
_OTHER_CLASSES = re.compile(
    r"Vision|Audio|Image|Video|Projector|Merger|QuestionAnswering|MultipleChoice|TokenClassification"
)


def main() -> None:
    sources = [
        path.read_text() for root in sys.argv[1:] for path in sorted(Path(root).glob("**/models/*/modeling_*.py"))
    ]
    classes = {}
    for name in CLASSES:
        source = next((text for text in sources if f"\nclass {name}(" in text), None)
        if source is not None:
            classes[name] = biases(source)
    OUTPUT.write_text(json.dumps(classes, indent=1, sort_keys=True) + "\n")


def biases(source: str) -> dict[str, list[str]]:
    """Return switches and the modules that have a bias by each; "" for those that always have one."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    modules_by_switch: dict[str, set[str]] = {}
    for name, node in classes.items():
        for module, switch in _modules(node, classes) if not _OTHER_CLASSES.search(name) else ():
            modules_by_switch.setdefault(switch, set()).add(module)
    return {switch: sorted(modules) for switch, modules in modules_by_switch.items()}


def _modules(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    assigned = [
        (statement.targets[0].attr, statement.value)
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
    ]
    values = {f"self.{name}": ast.unparse(value) for name, value in assigned}
    without = {name for name, value in _nulled(node)}
    for name, value in assigned:
        for call in ast.walk(value):
            if isinstance(call, ast.Call) and name not in without and (switch := _switch(call, classes)) is not None:
                yield name, re.sub(r"^(self\.)?config\.", "", values.get(switch, switch))


def _nulled(node: ast.ClassDef) -> Iterator[tuple[str, None]]:
    """Yield modules whose bias is taken away: self.norm.bias = None."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and re.fullmatch(
            r"self\.\w+\.bias", target := ast.unparse(statement.targets[0])
        ):
            yield target.split(".")[1], None


def _switch(call: ast.Call, classes: dict[str, ast.ClassDef]) -> str | None:
    """Return the expression that gives the module of a call a bias, "" for always, None for never."""
    name = ast.unparse(call.func).rpartition(".")[2]
    keyword_value = next((ast.unparse(k.value) for k in call.keywords if k.arg == "bias"), None)
    if name.endswith("Linear") and keyword_value is None and len(call.args) > 2:
        keyword_value = ast.unparse(call.args[2])
    may_have_bias = (
        name in ("Linear", "Conv1d", "Conv1D", "LayerNorm") or name in classes and _defines_bias(classes[name])
    )
    if not may_have_bias or keyword_value == "False":
        return None
    return "" if keyword_value in (None, "True") else keyword_value


def _defines_bias(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    match = re.search(r"self\.bias = nn\.Parameter", ast.unparse(node)) is not None
    return match or bool(bases & {"Linear", "LayerNorm"})


if __name__ == "__main__":
    main()
