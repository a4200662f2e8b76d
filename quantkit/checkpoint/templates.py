"""Templates that llama.cpp's converter adds to files of some models: templates.json, by scripts/make_templates.py."""

from __future__ import annotations

import json
from pathlib import Path

#: Name -> Jinja template: the prompts of decision models, and chat templates by the version of Mistral's tokenizer.
TEMPLATES: dict[str, str] = json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))
