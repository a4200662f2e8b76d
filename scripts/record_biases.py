"""Write quantkit/checkpoint/export/biases.json: the modules of transformers' classes that have biases, by switch.

    PYTHON scripts/record_biases.py DIR [DIR ...]

Each DIR holds the unpacked wheel of a version of transformers (4.57.6, then 5.18.0): ``pip download --no-deps``, unzip.
The code is not run: the modules of a class are read from its source. Each exported class is read from the first version
that has it; classes that no version has get no entry. An entry has, by switch of config.json, the names of the modules
that have a bias if it is true, and by "" those that always have one.
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

OUTPUT = ROOT / "quantkit/checkpoint/export/biases.json"
#: Classes with code of their own that use another class's layers.
ALIASES = {
    "LlamaBidirectionalModel": "LlamaForCausalLM",
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "MuseGlimmerForConditionalGeneration": "MuseGlimmerTextModel",
}
#: Classes whose tensors are named differently in checkpoints than in transformers.
OTHER_NAMES = {"DeepseekV4ForCausalLM", "NomicBertModel"}
#: Parts of models that files of text models omit.
_OTHER_CLASSES = re.compile(
    r"Vision|Audio|Image|Video|Projector|Merger|QuestionAnswering|MultipleChoice|TokenClassification"
)
#: Modules named in the code of a class that never have a bias in its text model: cross attention, heads used only by
#: _init_weights, and modules created with bias=False.
ABSENT: dict[str, set[str]] = {
    **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCodeForCausalLM"), {"ln_cross_attn", "q_attn"}),
    **dict.fromkeys(
        ("Exaone4_5_ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        {"down_proj", "gate_proj", "up_proj"},
    ),
    **dict.fromkeys(
        ("T5ForConditionalGeneration", "T5EncoderModel", "UMT5ForConditionalGeneration"), {"dense", "out_proj"}
    ),
    **dict.fromkeys(
        ("RobertaModel", "XLMRobertaModel", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
        {"layer_norm"},
    ),
    "Llama4ForCausalLM": {"router"},
    "ModernBertForSequenceClassification": {"decoder"},
    "ModernBertModel": {"classifier", "decoder", "dense"},
    "StableLmForCausalLM": {"norms"},
    "Step3p7ForConditionalGeneration": {"multi_modal_projector"},
}


def main() -> None:
    sources = [
        path.read_text() for root in sys.argv[1:] for path in sorted(Path(root).glob("**/models/*/modeling_*.py"))
    ]
    lines = []
    for name in sorted(CLASSES.keys() - OTHER_NAMES):
        class_name = ALIASES.get(name, name)
        source = next((text for text in sources if f"\nclass {class_name}(" in text), None)
        if source is not None:
            lines.append(f"{json.dumps(name)}: {json.dumps(biases(source, class_name))}")
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def biases(source: str, class_name: str) -> dict[str, str]:
    """Return the switches of a class, and of the classes that it uses, with the modules that have a bias by each."""
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    modules_by_switch: dict[str, set[str]] = {}
    for name in _parts(tree, class_name):
        if not _OTHER_CLASSES.search(name):
            for module, switch in _modules(classes[name], classes):
                modules_by_switch.setdefault(switch, set()).add(module)
    present = {switch: modules - ABSENT.get(class_name, set()) for switch, modules in modules_by_switch.items()}
    return {switch: " ".join(sorted(modules)) for switch, modules in sorted(present.items()) if modules}


def _parts(tree: ast.Module, class_name: str) -> set[str]:
    """Return the classes that a class refers to, including its bases, recursively."""
    nodes: dict[str, ast.AST] = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    classes = set(nodes)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            nodes[node.targets[0].id] = node.value
    parts: set[str] = set()
    waiting = [class_name]
    while waiting:
        name = waiting.pop()
        if name not in parts:
            parts.add(name)
            waiting += [n.id for n in ast.walk(nodes[name]) if isinstance(n, ast.Name) and n.id in nodes]
    return parts & classes


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
    """Yield modules whose bias is removed: self.norm.bias = None."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and re.fullmatch(
            r"self\.\w+\.bias", target := ast.unparse(statement.targets[0])
        ):
            yield target.split(".")[1], None


def _switch(call: ast.Call, classes: dict[str, ast.ClassDef]) -> str | None:
    """Return the expression that decides whether the module of a call has a bias: "" for always, None for never."""
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
