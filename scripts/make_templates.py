"""Write quantkit/checkpoint/templates.json: the templates that llama.cpp b11434 adds to files of some models.

    PYTHON scripts/make_templates.py LLAMA_CPP [OUT]

LLAMA_CPP is a source tree of llama.cpp, PYTHON has torch and transformers. The prompts of decision models are Jinja
templates, which files have as tokenizer.chat_template.systemone; templates.json has that of each class. Those of Laya
and Julia contain the special tokens of the checkpoint's tokenizer: [CLS], [SEP] and [MASK] stand for them. The chat
templates of Mistral's tokenizers, by version, are those of models/templates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "quantkit/checkpoint/templates.json"
#: Name -> module and class of the reference.
CLASSES = {
    "openjev": ("qwen", "OpenJevModel"),
    "clef": ("clef", "ClefModel"),
    "lev": ("lev", "LevModel"),
    "kev": ("lev", "KevModel"),
    "nimble": ("lev", "NimbleModel"),
    "laya": ("bert", "ModernBertDecisionModel"),
    "julia": ("bert", "ModernBertDecisionModel"),
}
#: Name -> file in models/templates.
FILES = {
    "mistral-v11": "Mistral-Small-3.2-24B-Instruct-2506.jinja",
    "mistral-v13": "unsloth-mistral-Devstral-Small-2507.jinja",
}


def template_of(name: str) -> str:
    """Return the template of a class."""
    module, cls = CLASSES[name]
    model: Any = object.__new__(getattr(import_module(f"conversion.{module}"), cls))
    with tempfile.TemporaryDirectory() as folder:
        tokens = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("cls", "sep", "mask")}
        path = Path(folder, "tokenizer", "tokenizer_config.json")
        path.parent.mkdir()
        path.write_text(json.dumps(tokens))
        model.dir_model = Path(folder)
        model.hparams = {"decision": {"architecture": "JuliaDecisionModel"} if name == "julia" else {}}
        template: str = model._systemone_template()
    return template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("out", type=Path, nargs="?", default=TARGET, metavar="OUT")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.tree), str(arguments.tree / "gguf-py")]
    templates = {name: template_of(name) for name in CLASSES}
    for name, file in FILES.items():
        templates[name] = (arguments.tree / "models/templates" / file).read_text(encoding="utf-8")
    arguments.out.write_text(json.dumps(templates, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
